"""Store new tokens of any requests in the pool, and in the hot buffer's copies of their blocks.

    pool[0, :, to[t]] = (k[t], v[t])    for every token t with to[t] >= 0

A block that lies in the hot buffer gets the token there too. So copies stay equal to the pool, also where an engine
gives a block to another request.
"""
import torch

from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import (
    cdiv,
    launch_early,
    load_early,
    next_power_of_2,
    tl,
    triton,
    wait_for_previous,
)
from torchsparsekv.ops.engine.tables import check_one
from torchsparsekv.ops.engine.views import Copies, FlatTokens, RowOfToken
from torchsparsekv.ops.store.rows import as_stored, in_row, new_row, row_at, row_width, rows_of, store_row
from torchsparsekv.ops.store.views import Pool

TOKENS = 16  # of a program


def check(k, v, to, pool, copies) -> None:
    check_one(pool)
    if (copies.rows is None) != (copies.slot_of is None):
        raise ValueError("copies must have both rows and slot_of, or neither")
    if copies.rows is not None and pool.shape[2] != copies.slot_of.shape[2] * copies.rows.shape[3]:
        blocks, block_size = copies.slot_of.shape[2], copies.rows.shape[3]
        raise ValueError(f"{pool.shape[2]} rows are not {blocks} blocks of {block_size}")


def reference(k: FlatTokens, v: FlatTokens, to: RowOfToken, pool: Changed[Pool], copies: Changed[Copies]) -> None:
    """Store new tokens of any requests in the pool, and in the hot buffer's copies of their blocks.

    Args:
        k, v: [tokens, heads, dim], any strides.
        to: the row of the pool for each token [tokens], -1 for a token that is not stored.
        pool: [1, heads, rows, 2, dim].
        copies: the hot buffer's rows and the slot of each block, or None for both.

    Launches:
        One kernel of tokens / TOKENS x heads programs. Without a hot buffer it leaves out the copies.
    """
    token = torch.nonzero(to >= 0).flatten()
    row = to[token]
    new = rows_of(k, v)[token].transpose(0, 1)
    pool[0, :, row] = as_stored(new, pool)
    if copies.rows is None or copies.slot_of is None:
        return
    block_size = copies.rows.shape[3]
    for h, slot in enumerate(copies.slot_of[0, :, row // block_size].long()):
        held = slot >= 0
        copies.rows[0, h, slot[held], row[held] % block_size] = new[h, held]


@triton.jit(do_not_specialize=["tokens"])
def _write(
    k, v, to, pool, hot, slot_of, k_t, k_h, v_t, v_h, tokens, pool_rows, slots, blocks, COPIES: tl.constexpr,
    P: tl.constexpr, D: tl.constexpr, ROW: tl.constexpr, TOKENS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(1).to(tl.int64)
    t = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    c = tl.arange(0, ROW)[None, :]
    row = load_early(to + t, t < tokens, -1)
    wait_for_previous(PDL)
    live = row >= 0
    at = tl.where(live, t, 0)[:, None]
    # [TOKENS, ROW]
    x = new_row(k + at * k_t + h * k_h, v + at * v_t + h * v_h, c, D)
    place = tl.maximum(row, 0)
    store_row(row_at(pool, h, place, pool_rows, D)[:, None], c, x, live[:, None], in_row(c, D), D)
    if COPIES:
        slot = tl.load(slot_of + h * blocks + place // P, mask=live, other=-1)
        copy = row_at(hot, h, tl.maximum(slot, 0) * P + place % P, slots * P, D)
        store_row(copy[:, None], c, x, (slot >= 0)[:, None], in_row(c, D), D)


def launch(k, v, to, pool, copies) -> None:
    (tokens, heads, d), (hot, slot_of) = k.shape, copies
    held = hot is not None
    _write[(cdiv(tokens, TOKENS), heads)](
        k, v, to, pool, hot if held else pool, slot_of if held else to, *k.stride()[:2], *v.stride()[:2], tokens,
        pool.shape[2], hot.shape[2] if held else 0, slot_of.shape[2] if held else 0, COPIES=held,
        P=hot.shape[3] if held else 1, D=d, ROW=next_power_of_2(row_width(d)), TOKENS=TOKENS,
        **launch_early(k.device, cdiv(tokens, TOKENS) * heads),
    )  # fmt: skip


write_tokens = register("write_tokens", reference, impls=(by_triton(launch),), check=check)
