"""PQCache equals the definition of its paper, written a second time as plainly as possible, from raw keys."""
import importlib
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layer import SINK, Layer, frontier, small
from past import Past, pasts
from planted import LENGTH, PLANTED, finds
from world import DEVICE

from torchsparsekv.method import make_method
from torchsparsekv.ops._machinery.chain import use_kernels
from torchsparsekv.ops.clusters._kmeans import first_draw, kmeans
from torchsparsekv.ops.pqcache.learn_codebook import KEYS
from torchsparsekv.state import Geometry

LEARN = importlib.import_module("torchsparsekv.ops.pqcache.learn_codebook")

# ---------------------------------------------------------------- the definition


def lloyd(x: torch.Tensor, count: int, rounds: int, seed: int) -> torch.Tensor:
    """Centroids of the points x [n, width]. An empty cluster takes the farthest points that are not alone."""
    centres = x[first_draw(len(x), count, seed)]
    for _ in range(rounds):
        distance = torch.cdist(x, centres)
        cluster = distance.argmin(1)
        centres = torch.stack([x[cluster == c].mean(0) if (cluster == c).any() else centres[c] for c in range(count)])
    empty = [c for c in range(count) if not (cluster == c).any()]
    first = {int((cluster == c).nonzero()[0]) for c in range(count) if c not in empty}
    far = sorted((i for i in range(len(x)) if i not in first), key=lambda i: -float(distance[i].min()))
    for c, i in zip(empty, sorted(far[: len(empty)])):
        cluster[i] = c
    return torch.stack([x[cluster == c].mean(0) for c in range(count)])


def quantized(keys: torch.Tensor, parts: list[tuple[int, int, bool]], method) -> torch.Tensor:
    """What the codes of the keys [tokens, dim] of a row stand for. Its tokens come in parts: (before, after, whether
    the part is a prompt)."""
    out, count = torch.full_like(keys, torch.nan), 1 << method.bits
    for s, width in enumerate(keys.split(keys.shape[1] // method.m, 1)):
        mine, centres, learned = out[:, s * width.shape[1] : (s + 1) * width.shape[1]], [], False
        for before, after, prompt in parts:
            first = frontier(before, block=1)
            if prompt and after > before:
                first, learned = SINK, after - SINK >= count
                centres = [*lloyd(width[SINK:after], count, method.rounds, method.seed)] if learned else []
            for i in range(first, frontier(after, block=1)):
                if not learned and i < SINK + count:
                    centres.append(width[i])
                mine[i] = min(centres, key=lambda c: float((c - width[i]).norm()))
    return out


def parts_of(past: Past, b: int) -> list[tuple[int, int, bool]]:
    pad, at, out = (past.pad, 0)[b], 0, []
    for size in past.sizes:
        out.append((max(0, at - pad), max(0, at + size - pad), size > 1))
        at += size
    return out


def check_choice(chosen: torch.Tensor, scores: dict[int, float], budget: int):
    ids = chosen[chosen >= 0].tolist()
    assert ids == sorted(set(ids))
    assert len(ids) == min(budget, len(scores))
    assert set(ids) <= set(scores)
    left = [scores[i] for i in scores if i not in ids]
    if left:
        assert min(scores[i] for i in ids) >= max(left) * (1 - 1e-3)


HYPER = dict(m=2, bits=3, rounds=3)


@given(past=pasts(), budget=st.integers(1, 20), bits=st.sampled_from([2, 4]), m=st.sampled_from([1, 2, 4]))
def test_choice_equals_the_definition_of_the_paper(past, budget, bits, m):
    """Softmax of the products with quantized keys, summed over the query heads of a kv head."""
    method = small("pqcache", budget=budget, bits=bits, m=m, rounds=3)
    chosen = past.fill(method).choose(past.query)
    for b, h, keys, queries in past.heads_of_rows():
        end = frontier(len(keys), block=1)
        likely = quantized(keys, parts_of(past, b), method)[SINK:end]
        weight = torch.softmax(queries @ likely.T * past.dim**-0.5, -1).sum(0).tolist() if end > SINK else []
        check_choice(chosen[b, h], {SINK + i: w for i, w in enumerate(weight)}, budget)


def test_heads_of_a_group_choose_by_the_sum_of_their_softmaxes():
    """One head's sure token beats a token that all heads like a little; a sum of logits would choose the other."""
    layer = Layer(small("pqcache", budget=1, bits=2, m=1), heads=1, group=4, dim=16)
    k = torch.zeros(1, 1, 30, 16)
    k[0, 0, SINK + 1, 0], k[0, 0, SINK + 2, 1] = 40.0, 40.0
    q = torch.zeros(1, 4, 30, 16)
    layer.feed_parts(q, k, torch.zeros_like(k), [1] * 30)
    query = torch.zeros(1, 4, 1, 16)
    query[0, 0, 0, 0], query[0, 1:, 0, 1], query[0, 1:, 0, 0] = 0.5, 0.15, -0.4
    assert layer.choose(query).flatten().tolist() == [SINK + 1]
    query[0, 0, 0, 0] = 0.1
    assert layer.choose(query).flatten().tolist() == [SINK + 2]


def test_a_full_set_of_centroids_quantizes_nothing():
    """With a centroid for each key the choice is that of the exact products."""
    past = Past(60, 3, 2, [40, *[1] * 20], 4, False)
    chosen = past.fill(small("pqcache", budget=6, m=1, bits=8)).choose(past.query)
    for b, h, keys, queries in past.heads_of_rows():
        end = frontier(len(keys), block=1)
        weight = torch.softmax(queries @ keys[SINK:end].T * past.dim**-0.5, -1).sum(0)
        want = (weight.topk(6).indices + SINK).sort().values
        assert torch.equal(chosen[b, h].long(), want)


# ---------------------------------------------------------------- the codebook


def codes_of(layer: Layer) -> torch.Tensor:
    s = layer.state
    return s.codebook.codes[0, :, SINK : int(s.lengths.ring_begin[0])]


def test_second_turn_and_chunks_learn_what_one_prompt_learns():
    """Every prompt learns from all keys of the row: prompts, answers and chunks before it included."""
    past, books = Past(90, 0, 1, [90], 7, False), []
    for sizes in ([90], [50, *[1] * 10, 30], [20, 20, 50], [*[1] * 60, 30]):
        past.sizes = sizes
        layer = past.fill(small("pqcache", **HYPER))
        books.append((layer.state.codebook, layer.choose(past.query)))
    for book, chosen in books[1:]:
        for got, want in zip((*book, chosen), (*books[0][0], books[0][1])):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_keys_in_the_ring_are_learned_from(kind):
    """As in the paper: only the first tokens are left out."""
    past = Past(40, 0, 1, [40], 3, False)
    with use_kernels(kind):
        before = past.fill(small("pqcache", **HYPER)).state.codebook.centroids
        past.k[:, :, -1] += 5
        after = past.fill(small("pqcache", **HYPER)).state.codebook.centroids
        past.k[:, :, SINK - 1] += 5
        same = past.fill(small("pqcache", **HYPER)).state.codebook.centroids
    assert not torch.equal(before, after)
    assert torch.equal(after, same)


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_long_prompt_learns_from_keys_at_equal_distances(kind):
    """KEYS per centroid at most. Every other key of this prompt is far away, and none of these is seen."""
    n, g = 2 * (2 * KEYS), torch.Generator().manual_seed(0)
    k = torch.randn(1, 1, SINK + n, 16, generator=g)
    k[:, :, SINK + 1 :: 2] += 50.0
    layer = Layer(small("pqcache", m=1, bits=1, rounds=2), heads=1, rows=SINK + n, device=torch.device("cpu"))
    with use_kernels(kind):
        layer.row_lengths.advance(SINK + n)
        layer.method.ingest(layer.state, k, k, k, layer.attention, join=True)
    seen = k[:, :, SINK::2]
    assert seen.shape[2] == 2 * KEYS
    assert float(layer.state.codebook.centroids.abs().max()) < 5
    want = kmeans(seen[0], 2, 1, 2, 0)[0]
    torch.testing.assert_close(layer.state.codebook.centroids[0, 0], want, rtol=1e-4, atol=1e-5)


def test_first_keys_of_a_cache_without_a_prompt_are_its_centroids():
    past = Past(SINK + 6 + 5, 0, 1, [1] * (SINK + 6 + 5), 2, False)
    layer = past.fill(small("pqcache", **HYPER))
    book = layer.state.codebook
    assert book.learned.tolist() == [0, 0]
    assert codes_of(layer)[0].tolist() == [[i, i] for i in range(5)]
    want = past.k[:, :, SINK : SINK + 5].unflatten(-1, (2, 8)).transpose(2, 3)
    assert torch.equal(book.centroids[:, :, :, :5].cpu(), want)


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_rows_with_only_padding_in_a_chunk_learn_nothing(kind):
    """The second row has no token in the first chunk. What it learns is what it learns alone."""
    past = Past(60, 30, 1, [25, 35], 5, False)
    with use_kernels(kind):
        both = past.fill(small("pqcache", **HYPER)).state.codebook
        alone = Layer(small("pqcache", **HYPER), batch=1, device=DEVICE)
        alone.feed(past.q[:1, :, 30:], past.k[:1, :, 30:], past.v[:1, :, 30:])
    for got, want in zip(both, alone.state.codebook):
        torch.testing.assert_close(got[:1], want)


# ---------------------------------------------------------------- needles, sizes, refusals


@pytest.mark.parametrize("where", PLANTED)
def test_a_planted_key_is_found(where):
    """The longest key of all: its part of the centroids stands out."""
    assert LENGTH == 160
    assert finds(small("pqcache", budget=8, bits=6), *PLANTED[where])


def test_index_takes_two_bytes_a_token_by_default():
    book = make_method("pqcache").buffers(Geometry(2, 3, 128, 4096, torch.bfloat16))["codebook"]
    assert book.codes.nbytes == 2 * 2 * 3 * 4096
    assert book.centroids.nbytes == 2 * 3 * 64 * 128 * 2


@pytest.mark.parametrize(
    ("hyper", "says"),
    [
        (dict(m=0), "pqcache: m must be at least 1, got 0"),
        (dict(bits=0), "pqcache: bits must be from 1 to 8, got 0"),
        (dict(bits=9), "pqcache: bits must be from 1 to 8, got 9"),
        (dict(rounds=0), "pqcache: rounds must be from 1 to 100, got 0"),
        (dict(seed=-1), "pqcache: seed must be from 0 to 65535, got -1"),
    ],
)
def test_wrong_hyper_parameters_are_refused(hyper, says):
    with pytest.raises(ValueError, match=f"^{re.escape(says)}$"):
        make_method("pqcache", **hyper)


def test_parts_that_do_not_divide_the_head_are_refused():
    with pytest.raises(ValueError, match=r"^pqcache: m must divide head_dim 16, got 3$"):
        make_method("pqcache", m=3).buffers(Geometry(1, 2, 16, 128, torch.float32))


def test_rows_learned_one_after_another_get_the_codebook_of_rows_learned_together(monkeypatch):
    def codebooks(scores: int) -> list[torch.Tensor]:
        monkeypatch.setattr(LEARN, "SCORES", scores)
        past = Past(90, 19, 2, [90], 5, False)
        with use_kernels("triton"):
            codebook = past.fill(small("pqcache", **HYPER)).state.codebook
        return [x for x in codebook if isinstance(x, torch.Tensor)]

    together, alone = codebooks(1 << 25), codebooks(1)
    assert all(torch.equal(*pair) for pair in zip(together, alone, strict=True))
    assert together[0][0].unique().numel() > 9, "nothing was learned"
