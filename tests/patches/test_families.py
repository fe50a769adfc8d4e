"""Every supported model type is dense at full budget: in eager steps, in one graph and in generate()."""
from pathlib import Path

import pytest
import torch
from families import FAMILIES
from models import dense_logits, greedy_logits, prompts, tiny
from snapshot import snapshot
from supported import FULL, supported
from torch._dynamo.utils import counters
from transformers import masking_utils
from world import DEVICE

import torchsparsekv
from torchsparsekv.patches import _install, all_families
from torchsparsekv.patches._attention import _causal
from torchsparsekv.patches._family import MULTIMODAL
from torchsparsekv.patches._refused import REFUSED
from torchsparsekv.patches._table import markdown

SMALL = {**FULL, "budget": 8, "sink": 4}
STEPS = 10


def generate(model, ids, mask):
    return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=6, do_sample=False)


def methods_of(family: str) -> list[str]:
    """What the layers with keys and values run, where the first layer is skipped."""
    types = FAMILIES[family].get("layer_types") or ["full_attention"] * 3
    runs = {"full_attention": "quest", "sliding_attention": "window"}
    return [runs[t] if i or t != "full_attention" else "full" for i, t in enumerate(types) if t in runs]


@pytest.mark.parametrize("family", FAMILIES)
def test_full_budget_is_dense_and_generates_the_same(family):
    """Beyond the windows of those that have some."""
    model = supported(family)
    ids, mask = prompts(3, 41)
    want, words = dense_logits(model, ids, mask, STEPS), generate(model, ids, mask)
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        cache = handle.make_cache(3)
        torch.testing.assert_close(greedy_logits(model, ids, mask, STEPS, cache), want, atol=1e-4, rtol=1e-4)
        assert [(r.method, r.steps) for r in handle.report().layers] == [(m, STEPS) for m in methods_of(family)]
        assert torch.equal(generate(model, ids, mask), words)
        assert torch.equal(generate(model, ids, mask), words), "a cache that is used again remembers"
    with torchsparsekv.patch(model, "quest", **SMALL) as handle:
        few = greedy_logits(model, ids, mask, STEPS, handle.make_cache(3))
    assert (few - want).abs().max() > 10 * 1e-4 * (1 + want.abs().max()), "a small budget changes nothing"


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_refused_call_changes_nothing(family):
    """The checks are ahead of the first layer, of whatever kind."""
    model = supported(family)
    ids, _ = prompts(2, 41)
    first, step = ids[:1], ids[1:, :1]
    with torchsparsekv.patch(model, "quest", **{**SMALL, "max_length": 64}) as handle:
        cache, spoilt = handle.make_cache(1), handle.make_cache(1)
        model(first, past_key_values=cache)
        want = model(step, past_key_values=cache).logits
        model(first, past_key_values=spoilt)
        with pytest.raises(ValueError, match="41 tokens after 41 overrun this cache of max_length 64"):
            model(first, past_key_values=spoilt)
        with pytest.raises(ValueError, match="made for batch size 1, got 2"):
            model(ids[:, :1], past_key_values=spoilt)
        with torch.enable_grad(), pytest.raises(RuntimeError, match="run under torch"):
            model(step, past_key_values=spoilt)
        with pytest.raises(RuntimeError, match="torchsparsekv is for inference: call"):
            model.train()(step, past_key_values=spoilt)
        model.eval()
        other = torchsparsekv.patch(tiny(family), "quest", **SMALL).make_cache(1)
        with pytest.raises(ValueError, match="from another patch"):
            model(step, past_key_values=other)
        assert torch.equal(model(step, past_key_values=spoilt).logits, want)


@torch.no_grad()
def test_call_refused_by_attention_changes_nothing():
    """What only it can tell: a forward has not begun before."""
    model = tiny()
    ids, _ = prompts(2, 41)
    first, step = ids[:1], ids[1:, :1]
    with torchsparsekv.patch(model, "quest", **SMALL) as handle:
        cache, spoilt = handle.make_cache(1), handle.make_cache(1)
        for c in (cache, spoilt):
            model(first, past_key_values=c)
        want = model(step, past_key_values=cache).logits
        with torch.autocast(DEVICE.type, torch.bfloat16), pytest.raises(TypeError, match="the model computes in"):
            model(step, past_key_values=spoilt)
        assert torch.equal(model(step, past_key_values=spoilt).logits, want)


# One of each that differs at the seam: the others differ in what torch.compile sees no more of than of llama.
AT_THE_SEAM = (
    "cohere2", "exaone4", "gemma2", "gemma3_text", "gpt_oss", "lfm2", "olmo2", "olmo3", "phi3", "qwen3_moe",
    "qwen3_next",
)  # fmt: skip


@pytest.mark.parametrize("family", AT_THE_SEAM if torch.cuda.is_available() else ("gemma3_text", "gpt_oss"))
def test_decode_is_one_graph(family):
    counters.clear()
    types = {"layer_types": FAMILIES[family]["layer_types"][:2]} if "layer_types" in FAMILIES[family] else {}
    model = supported(family, num_hidden_layers=2, **types)
    ids, mask = prompts(3, 41)
    want = dense_logits(model, ids, mask, 8)
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        step = torch.compile(model.forward, fullgraph=True, backend="eager")
        got = greedy_logits(model, ids, mask, 8, handle.make_cache(3), step)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("family", [name for name, family in all_families().items() if family.since])
def test_too_old_transformers_is_refused_by_name(family, monkeypatch):
    model = tiny()
    model.config.model_type = family
    monkeypatch.setattr(_install.transformers, "__version__", "5.12.9")
    with pytest.raises(NotImplementedError, match=f"{family} works with transformers >= 5.13, this is 5.12.9"):
        torchsparsekv.patch(model, "quest", **SMALL)


def test_table_of_models_in_docs_is_current():
    """`torchsparsekv models > docs/reference/models.md` writes it."""
    table = markdown()
    assert (Path(__file__).resolve().parents[2] / "docs/reference/models.md").read_text() == table
    for name in (*all_families(), *MULTIMODAL, *REFUSED):
        assert table.count(f"`{name}`") >= 1, name


@pytest.mark.parametrize("model_type", REFUSED)
def test_unsupported_model_types_are_refused_with_a_reason(model_type):
    model = tiny()
    model.config.model_type = model_type
    before = snapshot(model)
    with pytest.raises(NotImplementedError) as error:
        torchsparsekv.patch(model, "quest", **SMALL)
    assert str(error.value) == f"model_type {model_type!r} is not supported: {REFUSED[model_type]}"
    assert snapshot(model) == before


def test_only_causal_masks_count_as_causal():
    """Before transformers 5.14 the mask function alone tells that nothing is laid over a causal mask."""
    window, other = masking_utils.sliding_window_causal_mask_function(8), masking_utils.bidirectional_mask_function
    assert _causal(masking_utils.causal_mask_function)
    assert _causal(window)
    assert not _causal(other)
    assert not _causal(masking_utils.and_masks(window, other))
    assert not _causal(masking_utils.or_masks(window, other))
    assert not _causal(masking_utils.and_masks(masking_utils.causal_mask_function, other))
    assert not _causal(None)


def test_no_model_type_is_both_supported_and_refused():
    assert not set(REFUSED) & set(all_families())
