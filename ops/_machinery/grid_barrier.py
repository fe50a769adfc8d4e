"""Programs of one launch that wait for one another, where a launch of its own for each phase would cost too much.

A kernel that mostly has nothing to do is cheapest as one launch; when it has, its phases need what all programs of a
head did before. They meet at a counter. That they all run at the same time is what the launcher must see to: no more
programs than fit the multiprocessors. Interpreted programs run one after the other, and a meeting would never end:
there every phase is a launch (`phases`).
"""
from collections.abc import Iterator

import torch

from torchsparsekv.ops._machinery.triton import compiles, sm_count, tl, triton


@triton.jit
def grid_barrier(arrived, parts):
    """Wait until all `parts` programs that share the counter are here. It only counts up, until they `leave`."""
    tl.debug_barrier()  # all of this program is here
    if parts > 1:
        before = tl.atomic_add(arrived, 1)
        until = (before // parts + 1) * parts
        while tl.atomic_add(arrived, 0) < until:
            pass
    tl.debug_barrier()


@triton.jit
def leave_grid_barrier(arrived, gone, parts):
    """After its last meeting: the last program to leave makes the counters ready for the next launch."""
    if parts > 1:  # noqa: SIM102 (both sides of an `and` are done)
        if tl.atomic_add(gone, 1) == parts - 1:
            tl.store(arrived, 0)
            tl.store(gone, 0)


def parts_of(device: torch.device, heads: int, most: int, beside: int = 1) -> int:
    """Programs for each of `heads` heads that all run at the same time; `beside` of them fit on a multiprocessor."""
    return max(1, min(most, beside * sm_count(device) // heads))


def phases(device: torch.device, parts: int, n: int) -> Iterator[dict[str, int]]:
    """The launches that `n` phases take: one, but where programs are interpreted one after the other."""
    together = parts == 1 or compiles(device)
    for first in range(1 if together else n):
        yield {"FIRST": first, "LAST": n if together else first + 1}
