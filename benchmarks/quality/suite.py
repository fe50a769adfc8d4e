"""Tasks beside RULER's: tasks whose answers need much of the prompt, and tasks on real source code.

    code_constant   source code of SymPy with constants planted in it: the value of one
    code_function   the same source code as it is: the first line of the docstring of one function
    extraction      40 records in prose: the names of those that have a property; a wrong name costs a point. The task
                    is too hard for Qwen2.5-Coder-1.5B, which scores 0.03, so `board` runs it only if `--tasks` names it
    form            20 facts in prose: a form that asks for all of them
    ledger          60 facts in prose: a form that asks for all of them, and then the filled form again from its end, in
                    other words. So the second half of about 2,000 tokens is work on text that the model wrote itself.
                    Qwen2.5-Coder-1.5B scores 0.55; the 0.5B model does not reach the second half
    turns           one text with many orders, five questions one after the other over one cache; `board` alone has it
"""
import dataclasses
import functools
import random
import re
from dataclasses import dataclass, field

from torchsparsekv_benchmarks.quality import real_model
from torchsparsekv_benchmarks.quality.ruler.drafts import Draft, Task, insert
from torchsparsekv_benchmarks.quality.ruler.words import essay, vocabulary

CODE = "sympy"
ABOUT_CODE = "Read the following source code. I will ask you about it afterwards.\n\n{context}\n\n"
CONSTANT = "What is the value of the constant {name} in the source code above?"
DOCSTRING = re.compile(r'^( *)def (\w{6,})\(.*\).*:\n +r?"""([A-Z][^"\n]{20,70}\.)', re.MULTILINE)
DOCSTRING_QUESTION = "What is the first line of the docstring of the function {name} in the source code above?"
CONSTANTS = 12  # planted, of which one is asked for


@functools.cache
def code() -> tuple[str, ...]:
    """The lines of the source code."""
    path = real_model.FOLDER / real_model.TEXTS[CODE]
    if not path.is_file():
        raise ValueError(f"there is no text {path}: run `make real-model ONLY={CODE}`")
    return tuple(path.read_text(encoding="utf-8").splitlines())


def stretch(rng: random.Random, lines: int) -> list[str]:
    """As many lines of the source code, from a place of its own."""
    every = code()
    if lines > len(every):
        raise ValueError(f"{CODE} has {len(every)} lines, a prompt of this length needs more")
    begin = rng.randrange(len(every) - lines + 1)
    return list(every[begin : begin + lines])


def words(rng: random.Random, count: int, salt: str) -> list[str]:
    """Different words, none of which is a part of another."""
    found: list[str] = []
    for word in rng.sample(vocabulary(1200, salt), 1200):
        if len(found) < count and not any(word in w or w in word for w in found):
            found.append(word)
    return found


def code_constant(rng: random.Random, size: int, length: int) -> Draft:
    lines = stretch(rng, size)
    names = [f"{w.upper()}_LIMIT" for w in words(rng, CONSTANTS, "constants")]
    values = [str(rng.randint(10**6, 10**7 - 1)) for _ in names]
    planted = [f"\n{name} = {value}\n" for name, value in zip(names, values)]
    text = "\n".join(insert(lines, planted, sorted(rng.sample(range(size), CONSTANTS))))
    asked = rng.randrange(CONSTANTS)
    question = ABOUT_CODE.format(context=text) + CONSTANT.format(name=names[asked])
    return Draft(question, f"The value of {names[asked]} is", (values[asked],), planted[asked])


def code_function(rng: random.Random, size: int, length: int) -> Draft:
    text = "\n".join(stretch(rng, size))
    found = [m for m in DOCSTRING.finditer(text) if len(re.findall(rf"\bdef {m[2]}\(", text)) == 1]
    if not found:
        return code_function(rng, size, length)  # another stretch
    m = rng.choice(found)
    question = ABOUT_CODE.format(context=text) + DOCSTRING_QUESTION.format(name=m[2])
    return Draft(question, f'The first line of the docstring of {m[2]} is: """', (m[3],), m[0])


RECORDS, MATCHES = 40, 6
COLOURS = ("red", "green", "blue", "white", "black", "brown")
EXTRACTION = (
    "The following text mentions {count} parcels, each with a name, a weight and a colour. I will ask you about them "
    "afterwards.\n{context}\nList the names of all parcels in the text above that are {colour}."
)


def extraction(rng: random.Random, size: int, length: int) -> Draft:
    names = words(rng, RECORDS, "parcels")
    colour, *others = rng.sample(COLOURS, len(COLOURS))
    said = [
        f"Parcel {name} weighs {rng.randint(10, 99)} kilograms and is {colour if i < MATCHES else rng.choice(others)}."
        for i, name in enumerate(names)
    ]
    first, order = said[0], rng.sample(range(RECORDS), RECORDS)
    text = essay(rng, size)
    lines = insert(text, [said[i] for i in order], sorted(rng.choices(range(len(text)), k=RECORDS)))
    question = EXTRACTION.format(count=RECORDS, context=" ".join(lines), colour=colour)
    prefix = f"The {MATCHES} parcels that are {colour}:"
    return Draft(question, prefix, tuple(names[:MATCHES]), first, wrong=tuple(names[MATCHES:]))


FIELDS, LEDGER_FIELDS = 20, 60
AGAIN = (
    "\nThen go through the form that you have filled in, from its last line to its first, and write for each line: the "
    "code, the words `belongs to`, and the department."
)
FORM = (
    "The following text says the code of each of {count} departments. I will ask you for a form of all of them "
    "afterwards.\n{context}\nFill in this form with the codes of the text above, one department a line:\n{form}"
)


def form(rng: random.Random, size: int, length: int, fields: int = FIELDS, then: str = "") -> Draft:
    names = words(rng, fields, "departments")
    values = [str(rng.randint(1000, 9999)) for _ in names]
    said = [f"The code of department {name} is {value}." for name, value in zip(names, values)]
    text, order = essay(rng, size), rng.sample(range(fields), fields)
    lines = insert(text, [said[i] for i in order], sorted(rng.choices(range(len(text)), k=fields)))
    blank = "\n".join(f"{name}: ____" for name in names)
    question = FORM.format(count=fields, context=" ".join(lines), form=blank) + then
    answers = tuple(f"{name}: {value}" for name, value in zip(names, values))
    return Draft(question, "Here is the form:\n", answers, said[0])


def ledger(rng: random.Random, size: int, length: int) -> Draft:
    first = form(rng, size, length, LEDGER_FIELDS, AGAIN)
    pairs = [answer.split(": ") for answer in first.answers]
    again = tuple(f"{value} belongs to {name}" for name, value in reversed(pairs))
    return dataclasses.replace(first, answers=first.answers + again)


def _step(length: int) -> int:
    return max(10, length // 200)


TASKS = {
    "code_constant": Task(code_constant, 24, lambda length: max(2, length // 1000), least=2 * CONSTANTS),
    "code_function": Task(code_function, 40, lambda length: max(2, length // 1000), least=150),
    "extraction": Task(extraction, 80, _step, least=50),
    "form": Task(form, 320, _step, least=50),
    "ledger": Task(ledger, 2000, _step, least=60),
}

TURNS = 5
ORDERS = "The following text says the code of many orders. I will ask you for some of them afterwards.\n{context}\n"
ASKED = "What is the code of order {order}? Answer with the code alone."


@dataclass(frozen=True)
class Conversation:
    """A text, and the questions and answers over it. Orders have five digits and codes six, so that all questions have
    equally many tokens in tokenizers that take digits one by one."""

    text: str
    questions: tuple[str, ...]
    answers: tuple[str, ...]
    new_tokens: int = field(default=10)


def conversation(rng: random.Random, size: int) -> Conversation:
    count = 40
    orders = [str(x) for x in rng.sample(range(10_000, 100_000), count)]
    codes = [str(rng.randint(100_000, 999_999)) for _ in orders]
    said = [f"The code of order {order} is {value}." for order, value in zip(orders, codes)]
    text = essay(rng, size)
    lines = insert(text, said, sorted(rng.choices(range(len(text)), k=count)))
    asked = rng.sample(range(count), TURNS)
    questions = tuple(ASKED.format(order=orders[i]) for i in asked)
    return Conversation(ORDERS.format(context=" ".join(lines)), questions, tuple(codes[i] for i in asked))
