"""Relocation by swaps against the paper's, which puts the set in front and moves up all others in their order."""
from dataclasses import dataclass

import torch
from test_methods import BLOCK, small
from test_static import Story

from torchsparsekv.ops.index.block_bounds import VOLUMES, bounds
from torchsparsekv.ops.index.relocate import gathered
from torchsparsekv.ops.select.bound_scores import bound_scores
from torchsparsekv.ops.select.pin_blocks import pin_blocks
from torchsparsekv.ops.store.rows import keys_of
from torchsparsekv.probe import LayerProbe
from torchsparsekv.zoo.prkv import PRKV


@dataclass(frozen=True, kw_only=True)
class Literal(PRKV):
    """PRKV with algorithm 1 as it is written."""

    def choose(self, s, q, a):
        self.choose_static(s, q, a)
        sink = s.lengths.sink
        for b, h in s.static.updated.nonzero().tolist():
            ids, end = s.static.ids[b, h, : int(s.static.count[b, h])].cpu(), int(s.lengths.ring_begin[b])
            rows = s.far.rows[b, h]
            rows[sink:end] = rows[gathered(ids, sink, end).to(rows.device)]
            keys = keys_of(rows).unflatten(0, (-1, self.block_size))[: end // self.block_size]
            for to, new in zip(s.digests, bounds(keys, VOLUMES.index(self.shape), s.digests.centre.dtype)):
                to[b, h, : end // self.block_size] = new
            s.hot.slot_of[b, h], s.hot.block_of[b, h] = -1, -1
        scores, peaks = bound_scores(q, s.digests, s.lengths)
        pin_blocks(scores, peaks, s.static.count, sink, self.block_size)
        return self.best(scores, peaks)


def run(method, story: Story) -> tuple[float, list]:
    layer = story.layer(method)
    story.feed(layer, 0, 150, whole=True)
    layer.state.tap = seen = LayerProbe(method)
    sets = []
    for at in range(150, 240):
        story.feed(layer, at, at + 1)
        count = int(layer.state.static.count[0, 0])
        front = layer.state.far.rows[0, 0, method.sink : method.sink + count, 1, 0]
        sets.append(sorted(front.tolist()))
    return float(torch.stack(seen.mass).mean()), sets


def test_swapping_finds_the_same_sets_at_a_known_price():
    """Keys come in topics, so that the rows of a page are alike: what displaced rows spoil. Here, where a tenth of all
    rows is static, they cost 3 points of the mass; more than 5 would be another mistake."""
    story, masses = Story(240, pads=(0,), seed=11), []
    topic = torch.randn(1, 2, 240 // 12, 16, generator=torch.Generator().manual_seed(1)).repeat_interleave(12, 2)
    story.k = story.k + 2 * topic
    hyper = dict(budget=12 * BLOCK, static_ratio=0.5, update_every=7, digest="float32")
    swapped = small("prkv", **hyper)
    for method in (swapped, Literal(sink=swapped.sink, window=swapped.window, block_size=BLOCK, **hyper)):
        mass, sets = run(method, story)
        masses.append(mass)
        if method is swapped:
            want = sets
    assert sets == want
    assert masses[1] - masses[0] < 0.05, masses
