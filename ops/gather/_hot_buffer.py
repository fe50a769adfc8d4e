"""What ops share that read or change the hot buffer."""
from torch import Tensor

from torchsparsekv.ops._machinery.triton import tl, triton


def check_blocks(pool: Tensor, rows: Tensor, slot_of: Tensor) -> None:
    """The pool consists of the blocks that the hot buffer knows."""
    blocks, block_size = slot_of.shape[2], rows.shape[3]
    if pool.shape[2] != blocks * block_size:
        raise ValueError(f"{pool.shape[2]} pool rows are not {blocks} blocks of {block_size}")


@triton.jit
def empty_slot(slot_of, block_of, block, slot):
    """Take the block out of its slot; the pointers are those of one head."""
    tl.store(slot_of + block, -1)
    tl.store(block_of + slot, -1)
