"""Find the chosen blocks in the hot buffer, bring in the missing ones, and attend to the ring and to all of them.

That is fetch and then sparse_attention, which say what each does, as one op of the decode step. In CUDA C++ fetch only
plans then, and attention itself moves what is missing: each warp the rows of its own tokens, so that nobody waits until
all are there. The ring is attended to while fetch still plans. Elsewhere the two follow one another, each by its own
chain of kernels.
"""
from torch import Tensor

from torchsparsekv.ops import _cuda
from torchsparsekv.ops._impl import cuda as by_cuda
from torchsparsekv.ops._impl import forced
from torchsparsekv.ops._impl import triton as by_triton
from torchsparsekv.ops._registry import OPS, register
from torchsparsekv.ops._signature import Changed
from torchsparsekv.ops.attend import sparse_attention as attending
from torchsparsekv.ops.attend._split import result_like
from torchsparsekv.ops.gather import fetch as fetching
from torchsparsekv.ops.store.rows import PACKED
from torchsparsekv.ops.store.views import Asked, Attention, Far, Hot, Lengths, Near, Query, Reach, Stats, Store


def apart(q, asked, store, hot, stats, lengths, reach, attention) -> tuple[tuple, tuple]:
    """What fetch takes, and what sparse_attention does."""
    ring, pool = store
    return (asked, Far(pool), hot, stats), (q, Near(ring), hot, lengths, reach, attention)


def check(*things) -> None:
    first, second = apart(*things)
    fetching.check(*first)
    attending.check(*second)


def reference(
    q: Query, asked: Asked, store: Store, hot: Changed[Hot], stats: Changed[Stats], lengths: Lengths, reach: Reach,
    attention: Attention,
) -> Tensor:  # fmt: skip
    first, second = apart(q, asked, store, hot, stats, lengths, reach, attention)
    fetching.reference(*first)
    return attending.reference(*second)


def _fits(*things) -> tuple[fetching.Fitting, _cuda.Module] | str:
    (asked, far, hot, _), second = apart(*things)
    unpack = hot.rows.shape[5] * (far.rows.dtype is PACKED)
    brings = attending.fits(*second, BRINGS=1, UNPACK=unpack)
    if isinstance(brings, str):
        return brings
    plans = fetching.fits(asked, far, hot, plans=True)
    return plans if isinstance(plans, str) else (plans, brings)


def _launch_cuda(fitting, *things) -> Tensor:
    """csrc/fetch.cu and csrc/sparse_attention.cu"""
    (plans, brings), (first, second) = fitting, apart(*things)
    incoming, (_, far, *_) = fetching.plan(plans, *first), first
    return attending.launch(brings, *second, pool=far.rows, incoming=incoming)


def _launch_both(*things) -> Tensor:
    fetch, attend = apart(*things)
    OPS["fetch"].chain.run(fetch, forced())
    return OPS["sparse_attention"].chain.run(attend, forced())


fetch_and_attend = register(
    "fetch_and_attend", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_both)), fake=result_like,
    check=check,
)  # fmt: skip
