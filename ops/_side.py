"""Work of a layer that runs beside the next ones, on a stream of its own: of prompts, or of decode steps."""
import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor


@functools.cache
def _stream(device: torch.device, beside: int | None = None) -> torch.cuda.Stream:
    """For prompts, or for the steps launched on that stream: another thread may be capturing one on its own."""
    return torch.cuda.Stream(device)


def _of_steps(main: torch.cuda.Stream) -> torch.cuda.Stream:
    return _stream(main.device, main.cuda_stream)


def wait_for_side(device: torch.device) -> None:
    """Let the current stream wait for what was launched beside it, by prompts and by steps."""
    if device.type == "cuda":
        main = torch.cuda.current_stream(device)
        for side in (_stream(device), _of_steps(main)):
            main.wait_stream(side)


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
        main.wait_stream(side)
        yield
        return
    side.wait_stream(main)
    with torch.cuda.stream(side):
        yield
        _keep(used, side)


def _keep(used: tuple[Tensor, ...], side: torch.cuda.Stream) -> None:
    """Their memory is nobody else's before that stream is done with it, whoever drops them."""
    for t in used:
        t.record_stream(side)


@contextlib.contextmanager
def behind_step(join: bool, *used: Tensor) -> Iterator[None]:
    """The same of a decode step, which may be captured, for tensors that stay where they are.

    The layer that joins takes it on the current stream, after all that the layers before it left to the other one: a
    CUDA graph must not end before.
    """
    device = used[0].device
    if device.type != "cuda":
        yield
        return
    main = torch.cuda.current_stream(device)
    side = _of_steps(main)
    side.wait_stream(main)  # with `join` too: what is captured can wait only for what is
    if join:
        main.wait_stream(side)
        yield
        return
    with torch.cuda.stream(side):
        yield
        if not torch.cuda.is_current_stream_capturing():
            _keep(used, side)
