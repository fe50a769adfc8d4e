"""The long-generation task: a journal that the model writes itself, and is then asked about.

The values to recall never were in the prompt. The model samples them, so a method sees them in decode steps alone. A
plan says which tokens each step may take. Keys and marks are given, a value is any four value words, and text is any
text. In the answers at the end every token is allowed, and the likeliest token is taken.
"""
import hashlib
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from torchsparsekv_benchmarks.recall_model import pages, vocabulary
from torchsparsekv_benchmarks.recall_model.vocabulary import ASK, BOS, END, TEXT, VALUES

QUESTIONS = 16
ANY_VALUE, ANY_TEXT, LIKELIEST = -1, -2, -3  # in a plan, where no token is given
_RECORD, _QUESTION = 3 + pages.VALUE, 4 + pages.VALUE


@dataclass(frozen=True)
class Journal:
    prompt: list[int]
    plan: np.ndarray = field(repr=False)  # [new_tokens]: the token of a step, or which may be chosen
    said: np.ndarray = field(repr=False)  # [questions]: the step at which the value that is asked for begins
    asked: np.ndarray = field(repr=False)  # [questions]: the step at which its answer begins

    @property
    def new_tokens(self) -> int:
        return len(self.plan)

    def processor(self, device) -> "Writer":
        """For `generate(..., do_sample=True, max_new_tokens=new_tokens, logits_processor=[...])`."""
        return Writer(self.plan, len(self.prompt), device)

    def score(self, output: list[int]) -> float:
        """Share of the questions answered with the value that the output itself had given to the key."""
        if len(output) < self.new_tokens:
            raise ValueError(f"the output has {len(output)} tokens; a whole journal has {self.new_tokens}")
        told = np.asarray(output)
        span = np.arange(pages.VALUE)
        return float((told[self.said[:, None] + span] == told[self.asked[:, None] + span]).all(1).mean())


class Writer:
    """A logits processor that keeps generation to a plan; nothing in it waits for the device."""

    def __init__(self, plan: np.ndarray, prompt: int, device):
        allowed = np.zeros((len(plan), vocabulary.SIZE), bool)
        for choice, ids in ((ANY_VALUE, VALUES), (ANY_TEXT, TEXT)):
            allowed[np.flatnonzero(plan == choice)[:, None], ids] = True
        allowed[plan == LIKELIEST] = True
        given = np.flatnonzero(plan >= 0)
        allowed[given, plan[given]] = True
        self.allowed, self.prompt = torch.from_numpy(allowed).to(device), prompt
        self.greedy = (plan == LIKELIEST).tolist()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        step = input_ids.shape[1] - self.prompt
        if self.greedy[step]:
            best = scores.argmax(-1, keepdim=True)
            return torch.full_like(scores, float("-inf")).scatter(1, best, 0.0)
        return scores.masked_fill(~self.allowed[step], float("-inf"))


def journal(new_tokens: int, index: int) -> Journal:
    """The index-th journal; at most `new_tokens` are generated. Half of the tokens are records, keys of a cross."""
    end = QUESTIONS * _QUESTION
    n = (new_tokens - end) // (2 * _RECORD)
    if n < QUESTIONS:
        raise ValueError(f"new_tokens is {new_tokens}; a journal needs at least {end + 2 * _RECORD * QUESTIONS}")
    seed = hashlib.blake2b(f"journal/{new_tokens}/{index}".encode(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(seed, "little"))
    key = rng.permutation(pages.cross(rng, n))
    plan = np.full(2 * _RECORD * n + end, ANY_TEXT)
    start = 2 * _RECORD * np.arange(n) + rng.integers(_RECORD, size=n)
    value, mark = np.full((n, pages.VALUE), ANY_VALUE), pages.column(n, END)
    plan[start[:, None] + np.arange(_RECORD)] = np.concatenate([key, value, mark], 1)
    chosen = rng.permutation(n)[:QUESTIONS]
    question = np.concatenate(
        [pages.column(QUESTIONS, ASK), key[chosen], np.full((QUESTIONS, pages.VALUE), LIKELIEST),
         pages.column(QUESTIONS, END)], 1,
    )  # fmt: skip
    plan[-end:] = question.ravel()
    asked = len(plan) - end + _QUESTION * np.arange(QUESTIONS) + 3
    return Journal([BOS, *pages.text(rng, 31).tolist()], plan, start[chosen] + 2, asked)
