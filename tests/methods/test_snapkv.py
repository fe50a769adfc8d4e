"""SnapKV: what it keeps of a prompt is what the paper's code keeps, written anew here from raw keys and queries; and a
step attends to that, the observation window and what was generated, and to nothing else."""
import re

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from test_methods import Layer
from world import DEVICE

from torchsparsekv.method import make_method
from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.snapkv import snap_tokens
from torchsparsekv.ops.store.rows import PACKED, as_numbers, as_stored, rows_of
from torchsparsekv.ops.store.views import Attention
from torchsparsekv.state import Geometry, LayerState

HEADS, DIM, OBSERVE, WINDOW = 2, 16, 4, 9


def official(q, k, window: int, capacity: int, kernel: int, pooling: str, scale: float, softcap: float = 0.0):
    """The paper's code for one row whose keys are repeated: q, k [query heads, tokens, dim]; which positions before the
    observation window each query head keeps, or all of them where the prompt is below its capacity."""
    tokens = q.shape[1]
    if tokens < capacity:
        return [list(range(max(tokens - window, 0))) for _ in q]
    weights = q[:, -window:].double() @ k.double().transpose(1, 2) * scale
    if softcap:
        weights = torch.tanh(weights / softcap) * softcap
    weights[:, :, -window:] += torch.full((window, window), -torch.inf).triu(1)
    votes = weights.softmax(-1)[:, :, :-window].sum(1)
    return [sorted(chosen(v, capacity - window, kernel, pooling)) for v in votes]


def chosen(votes, most: int, kernel: int, pooling: str, sink: int = 0) -> list[int]:
    """By hand: neighbours that there are not count as zeros in a mean, and not at all in a maximum."""
    half, scores = kernel // 2, {}
    for i in range(sink, len(votes)):
        near = votes[max(0, i - half) : i + half + 1]
        scores[i] = float(near.max()) if pooling == "maxpool" else float(near.sum()) / kernel
    return sorted(sorted(scores, key=lambda i: (-scores[i], i))[:most])


class Story:
    """Random tokens of rows that begin at `pads`, of some kind of numbers, and a layer that they are fed to."""

    def __init__(self, length=110, group=1, pads=(0, 3), seed=0, dtype=torch.float32, packed=False):
        g = torch.Generator().manual_seed(seed)
        draw = lambda h: torch.randn(len(pads), h, length, DIM, generator=g).to(dtype)  # noqa: E731
        self.pads, self.group, self.dtype, self.packed = list(pads), group, dtype, packed
        self.q, self.k, self.v = 2 * draw(HEADS * group), draw(HEADS), draw(HEADS)
        self.fed = 0

    def layer(self, softcap=0.0, sink_logits=None, **hyper) -> Layer:
        method = make_method("snapkv", **{"window": WINDOW, "observe": OBSERVE, "budget": 12} | hyper)
        layer = Layer(method, batch=len(self.pads), heads=HEADS, group=self.group, dim=DIM, left_pad=self.pads)
        pool = PACKED if self.packed else None
        g = Geometry(len(self.pads), HEADS, DIM, 256, self.dtype, self.group, pool_dtype=pool)
        layer.state = LayerState(method.buffers(g), layer.row_lengths, layer.device, pool_on_host=False)
        layer.attention = Attention(DIM**-0.5, softcap, sink_logits)
        return layer

    def feed(self, layer: Layer, *sizes: int):
        for n in sizes:
            span = slice(self.fed, self.fed + n)
            out = layer.feed(*(t[:, :, span] for t in (self.q, self.k, self.v)))
            self.fed += n
        return out

    def keys(self, b: int, h: int, own: int = 0):
        """As the layer sees them: what came before the last `own` tokens is in the pool, which may be packed."""
        k = self.k[b, h, self.pads[b] : self.fed]
        if not self.packed:
            return k
        past = as_numbers(as_stored(rows_of(k, k), torch.empty(0, dtype=PACKED)), self.dtype)[:, 0]
        first = max(len(k) - own, 0)
        return torch.cat([past[:first], k[first:]])

    def wanted(self, layer: Layer, own: int = 0) -> dict:
        """By the paper, the votes of the query heads of a kv head summed: what each (row, kv head) keeps."""
        m, a, out = layer.method, layer.attention, {}
        for b, pad in enumerate(self.pads):
            for h in range(HEADS):
                k = self.keys(b, h, own).double()
                votes = torch.zeros(max(len(k) - m.observed, 0), dtype=torch.float64)
                for x in self.q[b, h * self.group : (h + 1) * self.group, pad : self.fed].double():
                    for at in range(max(len(k) - m.observed, 0), len(k)):
                        z = x[at] @ k[: at + 1].T * a.scale
                        z = torch.tanh(z / a.softcap) * a.softcap if a.softcap else z
                        votes += z.softmax(-1)[: len(votes)]
                out[b, h] = chosen(votes, m.budget, m.kernel_size, m.pooling, m.sink)
        return out


def kept(layer: Layer) -> dict:
    s = layer.state.kept
    counts = s.count.tolist()
    for b, h in ((b, h) for b in range(len(counts)) for h in range(HEADS)):
        assert (s.ids[b, h, counts[b][h] :] == -1).all()
    return {(b, h): s.ids[b, h, : counts[b][h]].tolist() for b in range(len(counts)) for h in range(HEADS)}


POOLINGS = [(1, "avgpool"), (3, "avgpool"), (5, "avgpool"), (5, "maxpool"), (7, "maxpool"), (31, "avgpool")]

# ---------------------------------------------------------------- what is kept


@pytest.mark.parametrize(("kernel", "pooling"), POOLINGS)
@given(seed=st.integers(0, 999), tokens=st.integers(2, 60), observe=st.integers(1, WINDOW), budget=st.integers(1, 30))
def test_one_query_head_a_kv_head_is_the_papers_code(kernel, pooling, seed, tokens, observe, budget):
    """No sinks: with them there is nothing to compare with. Below its capacity all of a prompt is kept."""
    story = Story(seed=seed, pads=(0,))
    layer = story.layer(observe=observe, budget=budget, kernel_size=kernel, pooling=pooling)
    story.feed(layer, tokens)
    q, k = story.q[0, :, :tokens], story.k[0, :, :tokens]
    want = official(q, k, observe, observe + budget, kernel, pooling, DIM**-0.5)
    assert kept(layer) == {(0, h): x for h, x in enumerate(want)}


def test_what_is_written_here_pools_as_torch_does():
    """The edges too: a mean there is of fewer tokens, divided by as many."""
    votes = torch.rand(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for kernel, pooling in POOLINGS:
        pool = F.max_pool1d if pooling == "maxpool" else F.avg_pool1d
        pooled = pool(votes[None], kernel_size=kernel, padding=kernel // 2, stride=1)[0]
        by_torch = pooled.sort(descending=True, stable=True).indices[:9].sort().values.tolist()
        assert chosen(votes, 9, kernel, pooling) == by_torch


@pytest.mark.parametrize(("dtype", "packed"), [(torch.float32, False), (torch.bfloat16, False), (torch.float32, True)])
@given(
    seed=st.integers(0, 999), group=st.sampled_from([1, 4]), pooling=st.sampled_from(POOLINGS),
    sizes=st.lists(st.integers(2, 25), min_size=1, max_size=4), sink=st.sampled_from([0, 3]),
    softcap=st.sampled_from([0.0, 2.0]), observe=st.sampled_from([1, 4, WINDOW]),
)  # fmt: skip
def test_ragged_chunks_turns_and_any_pool(dtype, packed, seed, group, pooling, sizes, sink, softcap, observe):
    """Chunks of any sizes, the observation window over several of them, and steps; then a second turn, which chooses
    anew from everything. Of an int8 pool keys are as it holds them, those of the chunk itself as they came."""
    story = Story(group=group, seed=seed, dtype=dtype, packed=packed, pads=(0, 3, 11))
    kernel, pool = pooling
    layer = story.layer(observe=observe, sink=sink, softcap=softcap, kernel_size=kernel, pooling=pool)
    story.feed(layer, *sizes)
    assert kept(layer) == story.wanted(layer, sizes[-1])
    story.feed(layer, 1, 1, 1)
    story.feed(layer, 5)
    assert kept(layer) == story.wanted(layer, 5)


def test_sinks_vote_with_their_neighbours_but_are_not_kept_twice():
    story = Story(pads=(0,))
    story.k[:, :, 1] = 3 * torch.nn.functional.normalize(story.q[:, :, 39], dim=-1)  # all look at a sink
    layer = story.layer(sink=2, budget=2, observe=1, kernel_size=5)
    story.feed(layer, 40)
    assert kept(layer) == story.wanted(layer)
    assert any(3 in ids for ids in kept(layer).values()), "pooled with it"


def test_the_votes_of_a_group_are_summed_and_not_its_queries():
    """Two heads want opposite things: their sum would want neither."""
    story = Story(group=2, pads=(0,))
    want = F.normalize(torch.randn(DIM, generator=torch.Generator().manual_seed(3)), dim=0)
    story.k *= 0.05
    story.k[:, :, 7], story.k[:, :, 21] = 6 * want, -6 * want
    story.q[:, 0::2], story.q[:, 1::2] = 8 * want, -8 * want
    layer = story.layer(budget=2, kernel_size=1)
    story.feed(layer, 40)
    assert kept(layer) == {(0, 0): [7, 21], (0, 1): [7, 21]}


def test_an_extra_logit_of_the_model_does_not_vote():
    found = []
    for logits in (None, torch.full((2 * HEADS,), 3.0, device=DEVICE)):
        story = Story(group=2)
        layer = story.layer(sink_logits=logits)
        story.feed(layer, 50)
        found.append(kept(layer))
    assert found[0] == found[1] == story.wanted(layer)


def test_few_logits_at_a_time_are_as_good(monkeypatch):
    """What a device runs, with the past in several pieces and the queries in several slices."""
    entry, want = load_all()["snap_tokens"], None
    for logits, piece in ((1 << 24, 16384), (300, 7)):
        monkeypatch.setattr(snap_tokens, "LOGITS", logits)
        monkeypatch.setattr("torchsparsekv.ops.attend.prompt_attention.PIECE", piece)
        story = Story(group=2, packed=True)
        layer = story.layer()
        story.feed(layer, 40, 30)
        s, k = layer.state, story.k[:, :, 40:70].to(DEVICE)
        s.kept.ids.fill_(-5)
        rule = snap_tokens.Pooling(5, False)
        entry.run("triton", k, s.observed, s.kept, s.store.pool, s.lengths, layer.attention, rule, None)
        want = want or story.wanted(layer, 30)
        assert kept(layer) == want


# ---------------------------------------------------------------- what is attended to


def attended(story: Story, layer: Layer, prompt: int, b: int, h: int, want) -> list[int]:
    """Of SnapKV: sinks, what is kept, the observation window, and all that came later; by position in the row."""
    m, n = layer.method, story.fed - story.pads[b]
    begin = max(prompt - story.pads[b] - m.observed, m.sink)
    return sorted({*range(min(m.sink, n)), *want[b, h], *range(begin, n)})


@pytest.mark.parametrize(("group", "sink"), [(1, 0), (4, 0), (2, 3)])
@pytest.mark.parametrize("packed", [False, True])
def test_a_step_attends_to_what_snapkv_keeps_and_nothing_else(group, sink, packed):
    """Also to none of the tokens of the prompt that are in the ring by chance; and again after a second turn."""
    story = Story(group=group, packed=packed)
    layer = story.layer(sink=sink, window=OBSERVE + 12)
    story.feed(layer, 60)
    for prompt, steps in ((60, 12), (80, 12)):
        if story.fed != prompt:
            story.feed(layer, prompt - story.fed)
        want = story.wanted(layer, prompt - 72 if prompt == 80 else 60)
        for _ in range(steps):
            out = story.feed(layer, 1).cpu()
            for b, pad in enumerate(story.pads):
                for h in range(HEADS):
                    at = torch.tensor(attended(story, layer, prompt, b, h, want)) + pad
                    q = story.q[b, h * group : (h + 1) * group, story.fed - 1]
                    w = (q @ story.k[b, h, at].T * DIM**-0.5).softmax(-1)
                    tolerance = 0.05 if packed else 2e-5
                    torch.testing.assert_close(
                        out[b, h * group : (h + 1) * group, 0], w @ story.v[b, h, at], atol=tolerance, rtol=tolerance
                    )
        assert (layer.state.kept.lost == 0).all()


def test_it_is_fetched_once():
    story = Story(pads=(0,))
    layer = story.layer(window=OBSERVE + 20)
    story.feed(layer, 60)
    seen = []
    for _ in range(20):
        story.feed(layer, 1)
        seen.append(int(layer.state.kept.updated.sum()))
    assert seen == [HEADS] + [0] * 19
    assert (layer.state.kept.updates == 1).all()


def test_what_leaves_the_window_is_kept_while_there_is_room_and_counted_as_lost_then():
    """A prompt of 14 leaves 4 of 14 places; the fifth token that leaves is the first that is lost."""
    story = Story(pads=(0,))
    layer = story.layer(window=WINDOW, budget=14)
    story.feed(layer, 14)
    assert kept(layer) == {(0, h): list(range(10)) for h in range(HEADS)}
    for step in range(1, 30):
        story.feed(layer, 1)
        gone = max(0, 14 + step - WINDOW - 10)  # of the observation window and of what was generated
        assert kept(layer) == {(0, h): list(range(10 + min(gone, 4))) for h in range(HEADS)}
        assert (layer.state.kept.lost == max(0, gone - 4)).all()
    story.feed(layer, 5)
    assert (layer.state.kept.lost == 0).all(), "all of it was there to be chosen again"


# ---------------------------------------------------------------- what it is told


@pytest.mark.parametrize(
    ("hyper", "error", "says"),
    [
        (dict(kernel_size=4), ValueError, "snapkv: kernel_size must be odd, got 4"),
        (dict(kernel_size=0), ValueError, "snapkv: kernel_size must be at least 1, got 0"),
        (dict(kernel_size=5.0), TypeError, "snapkv: kernel_size must be an int, got 5.0"),
        (dict(pooling="mean"), ValueError, "snapkv: pooling must be one of avgpool, maxpool, got 'mean'"),
        (dict(observe=0), ValueError, "snapkv: observe must be at least 1, got 0"),
        (dict(observe=9, window=8), ValueError,
         "snapkv: observe 9 is above window 8: tokens would be scored by queries that came before them"),
    ],
)  # fmt: skip
def test_refused(hyper, error, says):
    with pytest.raises(error, match=f"^{re.escape(says)}$"):
        make_method("snapkv", **hyper)


def test_the_op_refuses_pooling_over_an_even_number():
    story = Story(pads=(0,))
    layer = story.layer()
    s = layer.state
    with pytest.raises(ValueError, match="votes are pooled over an odd number of tokens, got 2"):
        snap_tokens.snap_tokens(
            story.k[:, :, :3].to(DEVICE), s.observed, s.kept, s.store.pool, s.lengths, layer.attention,
            snap_tokens.Pooling(2, False), None,
        )  # fmt: skip


def test_rows_past_their_capacity_are_left_alone():
    story = Story(60, pads=(0,))
    method = make_method("snapkv", window=WINDOW, observe=OBSERVE, budget=8)
    layer = Layer(method, heads=HEADS, dim=DIM, rows=32)
    story.feed(layer, 30)
    before = [t.clone() for t in layer.state.kept]
    assert story.feed(layer, 5).isnan().all()
    assert story.feed(layer, 1).isnan().all()
    for now, then in zip(layer.state.kept, before):
        assert torch.equal(now, then)
