"""Recall of the page methods by the storage type of their digests, at small sizes."""
import json
import shlex
import sys
from types import SimpleNamespace

import pytest
import torch

from torchsparsekv_benchmarks.quality import recall_digests
from torchsparsekv_benchmarks.quality._recall import Stream
from torchsparsekv_benchmarks.quality.recall_digests import PAGE_METHODS, Paged, exact, measure


def options(**changes) -> SimpleNamespace:
    return SimpleNamespace(**{"dtype": torch.float32, "device": "cpu", "budget": 64, "block_size": 8} | changes)


def test_pages_by_brute_force():
    stream = Stream(64, 64, heads=2, group=3, d=32)
    q = stream.query(64)
    most, mass = exact(stream, q, 40, 8)
    assert most.shape == mass.shape == (2, 5)
    for h in range(2):
        logits = torch.stack([q[3 * h + g] @ stream.keys[h, :40].T for g in range(3)]) * 32**-0.5
        weight = logits.softmax(-1)
        for page in range(5):
            at = slice(8 * page, 8 * page + 8)
            assert most[h, page] == pytest.approx(float(logits[:, at].max()), rel=1e-4)
            assert mass[h, page] == pytest.approx(float(weight[:, at].sum() / 3), rel=1e-4)


@pytest.mark.parametrize("name", PAGE_METHODS)
def test_digests_that_say_all_recall_all(name):
    """A page of one token in float32 is its key."""
    stream = Stream(512, 512, heads=2, group=2, d=32)
    means = measure(stream, 4, {(name, "float32"): Paged(name, "float32", stream, options(block_size=1))})
    recall, mass, best = means[name, "float32"].tolist()
    assert recall == pytest.approx(1)
    assert 0 < mass <= best + 1e-6 < 1


def test_a_stream_is_taken_in_whole_whatever_the_chunks(monkeypatch):
    stream = Stream(300, 300, heads=2, group=2, d=32)
    whole = Paged("quest", "float8", stream, options())
    monkeypatch.setattr(recall_digests, "CHUNK", 48)
    parts = Paged("quest", "float8", stream, options())
    assert int(whole.lengths.view.ring_begin[0]) == int(parts.lengths.view.ring_begin[0]) == 288
    q = stream.query(300)
    assert torch.equal(whole.choose(q), parts.choose(q))


def test_the_command_measures_every_digest_on_the_same_queries(monkeypatch, tmp_path):
    out = tmp_path / "digests.json"
    words = "--contexts 2048 4096 --offsets 8 100 --queries 6 --heads 2 --budget 256 --block-size 16 --out"
    monkeypatch.setattr(sys, "argv", [recall_digests.__file__, *shlex.split(words), str(out)])
    recall_digests.main()
    result = json.loads(out.read_text())
    assert (result["benchmark"], result["options"]["dtype"]) == ("digests", "torch.bfloat16")
    assert result["command"].startswith("python benchmarks/quality/recall_digests.py --contexts")
    at = {(r["offset"], r["context"], r["method"], r["digest"]): r for r in result["rows"]}
    assert len(at) == len(result["rows"]) == 2 * 2 * 2 * 2
    for (offset, context, method, digest), r in at.items():
        wide = at[offset, context, method, "bfloat16"]
        assert r["best"] == wide["best"], "the same queries"
        assert 16 / (context / 16) < r["recall"] <= 1, "better than by chance"
        assert r["mass"] <= r["best"]
        assert r["recall"] == pytest.approx(wide["recall"], abs=0.06)
        assert (r["recall"], r["mass"]) != (wide["recall"], wide["mass"]) or digest == "bfloat16"
