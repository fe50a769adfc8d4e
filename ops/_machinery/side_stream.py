"""Work of a layer that runs beside the next ones, on a stream of its own: of prompts, or of decode steps."""
import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor


@functools.cache
def _stream(device: torch.device, beside: int | None) -> torch.cuda.Stream:
    """For prompts, or for the steps launched on that stream: another thread may be capturing one on its own."""
    return torch.cuda.Stream(device)


def wait_for_side_stream(device: torch.device) -> None:
    """Let the current stream wait for what was launched beside it, by prompts and by steps."""
    if device.type == "cuda":
        main = torch.cuda.current_stream(device)
        for beside in (None, main.cuda_stream):
            main.wait_stream(_stream(main.device, beside))  # which has a number also where none was given


@contextlib.contextmanager
def on_side_stream(join: bool, *used: Tensor, of_step: bool = False) -> Iterator[None]:
    """Launch on the side stream what reads or writes `used`, after what was launched so far on the current one.

    With `join` the current stream waits for everything launched there before and takes this on itself: for the last
    layer, and for compiled prompts, whose memory plan knows nothing of other streams. A step (`of_step`) may be
    captured: what it uses must stay where it is.
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
                t.record_stream(side)  # whoever drops it, its memory is nobody else's before that stream is done
