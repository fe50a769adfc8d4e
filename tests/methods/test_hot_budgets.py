"""A larger hot buffer fetches less and attends to the same tokens."""
import pytest
import torch
from models import prompts, tiny

import torchsparsekv
from torchsparsekv.method import make_method
from torchsparsekv.state import Geometry

HYPER = dict(budget=8, sink=4, window=8, max_length=256)
SIZES = (1, 2, 4)


@pytest.mark.parametrize("name", ["quest", "pariskv", "icecache"])
@torch.no_grad()
def test_larger_hot_buffer_fetches_fewer_blocks(name):
    more = {
        "quest": dict(block_size=4), "icecache": dict(page_size=2),
        "pariskv": dict(update_interval=4, full_threshold=0),
    }[name]  # fmt: skip
    ids, mask = prompts(2, 120, ragged=False)
    told, fetched = [], []
    for size in SIZES:
        model = tiny()
        with torchsparsekv.patch(model, name, **HYPER, **more, hot_budgets=size) as handle:
            told.append(model.generate(ids, attention_mask=mask, max_new_tokens=24, do_sample=False))
            fetched.append(sum(r.blocks_fetched for r in handle.report().layers))
    assert all(torch.equal(told[0], x) for x in told[1:])
    assert fetched[0] > fetched[1] > fetched[2]


@pytest.mark.parametrize(("rows", "slots"), [(1024, 16), (32, 8)])
def test_hot_buffer_size_is_capped_by_the_pool(rows, slots):
    method = make_method("quest", block_size=4, budget=16, sink=4, hot_budgets=4)
    assert method.buffers(Geometry(1, 2, 16, rows, torch.float32))["hot"].block_of.shape[-1] == slots
