"""Steps that fetch and attend to the blocks of a trace, instead of the blocks that their layers choose.

One kernel puts the blocks of all layers in place before the step begins. So the step itself has the same kernels as
without a trace.
"""
import torch
from torch import Tensor

from torchsparsekv.state import LayerState, mark_static


@torch.library.custom_op("torchsparsekv_benchmarks::instead_of", mutates_args=("blocks",))
def instead_of(chosen: Tensor, blocks: Tensor) -> None:
    """Does nothing, and launches nothing. It only claims to change `blocks`, so that a compiler keeps the choice of the
    method, and keeps it before the fetch."""


class Replay:
    """The blocks of a trace [heads, steps, chosen] for the retrieving layers of a cache.

    The kv heads of all layers take the heads of the trace in turn. Each row of a batch begins at another step.
    """

    def __init__(self, cache, ids: Tensor):
        layers = [x for x in cache.stored.values() if x.method.traits.attends == "selected"]
        batch, heads, chosen = layers[0].state.hot.chosen.shape
        if ids.shape[2] != chosen:
            raise ValueError(
                f"the trace has {ids.shape[2]} blocks a step, {layers[0].method.name} selects {chosen} here"
            )
        device, steps = layers[0].state.hot.chosen.device, ids.shape[1]
        taken = torch.arange(len(layers) * heads) % ids.shape[0]
        self.ids = ids[taken].unflatten(0, (len(layers), heads)).transpose(1, 2).contiguous().to(device)
        rows = torch.arange(batch) * steps // batch
        self.steps = ((torch.arange(steps)[:, None] + rows) % steps).to(device).unbind()
        self.done = 0
        self.blocks = mark_static(torch.empty((len(layers), batch, heads, chosen), dtype=ids.dtype, device=device))
        for i, layer in enumerate(layers):
            layer.state.override_ids = self._of_layer(i)

    def _of_layer(self, i: int):
        def blocks(s: LayerState, chosen: Tensor) -> Tensor:
            instead_of(chosen, self.blocks)
            return self.blocks[i]

        return blocks

    def __call__(self) -> None:
        """Put the blocks of the next step in place."""
        torch.index_select(self.ids, 1, self.steps[self.done % len(self.steps)], out=self.blocks)
        self.done += 1
