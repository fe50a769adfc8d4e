"""`torchsparsekv demo`: hide a passkey in a long text, and see which methods find it. A minute on a CPU."""
import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import typer

from torchsparsekv.commands import app
from torchsparsekv.commands._options import TOLD
from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks._progress import watched
from torchsparsekv_benchmarks._table import table
from torchsparsekv_benchmarks.quality import run
from torchsparsekv_benchmarks.quality.options import Options, Setting, settings
from torchsparsekv_benchmarks.quality.sources import Source, load
from torchsparsekv_benchmarks.quality.store import Store
from torchsparsekv_benchmarks.recall_model.passkeys import Passkeys, passkeys
from torchsparsekv_benchmarks.recall_model.vocabulary import names
from torchsparsekv_benchmarks.report.make import check_name, make
from torchsparsekv_benchmarks.report.style import pyplot

TASK = "passkeys"
BLOCK = 64  # capacities are a multiple of every method's block size
AROUND = 6  # words of the text that are shown before and after the passkey


class Answered(NamedTuple):
    setting: Setting
    found: dict[str, Any]  # the measurements of a Runner
    attended: float
    context: float
    host: int
    device: int


TOKENS = typer.Option(4096, min=1024, max=65536, help="Tokens of the text. The time on a CPU grows with their square.")
QUESTIONS = typer.Option(8, min=2, max=32, help="Questions: one for the passkey, the others for similar records.")
BUDGET = typer.Option(
    64, min=32, max=16384,
    help="Tokens retrieved per kv head and step, beside the first 32 and the latest 64 tokens. A multiple of 32, the "
    "page size of arkvale. Dense attention reads the whole text.",
)  # fmt: skip
OUT = typer.Option(Path("demo/report.html"), "--out", "-o", help="The HTML page. Answers and figures stand beside it.")


@app.command()
def demo(tokens: int = TOKENS, questions: int = QUESTIONS, budget: int = BUDGET, out: Path = OUT) -> None:
    """Hide a passkey in a long text, and ask for it with dense attention and every method. No GPU, no download."""
    try:
        with _half_the_threads():
            _demo(tokens, questions, budget, out)
    except TOLD as e:
        typer.echo(f"demo: {e}", err=True)
        raise typer.Exit(2) from e


@contextlib.contextmanager
def _half_the_threads() -> Iterator[None]:
    """Use half of the threads. A step has many small operations, which wait for a core if other programs run."""
    had = torch.get_num_threads()
    torch.set_num_threads(max(1, had // 2))
    try:
        yield
    finally:
        torch.set_num_threads(had)


def _demo(tokens: int, questions: int, budget: int, out: Path) -> None:
    check_name(out)
    asked = passkeys(tokens, questions)
    o = Options(
        tasks=(TASK,), lengths=(-(-(tokens + asked.new_tokens) // BLOCK) * BLOCK,), budgets=(budget,),
        samples=questions, probe=1, device="cpu",
    )  # fmt: skip
    source = load(o)
    memory = {s.method: _memory(source, s, o) for s in settings(o)}  # this also checks the settings of every method
    samples = _begun(out.with_name("answers.jsonl"))
    typer.echo(_about(asked, source, o))
    every = settings(o)
    answered = [_answer(source, s, o, asked, memory[s.method]) for s in watched(every, len(every), "method")]
    head = ("method", "the passkey", "", "others", "attended", "of", "GPU MiB", "host MiB")
    typer.echo("\n" + table(head, [_row(a, asked) for a in answered], left=3))
    typer.echo("\n" + _conclusion(answered, asked))
    _keep(samples, answered, asked, source, o)
    draw(samples, out)
    if not answered[0].found["score"]:
        typer.echo("FAILED: the dense model finds nothing, so its weights are not the trained weights", err=True)
        raise typer.Exit(1)


def _begun(path: Path) -> Path:
    """Create the empty file of answers, so that an error comes before the minutes of the run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")
    return path


def _memory(source: Source, s: Setting, o: Options) -> tuple[int, int]:
    """The host and device bytes of a cache with its pool in host memory. The dense model keeps all of its cache on the
    device."""
    (length,) = o.lengths
    dense = Setting("full", None, {"skip_layers": 0})
    with run.patched(source.model, s if s.patch else dense, length, o) as handle:
        return handle.planned.bytes(1, length, pool_on_host=s.patch is not None)


def _answer(source: Source, s: Setting, o: Options, asked: Passkeys, memory: tuple[int, int]) -> Answered:
    (length,) = o.lengths
    with run.runner(source, s, length, o) as ready:
        (found,) = ready.answer([asked], probed=s.patch is not None)
        if not ready.handle:
            mean = len(asked.prompt) + (asked.new_tokens + 1) / 2
            return Answered(s, found, mean, mean, *memory)
        layer = ready.handle.report().layers[-1]
    return Answered(s, found, layer.attended_per_step, layer.context_per_step, *memory)


def _about(asked: Passkeys, source: Source, o: Options) -> str:
    words, at, tokens = names(), int(asked.starts[0]), len(asked.prompt)
    text = [words[i] for i in asked.prompt[max(0, at - AROUND) : at + 7 + AROUND]]
    return (
        f"A text of {tokens} tokens, with a passkey at {at / tokens:.0%}: a key of two words and a value of four "
        "words.\n"
        f"    ... {' '.join(text)} ...\n"
        f"In the same text are {asked.crowd} records that look like it. A model of "
        f"{source.about()['parameters'] / 1e6:.1f}M parameters, trained to recall,\nis asked for the passkey "
        f"(\"ask {' '.join(words[i] for i in asked.keys[0])}\") and then for {len(asked.keys) - 1} of the others.\n"
        f"Budget: {o.budgets[0]} tokens per kv head and step, beside sink {o.sink} and window {o.window} (streaming: "
        f"window {o.window + o.budgets[0]}).\nAttended: tokens per head and step in a sparse layer; {o.skip_layers} of "
        f"the {source.model.config.num_hidden_layers} layers are dense.\n"
        "MiB: the cache with its pool in host memory, as with offload=\"host\" on a GPU."
    )


def _row(a: Answered, asked: Passkeys) -> tuple:
    first, *others = asked.right(a.found["output"])
    told = " ".join(names()[i] for i in asked.told(a.found["output"])[0])
    return (
        a.setting.method, told, "right" if first else "wrong", f"{sum(others)}/{len(others)}", f"{a.attended:.0f}",
        f"{a.context:.0f}", f"{a.device / 2**20:.1f}", f"{a.host / 2**20:.1f}",
    )  # fmt: skip


def _conclusion(answered: list[Answered], asked: Passkeys) -> str:
    groups: dict[str, list[str]] = {"All right": [], "The passkey, and not all others": [], "Not the passkey": []}
    every, some, none = groups.values()
    for a in answered:
        first, *others = asked.right(a.found["output"])
        (none if not first else every if all(others) else some).append(a.setting.method)
    return "\n".join(f"{what}: {', '.join(methods) or 'none'}." for what, methods in groups.items())


def _keep(path: Path, answered: list[Answered], asked: Passkeys, source: Source, o: Options) -> None:
    """Write a file as `eval` does, with a row for every question. The first row has the measurements over all
    questions."""
    store = Store(path, _results.header(run.BENCHMARK, dataclasses.asdict(o)) | {"model": source.about()})
    (length,) = o.lengths
    for a in answered:
        for i, (right, told) in enumerate(zip(asked.right(a.found["output"]), asked.told(a.found["output"]).tolist())):
            shared = a.found if i == 0 else {**a.found, "mass": None, "error": None}
            row = {"task": TASK, "length": length, "index": i, **dataclasses.asdict(a.setting)}
            row |= {"depth": int(asked.starts[i]) / len(asked.prompt), "prompt_tokens": len(asked.prompt)}
            store.add(row | shared | {"score": float(right), "output": told})


def draw(samples: Path, out: Path) -> None:
    """Draw the page of the answers. Without matplotlib there is no page."""
    try:
        pyplot()
    except RuntimeError as e:
        typer.echo(f"No page: {e}. The answers are in {samples}")
        return
    page, *figures = make([samples], out)
    typer.echo(f"The page: {page}, with {len(figures)} figures beside it; the answers: {samples}")
