"""What LouisKV loses by not retrieving, against how seldom it retrieves: a real language model, teacher-forced.

    python benchmarks/quality/turns.py --out turns.json
    torchsparsekv report turns.json -o turns.html

By the paper's rule (the cosine of a query with that of the step before) at thresholds from 0.5 to 1, by what it leaves
open (each kv head for itself; the query of the last retrieval, or a mean of those since), and every so many steps,
which no rule at all has to beat. At tau 1 all steps retrieve: what the others are measured by.

Two kinds of text. prompt: what is retrieved is of the prompt, a stretch of a text. own: nearly all of it is what the
dense model wrote itself, drawn at temperature 1, after a short prompt. A prompt is taken in once, whatever follows.
"""
import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import torchsparsekv
from torchsparsekv_benchmarks._results import begun, save
from torchsparsekv_benchmarks.quality import teacher, texts
from torchsparsekv_benchmarks.quality._recall import finish, given, parser, show
from torchsparsekv_benchmarks.quality.pretrained import pretrained
from torchsparsekv_benchmarks.quality.text_options import Options
from torchsparsekv_benchmarks.quality.text_summary import percentile

BENCHMARK = "turns"
ALL = 1.0  # the threshold that every step is below
NEVER = -0.9999
TAUS = (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, ALL)


@dataclass(frozen=True)
class Rule:
    """When to retrieve: below tau, as `told` says, or every `stride` steps."""

    name: str
    tau: float
    told: dict[str, Any] = field(default_factory=dict)
    stride: int | None = None


RULES = (
    *(Rule("last step", tau) for tau in TAUS),
    *(Rule("every so many steps", NEVER, stride=n) for n in (2, 4, 8)),
    *(Rule("last retrieval", tau, {"memory": 1.0}) for tau in (0.6, 0.7, 0.75, 0.8)),
    *(Rule("per head", tau, {"per_head": True}) for tau in (0.7, 0.8)),
    *(Rule("last retrieval, per head", tau, {"memory": 1.0, "per_head": True}) for tau in (0.6, 0.7, 0.75, 0.8)),
    *(Rule("mean since", tau, {"memory": 0.8}) for tau in (0.7, 0.8)),
)


@dataclass(frozen=True)
class Text:
    """What is read, [samples, tokens + 1]; how many of its last tokens are decoded, and how many of these scored."""

    name: str
    ids: Tensor
    steps: int
    scored: int
    budget: int
    sink: int
    window: int

    @property
    def length(self) -> int:
        return self.ids.shape[1] - 1


def of_a_prompt(o, tokenizer) -> Text:
    (text,) = texts.read(Options(lengths=(o.length,), steps=o.steps, samples=o.samples), tokenizer)
    return Text("prompt", text.rows(o.length, range(o.samples)).to(o.device), o.steps, o.steps, o.budget, 32, 64)


def of_its_own(o, tokenizer, model) -> Text:
    return Text("own", own_ids(o, tokenizer, model), o.own, o.own // 2, o.own_budget, 4, 32)


def own_ids(o, tokenizer, model) -> Tensor:
    """Short prompts, and what the dense model writes after them: [samples, own_prompt + own + 1]."""
    (text,) = texts.read(Options(lengths=(o.own_prompt,), steps=1, samples=o.samples), tokenizer)
    begin = text.rows(o.own_prompt, range(o.samples))[:, :-1].to(o.device)
    torch.manual_seed(o.seed)
    return model.generate(
        begin, attention_mask=torch.ones_like(begin), max_new_tokens=o.own + 1, min_new_tokens=o.own + 1,
        do_sample=True, top_k=0, top_p=1.0, temperature=1.0,
    )  # fmt: skip


def patched(model, text: Text, rule: Rule):
    told: dict[str, Any] = dict(budget=text.budget, sink=text.sink, window=text.window, tau=rule.tau) | rule.told
    return torchsparsekv.patch(model, "louiskv", max_length=text.length, **told)


def measure(model, text: Text, rules: Sequence[Rule]) -> Iterator[dict]:
    """A row for each rule."""
    if not rules:
        return
    dense = teacher.dense_logits(model, text.ids, text.steps)
    with patched(model, text, rules[0]) as handle:
        full = handle.make_cache(len(text.ids))
        teacher.ingest(model, text.ids, text.steps, full)
    for rule in rules:
        begin = time.perf_counter()
        with patched(model, text, rule) as handle:
            cache = handle.make_cache(len(text.ids))
            cache.copy_from(full)
            forced = teacher.steps_through(model, text.ids, dense, cache, _forcing(cache, rule))
            rates = [r.retrieval_rate for r in handle.report().layers if r.method == "louiskv"]
        kl, agrees, nats = (x[:, -text.scored :] for x in (forced.kl, forced.agrees, forced.nats))
        yield {
            **key(text.name, rule),
            "budget": text.budget, "length": text.length, "retrieval_rate": sum(rates) / len(rates),
            "kl": float(kl.mean()), "kl_p95": percentile(kl.flatten().tolist(), 0.95), "agrees": float(agrees.mean()),
            "nats": float(nats.mean()), "samples": len(text.ids), "scored": text.scored,
            "rates": [round(r, 4) for r in rates], "seconds": round(time.perf_counter() - begin, 1),
        }  # fmt: skip


def key(text: str, rule: Rule) -> dict[str, Any]:
    """What a row is told apart by."""
    return {"text": text, "rule": rule.name, "tau": None if rule.stride else rule.tau, "stride": rule.stride}


def _forcing(cache, rule: Rule):
    """Every so many steps a head is told that it was not looked at in the step before, so that it retrieves."""
    stride = rule.stride
    if stride is None:
        return None

    def before(t: int) -> None:
        for layer in cache.stored.values():
            if t % stride == 0 and layer.method.name == "louiskv":
                layer.state.trigger.seen.fill_(-1)

    return before


def chosen(names: list[str] | None) -> tuple[Rule, ...]:
    known = dict.fromkeys(r.name for r in RULES)
    unknown = [n for n in names or () if n not in known]
    if unknown:
        raise SystemExit(f"unknown rule {', '.join(unknown)}; there are: {', '.join(known)}")
    return tuple(r for r in RULES if not names or r.name in names)


def main() -> None:
    p = parser(__doc__, "float32")
    p.add_argument("--model", default="smollm2")
    p.add_argument("--kinds", nargs="+", choices=("prompt", "own"), default=["prompt", "own"])
    p.add_argument("--rules", nargs="+", help="all unless given: " + ", ".join(dict.fromkeys(r.name for r in RULES)))
    p.add_argument("--samples", type=int, default=2, help="in one batch")
    p.add_argument("--length", type=int, default=2048, help="tokens of a prompt and its scored steps")
    p.add_argument("--steps", type=int, default=64)
    p.add_argument("--budget", type=int, default=256)
    p.add_argument("--own-prompt", type=int, default=64)
    p.add_argument("--own", type=int, default=384, help="tokens it writes; the second half is scored")
    p.add_argument("--own-budget", type=int, default=64)
    o: argparse.Namespace = p.parse_args()
    rules = chosen(o.rules)
    o.dtype = getattr(torch, o.dtype)
    rows = begun(BENCHMARK, given(o), o.out)
    had = [{k: r[k] for k in ("text", "rule", "tau", "stride")} for r in rows]
    tokenizer, model = pretrained(o.model, torch.device(o.device), o.dtype)
    for kind in o.kinds:
        left = [r for r in rules if key(kind, r) not in had]
        text = of_a_prompt(o, tokenizer) if kind == "prompt" else of_its_own(o, tokenizer, model)
        for row in measure(model, text, left):
            rows.append(row)
            show({k: v for k, v in row.items() if k != "rates"})
            save(BENCHMARK, rows, given(o), o.out)
    finish(BENCHMARK, rows, o)


if __name__ == "__main__":
    main()
