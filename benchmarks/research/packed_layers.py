"""What do keys and values in 8 bits cost, in the first two layers, which are dense, and in the others?

    python benchmarks/research/packed_layers.py --out benchmarks/results/quality/packed_layers.json

After a prompt some of its keys or values are rounded to 8 bits, as they are or rotated (ops/store/spread_channels.py).
Then the model reads the next 64 tokens. The measure is the KL of its predictions to those without rounding.
Ten minutes on a CPU; needs `make real-model ONLY='qwen-1.5b sympy moby-dick'`.
"""
import copy
import itertools

import torch
from torch import Tensor

from torchsparsekv.ops.store.rows import PACKED, as_stored, keys_of, rows_of
from torchsparsekv.ops.store.spread_channels import spread_channels
from torchsparsekv_benchmarks.quality import texts
from torchsparsekv_benchmarks.quality.pretrained import pretrained
from torchsparsekv_benchmarks.research._recorded import parser, write

DENSE, READ, CHUNK = 2, 64, 1024
PARTS = ("keys", "keys, rotated", "values")
LAYERS = ("first two", "others")


def rounded(x: Tensor) -> Tensor:
    return keys_of(as_stored(rows_of(x, x), torch.empty(0, dtype=PACKED)))


def rotated(x: Tensor) -> Tensor:
    """Rounded between a rotation and its inverse."""
    y = rounded(spread_channels(x, x)[1])
    return spread_channels(y, y)[0]


def prompted(model, ids: Tensor):
    """The cache of transformers after a prompt that comes in chunks."""
    cache = None
    for chunk in ids.split(CHUNK, 1):
        cache = model(chunk, past_key_values=cache, use_cache=True, logits_to_keep=1).past_key_values
    return cache


def changed(cache, what: str, where: str):
    cache, name = copy.deepcopy(cache), what.partition(",")[0]
    for layer in cache.layers[:DENSE] if where == "first two" else cache.layers[DENSE:]:
        x = getattr(layer, name)
        setattr(layer, name, rounded(x) if what == name else rotated(x))
    return cache


@torch.no_grad()
def main() -> None:
    o, rows = parser(__doc__, tokens=3072, model="qwen-1.5b").parse_args(), []
    tokenizer, model = pretrained(o.model, torch.device("cpu"), torch.float32)
    for text in o.texts.split(","):
        ids = texts.read_one(text, tokenizer).rows(o.tokens + READ, range(1))[:, : o.tokens + READ]
        before, after = ids.split([o.tokens, READ], 1)
        cache = prompted(model, before)
        predicted = lambda cache: model(after, past_key_values=cache).logits.log_softmax(-1)  # noqa: B023, E731
        exact = predicted(copy.deepcopy(cache))
        for layers, what in itertools.product(LAYERS, PARTS):
            kl = (exact.exp() * (exact - predicted(changed(cache, what, layers)))).sum(-1).mean()
            rows.append({"text": text, "what": what, "layers": layers, "kl": float(kl)})
            print(rows[-1], flush=True)
    write(o, "packed_layers", rows, tokens=o.tokens, read=READ)


if __name__ == "__main__":
    main()
