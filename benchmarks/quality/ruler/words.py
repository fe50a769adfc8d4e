"""Words made of syllables: any number of them, without a word list, and none is taken from a text."""
import functools
import itertools
import random

ONSETS = (*"bdfghjklmnprstv", "br", "dr", "fl", "gr", "kl", "pl", "st")
NUCLEI = ("a", "e", "i", "o", "u", "ai", "ou")
CODAS = ("", "n", "r", "l", "s", "m")
TWO_SYLLABLES = 200_000  # words asked for, up to which two syllables make enough different ones
FOLLOWERS = 6


@functools.cache
def syllables() -> tuple[str, ...]:
    return tuple(a + b + c for a, b, c in itertools.product(ONSETS, NUCLEI, CODAS))


@functools.cache
def vocabulary(count: int, salt: str) -> tuple[str, ...]:
    """`count` different words, the same in every process."""
    rng, parts = random.Random(f"words {salt}"), syllables()
    words: dict[str, None] = {}
    while len(words) < count:
        words["".join(rng.choices(parts, k=2 if count <= TWO_SYLLABLES else 3))] = None
    return tuple(words)


@functools.cache
def _company() -> dict[str, list[str]]:
    """The words that like to follow each word of an essay."""
    common = vocabulary(3000, "essay")
    return {w: random.Random(f"after {w}").sample(common, FOLLOWERS) for w in common}


def essay(rng: random.Random, words: int) -> list[str]:
    """Sentences of `words` words in all: most words are followed by one of a few, the others have Zipf's frequencies.

    They stand in for the essays of RULER and are not those: what is measured on them is not comparable there.
    """
    common, follow = vocabulary(3000, "essay"), _company()
    word, left, out = rng.choice(common), words, []
    while left > 0:
        sentence = []
        for _ in range(min(left, rng.randint(5, 18))):
            word = rng.choice(follow[word]) if rng.random() < 0.7 else common[int(len(common) ** rng.random()) - 1]
            sentence.append(word)
        left -= len(sentence)
        out.append(" ".join(sentence).capitalize() + ".")
    return out
