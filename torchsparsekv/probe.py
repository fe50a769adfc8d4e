"""Measure how much of the exact attention weight a method keeps, for every layer and head, while a model decodes.

    cache = handle.make_cache(1, 4096)
    with probe(cache) as seen:
        model.generate(ids, past_key_values=cache, disable_compile=True)
    seen.mass().mean(), seen.error().mean()

Decoding without a probe is not changed. Inside the `with`, every layer of this cache calls the probe with its selection
and output. The probe computes exact attention over all tokens of a row: it reads every key and value, in fp32.
"""
import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from torchsparsekv.method import Method
from torchsparsekv.ops.attend._split import soft_capped
from torchsparsekv.ops.store.rows import keys_of, ring_positions, values_of
from torchsparsekv.ops.store.views import Attention, Selection
from torchsparsekv.state import EAGER_ONLY, LayerState


class LayerProbe:
    """The measures of one layer: `mass` and `error` of each decode step, [rows, query heads]."""

    def __init__(self, method: Method):
        self.method = method
        self.mass: list[Tensor] = []
        self.error: list[Tensor] = []

    def __call__(self, s: LayerState, q: Tensor, a: Attention, selection: Selection, out: Tensor) -> None:
        """The `on_step` function of a LayerState."""
        if torch.compiler.is_compiling():
            raise RuntimeError(EAGER_ONLY)
        frontier = s.lengths.ring_begin[:, None].expand(s.store.pool.shape[:2])
        if selection.frontier is not None:
            frontier = selection.frontier
        weights, exact = exact_attention(s, q, a, frontier, selection.fill)
        kept = weights * attended(s, self.method)[:, :, None]
        self.mass.append((kept.sum(-1) / weights.sum(-1)).flatten(1))
        got = out[:, :, 0].float()
        self.error.append((got - exact).norm(dim=-1) / exact.norm(dim=-1))


class Probe:
    """The measures since the probe was made or cleared."""

    def __init__(self, methods: list[Method]):
        self.layers = [LayerProbe(m) for m in methods]

    def mass(self) -> Tensor:
        """The share of the softmax weight that was attended to, [layers, steps, rows, query heads]. Extra sink logits
        are not counted. The call waits for the device."""
        return self._stacked("mass")

    def error(self) -> Tensor:
        """|out - dense| / |dense| of the output of a head, [layers, steps, rows, query heads]. The call waits for the
        device."""
        return self._stacked("error")

    def sparse(self) -> list[int]:
        """The layers whose method leaves something out."""
        return [i for i, p in enumerate(self.layers) if p.method.traits.attends not in ("everything", "window")]

    def clear(self) -> None:
        for p in self.layers:
            p.mass.clear()
            p.error.clear()

    def _stacked(self, what: str) -> Tensor:
        steps = [getattr(p, what) for p in self.layers]
        if not all(steps):
            raise RuntimeError("nothing was measured: no decode step ran with this cache")
        return torch.stack([torch.stack(x) for x in steps]).cpu()


@contextlib.contextmanager
def probe(cache) -> Iterator[Probe]:
    """Measure the attention weight that decode steps keep, and the error of their outputs, until the `with` ends.

    Only eager steps are measured: pass `disable_compile=True` to generate().

    Args:
        cache: a SparseCache.

    Yields:
        An object with `mass()` and `error()`, each [layers, steps, rows, query heads].
    """
    found = Probe([layer.method for layer in cache.stored.values()])
    with tapped(cache, found.layers):
        yield found


@contextlib.contextmanager
def tapped(cache, taps) -> Iterator[None]:
    """Call each of `taps`, one per layer, at every decode step, with (state, query, attention, selection, output)."""
    layers = [*cache.stored.values()]
    before = [layer.state.on_step for layer in layers]
    for layer, tap in zip(layers, taps):
        layer.state.on_step = tap
    try:
        yield
    finally:
        for layer, tap in zip(layers, before):
            layer.state.on_step = tap


def exact_attention(
    s: LayerState, q: Tensor, a: Attention, frontier: Tensor, fill: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Weights of all rows of pool and ring, [batch, kv heads, group, pool rows + ring rows], and the dense output.

    Per (row, kv head), the ring counts from `frontier` on. With `fill`, only the filled rows of a block count.
    """
    pool, ring = s.store.pool, s.store.ring
    x = q[:, :, 0].unflatten(1, (pool.shape[1], -1)).float()
    z = torch.cat([x @ keys_of(rows).float().transpose(-1, -2) for rows in (pool, ring)], -1)
    z = soft_capped(z * a.scale, a.softcap).masked_fill(~_live(s, frontier, fill)[:, :, None], -torch.inf)
    total = z.logsumexp(-1, keepdim=True)
    if a.sink_logits is not None:
        total = torch.logaddexp(total, a.sink_logits.float().view(1, pool.shape[1], -1, 1))
    weights = (z - total).exp()
    far, near = weights.split([pool.shape[2], ring.shape[2]], -1)
    out = far @ values_of(pool).float() + near @ values_of(ring).float()
    out = torch.where((s.lengths.length < 0).view(-1, 1, 1, 1), torch.nan, out)
    return weights, out.flatten(1, 2)


def _live(s: LayerState, frontier: Tensor, fill: Tensor | None) -> Tensor:
    """The rows of pool and ring that hold a token, [batch, kv heads, pool rows + ring rows]. A token in both counts
    once."""
    pool, ring, sink, length = s.store.pool, s.store.ring, s.lengths.sink, s.lengths.length
    row = torch.arange(pool.shape[2], device=pool.device)
    far = (row >= sink) & (row < frontier[..., None])
    if fill is not None:
        size = pool.shape[2] // fill.shape[2]
        far = row % size < fill.repeat_interleave(size, -1)
    near = [ring_positions(ring.shape[2], length, f, sink) >= 0 for f in frontier.unbind(1)]
    return torch.cat([far, torch.stack(near, 1)], -1)


def attended_blocks(s: LayerState) -> Tensor:
    """Ids of the blocks that this step attended to, -1 where a slot is empty."""
    slots = s.hot.chosen
    if not slots.shape[-1]:
        return slots
    return torch.where(slots < 0, -1, s.hot.block_of.gather(-1, slots.clamp(min=0).long()))


def attended(s: LayerState, method: Method) -> Tensor:
    """Rows of pool and ring that this step attended to, [batch, kv heads, pool rows + ring rows]."""
    pool, near = s.store.pool, torch.ones(*s.store.ring.shape[:3], dtype=torch.bool, device=s.store.ring.device)
    if method.traits.attends == "everything":
        return torch.cat([near.new_ones(pool.shape[:3]), near], -1)
    ids, blocks = attended_blocks(s), pool.shape[2] // method.block_size
    chosen = near.new_zeros(*pool.shape[:2], blocks + 1)  # the last place takes the empty slots
    chosen.scatter_(-1, torch.where(ids < 0, blocks, ids).long(), True)
    return torch.cat([chosen[..., :blocks].repeat_interleave(method.block_size, -1), near], -1)
