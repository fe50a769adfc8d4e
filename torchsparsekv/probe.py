"""How much of the true attention a method keeps, measured at every layer and head while a patched model decodes.

    cache = handle.make_cache(1, 4096)
    with probe(cache) as seen:
        model.generate(ids, past_key_values=cache, disable_compile=True)
    seen.mass().mean(), seen.error().mean()

Nothing of this is in the decode path: inside the `with`, the methods of this one cache are stood in for by ones that
also compute exact attention over all that the row holds. That reads every key and value, in fp32.
"""
import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor

from torchsparsekv.method import Attention, Method
from torchsparsekv.ops.attend._rows import ring_positions
from torchsparsekv.state import LayerState


class LayerProbe:
    """One layer: per decode step, [rows, query heads] of both measures."""

    def __init__(self, method: Method):
        self.method = method
        self.mass: list[Tensor] = []
        self.error: list[Tensor] = []
        self.places: Tensor | None = None  # of the step under way

    def take(self, s: LayerState, q: Tensor, a: Attention, out: Tensor) -> None:
        if not self.method.dense and self.places is None:
            raise RuntimeError(f"{self.method.name}: a probe needs attend() to go through places(), and it did not")
        weights, exact = exact_attention(s, q, a, self.method)
        kept = weights * attended(s, self.method, self.places)[:, :, None]
        self.mass.append((kept.sum(-1) / weights.sum(-1)).flatten(1))
        got = out[:, :, 0].float()
        self.error.append((got - exact).norm(dim=-1) / exact.norm(dim=-1))


class Probe:
    """What was measured since the probe was set or cleared."""

    def __init__(self, methods: list[Method]):
        self.layers = [LayerProbe(m) for m in methods]

    def mass(self) -> Tensor:
        """Share of the full softmax weight that was attended to, [layers, steps, rows, query heads]; waits for the
        device. Extra sink logits are in no share."""
        return self._stacked("mass")

    def error(self) -> Tensor:
        """|out - dense| / |dense| of a head's output, [layers, steps, rows, query heads]; waits for the device."""
        return self._stacked("error")

    def sparse(self) -> list[int]:
        """The layers whose method leaves something out."""
        return [i for i, p in enumerate(self.layers) if not p.method.dense]

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
    """Measure every eager decode step that uses this cache, until the `with` ends."""
    before = [layer.method for layer in cache.layers]
    found = Probe(before)
    for layer, p in zip(cache.layers, found.layers):
        layer.method = _watched(layer.method, p)
    try:
        yield found
    finally:
        for layer, method in zip(cache.layers, before):
            layer.method = method


def _watched(method: Method, p: LayerProbe) -> Method:
    """The same method, as an instance of a subclass that tells the probe what it does."""
    own = type(method)

    def places(self, s, q, a):
        p.places = own.places(self, s, q, a)
        return p.places

    def attend(self, s, q, a):
        if torch.compiler.is_compiling():
            raise RuntimeError("a probe works in eager decode only: pass disable_compile=True to generate()")
        p.places = None
        out = own.attend(self, s, q, a)
        p.take(s, q, a, out)
        return out

    twin: Method = object.__new__(type(own.__name__, (own,), {"places": places, "attend": attend}))
    twin.__dict__.update(method.__dict__)
    return twin


def exact_attention(s: LayerState, q: Tensor, a: Attention, method: Method) -> tuple[Tensor, Tensor]:
    """Weights of all rows of pool and ring, [batch, kv heads, group, pool rows + ring rows], and the dense output."""
    c = s.clock
    x = q[:, :, 0].unflatten(1, (s.pool.shape[1], -1)).float()
    z = torch.cat([x @ rows[..., 0, :].float().transpose(-1, -2) for rows in (s.pool, s.ring)], -1) * a.scale
    z = torch.tanh(z / a.softcap) * a.softcap if a.softcap else z
    z = z.masked_fill(~_live(s, method)[:, :, None], -torch.inf)
    total = z.logsumexp(-1, keepdim=True)
    if a.sinks is not None:
        total = torch.logaddexp(total, a.sinks.float().view(1, s.pool.shape[1], -1, 1))
    weights = (z - total).exp()
    far, near = weights.split([s.pool.shape[2], s.ring.shape[2]], -1)
    out = far @ s.pool[..., 1, :].float() + near @ s.ring[..., 1, :].float()
    out = torch.where((c.length < 0).view(-1, 1, 1, 1), torch.nan, out)
    return weights, out.flatten(1, 2)


def _live(s: LayerState, method: Method) -> Tensor:
    """Which rows of pool and ring stand for a token, [batch, kv heads, pool rows + ring rows]; no token twice."""
    sink, (batch, heads) = method.timeline.sink, s.pool.shape[:2]
    frontier = method.frontier(s).view(batch, -1).expand(-1, heads)
    row = torch.arange(s.pool.shape[2], device=s.pool.device)
    far = (row >= sink) & (row < frontier[..., None])
    near = [ring_positions(s.ring.shape[2], s.clock.length, f, sink) >= 0 for f in frontier.unbind(1)]
    return torch.cat([far, torch.stack(near, 1)], -1)


def attended(s: LayerState, method: Method, places: Tensor | None) -> Tensor:
    """Rows of pool and ring that this step attended to, [batch, kv heads, pool rows + ring rows]."""
    near = torch.ones(*s.ring.shape[:3], dtype=torch.bool, device=s.ring.device)
    if places is None:
        return torch.cat([near.new_ones(s.pool.shape[:3]), near], -1)
    blocks = s.pool.shape[2] // method.block_size
    chosen = near.new_zeros(*s.pool.shape[:2], blocks + 1)  # the last one takes the places that are empty
    if places.shape[-1]:
        ids = s.resident.gather(-1, places.clamp(min=0).long())
        chosen.scatter_(-1, torch.where(places < 0, blocks, ids).long(), True)
    return torch.cat([chosen[..., :blocks].repeat_interleave(method.block_size, -1), near], -1)
