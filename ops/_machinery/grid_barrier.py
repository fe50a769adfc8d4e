"""A barrier between the programs of one launch. It saves a launch for each phase of a kernel.

Some kernels have work at few steps only, and are cheapest as one launch. When they have work, each phase needs the
results of all programs of a head. The programs meet at a counter. All of them must run at the same time, so a launcher
starts no more programs than fit the multiprocessors. Triton's interpreter runs programs one after the other, so there
each phase is a launch of its own (`phases`).
"""
from collections.abc import Iterator

import torch

from torchsparsekv.ops._machinery.triton import compiles, sm_count, tl, triton


@triton.jit
def grid_barrier(arrived, parts):
    """Wait for all `parts` programs that share the counter. The counter grows until `leave_grid_barrier` sets it to 0.
    """
    tl.debug_barrier()  # all threads of this program have arrived
    if parts > 1:
        before = tl.atomic_add(arrived, 1)
        until = (before // parts + 1) * parts
        while tl.atomic_add(arrived, 0) < until:
            pass
    tl.debug_barrier()


@triton.jit
def leave_grid_barrier(arrived, gone, parts):
    """Call after the last barrier. The last program to leave sets the counters to 0 for the next launch."""
    if parts > 1:  # noqa: SIM102 (Triton evaluates both sides of an `and`)
        if tl.atomic_add(gone, 1) == parts - 1:
            tl.store(arrived, 0)
            tl.store(gone, 0)


def parts_of(device: torch.device, heads: int, most: int, beside: int = 1) -> int:
    """Programs per head, at most `most`, so that the programs of all `heads` heads run at the same time. `beside`
    programs fit on a multiprocessor."""
    return max(1, min(most, beside * sm_count(device) // heads))


def phases(device: torch.device, parts: int, n: int) -> Iterator[dict[str, int]]:
    """The launches that `n` phases need: one; in the interpreter `n`, unless a head has one program."""
    together = parts == 1 or compiles(device)
    for first in range(1 if together else n):
        yield {"FIRST": first, "LAST": n if together else first + 1}
