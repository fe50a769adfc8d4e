"""The tasks of the recall model, and the documents it learns them from.

After RULER (Hsieh et al., 2024): keys and their values are hidden in a long text, and the end asks for some of them. A
key has two words, so there are 65,536 keys; a value has four words. A key that shares one word with the asked key is a
hard distractor. The runs of tokens, each with `.` at its end:

    record     k1 k2 v1 v2 v3 v4 .
    ask        ask k1 k2 | v1 v2 v3 v4 .                              single, multikey, journal
    all        all k1 k2 | v1 v2 v3 v4 , v1 v2 v3 v4 ... .            multivalue; the order is free
    many       many k1 k2 k1 k2 ... : | k1 k2 v1 v2 v3 v4 ... .       multiquery
    chain      link k1 k2 k1 k2 .  and  trace k1 k2 | k1 k2 ... .     chain: the names that the asked name reaches
    common     list w w w ... top | w w w .                           common: the most frequent words, the first first

A bar stands where a prompt ends and its answer begins.
"""
import hashlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from torchsparsekv_benchmarks.recall_model import pages
from torchsparsekv_benchmarks.recall_model.pages import Rng, Runs, column
from torchsparsekv_benchmarks.recall_model.vocabulary import (
    ALL,
    ASK,
    BOS,
    COLON,
    COMMA,
    END,
    LIST,
    MANY,
    TEXT,
    TOP,
    TRACE,
)  # fmt: skip

SHORTEST = 128
VALUES_OF_ONE, QUERIES, MAX_HOPS, MOST_COMMON = 4, 4, 4, 3
CODES = {"ask": 1, "all": 2, "many": 3, "trace": 4, "top": 5}
LAST = 2.0  # a time after all others, which are in [0, 1)


@dataclass(frozen=True)
class Sample:
    prompt: list[int]  # begins with BOS, ends with the question's cue; what greedy decoding adds is the answer
    answers: tuple[tuple[int, ...], ...]  # references: each a run of tokens that has to occur in the output
    new_tokens: int
    depth: float | None  # where in the prompt, 0..1, the first needed statement stands; None: everywhere

    def score(self, output: list[int]) -> float:
        """Share of the references found before the answer's end, in any order."""
        output = output[: self.new_tokens]
        if END in output:
            output = output[: output.index(END)]
        return sum(_occurs(list(a), output) for a in self.answers) / len(self.answers)


def _occurs(run: list[int], output: list[int]) -> bool:
    return any(output[i : i + len(run)] == run for i in range(len(output) - len(run) + 1))


@dataclass(frozen=True)
class Page:
    """A whole page: prompt and, from `cue` on, its answer."""

    ids: np.ndarray
    codes: np.ndarray
    answers: np.ndarray  # [references, tokens]
    depth: float | None

    @property
    def cue(self) -> int:
        return int(np.flatnonzero(self.codes)[0])


def ask(key: np.ndarray, value: np.ndarray, when: np.ndarray) -> Runs:
    rows = np.concatenate([column(len(key), ASK), key, value, column(len(key), END)], 1)
    return Runs(rows, when, 3, CODES["ask"])


def ask_all(key: np.ndarray, value: np.ndarray, when: np.ndarray) -> Runs:
    """key [n, 2], value [n, m, 4] in the order in which they are to be told."""
    n, m, _ = value.shape
    told = np.concatenate([value, np.full((n, m, 1), COMMA)], 2).reshape(n, -1)
    told[:, -1] = END
    return Runs(np.concatenate([column(n, ALL), key, told], 1), when, 3, CODES["all"])


def ask_many(key: np.ndarray, value: np.ndarray, when: np.ndarray) -> Runs:
    """key [n, q, 2], value [n, q, 4]."""
    n, q, _ = key.shape
    told = np.concatenate([key, value], 2).reshape(n, -1)
    rows = np.concatenate([column(n, MANY), key.reshape(n, -1), column(n, COLON), told, column(n, END)], 1)
    return Runs(rows, when, 2 + 2 * q, CODES["many"])


def ask_trace(names: np.ndarray, when: np.ndarray) -> Runs:
    """names [n, hops + 1, 2]."""
    n = len(names)
    rows = np.concatenate([column(n, TRACE), names.reshape(n, -1), column(n, END)], 1)
    return Runs(rows, when, 3, CODES["trace"])


def _page(rng: Rng, length: int, needed: Runs, others: list[Runs], question: Runs, answers: np.ndarray) -> Page:
    ids, codes, starts = pages.lay(rng, length, [needed, *others, question])
    prompt = length - (question.rows.shape[1] - question.answer)
    return Page(ids, codes, answers, float(starts[0].min() / prompt))


def _crowd(rng: Rng, length: int, asked: int, share: float) -> tuple[np.ndarray, list[Runs]]:
    """`asked` keys and records of others like them that fill about a share of the page."""
    n = int(share * length) // 7
    keys = pages.cross(rng, asked + n)
    return keys[:asked], [pages.records(keys[asked:], pages.values(rng, n), rng.random(n))] if n else []


def _recall(share: float) -> Callable[[Rng, int], Page]:
    def make(rng: Rng, length: int) -> Page:
        key, others = _crowd(rng, length, 1, share)
        value = pages.values(rng, 1)
        return _page(
            rng, length, pages.records(key, value, rng.random(1)), others, ask(key, value, np.array([LAST])), value
        )

    return make


def _multivalue(rng: Rng, length: int) -> Page:
    key, others = _crowd(rng, length, 1, 0.25)
    value = pages.unlike(rng, 1, VALUES_OF_ONE)
    needed = pages.records(key.repeat(VALUES_OF_ONE, 0), rng.permutation(value[0]), rng.random(VALUES_OF_ONE))
    return _page(rng, length, needed, others, ask_all(key, value, np.array([LAST])), value[0])


def _multiquery(rng: Rng, length: int) -> Page:
    key, others = _crowd(rng, length, QUERIES, 0.25)
    value = pages.values(rng, QUERIES)
    needed = pages.records(key, value, rng.random(QUERIES))
    question = ask_many(key[None], value[None], np.array([LAST]))
    return _page(rng, length, needed, others, question, np.concatenate([key, value], 1))


def _chain(rng: Rng, length: int) -> Page:
    hops = int(rng.integers(2, MAX_HOPS + 1))
    n = int(0.25 * length) // (6 * hops)
    names = pages.cross(rng, (n + 1) * (hops + 1)).reshape(n + 1, hops + 1, 2)
    asked = int(rng.integers(n + 1))
    names = np.roll(names, asked, 0)  # the first key of a cross is a special one, and any chain may be asked for
    when = np.sort(rng.random((n + 1, hops)), 1)
    length -= 2 * (MAX_HOPS - hops)  # so that a prompt's length does not tell the number of hops
    others = [pages.links(names[1:], when[1:])] if n else []
    return _page(
        rng, length, pages.links(names[:1], when[:1]), others, ask_trace(names[:1], np.array([LAST])), names[0, 1:]
    )


def _common(rng: Rng, length: int) -> Page:
    """A list whose words have Zipf's frequencies, after RULER's coded words."""
    ids, words = listing(rng, length - MOST_COMMON - 2)
    ids = np.concatenate([ids, [TOP], words[:MOST_COMMON], [END]])
    codes = np.zeros(length, np.uint8)
    codes[-MOST_COMMON - 1 :] = CODES["top"]
    return Page(ids, codes, words[:MOST_COMMON, None], None)


def listing(rng: Rng, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, its words with the most frequent first); the counts of the first four differ."""
    n = int(np.clip(length // 16, 8, len(TEXT)))
    words = rng.permutation(len(TEXT))[:n] + TEXT.start
    share = np.arange(1.0, n + 1) ** -rng.uniform(1.2, 2.0)
    count = np.floor((length - 2) * share / share.sum()).astype(np.int64)
    count[0] += length - 2 - count.sum()
    return np.concatenate([[BOS, LIST], rng.permutation(words.repeat(count))]), words


MAKERS: dict[str, Callable[[Rng, int], Page]] = {
    "single": _recall(0.0),
    "multikey": _recall(0.85),
    "multivalue": _multivalue,
    "multiquery": _multiquery,
    "chain": _chain,
    "common": _common,
}
TASKS: tuple[str, ...] = tuple(MAKERS)
NEW_TOKENS = {
    "single": 5, "multikey": 5, "multivalue": 5 * VALUES_OF_ONE, "multiquery": 6 * QUERIES + 1,
    "chain": 2 * MAX_HOPS + 1, "common": MOST_COMMON + 1,
}  # fmt: skip


def sample(task: str, length: int, index: int) -> Sample:
    """The index-th sample of a task: prompt and answer have `length` tokens together. The same in every process."""
    if task not in MAKERS:
        raise ValueError(f"unknown task {task!r}; available: {', '.join(MAKERS)}")
    if length < SHORTEST:
        raise ValueError(f"length is {length}; a sample needs at least {SHORTEST} tokens")
    seed = hashlib.blake2b(f"{task}/{length}/{index}".encode(), digest_size=8).digest()
    page = MAKERS[task](np.random.default_rng(int.from_bytes(seed, "little")), length)
    answers = tuple(tuple(int(t) for t in a) for a in page.answers)
    return Sample(page.ids[: page.cue].tolist(), answers, NEW_TOKENS[task], page.depth)
