"""What docs/extending.md shows is run as it stands there."""
import re
from pathlib import Path

import pytest
import torch
from models import dense_logits, greedy_logits, prompts, tiny

import torchsparsekv
from torchsparsekv import method
from torchsparsekv.ops import _registry
from torchsparsekv.patches import _family

PAGE = Path(__file__).resolve().parents[1] / "docs/extending.md"
SIZES = dict(max_length=128, sink=8, window=6, skip_layers=1, block_size=4)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The names that the page defines; afterwards nobody knows them."""
    known = dict(method._METHODS), dict(_registry.OPS), dict(_family.FAMILIES)
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S)
    path = tmp_path_factory.mktemp("page") / "page.py"  # kernels are read from their file
    path.write_text("\n\n".join(blocks))
    names: dict = {"__name__": "page", "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), names)
    yield names
    for table, before in zip((method._METHODS, _registry.OPS, _family.FAMILIES), known):
        table.clear()
        table.update(before)


@pytest.mark.parametrize("name", ["newest", "meanest"])
def test_its_methods_are_dense_at_full_budget_and_retrieve_below(page, name):
    model = tiny()
    ids, mask = prompts(2, 60)
    with torchsparsekv.patch(model, name, budget=128, **SIZES) as handle:
        got = greedy_logits(model, ids, mask, 20, handle.make_cache(2))
    torch.testing.assert_close(got, dense_logits(model, ids, mask, 20), rtol=1e-4, atol=1e-4)
    with torchsparsekv.patch(model, name, budget=8, **SIZES) as handle:
        cache = handle.make_cache(2)
        greedy_logits(model, ids, mask, 20, cache)
        assert handle.report().layers[-1].blocks_selected == 2 * 2 * 2 * 20, "rows, heads, blocks, steps"
        chosen = cache.layers[-1].state.hot
        assert bool((chosen.block_of.gather(-1, chosen.chosen.long()) >= 2).all()), "none of the sinks"


def test_its_op_is_as_good_as_any(page):
    from test_ops import clones, flat, mapped
    from world import DEVICE, World

    w = World(tokens=5, seed=3)
    entry = _registry.OPS["block_means"]
    means = torch.zeros(w.batch, w.heads, w.blocks, w.dim)
    things = (w.k, w.far(torch.maximum(w.begin, w.length)), means, w.lengths_view, w.block)
    there = mapped(clones(things), lambda t: t.to(DEVICE))
    torch.library.opcheck(entry.op, tuple(flat(there)))
    entry.reference(*things)
    entry.run("triton", *there)
    torch.testing.assert_close(there[2].cpu(), things[2])
    assert means.abs().sum() > 0
    with pytest.raises(ValueError, match=r"means must have shape \(2, 2, blocks, 16\), got"):
        entry.call(w.k, w.far(w.length), means[0], w.lengths_view, w.block)


def test_its_family_is_known(page):
    assert _family.FAMILIES["my_llama"].model_types == ("my_llama",)
