"""Rows of the table of refusals, and the ways to ask for what is refused."""
from collections.abc import Callable
from typing import NamedTuple

import torch
from cases import IN_BLOCKS
from models import prompts, tiny

import torchsparsekv

SMALL = dict(max_length=64, budget=16, sink=4, window=6, skip_layers=1, block_size=4)
IDS, MASK = prompts(2, 20)


class Row(NamedTuple):
    id: str
    act: Callable  # takes the model; the model must be unchanged when it has raised
    error: type[Exception]
    says: str
    model: Callable = tiny


def patch(method="quest", **changes):
    """At patch time; a method of single tokens has no block size."""
    sizes = {name: x for name, x in SMALL.items() if name != "block_size" or method in IN_BLOCKS}
    return lambda model: torchsparsekv.patch(model, method, **{**sizes, **changes})


def used(act, **changes):
    """While patched: `act(model, handle)`; leaving the block unpatches, so the model must be as before here too."""

    def run(model):
        with torch.no_grad(), torchsparsekv.patch(model, "quest", **{**SMALL, **changes}) as handle:
            act(model, handle)

    return run


def generate(ids=IDS, mask=MASK, cache=None, **options):
    def act(model, handle):
        kwargs = {} if cache is None else {"past_key_values": cache(handle)}
        options.setdefault("max_new_tokens", 4)
        model.generate(input_ids=ids, attention_mask=mask, do_sample=False, **kwargs, **options)

    return used(act)
