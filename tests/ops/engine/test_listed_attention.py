"""listed_attention by the CUDA kernel, over lists of any length, of whole blocks and of single tokens."""
import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import NATIVE, on
from world import DEVICE, TOLERANCE

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.store.views import Attention

SHAPES = importlib.import_module("torchsparsekv.ops.attend._native")
ENTRY = load_all()["listed_attention"]
HEADS, I32 = 2, torch.int32


def arguments(requests: int, listed: int, block: int, group: int = 4, dim: int = 128, **given) -> tuple:
    """Lists with empty places, and blocks that are partly filled. The last request has no token."""
    dtype, g = given.get("dtype", torch.bfloat16), torch.Generator().manual_seed(given.get("seed", 0))
    blocks = max(64, listed)
    pool = torch.randn(1, HEADS, blocks * block, 2, dim, generator=g)
    pool[..., 1, :] += 1  # so that a token that is missing changes the output
    q = torch.randn(requests, HEADS * group, 1, dim, generator=g)
    if given.get("strided"):
        q = torch.nn.functional.pad(q, (0, 0, 0, 0, 0, 8))[:, :-8]
    ids = torch.randint(-1, blocks, (requests, HEADS, listed), generator=g, dtype=I32)
    ids[torch.rand(ids.shape, generator=g) < 0.2] = -1
    ids[-1] = -1
    fill = torch.randint(0, block + 1, ids.shape, generator=g, dtype=I32)
    length = torch.full((requests,), blocks * block, dtype=I32)
    length[-1] = 0
    sinks = torch.randn(HEADS * group, generator=g).to(dtype) if given.get("sinks") else None
    attention = Attention(dim**-0.5, given.get("softcap", 0.0), sinks)
    out = torch.full((requests, HEADS * group, 1, dim), torch.nan, dtype=dtype)
    return q.to(dtype), pool.to(dtype), ids, fill, length, block, attention, out


def both(kind: str, things: tuple) -> tuple[torch.Tensor, torch.Tensor]:
    there = on(DEVICE, things)
    ENTRY.run(kind, *there)
    ENTRY.reference(*things)
    return there[-1].cpu(), things[-1]


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", SHAPES.DIMS)
@given(
    requests=st.integers(1, 3), listed=st.sampled_from([1, 7, 90, 700]), block=st.sampled_from([1, 16]),
    group=st.sampled_from([1, 3, 4, SHAPES.MOST_HEADS]), dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99), strided=st.booleans(), sinks=st.booleans(), softcap=st.sampled_from([0.0, 5.0]),
)  # fmt: skip
def test_cuda_kernel_equals_reference(dim, cluster, requests, listed, block, group, dtype, **given):
    things = arguments(requests, listed, block, group, dim, dtype=dtype, **given)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(SHAPES, "cluster_of", lambda *_: cluster)
        got, want = both("cuda", things)
    torch.testing.assert_close(got, want, rtol=0, atol=2 * TOLERANCE[dtype])


@pytest.mark.parametrize("kind", ["reference", "triton", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_request_without_a_token_gets_zeros(kind):
    """In memory that had other numbers."""
    got, _ = both(kind, arguments(2, 9, 4, dim=64, dtype=torch.float16))
    assert [bool(x.any()) for x in got] == [True, False]
    assert not got.isnan().any()


@pytest.mark.parametrize("block", [1, 16])
def test_cuda_kernel_runs_at_the_usual_shapes(block):
    assert ENTRY.chain.chosen(*on(DEVICE, arguments(2, 90, block))) == NATIVE
