"""bound_scores are upper bounds for every key, in fp8 and at shapes of the CUDA kernel too."""
import importlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import NATIVE, on, until
from layer import BLOCK, SINK, frontier, small
from past import Past
from world import DEVICE

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.index.block_bounds import VOLUMES
from torchsparsekv.ops.select._top import peaks_of
from torchsparsekv.ops.store.views import Digests

BOUNDS = importlib.import_module("torchsparsekv.ops.select.bound_scores")
ENTRY = load_all()["bound_scores"]
FP8, NAN = torch.float8_e4m3fn, 0x7F


def arguments(shape, ends: list[int], sink: int, block: int, box: bool, dtype, largest: float, seed: int):
    """Digests that are NaN where nothing lives; of the spreads a share is so large that it counts as unbounded. With
    two of three seeds some blocks are pinned."""
    g = torch.Generator().manual_seed(seed)
    heads, group, blocks, d = shape
    lead, random = (len(ends), heads, blocks), lambda *n: torch.randn(*n, generator=g)
    q = random(len(ends), heads * group, 1, d).to(dtype)
    centre, spread = (random(*lead, d) * 3).to(FP8), random(*lead, d if box else 1).abs()
    if box:
        spread = spread.masked_fill(torch.rand(spread.shape, generator=g) < largest, BOUNDS.FP8_MAX).to(FP8)
    live = torch.zeros(len(ends), 1, blocks, 1, dtype=torch.bool)
    for b, end in enumerate(ends):
        live[b, :, sink:end] = True
    centre = torch.where(live, centre.view(torch.uint8), NAN).view(FP8)
    spread = torch.where(live, spread.view(torch.uint8), NAN).view(FP8) if box else torch.where(live, spread, math.nan)
    origin = random(len(ends), heads, d) * 300
    digests = Digests(centre, spread, block, VOLUMES.index("box" if box else "ball"), origin)
    pinned = torch.tensor(ends)[:, None].sub(sink).clamp(min=0) * torch.rand(len(ends), heads, generator=g) * block
    pinned = pinned.to(torch.int32) if seed % 3 else None
    return q, digests, until([end * block + seed % block for end in ends], sink * block), pinned


# ---------------------------------------------------------------- the CUDA kernel


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [0, 64])
@pytest.mark.parametrize(("d", "group"), [(64, 16), (64, 5), (128, 16), (128, 4), (128, 1), (256, 8), (256, 7)])
@given(
    blocks=st.sampled_from([1, 15, 16, 17, 129, 1000, 4097]), share=st.tuples(*[st.floats(0, 1)] * 2),
    sink=st.sampled_from([0, 1, 15, 16, 40]), block=st.sampled_from([1, 16, 32]), box=st.booleans(),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]), largest=st.sampled_from([0.0, 1e-4, 0.5]),
    strided=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_cuda_equals_reference(resident, d, group, blocks, share, sink, block, box, dtype, largest, strided, seed):
    """By one program a head, and by as many as there are tiles for; and Triton's kernel at the same shapes."""
    ends = [round(x * blocks) for x in share]
    things = arguments((2, group, blocks, d), ends, sink, block, box, dtype, largest, seed)
    q, *rest = on(DEVICE, things)
    if strided:  # as if it were cut from the output of one product for q, k and v
        q = q.transpose(1, 2).repeat(1, 1, 1, 3)[..., d : 2 * d].transpose(1, 2)
    assert ENTRY.chain.chosen(q, *rest) == NATIVE
    scores, peaks = ENTRY.reference(*things)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(BOUNDS, "RESIDENT", resident)
        results = [ENTRY.run(kind, q, *rest) for kind in ("cuda", "triton")]
    for got, its_peaks in results:
        torch.testing.assert_close(got.cpu(), scores, rtol=2e-5, atol=4e-3)  # of sums of ten thousands
        assert torch.equal(its_peaks, peaks_of(got))
    assert torch.equal(peaks.isinf(), results[0][1].isinf().cpu())


@pytest.mark.parametrize("box", [False, True])
def test_cuda_kernel_on_a_cpu_equals_reference(box, emulated):
    things = arguments((2, 4, 33, 128), [33, 20], 1, 16, box, torch.float16, 1e-4, 1)
    (got, peaks), (want, _) = ENTRY.run("cuda", *things), ENTRY.reference(*things)
    torch.testing.assert_close(got, want, rtol=2e-5, atol=4e-3)
    assert torch.equal(peaks, peaks_of(got))


@pytest.mark.parametrize("kind", ["triton", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_pinned_blocks_score_above_all_others(kind):
    """Of three heads none, one and all that can be retrieved; counts say tokens."""
    q, digests, lengths, _ = arguments((3, 2, 70, 64), [60], 16, 4, True, torch.bfloat16, 0.0, 0)
    if kind == "triton" and DEVICE.type == "cpu":  # the interpreter cannot multiply these
        q, digests = q.float(), digests._replace(centre=digests.centre.float(), spread=digests.spread.float())
    things = (q, digests, lengths, torch.tensor([[0, 4, 44 * 4]], dtype=torch.int32))
    scores, peaks = (x.cpu() for x in ENTRY.run(kind, *on(DEVICE, things)))
    assert (scores == torch.inf).sum(-1).tolist() == [[0, 1, 44]]
    assert scores[0, 1, 16] == torch.inf
    torch.testing.assert_close(scores, ENTRY.reference(*things)[0], rtol=2e-5, atol=1e-3)
    assert torch.equal(peaks, peaks_of(scores))


HALVES = "queries in {} against centres in {}, not halves against fp8"
OTHERS = {
    "q in float32": (lambda q, d: (q.float(), d), HALVES.format(torch.float32, FP8)),
    "digests in bfloat16": (
        lambda q, d: (q, d._replace(centre=d.centre.bfloat16(), spread=d.spread.bfloat16())),
        HALVES.format(torch.bfloat16, torch.bfloat16),
    ),
    "q not aligned": (
        lambda q, d: (torch.nn.functional.pad(q, (1, 0))[..., 1:], d), "tensors are not aligned to 16 bytes",
    ),
    "too many heads": (lambda q, d: (q.repeat(1, 5, 1, 1), d), "head_dim 128 with 20 query heads a kv head"),
    "head_dim 80": (
        lambda q, d: (
            q[..., :80].contiguous(),
            d._replace(**{name: getattr(d, name)[..., :80].contiguous() for name in ("centre", "spread", "origin")}),
        ),
        "head_dim 80 with 4 query heads a kv head",
    ),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
def test_triton_runs_what_the_cuda_kernel_does_not_support(other):
    """With the reason, which the device is only where all the rest fits."""
    change, reason = OTHERS[other]
    q, digests, *rest = on(DEVICE, arguments((2, 4, 40, 128), [40, 9], 0, 4, True, torch.bfloat16, 0.0, 0))
    assert ENTRY.chain.chosen(q, digests, *rest) == NATIVE
    assert ENTRY.chain.chosen(*change(q, digests), *rest) == ("triton", {"cuda": reason})


# ---------------------------------------------------------------- small digests are looser, never wrong

OUTLIERS = torch.tensor([0.0, 1e-3, 0.02, 1.0, 7.0, 30.0, 447.0, 449.0, 600.0, 7000.0])


# The methods whose volumes contain every key.
CONTAINING = [("quest", {}), ("arkvale", dict(volume="cuboid")), ("arkvale", dict(volume="ball"))]


def bounds(name: str, digest: str, past: Past, **more) -> torch.Tensor:
    """What the index says of every retrievable page, [row, head, page]."""
    s = past.fill(small(name, budget=256, digest=digest, **more)).state
    scores, _ = BOUNDS.bound_scores(past.query.to(DEVICE), s.digests, s.lengths)
    return scores[..., SINK // BLOCK : frontier(past.length) // BLOCK].cpu().double()


def products(past: Past) -> torch.Tensor:
    """q.k of every key of every retrievable page, [row, head, page, token], in double precision."""
    keys = past.k[:, :, SINK : frontier(past.length)].double().unflatten(2, (-1, BLOCK))
    return (keys @ past.query.double()[:, :, None].transpose(-1, -2)).squeeze(-1)


def tighten(past: Past, ball: bool) -> None:
    """Give every page a key for which its exact bound is reached, so that anything short of the bound is seen."""
    q = past.query  # of one head a group
    for p in range(SINK, frontier(past.length), BLOCK):
        page = past.k[:, :, p : p + BLOCK]
        if not ball:  # a corner of the box
            page[:, :, 0] = page.abs().amax(2) * q[:, :, 0].sign()
        else:  # the ball's pole in the direction of the query, and its opposite, so that the mean stays
            centre, radius = page[:, :, 2].clone(), page[:, :, 3].norm(dim=-1, keepdim=True)
            pole = radius * torch.nn.functional.normalize(q[:, :, 0], dim=-1)
            page[:, :, 0], page[:, :, 1], page[:, :, 3] = centre + pole, centre - pole, centre


def size(past: Past) -> torch.Tensor:
    """The largest sum of |q_d k_d| of any key: what the rounding of fp32 products and sums is relative to."""
    return (past.k.double().abs() @ past.query.double().abs().transpose(-1, -2)).amax()


@pytest.mark.parametrize("digest", ["float8", "bfloat16", "float32"])
@pytest.mark.parametrize(("name", "more"), CONTAINING)
@given(seed=st.integers(0, 999), outliers=st.booleans())
def test_bounds_hold_for_every_key(name, more, digest, seed, outliers):
    past = Past(80, 0, 1, [71] + [1] * 9, seed, False)
    if outliers:
        g = torch.Generator().manual_seed(seed)
        sign = torch.randint(0, 2, past.k.shape, generator=g) * 2 - 1
        past.k = OUTLIERS[torch.randint(0, len(OUTLIERS), past.k.shape, generator=g)] * sign
    tighten(past, more.get("volume") == "ball")
    rounding = 1e-6 * size(past)  # 16 products and sums of fp32, each to 6e-8
    assert (bounds(name, digest, past, **more)[..., None] >= products(past) - rounding).all()


@pytest.mark.parametrize(("name", "more"), [*CONTAINING, ("arkvale", {})])
@given(seed=st.integers(0, 999))
def test_fp8_digests_are_nearly_as_tight(name, more, seed):
    """Else a bound of infinity would pass. Rounding the centre moves it by 1/16, the spread grows by that and 1/8."""
    past = Past(80, 0, 1, [71] + [1] * 9, seed, False)
    exact, rounded = (bounds(name, digest, past, **more) for digest in ("float32", "float8"))
    assert (rounded <= exact + 0.3 * size(past)).all()
    assert more or name == "quest" or (rounded >= exact - 0.3 * size(past)).all(), "a mean is rounded to the nearest"


def test_mean_cuboid_is_smaller_than_the_cuboid_and_no_bound():
    past = Past(80, 0, 1, [80], 0, False)
    tighten(past, ball=False)
    mean, whole = (bounds("arkvale", "float32", past, volume=v) for v in ("cuboid-mean", "cuboid"))
    assert (mean < whole).all()
    assert (mean < products(past).amax(-1)).any()


@pytest.mark.parametrize("digest", ["float8", "bfloat16"])
@pytest.mark.parametrize(("name", "more"), [*CONTAINING, ("arkvale", {})])
@pytest.mark.parametrize("bias", [600.0, -5000.0])
def test_bias_of_channels_changes_no_bound(name, more, bias, digest):
    """Channels that are far from 0 at every token, with two query heads that look at them with other signs. Of the 16
    best pages of 64 by bounds in fp32, small digests find nearly as many as without a bias."""
    past, kept = Past(SINK + 64 * BLOCK, 0, 2, [256, *[1] * 8], 3, False), []
    for more_bias in (0.0, bias):
        past.k[:, :, :, 3:5] += more_bias
        best = (bounds(name, d, past, **more).topk(16).indices.flatten(0, 1).tolist() for d in ("float32", digest))
        kept.append(sum(len({*a} & {*b}) for a, b in zip(*best)))
    assert min(kept) >= 4 * 14
    assert kept[1] >= kept[0] - 3


def test_keys_that_turn_by_1200_are_not_unbounded():
    """A bias of 600 that rotary embeddings turn to its opposite between the first page and others, and within some."""
    past = Past(80, 0, 1, [80], 0, False)
    past.k[:, :, :, 5] += 600 * torch.tensor([1.0] * 40 + [-1.0] * 20 + [1.0, -1.0] * 10)
    exact, rounded = (bounds("quest", digest, past) for digest in ("float32", "float8"))
    assert (rounded <= exact + 0.2 * size(past)).all()


def test_a_spread_beyond_fp8_is_still_a_bound():
    """+6000 and -6000 in one page: half the range does not fit, and clamped it would promise less than there is."""
    past = Past(80, 0, 1, [80], 0, False)
    past.k[:, :, 20] = 6000 * past.query[:, :, 0].sign()
    past.k[:, :, 21] = -past.k[:, :, 20]
    assert (bounds("quest", "float8", past)[..., None] >= products(past)).all()
