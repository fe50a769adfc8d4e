"""Fetch, after attention and beside the next layers, the blocks of the heads that did not wait for them.

query_drift_gate marks these heads (`prefetch.later`). They attend to the blocks of the previous step; this op brings
the blocks that they selected now, which the next step attends to.

Args:
    out [batch, q_heads, 1, dim]: the output of attention. Declared as changed although it is not. Without this false
        dependency Inductor moves the op, whose result nobody reads, to the end of the graph and copies the hot buffer.
    prefetch: ids and later are read, counts changed.
    pool, hot: as in fetch; `hot` is changed.
    join: whether the current stream waits for this fetch and for those of the layers before: at the last layer, since a
        CUDA graph must not end before work that it started.

Launches: the kernel of fetch, on a stream beside the current one (ops/_machinery/side_stream.py).
"""
from torchsparsekv.ops._machinery.chain import cuda as by_cuda
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.side_stream import on_side_stream
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops.gather import fetch
from torchsparsekv.ops.store.views import HotBuffer, Pool, Prefetch, Query, Selection, Stats

# Programs of a fetch beside the next layers, at least one per kv head. 16 saturate the host link: at 128K tokens, all
# blocks missing, 10 layers take 2.94 ms, and 3.03 ms with one program per multiprocessor.
BESIDE = 16


def check(out, prefetch, pool, hot, join) -> None:
    fetch.check(*_as_fetch(prefetch, pool, hot))


def reference(
    out: Changed[Query], prefetch: Changed[Prefetch], pool: Pool, hot: Changed[HotBuffer], join: bool
) -> None:
    fetch.reference(*_as_fetch(prefetch, pool, hot))


def _as_fetch(prefetch: Prefetch, pool: Pool, hot: HotBuffer) -> tuple[Selection, Pool, HotBuffer, Stats]:
    return Selection(prefetch.ids, prefetch.later), pool, hot, Stats(prefetch.counts)


def _fits(out, prefetch, pool, hot, join):
    return fetch.fits(*_as_fetch(prefetch, pool, hot))


def _launch_cuda(fitting, out, prefetch, pool, hot, join) -> None:
    with on_side_stream(join, *prefetch, pool, *hot, of_step=True):
        fetch.launch_cuda(fitting, *_as_fetch(prefetch, pool, hot), programs=None if join else BESIDE)


def _launch_triton(out, prefetch, pool, hot, join) -> None:
    with on_side_stream(join, *prefetch, pool, *hot, of_step=True):
        fetch.launch_triton(*_as_fetch(prefetch, pool, hot), programs=None if join else BESIDE)


prefetch_async = register(
    "prefetch_async", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), check=check
)
