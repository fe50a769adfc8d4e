"""ParisKV works with update intervals that are longer than its window."""
import pytest
import torch
from models import prompts, tiny

import torchsparsekv


# As in the paper's table 1, by 16: update intervals above the window.
@pytest.mark.parametrize(("window", "interval"), [(16, 32), (8, 32)])
@torch.no_grad()
def test_tokens_waiting_for_an_update_are_attended(window, interval):
    """With a budget for all that has left the ring, every step is dense attention: over a prompt, many updates, and a
    second turn that comes while tokens wait. And a token is in the ring until it is in the index."""
    model = tiny(num_hidden_layers=2)
    ids, _ = prompts(2, 190, ragged=False)
    whole = model(ids).logits
    how = dict(budget=192, sink=4, window=window, update_interval=interval, beta=1.0, rho=1.0, full_threshold=0)
    with torchsparsekv.patch(model, "pariskv", max_length=192, skip_layers=1, **how) as handle:
        cache = handle.make_cache(2)
        s, waiting = cache.layers[1].state, set()
        parts = [40] + [1] * 70 + [9] + [1] * 71
        for at, n in zip(torch.tensor([0, *parts]).cumsum(0).tolist(), parts):
            got = model(ids[:, at : at + n], past_key_values=cache).logits
            torch.testing.assert_close(got[:, -1], whole[:, at + n - 1], atol=1e-4, rtol=1e-4)
            near = s.lengths.length - s.lengths.ring_begin
            waiting.add(int(near[0]))
            encoded = s.codes.counts.sum(-1)
            assert (encoded == (s.lengths.ring_begin - 4)[:, None, None]).all(), "all else is in the index, once"
    assert waiting == set(range(window, window + interval))
