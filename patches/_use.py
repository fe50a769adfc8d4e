"""Who uses a cache at the moment, and whether the last forward on it came to its end."""
import contextlib
import threading
from collections.abc import Iterator

import torch


class Use:
    """Shared by a cache and its layers. Plain attributes, for a compiled step looks at them too."""

    def __init__(self) -> None:
        self.begun = 0  # forwards that did not run as a graph
        self.generating = False  # a generate() runs on it
        self.chunked = False  # with prefill_chunk_size: rows may begin with chunks of nothing but padding
        self.called = False  # the forward that runs now is one of the whole model, which tells of its end
        self.open = ""  # "model" or "layers": a forward has begun to change the cache, and this will tell of its end

    def check(self) -> None:
        if self.open:
            raise RuntimeError(
                "a forward on this SparseCache did not come to its end, or one runs in another thread: what it holds "
                "is not whole. Call reset() on it and begin again with the prompt, or make a new one"
            )

    # ---- of a forward; those that run as a graph leave no trace here, unless one that did not broke off before

    def begin(self) -> None:
        if not torch.compiler.is_compiling():
            self.open = "model" if self.called else "layers"
            self.called = False
            self.begun += 1

    def end_of_layers(self) -> None:
        if self.open == "layers":
            self.open = ""

    def end_of_model(self, whole: bool = True) -> None:
        if self.called:  # it was refused before it began
            self.called = False
        if self.open and whole:
            self.open = ""


# ---------------------------------------------------------------- generate()

_thread = threading.local()


def _running() -> list[list[Use]]:
    """What the generate() calls of this thread hold, a list for each."""
    return _thread.__dict__.setdefault("running", [])


@contextlib.contextmanager
def generating() -> Iterator[None]:
    """The caches that are held inside are free again afterwards, however it ends."""
    _running().append([])
    try:
        yield
    finally:
        for use in _running().pop():
            use.generating = use.chunked = False


def hold(use: Use, *, chunked: bool) -> bool:
    """Mark the cache as used by the running generate(). False if no generate() began, so none will end."""
    if use.generating:
        raise RuntimeError(
            "another generate() is running on this SparseCache: give each call a cache of its own "
            "(handle.make_cache), or pass none"
        )
    if not _running():
        return False
    _running()[-1].append(use)
    use.generating, use.chunked = True, chunked
    return True
