"""Hyper-parameters without an upper bound, or next to zero, as far out as Python's numbers go: they act like the last
value that makes a difference, and what no memory holds is refused before anything is made."""
import pytest
from models import MAX_LENGTH, tiny

import torchsparsekv

NEAR = dict(sink=4, window=6)


@pytest.mark.parametrize("size", ["window", "sink"])
def test_what_no_memory_holds_is_refused_with_numbers(size):
    model = tiny()
    for n in (1 << 62, 1 << 70):
        says = pytest.raises(MemoryError, match=r"^a cache of 128 tokens x batch 1 needs [\d.]+ GiB host")
        with torchsparsekv.patch(model, "oracle", **{**NEAR, size: n}, budget=16) as handle, says:
            handle.make_cache(1, MAX_LENGTH)
