"""The result of every task: a text to ask about, the first words of the answer, and the strings it must contain."""
import random
from collections.abc import Callable
from dataclasses import dataclass

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
SHORT = 4096  # below this many tokens lists repeat their words less


@dataclass(frozen=True)
class Draft:
    text: str
    prefix: str  # of the answer; in a chat the assistant has said it already
    answers: tuple[str, ...]
    needle: str | None = None  # the first statement that the answer needs, where there is one
    wrong: tuple[str, ...] = ()  # each of these in the answer takes back one that is right


@dataclass(frozen=True)
class Task:
    """make(rng, size, length): a draft whose haystack has `size` units, for prompts of `length` tokens."""

    make: Callable[[random.Random, int, int], Draft]
    new_tokens: int
    step: Callable[[int], int]  # units to go back where a draft is too long, by the length
    least: int = 1  # units that a haystack must have


def insert(lines: list[str], statements: list[str], places: list[int]) -> list[str]:
    """Statement i before what stood at places[i]; `places` ascending."""
    out, done = [], 0
    for statement, place in zip(statements, places):
        out += [*lines[done:place], statement]
        done = place
    return out + lines[done:]
