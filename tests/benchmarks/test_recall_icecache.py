"""The measurement of IceCache's grouping and choice: what it compares is what it says."""
import argparse
import importlib
import math

import pytest
import torch
from dci_tree import ROOT, DciTree, page_select
from models import prompts, tiny

import torchsparsekv
from torchsparsekv.ops.icecache._tree import levels_of
from torchsparsekv.ops.icecache.views import Promotion
from torchsparsekv.ops.store.rows import keys_of
from torchsparsekv_benchmarks.quality import _dci
from torchsparsekv_benchmarks.quality._recall import Stream
from torchsparsekv_benchmarks.quality.heads import recorded
from torchsparsekv_benchmarks.quality.recall_icecache import Planted, means
from torchsparsekv_benchmarks.report import tree
from torchsparsekv_benchmarks.report.load import Result

O = argparse.Namespace(r=1 / 16, levels=2, device="cpu", dtype=torch.float32, queries=3, views=[0.02, 0.5, 1.0], top=32)


def stream() -> Stream:
    return Stream(2048, 2048, heads=2, group=4, d=64)


def test_the_layout_holds_the_keys_it_says():
    s = stream()
    p = Planted(s, 64, "keys", O)
    by_row = s.keys.gather(1, p.token[..., None].expand(-1, -1, s.d))
    assert torch.equal(p.state.leaves.key[0, :, : p.end], by_row)
    assert torch.equal(p.page.gather(1, p.token), (torch.arange(p.end) // 4).expand_as(p.token))


def test_a_choice_comes_closer_to_the_exact_one_as_more_is_visited():
    rows = {(row["pages"], row["choice"], row["field_of_view"]): row for row in means([stream()], 64, O)}
    few, some, exact = (rows["tree", "keys", share] for share in (0.02, 0.5, 1.0))
    assert exact["agrees"] == exact["visited"] == exact["of_paper"] == 1.0
    assert few["visited"] < some["visited"] < 0.8
    assert all(rows["tree", "paper", share]["visited"] >= rows["tree", "keys", share]["visited"] for share in O.views)
    assert few["agrees"] < some["agrees"]
    assert some["agrees"] > 0.95
    assert exact["recall"] == rows["tree", "exact", 1.0]["recall"] == rows["tree", "paper", 1.0]["recall"]
    assert 0.8 < rows["tree", "codes", 1.0]["agrees"] < 1.0
    assert rows["token order", "exact", 1.0]["recall"] > 0


def test_the_papers_algorithms_are_those_of_the_tests():
    """Both over the same keys: parents, what a query sees, pages of nodes, pages taken in turn."""
    g, n, size, most = torch.Generator().manual_seed(0), 160, 4, 6
    keys, q = torch.randn(1, n, 16, generator=g), torch.randn(3, 16, generator=g)
    levels = levels_of(torch.arange(n), Promotion(4, 0, 3, 0))
    trees, one = _dci.DciTrees(keys, levels), DciTree()
    one.c = float(keys.norm(dim=-1).max())
    for t in range(n):
        one.add(t, keys[0, t])
        one.level[t] = int(levels[t])
        far = one.distances(t)
        one.parent[t] = min(far, key=lambda x: (far[x], x)) if far else ROOT
    assert trees.parent[0].tolist() == [one.parent[t] for t in range(n)]
    scores = (q @ keys[0].T)[None]
    seen = trees.sees(scores, 0.2, 2, 3)
    expanded = {at: max(2, math.ceil(0.2 * int((levels == at).sum()))) + 3 for at in (2, 3)}
    ranked = [one.query(x.double(), expanded) for x in q]
    assert [set(s.nonzero()[:, 0].tolist()) for s in seen[0]] == [set(r) for r in ranked]
    page = trees.pages(size)
    of_node: dict[int, list[int]] = {}
    for t in range(n):
        of_node.setdefault(int(page[0, t]), []).append(one.parent[t])
    assert all(len(set(nodes)) == 1 and len(nodes) <= size for nodes in of_node.values())
    chosen = _dci.page_select(scores.masked_fill(~seen, -torch.inf), page, most)[0]
    assert {x for x in chosen.tolist() if x >= 0} == page_select(ranked, dict(enumerate(page[0].tolist())), most)


@torch.no_grad()
def test_recorded_keys_are_those_of_the_cache():
    model, (ids, _) = tiny(num_hidden_layers=2), prompts(1, 40, ragged=False)
    found = recorded(model, ids[0], 8)
    with torchsparsekv.patch(model, "full", skip_layers=0, max_length=64) as handle:
        cache = handle.make_cache(1)
        model(ids, past_key_values=cache)
        for i, layer in cache.stored.items():
            want = keys_of(layer.state.store.pool)[0, :, :32].cpu()
            torch.testing.assert_close(found[i].keys, want)
            assert (found[i].heads, found[i].group, found[i].total, found[i].d) == (2, 2, 32, 16)
            assert found[i].query(32).shape == (4, 16)


def test_the_figure_shows_the_rows(tmp_path):
    style = pytest.importorskip("matplotlib") and importlib.import_module("torchsparsekv_benchmarks.report.style")
    rows = [{"keys": "structured", "context": 2048, "budget": 64, **r} for r in means([stream()], 64, O)]
    options = dict(keys="structured", contexts=[2048], r=1 / 16, levels=2, top=32, queries=3, dtype="torch.float32")
    source = Result(tmp_path / "x.json", "icecache", (), {}, options, rows)
    with style.styled() as plt:
        (drawn,) = tree.tree(plt, [source])
        recall, mass, agrees = drawn.figure.axes
        want = [r["recall"] for r in rows if (r["pages"], r["choice"]) == ("tree", "codes")]
        assert list(recall.lines[0].get_ydata()) == want
        assert len(recall.lines) == len(mass.lines) == 4
        assert len(agrees.lines) == 1
    assert drawn.tag == "structured 2K"
