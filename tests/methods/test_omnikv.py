"""Filter layers of OmniKV are dense and choose one set of tokens, which the layers behind them attend to."""
import pytest
import torch
from choice import check_choice
from hypothesis import given
from hypothesis import strategies as st
from layer import SINK, WINDOW, Layer, small
from models import MAX_LENGTH, dense_logits, greedy_logits, prompts, tiny
from past import pasts
from torch._dynamo.utils import counters

import torchsparsekv
from torchsparsekv.method import make_method
from torchsparsekv.ops.store.rows import keys_of
from torchsparsekv.probe import tapped
from torchsparsekv.state import Geometry

SIZES = dict(max_length=MAX_LENGTH, sink=SINK, window=WINDOW, skip_layers=1)
SPARSE = dict(SIZES, budget=12, filter_layers=(1, 4), wait_layers=1)


def token_scores(keys, queries, score: str, scale: float) -> dict[int, float]:
    """By the authors' code: keys [heads, tokens, dim] and queries [heads, group, dim] of one row. The largest logit of
    any query head, or the largest weight; the softmax is over the tokens that can be chosen."""
    end = max(keys.shape[1] - WINDOW, SINK)
    z = torch.cat([queries[h].double() @ keys[h, SINK:end].double().T * scale for h in range(len(keys))])
    best = z.softmax(-1) if score == "weights" else z
    return dict(zip(range(SINK, end), best.amax(0).tolist()))


# ---------------------------------------------------------------- the choice


@pytest.mark.parametrize("score", ["logits", "weights"])
@given(past=pasts(), n=st.integers(1, 40))
def test_tokens_are_chosen_over_all_heads_by_the_definition_of_the_authors(score, past, n):
    chosen = past.fill(small("omnikv", budget=n, score=score)).choose(past.query)
    rows = {}
    for b, _, keys, queries in past.heads_of_rows():
        rows.setdefault(b, []).append((keys, queries))
    for b, heads in rows.items():
        keys, queries = (torch.stack(x) for x in zip(*heads))
        scores = token_scores(keys, queries, score, past.dim**-0.5)
        for head in chosen[b]:
            assert torch.equal(head, chosen[b, 0]), "one set for all heads"
        check_choice(chosen[b, 0], scores, n, slack=1e-6)


def test_logits_and_weights_choose_different_tokens():
    """A head whose logits are all large decides by logits, and no longer by weights."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 60, 16, generator=g) for _ in range(3))
    q[:, 0] *= 5
    chosen = []
    for score in ("logits", "weights"):
        layer = Layer(small("omnikv", budget=8, score=score))
        layer.feed(q, k, v)
        chosen.append(layer.choose(q[:, :, -1:])[0, 0])
    assert not torch.equal(*chosen)


@torch.no_grad()
def test_layers_attend_to_what_the_filter_layer_before_them_chose():
    """Layers 0, 2 and 5 are dense, 1 and 4 are filters; brute force from the raw keys of the filter layer."""
    model, (ids, mask) = tiny(num_hidden_layers=8), prompts(2, 67)
    with torchsparsekv.patch(model, "omnikv", **SPARSE) as handle:
        assert handle.planned.anchors == {3: 1, 6: 4, 7: 4}
        names = [m.name for m in handle.planned.methods]
        assert names == ["full", "omnikv_filter", "full", "omnikv", "omnikv_filter", "full", "omnikv", "omnikv"]
        cache, chosen, wanted = handle.make_cache(2), [[] for _ in range(8)], {1: [], 4: []}

        def tap(i):
            def look(s, q, a, choice, out):
                if choice.ids is not None:
                    chosen[i].append(choice.ids.clone())
                if i in wanted:
                    wanted[i].append(by_hand(s, q, a))

            return look

        with tapped(cache, [tap(i) for i in range(8)]):
            greedy_logits(model, ids, mask, 12, cache)
        said = str(handle.report())
    for layer, anchor in handle.planned.anchors.items():
        for ids, rows in zip(chosen[layer], wanted[anchor], strict=True):
            for b, scores in enumerate(rows):
                for head in ids[b].cpu():
                    check_choice(head, scores, 12, slack=1e-6)
    assert not any(chosen[i] for i in (0, 1, 2, 4, 5))
    assert "layer 3: shares the selection of layer 1" in said
    assert "layer 6, 7: shares the selection of layer 4" in said


def by_hand(s, q, a) -> list[dict[int, float]]:
    rows = []
    for b, n in enumerate(s.lengths.length.tolist()):
        keys = keys_of(s.store.pool)[b, :, :n].cpu()
        rows.append(token_scores(keys, q[b, :, 0].cpu().unflatten(0, (len(keys), -1)), "logits", a.scale))
    return rows


# ---------------------------------------------------------------- which layer does what


@pytest.mark.parametrize(
    ("layers", "more", "filters", "sparse"),
    [
        (32, {}, [2, 8, 18], [*range(4, 8), *range(10, 18), *range(20, 32)]),
        (32, dict(wait_layers=0), [2, 8, 18], [*range(3, 8), *range(9, 18), *range(19, 32)]),
        (80, {}, [5, 20, 45], [*range(7, 20), *range(22, 45), *range(47, 80)]),
        (24, {}, [2, 6, 14], [4, 5, *range(8, 14), *range(16, 24)]),
        (5, {}, [2], [4]),
        (3, dict(skip_layers=1, wait_layers=0), [1], [2]),
        (8, dict(filter_layers=[3], wait_layers=2), [3], [6, 7]),
        (32, dict(filter_layers=(4, 31)), [4, 31], [*range(6, 31)]),
    ],
)
def test_filter_layers_and_the_layers_behind_them(layers, more, filters, sparse):
    with torchsparsekv.patch(tiny(num_hidden_layers=layers), "omnikv", max_length=MAX_LENGTH, **more) as handle:
        names = [m.name for m in handle.planned.methods]
    assert [i for i, n in enumerate(names) if n == "omnikv_filter"] == filters
    assert [i for i, n in enumerate(names) if n == "omnikv"] == sparse
    assert {n for n in names if "omnikv" not in n} <= {"full"}


def test_filter_layers_come_from_a_file(tmp_path):
    (path := tmp_path / "found.json").write_text(
        '{"rows": [{"layer": 2, "follows": null}, {"layer": 3, "follows": 2}, {"layer": 5, "follows": null}]}'
    )
    assert make_method("omnikv", filter_layers=str(path)).filter_layers == (2, 5)


WRONG = [
    (dict(filter_layers=(0, 4)), ValueError, r"layers that run omnikv, got \(0, 4\): layer 0 is not one of 1, 2, 3"),
    (dict(filter_layers=(1, 9)), ValueError, r"got \(1, 9\): layer 9 is not one of 1, 2, 3"),
    (dict(filter_layers=(4, 1)), ValueError, r"filter_layers must be layers in ascending order.*got \(4, 1\)"),
    (dict(filter_layers=()), ValueError, r"filter_layers must be layers in ascending order.*got \(\)"),
    (dict(filter_layers=3), ValueError, "filter_layers must be layers in ascending order.*got 3"),
    (dict(filter_layers="none.json"), ValueError, "none.json is not a file of `torchsparsekv selecting-layers`"),
    (dict(wait_layers=-1), ValueError, "omnikv: wait_layers must be at least 0, got -1"),
    (dict(wait_layers=True), TypeError, "omnikv: wait_layers must be an int, got True"),
    (dict(score="sum"), ValueError, "omnikv: score must be one of logits, weights, got 'sum'"),
    (dict(layers={5: dict(budget=8)}), ValueError, "omnikv: all its layers must have the same hyper-parameters"),
]


@pytest.mark.parametrize(("more", "error", "said"), WRONG)
def test_wrong_hyper_parameters_are_refused_before_the_model_changes(more, error, said):
    model = tiny(num_hidden_layers=8)
    with pytest.raises(error, match=said):
        torchsparsekv.patch(model, "omnikv", **{**SPARSE, **more})
    assert model.config._attn_implementation == "sdpa"


def test_layers_of_other_numbers_of_heads_cannot_share_a_choice():
    method = make_method("omnikv")
    layers = {2: (method.filter, 2, 8), 3: (method, 2, 8), 4: (method, 4, 8)}
    with pytest.raises(ValueError, match="got 4 in layer 4, and 2 in layer 2"):
        type(method).shares_selection(layers)


# ---------------------------------------------------------------- what it keeps


def test_only_filter_layers_keep_a_choice():
    method = make_method("omnikv", budget=16)
    g = Geometry(1, 2, 64, 4096, torch.bfloat16)
    alone, behind = method.buffers(g), method.buffers(Geometry(1, 2, 64, 4096, torch.bfloat16, follows=True))
    assert set(alone) - set(behind) == {"selected"}
    assert set(method.filter.buffers(g)) == {"store", "stats", "selected"}


def test_pools_of_filter_layers_stay_on_the_device():
    with torchsparsekv.patch(tiny(num_hidden_layers=8), "omnikv", **SPARSE) as handle:
        assert [i for i in range(8) if handle.planned.may_offload(i)] == [3, 6, 7]


@torch.no_grad()
@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_full_budget_is_dense_in_one_graph(backend):
    counters.clear()
    model, (ids, mask) = tiny(num_hidden_layers=5), prompts(3, 41)
    want = dense_logits(model, ids, mask, 20)
    full = {**SPARSE, "budget": MAX_LENGTH, "filter_layers": (1, 3), "wait_layers": 0}
    with torchsparsekv.patch(model, "omnikv", **full) as handle:
        cache = handle.make_cache(3)
        step = backend and torch.compile(model.forward, fullgraph=True, backend=backend)
        got = greedy_logits(model, ids, mask, 20, cache, step)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    if backend:
        assert counters["stats"]["unique_graphs"] == 1


@torch.no_grad()
def test_cropped_cache_chooses_as_a_shorter_prompt():
    model, (ids, _) = tiny(num_hidden_layers=6), prompts(1, 80, ragged=False)
    how = {**SPARSE, "filter_layers": (1,)}
    with torchsparsekv.patch(model, "omnikv", **how) as handle:
        cropped, short = handle.make_cache(1), handle.make_cache(1)
        model(ids[:, :80], past_key_values=cropped)
        cropped.crop(60)
        model(ids[:, :60], past_key_values=short)
        got, want = (model(ids[:, 60:61], past_key_values=c).logits for c in (cropped, short))
    torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)


def test_model_of_too_few_layers_is_dense_and_says_so():
    with torchsparsekv.patch(tiny(num_hidden_layers=4), "omnikv", max_length=MAX_LENGTH) as handle:
        assert "omnikv runs in no layer: all 4 layers are dense" in repr(handle)
