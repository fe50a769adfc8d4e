"""Longer than the worlds of test_ops.py: several programs a kv head, several rounds of each."""
import importlib

import pytest
import torch
from cases import OPS
from hypothesis import given
from hypothesis import strategies as st
from kernels import NATIVE, on
from world import DEVICE, TOLERANCE, World

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.icecache._residual import encode
from torchsparsekv.ops.icecache._tree import self_mark, spans_of
from torchsparsekv.ops.icecache.views import Leaves, Visited
from torchsparsekv.ops.select._top import peaks_of

PEAKS = importlib.import_module("torchsparsekv.ops.icecache.page_peaks")
VISIT = importlib.import_module("torchsparsekv.ops.icecache.visit_nodes")
ENTRY = load_all()["page_peaks"]


@given(
    seed=st.integers(0, 999), group=st.sampled_from([1, 3, 4]), rows=st.sampled_from([16, 32]),
    lengths=st.lists(st.integers(1, 240), min_size=1, max_size=2), codes=st.booleans(),
)  # fmt: skip
def test_kernel_equals_reference_with_several_programs_per_head(seed, group, rows, lengths, codes):
    w = World(
        lengths=lengths, group=group, dim=16, block=4, rows=256, seed=seed, pick=lambda *options: options[codes]
    )
    things = OPS["page_peaks"](w)
    pool_rows = things[2].node.shape[2]
    with pytest.MonkeyPatch.context() as m:
        m.setattr(PEAKS, "TILE", 16)
        m.setattr(PEAKS, "ROWS", rows)
        got, peaks = ENTRY.run("triton", *on(DEVICE, things))
    assert pool_rows > 3 * 64
    torch.testing.assert_close(got.cpu(), ENTRY.reference(*things)[0], rtol=0, atol=TOLERANCE[w.dtype])
    assert torch.equal(peaks, peaks_of(got))


def many(shape, page: int, dtype, share: float, seed: int):
    """Leaves of random codes in two batch rows. The query heads see a share of the nodes. Some rows hold no token. Of a
    page no token, some tokens or all tokens are nodes."""
    heads, group, pages, dim = shape
    g = torch.Generator().manual_seed(seed)
    lead, rows, nodes = (2, heads), pages * page, 1 + pages * page // 16
    codes, scale = encode(torch.randn(*lead, rows, dim, generator=g))
    node = torch.randint(-1, nodes, (*lead, rows), generator=g).sort(-1).values.int()
    part = torch.tensor([0, 0.3, 1])[torch.randint(3, (*lead, pages), generator=g)].repeat_interleave(page, -1)
    is_node = (node > 0) & (torch.rand(node.shape, generator=g) < part)
    node = torch.where(is_node, self_mark(node), node)
    scale[is_node] = 0
    products = torch.randn(2, heads, nodes, group, generator=g)
    products[torch.rand(products.shape, generator=g) >= share**0.5] = -torch.inf
    products[:, :, 0] = 0  # the root
    best = products.sort(2, descending=True).values
    rank = torch.randint(0, max(1, int(share**0.5 * nodes)), (2, heads, 1, group), generator=g)  # some beyond the last
    threshold = best.gather(2, rank)[:, :, 0].clamp(min=torch.finfo(torch.float32).min)
    q = torch.randn(2, heads * group, 1, dim, generator=g).to(dtype)
    leaves = Leaves(codes, scale, node, torch.zeros(*lead, pages, dtype=torch.int32), spans_of(node, pages))
    return q, Visited(products, threshold), leaves, 1


@pytest.mark.gpu
@pytest.mark.parametrize("resident", [0, PEAKS.RESIDENT])
@pytest.mark.parametrize(("dim", "group"), [(64, 1), (64, 8), (128, 4), (128, 3), (256, 5)])
@given(
    page=st.sampled_from(PEAKS.NATIVE_PAGES), pages=st.sampled_from([1, 15, 16, 17, 100, 3000]),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]), share=st.sampled_from([0.0, 0.01, 0.2, 1.0]),
    min_nodes=st.sampled_from([1, 32]), strided=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_cuda_kernel_equals_reference(resident, dim, group, page, pages, dtype, share, min_nodes, strided, seed):
    """csrc/page_peaks.cu with one program a kv head, in rounds, and with many; and Triton at the same shapes."""
    things = (*many((2, group, pages, dim), page, dtype, share, seed)[:3], min_nodes)
    q, *rest = on(DEVICE, things)
    if strided:  # a slice of one projection for q, k and v
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
def test_triton_runs_what_the_cuda_kernel_does_not_support(odd):
    dtype = torch.float32 if odd == "float32" else torch.float16
    dim, group = 80 if odd == "head_dim" else 128, 9 if odd == "group" else 2
    q, visited, leaves, min_nodes = many((1, group, 3, dim), 32 if odd == "page" else 16, dtype, 0.5, 0)
    if odd == "keys":
        keys = torch.randn(*leaves.node.shape, dim).to(dtype)
        leaves = leaves._replace(key=keys, scale=leaves.scale[..., :0].contiguous())
    assert ENTRY.chain.chosen(*on(DEVICE, (q, visited, leaves, min_nodes))) == ("triton", {"cuda": ODD[odd]})


def test_wrong_shape_of_least_products_is_refused():
    q, visited, leaves, min_nodes = on(DEVICE, many((1, 2, 3, 64), 16, torch.float16, 0.5, 0))
    with pytest.raises(ValueError, match=r"visited.threshold must have shape \(2, 1, 2\), got \(2, 1, 1\)"):
        PEAKS.page_peaks(q, visited._replace(threshold=visited.threshold[..., :1]), leaves, min_nodes)


def test_children_of_the_root_are_always_visible():
    q, visited, leaves, _ = on(DEVICE, many((1, 2, 3, 64), 16, torch.float16, 0.5, 0))
    with pytest.raises(ValueError, match="the root is always expanded, so min_nodes must be at least 1, got 0"):
        PEAKS.page_peaks(q, visited, leaves, 0)


def test_cuda_kernel_runs_at_the_usual_shapes():
    assert ENTRY.chain.chosen(*on(DEVICE, many((1, 4, 3, 128), 16, torch.float16, 0.5, 0))) == NATIVE
