"""Models by name: wider positions, and a GGUF file that becomes a folder once."""
import copy

import pytest
import torch
import transformers
from byte_tokenizer import bytes_tokenizer
from models import tiny

from torchsparsekv_benchmarks.quality import pretrained, real_model


@pytest.fixture
def folder(tmp_path):
    model = tiny(vocab_size=260)
    model.save_pretrained(tmp_path / "model")
    bytes_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(name, yarn=1.0, dtype=torch.float32):
    return pretrained.pretrained(str(name), torch.device("cpu"), dtype, yarn)


def test_yarn_multiplies_the_positions_and_scales_rope(folder):
    (_, own), (_, wide) = load(folder), load(folder, 4.0)
    assert (own.config.max_position_embeddings, wide.config.max_position_embeddings) == (512, 2048)
    rope = wide.config.rope_parameters
    assert (rope["rope_type"], rope["factor"], rope["original_max_position_embeddings"]) == ("yarn", 4.0, 512)
    assert rope["rope_theta"] == own.config.rope_parameters["rope_theta"]
    slowest = [m.model.rotary_emb.inv_freq[-1] for m in (own, wide)]
    assert slowest[1] == pytest.approx(slowest[0] / 4), "the lowest frequency is interpolated by the whole factor"


def test_yarn_over_another_scaling_is_refused(folder):
    load(folder, 4.0)[1].save_pretrained(folder)
    with pytest.raises(ValueError, match=r"yarn=2 needs a model with plain RoPE, .* leave yarn at 1"):
        load(folder, 2.0)


def test_a_fetched_file_becomes_a_folder_that_is_loaded_from_then_on(tmp_path, monkeypatch):
    pytest.importorskip("gguf")
    monkeypatch.setattr(real_model, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match=r"smollm2 is not in .*: run `make real-model`"):
        load("smollm2")
    (tmp_path / real_model.MODELS["smollm2"]).write_bytes(b"GGUF")
    model, calls = tiny(vocab_size=260), []
    real = transformers.AutoModelForCausalLM.from_pretrained

    def read(where, **how):
        calls.append(how.get("gguf_file"))
        return model.to(torch.bfloat16) if calls[-1] else real(where, **how)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", read)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda *_, **__: bytes_tokenizer())
    config = transformers.AutoConfig.from_pretrained
    described = lambda where, **how: copy.deepcopy(model.config) if how else config(where)  # noqa: E731
    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", described)
    for _ in range(2):
        _, found = load("smollm2")
        assert all(torch.equal(a, b.float()) for a, b in zip(found.parameters(), model.parameters()))
    assert calls == [real_model.MODELS["smollm2"], None, None], "the file is read once"
    assert not list(tmp_path.glob("tmp*")), "and nothing else is left"
