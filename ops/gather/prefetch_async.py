"""Fetch behind a step what its heads did not wait for (query_drift_gate.py), beside the layers that follow.

The kernel of fetch, on a stream of its own, which the layer that is told to `join` waits for (ops/_machinery/side_stream.py). What is
attended to at the next step is then what this one chose.

It says that it changes `out`, the answer of attention, and does not: what computes with that must come after it.
Inductor would move an op that nobody waits for to the end of the graph, and copy the hot buffer before.
"""
from torchsparsekv.ops._machinery.chain import cuda as by_cuda
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.side_stream import on_side_stream
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops.gather import fetch
from torchsparsekv.ops.store.views import Hot, Pool, Prefetch, Query, Selection, Stats

# Programs beside the next layers, which have the rest of the chip; at least one a kv head. They are enough for the
# link: at 128K tokens where all blocks are new, 10 layers take 2.94 ms with 16 of them (8: 2.90, 32: 2.91), and 3.03
# where they cover the chip.
BESIDE = 16


def check(out, prefetch, pool, hot, join) -> None:
    fetch.check(*_as_fetch(prefetch, pool, hot))


def reference(out: Changed[Query], prefetch: Changed[Prefetch], pool: Pool, hot: Changed[Hot], join: bool) -> None:
    fetch.reference(*_as_fetch(prefetch, pool, hot))


def _as_fetch(prefetch: Prefetch, pool: Pool, hot: Hot) -> tuple[Selection, Pool, Hot, Stats]:
    return Selection(prefetch.ids, prefetch.later), pool, hot, Stats(prefetch.counts)


def _fits(out, prefetch, pool, hot, join):
    return fetch.fits(*_as_fetch(prefetch, pool, hot))


def _launch_cuda(fitting, out, prefetch, pool, hot, join) -> None:
    with on_side_stream(join, *prefetch, pool, *hot, of_step=True):
        fetch.launch_cuda(fitting, *_as_fetch(prefetch, pool, hot), None if join else BESIDE)


def _launch_triton(out, prefetch, pool, hot, join) -> None:
    with on_side_stream(join, *prefetch, pool, *hot, of_step=True):
        fetch.launch_triton(*_as_fetch(prefetch, pool, hot), None if join else BESIDE)


prefetch_async = register(
    "prefetch_async", reference, impls=(by_cuda(_fits, _launch_cuda), by_triton(_launch_triton)), check=check
)
