"""This folder is the package torchsparsekv_benchmarks, a distribution of its own. The library's wheel lacks it."""
from setuptools import find_packages, setup

NAME = "torchsparsekv_benchmarks"
inside = [f"{NAME}.{p}" for p in find_packages(exclude=["results*"])]

setup(packages=[NAME, *inside], package_dir={NAME: "."}, package_data={f"{NAME}.recall_model": ["weights/*"]})
