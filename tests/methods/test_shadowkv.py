"""ShadowKV's choice equals the definition of its paper, written a second time as plainly as possible, from raw keys."""
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer import BLOCK, SINK, Layer, frontier, small
from past import Past, pasts
from planted import LENGTH, PLANTED, finds
from world import DEVICE

from torchsparsekv.method import make_method
from torchsparsekv.ops._machinery.chain import use_kernels
from torchsparsekv.state import Geometry

# ---------------------------------------------------------------- the definition


def chunks_of(keys: torch.Tensor, end: int) -> dict[int, torch.Tensor]:
    return {p // BLOCK: keys[p : p + BLOCK] for p in range(SINK, end, BLOCK)}


def outliers_of(keys: torch.Tensor, past: Past, b: int, count: int) -> list[int]:
    """Of the chunks that had left the ring at the last prompt: those whose farthest key has the least cosine."""
    pad, at, found = (past.pad, 0)[b], 0, []
    for size in past.sizes:
        at += size
        if size > 1 and at > pad:
            least = {
                i: float(torch.nn.functional.cosine_similarity(x, x.mean(0, keepdim=True)).min())
                for i, x in chunks_of(keys, frontier(at - pad)).items()
            }
            found = sorted(least, key=lambda i: least[i])[:count]
    return found


@given(past=pasts(), n=st.integers(1, 12), count=st.integers(0, 4))
def test_choice_equals_the_definition_of_the_paper(past, n, count):
    """Outliers, and the chunks with the largest softmax of a query head over the other landmarks."""
    chosen = past.fill(small("shadowkv", budget=n * BLOCK, outliers=count)).choose(past.query)
    for b, h, keys, queries in past.heads_of_rows():
        outliers = outliers_of(keys, past, b, count)
        others = {i: x.mean(0) for i, x in chunks_of(keys, frontier(len(keys))).items() if i not in outliers}
        ids = chosen[b, h][chosen[b, h] >= 0].tolist()
        assert ids == sorted(set(ids))
        assert set(outliers) <= set(ids) <= {*outliers, *others}
        # As many places as there are for outliers, also where a prompt marked fewer.
        assert len(ids) == min(n + count, len(outliers) + len(others))
        if others:
            z = queries @ torch.stack([*others.values()]).T * past.dim**-0.5
            score = dict(zip(others, z.softmax(-1).amax(0).tolist()))
            left = [score[i] for i in others if i not in ids]
            taken = [score[i] for i in others if i in ids]
            assert not left or not taken or min(taken) >= max(left) * (1 - 1e-4)


def test_a_head_counts_by_its_softmax_not_by_its_product():
    """A head with large products everywhere does not outvote one that wants a single chunk."""
    layer = Layer(small("shadowkv", budget=BLOCK, outliers=0), heads=1, group=2, dim=16)
    k = torch.zeros(1, 1, 60, 16)
    k[0, 0, SINK : SINK + BLOCK, 0] = 8.0
    k[0, 0, :, 1] = 40.0
    k[0, 0, SINK + BLOCK : SINK + 2 * BLOCK, 1] = 40.4
    q = torch.zeros(1, 2, 60, 16)
    layer.feed_parts(q, k, k, [60])
    query = torch.zeros(1, 2, 1, 16)
    query[0, 0, 0, 0], query[0, 1, 0, 1] = 2.0, 8.0  # 4 and 0; 80 everywhere, and 80.8
    assert layer.choose(query).flatten().tolist() == [SINK // BLOCK]


def test_outliers_are_outside_the_softmax():
    """A landmark that no longer counts does not take weight from the others."""
    past = Past(90, 0, 2, [90], 3, False)
    layer = past.fill(small("shadowkv", budget=BLOCK, outliers=1))
    outlier = layer.state.landmarks.outlier
    assert outlier.sum(-1).unique().tolist() == [1]
    ids = layer.choose(past.query)
    layer.state.landmarks.keys.masked_fill_((outlier != 0)[..., None], 100.0)
    assert torch.equal(layer.choose(past.query), ids)


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_a_chunk_with_a_key_that_points_elsewhere_is_an_outlier(kind):
    past = Past(60, 0, 1, [60], 3, False)
    past.k = torch.ones_like(past.k) + 0.1 * past.k
    past.k[:, :, 30] *= -1
    with use_kernels(kind):
        layer = past.fill(small("shadowkv", budget=BLOCK, outliers=1))
    assert layer.state.landmarks.outlier.nonzero()[:, 2].unique().tolist() == [30 // BLOCK]


def test_second_turn_and_chunks_mark_the_outliers_of_one_prompt():
    past, states = Past(90, 0, 1, [90], 7, True), []
    for sizes in ([90], [50, *[1] * 10, 30], [20, 20, 50], [*[1] * 60, 30]):
        past.sizes = sizes
        layer = past.fill(small("shadowkv", outliers=3))
        end = int(layer.state.lengths.ring_begin[0]) // BLOCK
        states.append([t[:, :, SINK // BLOCK : end] for t in layer.state.landmarks])
        assert layer.state.landmarks.outlier.sum(-1).unique().tolist() == [3]
    for state in states[1:]:
        for got, want in zip(state, states[0]):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_rows_with_only_padding_in_a_chunk_mark_nothing(kind):
    past = Past(60, 30, 1, [25, 35], 5, True)
    with use_kernels(kind):
        both = past.fill(small("shadowkv", outliers=2)).state.landmarks
        alone = Layer(small("shadowkv", outliers=2), batch=1, device=DEVICE)
        alone.feed(past.q[:1, :, 30:], past.k[:1, :, 30:], past.v[:1, :, 30:])
    for got, want in zip(both, alone.state.landmarks):
        torch.testing.assert_close(got[:1], want)


# ---------------------------------------------------------------- needles, sizes, refusals


@pytest.mark.parametrize("where", PLANTED)
def test_a_planted_key_is_found(where):
    """It stands out of the mean of its chunk; the chunk of a prompt is an outlier besides."""
    assert LENGTH == 160
    assert finds(small("shadowkv", budget=2 * BLOCK, outliers=0), *PLANTED[where])


@pytest.mark.parametrize(("budget", "chunks"), [(64, 1), (256, 6), (1024, 24), (2048, 48)])
def test_outliers_follow_the_budget(budget, chunks):
    """The authors' code has 48 beside a budget of 2048 tokens."""
    method = make_method("shadowkv", budget=budget)
    assert method.effective()["outliers"] == chunks
    assert method.dense_threshold == 256 + budget + 8 * chunks
    assert method.buffers(Geometry(1, 2, 128, 1 << 15, torch.bfloat16))["hot"].chosen.shape[2] == budget // 8 + chunks


def test_index_takes_a_key_for_each_chunk():
    found = make_method("shadowkv").buffers(Geometry(2, 3, 128, 4096, torch.bfloat16))["landmarks"]
    assert found.keys.nbytes == 2 * 3 * 4096 // 8 * 128 * 2


def test_wrong_hyper_parameters_are_refused():
    with pytest.raises(ValueError, match=f"^{re.escape('shadowkv: outliers must be at least 0, got -1')}$"):
        make_method("shadowkv", outliers=-1)
