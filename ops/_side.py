"""Work of a prompt that runs beside the next layer, on a stream of its own."""
import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor


@functools.cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def wait_for_side(device: torch.device) -> None:
    """Let the current stream wait for what was launched beside it."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).wait_stream(_stream(device))


@contextlib.contextmanager
def beside(join: bool, *used: Tensor) -> Iterator[None]:
    """Launch on the side stream what reads or writes `used`, after what was launched so far on the current one.

    With `join` the current stream waits for everything launched there before and takes this on itself: for the last
    layer, and for compiled graphs, whose memory plan knows nothing of other streams.
    """
    device = used[0].device
    if device.type != "cuda":  # the interpreter: no streams
        yield
        return
    main, side = torch.cuda.current_stream(device), _stream(device)
    if join:
        wait_for_side(device)
        yield
        return
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield
        for t in used:
            t.record_stream(side)
