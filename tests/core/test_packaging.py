"""The wheel holds every module of the library, and nothing else."""
import importlib.util
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from paths import ROOT

import torchsparsekv

MAPPED = ("ops", "patches", "csrc")
FOLDERS = {"torchsparsekv": "torchsparsekv", **{d: f"torchsparsekv/{d}" for d in MAPPED}}
NOT_SOURCE = (
    ".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".hypothesis", "real_model",
)  # fmt: skip


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
    assert wheel.stat().st_size < 1e6


def test_sdist_holds_every_module_and_what_building_needs(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as t:
        names = {n.split("/", 1)[1] for n in t.getnames() if "/" in n}
    inside = {n for n in names if n.split("/")[0] in FOLDERS}
    kinds = (".py", ".typed", ".cu", ".cuh")
    assert {n for n in inside if Path(n).suffix in kinds} == sources()
    assert names >= {"pyproject.toml", "setup.py", "README.md", "LICENSE"}


def test_version_is_the_same_everywhere(built):
    stated = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    versions = {stated[1]} if stated else set()
    versions |= {p.name.split("-")[1].removesuffix(".tar.gz") for p in built.iterdir()}
    assert stated
    assert versions == {torchsparsekv.__version__}


# The benchmarks are a distribution of their own; commands that need them come with the library.
IMPORT_ALL = """
import importlib, pathlib, pkgutil, sys
import torchsparsekv

class Absent:
    def find_spec(name, *_):
        if name == "torchsparsekv_benchmarks":
            raise ModuleNotFoundError(name=name)

sys.meta_path.insert(0, Absent)
target = pathlib.Path(sys.argv[1])
assert target in pathlib.Path(torchsparsekv.__file__).parents, torchsparsekv.__file__
for m in pkgutil.walk_packages(torchsparsekv.__path__, "torchsparsekv."):
    if m.name.startswith(("torchsparsekv.engines.vllm", "torchsparsekv.engines._vllm")):  # they need that engine
        continue
    try:
        importlib.import_module(m.name)
    except ModuleNotFoundError as e:
        if e.name != "torchsparsekv_benchmarks" or not m.name.startswith("torchsparsekv.commands."):
            raise
"""


def test_every_module_of_an_installed_wheel_can_be_imported(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(tmp_path)]
    subprocess.run([*install, str(wheel)], check=True)
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{IMPORT_ALL}"
    done = subprocess.run([sys.executable, "-I", "-c", program, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_environment_of_make_test_skips_no_test_for_a_package():
    """vllm and the client openai have an environment of their own. Every import of transformers imports torchao."""
    if not (Path(sys.prefix) / ".tests").exists():
        pytest.skip("`make test` did not make this environment")
    texts = [p.read_text() for p in (ROOT / "tests").rglob("test_*.py")]
    names = set(re.findall(r"""importorskip\(["'](\w+)""", "\n".join(texts)))
    assert names > {"vllm", "peft", "lm_eval", "gguf"}
    assert {name for name in names if importlib.util.find_spec(name) is None} <= {"vllm", "openai", "torchao"}
