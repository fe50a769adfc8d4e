"""What the worlds of test_ops.py are too short for: several programs a head, several turns of each."""
import importlib

import pytest
import torch
from cases import OPS
from hypothesis import given
from hypothesis import strategies as st
from test_bound_scores import NATIVE
from test_ops import on
from world import DEVICE, TOLERANCE, World

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.icecache._residual import coded
from torchsparsekv.ops.icecache._tree import own, spans_of
from torchsparsekv.ops.icecache.views import Leaves, Visited
from torchsparsekv.ops.select._top import peaks_of

PEAKS = importlib.import_module("torchsparsekv.ops.icecache.page_peaks")
VISIT = importlib.import_module("torchsparsekv.ops.icecache.visit_nodes")
ENTRY = load_all()["page_peaks"]


@given(
    seed=st.integers(0, 999), group=st.sampled_from([1, 3, 4]), looked=st.sampled_from([16, 32]),
    lengths=st.lists(st.integers(1, 240), min_size=1, max_size=2), codes=st.booleans(),
)  # fmt: skip
def test_pages_are_shared_by_programs(seed, group, looked, lengths, codes):
    w = World(
        lengths=lengths, group=group, dim=16, block=4, rows=256, seed=seed, pick=lambda *options: options[codes]
    )
    things = OPS["page_peaks"](w)
    rows = things[2].node.shape[2]
    with pytest.MonkeyPatch.context() as m:
        m.setattr(PEAKS, "TILE", 16)
        m.setattr(PEAKS, "LOOKED", looked)
        got, peaks = ENTRY.run("triton", *on(DEVICE, things))
    assert rows > 3 * 64
    torch.testing.assert_close(got.cpu(), ENTRY.reference(*things)[0], rtol=0, atol=TOLERANCE[w.dtype])
    assert torch.equal(peaks, peaks_of(got))


def many(shape, page: int, dtype, share: float, seed: int):
    """Leaves of random codes and two batch rows, of whose nodes the query heads see a share. Some rows hold nothing;
    of a page no token, some or all are nodes."""
    heads, group, pages, dim = shape
    g = torch.Generator().manual_seed(seed)
    lead, rows, nodes = (2, heads), pages * page, 1 + pages * page // 16
    codes, scale = coded(torch.randn(*lead, rows, dim, generator=g))
    node = torch.randint(-1, nodes, (*lead, rows), generator=g).sort(-1).values.int()
    part = torch.tensor([0, 0.3, 1])[torch.randint(3, (*lead, pages), generator=g)].repeat_interleave(page, -1)
    itself = (node > 0) & (torch.rand(node.shape, generator=g) < part)
    node = torch.where(itself, own(node), node)
    scale[itself] = 0
    products = torch.randn(2, heads, nodes, group, generator=g)
    products[torch.rand(products.shape, generator=g) >= share**0.5] = -torch.inf
    products[:, :, 0] = 0  # the root
    best = products.sort(2, descending=True).values
    few = torch.randint(0, max(1, int(share**0.5 * nodes)), (2, heads, 1, group), generator=g)  # or more than there are
    least = best.gather(2, few)[:, :, 0].clamp(min=torch.finfo(torch.float32).min)
    q = torch.randn(2, heads * group, 1, dim, generator=g).to(dtype)
    leaves = Leaves(codes, scale, node, torch.zeros(*lead, pages, dtype=torch.int32), spans_of(node, pages))
    return q, Visited(products, least), leaves, 1


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [0, PEAKS.RESIDENT])
@pytest.mark.parametrize(("dim", "group"), [(64, 1), (64, 8), (128, 4), (128, 3), (256, 5)])
@given(
    page=st.sampled_from(PEAKS.NATIVE_PAGES), pages=st.sampled_from([1, 15, 16, 17, 100, 3000]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]), share=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    always=st.sampled_from([1, 32]), strided=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_native(resident, dim, group, page, pages, dtype, share, always, strided, seed):
    """csrc/page_peaks.cu by one program a head, in turns, and by many; and Triton's kernel at the same shapes."""
    things = (*many((2, group, pages, dim), page, dtype, share, seed)[:3], always)
    q, *rest = on(DEVICE, things)
    if strided:  # as if it were cut from the output of one product for q, k and v
        q = q.transpose(1, 2).repeat(1, 1, 1, 3)[..., dim : 2 * dim].transpose(1, 2)
    assert ENTRY.chain.chosen(q, *rest) == ("cuda", {})
    want, _ = ENTRY.reference(*things)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(PEAKS, "RESIDENT", resident)
        results = [ENTRY.run(kind, q, *rest) for kind in ("cuda", "triton")]
    for got, peaks in results:
        torch.testing.assert_close(got.cpu(), want, rtol=0, atol=TOLERANCE[dtype] * dim**0.5)
        assert torch.equal(peaks, peaks_of(got))


ODD = {
    "float32": "queries in torch.float32",
    "keys": "leaves that are keys, not codes",
    "page": "head_dim 128, pages of 32 and 2 query heads a kv head",
    "group": "head_dim 128, pages of 16 and 9 query heads a kv head",
    "head_dim": "head_dim 80, pages of 16 and 2 query heads a kv head",
}


@pytest.mark.parametrize("odd", ODD)
def test_triton_is_left_what_the_native_kernel_is_not_for(odd):
    dtype = torch.float32 if odd == "float32" else torch.float16
    dim, group = 80 if odd == "head_dim" else 128, 9 if odd == "group" else 2
    q, of, leaves, always = many((1, group, 3, dim), 32 if odd == "page" else 16, dtype, 0.5, 0)
    if odd == "keys":
        keys = torch.randn(*leaves.node.shape, dim).to(dtype)
        leaves = leaves._replace(key=keys, scale=leaves.scale[..., :0].contiguous())
    assert ENTRY.chain.chosen(*on(DEVICE, (q, of, leaves, always))) == ("triton", {"cuda": ODD[odd]})


def test_every_query_head_has_a_least_product():
    q, of, leaves, always = on(DEVICE, many((1, 2, 3, 64), 16, torch.float16, 0.5, 0))
    with pytest.raises(ValueError, match=r"visited.least must have shape \(2, 1, 2\), got \(2, 1, 1\)"):
        PEAKS.page_peaks(q, of._replace(least=of.least[..., :1]), leaves, always)


def test_the_root_is_expanded():
    q, of, leaves, _ = on(DEVICE, many((1, 2, 3, 64), 16, torch.float16, 0.5, 0))
    with pytest.raises(ValueError, match="the root is expanded always, so at least 1 node, got 0"):
        PEAKS.page_peaks(q, of, leaves, 0)


def test_what_the_native_kernel_is_for():
    assert ENTRY.chain.chosen(*on(DEVICE, many((1, 4, 3, 128), 16, torch.float16, 0.5, 0))) == NATIVE
