"""Words without a word list: made of syllables, so that any number of them exists and none comes from a book."""
import functools
import itertools
import random

ONSETS = ("b", "br", "d", "dr", "f", "fl", "g", "gr", "h", "j", "k", "kl", "l", "m", "n", "p", "pl", "r", "s", "st", "t", "v")
NUCLEI = ("a", "e", "i", "o", "u", "ai", "ou")
CODAS = ("", "n", "r", "l", "s", "m")


@functools.cache
def syllables() -> tuple[str, ...]:
    return tuple(a + b + c for a, b, c in itertools.product(ONSETS, NUCLEI, CODAS))


@functools.cache
def vocabulary(count: int, salt: str = "") -> tuple[str, ...]:
    """`count` different words of two syllables (three, from 200,000 words on), the same list in every process."""
    rng, parts, words = random.Random(f"words {salt}"), syllables(), {}
    while len(words) < count:
        words["".join(rng.choices(parts, k=2 if count <= 200_000 else 3))] = None
    return tuple(words)


ADJECTIVES, NOUNS = vocabulary(400, "adjectives"), vocabulary(1200, "nouns")


def essay(rng: random.Random, words: int) -> list[str]:
    """Sentences of `words` words in all: Markov text, so that words have company, with Zipf's frequencies. It stands in
    for the essays of RULER and is not them: scores on it are "not RULER-essay"."""
    common = vocabulary(3000, "essay")
    follow = {w: random.Random(f"after {w}").sample(common, 6) for w in common}
    out: list[str] = []
    word, left = rng.choice(common), words
    while left > 0:
        sentence = []
        for _ in range(min(left, rng.randint(5, 18))):
            word = rng.choice(follow[word]) if rng.random() < 0.7 else common[int(len(common) ** rng.random()) - 1]
            sentence.append(word)
        left -= len(sentence)
        out.append(" ".join(sentence).capitalize() + ".")
    return out
