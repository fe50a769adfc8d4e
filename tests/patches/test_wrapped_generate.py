"""Calls of generate() that bypass the wrapper of a patch get their own cache."""
import torch
from caches_in_use import IDS, OTHER, at_each, generate, patch
from generating import GREEDY
from models import tiny


def past_the_patch(model, ids, **more):
    return type(model).generate(model, ids, attention_mask=torch.ones_like(ids), **GREEDY, **more)


def test_generate_outside_the_wrapper_gets_its_own_cache():
    """Nobody tells its end, so it shares no cache."""
    model = tiny()
    with patch(model):
        want, other = generate(model), generate(model, OTHER)
        for inside in (generate, past_the_patch):
            found = []
            ask = at_each(lambda found=found, inside=inside: found.append(inside(model, OTHER)))
            assert torch.equal(past_the_patch(model, IDS, **ask), want)
            assert found
            assert all(torch.equal(x, other) for x in found)
        assert torch.equal(generate(model), want)
