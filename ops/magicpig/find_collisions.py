"""Sample tokens: those whose codes equal the codes of a query head in two tables or more.

    second[h, i]  = the number of tables until code_i has equalled the code of query head h twice; never: tables + 1
    first_of[i]   = the least of these, over the query heads of the kv head
    used          = the most tables that sample no more than `budget` tokens: the largest u with
                    |{i: first_of[i] <= u}| <= budget
    score[i]      = -first_of[i]  if first_of[i] <= used,  else -inf

A step samples with the first `used` tables. The codes of a token with a small angle to the query match in many tables,
so a small budget first loses tokens with large angles. The chances stay known: they are those of `used` tables. A row
whose retrievable tokens all fit into the budget takes all of them: used = 0 and score = 0.

Launches: `_ask`, (tables, row * kv head): the codes of the queries. `_collide`, (tiles of tokens, row * kv head), reads
2 bytes a token and table; it counts the tokens by `first_of`. `_cut`, (tiles of tokens, row * kv head): `used`, scores
and peaks.

MagicPIG (arXiv 2410.16179), and its authors' code.
"""
import torch
from torch import Tensor

from torchsparsekv.ops._machinery import check as _check
from torchsparsekv.ops._machinery.chain import triton as by_triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed
from torchsparsekv.ops._machinery.triton import cdiv, launch_early, next_power_of_2, tl, triton, wait_for_previous
from torchsparsekv.ops.attend._split import load_query
from torchsparsekv.ops.magicpig._planes import NOISE, codes_of, hashes, plane_of
from torchsparsekv.ops.magicpig.views import Sample, Signatures, check_bits
from torchsparsekv.ops.select._top import GROUP, peaks_of, store_peaks
from torchsparsekv.ops.store.views import Lengths, Query

TILE = 256  # tokens of a program


def check(q, signatures, sample, lengths, bits, seed, budget) -> None:
    _check.heads(q, signatures.centre)
    check_bits(bits, seed)
    if budget < 1:
        raise ValueError(f"budget must be at least 1, got {budget}")


def second_collisions(codes: Tensor, asked: Tensor) -> Tensor:
    """The number of tables [heads, n] until codes [tables, n] have equalled `asked` [heads, tables] twice; tables + 1
    for never."""
    hits = (codes == asked[..., None]).int().cumsum(1)
    return (hits < 2).sum(1) + 1


def reference(
    q: Query, signatures: Signatures, sample: Changed[Sample], lengths: Lengths, bits: int, seed: int, budget: int
) -> tuple[Tensor, Tensor]:
    """Sample tokens: those whose codes equal the codes of a query head in two tables or more.

    Args:
        q: [batch, q_heads, 1, dim].
        signatures: the index.
        sample: gets the codes of the queries, and the number of tables that are used.
        lengths: positions per row.
        bits: of a code.
        seed: of the planes.
        budget: tokens that a kv head may sample.

    Returns:
        scores [batch, heads, rows] and their peaks [batch, heads, cdiv(rows, GROUP)] (ops/select/_top.py), fp32.
    """
    codes, sink = signatures.codes, lengths.sink
    batch, heads, tables, rows = codes.shape
    sample.asked.copy_(hashes(q[:, :, 0], None, tables, bits, seed))
    scores = torch.full((batch, heads, rows), -torch.inf)
    for b, end in enumerate(lengths.ring_begin.tolist()):
        for h, asked in enumerate(sample.asked[b].unflatten(0, (heads, -1))):
            found, used = torch.zeros(max(0, end - sink), dtype=torch.int64), 0
            if end - sink > budget:
                found = second_collisions(codes[b, h, :, sink:end], asked).amin(0)
                used = int((torch.bincount(found, minlength=tables + 2)[1:-1].cumsum(0) <= budget).sum())
            sample.used[b, h] = used
            scores[b, h, sink : sink + len(found)] = torch.where(found <= used, -found.float(), -torch.inf)
    return scores, peaks_of(scores)


@triton.jit(do_not_specialize=["seed"])
def _ask(
    q, asked, q_b, q_h, heads, tables, seed, G: tl.constexpr, GP: tl.constexpr, BITS: tl.constexpr,
    NOISE: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh, table, g = tl.program_id(1).to(tl.int64), tl.program_id(0), tl.arange(0, GP)
    x = load_query(q, q_b, q_h, bh // heads, bh % heads, G, GP, D, DP)
    code = codes_of(x, tl.zeros((DP,), tl.float32), plane_of(table, seed, D, DP, BITS), NOISE)
    tl.store(asked + (bh * G + g) * tables + table, code.to(tl.int16), mask=g < G)


@triton.jit
def _collide(
    codes, asked, first_of, counts, ring_begin, heads, tables, rows, sink, budget, G: tl.constexpr, GP: tl.constexpr,
    TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh = tl.program_id(1).to(tl.int64)
    pos, g = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, GP)
    end = tl.load(ring_begin + bh // heads)
    live = (pos >= sink) & (pos < end)
    if (tl.program_id(0) * TILE < end) & (end - sink > budget):
        hits = tl.zeros((GP, TILE), tl.int32)
        second = tl.full((GP, TILE), 0, tl.int32) + tables + 1
        for table in range(tables):
            code = tl.load(codes + (bh * tables + table) * rows + pos, mask=live, other=-1)
            mine = tl.load(asked + (bh * G + g) * tables + table, mask=g < G, other=-2)
            hit = (code[None, :] == mine[:, None]).to(tl.int32)
            hits += hit
            second = tl.where((hit != 0) & (hits == 2), table + 1, second)
        found = tl.min(second, 0)
        tl.store(first_of + bh * rows + pos, found, mask=live)
        tl.atomic_add(counts + bh * tables + found - 1, tl.full((TILE,), 1, tl.int32), mask=live & (found <= tables))


@triton.jit
def _cut(
    first_of, counts, used_of, out, peaks, ring_begin, heads, tables, rows, groups, sink, budget, TILE: tl.constexpr,
    TABLES: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    wait_for_previous(PDL)
    bh, first = tl.program_id(1).to(tl.int64), tl.program_id(0) * TILE
    pos, t = first + tl.arange(0, TILE), tl.arange(0, TABLES)
    end = tl.load(ring_begin + bh // heads)
    live = (pos >= sink) & (pos < end)
    sampled = end - sink > budget
    upto = tl.cumsum(tl.load(counts + bh * tables + t, mask=t < tables, other=0), 0)
    used = tl.where(sampled, tl.sum(((upto <= budget) & (t < tables)).to(tl.int32), 0), 0)
    found = tl.load(first_of + bh * rows + pos, mask=live & (pos < tl.where(sampled, end, 0)), other=0)
    score = tl.where(live & (found <= used), -found.to(tl.float32), float("-inf"))
    tl.store(out + bh * rows + pos, score, mask=pos < rows)
    store_peaks(peaks + bh * groups, score, first, rows, TILE, GROUP)
    if first == 0:
        tl.store(used_of + bh, used)


def launch(q, signatures, sample, lengths, bits, seed, budget) -> tuple[Tensor, Tensor]:
    codes, (asked, used) = signatures.codes, sample
    (batch, heads, tables, rows), d = codes.shape, q.shape[3]
    (out, peaks), group, i32 = fake(q, signatures), q.shape[1] // heads, torch.int32
    first_of = torch.empty((batch, heads, rows), dtype=i32, device=q.device)
    counts = torch.zeros((batch, heads, tables), dtype=i32, device=q.device)
    _ask[(tables, batch * heads)](
        q, asked, q.stride(0), q.stride(1), heads, tables, seed, G=group, GP=max(16, next_power_of_2(group)), BITS=bits,
        NOISE=NOISE, D=d, DP=max(16, next_power_of_2(d)), **launch_early(q.device, tables * batch * heads),
    )  # fmt: skip
    grid = (cdiv(rows, TILE), batch * heads)
    early = launch_early(q.device, grid[0] * grid[1])
    _collide[grid](
        codes, asked, first_of, counts, lengths.ring_begin, heads, tables, rows, lengths.sink, budget, G=group,
        GP=next_power_of_2(group), TILE=TILE, **early,
    )  # fmt: skip
    _cut[grid](
        first_of, counts, used, out, peaks, lengths.ring_begin, heads, tables, rows, peaks.shape[2], lengths.sink,
        budget, TILE=TILE, TABLES=next_power_of_2(tables), GROUP=GROUP, **early,
    )  # fmt: skip
    return out, peaks


def fake(q, signatures, *_) -> tuple[Tensor, Tensor]:
    batch, heads, _, rows = signatures.codes.shape
    new = signatures.centre.new_empty
    return new((batch, heads, rows)), new((batch, heads, cdiv(rows, GROUP)))


find_collisions = register("find_collisions", reference, impls=(by_triton(launch),), fake=fake, check=check)
