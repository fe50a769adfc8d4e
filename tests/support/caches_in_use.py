"""A small patched model, and generate() that does something at every token."""
import torch
from cases import hyper_of
from generating import GREEDY
from models import prompts
from transformers import StoppingCriteria, StoppingCriteriaList

import torchsparsekv

SMALL = dict(max_length=128, budget=8, sink=4, window=6, skip_layers=1, block_size=4)
IDS, MASK = prompts(2, 40)
OTHER, _ = prompts(2, 33, seed=4)


def patch(model, method="quest", **changes):
    return torchsparsekv.patch(model, method, **hyper_of(method, **{**SMALL, **changes}))


def generate(model, ids=IDS, **options):
    return model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **GREEDY, **options)


class Each(StoppingCriteria):
    """Does something at every token; never stops."""

    def __init__(self, act):
        self.act = act

    def __call__(self, ids, scores, **kwargs):
        self.act()
        return torch.zeros(ids.shape[0], dtype=torch.bool, device=ids.device)


def at_each(act):
    return dict(stopping_criteria=StoppingCriteriaList([Each(act)]))
