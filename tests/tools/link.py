"""Lay the packages out as links in one folder, as an installation would have them.

    python tests/tools/link.py FOLDER

Type checkers read FOLDER, since they cannot follow the mapping of an editable install. `PYTHONPATH=FOLDER` runs a
checkout where nothing can be installed.
"""
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("ops", "patches", "csrc")


def link(folder: Path) -> None:
    package = folder / "torchsparsekv"
    shutil.rmtree(folder, ignore_errors=True)
    package.mkdir(parents=True)
    sources = [*(ROOT / "torchsparsekv").iterdir(), *(ROOT / part for part in PARTS)]
    for source in sources:
        if source.name != "__pycache__":
            (package / source.name).symlink_to(source)
    (folder / "torchsparsekv_benchmarks").symlink_to(ROOT / "benchmarks")


if __name__ == "__main__":
    link(Path(sys.argv[1]).absolute())
