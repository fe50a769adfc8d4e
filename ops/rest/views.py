"""What stands for the tokens that a step does not retrieve, as the ops take it."""
from typing import Annotated, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.signature import FLOATS, Of
from torchsparsekv.ops._machinery.triton import cdiv

Sums: TypeAlias = Annotated[Tensor, Of("batch heads groups 2 dim", FLOATS)]


class Rest(NamedTuple):
    """The sums of the keys and values of every group of pool rows, or means that a method makes itself.

    sums: row g is the sum of the keys and the sum of the values in the pool rows g * group to (g + 1) * group, of
        tokens that have left the ring, divided by `group`. So fp16 has room for the sum, and the row of a full group is
        its mean.
        None: nothing is estimated.
    group: pool rows of a group; 0 without sums.
    tokens: for means that a method makes itself, how many tokens each row of `sums` stands for at this step. A row with
        0 is left out. Nothing is subtracted from such means, and `group` is 0.
    settled: whether the kernel directly before attention comes after all kernels that wrote the sums, the lengths, the
        frontier, `ids`, `fill` and the query. Attention may then read these tensors while that kernel still runs.
        Without `retrieve_now`, `chosen` must be the slots of `ids`, in order.
    """

    sums: Sums | None = None
    group: int = 0
    tokens: Annotated[Tensor, Of("batch heads groups", torch.int32)] | None = None
    settled: bool = False


NO_REST = Rest()


def check_groups(rest: Rest, rows: int) -> None:
    """Refuse groups that do not cover exactly a pool of `rows` rows, and a `group` other than 0 beside `tokens`."""
    sums, group, tokens = rest[:3]
    if tokens is not None:
        if sums is None or group:
            have = "no sums" if sums is None else "sums"
            raise ValueError(f"rest.tokens needs sums and group 0, got {have} and group {group}")
        return
    if group < 1 or group & (group - 1):
        raise ValueError(f"group must be a power of two, got {group}")
    if sums is None or sums.shape[2] != cdiv(rows, group):
        have = "no sums" if sums is None else f"sums of {sums.shape[2]}"
        raise ValueError(f"{rows} pool rows need {cdiv(rows, group)} groups of {group}, got {have}")
