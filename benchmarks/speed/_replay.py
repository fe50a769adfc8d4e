"""Steps that fetch and attend to the blocks of a trace, instead of the blocks that their layers choose.

One kernel puts the blocks of all layers in place before the step begins. So the step itself has the same kernels as
without a trace.
"""
import contextlib
import itertools
import unittest.mock
from collections.abc import Iterator

import torch
from torch import Tensor

from torchsparsekv.method import Method
from torchsparsekv.state import LayerState, mark_static


@torch.library.custom_op("torchsparsekv_benchmarks::instead_of", mutates_args=("blocks",))
def instead_of(chosen: Tensor, blocks: Tensor) -> None:
    """Does nothing, and launches nothing. It only claims to change `blocks`, so that a compiler keeps the choice of the
    method, and keeps it before the fetch."""


class Replay:
    """The blocks of a trace [heads, steps, chosen], for `layers` layers of `heads` kv heads and a batch of `rows`.

    The kv heads of all layers take the heads of the trace in turn. Each row of the batch begins at another step.
    Before the first step no block is chosen.
    """

    def __init__(self, ids: Tensor, layers: int, rows: int, heads: int, device: torch.device):
        steps = ids.shape[1]
        taken = torch.arange(layers * heads) % ids.shape[0]
        self.ids = ids[taken].unflatten(0, (layers, heads)).transpose(1, 2).contiguous().to(device)
        begins = torch.arange(rows) * steps // rows
        self.steps = ((torch.arange(steps)[:, None] + begins) % steps).to(device).unbind()
        self.done = 0
        self.blocks = mark_static(torch.full((layers, rows, heads, ids.shape[2]), -1, dtype=ids.dtype, device=device))

    def __call__(self) -> None:
        """Put the blocks of the next step in place."""
        torch.index_select(self.ids, 1, self.steps[self.done % len(self.steps)], out=self.blocks)
        self.done += 1


def _check(blocks: Tensor, chosen: int, method: Method) -> None:
    if blocks.shape[-1] != chosen:
        raise ValueError(f"the trace has {blocks.shape[-1]} blocks a step, {method.name} selects {chosen} here")


def replay_in_cache(cache, ids: Tensor) -> Replay:
    """A replay for the retrieving layers of a cache of `patch`."""
    layers = [x for x in cache.stored.values() if x.method.traits.attends == "selected"]
    batch, heads, chosen = layers[0].state.hot.chosen.shape
    _check(ids, chosen, layers[0].method)
    replay = Replay(ids, len(layers), batch, heads, layers[0].state.hot.chosen.device)

    def of_layer(i: int):
        def blocks(s: LayerState, chosen: Tensor) -> Tensor:
            instead_of(chosen, replay.blocks)
            return replay.blocks[i]

        return blocks

    for i, layer in enumerate(layers):
        layer.state.override_ids = of_layer(i)
    return replay


@contextlib.contextmanager
def replay_in_engine(method: Method, replay: Replay) -> Iterator[None]:
    """The layers of an engine choose, and then take the blocks of `replay`. Enter it before the engine captures steps.

    Each step calls the layers in their order.
    """
    choose, layers = type(method).choose, itertools.cycle(replay.blocks)

    def replayed(self, layer, q: Tensor, a):
        selection = choose(self, layer, q, a)
        assert selection.ids is not None
        _check(replay.blocks, selection.ids.shape[2], self)
        return selection._replace(ids=next(layers)[: len(q)])

    with unittest.mock.patch.object(type(method), "choose", replayed):
        yield
