"""The context-intensive task: the model has to read out 64 records of the prompt, in one generate().

A needle needs one record, so needles do not expose a method that retrieves wrong blocks most of the time. Here 16
questions follow one another, and each asks for four records. Half of the questions give four keys. The other half give
one key that four records share, so that all four compete at every word. The model was trained on such questions. It was
not trained on questions for more records: of 8 records the dense model tells three or four, of 16 one to four.

The questions are given token by token, and the model writes the answers. passkeys.py has questions for one record each.
"""
import hashlib
from dataclasses import dataclass, field

import numpy as np

from torchsparsekv_benchmarks.recall_model import pages
from torchsparsekv_benchmarks.recall_model.journal import LIKELIEST, Writer
from torchsparsekv_benchmarks.recall_model.tasks import Sample as Question
from torchsparsekv_benchmarks.recall_model.tasks import ask_all, ask_many
from torchsparsekv_benchmarks.recall_model.vocabulary import END

QUESTIONS, TOGETHER = 16, 4  # questions, and the records that each asks for
SHARE = 0.25  # of the prompt that is other records
SHORTEST = 2048


@dataclass(frozen=True)
class Readout:
    prompt: list[int] = field(repr=False)
    plan: np.ndarray = field(repr=False)  # [new_tokens]: the token of a step, or LIKELIEST
    spans: tuple[tuple[int, int], ...] = field(repr=False)  # of each answer, from its first step to its end
    answers: tuple[tuple[tuple[int, ...], ...], ...] = field(repr=False)  # of each question, in any order

    @property
    def new_tokens(self) -> int:
        return len(self.plan)

    def processor(self, device) -> Writer:
        """For `generate(..., do_sample=True, max_new_tokens=new_tokens, logits_processor=[...])`."""
        return Writer(self.plan, len(self.prompt), device)

    def score(self, output: list[int]) -> float:
        """Share of the records that were told where they were asked for."""
        asked = (Question([], a, stop - start, None) for a, (start, stop) in zip(self.answers, self.spans))
        return float(np.mean([q.score(output[start:stop]) for q, (start, stop) in zip(asked, self.spans)]))


def readout(length: int, index: int) -> Readout:
    """The index-th one; prompt and output have `length` tokens together. The same in every process."""
    if length < SHORTEST:
        raise ValueError(f"length is {length}; a readout needs at least {SHORTEST} tokens")
    seed = hashlib.blake2b(f"readout/{length}/{index}".encode(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(seed, "little"))
    half = QUESTIONS // 2
    n = int(SHARE * length) // (3 + pages.VALUE)
    keys = rng.permutation(pages.cross(rng, half * TOGETHER + half + n))
    single, shared, others = np.split(keys, [half * TOGETHER, half * TOGETHER + half])
    value, values = pages.values(rng, len(single)), pages.unlike(rng, half, TOGETHER)
    said = [
        pages.records(single, value, rng.random(len(single))),
        pages.records(shared.repeat(TOGETHER, 0), values.reshape(-1, pages.VALUE), rng.random(half * TOGETHER)),
        pages.records(others, pages.values(rng, n), rng.random(n)),
    ]
    many = ask_many(single.reshape(half, TOGETHER, 2), value.reshape(half, TOGETHER, -1), np.zeros(half))
    every = ask_all(shared, values, np.zeros(half))
    wanted = [*np.concatenate([single, value], 1).reshape(half, TOGETHER, -1), *values]
    asked = [(row, kind.answer) for kind in (many, every) for row in kind.rows]
    plan, spans, answers = _plan([(*asked[i], wanted[i]) for i in rng.permutation(QUESTIONS)])
    ids, _, _ = pages.lay(rng, length - len(plan), said)
    return Readout(ids.tolist(), plan, spans, answers)


def _plan(questions: list[tuple[np.ndarray, int, np.ndarray]]):
    """(the steps, where each answer stands in them, the answers) of questions, of which each is a whole row, where its
    answer begins, and the runs of tokens that are to be told. Of an answer nothing is given but the mark that ends it.
    """
    steps: list[np.ndarray] = []
    spans, answers, at = [], [], 0
    for row, begin, runs in questions:
        step = row.copy()
        step[begin:] = LIKELIEST
        step[-1] = END
        steps.append(step)
        spans.append((at + begin, at + len(row)))
        answers.append(tuple(tuple(int(t) for t in run) for run in runs))
        at += len(row)
    return np.concatenate(steps), tuple(spans), tuple(answers)
