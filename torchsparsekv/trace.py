"""Print the ops of one decode step of a tiny model, in order, with shapes and with what each op changes.

    python -m torchsparsekv.trace --method pariskv
    python -m torchsparsekv.trace --method quest --marks    # where the tokens of a sequence are after the step

The model is a llama of two layers with random weights, made from a config: nothing is downloaded, and a CPU suffices.
The first layer is dense, as the first layers are by default. The printed step is the first step at which generated
tokens leave the ring: they go to the pool, and the index takes them in.
"""
import argparse
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torchsparsekv.api import methods, patch
from torchsparsekv.ops._machinery.registry import OPS
from torchsparsekv.ops._machinery.signature import Flat, Signature
from torchsparsekv.ops.store.rows import ring_positions
from torchsparsekv.probe import attended_blocks
from torchsparsekv.state import LayerState

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCABULARY = 2, 4, 2, 16, 97
PROMPT, STEPS, CAPACITY = 40, 200, 128
# Hyper-parameters that fit the tiny prompt. A method gets those that it has.
TINY = dict(
    budget=16, sink=4, window=8, block_size=4, page_size=4, cluster_size=4, every=16, segment_max=8, update_every=8,
    full_threshold=40, static_ratio=0.5,
)  # fmt: skip
MARKS, LABEL = ("previous_ring_begin", "ring_begin", "start", "length"), 24
WIDTH, INDENT, GLUE = 112, 12, "\xa0"  # GLUE keeps a line from breaking inside brackets
MARKED = re.compile(r"(<!-- (trace|sparse|marks): (\w+) -->\n```\n).*?(```\n<!-- end -->)", re.S)
HEAD = (
    "{method}: one decode step of a tiny llama, {layers} layers, {heads} query heads, {kv_heads} kv heads, "
    "head_dim {dim}.\n"
    "Shapes are in brackets. `*` marks a tensor that really changed. "
    "`lengths` say which tokens are in the ring."
)


@dataclass(frozen=True)
class Call:
    """One op as it ran: its arguments by name with their shapes, and the names of the tensors that changed."""

    layer: int
    op: str
    read: tuple[tuple[str, tuple[int, ...]], ...]
    written: tuple[tuple[str, tuple[int, ...]], ...]
    changed: frozenset[str]
    returned: tuple[tuple[int, ...], ...]


class Recorder(TorchDispatchMode):
    """Records every op of torchsparsekv that runs inside the `with`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.layer = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        namespace, _, name = func.name().partition("::")
        if namespace != "torchsparsekv":
            return func(*args, **(kwargs or {}))
        flat = OPS[name].signature.flat
        given = [(f, x) for f, x in zip(flat, args) if isinstance(x, Tensor)]
        before = {f.said: x.clone() for f, x in given if f.changed}
        out = func(*args, **(kwargs or {}))
        changed = frozenset(f.said for f, x in given if f.changed and not _same_bytes(before[f.said], x))
        shapes = [(f, tuple(x.shape)) for f, x in given]
        self.calls.append(
            Call(
                self.layer, name, tuple((f.said, x) for f, x in shapes if not f.changed),
                tuple((f.said, x) for f, x in shapes if f.changed), changed,
                tuple(tuple(x.shape) for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, Tensor)),
            )
        )  # fmt: skip
        return out


def _same_bytes(a: Tensor, b: Tensor) -> bool:
    """Equality that also holds for NaN."""
    return torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (a, b)))


def tiny_model():
    """A llama with random weights. Its weights are the same at every call."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", num_hidden_layers=LAYERS, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM,
        hidden_size=HEADS * HEAD_DIM, intermediate_size=64, vocab_size=VOCABULARY, max_position_embeddings=CAPACITY,
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).float().eval()


def trace(method: str = "pariskv") -> tuple[list[Call], LayerState]:
    """The ops of the first decode step at which generated tokens leave the ring, and the state of the sparse layer."""
    known = methods()
    if method not in known:
        raise ValueError(f"unknown method {method!r}; available: {', '.join(known)}")
    model = tiny_model()
    hyper: dict[str, Any] = {name: value for name, value in TINY.items() if name in known[method]}
    ids = torch.randint(VOCABULARY, (1, PROMPT), generator=torch.Generator().manual_seed(1))
    with patch(model, method, max_length=CAPACITY, skip_layers=1, **hyper) as handle, torch.inference_mode():
        cache = handle.make_cache()
        hooks = []
        recorder = Recorder()
        for i, layer in enumerate(model.model.layers):
            hooks.append(layer.register_forward_pre_hook(lambda *_, i=i: setattr(recorder, "layer", i)))
        token = model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)
        lengths = cache.layers[LAYERS - 1].state.lengths
        for _ in range(STEPS):
            recorder.calls.clear()
            with recorder:
                token = model(token, past_key_values=cache).logits[:, -1:].argmax(-1)
            if int(lengths.ring_begin) > max(PROMPT, int(lengths.previous_ring_begin)):
                break
        for hook in hooks:
            hook.remove()
    return recorder.calls, cache.layers[LAYERS - 1].state


def _shape(sizes: tuple[int, ...]) -> str:
    return f"[{GLUE.join(map(str, sizes))}]"


def _tensors(signature: Signature, given: tuple[tuple[str, tuple[int, ...]], ...], changed: frozenset[str]) -> str:
    """Names and shapes. `lengths` that an op only reads are one word. Neighbours of one shape share brackets."""
    shapes = dict(given)
    parts: list[str] = []
    for parameter in signature.parameters:
        own = [f for f in parameter.flat if f.said in shapes]
        if own and parameter.name == "lengths" and not own[0].changed:
            parts.append("lengths")
        else:
            parts.extend(_by_shape(own, shapes, changed))
    return ", ".join(parts)


def _by_shape(own: list[Flat], shapes: dict[str, tuple[int, ...]], changed: frozenset[str]) -> Iterator[str]:
    for i, f in enumerate(own):
        name = f"{f.said}{'*' if f.said in changed else ''}"
        last = i + 1 == len(own) or shapes[own[i + 1].said] != shapes[f.said]
        yield f"{name}{GLUE}{_shape(shapes[f.said])}" if last else name


def text(method: str = "pariskv") -> str:
    """The trace as it is printed."""
    return _told(method, trace(method)[0])


def sparse(method: str) -> str:
    """The trace without its dense layer."""
    return _told(method, [call for call in trace(method)[0] if call.layer == LAYERS - 1])


def _told(method: str, calls: list[Call]) -> str:
    head = dict(method=method, layers=LAYERS, heads=HEADS, kv_heads=KV_HEADS, dim=HEAD_DIM)
    lines, layer = [HEAD.format(**head)], -1
    for call in calls:
        if call.layer != layer:
            layer = call.layer
            lines += ["", f"layer {layer}: {'full' if layer < LAYERS - 1 else method}"]
        lines.append(f"  {call.op}")
        signature = OPS[call.op].signature
        returned = ", ".join(map(_shape, call.returned))
        for label, said in (
            ("reads", _tensors(signature, call.read, call.changed)),
            ("changes", _tensors(signature, call.written, call.changed)), ("returns", returned),
        ):  # fmt: skip
            if said:
                lead = f"    {label}".ljust(INDENT)
                lines.append(textwrap.fill(said, WIDTH, initial_indent=lead, subsequent_indent=" " * INDENT))
    return "\n".join(lines).replace(GLUE, " ")


def marks(method: str = "quest") -> str:
    """A picture of the first kv head after the traced step: where each token is, and the lengths that say so."""
    _, state = trace(method)
    if "hot" not in state.buffers:
        raise ValueError(f"method {method!r} has no hot buffer, so there is nothing to show")
    lengths, store = state.lengths, state.store
    length, begin = int(lengths.length), lengths.ring_begin
    size = store.pool.shape[2] // state.hot.slot_of.shape[2]
    ring = ring_positions(store.ring.shape[2], lengths.length, begin, lengths.sink)[0].tolist()
    pool = store.pool[0, 0].flatten(1).any(1).nonzero().flatten().tolist()
    hot = _positions(state.hot.block_of[0, 0].tolist(), size)
    read = {*ring, *_positions(attended_blocks(state)[0, 0].tolist(), size)}
    rows = {"in the ring": ring, "in the pool": pool, "in the hot buffer": hot, "read by the step": read}
    lines = [
        f"{method}: one sequence, one kv head, after the step that stored token {length - 1}; blocks of {size}.",
        "",
        " " * LABEL + "".join(str(i // 10) if i % 10 == 0 else " " for i in range(length)).rstrip(),
        "position".ljust(LABEL) + "".join(str(i % 10) for i in range(length)),
    ]
    lines += [
        label.ljust(LABEL) + "".join("#" if i in held else "." for i in range(length)) for label, held in rows.items()
    ]
    named = {"sink": lengths.sink, **{name: int(getattr(lengths, name)) for name in MARKS}}
    lines += [f"{name} {value}".ljust(LABEL) + " " * value + "^" for name, value in named.items()]
    return "\n".join(lines)


def _positions(blocks: list[int], size: int) -> set[int]:
    return {block * size + i for block in blocks if block >= 0 for i in range(size)}


def renewed(page: str) -> str:
    """The page with new traces and pictures between its markers."""
    made = {"trace": text, "sparse": sparse, "marks": marks}
    return MARKED.sub(lambda found: f"{found[1]}{made[found[2]](found[3])}\n{found[4]}", page)


def main(words: list[str] | None = None) -> None:
    about, *more = (__doc__ or "").split("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m torchsparsekv.trace", description=about, epilog="\n\n".join(more),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--method", default="pariskv", choices=sorted(methods()), metavar="NAME", help="[pariskv]")
    parser.add_argument("--marks", action="store_true", help="print where tokens of a sequence are, not the ops")
    parser.add_argument("--write", type=Path, metavar="PAGE", help="renew what stands between markers in PAGE")
    given = parser.parse_args(words)
    if given.write is None:
        print((marks if given.marks else text)(given.method))
        return
    before = given.write.read_text()
    if not MARKED.search(before):
        markers = " or ".join(f"`<!-- {kind}: NAME -->`" for kind in ("trace", "sparse", "marks"))
        raise SystemExit(f"{given.write} has no marker {markers}")
    given.write.write_text(renewed(before))


if __name__ == "__main__":
    main()
