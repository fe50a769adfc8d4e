"""Documents to learn from: pages full of questions, and sometimes a page that is exactly a sample of a task. The more
answers a document has, the faster the model learns to retrieve."""
import numpy as np

from torchsparsekv_benchmarks.recall_model import pages
from torchsparsekv_benchmarks.recall_model.pages import Rng, Runs
from torchsparsekv_benchmarks.recall_model.tasks import (
    CODES,
    LAST,
    MAKERS,
    MAX_HOPS,
    MOST_COMMON,
    ask,
    ask_all,
    ask_many,
    ask_trace,
    listing,
)  # fmt: skip
from torchsparsekv_benchmarks.recall_model.vocabulary import END, TEXT, TOP

SAMPLES, LISTS = 0.1, 0.06  # shares of documents; the others are mixtures
FULL, ASKED = (0.2, 0.5, 0.95), (0.2, 0.5, 0.6)  # share of a mixture that is runs, and of these that is questions
KINDS = {"ask": 0.45, "all": 0.15, "many": 0.2, "trace": 0.2}  # of the questions, by tokens
AT_END = 0.25  # share of mixtures that ask only at the end


def document(rng: Rng, length: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids [length], loss mask [length]: the code of the answer a token belongs to, 0 for what is no answer)."""
    kind = rng.random()
    if kind < SAMPLES:
        return sampled(rng, length)
    return lists(rng, length) if kind < SAMPLES + LISTS else mixture(rng, length)


def sampled(rng: Rng, length: int) -> tuple[np.ndarray, np.ndarray]:
    make = list(MAKERS.values())[rng.integers(len(MAKERS))]
    page = make(rng, length)
    rest = length - len(page.ids)  # a short chain leaves some
    return np.concatenate([page.ids, pages.text(rng, rest)]), np.concatenate([page.codes, np.zeros(rest, np.uint8)])


def lists(rng: Rng, length: int) -> tuple[np.ndarray, np.ndarray]:
    """A list of words that is asked for the most frequent ones again and again, where they are clear."""
    ids, _ = listing(rng, length)
    codes = np.zeros(length, np.uint8)
    size = MOST_COMMON + 2
    spots = np.arange(64, length - size, max(32, length // 64))
    for at in spots - rng.integers(0, 16, len(spots)):
        seen = _counts(ids[:at])
        best = np.argsort(-seen, kind="stable")[: MOST_COMMON + 1]
        if (seen[best[:-1]] > 1.15 * seen[best[1:]] + 1).all():
            ids[at : at + size] = [TOP, *(best[:-1] + TEXT.start), END]
            codes[at + 1 : at + size] = CODES["top"]
    return ids, codes


def _counts(ids: np.ndarray) -> np.ndarray:
    return np.bincount(ids[ids >= TEXT.start] - TEXT.start, minlength=len(TEXT))


def mixture(rng: Rng, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Records and chains in text, and questions about them, each after what it is about."""
    room = int(rng.choice(FULL) * (length - 1))
    tokens = rng.choice(ASKED) * room
    m, q, hops = int(rng.integers(2, 5)), int(rng.integers(2, 5)), int(rng.integers(2, MAX_HOPS + 1))
    size = {"ask": 8, "all": 3 + 5 * m, "many": 3 + 8 * q, "trace": 4 + 2 * hops}
    n = {kind: int(tokens * share + rng.random() * size[kind]) // size[kind] for kind, share in KINDS.items()}
    facts = room - sum(n[kind] * size[kind] for kind in n)
    if facts < 14 * q:
        return mixture(rng, length)  # the few words of a short page went to the questions; draw again
    n["all"], n["trace"] = min(n["all"], int(0.3 * facts) // (7 * m)), min(n["trace"], int(0.3 * facts) // (6 * hops))
    plain = (facts - n["all"] * 7 * m - n["trace"] * 6 * hops) // 7
    keys = (pages.cross if rng.random() < 0.6 else pages.scattered)(rng, plain + n["all"] + n["trace"] * (hops + 1))
    late = rng.random() < AT_END
    groups = _recalled(rng, keys[:plain], min(n["ask"], plain), n["many"], q, late)
    keys = rng.permutation(keys[plain:])
    if n["all"]:
        groups += _collected(rng, keys[: n["all"]], m, late)
    if n["trace"]:
        groups += _traced(rng, keys[n["all"] :].reshape(n["trace"], hops + 1, 2), late)
    ids, codes, _ = pages.lay(rng, length, groups)
    return ids, codes


def _after(rng: Rng, when: np.ndarray, late: bool) -> np.ndarray:
    """Times for questions about what was said at `when`."""
    return rng.random(len(when)) + LAST if late else when + (1 - when) * rng.random(len(when))


def _recalled(rng: Rng, key: np.ndarray, singly: int, many: int, q: int, late: bool) -> list[Runs]:
    """Records, of which some are asked for one by one and some q at once."""
    n = len(key)
    value, when = pages.values(rng, n), rng.random(n)
    asked = rng.permutation(n)[:singly]
    groups = [pages.records(key, value, when), ask(key[asked], value[asked], _after(rng, when[asked], late))]
    if many := min(many, n // q):
        asked = rng.permutation(n)[: many * q].reshape(many, q)
        groups.append(ask_many(key[asked], value[asked], _after(rng, when[asked].max(1), late)))
    return groups


def _collected(rng: Rng, key: np.ndarray, m: int, late: bool) -> list[Runs]:
    """Records that give m values to each key, and questions for all of them; the order says nothing."""
    value, when = pages.unlike(rng, len(key), m), rng.random((len(key), m))
    said = pages.records(key.repeat(m, 0), value.reshape(-1, pages.VALUE), when.ravel())
    return [said, ask_all(key, value, _after(rng, when.max(1), late))]


def _traced(rng: Rng, names: np.ndarray, late: bool) -> list[Runs]:
    when = np.sort(rng.random((len(names), names.shape[1] - 1)), 1)
    return [pages.links(names, when), ask_trace(names, _after(rng, when[:, -1], late))]


def batch(seed: int, step: int, length: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(ids, codes) [rows, length] of a training step."""
    rng = np.random.default_rng((seed, step))
    pages_ = [document(rng, length) for _ in range(rows)]
    return np.stack([p[0] for p in pages_]).astype(np.int16), np.stack([p[1] for p in pages_])
