"""Work of one layer that runs beside the next layers, on a stream of its own. Prompts and decode steps have different
side streams."""
import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor


@functools.cache
def _stream(device: torch.device, beside: int | None) -> torch.cuda.Stream:
    """The side stream of prompts, or of the decode steps of one main stream: two threads may capture steps at once."""
    return torch.cuda.Stream(device)


def wait_for_side_stream(device: torch.device) -> None:
    """Let the current stream wait for all work on the side streams of prompts and steps."""
    if device.type == "cuda":
        main = torch.cuda.current_stream(device)
        for beside in (None, main.cuda_stream):
            main.wait_stream(_stream(main.device, beside))  # `main.device` has an index, which `device` may lack


@contextlib.contextmanager
def on_side_stream(join: bool, *used: Tensor, of_step: bool = False) -> Iterator[None]:
    """Launch work on the side stream. It starts after all work that is on the current stream now. `used` are the
    tensors that the work reads or writes.

    With `join` the current stream waits for the whole side stream and runs this work itself. The last layer joins.
    Compiled prompts join, because their memory plan does not know other streams. A step (`of_step`) may be captured, so
    its tensors must keep their addresses.
    """
    device = used[0].device
    if device.type != "cuda":  # the interpreter: no streams
        yield
        return
    main = torch.cuda.current_stream(device)
    side = _stream(main.device, main.cuda_stream if of_step else None)
    side.wait_stream(main)  # with `join` too: a graph can wait only for what was captured with it
    if join:
        main.wait_stream(side)
        yield
        return
    with torch.cuda.stream(side):
        yield
        if not torch.cuda.is_current_stream_capturing():
            for t in used:
                t.record_stream(side)  # the memory of `t` is not reused before the side stream is done
