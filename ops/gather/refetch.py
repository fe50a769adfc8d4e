"""`fetch` for the heads that want it: those whose `wanted` is 0 keep the places they have, and nothing moves.

`places` is state: what was chosen last is what attention reads until the next time. On a head that keeps its places one
program counts them as selected (they are attended to) and all return; the hot buffer does not age.
"""
import torch
from torch import Tensor

from torchsparsekv.ops import _check
from torchsparsekv.ops._registry import register
from torchsparsekv.ops._triton import chain, tl, triton
from torchsparsekv.ops.gather import fetch
from torchsparsekv.ops.gather.fetch import _fetch

SCHEMA = (
    "(Tensor wanted, Tensor blocks, Tensor pool, Tensor(a!) hot, Tensor(b!) table, Tensor(c!) resident, "
    "Tensor(d!) age, Tensor(e!) arrivals, Tensor(f!) stats, Tensor(g!) places) -> ()"
)


def check(wanted, blocks, pool, hot, table, resident, age, arrivals, stats, places) -> None:
    fetch.check(blocks, pool, hot, table, resident, age, arrivals, stats)
    _check.dtype((torch.int32,), wanted=wanted, places=places)
    _check.contiguous(wanted=wanted, places=places)
    _check.shape(blocks.shape[:2], wanted=wanted)
    _check.shape(blocks.shape, places=places)


def reference(wanted, blocks, pool, hot, table, resident, age, arrivals, stats, places) -> None:
    for b, h in (wanted != 0).nonzero().tolist():
        one = [t[b : b + 1, h : h + 1] for t in (blocks, pool, hot, table, resident, age, arrivals, stats)]
        places[b, h] = fetch.reference(*one)[0, 0]
    stats[..., 3] += torch.where(wanted == 0, (places >= 0).sum(-1), 0)


@triton.jit
def _refetch(
    wanted, blocks, pool, hot, table, resident, age, arrivals, stats, scratch, out, n, places, total,
    OLDEST: tl.constexpr, N: tl.constexpr, C: tl.constexpr, P: tl.constexpr, WIDTH: tl.constexpr, ROW: tl.constexpr,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    chain(PDL)
    bh = tl.program_id(0).to(tl.int64)
    if tl.load(wanted + bh) != 0:
        _fetch(
            blocks, pool, hot, table, resident, age, arrivals, stats, scratch, out, n, places, total, OLDEST, N, C, P,
            WIDTH, ROW, ROWS, False,
        )  # fmt: skip
    elif tl.program_id(1) == 0:
        j = tl.arange(0, N)
        held = tl.load(out + bh * n + j, mask=j < n, other=-1)
        count = stats + bh * 5 + 3
        tl.store(count, tl.load(count) + tl.sum((held >= 0).to(tl.int32), 0))


def cuda(wanted, blocks, pool, hot, table, resident, age, arrivals, stats, places) -> None:
    fetch.launch(_refetch, wanted, blocks, pool, hot, table, resident, age, arrivals, stats, places)


def fake(wanted: Tensor, *_) -> None: ...


refetch = register("refetch", SCHEMA, reference=reference, fake=fake, cuda=cuda, check=check)
