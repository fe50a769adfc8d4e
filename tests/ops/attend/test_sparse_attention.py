"""sparse_attention at shapes with several tiles per warp and several programs per head."""
import dataclasses
import importlib
import random

import pytest
import torch
from cases import OPS
from hypothesis import given
from hypothesis import strategies as st
from kernels import NATIVE, on
from world import DEVICE, TOLERANCE, World

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.rest.views import NO_REST, Rest
from torchsparsekv.ops.store.rows import ring_positions
from torchsparsekv.ops.store.views import Attention

ATTENTION = importlib.import_module("torchsparsekv.ops.attend.sparse_attention")
SHAPES = importlib.import_module("torchsparsekv.ops.attend._native")
ENTRY = load_all()["sparse_attention"]


@dataclasses.dataclass
class Long(World):
    """A ring of 500 rows that has turned, or not; up to 250 chosen blocks."""

    sink: int = 30
    window: int = 270
    interval: int = 200
    rows: int = 800


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", SHAPES.DIMS)
@given(
    lengths=st.lists(st.integers(-1, 800), min_size=1, max_size=3),
    group=st.sampled_from([1, 3, 4, SHAPES.MOST_HEADS]), block=st.sampled_from([1, 16, 20]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]), seed=st.integers(0, 99), strided=st.booleans(),
    sms=st.sampled_from([1, 132]),
)  # fmt: skip
def test_cuda_kernel_equals_reference(dim, cluster, lengths, group, block, dtype, seed, strided, sms):
    """csrc/sparse_attention.cu. Lengths below 0 are of rows past their capacity; dead rows are NaN. Frontiers, caps of
    logits, sinks, blocks that are partly filled and the rest are there or not. For one multiprocessor programs have 8
    warps."""
    r = random.Random(seed)
    w = Long(
        lengths=[max(n, 1) for n in lengths], group=group, dim=dim, block=block, dtype=dtype, seed=seed,
        pick=lambda *options: r.choice(options),
    )  # fmt: skip
    q, near, hot, of_rows, reach, attention, rest = OPS["sparse_attention"](w)
    reach = reach._replace(bias=None)  # Triton's alone
    of_rows.length[torch.tensor(lengths) < 0] = -1
    if rest.sums is not None:  # means of a method's own, and groups of parts of blocks, are for Triton
        fits = rest.tokens is None and rest.group % block == 0
        rest = rest._replace(sums=rest.sums.half()) if fits else NO_REST
    things = (q if strided else q.contiguous(), near, hot, of_rows, reach, attention, rest)
    want = ENTRY.reference(*things)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(SHAPES, "cluster_of", lambda *_: cluster)
        m.setattr(SHAPES, "sm_count", lambda _: sms)
        got = ENTRY.run("cuda", *on(DEVICE, things)).cpu()
    torch.testing.assert_close(got, want, rtol=0, atol=2 * TOLERANCE[dtype], equal_nan=True)


@pytest.mark.parametrize(("cluster", "sms", "warps"), [(1, 1, 8), (1, 132, 16), (4, 132, 16)])
def test_cuda_kernel_on_a_cpu_equals_reference_with_the_rest(cluster, sms, warps, emulated, monkeypatch):
    """Two rows, of which one has groups behind the ring and chosen tokens in some of them."""
    w = Long(lengths=[700, 90], group=4, dim=128, dtype=torch.float16)
    q, ring, hot, lengths, selection, attention, _ = OPS["sparse_attention"](w)
    sums = w.truth.float().unflatten(2, (-1, 32)).mean(3).half()
    selection = selection._replace(fill=None, frontier=None, bias=None)
    things = (q, ring, hot, lengths, selection, attention, Rest(sums, 32))
    monkeypatch.setattr(SHAPES, "cluster_of", lambda *_: cluster)
    monkeypatch.setattr(SHAPES, "sm_count", lambda _: sms)
    assert ATTENTION._fits(*things).warps == warps
    got, want = ENTRY.run("cuda", *things), ENTRY.reference(*things)
    torch.testing.assert_close(got, want, rtol=0, atol=2 * TOLERANCE[w.dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 4, 8])
@pytest.mark.parametrize("block", [1, 16])
@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("tokens", [1000, 16000])
@pytest.mark.parametrize("order", ["ascending", "any", "runs"])
@pytest.mark.parametrize("named", [False, True])
def test_cuda_kernel_equals_reference_with_many_groups(named, order, tokens, filled, group, block, cluster):
    """More groups and chosen blocks than a cluster has warps, or few tokens that remain of each group. Blocks come in
    ascending order with empty places, in any order, or as runs of neighbours. The kernel knows their numbers from
    `ids`, if they are named, or else from their slots."""
    rows = 1024 if tokens == 1000 else 16384
    w = Long(lengths=[tokens, tokens - 99], group=4, dim=128, block=block, dtype=torch.bfloat16, rows=rows)
    q, ring, hot, lengths, selection, attention, _ = OPS["sparse_attention"](w)
    w.truth[..., 1, :] += 1  # so that the output tells the ring from the rest
    ids = w.chosen((600 if tokens == 1000 else 5000) // block)  # the latter more than a program lists together
    if order == "any":
        ids = ids[..., torch.randperm(ids.shape[2], generator=w.g)].contiguous()
    if order == "runs":  # the first half are neighbours
        ids = torch.arange(ids.shape[2]).expand_as(ids).clone().int()
        ids[..., ids.shape[2] // 2 :] += rows // block - ids.shape[2]
    # The logits of chosen tokens are larger by about 2, so the output tells them from the means of their groups.
    mean = q.float().unflatten(1, (w.heads, -1)).mean(2)  # [batch, heads, 1, dim]
    toward = 2 / attention.scale * mean / mean.square().sum(-1, keepdim=True)
    one = torch.zeros(*ids.shape[:2], rows // block + 1).scatter_(2, ids.masked_fill(ids < 0, rows // block).long(), 1)
    w.truth[..., 0, :] += one[..., :-1].repeat_interleave(block, 2)[..., None] * toward
    block_of = torch.randperm(rows // block, generator=w.g)
    hot = hot._replace(rows=w.truth.unflatten(2, (-1, block))[:, :, block_of])
    hot.block_of.copy_(block_of), hot.slot_of.copy_(block_of.argsort())
    hot = hot._replace(chosen=hot.slot_of.gather(2, ids.clamp(min=0).long()).masked_fill(ids < 0, -1))
    selection = selection._replace(ids=ids if named else None)
    fill = torch.randint(0, block + 1, hot.slot_of.shape, generator=w.g, dtype=torch.int32)
    fill = fill.minimum((w.begin[:, None, None] - torch.arange(0, w.rows, block)).clamp(min=0).int())
    full = (torch.arange(block) < fill[..., None]).flatten(2)
    position = torch.arange(w.rows).expand_as(full)
    there = full if filled else (position >= w.sink) & (position < w.begin[:, None, None])
    sums = w.truth.float().masked_fill(~there[..., None, None], 0).unflatten(2, (-1, group)).mean(3).half()
    things = (q, ring, hot, lengths, selection._replace(fill=fill if filled else None), attention)
    things = (*things, Rest(sums, group, settled=named or block == 16))
    want = ENTRY.reference(*things)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(SHAPES, "cluster_of", lambda *_: cluster)
        got = ENTRY.run("cuda", *on(DEVICE, things)).cpu()
    torch.testing.assert_close(got, want, rtol=2**-7, atol=5e-3)  # from 1 on, bf16 rounds by more than the latter


@pytest.mark.parametrize("group", [32, 128])
def test_sums_in_fp16_are_accurate_where_keys_have_a_large_mean(group):
    """A mean of 100 in all channels changes the output by less than 0.5 %, and with sums in bf16 four times as much."""
    g = torch.Generator().manual_seed(0)
    w = Long(lengths=[4000], heads=4, dim=128, block=16, sink=0, window=16, interval=16, rows=4096)
    q, ring, hot, lengths, selection, attention, _ = OPS["sparse_attention"](w)
    hot = hot._replace(chosen=w.chosen(16))
    hot.rows[..., 0, :] += 100 * torch.randn(4, 128, generator=g).sign()[None, :, None, None]
    at = ring_positions(ring.shape[2], w.length, w.begin, 0)
    ring = hot.rows.flatten(2, 3)[:, :, at[0].clamp(min=0)].masked_fill((at < 0)[:, None, :, None, None], 0)
    live = (torch.arange(w.rows) < w.begin[0])[:, None, None]
    sums = (hot.rows.flatten(2, 3) * live).unflatten(2, (-1, group)).mean(3)

    def attend(dtype: torch.dtype) -> torch.Tensor:
        return ENTRY.reference(4 * q, ring, hot, lengths, selection, attention, Rest(sums.to(dtype), group))

    want = attend(torch.float32)
    error = {x: float((attend(x) - want).norm() / want.norm()) for x in (torch.float16, torch.bfloat16)}
    assert error[torch.float16] < 0.005
    assert error[torch.float16] < error[torch.bfloat16] / 4


KINDS = ["triton", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("kind", ["reference", *KINDS])
def test_attention_over_no_token_is_zero(kind):
    """Of a row in which there is none yet, beside one with tokens."""
    w = Long(lengths=[0, 90], group=4, dim=128, dtype=torch.float16)
    q, near, hot, *rest = OPS["sparse_attention"](w)
    hot.chosen[0] = -1
    got = ENTRY.run(kind, *on(DEVICE, (q, near, hot, *rest))).cpu()
    assert [bool(x.any()) for x in got] == [False, True]


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", ["q", "ring"])
def test_nan_and_infinity_of_live_rows_reach_the_output(broken, kind):
    """As in the reference: a NaN of one head, or of a row that counts, is in what it touches and nowhere else."""
    w = Long(lengths=[700, 90], group=4, dim=128, dtype=torch.bfloat16 if DEVICE.type == "cuda" else torch.float16)
    things = OPS["sparse_attention"](w)
    if broken == "q":
        things[0][0, 2] = torch.nan
    else:
        things[1][1, 1, 3, 1, 5] = torch.inf
    got = ENTRY.run(kind, *on(DEVICE, things)).cpu()
    want = ENTRY.reference(*things)
    torch.testing.assert_close(got, want, rtol=0, atol=2 * TOLERANCE[w.dtype], equal_nan=True)
    assert (want.isnan() | want.isinf()).sum() == (128 if broken == "q" else 4)


@pytest.mark.filterwarnings("ignore:All-NaN slice")  # of the interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_nan_in_the_sums_of_a_group_reaches_the_output(kind):
    w = Long(lengths=[700, 90], group=4, dim=128, dtype=torch.bfloat16 if DEVICE.type == "cuda" else torch.float16)
    q, ring, hot, lengths, selection, attention, _ = OPS["sparse_attention"](w)
    sums = torch.zeros(2, w.heads, -(-w.rows // 64), 2, 128, dtype=torch.float16)
    sums[0, 0, 1, 0, 5] = torch.nan
    selection = selection._replace(fill=None, bias=None)
    things = (q, ring, hot, lengths, selection, attention, Rest(sums, 64))
    got, want = ENTRY.run(kind, *on(DEVICE, things)).cpu(), ENTRY.reference(*things)
    assert [int(x.isnan().sum()) for x in want] == [4 * 128, 0]
    torch.testing.assert_close(got, want, rtol=0, atol=2 * TOLERANCE[w.dtype], equal_nan=True)


@pytest.mark.parametrize(
    ("rows", "tokens", "dim", "batch", "groups", "warps"),
    [
        (64, 256, 128, 1, 0, 8), (336, 1024, 128, 1, 0, 11), (336, 2048, 128, 1, 0, 10), (336, 1024, 256, 1, 0, 8),
        (336, 1024, 128, 2, 0, 11), (336, 1024, 128, 4, 0, 11), (336, 1024, 128, 40, 0, 8),
        (64, 256, 128, 1, 64, 16), (336, 1024, 128, 1, 2048, 16), (336, 1024, 256, 1, 2048, 8),
        (336, 1024, 128, 40, 2048, 16),
    ],
)  # fmt: skip
def test_number_of_warps_follows_the_tiles(rows, tokens, dim, batch, groups, warps, monkeypatch):
    """On 132 multiprocessors, 8 kv heads: 85 tiles are one each for 8 programs of 11 warps, and 149 are two for 10.
    With the rest it is 16 warps, unless heads are wide."""
    monkeypatch.setattr(SHAPES, "sm_count", lambda _: 132)
    heads, tiles = 8 * batch, -(-rows // SHAPES.TILE) + -(-tokens // SHAPES.TILE)
    cluster = SHAPES.cluster_of(DEVICE, heads)
    assert SHAPES.warps_of(DEVICE, dim, heads, cluster, tiles, groups > 0) == warps


@pytest.mark.parametrize(("listed", "warps"), [(False, 8), (True, 13)])
def test_attention_of_an_engine_has_up_to_16_warps(listed, warps, monkeypatch):
    """100 tiles are one each for 8 programs of 13 warps; behind fetch, which leaves room for 12, two for 8 warps."""
    monkeypatch.setattr(SHAPES, "sm_count", lambda _: 132)
    monkeypatch.setattr(SHAPES, "shared_bytes", lambda _: 232_448)
    monkeypatch.setattr(SHAPES._cuda, "load", lambda *_, **sizes: sizes)
    q, rows = torch.zeros(1, 32, 1, 128, dtype=torch.bfloat16), torch.zeros(1, 8, 4, 1, 2, 128, dtype=torch.bfloat16)
    found = SHAPES.fit(q, 8, rows, 1, 100, Attention(1.0), filled=True, listed=listed)
    assert (found.warps, found.kernels["WARPS"], found.kernels["LISTED"]) == (warps, warps, int(listed))


@pytest.mark.parametrize(
    ("batch", "tiles", "groups", "warps"), [(22, 52, 512, 8), (22, 100, 512, 16), (57, 52, 2048, 16), (14, 52, 512, 16)]
)
def test_two_programs_with_small_tables_share_a_multiprocessor(batch, tiles, groups, warps, monkeypatch):
    """With more kv heads than multiprocessors. 512 groups and 52 tiles of tokens take 38 KB of the 100 KB."""
    monkeypatch.setattr(SHAPES, "sm_count", lambda _: 132)
    monkeypatch.setattr(SHAPES, "shared_bytes", lambda _: 232_448)
    monkeypatch.setattr(SHAPES._cuda, "load", lambda *_, **sizes: sizes)
    q, rows = torch.zeros(batch, 32, 1, 128).half(), torch.zeros(1, 8, 4, 1, 2, 128).half()
    rest = Rest(torch.zeros(1, 8, groups, 2, 128).half(), 64)
    found = SHAPES.fit(q, 8, rows, 1, tiles, Attention(1.0), filled=False, rest=rest, groups=groups)
    assert (found.warps, found.kernels["WARPS"], found.kernels["RESIDENT"]) == (warps, warps, 2 if warps == 8 else 1)


@pytest.mark.parametrize(("heads", "programs"), [(8, 8), (16, 4), (28, 4), (32, 2), (64, 2), (112, 1)])
def test_clusters_are_as_large_as_neighbouring_multiprocessors_allow(heads, programs, monkeypatch):
    monkeypatch.setattr(SHAPES, "sm_count", lambda _: 132)
    assert SHAPES.cluster_of(DEVICE, heads) == programs


SHAPE = "head_dim {} and {} query heads a kv head are not among (64, 128, 256) and up to 8"
ODD = {
    "float32": "queries in torch.float32 with sink logits in torch.float32",
    "head_dim": SHAPE.format(80, 2),
    "group": SHAPE.format(64, 9),
    "sinks": "queries in torch.float16 with sink logits in torch.float32",
    "strides": "tensors are not aligned to 16 bytes",
}


@pytest.mark.parametrize("odd", ODD)
def test_triton_runs_what_the_cuda_kernel_does_not_support(odd):
    w = Long(
        dim=80 if odd == "head_dim" else 64, group=9 if odd == "group" else 2, seed=1,
        dtype=torch.float32 if odd == "float32" else torch.float16,
    )  # fmt: skip
    q, *views, attention, _ = OPS["sparse_attention"](w)
    sinks = w.sink_logits()
    attention = attention._replace(sink_logits=sinks.float() if odd == "sinks" else sinks)
    things = (q, *views, attention, NO_REST)
    there = on(DEVICE, things)
    if odd == "strides":
        there = (torch.nn.functional.pad(there[0], (0, 3))[..., :64], *there[1:])
    assert ENTRY.chain.chosen(*there) == ("triton", {"cuda": ODD[odd]})
    tolerance = TOLERANCE[q.dtype]
    got, want = ENTRY.run("triton", *there).cpu(), ENTRY.reference(*things)
    torch.testing.assert_close(got, want, rtol=0, atol=2 * tolerance)


REFUSED = {
    "type": "sums in torch.float32 of groups of 32 with blocks of 16",
    "group": "sums in torch.float16 of groups of 8 with blocks of 16",
    "large": "sums in torch.float16 of groups of 65536 with blocks of 16",
    "tokens": "a program takes 273424 bytes of shared memory, and 232448 are there",
    "many": "a program takes 315280 bytes of shared memory, and 232448 are there",
}


@pytest.mark.parametrize("odd", REFUSED)
def test_triton_runs_groups_that_the_cuda_kernel_does_not_support(odd, monkeypatch):
    monkeypatch.setattr(SHAPES, "sm_count", lambda _: 132)
    monkeypatch.setattr(SHAPES, "shared_bytes", lambda _: 232_448)
    w = Long(lengths=[90], dim=64, block=16, dtype=torch.float16)
    *things, _ = OPS["sparse_attention"](w)
    group, dtype = {"group": 8, "large": 1 << 16}.get(odd, 32), torch.float32 if odd == "type" else torch.float16
    groups = 200_000 if odd == "many" else -(-w.rows // group)
    rest = Rest(torch.zeros(1, 2, groups, 2, 64, dtype=dtype, device=DEVICE), group)
    if odd == "tokens":
        things[2] = things[2]._replace(chosen=things[2].chosen.new_zeros(1, 2, 1024))
    assert ATTENTION._fits(*on(DEVICE, tuple(things)), rest) == REFUSED[odd]


@pytest.mark.parametrize("filled", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_cuda_kernel_runs_at_the_usual_shapes(sinks, filled):
    w = Long(dim=64, dtype=torch.float16)
    *before, reach, attention, _ = OPS["sparse_attention"](w)
    reach = reach._replace(fill=torch.ones_like(before[2].slot_of) if filled else None)
    attention = attention._replace(sink_logits=w.sink_logits() if sinks else None)
    for rest in (NO_REST, Rest(torch.zeros(2, 2, 25, 2, 64, dtype=torch.float16), 32)):
        things = (*before, reach, attention, rest)
        assert ENTRY.chain.chosen(*on(DEVICE, things)) == NATIVE
