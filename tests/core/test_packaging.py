"""What a user installs is what the checkout holds: nothing dropped, nothing extra."""
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import torchsparsekv

ROOT = Path(__file__).resolve().parents[2]
MAPPED = ("ops", "patches", "csrc")
FOLDERS = {"torchsparsekv": "torchsparsekv", **{d: f"torchsparsekv/{d}" for d in MAPPED}}
NOT_SOURCE = (".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis")


def sources() -> set[str]:
    """Files that belong into the wheel, named as in the checkout."""
    found = {p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")}
    found |= set((ROOT / "csrc").glob("*.cu*"))
    return {p.relative_to(ROOT).as_posix() for p in found} | {"torchsparsekv/py.typed"}


def installed_name(path: str) -> str:
    folder, rest = path.split("/", 1)
    return f"{FOLDERS[folder]}/{rest}"


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """Folder with the sdist of a copy of this checkout, and the wheel built from that sdist."""
    tmp = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT, tmp / "src", ignore=shutil.ignore_patterns(*NOT_SOURCE))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp / "dist"), str(tmp / "src")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return tmp / "dist"


def test_wheel_holds_every_module_and_nothing_else(built):
    (wheel,) = built.glob("*.whl")
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    assert names == {installed_name(p) for p in sources()}


def test_sdist_holds_every_module_and_what_building_needs(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as t:
        names = {n.split("/", 1)[1] for n in t.getnames() if "/" in n}
    inside = {n for n in names if n.split("/")[0] in FOLDERS}
    kinds = (".py", ".typed", ".cu", ".cuh")
    assert {n for n in inside if Path(n).suffix in kinds} == sources()
    assert names >= {"pyproject.toml", "setup.py", "README.md", "LICENSE"}


def test_one_version(built):
    stated = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    versions = {stated[1]} if stated else set()
    versions |= {p.name.split("-")[1].removesuffix(".tar.gz") for p in built.iterdir()}
    assert stated
    assert versions == {torchsparsekv.__version__}


IMPORT_ALL = """
import importlib, pathlib, pkgutil, torchsparsekv
target = pathlib.Path(__import__("sys").argv[1])
assert target in pathlib.Path(torchsparsekv.__file__).parents, torchsparsekv.__file__
for m in pkgutil.walk_packages(torchsparsekv.__path__, "torchsparsekv."):
    if m.name != "torchsparsekv.engines.vllm":  # it needs that engine
        importlib.import_module(m.name)
"""


def test_installed_wheel_imports(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*install, str(wheel)], check=True)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{IMPORT_ALL}"
    done = subprocess.run([sys.executable, "-I", "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
