"""Needles in a haystack, in the eight ways of RULER: keys with values, hidden in noise, in text or among needles."""
import random
import uuid
from dataclasses import dataclass
from typing import Literal

from torchsparsekv_benchmarks.quality.ruler.drafts import NOISE, Draft, Task, insert
from torchsparsekv_benchmarks.quality.ruler.words import essay, vocabulary

NEEDLE = "One of the special magic {kind} for {key} is: {value}."
QUESTION = (
    "Some special magic {kind} are hidden within the following text. Make sure to memorize it. I will quiz you about "
    "the {kind} afterwards.\n{context}\nWhat are all the special magic {kind} for {query} mentioned in the provided "
    "text?"
)
PREFIX = " The special magic {kind} for {query} mentioned in the provided text are"
DEPTHS = [round(100 * i / 39) for i in range(40)]  # per cent


def _value(rng: random.Random, kind: str) -> str:
    if kind == "numbers":
        return str(rng.randint(10**6, 10**7 - 1))
    if kind == "uuids":
        return str(uuid.UUID(int=rng.getrandbits(128), version=4))
    return f"{rng.choice(vocabulary(400, 'adjectives'))}-{rng.choice(vocabulary(1200, 'nouns'))}"


@dataclass(frozen=True)
class Needles:
    """keys in the text, values of each of them, and how many keys are asked for."""

    haystack: Literal["noise", "essay", "needles"]
    key: Literal["words", "uuids"] = "words"
    value: Literal["numbers", "uuids"] = "numbers"
    keys: int = 1
    values: int = 1
    queries: int = 1

    def step(self, length: int) -> int:
        return max(10, length // 200) if self.haystack == "essay" else max(1, length // 2000)

    @property
    def least(self) -> int:
        """Every needle has a place of its own."""
        return max(self.keys, self.queries) * self.values * (18 if self.haystack == "essay" else 1)

    def make(self, rng: random.Random, size: int, length: int) -> Draft:
        count = max(self.keys, self.queries)
        others = size if self.haystack == "needles" else 0
        keys: dict[str, None] = {}
        while len(keys) < count + others:
            keys[_value(rng, self.key)] = None
        named, distractors = list(keys)[:count], list(keys)[count:]
        facts = [(key, _value(rng, self.value)) for key in named for _ in range(self.values)]
        rng.shuffle(facts)
        asked = rng.sample(named, self.queries)
        lines = self._lines(rng, [self._line(*fact) for fact in facts], distractors, size)
        first = next(line for line in lines if any(line == self._line(*f) for f in facts if f[0] in asked))
        answers = tuple(v for key in asked for k, v in facts if k == key)
        return self._draft((" " if self.haystack == "essay" else "\n").join(lines), asked, answers, first)

    def _line(self, key: str, value: str) -> str:
        return NEEDLE.format(kind=self.value, key=key, value=value)

    def _lines(self, rng: random.Random, needles: list[str], distractors: list[str], size: int) -> list[str]:
        if self.haystack == "essay":
            text = essay(rng, size)
            depths = sorted(rng.sample(DEPTHS, len(needles)))
            return insert(text, needles, [len(text) * depth // 100 for depth in depths])
        lines = [NOISE] * size
        if self.haystack == "needles":
            lines = [self._line(key, _value(rng, self.value)) for key in distractors]
        return insert(lines, needles, sorted(rng.sample(range(size), len(needles))))

    def _draft(self, context: str, asked: list[str], answers: tuple[str, ...], first: str) -> Draft:
        query = asked[0] if len(asked) == 1 else ", ".join(asked[:-1]) + ", and " + asked[-1]
        question, prefix, kind = QUESTION, PREFIX, str(self.value)
        if len(answers) == 1:
            question = question.replace("Some", "A").replace("are all", "is").replace("are", "is")
            prefix, kind = prefix.replace("are", "is"), kind[:-1]
        text = question.format(kind=kind, context=context, query=query)
        return Draft(text, prefix.format(kind=kind, query=query), answers, first)

    def task(self) -> Task:
        return Task(self.make, 128, self.step, self.least)


TASKS = {
    "niah_multikey_2": Needles("needles").task(),
    "niah_multikey_3": Needles("needles", key="uuids", value="uuids").task(),
    "niah_single_1": Needles("noise").task(),
    "niah_single_2": Needles("essay").task(),
    "niah_single_3": Needles("essay", value="uuids").task(),
    "niah_multikey_1": Needles("essay", keys=4).task(),
    "niah_multivalue": Needles("essay", values=4).task(),
    "niah_multiquery": Needles("essay", queries=4).task(),
}
