"""Counting: the ten most common words of a list, and the three most frequent words of a coded text."""
import math
import random
import string

from torchsparsekv_benchmarks.quality.ruler.drafts import SHORT, Draft, Task
from torchsparsekv_benchmarks.quality.ruler.words import vocabulary

COMMON = 10
COMMON_QUESTION = (
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that "
    "appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?"
)
COMMON_PREFIX = " Answer: The top 10 words that appear most often in the list are:"
LIST_WORDS = 100_000  # as many as the longest lists need

ALPHA = 2.0
ZETA = math.pi**2 / 6  # the sum of k^-2
CODED_QUESTION = (
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently "
    "appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What "
    "are the three most frequently appeared words in the above coded text?"
)
CODED_PREFIX = " Answer: According to the coded text above, the three most frequently appeared words are:"
CODED_TOKENS = 50


def _list(rng: random.Random, words: int, often: int, seldom: int) -> Draft:
    """A numbered list of `words` different words, the first ten of them `often`, the others `seldom`."""
    chosen = rng.sample(vocabulary(LIST_WORDS, "list"), words)
    said = chosen[:COMMON] * often + chosen[COMMON:] * seldom
    rng.shuffle(said)
    context = " ".join(f"{i}. {word}" for i, word in enumerate(said, 1))
    return Draft(COMMON_QUESTION.format(context=context), COMMON_PREFIX, tuple(chosen[:COMMON]))


def most_common(rng: random.Random, size: int, length: int) -> Draft:
    """After one solved example."""
    short = length < SHORT
    solved = _list(rng, *((20, 3, 1) if short else (40, 10, 3)))
    draft = _list(rng, size, *((6, 1) if short else (30, 3)))
    told = " ".join(f"{i}. {word}" for i, word in enumerate(solved.answers, 1))
    return Draft(f"{solved.text}{solved.prefix} {told}\n{draft.text}", draft.prefix, draft.answers)


def coded(rng: random.Random, size: int, length: int) -> Draft:
    """`size` is the number of words if Zipf's law held for ever; the most frequent one is the dots."""
    room = length - CODED_TOKENS
    words: dict[str, None] = {}
    while len(words) < max(room // CODED_TOKENS, 4):
        words["".join(rng.choices(string.ascii_lowercase, k=6))] = None
    ranked = sorted(words)
    rng.shuffle(ranked)
    ranked[0] = "..."
    said = [w for k, w in enumerate(ranked, 1) for _ in range(int(size * k**-ALPHA / ZETA))]
    rng.shuffle(said)
    return Draft(CODED_QUESTION.format(context=" ".join(said)), CODED_PREFIX, tuple(ranked[1:4]))


TASKS = {
    "fwe": Task(coded, CODED_TOKENS, lambda length: max(1, (length - CODED_TOKENS) // 200), least=150),
    "cwe": Task(most_common, 120, lambda length: max(1, length // 4000), least=20),
}
