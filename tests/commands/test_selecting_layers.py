"""`torchsparsekv selecting-layers` finds the layers that lose least when the others reuse their selections."""
import itertools
import json
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from cli import answered, refused
from hypothesis import given
from hypothesis import strategies as st
from models import tiny
from world import DEVICE

import torchsparsekv
from torchsparsekv.method import make_method

pytest.importorskip("typer")

from torchsparsekv_benchmarks.quality import selecting_layers as module
from torchsparsekv_benchmarks.quality.heads import heads_of
from torchsparsekv_benchmarks.quality.sources import Source

LAYERS = (1, 2, 3, 4)
OPTIONS = module.Options(length=96, steps=5, budget=6, sink=3, window=4, samples=2, skip_layers=1, tasks=("words",))


@pytest.fixture(scope="module")
def source():
    def sample(task, length, index):
        g = torch.Generator().manual_seed(index)
        return SimpleNamespace(prompt=torch.randint(3, 97, (length - 8,), generator=g).tolist(), new_tokens=8)

    return Source("tiny", "made up", tiny(num_hidden_layers=5), ("words",), sample)


@pytest.fixture(scope="module")
@torch.no_grad()
def answer(source):
    return module.Answered(source.model, LAYERS, source.sample("words", 96, 7), OPTIONS)


def best_tokens(heads, layer: int, at: int, wanted: int) -> list[set[int]]:
    """Of each kv head the tokens with the most weight of any of its query heads, of those far from `at`."""
    o, weights = OPTIONS, heads.weights(at)[layer].unflatten(0, (heads.keys.shape[1], -1)).amax(1)
    far = weights[:, o.sink : at - o.window + 1]
    return [set((row.topk(wanted).indices + o.sink).tolist()) for row in far]


def looked_for(heads, layer: int, at: int, known: int) -> list[set[int]]:
    """The 16 with the largest product, whatever the query's own place, of those far from the prompt's end."""
    q, k = heads.queries[layer, :, at].unflatten(0, (heads.keys.shape[1], -1)), heads.keys[layer, :, :known]
    best = (q @ k.transpose(-1, -2)).amax(1)[:, OPTIONS.sink : known - OPTIONS.window + 1]
    return [set((row.topk(16).indices + OPTIONS.sink).tolist()) for row in best]


@torch.no_grad()
def nats(model, ids, known: int, layer: int, tokens: list[list[set[int]]]) -> float:
    """KL of the steps from `known` on, of one pass over everything, `layer` seeing `tokens` [step][kv head] and what is
    near."""

    def predicted(change=None):
        hook = change and model.model.layers[layer].self_attn.register_forward_pre_hook(change, with_kwargs=True)
        try:
            return model(ids[None], use_cache=False).logits[0, known:].log_softmax(-1)
        finally:
            if hook:
                hook.remove()

    n, heads = len(ids), model.config.num_attention_heads
    allowed = torch.ones(heads, n, n, dtype=torch.bool).tril()
    for i, by_head in enumerate(tokens):
        at = known + i
        for h in range(heads):
            own = by_head[h * len(by_head) // heads]
            seen = [t < OPTIONS.sink or t > at - OPTIONS.window or t in own for t in range(n)]
            allowed[h, at] &= torch.tensor(seen)
    mask = torch.zeros(1, heads, n, n).masked_fill(~allowed, torch.finfo(torch.float32).min).to(ids.device)
    changed = predicted(lambda m, args, kwargs: (args, kwargs | {"attention_mask": mask}))
    return float(torch.nn.functional.kl_div(changed, predicted(), log_target=True, reduction="sum"))


@torch.no_grad()
@pytest.mark.parametrize(("layer", "chooser"), [(2, 1), (4, 1), (4, 3), (3, 3)])
def test_loss_of_a_layer_equals_brute_force(source, answer, layer, chooser):
    model, known = source.model, answer.known
    ids = torch.cat([torch.tensor(source.sample("words", 96, 7).prompt[:-1], device=DEVICE), answer.given[0]])
    heads = heads_of(model, ids, range(5))
    kv = heads.keys.shape[1]
    ends = range(known - 32, known)
    mine, its = ([looked_for(heads, x, at, known) for at in ends] for x in (layer, chooser))
    shared = [[sum(len(a[h] & b[g]) for a, b in zip(mine, its)) for g in range(kv)] for h in range(kv)]
    head = [max(range(kv), key=lambda g, h=h: (shared[h][g], g == h)) for h in range(kv)]
    if layer == chooser:
        head = list(range(kv))
    chosen = [best_tokens(heads, chooser, at, OPTIONS.budget) for at in range(known, len(ids))]
    want = nats(model, ids, known, layer, [[step[g] for g in head] for step in chosen])
    assert want > 1e-7
    assert answer.changed(layer, chooser) == pytest.approx(want, rel=1e-3)


@torch.no_grad()
@pytest.mark.parametrize("layer", LAYERS)
def test_sought_tokens_belong_to_the_last_queries(source, answer, layer):
    ids = torch.tensor(source.sample("words", 96, 7).prompt[:-1], device=DEVICE)
    heads = heads_of(source.model, ids, range(5))
    want = [looked_for(heads, layer, at, len(ids)) for at in range(len(ids) - 32, len(ids))]
    found = [[set(head[i].tolist()) for head in answer.asked.sought[layer][0]] for i in range(32)]
    assert found == want


def test_defaults_are_pinned():
    """And no sample of an evaluation is among those they are found by."""
    assert module.HELD_OUT == 1000
    o = module.Options()
    assert (o.every, o.samples, o.length, o.steps) == (3, 2, 2048, 64)
    assert (o.budget, o.sink, o.window, o.skip_layers) == (64, 32, 64, 2)


@torch.no_grad()
def test_full_budget_loses_nothing(source):
    o = module.Options(**vars(OPTIONS) | {"budget": 96})
    answer = module.Answered(source.model, LAYERS, source.sample("words", 96, 7), o)
    assert max(abs(answer.changed(b, a)) for a, b in itertools.combinations(LAYERS, 2)) < 1e-9


def test_own_loss_of_a_layer_is_subtracted_and_samples_are_summed(source):
    lost = module.losses(source, LAYERS, OPTIONS)
    each = torch.zeros_like(lost)
    for i in (module.HELD_OUT, module.HELD_OUT + 1):
        with torch.no_grad():
            answer = module.Answered(source.model, LAYERS, source.sample("words", 96, i), OPTIONS)
            for x, layer in enumerate(LAYERS):
                for y in range(x):
                    each[x, y] += max(0.0, answer.changed(layer, LAYERS[y]) - answer.changed(layer, layer))
    assert (lost.triu() == 0).all()
    assert (lost.tril(-1) > 0).any()
    assert torch.allclose(lost, each)


@given(st.data())
def test_chosen_layers_lose_least_of_all_subsets(data):
    rows = data.draw(st.integers(1, 7))
    count = data.draw(st.integers(1, rows))
    number = st.integers(0, 9)
    lost = torch.tensor([[data.draw(number) if y < x else 0 for y in range(rows)] for x in range(rows)]).double()
    every = [(0, *rest) for rest in itertools.combinations(range(1, rows), count - 1)]

    def total(which):
        return sum(float(lost[x, max(y for y in which if y <= x)]) for x in range(rows))

    found = module.least(lost, count)
    assert found in every
    assert total(found) == min(map(total, every)) == module.nats(lost, found)
    told = module.rows_of([10 + x for x in range(rows)], lost, found)
    assert [r["layer"] - 10 for r in told if r["follows"] is None] == list(found)
    assert sum(r["nats"] for r in told) == total(found)


def test_layers_that_cannot_reuse_are_refused(source, monkeypatch):
    assert module.retrieving(source.model, OPTIONS) == list(LAYERS)
    with pytest.raises(ValueError, match="this model has 1"):
        module.retrieving(source.model, module.Options(**vars(OPTIONS) | {"skip_layers": 4}))
    layers = [SimpleNamespace(kv_heads=2 + i % 2, heads=8) for i in range(4)]
    plan = SimpleNamespace(methods=[make_method("icecache")] * 4, layers=layers)
    handle = nullcontext(SimpleNamespace(planned=plan))
    monkeypatch.setattr(torchsparsekv, "patch", lambda *_, **__: handle)
    with pytest.raises(NotImplementedError, match=r"query heads\) cannot share: \[\(2, 8\), \(3, 8\)\]"):
        module.retrieving(source.model, OPTIONS)


def test_patch_takes_the_file_of_the_command(tmp_path):
    """Of the recall model: its fourth layer of six needs tokens for which no head of the first two looks."""
    from torchsparsekv_benchmarks.recall_model.model import load

    out = tmp_path / "found.json"
    few = ("--tasks", "multivalue", "--length", "512", "--samples", "1", "--budget", "32")
    told = ("selecting-layers", *few, "--out", str(out))
    said = answered(*told)
    rows = json.loads(out.read_text())["rows"]
    which = tuple(r["layer"] for r in rows if r["follows"] is None)
    assert f"selecting_layers {list(which)}:" in said
    assert which == (2, 4)
    assert make_method("icecache", selecting_layers=str(out)).selecting_layers == which
    net, _ = load()
    with torchsparsekv.patch(net, "icecache", selecting_layers=str(out), max_length=512) as handle:
        assert handle.planned.anchors == {3: 2, 5: 4}
    assert "exists already" in refused(*told)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--every", "1"), "every must be at least 2, got 1"),
        (("--dtype", "int3"), "dtype must be one of auto, float32, float16, bfloat16, got 'int3'"),
        (("--tasks", "singel"), "unknown tasks singel; recall has single, "),
        (("--skip-layers", "5"), "sharing needs at least two layers that retrieve, this model has 1"),
    ],
)
def test_wrong_options_are_refused(tmp_path, args, said):
    assert f"selecting-layers: {said}" in refused("selecting-layers", *args, "--out", str(tmp_path / "x.json"))


def test_the_old_name_of_the_command_works_with_a_warning(tmp_path):
    said = refused("choosers", "--every", "1", "--out", str(tmp_path / "x.json"))
    assert "choosers is now selecting-layers" in said
    assert "selecting-layers: every must be at least 2, got 1" in said
    assert "choosers" not in answered("--help")
