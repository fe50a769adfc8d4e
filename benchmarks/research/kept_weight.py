"""How much attention weight do methods keep if they evict tokens, or if layers share a selection?

    python benchmarks/research/kept_weight.py --out benchmarks/results/quality/kept_weight.json

A text goes through a dense model once. The queries, keys and values of three layers then go through one layer of each
method: a prompt, and single tokens after it, as if the model had written the text. So all methods see the same queries.
At every eighth step the script measures the share of the exact attention weight that the step attends to, sinks and
window included. Minutes on a CPU; needs `make real-model ONLY='qwen-0.5b sympy moby-dick'`.
"""
import statistics
from typing import Any

import torch

from torchsparsekv.method import Method, make_method
from torchsparsekv.ops.store.views import Attention
from torchsparsekv.probe import LayerProbe
from torchsparsekv.state import Geometry, LayerState, RowLengths
from torchsparsekv_benchmarks.quality import replay
from torchsparsekv_benchmarks.research._recorded import parser, recorded, write

SINK, WINDOW, EACH = 32, 64, 8
LAYERS = (5, 11, 20)  # each behind a filter layer of omnikv
SETTINGS = {  # (tokens of the prompt, all tokens, budget)
    "long prompt": (2816, 3072, 256),
    "long answer": (128, 1536, 128),
}
METHODS = ("oracle", "quest", "omnikv", "snapkv", "h2o", "raas", "streaming")


def made(name: str, budget: int) -> Method:
    hyper = dict(sink=SINK, window=WINDOW, budget=budget)
    if name == "streaming":
        hyper |= dict(window=WINDOW + budget)
    return make_method(name, **hyper)


class Layer:
    """One layer of a method, and the recorded tokens that it is fed with."""

    def __init__(self, method: Method, recorded: replay.Prompted, tokens: int, anchor: LayerState | None = None):
        (q, k, v, a), self.method = recorded, method
        self.tensors, self.attention = (q, k, v), Attention(a.scale, a.softcap, a.sink_logits)
        rows, heads = -(-tokens // method.block_size) * method.block_size, k.shape[1]
        g = Geometry(1, heads, k.shape[3], rows, torch.float32, q.shape[1] // heads, follows=anchor is not None)
        self.lengths = RowLengths(method.ring_plan, 1, rows, k.device)
        self.state = LayerState(method.buffers(g), self.lengths, k.device, pool_on_host=False, anchor=anchor)

    def feed(self, first: int, end: int) -> None:
        q, k, v = (t[:, :, first:end] for t in self.tensors)
        self.lengths.advance(end - first)
        if end - first > 1:
            self.method.prefill(self.state, q, k, v, self.attention, last=True)
        else:
            self.method.decode(self.state, q, k, v, self.attention)


def stack(name: str, budget: int, layers: dict[int, replay.Prompted], layer: int, tokens: int) -> list[Layer]:
    """The layer that is measured, behind its filter layer if it has one."""
    method: Any = made(name, budget)
    if name != "omnikv":
        return [Layer(method, layers[layer], tokens)]
    numbers = range(2, len(layers))
    chooses = max(i for i in method.filters(numbers, len(layers)) if i <= layer)
    assert method.behind(layer, numbers, method.filters(numbers, len(layers)))
    first = Layer(method.filter, layers[chooses], tokens)
    return [first, Layer(method, layers[layer], tokens, first.state)]


def share(name: str, setting: str, layers: dict[int, replay.Prompted], layer: int) -> float:
    prompt, tokens, budget = SETTINGS[setting]
    found = stack(name, budget, layers, layer, tokens)
    probe = LayerProbe(found[-1].method)
    for first, end in [(0, prompt), *((i, i + 1) for i in range(prompt, tokens))]:
        found[-1].state.on_step = probe if end % EACH == 0 else None
        for one in found:
            one.feed(first, end)
    return float(torch.stack(probe.mass).mean())


@torch.no_grad()
def main() -> None:
    p = parser(__doc__)
    p.add_argument("--methods", default=",".join(METHODS))
    o = p.parse_args()
    longest, methods = max(tokens for _, tokens, _ in SETTINGS.values()), o.methods.split(",")
    rows = []
    for text, _, layers in recorded(o, longest, methods=["h2o"]):
        for setting in SETTINGS:
            for name in methods:
                mean = statistics.fmean(share(name, setting, layers, i) for i in LAYERS)
                rows.append({"text": text, "setting": setting, "method": name, "share": mean})
                print(rows[-1], flush=True)
    settings = {name: dict(zip(("prompt", "tokens", "budget"), x)) for name, x in SETTINGS.items()}
    write(o, "kept_weight", rows, sink=SINK, window=WINDOW, layers=LAYERS, settings=settings)


if __name__ == "__main__":
    main()
