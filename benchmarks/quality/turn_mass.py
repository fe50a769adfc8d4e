"""What turns.py measures, from the queries and keys of one dense forward: attention weight in the place of answers.

    python benchmarks/quality/turn_mass.py --out turn_mass.json

A text is read once, densely. Its first tokens are the prompt, whose keys are clustered as LouisKV does; at each of the
last `--steps` the units of the best centroids are chosen, and every rule keeps what it chose last until it retrieves.
Kept is the share of the true attention weight, mean over samples, sparse layers, query heads and steps. No error adds
up here, from layer to layer or from step to step, so it says less than turns.py, and takes a minute where that takes
hours of a CPU. Nothing leaves the window of as many tokens as there are steps.

Last come other clusters of the prompt, retrieved at every step: of 80 keys and by cosine beside the 16 keys by
Euclidean distance of LouisKV, and those of ClusterKV, by 20 rounds from one draw of centroids.
"""
from collections.abc import Iterator

import torch
from torch import Tensor

from torchsparsekv_benchmarks.quality import texts
from torchsparsekv_benchmarks.quality._clusters import chosen_tokens
from torchsparsekv_benchmarks.quality._recall import finish, parser, show
from torchsparsekv_benchmarks.quality.ablate_pariskv import DENSE
from torchsparsekv_benchmarks.quality.heads import Recorded, recorded
from torchsparsekv_benchmarks.quality.pretrained import pretrained
from torchsparsekv_benchmarks.quality.text_options import Options
from torchsparsekv_benchmarks.quality.turns import RULES, Rule, key

BENCHMARK = "turns"
OURS = (16, False)  # keys of a cluster, whether by cosine, and rounds and draws of k-means if they are others
CLUSTERKV = (80, True, 20, 1)
OTHERS = (OURS, (16, True), (80, False), (80, True), CLUSTERKV)
MORE = tuple(Rule("each layer its own tau", rate) for rate in (0.1, 0.3, 0.5))  # the share of steps
SINK = 32


def turns(q: Tensor, rule: Rule) -> Tensor:
    """Whether each kv head retrieves, [steps, heads]; q [steps, heads, group, dim]."""
    steps, heads = q.shape[:2]
    if rule.stride:
        return (torch.arange(steps) % rule.stride == 0)[:, None].expand(-1, heads)
    if rule in MORE:  # the steps whose cosine is least, as many as that
        alike = torch.cosine_similarity(q[1:], q[:-1], dim=-1).mean((1, 2))
        least = alike < alike.sort().values[min(round(rule.tau * steps), steps - 2)]
        return torch.cat([torch.ones(1, dtype=torch.bool), least])[:, None].expand(-1, heads)
    memory, held, out = rule.told.get("memory", 0.0), q[0], [torch.ones(heads, dtype=torch.bool)]
    for x in q[1:]:
        alike = torch.cosine_similarity(x, held, dim=-1).mean(-1)
        found = (alike if rule.told.get("per_head") else alike.mean().expand(heads)) < rule.tau
        held = torch.where(found[:, None, None], x, memory * held + (1 - memory) * x)
        out.append(found)
    return torch.stack(out)


def kept(weights: Tensor, near: Tensor, chosen: Tensor, now: Tensor) -> float:
    """Mean attention weight on what is near and what was chosen last: weights [steps, heads, group, tokens], near
    [steps, tokens], chosen [steps, heads, tokens], now [steps, heads]."""
    at = torch.where(now, torch.arange(len(now))[:, None], 0).cummax(0).values
    held = chosen.gather(0, at[..., None].expand(-1, -1, chosen.shape[2]))
    seen = held | near[:, None]
    return float((weights * seen[:, :, None]).sum(-1).mean())


def of_layer(read: Recorded, o) -> Iterator[tuple[tuple, float, float]]:
    """(rule or clusters, how often it retrieves, what it keeps)."""
    end = read.total - o.steps
    q = read.queries[end:].unflatten(1, (read.heads, -1))  # [steps, heads, group, dim]
    logits = torch.einsum("shgd,hnd->shgn", q, read.keys) * read.d**-0.5
    at, token = torch.arange(end, read.total)[:, None], torch.arange(read.total)
    weights = logits.masked_fill((token > at)[:, None, None], -torch.inf).softmax(-1)
    near = ((token < SINK) | (token > at - o.steps)) & (token <= at)
    for clusters in OTHERS:
        chosen = chosen_tokens(read.keys, q, (SINK, end - o.steps), o.budget, *clusters)
        if clusters == OURS:
            for rule in (*RULES, *MORE):
                now = turns(q, rule)
                yield ("rule", rule), float(now.float().mean()), kept(weights, near, chosen, now)
        every = torch.ones(chosen.shape[:2], dtype=torch.bool)
        yield ("clusters", clusters), 1.0, kept(weights, near, chosen, every)


def told(what: tuple) -> dict:
    kind, which = what
    if kind == "rule":
        return key("prompt", which)
    size, cosine, *_ = which
    name = f"clusters of {size} by {'cosine' if cosine else 'distance'}"
    name = "clusters of clusterkv" if which == CLUSTERKV else name
    return {"text": "prompt", "rule": name, "tau": None, "stride": None}


def main() -> None:
    p = parser(__doc__, "float32")
    p.add_argument("--model", default="smollm2")
    p.add_argument("--length", type=int, default=2048, help="tokens of a prompt and the steps")
    p.add_argument("--steps", type=int, default=64, help="and tokens of the window")
    p.add_argument("--samples", type=int, default=2, help="stretches of the text")
    p.add_argument("--budget", type=int, default=256)
    o = p.parse_args()
    tokenizer, model = pretrained(o.model, torch.device(o.device), getattr(torch, o.dtype))
    (text,) = texts.read(Options(lengths=(o.length,), steps=o.steps, samples=o.samples), tokenizer)
    found: dict[tuple, list[tuple[float, float]]] = {}
    for i in range(o.samples):
        for read in recorded(model, text.rows(o.length, range(i, i + 1))[0, :-1], seed=o.seed)[DENSE:]:
            for what, rate, mass in of_layer(read, o):
                found.setdefault(tuple(told(what).items()), []).append((rate, mass))
    rows = []
    for what, values in found.items():
        rate, mass = torch.tensor(values, dtype=torch.float64).mean(0).tolist()
        rows.append({
            **dict(what), "budget": o.budget, "length": o.length, "retrieval_rate": rate, "mass": mass,
            "samples": o.samples, "scored": o.steps,
        })  # fmt: skip
        show(rows[-1])
    o.dtype = getattr(torch, o.dtype)
    finish(BENCHMARK, rows, o)


if __name__ == "__main__":
    main()
