"""ParisKV's paper, figure 10 and table 1, on the keys and queries of a real language model.

    python benchmarks/quality/ablate_pariskv.py --out ablate_pariskv.json

A text is read once, densely. Figure 10 is what its three ideas each give: candidates are found by collisions, with
centroids in subspaces of 8 dimensions. They are k-means of the raw keys of a prompt, of normalised ones (N), of rotated
ones (R), of both (N+R), or the fixed directions that need no keys (N+R+T: ParisKV). Queries are those of the tokens
after the prompt, up to `--length`; keys that the prompt did not have came since. coarse: share of the exact top-k among
the k with most votes. exact: share of it that is chosen if all candidates are ranked exactly, as the figure does.
estimate: if they are ranked by 4-bit codes, as ParisKV does. All choose by the mean query of a kv head's group, as the
authors do. Means over the layers that are not dense, over heads and queries. beta and rho are the paper's for long
contexts, whatever the length.

Table 1 has local windows and update intervals. For each: how many tokens are near on average, and the share of the true
attention weight that is on these, on 64 sinks and on the k tokens that ParisKV chooses of the others. A longer interval
keeps more tokens near, so it can only gain; what it saves is time.
"""
from typing import Any

import torch
from torch import Tensor

from torchsparsekv_benchmarks.quality import texts
from torchsparsekv_benchmarks.quality._recall import exact, finish, parser, shares, show
from torchsparsekv_benchmarks.quality.heads import Recorded, recorded
from torchsparsekv_benchmarks.quality.pretrained import pretrained
from torchsparsekv_benchmarks.quality.recall_pariskv import Index, Prompted
from torchsparsekv_benchmarks.quality.text_options import Options

BENCHMARK = "ablate"
VARIANTS: dict[str, dict[str, Any]] = {
    "k-means of the prompt": {}, "N": dict(normalise=True), "R": dict(rotate=True),
    "N+R": dict(normalise=True, rotate=True), "N+R+T (ParisKV)": dict(normalise=True, rotate=True, rounds=0),
}  # fmt: skip
TABLE = ((256, 512), (256, 256), (128, 512), (256, 64), (64, 64))  # the paper's three pairs, and shorter ones
SINK = 64
DENSE = 2  # first layers, which no method here retrieves in


def measure(read: Recorded, o) -> dict[str, Tensor]:
    """(coarse, exact, estimate) of every variant, means over the queries; no estimate is 0."""
    hyper = dict(budget=o.k, beta=o.beta, rho=o.rho)
    index = Index(read, torch.float32, "cpu", **hyper)
    variants = {name: Prompted(read, o.prefill, **how) for name, how in VARIANTS.items()}
    out = {name: torch.zeros(3, dtype=torch.float64) for name in variants}
    for end in torch.linspace(o.prefill + o.k, read.total, o.queries).int().tolist():
        q = read.queries[end - 1]
        _, _, top = exact(read, q, end, o.k)
        index.grow(end)
        for name, variant in variants.items():
            some, got = variant.colliding(q, end, o.k, index.method.ratios)
            out[name] += torch.tensor([shares(top, some[:, : o.k], end), shares(top, got, end), 0.0])
        out["N+R+T (ParisKV)"][2] += shares(top, index.choose(q, o.k, "mean")[1], end)
    return {name: total / o.queries for name, total in out.items()}


def updated(read: Recorded, o) -> dict[tuple[int, int], Tensor]:
    """(tokens that are near, attention weight kept) of each pair, means over the queries."""
    out = {}
    for window, interval in TABLE:
        index, total = Index(read, torch.float32, "cpu", budget=o.k, beta=o.beta, rho=o.rho), torch.zeros(2)
        for end in torch.linspace(o.prefill + o.k, read.total, o.queries).int().tolist():
            begin = SINK + max(0, end - SINK - window) // interval * interval
            q = read.queries[end - 1]
            seen = torch.zeros(read.heads, end, dtype=torch.bool)
            seen[:, :SINK] = seen[:, begin:] = True
            index.grow(begin)
            seen.scatter_(1, index.choose(q, o.k, "max")[1].clamp(min=0).long(), True)
            weights = exact(read, q, end, 1)[0]
            total += torch.tensor([end - begin, float((weights * seen).sum(-1).mean())])
        out[window, interval] = total / o.queries
    return out


def main() -> None:
    p = parser(__doc__, "float32")
    p.set_defaults(queries=16)
    p.add_argument("--model", default="smollm2")
    p.add_argument("--length", type=int, default=4096)
    p.add_argument("--prefill", type=int, default=1024, help="tokens of the prompt, which k-means is of")
    p.add_argument("--samples", type=int, default=1, help="stretches of the text")
    p.add_argument("--k", type=int, default=100)
    p.add_argument("--beta", type=float, default=0.1)
    p.add_argument("--rho", type=float, default=0.2)
    o = p.parse_args()
    if not 256 <= o.prefill < o.length - o.k:
        raise SystemExit(f"prefill must be from 256 to length - k, got {o.prefill} of {o.length}")
    tokenizer, model = pretrained(o.model, torch.device(o.device), getattr(torch, o.dtype))
    (text,) = texts.read(Options(lengths=(o.length,), steps=1, samples=o.samples), tokenizer)
    found: dict[str, list[Tensor]] = {name: [] for name in VARIANTS}
    near: dict[tuple[int, int], list[Tensor]] = {pair: [] for pair in TABLE}
    for i in range(o.samples):
        for read in recorded(model, text.rows(o.length, range(i, i + 1))[0, :-1], seed=o.seed)[DENSE:]:
            for name, values in measure(read, o).items():
                found[name].append(values)
            for pair, values in updated(read, o).items():
                near[pair].append(values)
    rows: list[dict] = []
    for name, values in found.items():
        coarse, ranked, estimated = torch.stack(values).mean(0).tolist()
        rows.append({"method": name, "coarse": coarse, "exact": ranked, "estimate": estimated or None})
        show({k: v for k, v in rows[-1].items() if v is not None})
    for (window, interval), values in near.items():
        tokens, mass = torch.stack(values).mean(0).tolist()
        rows.append({"method": "pariskv", "window": window, "interval": interval, "near": tokens, "mass": mass})
        show(rows[-1])
    o.dtype = getattr(torch, o.dtype)
    finish(BENCHMARK, rows, o)


if __name__ == "__main__":
    main()
