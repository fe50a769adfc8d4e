"""RetroInfer: each step equals its definition, computed from the raw keys and values in fp64."""
from itertools import pairwise

import pytest
import torch
from definition import check_steps, tensors
from hypothesis import given
from hypothesis import strategies as st
from layer import Layer

from torchsparsekv.method import make_method
from torchsparsekv.ops.clusters import _kmeans
from torchsparsekv.ops.store.rows import keys_of
from torchsparsekv.ops.store.views import Attention

SMALL = dict(budget=12, sink=3, window=5, cluster_size=4, stretch=32, every=12, new_clusters=3, rounds=3)


def clusters_of(s, b: int, h: int, k: torch.Tensor) -> list[list[int]]:
    """The tokens of each cluster of a head, told by their keys [tokens, dim]."""
    first, count = s.units.first[b, h].tolist(), int(s.units.unit_count[b, h])
    stored = keys_of(s.store.pool[b, h, : first[count]]).double()
    token = torch.cdist(stored, k).argmin(1).tolist()
    found = [token[i:j] for i, j in pairwise(first[: count + 1])]
    assert sorted(t for c in found for t in c) == list(range(s.lengths.sink, int(s.lengths.ring_begin[b])))
    return found


def by_definition(method):
    """The definition of a step (tests/support/definition.py)."""
    return lambda *step: estimated_attention(*step[:6], method.estimated, method.budget)


def estimated_attention(s, b: int, q, k, v, a: Attention, share: float, budget: int) -> torch.Tensor:
    """One row of a step: q [query heads, dim], and k and v [kv heads, tokens, dim] of all its tokens."""
    q, k, v = q.double(), k.double(), v.double()
    n, each, out = k.shape[1], q.shape[0] // k.shape[0], torch.empty_like(q)
    for h in range(k.shape[0]):
        clusters, mine = clusters_of(s, b, h, k[h]), q[h * each : (h + 1) * each]
        keys, values = ([x[h, c].mean(0) for c in clusters] for x in (k, v))
        attended = [*range(min(s.lengths.sink, n)), *range(int(s.lengths.ring_begin[b]), n)]
        rows, add, room = [(k[h, i], v[h, i]) for i in attended], [0.0] * len(attended), budget
        if clusters:
            weight = (mine @ torch.stack(keys).T * a.scale).softmax(1).sum(0)
            left = int(len(clusters) * share + 0.5)
            for c in weight.argsort(descending=True).tolist():
                taken, rest = clusters[c][:room], clusters[c][room:]
                room -= len(taken)
                rows += [(k[h, i], v[h, i]) for i in taken]
                add += [0.0] * len(taken)
                if rest and left:
                    left -= 1
                    rows.append((keys[c], values[c]))
                    add.append(float(torch.tensor(float(len(rest))).log()))
        z = mine @ torch.stack([r[0] for r in rows]).T * a.scale
        z = (torch.tanh(z / a.softcap) * a.softcap if a.softcap else z) + torch.tensor(add).double()
        out[h * each : (h + 1) * each] = z.softmax(1) @ torch.stack([r[1] for r in rows])
    return out


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_step_equals_definition_from_raw_keys_and_values(kind):
    """A prompt, generated tokens that become clusters, a second turn, and more steps."""
    steps = (14, 2) if kind == "triton" else (30, 20)
    sizes = [70, *[1] * steps[0], 13, *[1] * steps[1]]
    method = make_method("retroinfer", **SMALL)
    assert check_steps(method, sizes, by_definition(method), kind=kind) == sum(steps)


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_softcap_acts_on_means_and_ragged_rows_equal_definition(kind):
    """Rows of 60, 41 and 9 tokens: the last one has nothing outside its ring."""
    steps = 2 if kind == "triton" else 14
    method = make_method("retroinfer", **SMALL, estimated=0.5)
    sizes = [60, *[1] * steps]
    told = dict(attention=Attention(0.25, 3.0), pads=(0, 19, 51), kind=kind)
    assert check_steps(method, sizes, by_definition(method), **told) == 3 * steps


@given(
    prompt=st.integers(2, 90), steps=st.integers(1, 14), share=st.sampled_from([0.0, 0.1, 0.232, 0.5, 1.0]),
    budget=st.integers(4, 60), pad=st.integers(0, 40), seed=st.integers(0, 99),
)  # fmt: skip
def test_any_share_and_budget_equal_definition(prompt, steps, share, budget, pad, seed):
    method = make_method("retroinfer", **SMALL | dict(budget=budget), estimated=share)
    sizes = [prompt, *[1] * steps]
    check_steps(method, sizes, by_definition(method), pads=(min(pad, prompt - 1), 0), seed=seed)


def test_error_against_dense_attention_falls_as_more_is_estimated():
    """With nothing, the default share, and everything estimated."""
    q, k, v = tensors(400, seed=3)
    z = (q[0, :, -1:].double() @ k[0].repeat_interleave(2, 0).double().transpose(1, 2)) / 4
    dense = (z.softmax(-1) @ v[0].repeat_interleave(2, 0).double())[:, 0]
    errors = []
    for share in (0.0, 0.232, 1.0):
        layer = Layer(make_method("retroinfer", **SMALL, estimated=share), group=2, rows=512)
        errors.append(float((layer.feed_parts(q, k, v, [399, 1])[-1][0, :, 0].cpu().double() - dense).norm()))
    assert errors[0] > 1.2 * errors[1] > 1.4 * errors[2]


def test_keys_are_clustered_by_cosine_without_their_mean():
    """The clusters of a prompt and of generated tokens are those of k-means over keys that were centred before."""
    _, k, v = tensors(83, seed=5)
    method = make_method("retroinfer", **SMALL | dict(cluster_size=4))
    layer = Layer(method, group=1)
    layer.feed_parts(k, k, v, [66, *[1] * 17])
    for h in range(2):
        found = clusters_of(layer.state, 0, h, k[0, h].double())
        want, plain = [], []
        for begin, end, stretches in ((3, 51, (3, 35, 51)), (51, 75, (51, 63, 75))):
            keys = k[0, h, begin:end]
            for i, j in pairwise(stretches):
                centre = keys.mean(0) if end == 51 else k[0, h, i:j].mean(0)
                draws = min(_kmeans.DRAWS, 32 // 4) if end == 51 else 1
                for into, x in ((want, k[0, h, i:j] - centre), (plain, k[0, h, i:j])):
                    _, cluster = _kmeans.kmeans(x[None], (j - i) // 4, draws, 3, 0, True)
                    into += [(i + (cluster[0] == c).nonzero()[:, 0]).tolist() for c in range((j - i) // 4)]
        assert found == want != plain


def test_retroinfer_centres_prompts_and_generated_tokens_and_clusterkv_neither():
    for name, centred in (("retroinfer", True), ("clusterkv", False)):
        method = make_method(name)
        assert method.kmeans.centred is method.new_kmeans.centred is centred


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (dict(estimated=1.5), "estimated must be a share from 0 to 1, got 1.5"),
        (dict(estimated=-0.1), "estimated must be a share from 0 to 1, got -0.1"),
        (dict(estimated=True), "estimated must be a share from 0 to 1, got True"),
        (dict(estimated="all"), "estimated must be a share from 0 to 1, got 'all'"),
        (dict(prefetch_async=0.9), "prefetch_async is for methods that select at every step"),
        (dict(estimate_rest=True), "estimate_rest cannot be True: this method estimates the rest by the means"),
        (dict(every=1000), "every must be a multiple of new_clusters 64, got 1000"),
    ],
)
def test_values_outside_the_paper_are_refused(given, said):
    with pytest.raises(ValueError, match=said):
        make_method("retroinfer", **given)
