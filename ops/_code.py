"""4-bit direction codes: how magnitudes are looked up and how the m codes of a subspace share one word."""
import torch
from torch import Tensor

from torchsparsekv.ops._lloyd_max import quantiser
from torchsparsekv.ops._triton import tl, triton

WORDS = {8: torch.int32, 4: torch.int16, 2: torch.uint8}  # m codes of 4 bits: what a kernel reads at once


def words(codes: Tensor, m: int) -> Tensor:
    """The packed bytes as one word per subspace."""
    return codes.view(WORDS[m])


def directions(codes: Tensor, m: int) -> Tensor:
    """The quantised directions [..., subspaces, m] behind packed codes [..., subspaces * m / 2]; low nibble first."""
    nibble = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).long()
    levels = torch.tensor(quantiser(m)[1], dtype=torch.float32)
    return torch.where(nibble >= 8, levels[nibble & 7], -levels[nibble & 7]).unflatten(-1, (-1, m))


@triton.jit
def magnitude(t, c0, c1, c2, c3, c4, c5, c6, c7):
    """Levels number `t` (0 to 7): the polynomial of `_lloyd_max.polynomial`."""
    x = t.to(tl.float32) - 3.5
    return ((((((c7 * x + c6) * x + c5) * x + c4) * x + c3) * x + c2) * x + c1) * x + c0
