"""Which token a ring row holds."""
import torch
from torch import Tensor


def ring_positions(ring_rows: int, length: Tensor, retired: Tensor, sink: int) -> Tensor:
    """Position of the token in each ring row, [batch, ring_rows]; -1 where the row holds none."""
    row = torch.arange(ring_rows, device=length.device)
    turn = ring_rows - sink
    pos = torch.where(row < sink, row, retired[:, None] + (row - retired[:, None]) % turn)
    end = torch.where(row < sink, length.clamp(max=sink)[:, None], length[:, None])
    return torch.where(pos < end, pos, -1)
