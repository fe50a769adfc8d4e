"""Models with adapters, compiled models and quantised models are patched, or refused with advice."""
import pytest
import torch
from models import MAX_LENGTH, dense_logits, greedy_logits, prompts, tiny
from snapshot import snapshot

import torchsparsekv

FULL = dict(max_length=MAX_LENGTH, budget=MAX_LENGTH, skip_layers=1, sink=8, window=6, block_size=4)


def words(model, ids, mask):
    return model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False)


def test_adapter_is_patched_inside_its_model():
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    lora = peft.LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj"])
    adapted = peft.get_peft_model(tiny(), lora).eval()
    ids, mask = prompts(3, 41)
    with torch.no_grad():
        want, said = dense_logits(adapted, ids, mask, 20), words(adapted, ids, mask)
        with adapted.disable_adapter():
            assert not torch.equal(words(adapted, ids, mask), said), "the adapter changes nothing"
    before = snapshot(adapted.get_base_model())
    with torchsparsekv.patch(adapted, "quest", **FULL) as handle:
        got = greedy_logits(adapted, ids, mask, 20, cache := handle.make_cache(3))
        assert [r.steps for r in handle.report().layers] == [20] * 3
        assert torch.equal(words(adapted, ids, mask), said)
        assert handle._latest() is not cache, "generate() made no cache"
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert snapshot(adapted.get_base_model()) == before


def test_wrapper_of_torch_compile_is_looked_through():
    model = tiny(num_hidden_layers=2)
    compiled, before, (ids, mask) = torch.compile(model, backend="eager"), snapshot(model), prompts(3, 41)
    want = dense_logits(model, ids, mask, 8)
    with torchsparsekv.patch(compiled, "quest", **FULL) as handle:
        assert handle.model is model
        got = greedy_logits(compiled, ids, mask, 8, cache := handle.make_cache(3))
        assert [layer.state.stats.counts[0, 0, 0] for layer in cache.layers] == [8] * 2
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert snapshot(model) == before


def test_model_that_compiled_itself_is_refused_with_advice():
    model = tiny()
    model.compile(backend="eager")
    with pytest.raises(RuntimeError, match=r"this model is compiled already.*: patch first, then compile\(\)"):
        torchsparsekv.patch(model, "quest", **FULL)


def test_model_compiled_after_patching_works():
    model = tiny(num_hidden_layers=2)
    ids, mask = prompts(3, 41)
    want = dense_logits(model, ids, mask, 8)
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        got = greedy_logits(torch.compile(model, backend="eager"), ids, mask, 8, cache := handle.make_cache(3))
        assert [layer.state.stats.counts[0, 0, 0] for layer in cache.layers] == [8] * 2
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_model_with_int8_weights_is_patched():
    torchao = pytest.importorskip("torchao.quantization")
    model = tiny()
    plain, (ids, mask) = dense_logits(model, *prompts(3, 41), 20), prompts(3, 41)
    torchao.quantize_(model, torchao.Int8WeightOnlyConfig())
    want, said = dense_logits(model, ids, mask, 20), words(model, ids, mask)
    assert not torch.equal(plain, want), "nothing was quantised"
    with torchsparsekv.patch(model, "quest", **FULL) as handle:
        got = greedy_logits(model, ids, mask, 20, handle.make_cache(3))
        assert torch.equal(words(model, ids, mask), said)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
