"""`torchsparsekv calibrate`: find LouisKV's tau for a model, on a text."""
import json
from pathlib import Path
from typing import Annotated

import torch
import typer
from torch import Tensor

import torchsparsekv
from torchsparsekv.commands import app
from torchsparsekv.commands._options import TOLD, parsed
from torchsparsekv.method import make_method
from torchsparsekv_benchmarks._progress import Progress, now
from torchsparsekv_benchmarks._table import table

TAUS = (1.0, 0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.65, 0.6, 0.5, 0.4, 0.2, 0.0)


@torch.no_grad()
def surprise(model, ids: Tensor, prompt: int, cache, progress: Progress) -> float:
    """The mean negative log-likelihood, in nats, of the tokens after the prompt. Each is decoded after the true tokens.
    """
    logits = model(ids[:, :prompt], past_key_values=cache, logits_to_keep=1).logits[:, -1]
    total = 0.0
    for t in range(prompt, ids.shape[1]):
        total += float(torch.nn.functional.cross_entropy(logits.float(), ids[:, t]))
        logits = model(ids[:, t : t + 1], past_key_values=cache).logits[:, -1]
        progress.step()
    return total / (ids.shape[1] - prompt)


def calibrate(model, ids: Tensor, prompt: int, loss: float, taus: tuple[float, ...] = TAUS, **options) -> dict:
    """Try every tau on texts `ids` [texts, tokens]. The first `prompt` tokens of a text are the prompt.

    The chosen tau retrieves least and costs at most `loss` nats per token more than retrieval at every step. The rest
    of the distance to dense attention is due to the budget.
    """
    if not 1 < prompt < ids.shape[1] - 1:
        raise ValueError(f"prompt must be from 2 to {ids.shape[1] - 2} of {ids.shape[1]} tokens, got {prompt}")
    if not loss >= 0:
        raise ValueError(f"loss must be at least 0, got {loss}")
    rows: list[dict[str, float]] = []
    tried = sorted({1.0, *taus}, reverse=True)
    with Progress(len(tried) * (ids.shape[1] - prompt), "step") as progress:
        for tau in tried:
            with torchsparsekv.patch(model, "louiskv", tau=tau, max_length=ids.shape[1], **options) as handle:
                method = handle.planned.method
                if ids.shape[1] <= method.dense_threshold:
                    raise ValueError(
                        f"prompt and steps have {ids.shape[1]} tokens, and a step attends to all of up to "
                        f"{method.dense_threshold} tokens, whatever tau is: take more tokens, or a smaller budget"
                    )
                cache = handle.make_cache(ids.shape[0])  # report() needs the cache to exist
                nats = surprise(model, ids, prompt, cache, progress)
                sparse = [r.retrieval_rate for r in handle.report().layers if r.method == "louiskv"]
            row = {"tau": tau, "retrieval_rate": sum(sparse) / len(sparse), "nats_per_token": nats}
            rows.append({**row, "loss": nats - rows[0]["nats_per_token"] if rows else 0.0})
    within = [r for r in rows if r["loss"] <= loss]
    best = min(within, key=lambda r: (r["retrieval_rate"], -r["tau"]))
    measured = {"budget": method.budget, "texts": ids.shape[0], "prompt": prompt, "tokens": ids.shape[1]}
    return {**best, "allowed_loss": loss, **measured, "rows": rows}


def texts_of(tokenizer, path: Path, tokens: int, count: int) -> Tensor:
    """`count` stretches of the text, at equal distances."""
    try:
        said = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not a text in UTF-8: {e}") from e
    ids = tokenizer(said, return_tensors="pt").input_ids[0]
    if len(ids) < tokens * count:
        raise ValueError(f"{path} has {len(ids)} tokens, {count} texts of {tokens} need {tokens * count}")
    stride = len(ids) // count
    return torch.stack([ids[i * stride : i * stride + tokens] for i in range(count)])


def asked(taus: str, told: dict, out: Path | None) -> tuple[float, ...]:
    """The thresholds of the command. Invalid thresholds and a result that cannot be written are refused before the run.
    """
    thresholds = parsed("taus", tuple[float, ...], taus)
    if not thresholds:
        raise ValueError("taus must be one or more values, got none")
    for tau in thresholds:
        make_method("louiskv", tau=tau, **told)
    if out is not None and out.is_dir():
        raise IsADirectoryError(f"{out} is a folder: name a file for the result")
    if out is not None and not out.parent.is_dir():
        raise FileNotFoundError(f"there is no folder {out.parent} for {out.name}")
    return thresholds


def tell(found: dict, out: Path | None) -> None:
    head = ("tau", "retrieval rate", "nats per token", "loss")
    columns = ("tau", "retrieval_rate", "nats_per_token", "loss")
    typer.echo(table(head, [[f"{r[c]:.4f}" for c in columns] for r in found["rows"]]))
    rate = f"{found['retrieval_rate']:.1%}"
    typer.echo(f"\ntau = {found['tau']}: retrieves at {rate} of the steps, loss {found['loss']:.4f}")
    if out is not None:
        out.write_text(json.dumps(found, indent=1) + "\n")


@app.command(name="calibrate")
def command(
    model: Annotated[str, typer.Argument(help="Name or folder of a Hugging Face model.")],
    text: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, help="Text like the texts that the model will read.")
    ],
    out: Annotated[Path | None, typer.Option(help="File for the result. patch(..., tau=PATH) takes it.")] = None,
    loss: float = typer.Option(0.01, min=0.0, help="Largest loss in nats per token, against retrieval at every step."),
    prompt: int = typer.Option(4096, min=2, help="Tokens of the prompt."),
    steps: int = typer.Option(256, min=2, help="Tokens decoded after the prompt."),
    texts: int = typer.Option(4, min=1, help="Stretches of the text, in one batch."),
    budget: int | None = typer.Option(None, min=1, help="Tokens retrieved per kv head and step. Default: 1024."),
    taus: str = typer.Option(",".join(map(str, TAUS)), help="Thresholds to try, comma-separated. 1.0 always runs."),
) -> None:
    """Find tau for a model on a text. LouisKV retrieves if the cosine of a query with the query before is below tau.

    The result is the tau with the fewest retrievals and a loss of at most --loss.
    """
    from torchsparsekv_benchmarks.quality.pretrained import opened

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        told = {} if budget is None else {"budget": budget}
        thresholds = asked(taus, told, out)
        files = opened(model)
        ids = texts_of(files.tokenizer, text, prompt + steps, texts).to(device)
        loaded = files.load(device, "auto")
        now(f"{len({1.0, *thresholds})} thresholds on {texts} texts of {prompt} + {steps} tokens, on {device}")
        found = calibrate(loaded, ids, prompt, loss, thresholds, **told)
        tell({**found, "model": model, "text": str(text)}, out)
    except TOLD as e:
        typer.echo(f"calibrate: {e}", err=True)
        raise typer.Exit(2) from e
