"""Read a prompt once, and give its keys and values to the caches of many methods.

Prompts are exact, so their queries, keys and values are the same for every method. One forward of the model makes them.
Every method then takes them into its store and index, as it does in a forward of its own.
"""
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

import torchsparsekv
from torchsparsekv.method import make_method
from torchsparsekv.ops._machinery.side_stream import wait_for_side_stream
from torchsparsekv.ops.store.views import Attention
from torchsparsekv.patches._cache import SparseCache
from torchsparsekv.patches._captured import Steps

QUERIES = 1024  # queries that are kept at the end of a prompt; methods that choose by queries read fewer


class Prompted(NamedTuple):
    """The queries, keys and values of a prompt in one layer."""

    queries: Tensor  # of the last columns
    keys: Tensor
    values: Tensor
    attention: Attention


@dataclass
class Recording:
    """Prompts padded on the left, the keys and values of every layer, and the logits of the last positions.

    ids [rows, columns]; pad [rows], padding tokens of a row; most_left_out: a replay may leave out this many columns at
    the end. all_queries: the queries of all columns are kept, and not only the last.
    """

    ids: Tensor
    pad: Tensor
    most_left_out: int = 0
    all_queries: bool = False
    layers: dict[int, Prompted] = field(default_factory=dict)
    logits: Any = None

    @property
    def lengths(self) -> Tensor:
        return self.ids.shape[1] - self.pad


def padded(prompts: list[list[int]], device: torch.device, pad_token: int = 0) -> tuple[Tensor, Tensor]:
    """(ids, number of padding tokens of each row)."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad_token] * (longest - len(p)) + list(p) for p in prompts], device=device)
    return ids, torch.tensor([longest - len(p) for p in prompts], device=device, dtype=torch.int32)


@torch.no_grad()
def record(model, ids: Tensor, pad: Tensor, most_left_out: int = 0, methods: Iterable[str] = ()) -> Recording:
    """One exact forward of an unpatched model. methods: those that will get the recording."""
    all_queries = any(make_method(m).traits.all_queries for m in methods)
    recording = Recording(ids, pad, most_left_out, all_queries)
    batch, tokens = ids.shape
    how = dict(method="full", max_length=tokens, offload="device", skip_layers=0)
    with torchsparsekv.patch(model, **how) as handle:
        cache = handle.make_cache(batch, tokens)
        for i, layer in cache.stored.items():
            layer.state.on_prompt = _taker(recording, i)
        columns = torch.arange(tokens, device=ids.device)
        mask = (columns >= pad[:, None]).long() if bool(pad.any()) else None
        positions = (columns - pad[:, None]).clamp_min(0)
        recording.logits = model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache, logits_to_keep=1
        ).logits
    return recording


def _taker(recording: Recording, layer: int) -> Callable:
    def take(state, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> None:
        first = 0 if recording.all_queries else -QUERIES - recording.most_left_out
        recording.layers[layer] = Prompted(q[:, :, first:].clone(), k, v, a)

    return take


@torch.no_grad()
def replay(recording: Recording, cache: SparseCache, tokens: int | None = None) -> None:
    """Store the prompts, or their first `tokens` columns, in an empty cache, and build its indexes."""
    columns = recording.ids.shape[1]
    tokens = columns if tokens is None else tokens
    left_out = columns - tokens
    if not 0 <= left_out <= recording.most_left_out:
        raise ValueError(f"a replay of {tokens} of {columns} columns needs record(most_left_out={left_out})")
    queries = None
    for i, layer in cache.stored.items():
        q, k, v, a = recording.layers[i]
        check_observed(layer, recording)
        if queries is None:
            queries = q.new_zeros((*q.shape[:2], tokens, q.shape[3]))
        last = q[:, :, : q.shape[2] - left_out][:, :, -tokens:]
        queries[:, :, tokens - last.shape[2] :] = last
        if layer.advances:
            layer.state.row_lengths.advance(tokens, recording.pad)
        q, k = layer.method.spread(layer.state, queries, k[:, :, :tokens])
        layer.method.ingest(layer.state, q, k, v[:, :, :tokens], a, join=True)
    wait_for_side_stream(recording.ids.device)


def check_observed(layer, recording: Recording) -> None:
    """Refuse a method that chooses by more queries than a recording keeps."""
    if layer.method.traits.all_queries and not recording.all_queries:
        raise ValueError(f"{layer.method.name} reads all queries of a prompt: record(methods=[{layer.method.name!r}])")
    observed = layer.method.observed_queries(layer.state)
    if observed is not None and observed.shape[1] > QUERIES:
        raise ValueError(
            f"{layer.method.name} observes {observed.shape[1]} queries, a recording keeps the last {QUERIES}"
        )


def stepper(model, cache: SparseCache) -> Callable[[Tensor, Tensor], Tensor]:
    """step(ids [rows, 1], positions [rows, 1]): the logits of one decode step, [rows, vocabulary]. On a GPU the step is
    captured as a graph."""
    probed = any(layer.state.on_step for layer in cache.stored.values())
    call: Any = model if model.device.type == "cpu" or probed else Steps(model, None)

    def step(ids: Tensor, positions: Tensor) -> Tensor:
        return call(input_ids=ids, position_ids=positions, past_key_values=cache).logits[:, -1]

    return step


@torch.no_grad()
def answers(
    step: Callable, logits: Tensor, positions: Tensor, new_tokens: int, ends: Tensor | None = None, look: int = 16
) -> Tensor:
    """Greedy decoding, [rows, at most new_tokens]. It stops early if every row has had a token of `ends`. The host
    checks that at every `look`-th token."""
    out = [logits.argmax(-1)]
    done = torch.zeros_like(out[0], dtype=torch.bool)
    for t in range(new_tokens - 1):
        if ends is not None:
            done |= torch.isin(out[-1], ends)
            if t % look == look - 1 and bool(done.all()):
                break
        out.append(step(out[-1][:, None], (positions + t)[:, None]).argmax(-1))
    return torch.stack(out, 1)


def filled(handle, recording: Recording, length: int, tokens: int | None = None) -> SparseCache:
    """A new cache that holds the prompts of a recording."""
    cache = handle.make_cache(recording.ids.shape[0], length)
    replay(recording, cache, tokens)
    return cache
