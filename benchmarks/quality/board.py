"""Compare the answers of a real model, with every method at every budget.

For each group of prompts the model runs one exact forward. Each method takes the keys and values of this forward into
its cache, and decodes the answers, in captured steps on a GPU. So a method only costs its decode steps, and all methods
answer from the same keys. `eval` gives the same answers through the generate() of transformers, with a forward for each
method.
"""
import dataclasses
import hashlib
import itertools
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks._options import option
from torchsparsekv_benchmarks._progress import watched
from torchsparsekv_benchmarks.quality import replay, suite, summary
from torchsparsekv_benchmarks.quality.options import BASE, METHODS, RECALL, Compared, Setting, check_compared, settings
from torchsparsekv_benchmarks.quality.run import captured, check_settings, cost, patched, tell
from torchsparsekv_benchmarks.quality.sources import Source, without_weights
from torchsparsekv_benchmarks.quality.store import Store, check_file, key

BENCHMARK = "board"
TURNS = "turns"
MEAN = "mean"  # over all tasks
TASKS = (
    "niah_single_2", "niah_multikey_2", "niah_multivalue", "niah_multiquery", "vt", "code_constant", "code_function",
    "form", TURNS,
)  # fmt: skip


@dataclass(frozen=True)
class Options(Compared):
    model: str = option("qwen-1.5b", "qwen-1.5b or qwen-0.5b (`make real-model`), or a Hugging Face path or name.")
    lengths: tuple[int, ...] = option((32768,), "Tokens of prompt and answer together, comma-separated.")
    methods: tuple[str, ...] = option(METHODS, "Methods beside full (dense attention), comma-separated.")
    budgets: tuple[int, ...] = option((64, 256, 1024), "Tokens retrieved per kv head and step, comma-separated.")
    samples: int = option(12, "Samples per task and length, the same for all methods.")
    batch: int = option(12, "Prompts that are read and answered together, padded on the left.")
    offload: str = option("device", "Where the pool lives: auto, host or device.")
    tasks: tuple[str, ...] = option(TASKS, "Tasks, comma-separated, of RULER or of benchmarks/quality/suite.py.")
    seed: int = option(0, "Seed of the samples.")


def check(o: Options, out: Path | None) -> None:
    if o.model == RECALL:
        raise ValueError("board needs a language model, not the recall model: name one, as with --model qwen-1.5b")
    check_compared(o)
    if out is None or out.suffix == ".csv":
        raise ValueError(f"out must be a file of JSON lines, and the table is written beside it as CSV; got {out}")
    if min(o.lengths) < max(o.budgets):
        raise ValueError(f"a length of {min(o.lengths)} tokens is below a budget of {max(o.budgets)}")


def wanted(o: Options) -> list[Setting]:
    """`full` first, then every method at every budget."""
    others = [s for s in settings(o) if s.patch is not None and s.method != BASE]
    (base,) = (s for s in settings(dataclasses.replace(o, methods=(BASE,))) if s.method == BASE)
    return [base, *others]


@dataclass(frozen=True)
class Group:
    """Prompts of one task that are answered together.

    more: for each row, the token ids of its later questions. ended: an answer may end before `new_tokens`. score: a
    function of a row and the answers to its questions, from 0 to 1.
    """

    length: int
    prompts: list[list[int]]
    more: list[list[list[int]]]
    new_tokens: int
    ended: bool
    score: Callable[[int, list[list[int]]], float]


class Prompts:
    """Groups of prompts by the source's tokenizer."""

    def __init__(self, source: Source, o: Options):
        self.source, self.o = source, o
        self.tokenizer = source.tokenizer

    def group(self, task: str, length: int, indices: list[int]) -> Group:
        if task == TURNS:
            return self._turns(length, indices)
        samples = [self.source.sample(task, length, number(i, self.o)) for i in indices]
        return Group(
            length, [s.prompt for s in samples], [[] for _ in samples], samples[0].new_tokens, True,
            lambda row, answers: samples[row].score(answers[0]),
        )  # fmt: skip

    def _turns(self, length: int, indices: list[int]) -> Group:
        tokens = lambda text: self.tokenizer(text, add_special_tokens=False)["input_ids"]  # noqa: E731
        room = length - suite.TURNS * 80
        made, prompts, more = [], [], []
        for i in indices:
            draw = int.from_bytes(hashlib.sha256(f"{TURNS}/{length}/{number(i, self.o)}".encode()).digest()[:8], "big")
            size = room // 3
            while True:
                c = suite.conversation(random.Random(draw), size)
                first, *others = self._texts(c)
                ids = tokens(first)
                if len(ids) <= room:
                    break
                size = int(size * min(0.98, room / len(ids)))
            made.append(c)
            prompts.append(ids)
            more.append([tokens(text) for text in others])
        widths = [{len(turns[t]) for turns in more} for t in range(suite.TURNS - 1)]
        if any(len(w) > 1 for w in widths) and len(indices) > 1:
            raise ValueError(f"{TURNS}: this tokenizer makes questions of different lengths: run it with --batch 1")

        def score(row: int, answers: list[list[int]]) -> float:
            texts = [self.tokenizer.decode(x, skip_special_tokens=True) for x in answers]
            return sum(right in text for right, text in zip(made[row].answers, texts)) / suite.TURNS

        return Group(length, prompts, more, made[0].new_tokens, False, score)

    def _texts(self, c: suite.Conversation) -> list[str]:
        """The text of each turn as the chat template writes it. A later turn begins at the end of the answer before."""
        mark, turns, out = "\x00", [], []
        for i, question in enumerate(c.questions):
            turns.append({"role": "user", "content": (c.text if i == 0 else "") + question})
            text = self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
            out.append(text.rpartition(mark)[2])
            turns.append({"role": "assistant", "content": mark})
        return out


@torch.no_grad()
def answered(model, setting: Setting, group: Group, recording: replay.Recording, o: Options) -> list[dict]:
    """The results of one method on the rows of a group."""
    begin = time.perf_counter()
    ends = _ends(model) if group.ended else None
    with patched(model, setting, group.length, o, captured(model)) as handle:
        cache = replay.filled(handle, recording, group.length)
        step, positions = replay.stepper(model, cache), recording.lengths
        said = [replay.answers(step, recording.logits[:, -1], positions, group.new_tokens, ends)]
        for turn in range(len(group.more[0])):
            new = torch.tensor([turns[turn] for turns in group.more], device=model.device)
            new = torch.cat([said[-1][:, -1:], new], 1)  # the last token of an answer was not fed yet
            at = positions + said[-1].shape[1] - 1
            columns = at[:, None] + torch.arange(new.shape[1], device=model.device)
            logits = model(new, position_ids=columns, past_key_values=cache, logits_to_keep=1).logits
            positions = at + new.shape[1]
            said.append(replay.answers(step, logits[:, -1], positions, group.new_tokens, ends))
        found = cost(handle.report(), len(group.prompts))
    answers = [x.tolist() for x in said]
    seconds = round((time.perf_counter() - begin) / len(group.prompts), 3)
    row = dict.fromkeys((*summary.COST, "mass", "error")) | found | {"seconds": seconds}
    rows = []
    for i in range(len(group.prompts)):
        mine = [_until(x[i], ends) for x in answers]
        rows.append(row | {"score": group.score(i, mine), "output": mine[0] if len(mine) == 1 else mine})
    return rows


def _ends(model) -> torch.Tensor | None:
    given = model.generation_config.eos_token_id
    return None if given is None else torch.tensor(given, device=model.device).view(-1)


def _until(said: list[int], ends: torch.Tensor | None) -> list[int]:
    """The tokens before the first end token."""
    stops = set() if ends is None else set(ends.tolist())
    return said[: next((i for i, x in enumerate(said) if x in stops), len(said))]


def evaluate(source: Source, o: Options, store: Store) -> Iterator[dict]:
    """Rows as they are measured. Rows that the store has are not measured again."""
    prompts, model, every = Prompts(source, o), source.model, wanted(o)
    todo = []
    for length, task, begin in itertools.product(o.lengths, o.tasks, range(0, o.samples, o.batch)):
        indices = list(range(begin, min(begin + o.batch, o.samples)))
        missing = [s for s in every if not all(store.had(_named(task, length, i, s, o)) for i in indices)]
        todo.append((task, length, indices, missing))
    with ThreadPoolExecutor(1) as ahead:  # a thread tokenizes the next prompts while the model answers
        made = [ahead.submit(prompts.group, *t[:3]) if t[3] else None for t in todo]
        for (task, length, indices, missing), future in zip(todo, made):
            if future is not None:
                group = future.result()
                ids, pad = replay.padded(group.prompts, model.device)
                recording = replay.record(model, ids, pad, methods=o.methods)
                for setting in missing:
                    for i, found in zip(indices, answered(model, setting, group, recording, o)):
                        store.add(_named(task, length, i, setting, o) | found)
                del recording
            for setting in every:
                yield from (store.rows[key(_named(task, length, i, setting, o))] for i in indices)


def number(index: int, o: Options) -> int:
    """The number of a sample. Another seed has other numbers."""
    return index + 1_000_000 * o.seed


def _named(task: str, length: int, index: int, setting: Setting, o: Options) -> dict:
    """What tells a row from all others."""
    return {"task": task, "length": length, "index": number(index, o), **dataclasses.asdict(setting)}


def table(rows: list[dict]) -> list[dict]:
    """One row per task, length, method and budget, and one for the mean over all tasks."""
    of_all = [r | {"task": MEAN, "index": (r["task"], r["index"])} for r in rows]
    return [*summary.summarize(of_all, BASE), *summary.summarize(rows, BASE)]


def run(o: Options, out: Path | None = None, source: Source | None = None) -> list[dict]:
    """Evaluate, print the table, write samples to `out` and the table beside it as CSV."""
    check(o, out)
    assert out is not None
    header = _results.header(BENCHMARK, dataclasses.asdict(o))
    check_file(out, header)
    source = source or without_weights(o)
    every, batch = wanted(o), min(o.batch, o.samples)
    has = (*source.tasks, *source.on_request, TURNS)
    if unknown := [t for t in o.tasks if t not in has]:
        raise ValueError(f"unknown task {', '.join(unknown)}; there are: {', '.join(has)}")
    positions = source.model.config.get_text_config(decoder=True).max_position_embeddings
    for length in o.lengths:
        if length > positions:
            raise ValueError(
                f"lengths must be at most {positions}, the positions of {o.model}, got {length}: "
                f"--yarn {-(-length // positions)} gives the model more positions"
            )
    check_settings(source.model, every, o, batch)
    source = source.loaded()
    check_settings(source.model, every, o, batch)  # the weights have taken their memory
    about = source.about() | {"sink": o.sink, "skip_layers": o.skip_layers}
    store = Store(out, header | {"model": about})
    total = len(o.lengths) * len(every) * len(o.tasks) * o.samples
    rows = list(watched(evaluate(source, o, store), total, "sample"))
    found = table(rows)
    tell(rows, found, [summary.shown(r) for r in found], summary.ABOUT, out)
    return found
