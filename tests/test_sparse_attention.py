"""What the worlds of test_ops.py are too short for: several tiles a warp, several programs a head."""
import dataclasses

import pytest
import torch
from cases import OPS
from hypothesis import given
from hypothesis import strategies as st
from world import DEVICE, TOLERANCE, World

from torchsparsekv.ops.attend import sparse_attention as op


@dataclasses.dataclass
class Long(World):
    """A ring of 500 rows that has turned, or not; up to 250 chosen blocks."""

    sink: int = 30
    window: int = 270
    interval: int = 200
    rows: int = 800


def at(arguments: tuple, device: torch.device) -> list:
    return [x.to(device) if isinstance(x, torch.Tensor) else x for x in arguments]


@pytest.mark.gpu
@pytest.mark.parametrize("cluster", [1, 2, 4, 8])
@pytest.mark.parametrize("dim", op.NATIVE_DIMS)
@given(
    lengths=st.lists(st.integers(-1, 800), min_size=1, max_size=3), group=st.sampled_from([1, 3, 4, op.NATIVE_GROUP]),
    block=st.sampled_from([1, 16, 20]), dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 99), strided=st.booleans(),
)  # fmt: skip
def test_native(dim, cluster, lengths, group, block, dtype, seed, strided):
    """csrc/sparse_attention.cu. Lengths below 0 are of rows past their capacity; dead rows are NaN."""
    w = Long(lengths=[max(n, 1) for n in lengths], group=group, dim=dim, block=block, dtype=dtype, seed=seed)
    q, ring, hot, places, length, *rest = OPS["sparse_attention"](w)
    length[torch.tensor(lengths) < 0] = -1
    q = q if strided else q.contiguous()
    want = op.reference(q, ring, hot, places, length, *rest)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(op, "_cluster", lambda *_: cluster), m.setattr(op, "_by_triton", None)  # not taken
        got = op.cuda(*at((q, ring, hot, places, length, *rest), DEVICE)).cpu()
    torch.testing.assert_close(got, want, rtol=0, atol=2 * TOLERANCE[dtype], equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("broken", ["q", "ring"])
def test_nan_and_infinity_of_live_rows_arrive(broken):
    """As in the reference: a NaN of one head, or of a row that counts, is in what it touches and nowhere else."""
    w = Long(lengths=[700, 90], group=4, dim=128, dtype=torch.bfloat16)
    q, ring, *rest = OPS["sparse_attention"](w)
    if broken == "q":
        q[0, 2] = torch.nan
    else:
        ring[1, 1, 3, 1, 5] = torch.inf
    got = op.cuda(*at((q, ring, *rest), DEVICE)).cpu()
    want = op.reference(q, ring, *rest)
    torch.testing.assert_close(got, want, rtol=0, atol=2 * TOLERANCE[q.dtype], equal_nan=True)
    assert (want.isnan() | want.isinf()).sum() == (128 if broken == "q" else 4)


@pytest.mark.gpu
@pytest.mark.parametrize("odd", ["float32", "head_dim", "group", "sinks", "strides"])
def test_triton_is_left_what_the_native_kernel_is_not_for(odd):
    w = Long(
        dim=80 if odd == "head_dim" else 64, group=9 if odd == "group" else 2, seed=1,
        dtype=torch.float32 if odd == "float32" else torch.float16,
    )  # fmt: skip
    q, ring, hot, places, length, retired, sinks, *rest = OPS["sparse_attention"](w)
    sinks = sinks.float() if odd == "sinks" else sinks.to(q.dtype)
    arguments = q, ring, hot, places, length, retired, sinks, *rest
    there = at(arguments, DEVICE)
    if odd == "strides":
        there[0] = torch.nn.functional.pad(there[0], (0, 3))[..., :64]
    assert op._native(*there[:3], there[6]) is None
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(op.cuda(*there).cpu(), op.reference(*arguments), rtol=0, atol=2 * tolerance)
