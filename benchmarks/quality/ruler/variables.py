"""Variable tracing: a value is assigned from name to name, and the question asks for every name that has the value."""
import random
import string
from itertools import pairwise

from torchsparsekv_benchmarks.quality.ruler.drafts import NOISE, Draft, Task, insert

HOPS = 4
QUESTION = (
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\n"
    "Question: Find all variables that are assigned the value {value} in the text above."
)
PREFIX = (
    " Answer: According to the chain(s) of variable assignment in the text above, {count} variables are assigned the "
    "value {value}, they are: "
)
EXAMPLE_LINES = 8


def _names(rng: random.Random, letters: int) -> list[str]:
    names: dict[str, None] = {}
    while len(names) < HOPS + 1:
        names["".join(rng.choices(string.ascii_uppercase, k=letters))] = None
    return list(names)


def _chain(rng: random.Random, lines: int, letters: int, value: int) -> Draft:
    names = _names(rng, letters)
    said = [f"VAR {names[0]} = {value}", *(f"VAR {b} = VAR {a} " for a, b in pairwise(names))]
    context = "\n".join(insert([NOISE] * lines, said, sorted(rng.sample(range(lines), len(said)))))
    question = QUESTION.format(context=context.replace(". \n", ".\n"), value=value)
    return Draft(question, PREFIX.format(count=len(names), value=value), tuple(names), said[0])


def make(rng: random.Random, size: int, length: int) -> Draft:
    """After one solved example, with shorter names and a value of its own."""
    values = rng.sample(range(10000, 99999), 2)
    solved, draft = _chain(rng, EXAMPLE_LINES, 3, values[0]), _chain(rng, size, 5, values[1])
    shown = solved.text + solved.prefix + " ".join(solved.answers)
    return Draft(f"{shown}\n\n{draft.text}", draft.prefix, draft.answers, draft.needle)


TASKS = {"vt": Task(make, 30, lambda length: max(1, length // 2000), least=HOPS + 1)}
