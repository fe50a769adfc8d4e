"""What a hot buffer of some size finds, and what guesses would, as benchmarks/quality/misses.py counts them."""
import argparse
import dataclasses
import json
import statistics

import pytest
import torch
from models import tiny
from test_cli import ROOT
from test_results import QUALITY, rows_of, tables
from test_static_mass import some

from torchsparsekv_benchmarks.quality.heads import heads_of
from torchsparsekv_benchmarks.quality.misses import BELOW, RUNNERS_UP, Guessing, measured

O = argparse.Namespace(method="oracle", prompt=60, steps=50, settle=0, sink=4, window=8)
BUDGET = 8


def told(heads, hot_budgets, guess=None):
    return measured(heads, O, BUDGET, hot_budgets, guess)


def test_a_buffer_with_room_for_all_misses_what_is_chosen_for_the_first_time():
    heads = some()
    fed = Guessing("oracle", heads, None, budget=BUDGET, hot_budgets=99, sink=4, window=8)
    fed.take(O.prompt)
    choices = [fed.take(1).ids for _ in range(O.steps)]
    seen = {(i, h): set() for i in range(2) for h in range(2)}
    for ids in choices:
        for (i, h), known in seen.items():
            known |= set(ids[i, h].tolist())
    first = sum(len(x - {-1}) for x in seen.values())
    selected = sum(int((ids >= 0).sum()) for ids in choices)
    share = first / selected
    found = told(heads, 99)
    assert found["hits"] == round(1 - share, 4)
    assert found["fetched"] == round(share, 4)


def test_a_larger_one_finds_more():
    hits = [told(some(), size)["hits"] for size in (1, 2, 4)]
    assert 0 < hits[0] < hits[1] < hits[2] < 1


def test_a_guess_that_is_always_right_leaves_nothing_to_miss():
    heads = some()
    right = told(dataclasses.replace(heads, below=heads.queries), 2, BELOW)
    assert right["hits"] == 1
    assert right["fetched"] == told(heads, 2)["fetched"]


def test_a_guess_that_is_never_right_costs_the_link_twice():
    heads = some()
    wrong = told(dataclasses.replace(heads, below=-heads.queries), 2, BELOW)
    plain = told(heads, 2)
    assert wrong["hits"] < plain["hits"]
    assert wrong["fetched"] > 1.5 * plain["fetched"]


def test_runners_up_are_fetched_behind_what_was_chosen():
    plain, more = told(some(), 2), told(some(), 2, RUNNERS_UP)
    assert more["fetched"] > plain["fetched"]
    assert more["guess"] == RUNNERS_UP


@torch.no_grad()
def test_the_query_that_the_layer_below_gives():
    model = tiny().eval().cpu()
    ids = torch.randint(0, model.config.vocab_size, (40,), generator=torch.Generator().manual_seed(0))
    heads, plain = heads_of(model, ids, [1], below=True), heads_of(model, ids, [1])
    assert torch.equal(heads.queries, plain.queries)
    assert plain.below is None
    layer, first = model.model.layers[1], model.model.layers[0]
    given = model.model.embed_tokens(ids[None])
    # Without its attention and its MLP the first layer hands on what it was given: then there is nothing to guess.
    for part in (first.self_attn.o_proj, first.mlp.down_proj):
        part.weight.zero_()
    torch.testing.assert_close(heads.below, heads_of(model, ids, [1]).queries)
    q = layer.self_attn.q_proj(layer.input_layernorm(given))[0, 0].unflatten(0, (-1, heads.queries.shape[-1]))
    torch.testing.assert_close(heads.below[0, :, 0], q, msg="at position 0 nothing is rotated")


def test_the_first_layer_has_none_below():
    with pytest.raises(ValueError, match="no layer below the first one"):
        heads_of(tiny().cpu(), torch.arange(8), [0], below=True)


def test_the_tables_are_those_of_the_files():
    found = []
    for method in ("quest", "arkvale"):
        rows = rows_of(f"quality/hot/misses_{method}.json")
        for budget in (64, 256, 1024):
            mine = [r for r in rows if r["budget"] == budget]
            assert [(r["hot_budgets"], r.get("guess")) for r in mine] == [
                (1, None), (2, None), (4, None), (8, None), (2, RUNNERS_UP), (2, BELOW),
            ]  # fmt: skip
            found.append([method, str(budget), *(f"{r['hits']:.2f} ({r['fetched']:.2f})" for r in mine)])
    assert found in tables(ROOT / "docs/results.md")


def test_the_same_is_read_through_a_larger_one():
    read = {}
    for size in (2, 4):
        for line in (QUALITY / f"hot/text_8192_hot{size}.jsonl").read_text().splitlines():
            r = json.loads(line)
            if r.get("hit_rate") is not None:
                read.setdefault((r["method"], r["budget"]), {}).setdefault(size, []).append(r)
    kl = {at: {size: [r["kl"] for r in rows] for size, rows in by.items()} for at, by in read.items()}
    assert all(by[2] == by[4] for by in kl.values())
    mean = lambda rows: f"{statistics.fmean(r['hit_rate'] for r in rows):.3f}"  # noqa: E731
    found = [[method, str(budget), mean(by[2]), mean(by[4])] for (method, budget), by in read.items()]
    assert sorted(found) in [sorted(t) for t in tables(ROOT / "docs/results.md")]
