"""The defaults of every method and the ids of ParisKV are pinned, since both decide quality."""
import dataclasses

import pytest
import torch
from models import MAX_LENGTH, prompts, tiny
from transformers import DynamicCache

import torchsparsekv
from torchsparsekv.method import all_methods, make_method
from torchsparsekv.ops.icecache.top_tokens_of_last_queries import QUERIES, WANTED
from torchsparsekv.state import Geometry


def acting(method) -> dict[str, object]:
    """The hyper-parameters as they act."""
    return method.effective()


IN_RING = dict(sink=64, window=256, hot_budgets="auto", prefetch_async=None, estimate_rest=False)
WITH_REST = IN_RING | dict(estimate_rest=True)
CLUSTERED = dict(**IN_RING, budget=1024, cluster_size=16, stretch=4096, rounds=3, seed=0, cosine=False)
DEFAULTS: dict[str, dict[str, object]] = {
    "arkvale": dict(**IN_RING, budget=1024, block_size=32, digest="float8", group="mean", volume="cuboid-mean"),
    "clusterkv": dict(
        **IN_RING | dict(sink=16), budget=1024, cluster_size=80, stretch=None, rounds=20, seed=0, cosine=True,
        every=320, new_clusters=4, run=None,
    ),
    "full": dict(**IN_RING, budget=1024),
    "h2o": dict(**IN_RING | dict(sink=0), budget=1024, prompt_queries=None),
    "icecache": dict(
        **IN_RING, budget=1024, r=0.0625, levels=2, promotion="quota", page_size=16, field_of_view=None,
        least_view=32, growth=0.25, rank_from="codes", reuse_every=1, match_heads=True, selecting_layers=None, seed=0,
    ),
    "louiskv": dict(**CLUSTERED, tau=0.95, per_head=False, memory=0.0, segment_min=4, segment_max=32),
    "omnikv": dict(**IN_RING, budget=1024, filter_layers=None, wait_layers=1, score="logits"),
    "magicpig": dict(**IN_RING | dict(sink=4), budget=1024, bits=10, tables=150, seed=0),
    "oracle": dict(**IN_RING, budget=1024, block_size=1),
    "pariskv": dict(
        **WITH_REST, budget=1024, update_interval=256, rho=None, beta=None, full_threshold=512, group="max",
        m=8, seed=0,
        # Below how many tokens, and in millionths: the share that is reranked, the share that earns points.
        ratios=[5_000, 500_000, 500_000, 10_000, 250_000, 300_000, 30_000, 200_000, 250_000, 50_000, 700_000],
    ),
    "pqcache": dict(**IN_RING | dict(sink=32), budget=1024, m=2, bits=6, rounds=20, seed=0),
    "prkv": dict(
        **IN_RING, budget=1024, block_size=32, digest="float8", group="mean", volume="cuboid-mean", observe=64,
        update_every=128, update_from="codes", static_ratio=0.25, per_head=False, static=256,
    ),
    "pagemean": dict(**WITH_REST, budget=1024, block_size=16, digest="float8", group="mean"),
    "quest": dict(**IN_RING, budget=1024, block_size=16, digest="float8", group="max"),
    "raas": dict(**IN_RING, budget=1024, block_size=16, digest="float8", group="max", share=0.5),
    "random": dict(**IN_RING, budget=1024, block_size=16, seed=0),
    "prkv_static": dict(**IN_RING, budget=1024, observe=64, update_every=None, update_from="keys"),
    "retroinfer": dict(
        **IN_RING | dict(sink=4, window=64), budget=1024, cluster_size=16, stretch=4096, rounds=10, seed=0, cosine=True,
        every=1024, new_clusters=64, estimated=0.232,
    ),
    "snapkv": dict(
        **IN_RING | dict(sink=0), budget=1024, observe=32, kernel_size=5, pooling="avgpool", generates=224,
    ),
    "shadowkv": dict(**IN_RING | dict(sink=0), budget=1024, block_size=8, outliers=24),
    "streaming": dict(**IN_RING, budget=1024, block_size=16),
}  # fmt: skip


def test_matching_of_heads_uses_32_queries_and_16_tokens():
    """Queries of the prompt, and tokens of each."""
    assert (QUERIES, WANTED) == (32, 16)


def test_every_method_has_pinned_defaults():
    assert set(DEFAULTS) == set(all_methods())


@pytest.mark.parametrize("name", DEFAULTS)
def test_defaults_of_a_method(name):
    assert acting(make_method(name)) == DEFAULTS[name]


@pytest.mark.parametrize("name", DEFAULTS)
def test_every_hyper_parameter_has_a_pinned_default(name):
    fields = {f.name for f in dataclasses.fields(all_methods()[name])}
    assert fields <= set(DEFAULTS[name])


# The size of a cluster where the budget would not hold 16 of the default size.
@pytest.mark.parametrize(("name", "more"), [("louiskv", {}), ("clusterkv", dict(cluster_size=None))])
@pytest.mark.parametrize(("budget", "size"), [(64, 4), (128, 8), (255, 8), (256, 16), (4096, 16)])
def test_cluster_size_at_a_small_budget(name, more, budget, size):
    assert acting(make_method(name, budget=budget, **more))["cluster_size"] == size


@pytest.mark.parametrize(("window", "interval"), [(1, 1), (64, 64), (256, 256), (1000, 256)])
def test_update_interval_follows_the_window(window, interval):
    assert acting(make_method("pariskv", window=window))["update_interval"] == interval


# ---------------------------------------------------------------- ParisKV's ids


def finalised(x: int) -> int:
    """MurmurHash3's finaliser, on 32 bits."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = (x ^ x >> shift) * factor % (1 << 32)
    return x


def rotation(size: int, seed: int) -> torch.Tensor:
    """Flips of the channels whose hash is odd, then Sylvester's matrix."""
    h = torch.ones(1, 1, dtype=torch.float64)
    while len(h) < size:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    flip = [-1.0 if finalised(channel + 256 * seed + 1) & 1 else 1.0 for channel in range(size)]
    return torch.tensor(flip, dtype=torch.float64)[:, None] * h / size**0.5


@pytest.mark.parametrize("seed", [0, 7])
@torch.no_grad()
def test_id_bits_are_signs_of_the_rotated_key(seed):
    """Keys of a prompt and keys that left the window later, both as transformers' own cache has them: in layer 1, with
    only layer 0 before it, which is dense, they are the same in both."""
    model = tiny(head_dim=16)
    ids, _ = prompts(1, 100, ragged=False)
    dense, sink, window = DynamicCache(), 4, 6
    model(ids, past_key_values=dense)
    keys = dense.layers[1].keys[0].double().cpu()
    how = dict(max_length=MAX_LENGTH, budget=8, sink=sink, window=window, update_interval=5, full_threshold=0)
    with torchsparsekv.patch(model, "pariskv", skip_layers=1, seed=seed, **how) as handle:
        cache = handle.make_cache(1)
        model(ids[:, :60], past_key_values=cache)
        for t in range(60, 100):
            model(ids[:, t : t + 1], past_key_values=cache)
        found = cache.layers[1].state.codes.ids[0].cpu()
    rotated = (keys @ rotation(keys.shape[-1], seed)).unflatten(-1, (-1, 8))
    want = sum((rotated[..., j] > 0).long() << j for j in range(8))
    told = slice(sink, 100 - window - 5)  # at least these have left the window
    clear = rotated.abs().amin(-1) > 1e-5
    assert clear[:, told].float().mean() > 0.9
    assert len(want[:, told].unique()) > 50
    assert torch.equal(found[:, told].long()[clear[:, told]], want[:, told][clear[:, told]])


def test_pariskv_defaults_fit_every_budget():
    """Where beta follows the length, twice the budget is reranked at least: of 8192 tokens a quarter would be 2048."""
    method = make_method("pariskv", budget=2000)
    method.buffers(Geometry(1, 1, 128, 8192, torch.float32))
    assert method.sizes(8192) == (4000, 2000)
