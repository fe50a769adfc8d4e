"""Code of the README and the guide runs as pasted, links are alive, and every method has a page."""
import contextlib
import io
import re
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import prompts, tiny

import torchsparsekv
from torchsparsekv.method import all_methods
from torchsparsekv_benchmarks.recall_model import model as recall
from torchsparsekv_benchmarks.report import tables
from torchsparsekv_benchmarks.report.markdown import ROOT

OTHERS = ("CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/results/README.md")
PAGES = [*tables.pages(), *(ROOT / name for name in OTHERS)]
BLOCK = re.compile(r"```python\n(.*?)```", re.S)
COMPILED, CAPTURED = "torch.compile(model.forward", "torch.cuda.CUDAGraph()"


def blocks(wanted: str) -> list[str]:
    """Code of the docs with this in it."""
    found = [b for p in tables.pages() for b in BLOCK.findall(p.read_text()) if wanted in b]
    assert found, f"no page has {wanted}"
    return found


def test_the_example_of_the_readme_runs_as_pasted(monkeypatch, capsys):
    """With a small model in the place of a download, without a GPU, and with a tenth of the new tokens."""
    import transformers

    model, tokenizer = recall.load(dtype=torch.float32)
    known, plain = tokenizer.get_vocab(), type(tokenizer)

    class Known(plain):
        """Leaves out words that the small model does not know."""

        def __call__(self, text, *args, **how):
            return plain.__call__(self, " ".join(w for w in text.split() if w in known), *args, **how)

    tokenizer.__class__ = Known
    made = transformers.TextGenerationPipeline(model=model, tokenizer=tokenizer)
    loaded = sys.modules["transformers"]  # which is another than the first import gave
    monkeypatch.setattr(loaded, "pipeline", lambda *a, **k: made)
    text = " ".join(f"w{i % 480:03d}" for i in range(3500))
    code = BLOCK.findall((ROOT / "README.md").read_text())[0].replace("max_new_tokens=200", "max_new_tokens=20")
    names: dict = {"open": lambda path: io.StringIO(text)}
    exec(compile(code, "README.md", "exec"), names)
    said = capsys.readouterr().out
    answer = said.splitlines()[0].split()
    assert answer
    assert not {w for w in answer if w not in known}
    assert "\ntorchsparsekv: pariskv\n" in said
    assert "!!" not in said
    assert all(r.density < 0.5 for r in names["handle"].report().layers[2:])
    assert not hasattr(model, "_torchsparsekv"), "and the model is a plain one again"


def test_the_compiled_loop_runs_as_pasted(monkeypatch, capsys):
    """Without inductor, whose compilation takes long; dynamo traces the whole step all the same."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    for block in blocks(COMPILED):
        ids = prompts(1, 700, ragged=False)[0]
        names = dict(torch=torch, torchsparsekv=torchsparsekv, model=tiny(max_position_embeddings=4096), prompt=ids)
        exec(compile(block, "own-loop.md", "exec"), names)
        said = capsys.readouterr().out
        assert re.search(r"^ +2 quest +15 +\d", said, re.MULTILINE)
        assert "!!" not in said


class Stream:
    def wait_stream(self, other: "Stream") -> None:
        pass


class Replayed:
    """In the place of a CUDA graph: captured code does not run before a replay."""

    def __init__(self, names: dict):
        self.names = names

    @contextlib.contextmanager
    def captured(self, graph):
        model, names = self.names["model"], self.names
        names["model"] = lambda ids, **_: SimpleNamespace(logits=torch.zeros(*ids.shape, model.config.vocab_size))
        yield
        names["model"] = model
        names["position"].sub_(1)

    def replay(self):
        self.names["logits"].copy_(self.names["step"]())


def test_the_captured_loop_runs_as_pasted(monkeypatch):
    for block in blocks(CAPTURED):
        model, prompt = tiny(max_position_embeddings=4096), prompts(1, 700, ragged=False)[0]
        names = dict(torch=torch, model=model, prompt=prompt)
        graph = Replayed(names)
        with torchsparsekv.patch(model, "quest", budget=256, sink=32, window=64) as handle, torch.no_grad():
            want = model.generate(prompt, max_new_tokens=24, do_sample=False)[0, 700:]
            cache = handle.make_cache(batch_size=1, max_length=4096)
            token = model(prompt, past_key_values=cache).logits[:, -1:].argmax(-1)
            assert token.item() == want[0]
            names.update(cache=cache, token=token)
            stand_ins = {
                "Stream": Stream, "current_stream": Stream, "CUDAGraph": lambda graph=graph: graph,
                "stream": lambda s: contextlib.nullcontext(), "graph": graph.captured,
            }  # fmt: skip
            for name, stands_for in () if torch.cuda.is_available() else stand_ins.items():
                monkeypatch.setattr(torch.cuda, name, stands_for)
            exec(compile(block.replace("range(100)", "range(20)"), "own-loop.md", "exec"), names)
            assert names["ids"].item() == want[-1]
            assert names["position"].item() + 1 == cache.get_seq_length() == 700 + 3 + 20


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_no_link_is_dead(page: Path):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", re.sub(r"```.*?```", "", page.read_text(), flags=re.S))
    dead = [x for x in links if "://" not in x and not (page.parent / x).exists()]
    assert not dead


def test_every_method_has_a_page():
    pages = {p.stem for p in (ROOT / "docs/methods").glob("*.md")} - {"index"}
    assert pages == set(all_methods())
