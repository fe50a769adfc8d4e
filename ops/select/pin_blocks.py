"""Static blocks are chosen whatever their digests say: their scores, and the peaks of these, become infinite.

They stand in front of all that can be retrieved: `count` tokens of a (row, kv head), whole blocks
(ops/index/relocate.py).
"""
import torch

from torchsparsekv.ops._impl import triton as by_triton
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._signature import Changed
from torchsparsekv.ops._top import GROUP
from torchsparsekv.ops._triton import cdiv, chain, chained, tl, triton
from torchsparsekv.ops.store.views import PerHead, Scored

WIDE = 128  # scores at a time


def check(scored, count, sink, block_size) -> None:
    scores, peaks = scored
    if peaks is None:
        raise ValueError("blocks are pinned in scores and in the peaks of these, got scores without")
    if peaks.shape[2] != cdiv(scores.shape[2], GROUP):
        raise ValueError(f"{scores.shape[2]} scores have {cdiv(scores.shape[2], GROUP)} peaks, got {peaks.shape[2]}")
    if sink % block_size:
        raise ValueError(f"{sink} sinks are not whole blocks of {block_size}")


def reference(scored: Changed[Scored], count: PerHead, sink: int, block_size: int) -> None:
    scores, peaks = scored
    assert peaks is not None
    block = torch.arange(scores.shape[2])
    pinned = (block >= sink // block_size) & (block < sink // block_size + count[..., None] // block_size)
    scores.masked_fill_(pinned, torch.inf)
    for b, h, i in pinned.nonzero().tolist():
        peaks[b, h, i // GROUP] = torch.inf


@triton.jit
def _pin(
    scores, peaks, count, blocks, groups, first, P: tl.constexpr, GROUP: tl.constexpr, WIDE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    bh = tl.program_id(0).to(tl.int64)
    end = first + tl.load(count + bh) // P
    everything = tl.full((WIDE,), float("inf"), tl.float32)
    for start in range(first, end, WIDE):
        block = start + tl.arange(0, WIDE)
        tl.store(scores + bh * blocks + block, everything, mask=block < end)
        tl.store(peaks + bh * groups + block // GROUP, everything, mask=block < end)


def launch(scored, count, sink, block_size) -> None:
    scores, peaks = scored
    batch, heads, blocks = scores.shape
    _pin[(batch * heads,)](
        scores, peaks, count, blocks, peaks.shape[2], sink // block_size, P=block_size, GROUP=GROUP, WIDE=WIDE,
        num_warps=4, **chained(scores.device, batch * heads),
    )  # fmt: skip


pin_blocks = register("pin_blocks", reference, impls=(by_triton(launch),), check=check)
