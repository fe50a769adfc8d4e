"""`torchsparsekv demo`: patch small models on the CPU, and show what each method attends to and still gets right."""
from typing import NamedTuple

import torch
import typer
from torch import Tensor

import torchsparsekv
from torchsparsekv.commands import app
from torchsparsekv.commands._chain import chain_model, chain_prompts, random_model
from torchsparsekv.commands._table import table
from torchsparsekv.method import all_methods
from torchsparsekv.report import Report

NEAR = {"sink": 32, "window": 64}
TOLERANCE = 1e-4
WHOLE_PROMPT, WHOLE_STEPS = 500, 8


class Run(NamedTuple):
    tokens: Tensor
    logits: Tensor
    report: Report | None


def generate(model, ids: Tensor, mask: Tensor, steps: int, handle=None) -> Run:
    """Stock greedy generate() on a left-padded batch."""
    out = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, return_dict_in_generate=True,
        output_logits=True,
    )  # fmt: skip
    report = handle.report() if handle else None  # before `out`, which holds the cache, is gone
    return Run(out.sequences[:, ids.shape[1] :], torch.stack(out.logits, 1), report)


def generate_patched(name: str, model, ids: Tensor, mask: Tensor, steps: int, **hyper) -> Run:
    capacity = model.config.max_position_embeddings
    with torchsparsekv.patch(model, name, max_length=capacity, skip_layers=1, **hyper) as handle:
        return generate(model, ids, mask, steps, handle)


def capacity_for(tokens: int) -> int:
    return -(-tokens // 64) * 64  # a multiple of every method's block size


@app.command()
def demo(
    prompt_tokens: int = typer.Option(2048, min=256, max=16384, help="Length of the longer of the two prompts."),
    steps: int = typer.Option(16, min=2, max=48, help="Tokens to generate."),
    budget: int = typer.Option(256, min=32, max=16384, help="Retrieved tokens per kv head and step; a multiple of 32."),
) -> None:
    """Follow a chain of facts hidden in a prompt, with every method; no GPU and no download."""
    capacity = capacity_for(prompt_tokens + steps)
    if budget % 32 or budget > capacity:
        raise typer.BadParameter(f"must be a multiple of 32 up to {capacity}", param_hint="--budget")
    right, lost = small_budget(prompt_tokens, steps, budget, capacity)
    off, wrong = whole_budget()
    if wrong:
        typer.echo(f"FAILED: with a budget of the whole context these are not dense attention: {wrong}", err=True)
        raise typer.Exit(1)
    typer.echo(
        f"Shown: with a budget of the whole context every method generates the tokens of dense attention (logits "
        f"within {off:.0e});\nat budget {budget} the chain was followed by {', '.join(right) or 'no method'}; "
        f"not by {', '.join(lost) or 'none'}."
    )


def small_budget(prompt_tokens: int, steps: int, budget: int, capacity: int) -> tuple[list[str], list[str]]:
    """Methods that followed the chain to its end at a small budget, and those that did not."""
    model, lengths = chain_model(capacity), [prompt_tokens * 3 // 4, prompt_tokens]
    ids, mask, answers = chain_prompts(lengths, steps)
    typer.echo(
        f"A llama of 3 layers with weights set by hand: every token it generates needs one fact, planted anywhere in\n"
        f"the prompt. Two prompts of {lengths[0]} and {lengths[1]} tokens, left-padded; stock generate(); {steps} "
        f"tokens each.\nBudget {budget}, sink {NEAR['sink']}, window {NEAR['window']}; attended, density and hits: "
        f"last layer.\n"
    )
    dense = generate(model, ids, mask, steps)
    runs = {}
    for name, hyper in torchsparsekv.methods().items():
        # Methods that stay dense in short contexts by default: here as soon as they can be sparse.
        sparse = {"full_threshold": 2 * budget + sum(NEAR.values())} if "full_threshold" in hyper else {}
        runs[name] = generate_patched(name, model, ids, mask, steps, budget=budget, **NEAR, **sparse)
    head = ("method", "right", "as dense", "attended", "of", "density", "hits", "cache")
    unpatched = ("(unpatched)", share(dense.tokens, answers), *"------")
    typer.echo(table(head, [unpatched, *(row(name, r, dense, answers) for name, r in runs.items())]))
    typer.echo(f"\nhandle.report() of quest:\n{runs['quest'].report}\n")
    right = [name for name, r in runs.items() if torch.equal(r.tokens, answers)]
    return right, [name for name in runs if name not in right]


def row(name: str, run: Run, dense: Run, answers: Tensor) -> tuple:
    assert run.report
    layer, cache_bytes = run.report.layers[-1], run.report.host_bytes + run.report.device_bytes
    return (
        name, share(run.tokens, answers), share(run.tokens, dense.tokens), f"{layer.attended_per_step:.0f}",
        f"{layer.context_per_step:.0f}", f"{layer.density:.2f}",
        f"{layer.hit_rate:.2f}" if layer.blocks_selected else "-", f"{cache_bytes / 2**20:.1f} MiB",
    )  # fmt: skip


def share(tokens: Tensor, wanted: Tensor) -> str:
    return f"{int((tokens == wanted).sum())}/{wanted.numel()}"


def whole_budget() -> tuple[float, list[str]]:
    """The largest difference of a logit from dense attention on a random model, and methods that are not dense."""
    capacity = capacity_for(WHOLE_PROMPT + WHOLE_STEPS)
    model = random_model(capacity)
    ids, mask, _ = chain_prompts([WHOLE_PROMPT * 3 // 4, WHOLE_PROMPT], WHOLE_STEPS)
    dense = generate(model, ids, mask, WHOLE_STEPS)
    off, wrong = 0.0, []
    for name, cls in all_methods().items():
        # What does not retrieve, and is not dense, can only see everything through its window.
        hyper = NEAR if cls.retrieves or cls.dense else {**NEAR, "window": capacity}
        run = generate_patched(name, model, ids, mask, WHOLE_STEPS, budget=capacity, **hyper)
        difference = float((run.logits - dense.logits).abs().max())
        off = max(off, difference)
        if difference > TOLERANCE or not torch.equal(run.tokens, dense.tokens):
            wrong.append(name)
    return off, wrong
