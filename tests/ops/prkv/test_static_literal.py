"""Relocation finds the sets that the order of the paper finds, with the set in front and all others moved up."""
from dataclasses import dataclass

import torch
from layer import BLOCK
from static_story import Story, small
from torch import Tensor

from torchsparsekv._methods.prkv import PRKV
from torchsparsekv.ops.index.block_bounds import VOLUMES, bounds
from torchsparsekv.ops.prkv.relocate import gathered
from torchsparsekv.ops.select.bound_scores import bound_scores
from torchsparsekv.ops.store.rows import keys_of
from torchsparsekv.ops.store.views import Attention, Selection
from torchsparsekv.probe import LayerProbe
from torchsparsekv.state import LayerState


@dataclass(frozen=True, kw_only=True)
class Literal(PRKV):
    """PRKV with algorithm 1 as the paper writes it: the set in front, and behind it all other tokens in their order."""

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        self.choose_static(s, a)
        sink = s.lengths.sink
        for b, h in s.static.updated.nonzero().tolist():
            ids, end = s.static.ids[b, h, : int(s.static.count[b, h])].cpu(), int(s.lengths.ring_begin[b])
            rows = s.store.pool[b, h]
            rows[sink:end] = rows[gathered(ids, sink, end).to(rows.device)]
            keys = keys_of(rows).unflatten(0, (-1, self.block_size))[: end // self.block_size]
            volume, dtype = VOLUMES.index(self.shape), s.digests.centre.dtype
            for to, new in zip(s.digests, bounds(keys, s.digests.origin[b, h], volume, dtype)):
                to[b, h, : end // self.block_size] = new
            s.hot.slot_of[b, h], s.hot.block_of[b, h] = -1, -1
        return self.best(s, *bound_scores(q, s.digests, s.lengths, s.static.count))


def run(method, story: Story) -> tuple[float, list]:
    layer = story.layer(method)
    story.feed(layer, 0, 150, whole=True)
    layer.state.on_step = seen = LayerProbe(method)
    sets = []
    for at in range(150, 240):
        story.feed(layer, at, at + 1)
        count = int(layer.state.static.count[0, 0])
        front = layer.state.store.pool[0, 0, method.sink : method.sink + count, 1, 0]
        sets.append(sorted(front.tolist()))
    return float(torch.stack(seen.mass).mean()), sets


def test_order_of_the_paper_finds_the_same_sets():
    """Keys come in topics, so that the rows of a page are alike: what strangers in the digests would spoil."""
    story, masses = Story(240, pads=(0,), seed=11), []
    topic = torch.randn(1, 2, 240 // 12, 16, generator=torch.Generator().manual_seed(1)).repeat_interleave(12, 2)
    story.k = story.k + 2 * topic
    hyper = dict(budget=12 * BLOCK, static_ratio=0.5, update_every=7, digest="float32", update_from="keys")
    swapped = small("prkv", **hyper)
    for method in (swapped, Literal(sink=swapped.sink, window=swapped.window, block_size=BLOCK, **hyper)):
        mass, sets = run(method, story)
        masses.append(mass)
        if method is swapped:
            want = sets
    assert sets == want
    assert masses[1] - masses[0] < 0.02, masses
