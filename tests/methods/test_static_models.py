"""In a patched model, layers with a static set update at different steps, and the report names their share."""
import pytest
import torch
from models import MAX_LENGTH, greedy_logits, prompts, tiny

import torchsparsekv

TURNS = {
    20: {1: [0, 16, 36, 56], 2: [0, 12, 32, 52], 3: [0, 8, 28, 48], 4: [0, 4, 24, 44]},
    80: {1: [0], 2: [0, 48], 3: [0, 32], 4: [0, 16]},  # the turn of the last comes earlier by more than the prompt has
}


@pytest.mark.parametrize("every", TURNS)
def test_layers_update_at_different_steps(every):
    """After the first set, which all choose at the same step, no two of four layers choose at the same one."""
    model = tiny(num_hidden_layers=5)
    ids, mask = prompts(1, 50, ragged=False)
    when: dict[int, list[int]] = {i: [] for i in range(1, 5)}
    sizes = dict(max_length=MAX_LENGTH, skip_layers=1, sink=8, window=6, budget=16, block_size=4)
    with torch.no_grad(), torchsparsekv.patch(model, "prkv", **sizes, static_ratio=0.5, update_every=every) as handle:
        cache = handle.make_cache(1)
        model(ids, attention_mask=mask, past_key_values=cache)
        for t in range(60):
            model(ids[:, t % 50 : t % 50 + 1], past_key_values=cache)
            for i, steps in when.items():
                if int(cache.layers[i].state.static.updated.sum()):
                    steps.append(t)
    assert when == TURNS[every]


def test_report_names_the_automatic_share():
    model = tiny()
    ids, mask = prompts(1, 60, ragged=False)
    sizes = dict(max_length=MAX_LENGTH, skip_layers=1, sink=8, window=6, budget=16, block_size=4)
    with torch.no_grad(), torchsparsekv.patch(model, "prkv", **sizes, static_ratio="auto") as handle:
        cache = handle.make_cache(1)
        greedy_logits(model, ids, mask, 3, cache)
        report = handle.report()
        found = [float(x.state.static.target.float().mean()) / 16 for x in cache.layers[1:]]
    assert [r.static_share for r in report.layers] == [None, *found]
    assert 0 < max(found) <= 1
    said = ", ".join(f"{i}: {x:.3f}" for i, x in enumerate(found, 1))
    assert f"static share of the budget by layer: {said}" in str(report).splitlines()
