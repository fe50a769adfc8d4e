"""Pages: runs of tokens, in a given order, with running text between them. All tasks and documents consist of pages."""
import functools
from dataclasses import dataclass

import numpy as np

from torchsparsekv_benchmarks.recall_model.vocabulary import BOS, END, KEYS, LINK, TEXT, VALUES

Rng = np.random.Generator
VALUE = 4  # tokens of a value
SUCCESSORS = 12  # of a word of the text
BANK = 1 << 20  # tokens of text that pages are cut from
CHAINS = 2048  # walks the bank is made of


@functools.cache
def bank() -> np.ndarray:
    """Markov text: a word is followed by one of its few successors, the first of them more often than the last."""
    rng = np.random.default_rng(20240229)
    after = rng.integers(len(TEXT), size=(len(TEXT), SUCCESSORS))
    share = 1 / np.arange(1.0, SUCCESSORS + 1)
    rank = rng.choice(SUCCESSORS, size=(BANK // CHAINS, CHAINS), p=share / share.sum())
    walk = np.empty(rank.shape, np.int64)
    now = rng.integers(len(TEXT), size=CHAINS)
    for step, chosen in enumerate(rank):
        walk[step] = now = after[now, chosen]
    return walk.T.ravel() + TEXT.start


def text(rng: Rng, length: int) -> np.ndarray:
    return bank()[(rng.integers(BANK) + np.arange(length)) % BANK]


@dataclass(frozen=True)
class Runs:
    """Equally long runs: rows [n, w], the time of each, and what is answered in them.

    From column `answer` on they are the answer to a question of kind `code`; code 0 means that nothing is asked.
    """

    rows: np.ndarray
    when: np.ndarray
    answer: int = 0
    code: int = 0


def lay(rng: Rng, length: int, groups: list[Runs]) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """(ids, code of the answer a token belongs to or 0, where the runs of each group start).

    Runs follow each other in the order of their times; the text between them takes the rest, and the last run ends
    the page.
    """
    width = np.concatenate([np.full(len(g.rows), g.rows.shape[1]) for g in groups])
    order = np.argsort(np.concatenate([g.when for g in groups]), kind="stable")
    slack = length - 1 - width.sum()
    if slack < 0:
        raise ValueError(f"runs of {width.sum()} tokens and a first one do not fit into {length}")
    gap = rng.multinomial(slack, np.full(len(width), 1 / len(width)))
    start = np.empty(len(width), np.int64)
    ends = np.cumsum(gap + width[order])
    start[order] = 1 + ends - width[order]
    ids, codes, starts = text(rng, length), np.zeros(length, np.uint8), []
    ids[0] = BOS
    for g in groups:
        own, start = start[: len(g.rows)], start[len(g.rows) :]
        ids[own[:, None] + np.arange(g.rows.shape[1])] = g.rows
        if g.code:
            codes[own[:, None] + np.arange(g.answer, g.rows.shape[1])] = g.code
        starts.append(own)
    return ids, codes, starts


def cross(rng: Rng, n: int) -> np.ndarray:
    """n different keys [n, 2] of which most share a word, at the same place, with most others.

    They stand in a few rows and as many columns of the square of all pairs. The first key stands where a row and a
    column meet, so about half of the others share a word with it if there is one row, a quarter if there are two...
    """
    size = len(KEYS)
    lines = next(r for r in range(1, size + 1) if r * (2 * size - r) >= n)
    cell = np.concatenate([[0], 1 + rng.choice(lines * (2 * size - lines) - 1, n - 1, replace=False)])
    down = cell - lines * size  # those beyond the rows are in the columns
    a = np.where(down < 0, cell // size, lines + down // lines)
    b = np.where(down < 0, cell % size, down % lines)
    return np.stack([rng.permutation(size)[a], rng.permutation(size)[b]], 1) + KEYS.start


def scattered(rng: Rng, n: int) -> np.ndarray:
    """n different keys [n, 2], anyhow."""
    pairs = rng.choice(len(KEYS) ** 2, n, replace=False)
    return np.stack([pairs // len(KEYS), pairs % len(KEYS)], 1) + KEYS.start


def values(rng: Rng, n: int) -> np.ndarray:
    return rng.integers(VALUES.start, VALUES.stop, size=(n, VALUE))


def unlike(rng: Rng, groups: int, m: int) -> np.ndarray:
    """Values [groups, m, VALUE]; those of a group begin differently."""
    found = values(rng, groups * m).reshape(groups, m, VALUE)
    found[:, :, 0] = VALUES.start + rng.random((groups, len(VALUES))).argpartition(m, 1)[:, :m]
    return found


def column(n: int, token: int) -> np.ndarray:
    return np.full((n, 1), token)


def records(key: np.ndarray, value: np.ndarray, when: np.ndarray) -> Runs:
    return Runs(np.concatenate([key, value, column(len(key), END)], 1), when)


def links(names: np.ndarray, when: np.ndarray) -> Runs:
    """The statements of chains: names [n, hops + 1, 2], when [n, hops]; each name but the last gives to the next."""
    n, hops = when.shape
    pairs = np.concatenate([names[:, :-1], names[:, 1:]], 2).reshape(n * hops, 4)
    return Runs(np.concatenate([column(len(pairs), LINK), pairs, column(len(pairs), END)], 1), when.ravel())
