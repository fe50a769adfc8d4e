"""Prompts of a task that fill a length: as much haystack as fits, in the tokens of a tokenizer."""
import functools
import hashlib
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torchsparsekv_benchmarks.quality.ruler import frequency, niah, variables
from torchsparsekv_benchmarks.quality.ruler.drafts import Draft, Task

_ALL: dict[str, Task] = {**niah.TASKS, **variables.TASKS, **frequency.TASKS}
_FIRST = ("niah_multikey_2", "niah_multikey_3", "vt", "fwe")  # see the package's docstring
TASKS: tuple[str, ...] = (*_FIRST, *(t for t in _ALL if t not in _FIRST))
CONTROL = re.compile(r"[\x00-\x1f]")


@dataclass(frozen=True)
class Sample:
    prompt: list[int]
    answers: tuple[str, ...]
    new_tokens: int
    depth: float | None  # where in the prompt's characters, 0..1, the first needed statement stands
    tokenizer: Any
    wrong: tuple[str, ...] = ()

    def score(self, output: list[int]) -> float:
        """Share of the answers that occur in the output, in any case, less those that are wrong."""
        return found(self.tokenizer.decode(output, skip_special_tokens=True), self.answers, self.wrong)


def found(text: str, answers: tuple[str, ...], wrong: tuple[str, ...] = ()) -> float:
    text = CONTROL.sub("\n", text).strip().lower()
    right = sum(a.lower() in text for a in answers) - sum(a.lower() in text for a in wrong)
    return max(0, right) / len(answers)


def _rng(task: str, length: int, index: int | str) -> random.Random:
    """The same in every process, whatever was made before."""
    return random.Random(int.from_bytes(hashlib.sha256(f"{task}/{length}/{index}".encode()).digest()[:8], "big"))


class Ruler:
    """Samples of RULER's tasks and of others for one tokenizer. With a chat template the question is the user's turn
    and the prefix begins ours."""

    def __init__(self, tokenizer, others: Mapping[str, Task] = MappingProxyType({})):
        self.tokenizer, self.tasks = tokenizer, {**_ALL, **others}
        self.chat = bool(getattr(tokenizer, "chat_template", None))
        self.size = functools.cache(self._size)

    def sample(self, task: str, length: int, index: int) -> Sample:
        """The index-th sample; prompt and answer have at most `length` tokens together."""
        if task not in self.tasks:
            raise ValueError(f"unknown task {task!r}; available: {', '.join(self.tasks)}")
        t, size = self.tasks[task], self.size(task, length)
        while True:
            draft = t.make(_rng(task, length, index), size, length)
            text = self._text(draft)
            ids = self._ids(text)
            if len(ids) + t.new_tokens <= length:
                break
            if size == t.least:
                raise ValueError(f"{task} does not fit {length} tokens: its smallest prompt and answer are longer")
            size = max(t.least, size - t.step(length))
        depth = None if draft.needle is None else text.rindex(draft.needle) / len(text)
        return Sample(ids, draft.answers, t.new_tokens, depth, self.tokenizer, draft.wrong)

    def _size(self, task: str, length: int) -> int:
        """The largest haystack with which one draw fits, in whole steps; the samples start from it."""
        t = self.tasks[task]
        step = t.step(length)

        def fits(steps: int) -> bool:
            draft = t.make(_rng(task, length, "size"), t.least + steps * step, length)
            return len(self._ids(self._text(draft))) + t.new_tokens <= length

        low, high = 0, 1
        while fits(high):
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if fits(middle) else (low, middle)
        return t.least + low * step

    def _text(self, draft: Draft) -> str:
        if not self.chat:
            return draft.text + draft.prefix
        turns = [{"role": "user", "content": draft.text}]
        return self.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True) + draft.prefix

    def _ids(self, text: str) -> list[int]:
        """At most one <bos>: a chat template writes its own, so the tokenizer adds none to that."""
        ids, bos = self.tokenizer(text, add_special_tokens=not self.chat)["input_ids"], self.tokenizer.bos_token_id
        if bos is not None and ids[:2] == [bos, bos]:
            raise ValueError(f"the tokenizer begins a prompt with {self.tokenizer.bos_token!r} twice: {ids[:8]}")
        return ids
