"""dense_attention over packed rows, in csrc/dense_attention.cu, at shapes with several programs and warps per head."""
import importlib
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernels import on, until
from world import DEVICE

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.attend import _native as shapes
from torchsparsekv.ops.store.rows import PACKED, as_numbers, as_stored, row_shape
from torchsparsekv.ops.store.views import Attention

DENSE = importlib.import_module("torchsparsekv.ops.attend.dense_attention")
ENTRY = load_all()["dense_attention"]
ROWS, HEADS = 700, 2
CLOSE = {torch.float16: dict(rtol=0, atol=2e-3), torch.bfloat16: dict(rtol=0, atol=1e-2)}  # of what `scaled` returns


def brute_force(q, pool, lengths, attention) -> torch.Tensor:
    """By definition, in fp64, row by row and head by head."""
    out = torch.zeros_like(q, dtype=torch.float64)
    numbers = as_numbers(pool, torch.float32).double()
    group = q.shape[1] // HEADS
    for b, length in enumerate(lengths):
        for h in range(q.shape[1]):
            rows = numbers[b, h // group, : max(length, 0)]
            z = rows[:, 0] @ q[b, h, 0].double() * attention.scale
            z = attention.softcap * torch.tanh(z / attention.softcap) if attention.softcap else z
            sink = [] if attention.sink_logits is None else [attention.sink_logits[h].double().view(1)]
            p = torch.cat([z, *sink]).softmax(0)[:length] if len(z) else z
            out[b, h, 0] = torch.nan if length < 0 else p @ rows[:, 1]
    return out


def scaled(out: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """The output, divided by the largest value of the head in the group of 64 channels. So small values count."""
    values = as_numbers(pool, torch.float32)[:, :, :, 1].double().nan_to_num(0).unflatten(-1, (-1, 64))
    most = values.abs().amax((2, 4)).clamp(min=1e-30).repeat_interleave(out.shape[1] // HEADS, 1)
    return out.double().unflatten(-1, (-1, 64)) / most[:, :, None, :, None]


@pytest.mark.gpu
@pytest.mark.parametrize("dim", shapes.DIMS)
@given(
    lengths=st.lists(st.sampled_from([-1, 0, 1, 15, 16, 17, 129, 400, ROWS]), min_size=1, max_size=4),
    group=st.sampled_from([1, 3, 4, shapes.MOST_HEADS]), dtype=st.sampled_from(list(CLOSE)),
    softcap=st.sampled_from([0.0, 5.0]), sinks=st.booleans(), splits=st.sampled_from([1, 2, 5]),
    seed=st.integers(0, 99), strided=st.booleans(),
)  # fmt: skip
def test_cuda_kernel_equals_brute_force(dim, lengths, group, dtype, softcap, sinks, splits, seed, strided):
    """Rows past the end hold NaN. Every group of 64 channels has a scale of its own, and values are small."""
    g = torch.Generator().manual_seed(seed)
    batch, heads = len(lengths), HEADS * group
    q = torch.randn(batch, 1, heads, dim, generator=g).to(dtype).transpose(1, 2)
    size = 10.0 ** torch.randint(-2, 2, (batch, HEADS, ROWS, 2, dim // 64, 1), generator=g)
    size[:, :, :, 1] *= 0.1
    raw = torch.randn(batch, HEADS, ROWS, 2, dim, generator=g).unflatten(-1, (-1, 64)) * size
    pool = as_stored(raw.flatten(-2).to(dtype), torch.empty(0, *row_shape(dim, PACKED), dtype=PACKED))
    used = pool.clone()
    for b, length in enumerate(lengths):
        pool[b, :, max(length, 0) :] = -1  # a scale of these bytes is NaN
        used[b, :, max(length, 0) :] = 0
    attention = Attention(dim**-0.5, softcap, torch.randn(heads, generator=g).to(dtype) if sinks else None)
    things = (q if strided else q.contiguous(), pool, until(lengths, 0), attention)
    with pytest.MonkeyPatch.context() as m:
        m.setattr(DENSE, "_splits", lambda *_: splits)
        got = ENTRY.run("cuda", *on(DEVICE, things)).cpu()
    want = brute_force(q, pool, lengths, attention)
    torch.testing.assert_close(scaled(got, used), scaled(want, used), equal_nan=True, **CLOSE[dtype])


def outweighed(dtype: torch.dtype) -> tuple:
    """A first token whose value is 0, with a weight of e^7 times that of the others, whose values are small."""
    g = torch.Generator().manual_seed(0)
    q = torch.randn(1, HEADS, 1, 128, generator=g).to(dtype)
    raw = torch.zeros(1, HEADS, ROWS, 2, 128)
    raw[:, :, 0, 0] = 7 * 128**0.5 * q[:, :, 0].float() / q.float().square().sum(-1)
    raw[:, :, 1:, 1] = 0.01 * torch.rand(1, HEADS, ROWS - 1, 128, generator=g)
    return q, as_stored(raw.to(dtype), torch.empty(0, *row_shape(128, PACKED), dtype=PACKED)), Attention(128**-0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CLOSE)
def test_small_weights_of_small_values_count(dtype):
    """A weight times a scale of values is near the least number of fp16."""
    q, pool, attention = outweighed(dtype)
    got = ENTRY.run("cuda", *on(DEVICE, (q, pool, until([ROWS], 0), attention))).cpu()
    torch.testing.assert_close(got.double(), brute_force(q, pool, [ROWS], attention), rtol=0.02, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", CLOSE)
@pytest.mark.parametrize("half", [0, 1])
def test_a_token_that_is_not_finite_shows(dtype, half):
    """In its own head and row only."""
    raw = torch.randn(2, HEADS, ROWS, 2, 128).to(dtype)
    raw[1, 0, 333, half, 70] = math.inf
    pool = as_stored(raw, torch.empty(0, *row_shape(128, PACKED), dtype=PACKED))
    things = (torch.randn(2, 4 * HEADS, 1, 128).to(dtype), pool, until([ROWS, ROWS], 0), Attention(128**-0.5))
    bad = ENTRY.run("cuda", *on(DEVICE, things)).cpu().isnan().any(-1)[..., 0]
    assert bad[1, :4].all()
    assert bad.sum() == 4


def test_programs_of_few_heads_run_at_once_and_of_many_in_rounds(monkeypatch):
    """On an H200. 51 sequences have 408 heads. In several rounds the last one, which may not be full, costs little."""
    monkeypatch.setattr(DENSE, "sm_count", lambda _: 132)
    splits = [DENSE._splits(DEVICE, heads) for heads in (8, 33, 34, 408, 5000)]
    assert splits == [33, 8, 63, 6, 1]
    assert DENSE._splits(DEVICE, 8, 1) == 16


@pytest.mark.parametrize(
    ("gpu", "most", "want"),
    [("H200", 232_448, {64: (2, 4), 128: (2, 3), 256: (1, 3)}),
     ("A100", 166_912, {64: (2, 4), 128: (2, 2), 256: (1, 2)}),
     ("RTX 4090", 101_376, {64: (2, 2), 128: (1, 2), 256: (1, 1)})],
)  # fmt: skip
def test_a_queue_fits_shared_memory(gpu, most, want, monkeypatch):
    """Several programs on a multiprocessor, if each warp then has room for two tiles."""
    monkeypatch.setattr(DENSE, "shared_bytes", lambda _: most)
    assert {dim: DENSE._queue(DEVICE, dim) for dim in shapes.DIMS} == want


@pytest.mark.parametrize(
    ("dim", "group", "dtype", "packed", "why"),
    [
        (128, 4, torch.bfloat16, False, None), (96, 4, torch.bfloat16, True, "head_dim 96"),
        (128, 9, torch.bfloat16, True, "9 query heads a kv head"),
        (128, 4, torch.float32, True, "queries in torch.float32"),
    ],
)  # fmt: skip
def test_triton_takes_other_shapes(dim, group, dtype, packed, why):
    """And pools that are not packed, for which there is no CUDA kernel."""
    pool = torch.zeros(1, HEADS, 16, *row_shape(dim, PACKED if packed else dtype), dtype=PACKED if packed else dtype)
    q = torch.zeros(1, group * HEADS, 1, dim, dtype=dtype)
    kind, reasons = ENTRY.chain.chosen(q, pool, until([16], 0), Attention(1.0))
    assert kind == "triton"
    assert reasons.keys() == ({"cuda"} if why else set())
    assert not why or why in reasons["cuda"]
