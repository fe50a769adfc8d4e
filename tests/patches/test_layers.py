"""Every layer may run its own method with its own budget."""
import dataclasses

import pytest
import torch
from models import MAX_LENGTH, dense_logits, greedy_logits, prompts, tiny
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.mllama.configuration_mllama import MllamaTextConfig
from transformers.models.mllama.modeling_mllama import MllamaTextCrossAttention

import torchsparsekv
from torchsparsekv.patches import all_families
from torchsparsekv.patches._family import FAMILIES, Family, Layer, is_self_attention, layer_of

FULL = dict(max_length=MAX_LENGTH, budget=MAX_LENGTH, sink=8, window=6, skip_layers=1, block_size=4)
LOUIS = dict(method="louiskv", cluster_size=4, stretch=16, segment_min=2, segment_max=4)
# Two methods, three budgets, five ring plans, and a dense layer behind sparse ones.
PARIS = dict(method="pariskv", window=9, update_interval=5)
MIXED = {1: dict(budget=64), 2: LOUIS, 3: PARIS, 4: "full", 5: dict(sink=4)}


# ---------------------------------------------------------------- methods by layer


@pytest.mark.parametrize("backend", [None, "aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_mixed_methods_are_dense_at_full_budget(backend):
    counters.clear()
    model = tiny(num_hidden_layers=6)
    ids, mask = prompts(3, 41)
    want = dense_logits(model, ids, mask, 20)
    with torchsparsekv.patch(model, "quest", **FULL, layers=MIXED) as handle:
        cache = handle.make_cache(3)
        assert len(cache.row_lengths) == 5
        step = backend and torch.compile(model.forward, fullgraph=True, backend=backend)
        got = greedy_logits(model, ids, mask, 20, cache, step)
        report = handle.report()
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert [r.method for r in report.layers] == ["full", "quest", "louiskv", "pariskv", "full", "quest"]
    assert all(r.steps == 20 for r in report.layers)
    if backend:
        assert counters["stats"]["unique_graphs"] == 1


def test_layer_of_a_mixed_model_runs_like_in_a_uniform_model():
    """Entries for all layers, or the method for the model: the same logits, at a budget where methods differ."""
    ids, mask = prompts(2, 67)
    small = {**FULL, "budget": 16}
    entry = {"method": "arkvale", "block_size": 4}
    logits = {}
    for name, method, layers in (
        ("entries", "quest", {1: entry, 2: entry}), ("model", "arkvale", None), ("quest", "quest", None),
    ):  # fmt: skip
        model = tiny()
        with torchsparsekv.patch(model, method, **small, layers=layers) as handle:
            logits[name] = greedy_logits(model, ids, mask, 10, handle.make_cache(2))
    assert torch.equal(logits["entries"], logits["model"])
    assert not torch.equal(logits["entries"], logits["quest"]), "the budget hides the methods"


@torch.no_grad()
def test_each_layer_attends_to_its_own_budget():
    model = tiny(num_hidden_layers=4)
    ids, mask = prompts(1, 60, ragged=False)
    with torchsparsekv.patch(model, "quest", **{**FULL, "budget": 8}, layers={2: dict(budget=16)}) as handle:
        cache = handle.make_cache(1)
        greedy_logits(model, ids, mask, 3, cache)
        report = handle.report()
        assert "layer 2: quest(budget=16)" in str(report).splitlines()
        assert "layers={2: quest(budget=16)}" in repr(handle)
    dense, *sparse = report.layers
    near = sparse[0].attended_per_step - 8
    assert [r.attended_per_step - near for r in sparse] == [8, 16, 8]
    assert [r.blocks_selected for r in sparse] == [2 * 2 * 3, 4 * 2 * 3, 2 * 2 * 3]
    assert dense.density == 1


def names(**options):
    with torchsparsekv.patch(tiny(num_hidden_layers=4), "quest", **{**FULL, **options}) as handle:
        return [m.name for m in handle.planned.methods], handle.planned.exceptions()


def test_settings_of_a_layer_override_skip_layers():
    entry = {"method": "quest"}
    assert names(skip_layers=2) == (["full", "full", "quest", "quest"], [])
    assert names(skip_layers=2, layers={0: entry}) == (["quest", "full", "quest", "quest"], ["0: quest"])
    assert names(skip_layers=2, layers={0: "full", 3: "full"}) == (["full", "full", "quest", "full"], ["3: full"])
    ark = dict(method="arkvale", block_size=4)
    same = {1: ark, 2: ark, 3: dict(window=9)}
    said = ["1-2: arkvale(budget=128, sink=8, window=6, block_size=4)", "3: quest(window=9)"]
    assert names(layers=same) == (["full", "arkvale", "arkvale", "quest"], said)


def test_budget_is_passed_only_to_methods_that_use_budgets():
    """100 is no multiple of a block of 16, and streaming has no use for it."""
    told = dict(method="pariskv", budget=100, sink=16, window=16, max_length=512)
    with torchsparsekv.patch(tiny(), **told, layers={1: "streaming"}) as handle:
        assert handle.planned.methods[1].name == "streaming"
    with pytest.raises(ValueError, match=r"layers\[1\]: quest: sink must .*; the sink is from patch\(\): give this"):
        torchsparsekv.patch(tiny(), "oracle", sink=3, budget=32, window=6, layers={1: "quest"})
    with pytest.raises(ValueError, match=r"layers\[1\]: quest: budget must .* give this layer its own budget"):
        torchsparsekv.patch(tiny(), **told, layers={1: "quest"})


@pytest.mark.parametrize("offload", ["device", "host"])
def test_bytes_are_planned_per_layer(offload):
    on_host = offload == "host"
    with torchsparsekv.patch(tiny(num_hidden_layers=6), "quest", **FULL, layers=MIXED, offload=offload) as handle:
        plan, cache = handle.planned, handle.make_cache(3, 100)
        each = [plan.layer_bytes(i, 3, 100, pool_on_host=on_host) for i in range(6)]
        assert plan.bytes(3, 100, pool_on_host=on_host) == tuple(map(sum, zip(*each)))
    for i, (layer, (host, device)) in enumerate(zip(cache.layers, each)):
        assert host + device == sum(t.nbytes for _, t in layer.state.tensors())
        pool = layer.state.store.pool.nbytes
        assert host == (pool if on_host and i not in (0, 4) else 0), "dense layers keep theirs on the device"


# ---------------------------------------------------------------- what a layer is


def test_wrong_family_is_refused_at_its_first_error(monkeypatch):
    """Its model does otherwise than the plan was made for: no wrong answer, whichever of it is wrong."""
    all_families()
    ids, _ = prompts(2, 12)
    for wrong in (dict(heads=8), dict(kv_heads=4), dict(head_dim=32), dict(softcap=5.0), dict(sink_logits=True)):
        monkeypatch.delitem(FAMILIES, "llama")
        Family(("llama",), layer=lambda c, i, wrong=wrong: dataclasses.replace(layer_of(c, i), **(wrong if i else {})))
        (name,) = wrong
        model = tiny()
        with torchsparsekv.patch(model, "quest", **FULL) as handle, torch.no_grad():
            says = rf"layer 1 of this model is not as its Family describes it: {name}"
            with pytest.raises(ValueError, match=says):
                model(ids, past_key_values=handle.make_cache(2))
        monkeypatch.undo()


def test_ranks_divide_heads_by_the_tensor_parallel_plan():
    whole = Layer(heads=8, kv_heads=4, head_dim=16, shard="heads")
    assert whole.on_rank(1) is whole
    half = whole.on_rank(2)
    assert (half.heads, half.kv_heads, half.group) == (4, 2, 2)
    everywhere = dataclasses.replace(whole, shard="replicated")
    assert everywhere.on_rank(3) is everywhere
    with pytest.raises(ValueError, match="8 query heads and 4 kv heads cannot be shared by 3 ranks"):
        whole.on_rank(3)
    with pytest.raises(NotImplementedError, match="does not say how kv heads are shared by 2 ranks"):
        dataclasses.replace(whole, shard="unknown").on_rank(2)


@pytest.mark.parametrize(("kind", "shard"), [("llama", "heads"), ("phi3", "replicated"), ("gpt_oss", "unknown")])
def test_tensor_parallel_plan_of_transformers_is_understood(kind, shard):
    assert layer_of(AutoConfig.for_model(kind), 0).shard == shard


def test_rank_stores_only_its_own_heads():
    model = tiny()
    model._tp_size = 2  # as from_pretrained(tp_plan="auto") leaves it
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        assert handle.make_cache(1).layers[1].state.store.pool.shape[1] == 1
    model._tp_size = 3
    with pytest.raises(ValueError, match="2 kv heads cannot be shared by 3 ranks"):
        torchsparsekv.patch(model, "quest", **FULL)


# ---------------------------------------------------------------- which module it is

SIZES = dict(
    num_hidden_layers=4, hidden_size=64, intermediate_size=64, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=97, pad_token_id=0, bos_token_id=1, eos_token_id=None, max_position_embeddings=512,
)  # fmt: skip
LINEAR = {"layer_types": ["linear_attention", "full_attention"] * 2}
# model type: (attention modules of so many layers, what else of the config)
REACHED = {
    "llama": (4, {}),
    "phi3": (4, {}),  # one projection for q, k and v
    "gemma3_text": (4, {}),  # whose decoder layers have a layer_idx too
    "minimax": (2, LINEAR),  # linear attention has a layer_idx and takes a cache
    "qwen3_next": (2, LINEAR),  # and here it has q, k, v of its own
    "mpt": (0, {}),  # does not ask the dispatch
}


@pytest.mark.parametrize("kind", REACHED)
def test_attention_modules_are_recognised(kind):
    count, more = REACHED[kind]
    sizes = {**SIZES, **more} if kind != "mpt" else {"n_layers": 4, "d_model": 64, "n_heads": 4, "vocab_size": 97}
    config = AutoConfig.for_model(kind, **sizes)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    found = [name for name, m in model.named_modules() if is_self_attention(m)]
    assert len(found) == count
    assert all(name.endswith("attn") for name in found)


def test_cross_attention_is_not_patched():
    with torch.device("meta"):
        config = MllamaTextConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
        config._attn_implementation = "sdpa"
        assert not is_self_attention(MllamaTextCrossAttention(config, layer_idx=3))


def indexed(*indices):
    model = tiny(num_hidden_layers=4)
    for layer, index in zip(model.model.layers, indices):
        layer.self_attn.layer_idx = index
    return model


@pytest.mark.parametrize(
    ("indices", "says"),
    [
        ((0, 1, 1, 3), r"has 4 attention modules that torchsparsekv can reach, for 4 layers \(without: 2; twice: 1\)"),
        ((0, 1, 2, None), r"has 3 attention modules that torchsparsekv can reach, for 4 layers \(without: 3\)"),
        ((0, 1, 2, 4), r"has 4 attention modules .* for 4 layers \(without: 3; unknown: 4\)"),
    ],
)
def test_mismatched_layers_and_modules_are_refused(indices, says):
    model = indexed(*indices)
    with pytest.raises(NotImplementedError, match=says):
        torchsparsekv.patch(model, "quest", **FULL)
    assert not any("torchsparsekv" in name for m in model.modules() for name in vars(m))
