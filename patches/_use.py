"""Whether a cache is in use, and whether the last forward on the cache finished."""
import contextlib
import threading
from collections.abc import Iterator

import torch


class Use:
    """Shared by a cache and its layers. The attributes are plain, because compiled steps read them."""

    def __init__(self) -> None:
        self.begun = 0  # number of forwards that did not run as a graph
        self.generating = False  # a generate() runs on this cache
        self.chunked = False  # with prefill_chunk_size: the first chunks of a row may be padding only
        self.called = False  # the current forward is of the whole model, so `leave_model` will see its end
        # While a forward changes the cache: which hook will see its end, that of the "model" or of the "layers".
        self.open = ""

    def check(self) -> None:
        if self.open:
            raise RuntimeError(
                "the last forward on this SparseCache did not finish, or runs in another thread, so the cache is not "
                "complete: call cache.reset() and pass the whole prompt again, or make a new cache"
            )

    # ---- begin and end of a forward. A forward that runs as a graph changes nothing here, except after an eager
    # forward that broke off.

    def begin(self) -> None:
        if not torch.compiler.is_compiling():
            self.open = "model" if self.called else "layers"
            self.called = False
            self.begun += 1

    def end_of_layers(self) -> None:
        if self.open == "layers":
            self.open = ""

    def end_of_model(self, whole: bool = True) -> None:
        if self.called:  # a check refused the forward before `begin`
            self.called = False
        if self.open and whole:
            self.open = ""


# ---------------------------------------------------------------- generate()

_thread = threading.local()


def _running() -> list[list[Use]]:
    """For each running generate() of this thread, the caches that it holds."""
    return _thread.__dict__.setdefault("running", [])


@contextlib.contextmanager
def generating() -> Iterator[None]:
    """Free the caches that are held inside the `with`, also after an error."""
    _running().append([])
    try:
        yield
    finally:
        for use in _running().pop():
            use.generating = use.chunked = False


def hold(use: Use, *, chunked: bool) -> bool:
    """Mark the cache as used by the running generate(). Returns False if no generate() runs in this thread."""
    if use.generating:
        raise RuntimeError(
            "another generate() is running on this SparseCache: give each call a cache of its own "
            "(handle.make_cache), or pass no cache"
        )
    if not _running():
        return False
    _running()[-1].append(use)
    use.generating, use.chunked = True, chunked
    return True
