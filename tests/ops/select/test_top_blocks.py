"""top_blocks of long rows equals a sort of (score, place) pairs."""
import importlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import NATIVE, on
from world import DEVICE

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.select._top import GROUP, peaks_of
from torchsparsekv.ops.store.views import Scored

TOP = importlib.import_module("torchsparsekv.ops.select.top_blocks")
ENTRY = load_all()["top_blocks"]

KINDS = (
    "random", "few values", "all equal", "few live", "few groups", "one group", "first of each group", "signs", "none",
)  # fmt: skip

LENGTHS = (2048, 8192, 16384, 26214, 32768, 65536, 131072, 262144)


def scores_of(kind: str, n: int, k: int, g: torch.Generator) -> torch.Tensor:
    x = torch.randn(n, generator=g)
    if kind == "few values":  # ties within groups and across them
        x = torch.randint(-2, 3, (n,), generator=g).float()
    if kind == "all equal":
        x = torch.full((n,), -1.5)
    if kind == "few live":
        x[torch.randperm(n, generator=g)[max(1, k // 2) :]] = -math.inf
    if kind == "few groups":  # fewer than k, with more than k scores: the k best reach below every peak
        x[: n - GROUP * max(1, k // 2)] = -math.inf
    if kind == "one group":  # where as many of the best are as it holds
        x = torch.full((n,), -2.0)
        x[-GROUP - n % GROUP :] = 1.0
    if kind == "first of each group":
        x = -x.abs()
        x[::GROUP] = 3.0
    if kind == "signs":
        x = torch.where(x < 0, -0.0, 0.0)
    if kind == "none":
        x = torch.full((n,), -math.inf)
    x[torch.rand(n, generator=g) < 0.05] = math.nan
    return x


def plain(x: torch.Tensor, k: int) -> list[int]:
    live = [(-score, i) for i, score in enumerate(x.tolist()) if score > -math.inf]
    return sorted(i for _, i in sorted(live)[:k])


@pytest.fixture
def launches(monkeypatch):
    """How often rows were taken by their peaks."""
    calls, through = [], TOP._from_peaks
    monkeypatch.setattr(TOP, "_from_peaks", lambda *a: calls.append(1) or through(*a))
    return calls


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mapped", [False, True])
@given(n=st.integers(1500, 5000), k=st.integers(1, 150), seed=st.integers(0, 1 << 20))
def test_selection_through_peaks_equals_a_sort(kind, mapped, launches, n, k, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.stack([scores_of(kind, n, k, g), scores_of("random", n, k, g)])
    ids = torch.arange(2 * n, dtype=torch.int32).view(2, n) * 2 + 1 if mapped else None
    want = [plain(row, k) for row in x]
    for kind in ("triton", "reference"):
        got = ENTRY.run(kind, *on(DEVICE, (Scored(x, peaks_of(x)), k, ids, None, 0, 0))).cpu()
        for row, best in enumerate(want):
            named = [int(ids[row, i]) for i in best] if mapped else best
            assert got[row].tolist() == named + [-1] * (k - len(named))
    assert launches


def test_whole_rows_and_partial_rows_equal_a_sort(launches):
    g = torch.Generator().manual_seed(0)
    n, k, width = 1901, 70, 301
    x = torch.randn(3, 2, n, generator=g)
    ids = torch.arange(x.numel(), dtype=torch.int32).view(x.shape)
    ids[1, :, 250:], x[1, :, 250:] = -1, -math.inf
    things = (Scored(x, peaks_of(x)), k, ids, torch.tensor([9, 8, 3], dtype=torch.int32), 8, width)
    got = ENTRY.run("triton", *on(DEVICE, things)).cpu()
    assert launches
    assert torch.equal(got, ENTRY.reference(*things))
    assert got[1, 0].tolist() == list(range(2 * n, 2 * n + 250)) + [-1] * 51
    assert got[2, 1].tolist() == list(range(5 * n, 5 * n + width))


@pytest.mark.parametrize(("n", "k", "kind"), [(5000, 300, "few values"), (20_000, 300, "few live")])
def test_cuda_kernel_on_a_cpu_equals_a_sort(n, k, kind, emulated):
    """A row whose scores all are read, and one that is read by its peaks."""
    x = scores_of(kind, n, k, torch.Generator().manual_seed(0))[None]
    best = plain(x[0], k)
    assert ENTRY.run("cuda", Scored(x, peaks_of(x)), k, None, None, 0, 0)[0].tolist() == best + [-1] * (k - len(best))


@pytest.mark.parametrize(("n", "k"), [(900, 4), (1 << 14, 2000)])
def test_rows_without_peaks_and_with_too_many_groups_equal_a_sort(n, k, launches):
    x = torch.randn(1, n, generator=torch.Generator().manual_seed(1))
    got = ENTRY.run("triton", *on(DEVICE, (Scored(x, peaks_of(x)), k, None, None, 0, 0))).cpu()
    assert not launches
    assert torch.equal(got, ENTRY.reference(Scored(x), k))


@pytest.mark.parametrize(
    ("n", "k", "peaks", "shape"),
    [
        (8192, 64, True, (256, 8, 2)), (6554, 100, True, (256, 8, 2)), (26214, 100, True, (256, 8, 8)),
        (32768, 64, True, (256, 8, 8)), (2048, 2000, False, (256, 8, 0)), (2049, 5, False, (1024, 8, 0)),
        (6554, 1024, True, (1024, 8, 0)), (26214, 256, True, (1024, 8, 2)), (8193, 5, False, (1024, 16, 0)),
        (65536, 64, True, (256, 8, 16)), (131072, 512, True, (1024, 16, 8)), (262144, 64, True, (1024, 8, 16)),
    ],
)  # fmt: skip
def test_cuda_kernel_runs_at_the_usual_shapes(n, k, peaks, shape):
    """Threads, and scores and peaks of each."""
    assert tuple(TOP.native(n, k, peaks).values()) == shape
    x = torch.zeros(1, n)
    assert ENTRY.chain.chosen(*on(DEVICE, (Scored(x, peaks_of(x) if peaks else None), k, None, None, 0, 0))) == NATIVE


@pytest.mark.parametrize(
    ("n", "k", "peaks", "reason"),
    [
        (262145, 64, True, "the best 64 of 262145 scores with peaks"),
        (16385, 64, False, "the best 64 of 16385 scores without peaks"),
        (16385, 1000, True, "the best 1000 of 16385 scores with peaks"),
    ],
)
def test_triton_runs_what_the_cuda_kernel_does_not_support(n, k, peaks, reason):
    x = torch.zeros(1, n)
    things = on(DEVICE, (Scored(x, peaks_of(x) if peaks else None), k, None, None, 0, 0))
    assert TOP.native(n, k, peaks) == reason
    assert ENTRY.chain.chosen(*things) == ("triton", {"cuda": reason})


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@given(
    n=st.one_of(st.integers(1, 17000), st.sampled_from(LENGTHS)), share=st.floats(0, 1),
    most=st.sampled_from([100, 700]), width=st.sampled_from([0, 3, 588]), peaks=st.booleans(),
    seed=st.integers(0, 1 << 20),
)  # fmt: skip
def test_cuda_kernel_equals_reference(kind, n, share, most, width, peaks, seed):
    """csrc/top_blocks.cu: rows of a batch of which some are whole, with and without peaks and ids, from any address."""
    g = torch.Generator().manual_seed(seed)
    k = 1 + round(share * (n if n <= 17000 and most == 700 else most))
    x = torch.stack([scores_of(kind, n, k, g), scores_of("random", n, k, g)] * 2).view(2, 2, n)
    ids = torch.randint(1, 4, x.shape, generator=g).cumsum(-1).int() if seed % 3 else None
    counter = torch.tensor([3, 9], dtype=torch.int32) if seed % 3 == 1 else None
    whole = (5, k + width) if counter is not None else (0, 0)
    things = (Scored(x, peaks_of(x) if peaks else None), k, ids, counter, *whole)
    scored, *rest = on(DEVICE, things)
    shifted = torch.empty(x.numel() + seed % 4, device=DEVICE)[seed % 4 :].view(x.shape).copy_(x)
    there = scored._replace(scores=shifted)
    expected = ENTRY.reference(*things)
    kind, reasons = ENTRY.chain.chosen(there, *rest)
    assert (kind, reasons) == (("cuda", {}) if isinstance(TOP.native(n, k, peaks), dict) else ("triton", reasons))
    assert torch.equal(ENTRY.run(kind, there, *rest).cpu(), expected)
    if n in LENGTHS and 64 < k <= 128:  # few, as each size is compiled apart
        assert torch.equal(ENTRY.run("triton", there, *rest).cpu(), expected)
