"""One long text with many facts, and several questions about it, one after the other in one generate().

The questions are given token by token, as the text of a journal is. So every word of every answer comes from decode
steps, and one prompt, the slow part on a CPU, serves all questions.
"""
from dataclasses import dataclass, field

import numpy as np

from torchsparsekv_benchmarks.recall_model import pages
from torchsparsekv_benchmarks.recall_model.journal import LIKELIEST, Writer
from torchsparsekv_benchmarks.recall_model.vocabulary import ASK, END, KEYS

SHARE = 0.5  # of the text that is records
_RECORD, _QUESTION = 3 + pages.VALUE, 4 + pages.VALUE


@dataclass(frozen=True)
class Passkeys:
    """The first question asks for the passkey, the others for records of the crowd."""

    prompt: list[int] = field(repr=False)
    keys: np.ndarray = field(repr=False)  # [questions, 2]
    values: np.ndarray = field(repr=False)  # [questions, 4]
    starts: np.ndarray = field(repr=False)  # [questions]: where in the prompt the record stands
    crowd: int  # records in the text, beside the passkey

    @property
    def new_tokens(self) -> int:
        return len(self.keys) * _QUESTION

    def processor(self, device) -> Writer:
        """For `generate(..., do_sample=True, max_new_tokens=new_tokens, logits_processor=[...])`."""
        n = len(self.keys)
        answer = np.full((n, pages.VALUE), LIKELIEST)
        plan = np.concatenate([pages.column(n, ASK), self.keys, answer, pages.column(n, END)], 1)
        return Writer(plan.ravel(), len(self.prompt), device)

    def told(self, output: list[int]) -> np.ndarray:
        """The answers, [questions, 4]."""
        return np.asarray(output).reshape(len(self.keys), _QUESTION)[:, 3:-1]

    def right(self, output: list[int]) -> list[bool]:
        return (self.told(output) == self.values).all(1).tolist()

    def score(self, output: list[int]) -> float:
        return float(np.mean(self.right(output)))


def passkeys(tokens: int, questions: int, seed: int = 0) -> Passkeys:
    """A prompt of `tokens` with a passkey, whose words are in no other key, among records that mostly share a word."""
    rng = np.random.default_rng(seed)
    n = int(SHARE * tokens) // _RECORD
    keys = pages.cross(rng, n)
    rarest = np.array([np.bincount(words - KEYS.start, minlength=len(KEYS)).argmin() for words in keys.T]) + KEYS.start
    keys = np.concatenate([rarest[None], keys[(keys != rarest).all(1)]])
    if not 1 <= questions <= len(keys):
        raise ValueError(f"{tokens} tokens have room for {len(keys)} records, too few for {questions} questions")
    values = pages.values(rng, len(keys))
    ids, _, starts = pages.lay(rng, tokens, [pages.records(keys, values, rng.random(len(keys)))])
    asked = np.concatenate([[0], 1 + rng.permutation(len(keys) - 1)[: questions - 1]])
    return Passkeys(ids.tolist(), keys[asked], values[asked], starts[0][asked], len(keys) - 1)
