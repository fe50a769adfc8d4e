"""Take tokens back out of a cache: its index is built again from the keys that stay."""
from collections.abc import Mapping

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.side_stream import wait_for_side_stream
from torchsparsekv.ops.store.rows import as_numbers, ring_row
from torchsparsekv.ops.store.views import Attention
from torchsparsekv.state import LayerState, RingPlan, RowLengths

AGAIN = "reset() the cache and prompt again"
INSTEAD = f"make a copy before the turn (Handle.fork) and go back to it, or {AGAIN}"


def check_cropped(cache) -> None:
    """Refuse a cache if a layer cannot be built again from its keys, and name the reason."""
    if len(cache.stored) < len(cache.layers):
        raise NotImplementedError(f"crop: the state of linear-attention layers cannot be taken back; {AGAIN}")
    for i, layer in cache.stored.items():
        method, begin = layer.method, cache.row_lengths[layer.method.ring_plan].view.ring_begin
        if method.traits.attends == "window":
            if bool((begin > 0).any()):
                raise NotImplementedError(
                    f"crop: layer {i} has a sliding window of {method.window} tokens and has dropped the tokens before "
                    f"it; {INSTEAD}"
                )
        elif method.traits.cannot_crop:
            raise NotImplementedError(f"crop: {method.name} {method.traits.cannot_crop}; {INSTEAD}")


def crop(cache, columns: int, asked: int) -> None:
    """Keep the first `columns` columns, which include padding, as in transformers. The counters of the report stay.
    asked: the length as the user gave it."""
    device = next(iter(cache.row_lengths.values())).seq_len.device
    wait_for_side_stream(device)
    before: Mapping[RingPlan, list[int]] = {}
    for ring, lengths in cache.row_lengths.items():
        begins, pads = lengths.view.ring_begin.tolist(), lengths.left_pad.clone()
        if bool((pads >= columns).any()):
            raise ValueError(
                f"crop({asked}) would leave a row of the batch with nothing but padding: keep more than the "
                f"{int(pads.max())} columns of the longest padding"
            )
        before = {**before, ring: begins}
        _shorten(lengths, columns, pads)
    for layer in cache.stored.values():
        lengths = cache.row_lengths[layer.method.ring_plan]
        k, v = _kept(layer.state, before[layer.method.ring_plan], lengths, columns)
        _build_again(layer, k, v)


def _shorten(lengths: RowLengths, columns: int, pads: Tensor) -> None:
    lengths.reset()
    lengths.advance(columns, pads)


def _kept(state: LayerState, begins: list[int], lengths: RowLengths, columns: int) -> tuple[Tensor, Tensor]:
    """Keys and values [batch, heads, columns, dim] of the tokens that stay, read from ring and pool."""
    (ring, pool), sink = state.store, lengths.plan.sink
    out = ring.new_zeros(*ring.shape[:2], columns, *ring.shape[3:])
    for b, (begin, pad) in enumerate(zip(begins, lengths.left_pad.tolist())):
        tokens = columns - pad
        position = torch.arange(tokens, device=ring.device)
        near = position[(position < sink) | (position >= begin)]
        out[b][:, pad + near] = ring[b][:, ring_row(near, sink, ring.shape[2])]
        if (end := min(begin, tokens)) > sink:
            out[b][:, pad + sink : pad + end] = as_numbers(pool[b][:, sink:end].to(ring.device), ring.dtype)
    return out[..., 0, :], out[..., 1, :]


def _build_again(layer, k: Tensor, v: Tensor) -> None:
    """Store the tokens and build the index as a prompt does, with zeros for its queries. `check_cropped` has refused
    methods that read queries."""
    state, counted = layer.state, [(t, t.clone()) for b, t in layer.state.tensors() if b.counts]
    state.reset()
    q = k.new_zeros(1).expand(k.shape[0], layer.shape.heads, *k.shape[2:])
    layer.method.ingest(state, q, k, v, Attention(1.0), join=True)
    for t, value in counted:
        t.copy_(value)
