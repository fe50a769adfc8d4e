"""What ops take of tests/support/cases.py, with the pool packed (ops/store/rows.py)."""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.store.rows import CHANNELS, PACKED, as_stored, row_shape

ENTRIES = load_all()
TAKING = [name for name, e in ENTRIES.items() if any(f.of and f.of.packed for f in e.signature.flat)]
# Their cases have integers, so that no sign and no tie differs by rounding.
EXACT = {"encode_keys", "hash_keys", "hash_prompt", "static_target"}


def pack(rows: Tensor) -> Tensor:
    """Rows [..., 2, dim] as they would stand in a packed pool."""
    return as_stored(rows, torch.empty(0, *row_shape(rows.shape[-1], PACKED), dtype=PACKED))


def packed(name: str, things: tuple) -> tuple:
    """What an op takes. Integers stay such: the first of a group is 127, and so its scale is 1."""

    def one(rows: Tensor) -> Tensor:
        if name in EXACT:
            rows = rows.clone().clamp(-126, 126).round()
            rows[..., ::CHANNELS] = torch.where(rows[..., ::CHANNELS].isnan(), torch.nan, 127.0)
        return pack(rows)

    return tuple(
        x._replace(pool=one(x.pool)) if hasattr(x, "pool") else one(x) if taken.name == "pool" else x
        for x, taken in zip(things, ENTRIES[name].signature.parameters)
    )
