"""ops/, patches/ and benchmarks/ are top-level folders; this maps them to torchsparsekv.ops and so on."""
from setuptools import find_packages, setup

MAPPED = ("ops", "patches", "benchmarks")
inside = [p for p in find_packages(include=["torchsparsekv", "torchsparsekv.*"])]
mapped = [f"torchsparsekv.{p}" for d in MAPPED for p in find_packages(include=[d, f"{d}.*"])]

setup(packages=sorted({*inside, *mapped}), package_dir={f"torchsparsekv.{d}": d for d in MAPPED})
