"""listed_attention over lists of any length, of whole blocks and of single tokens, with the rest and without it."""
import importlib
import itertools

import pytest
import torch
from cases_engine import sums_of
from hypothesis import given
from hypothesis import strategies as st
from kernels import NATIVE, on
from world import DEVICE, TOLERANCE

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.engine.tables import lengths_of
from torchsparsekv.ops.engine.views import BlockRest, Listing
from torchsparsekv.ops.store.views import Attention, BlockTable, Lengths

SHAPES = importlib.import_module("torchsparsekv.ops.attend._native")
LIST_UNITS = importlib.import_module("torchsparsekv.ops.engine.list_units")
ENTRY = load_all()["listed_attention"]
HEADS, I32 = 2, torch.int32


def arguments(requests: int, listed: int, unit: int, group: int = 4, dim: int = 128, **given) -> tuple:
    """Lists with empty places, and units that are partly filled. The last request has no token."""
    dtype, g = given.get("dtype", torch.bfloat16), torch.Generator().manual_seed(given.get("seed", 0))
    units = max(64, listed)
    pool = torch.randn(1, HEADS, units, unit, 2, dim, generator=g)
    pool[..., 1, :] += 1  # so that a token that is missing changes the output
    ids = torch.randint(-1, units, (requests, HEADS, listed), generator=g, dtype=I32)
    ids[torch.rand(ids.shape, generator=g) < 0.2] = -1
    ids[-1] = -1
    fill = torch.randint(0, unit + 1, ids.shape, generator=g, dtype=I32)
    length = torch.full((requests,), units * unit, dtype=I32)
    length[-1] = 0
    return (*asked(requests, group, dim, g, given), pool.to(dtype), Listing(ids, fill), lengths_of(length, 0, 1, 1))


def asked(requests: int, group: int, dim: int, g: torch.Generator, given: dict) -> tuple:
    dtype = given.get("dtype", torch.bfloat16)
    q = torch.randn(requests, HEADS * group, 1, dim, generator=g)
    if given.get("strided"):
        q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, 8))[:, :-8]
    sinks = torch.randn(HEADS * group, generator=g).to(dtype) if given.get("sinks") else None
    return q.to(dtype), Attention(dim**-0.5, given.get("softcap", 0.0), sinks)


def both(kind: str, q, attention, pool, listing, lengths: Lengths, *rest) -> tuple[torch.Tensor, torch.Tensor]:
    rest = rest or (BlockRest(),)
    got, want = (torch.full(q.shape, torch.nan, dtype=q.dtype) for _ in range(2))
    there = on(DEVICE, (q, pool, listing, lengths, attention, got, *rest))
    ENTRY.run(kind, *there)
    ENTRY.reference(q, pool, listing, lengths, attention, want, *rest)
    return there[5].cpu(), want


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", SHAPES.DIMS)
@given(
    requests=st.integers(1, 3), listed=st.sampled_from([1, 7, 90, 700]), unit=st.sampled_from([1, 16]),
    group=st.sampled_from([1, 3, 4, SHAPES.MOST_HEADS]), dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99), strided=st.booleans(), sinks=st.booleans(), softcap=st.sampled_from([0.0, 5.0]),
)  # fmt: skip
def test_cuda_kernel_equals_reference(dim, cluster, requests, listed, unit, group, dtype, **given):
    with pytest.MonkeyPatch.context() as m:
        m.setattr(SHAPES, "cluster_of", lambda *_: cluster)
        got, want = both("cuda", *arguments(requests, listed, unit, group, dim, dtype=dtype, **given))
    torch.testing.assert_close(got, want, rtol=0, atol=2 * TOLERANCE[dtype])


def with_rest(tokens: list[int], chosen: int, unit: int, block: int, group: int = 4, dim: int = 128, **given) -> tuple:
    """Requests of so many tokens, whose first block they share. `chosen` units of each head are selected, which differ
    from the means of their blocks."""
    dtype, g = given.get("dtype", torch.bfloat16), torch.Generator().manual_seed(given.get("seed", 0))
    places, sink, window, interval = -(-max(tokens) // block), block, 100, 2 * block
    table = torch.randperm(len(tokens) * places + 1, generator=g)[:-1].view(len(tokens), -1).int()
    table[:, 0] = table[0, 0]
    lengths = lengths_of(torch.tensor(tokens, dtype=I32), sink, window, interval)
    pool = torch.randn(1, HEADS, (len(tokens) * places + 1) * block, 2, dim, generator=g)
    pool[..., 1, :] += 1
    selected = torch.full((len(tokens), HEADS, chosen), -1, dtype=I32)
    for b, end in enumerate((lengths.ring_begin // unit).tolist()):
        for h in range(HEADS):
            some = torch.randperm(max(end - sink // unit, 0), generator=g)[: int(chosen * 0.9)] + sink // unit
            selected[b, h, : len(some)] = some.sort().values
    q, attention = asked(len(tokens), group, dim, g, given)
    listing = Listing(*LIST_UNITS.reference(selected, lengths, BlockTable(table, block), window, unit))
    nth = listing.ids[..., listing.ids.shape[2] - chosen :].long()
    for b, h in itertools.product(range(len(tokens)), range(HEADS)):  # keys that the queries of the head like
        mean = q.float().unflatten(1, (HEADS, -1)).mean(2)[b, h, 0]
        liked = nth[b, h][nth[b, h] >= 0]
        pool.unflatten(2, (-1, unit))[0, h, liked, :, 0] += 2 * dim**0.5 * mean / mean.square().sum()
    pool = pool.to(dtype).unflatten(2, (-1, unit))
    return q, attention, pool, listing, lengths, BlockRest(sums_of(pool, block), block, table, selected)


@pytest.mark.parametrize(
    ("kind", "cluster"), [("triton", 1), *(pytest.param("cuda", c, marks=pytest.mark.gpu) for c in (1, 4, 8))]
)
@pytest.mark.parametrize(("unit", "block"), [(1, 16), (1, 64), (16, 16), (16, 64)])
def test_kernels_equal_reference_with_the_rest(cluster, unit, block, kind):
    """More blocks than a tile has; one request has a single block behind the sinks, one nothing but its sinks, and one
    no token."""
    small = DEVICE.type == "cpu"
    dtype = torch.float32 if small else torch.bfloat16
    tokens = [2500 if small else 9000, 99 + 4 * block, block // 2, 0]
    with pytest.MonkeyPatch.context() as m:
        m.setattr(SHAPES, "cluster_of", lambda *_: cluster)
        things = with_rest(tokens, 320 // unit, unit, block, dim=64 if small else 128, dtype=dtype)
        got, want = both(kind, *things)
    *without, _ = things
    assert bool((both("reference", *without)[0] - want).abs().max() > 0.03)  # what the rest changes
    tolerance = dict(rtol=1e-4, atol=1e-4) if small else dict(rtol=2**-7, atol=5e-3)
    torch.testing.assert_close(got, want, **tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 8])
@given(
    tokens=st.lists(st.integers(0, 3000), min_size=1, max_size=3), unit=st.sampled_from([1, 16]),
    block=st.sampled_from([16, 64]), group=st.sampled_from([1, 3, 8]), dim=st.sampled_from(SHAPES.DIMS),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]), seed=st.integers(0, 99), strided=st.booleans(),
    sinks=st.booleans(), softcap=st.sampled_from([0.0, 5.0]), sms=st.sampled_from([1, 132]),
)  # fmt: skip
def test_cuda_kernel_equals_reference_with_the_rest(cluster, tokens, unit, block, group, dim, dtype, sms, **given):
    """For one multiprocessor programs have 8 warps, else 16."""
    with pytest.MonkeyPatch.context() as m:
        m.setattr(SHAPES, "cluster_of", lambda *_: cluster)
        m.setattr(SHAPES, "sm_count", lambda _: sms)
        things = with_rest([*tokens, 700], 160 // unit, unit, block, group, dim, dtype=dtype, **given)
        got, want = both("cuda", *things)
    torch.testing.assert_close(got, want, rtol=2**-7, atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["reference", "triton", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_request_without_a_token_gets_zeros(kind):
    """In memory that had other numbers."""
    got, _ = both(kind, *arguments(2, 9, 4, dim=64, dtype=torch.float16))
    assert [bool(x.any()) for x in got] == [True, False]
    assert not got.isnan().any()


@pytest.mark.parametrize("rest", [False, True])
@pytest.mark.parametrize("unit", [1, 16])
def test_cuda_kernel_runs_at_the_usual_shapes(unit, rest):
    q, attention, *things = with_rest([900, 300], 160 // unit, unit, 16)
    pool, listing, lengths, of_blocks = things
    given = (q, pool, listing, lengths, attention, torch.empty_like(q), of_blocks if rest else BlockRest())
    assert ENTRY.chain.chosen(*on(DEVICE, given)) == NATIVE


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (dict(group=24), "whole units of 16 tokens, and sink 16 and interval 32 in whole blocks, got blocks of 24"),
        (dict(group=64), "sink 16 and interval 32 in whole blocks, got blocks of 64"),
        (dict(table=None), "rest needs a table, and the selected units, which stand last in the list"),
        (dict(selected=torch.zeros(1, HEADS, 99, dtype=I32)), "the selected units, which stand last in the list"),
    ],
)
def test_rest_that_does_not_fit_the_blocks_is_refused(change, says):
    q, attention, pool, listing, lengths, rest = with_rest([300], 4, 16, 16)
    with pytest.raises(ValueError, match=says):
        ENTRY.call(q, pool, listing, lengths, attention, torch.empty_like(q), rest._replace(**change))
