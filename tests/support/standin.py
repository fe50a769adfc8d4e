"""A model and tasks for the evaluation that need no training: a llama with weights set by hand, which follows chains.

`chain` asks for facts of the prompt. `journal` asks for what the model itself wrote: from its last prompt token on it
recites links and words by heart, and is then asked for the links, which no prompt ever held.
"""
import hashlib
from dataclasses import dataclass

import torch
from chain import FIRST_NAME, FIRST_WORD, MEANING, chain_model, chain_prompts, link

from torchsparsekv_benchmarks.quality.sources import Source

LENGTH = 256
STEPS = 4  # names to be told; the first is told by the prompt's own forward, which is exact
HOPS, APART, REST = 3, 12, 40  # links the journal holds, words between them, and words after the last
SCRIPT_WORDS = range(FIRST_WORD + 300, FIRST_WORD + 400)  # never in a prompt


@dataclass(frozen=True)
class Sample:
    prompt: list[int]
    answers: tuple[int, ...]
    new_tokens: int
    depth: float | None

    def score(self, output: list[int]) -> float:
        told = output[-len(self.answers) :]
        return sum(a == b for a, b in zip(told, self.answers)) / len(self.answers)


def script() -> list[int]:
    """What the journal says, from the word that begins it to the name that is asked for."""
    words = iter(SCRIPT_WORDS)
    out = [next(words)]
    for hop in range(HOPS):
        out += [link(hop, hop + 1), *(next(words) for _ in range(APART))]
    return [*out, *(next(words) for _ in range(REST)), FIRST_NAME]


def _learn(model, tokens: list[int]) -> None:
    """By heart: each of these tokens is followed by the next."""
    g = torch.Generator().manual_seed(5)
    codes = torch.randint(0, 2, (len(tokens) - 1, 32), generator=g) * 2.0 - 1
    with torch.no_grad():
        model.model.embed_tokens.weight[tokens[:-1], MEANING] = codes
        model.lm_head.weight[tokens[1:], MEANING] = codes


def sample(task: str, length: int, index: int) -> Sample:
    seed = int.from_bytes(hashlib.sha256(f"{task} {length} {index}".encode()).digest()[:4], "big")
    if task == "chain":
        ids, _, answers = chain_prompts([length - STEPS], STEPS, seed)
        return Sample(ids[0].tolist(), tuple(answers[0].tolist()), STEPS, 0.5)
    told = script()
    new = len(told) - 1 + HOPS
    g = torch.Generator().manual_seed(seed)
    prompt = torch.randint(FIRST_WORD, SCRIPT_WORDS.start, (length - new,), generator=g)
    answers = tuple(FIRST_NAME + hop + 1 for hop in range(HOPS))
    return Sample([*prompt[:-1].tolist(), told[0]], answers, new, None)


def source() -> Source:
    model = chain_model(1024)
    _learn(model, script())
    return Source("stand-in", "stand-in", model, ("chain", "journal"), sample)
