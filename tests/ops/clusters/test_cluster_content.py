"""Clusters hold similar keys, wherever the keys stand."""
import pytest
import torch
from chain import FIRST_NAME, FIRST_WORD, chain_model, link

import torchsparsekv
from torchsparsekv.probe import probe

GROUPS, COPIES, SINK, WINDOW = 8, 16, 16, 16


def prompt() -> torch.Tensor:
    """Words for the sinks, then eight links over and over, each beside the seven others, and words for the window."""
    words = list(range(FIRST_WORD, FIRST_WORD + 200))
    links = [link(i, GROUPS + i) for i in range(GROUPS)]
    return torch.tensor([[*words[:SINK], *COPIES * links, *words[SINK:]]])


@pytest.mark.parametrize("method", ["clusterkv", "louiskv"])
@torch.no_grad()
def test_budget_for_all_copies_of_a_key_finds_all_copies(method):
    """Asked for a name, the attention is on the copies of its link alone. The clusters of four that are best for it are
    made of them; of four neighbours each, they would hold a quarter."""
    model, ids = chain_model(512), prompt()
    how = dict(budget=COPIES, cluster_size=4, sink=SINK, window=WINDOW, max_length=512, skip_layers=1)
    own = dict(run=4) if method == "clusterkv" else dict(segment_min=4, segment_max=4)
    with torchsparsekv.patch(model, method, **how, **own) as handle:
        for name in range(GROUPS):
            cache = handle.make_cache(1)
            model(ids, past_key_values=cache)
            with probe(cache) as seen:
                said = model(torch.tensor([[FIRST_NAME + name]]), past_key_values=cache).logits[0, -1].argmax()
            assert said == FIRST_NAME + GROUPS + name
            mass = seen.mass()[seen.sparse()]
            assert mass.min() > 0.7, (name, mass.flatten())
