"""The pool rows of tokens where all rows of the batch share one pool (BlockTable of ops/store/views.py).

pool row of position p of row b = ids[b, p // block_size] * block_size + p % block_size
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery.triton import tl, triton
from torchsparsekv.ops.store.views import BlockTable


def check_table(index: Tensor, batch: int, table: BlockTable) -> None:
    """Refuse an index [pools, ...] that does not belong to the pools of the batch."""
    pools = index.shape[0]
    if table.ids is None and pools != batch:
        raise ValueError(f"{batch} rows need a pool each or a block table, got {pools} pools and no table")
    if table.ids is not None and (pools != 1 or table.block_size < 1):
        raise ValueError(f"a table is for one pool of blocks, got {pools} pools and block_size {table.block_size}")


def positions(index: Tensor, table: BlockTable) -> int:
    """The most positions of a row; `index` [pools, heads, pool rows, ...]."""
    return index.shape[2] if table.ids is None else table.ids.shape[1] * table.block_size


def pool_rows(position: Tensor, table: BlockTable) -> Tensor:
    """The pool rows [batch, ...] of positions [batch, ...] that are not negative."""
    assert table.ids is not None
    block = torch.div(position, table.block_size, rounding_mode="floor").long()
    ids = table.ids.gather(1, block.flatten(1)).view(block.shape)
    return ids.long() * table.block_size + position % table.block_size


def places_of(table: BlockTable) -> tuple[Tensor | None, int]:
    """The table and its width, as kernels of csrc/ take them."""
    return table.ids, 0 if table.ids is None else table.ids.shape[1]


@triton.jit
def pool_row_of(table, b, places, position, live, P: tl.constexpr):
    """The pool rows of positions of row `b` where `live`. P = 0: there is no table."""
    row = position
    if P > 0:
        row = tl.load(table + b * places + position // P, mask=live, other=0) * P + position % P
    return row
