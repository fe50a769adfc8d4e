"""Heads of a sharing layer are matched with those of the selecting layer, by tokens counted one by one."""
import pytest
import torch
from cases import OPS
from hypothesis import given
from hypothesis import strategies as st
from kernels import clones, on
from world import DEVICE, World, integers, worlds

from torchsparsekv.ops.icecache.share_prompt import share_prompt
from torchsparsekv.ops.icecache.top_tokens_of_last_queries import QUERIES, WANTED, top_tokens_of_last_queries


def wanted_by(w: World, q: torch.Tensor, k: torch.Tensor, b: int, h: int, column: int) -> list[int]:
    """The top tokens of the query in one column, for a kv head."""
    n, tokens = int(w.length[b]), k.shape[2]
    start, old, new = (int(t[b]) for t in (w.start, w.previous_begin, w.begin))
    position = n - tokens + column
    candidates = range(max(start, old), min(new, position)) if position >= start and n > 0 else ()
    group = q[b, h * w.group : (h + 1) * w.group, column].double()
    score = {p + tokens - n: float((group @ k[b, h, p + tokens - n].double()).max()) for p in candidates}
    return sorted(sorted(score, key=lambda c: (-score[c], c))[:WANTED])


@given(w=worlds(tokens=st.sampled_from([1, 7, 33, 60])))
def test_sought_tokens_are_the_best_by_raw_keys(w):
    q, k = integers(w.q), integers(w.k)
    got = top_tokens_of_last_queries(*on(DEVICE, (q, k, w.lengths_view)), True).tolist()
    tokens = k.shape[2]
    for b in range(w.batch):
        for h in range(w.heads):
            want = [wanted_by(w, q, k, b, h, c) for c in range(max(0, tokens - QUERIES), tokens)]
            assert [[c for c in row if c >= 0] for row in got[b][h]] == want


def common(top: torch.Tensor, source_top: torch.Tensor) -> int:
    """The tokens that two heads have in common, summed over the queries."""
    return sum(len({*mine} & {*other} - {-1}) for mine, other in zip(top.tolist(), source_top.tolist()))


@given(w=worlds(tokens=st.integers(1, 9)))
def test_head_is_matched_by_counting_shared_tokens(w):
    order, top, source_top, before, lengths, page, _ = things = OPS["share_prompt"](w)
    *args, join = on(DEVICE, clones(things))
    out, after = share_prompt(*args, join).cpu(), on("cpu", args[3])
    for b in range(w.batch):
        n, old, new = (int(t[b]) for t in lengths[1:4])
        for h in range(w.heads):
            head = int(before.source_heads[b, h])
            if top is not None and n > 0 and new > old == lengths.sink:
                head = max(range(w.heads), key=lambda x: (common(top[b, h], source_top[b, x]), x == h, -x))
            assert int(after.source_heads[b, h]) == head
            assert torch.equal(out[b, h], order[b, h if head < 0 else head])
            full = range(old // page, new // page) if n > 0 else ()
            assert after.fill[b, h].tolist() == [
                page if i in full else x for i, x in enumerate(before.fill[b, h].tolist())
            ]
    assert torch.equal(after.pages, before.pages)


def test_ties_go_to_the_head_of_the_same_number_then_to_the_lowest():
    w = World(lengths=[40], tokens=40, heads=3)
    order, *_, shared, lengths, page, join = OPS["share_prompt"](w)
    source_top = torch.tensor([[[[1, 2]], [[1, 2]], [[3, 4]]]], dtype=torch.int32)
    top = torch.tensor([[[[1, 2]], [[1, 2]], [[1, 2]]]], dtype=torch.int32)
    shared = shared._replace(source_heads=torch.full((1, 3), -1, dtype=torch.int32))
    share_prompt(order, top, source_top, shared, lengths, page, join)
    assert shared.source_heads.tolist() == [[0, 1, 0]]


def test_sought_tokens_of_one_layer_alone_are_refused():
    order, top, _, shared, lengths, page, join = OPS["share_prompt"](World(tokens=9))
    with pytest.raises(ValueError, match="both or neither"):
        share_prompt(order, top, None, shared, lengths, page, join)
    with pytest.raises(ValueError, match="pages of 3: sink 4 and interval 4 must be whole pages"):
        share_prompt(order, None, None, shared, lengths, 3, join)
