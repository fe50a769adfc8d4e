"""Rows of 8-bit numbers with a scale per group equal the raw numbers within rounding, in every kernel."""
import importlib
import math

import pytest
import torch
from cases import MANY_TOKENS, OPS
from cases_packed import TAKING, pack, packed
from hypothesis import given, settings
from hypothesis import strategies as st
from kernels import KERNELS, clones, close, flat, on
from world import DEVICE, DIMS, DTYPES, World, worlds

from torchsparsekv.ops._machinery.chain import tensors
from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops._machinery.triton import next_power_of_2, tl, triton
from torchsparsekv.ops.store import rows as law
from torchsparsekv.ops.store.rows import as_numbers, keys_of, row_shape, stored_width, values_of
from torchsparsekv.ops.store.views import HotBuffer, Selection, Stats

ENTRIES = load_all()
FETCH = importlib.import_module("torchsparsekv.ops.gather.fetch")
HEAD_DIMS = range(16, 257, 16)  # all that patch() takes


def raw_rows(n: int, dim: int, dtype=torch.float32, seed: int = 0) -> torch.Tensor:
    """Rows of every magnitude; some groups are zero, some far below one."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 2, dim, generator=g) * 10.0 ** torch.randint(-6, 4, (n, 2, 1), generator=g)
    x[torch.rand(n, generator=g) < 0.2] = 0
    x[..., : dim // 2] *= (torch.rand(n, 2, 1, generator=g) < 0.8).float()
    return x.to(dtype)


def largest(x: torch.Tensor) -> torch.Tensor:
    """Of every number the largest magnitude in its group of 64 channels: from the definition."""
    return torch.cat([part.abs().amax(-1, keepdim=True).expand_as(part) for part in x.float().split(64, -1)], -1)


# ---------------------------------------------------------------- the format


@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_packed_row_holds_numbers_and_scales_in_whole_words(dim):
    x = raw_rows(9, dim)
    p = pack(x)
    groups = -(-dim // 64)
    assert p.shape == (9, *row_shape(dim, torch.int8))
    assert p.dtype == torch.int8
    width = stored_width(p)
    assert width % 16 == 0
    assert 0 <= width - (2 * dim + 8 * groups) < 16
    flat = p.flatten(1)
    scales = flat[:, 2 * dim : 2 * dim + 8 * groups].contiguous().view(torch.float32)
    assert torch.equal(scales.view(9, 2, groups), largest(x)[..., ::64] / 127)
    assert flat[:, 2 * dim + 8 * groups :].eq(0).all()
    assert torch.equal(keys_of(p), as_numbers(p, torch.float32)[:, 0])
    assert torch.equal(values_of(p), as_numbers(p, torch.float32)[:, 1])


@given(dim=st.sampled_from(HEAD_DIMS), dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
       seed=st.integers(0, 1000))  # fmt: skip
def test_unpacked_numbers_are_within_half_a_step(dim, dtype, seed):
    x = raw_rows(9, dim, dtype, seed)
    back = as_numbers(pack(x), torch.float32)
    step = largest(x) / 127
    assert ((back - x.float()).abs() <= step / 2 * (1 + 1e-5)).all()
    assert (back[largest(x) == 0] == 0).all()
    peak = x.float().abs() == largest(x)
    torch.testing.assert_close(back[peak], x.float()[peak], rtol=1e-6, atol=0)
    assert as_numbers(pack(x), dtype).isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_largest_numbers_stay_finite(dtype):
    """65,504 of fp16 would be the end of an fp16 scale times 127; of bf16 any fp16 scale would be too small."""
    x = torch.full((1, 2, 64), torch.finfo(dtype).max, dtype=dtype)
    x[..., ::2] *= -1
    assert torch.equal(as_numbers(pack(x), dtype), x)


def test_numbers_too_small_for_a_scale_are_zero():
    x = torch.full((1, 2, 64), 2.0**-101)
    x[0, 0, 3] = 2.0**-100
    back = as_numbers(pack(x), torch.float32)
    assert back[0, 1].eq(0).all()
    assert back[0, 0].ne(0).all()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_make_only_their_group_nan(bad):
    x = raw_rows(4, 128) + 1
    x[2, 1, 70] = bad
    back = as_numbers(pack(x), torch.float32)
    assert back[2, 1, 64:].isnan().all()
    back[2, 1, 64:] = 0
    assert back.isfinite().all()


@triton.jit
def _copy(source, target, n, D: tl.constexpr, ROW: tl.constexpr, ROWS: tl.constexpr):
    r = tl.arange(0, ROWS)
    law.copy_rows(law.row_at(source, 0, r, n, D), law.row_at(target, 0, r, n, D), r < n, D, ROW)


def copied(source: torch.Tensor, like: torch.Tensor, dim: int) -> torch.Tensor:
    target, source = torch.full_like(like, 77, device=DEVICE), source.to(DEVICE)
    rows = next_power_of_2(len(source))
    _copy[(1,)](source, target, len(source), D=dim, ROW=next_power_of_2(2 * dim), ROWS=rows)
    return target.cpu()


@given(dim=st.sampled_from(DIMS), dtype=st.sampled_from(DTYPES), n=st.integers(1, 9), seed=st.integers(0, 1000))
def test_triton_packs_and_unpacks_like_torch(dim, dtype, n, seed):
    """To the bit. What fills a row up may be anything."""
    x = raw_rows(n, dim, dtype, seed)
    want = pack(x)
    got, end = copied(x, want, dim), 2 * dim + 8 * -(-dim // 64)
    assert torch.equal(got.flatten(1)[:, :end], want.flatten(1)[:, :end])
    assert torch.equal(copied(want, x, dim), as_numbers(want, dtype))
    assert torch.equal(copied(x, x, dim), x)
    if dim > 16:
        x[0, 0, 3], x[0, 1, 5] = math.nan, math.inf
        assert torch.equal(*(t[0].isnan() for t in (copied(copied(x, want, dim), x, dim), as_numbers(pack(x), dtype))))


# ---------------------------------------------------------------- the ops


def test_ops_with_packed_pools_are_pinned():
    assert {"append", "flush_ring", "store_prompt", "fetch", "prompt_attention", "dense_attention"} <= set(TAKING)


def unpacked(things: tuple) -> list[torch.Tensor]:
    """To compare them: packed rows as numbers, as what fills them up counts for nothing."""
    return [as_numbers(t, torch.float32) if t.dtype == torch.int8 else t for t in tensors(things)]


@pytest.mark.parametrize(("name", "kind"), [p for p in KERNELS if (getattr(p, "values", p))[0] in TAKING])
@settings(max_examples=max(settings().max_examples // 2, 1))  # test_ops has the same kernels
@given(data=st.data())
def test_kernel_equals_reference(name, kind, data):
    tokens = st.integers(1, 9) if name in MANY_TOKENS else st.just(1)
    entry, things = ENTRIES[name], packed(name, OPS[name](data.draw(worlds(tokens=tokens))))
    want_things, got_things = clones(things), on(DEVICE, clones(things))
    if kind == "cuda" and entry.chain.chosen(*got_things)[0] != "cuda":
        return
    want, got = entry.reference(*want_things), entry.run(kind, *got_things)
    for g, x in zip(unpacked(got_things), unpacked(want_things), strict=True):
        close(g.cpu(), x, f"{name} argument")
    for g, x in zip(tensors((got,)), tensors((want,)), strict=True):
        close(g.cpu(), x, name)


@pytest.mark.parametrize("name", TAKING)
def test_opcheck(name):
    things = packed(name, OPS[name](World(tokens=3 if name in MANY_TOKENS else 1)))
    torch.library.opcheck(ENTRIES[name].op, tuple(flat(on(DEVICE, things))))


@pytest.mark.parametrize("name", TAKING)
def test_a_packed_pool_of_another_width_is_refused(name):
    things = packed(name, OPS[name](World(tokens=3 if name in MANY_TOKENS else 1)))
    wider = lambda t: torch.nn.functional.pad(t, (0, 8))  # noqa: E731
    wrong = [
        x._replace(pool=wider(x.pool)) if hasattr(x, "pool") else wider(x) if taken.name == "pool" else x
        for x, taken in zip(things, ENTRIES[name].signature.parameters)
    ]
    with pytest.raises(ValueError, match=r"\w*\.?pool must have shape .*, 2, 24\), got .*, 2, 32\)"):
        ENTRIES[name].call(*wrong)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fetch_kernel_for_packed_pools(dtype):
    """csrc/fetch.cu makes halves of them; fp32 is left to Triton, with the reason."""
    asked, _, hot, *_ = things = OPS["fetch"](World(dim=64, dtype=dtype))
    pool = pack(torch.zeros(hot.rows.shape[-2:]))
    told = FETCH.native(asked.ids.shape[2], hot.rows, pool)
    if dtype == torch.float32:
        assert told == "packed rows become halves of multiples of 16 channels, not 64 of torch.float32"
    else:
        assert told["UNPACK"] == 64
        assert told["BF16"] == (dtype == torch.bfloat16)
    assert FETCH.native(asked.ids.shape[2], hot.rows, hot.rows)["UNPACK"] == 0
    if DEVICE.type == "cuda":
        kind, _ = ENTRIES["fetch"].chain.chosen(*on(DEVICE, packed("fetch", things)))
        assert kind == ("triton" if dtype == torch.float32 else "cuda")


@given(w=worlds(), kind=st.sampled_from(["reference", "triton"]))
def test_fetched_blocks_equal_raw_tokens_within_half_a_step(w, kind):
    """From what the world holds, and not from what was stored."""
    lead, n = (w.batch, w.heads), min(w.blocks, 5)
    empty = lambda *shape: torch.full((*lead, *shape), -1, dtype=torch.int32)  # noqa: E731
    rows = torch.full((*lead, n, w.block, 2, w.dim), torch.nan, dtype=w.dtype)
    none = empty() + 1
    hot = HotBuffer(rows, empty(w.blocks), empty(n), empty(n) + 1, none, none.clone(), empty(n))
    ids = torch.arange(w.blocks, dtype=torch.int32).flip(0)[:n].expand(*lead, n).contiguous()
    things = (Selection(ids), pack(w.truth), hot, Stats(torch.zeros(*lead, 5, dtype=torch.int64)))
    things = things if kind == "reference" else on(DEVICE, things)
    ENTRIES["fetch"].run(kind, *things)
    pages = w.truth.unflatten(2, (-1, w.block))[:, :, ids[0, 0].long()]
    got = things[2].rows.cpu().gather(2, things[2].chosen.cpu().long()[..., None, None, None].expand_as(pages))
    rounding = torch.finfo(w.dtype).eps * pages.float().abs()
    assert ((got.float() - pages.float()).abs() <= largest(pages) / 254 * (1 + 1e-3) + rounding).all()
