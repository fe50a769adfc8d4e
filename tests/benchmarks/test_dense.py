"""The dense attention of others that `bench decode` measures ours beside."""
import contextlib
import copy
import sys
import types

import pytest
import torch
from cli import refused

from torchsparsekv_benchmarks.speed import _common, _dense, _flashinfer, decode

SLOTS, BATCH = 64, 2
GPU = pytest.mark.gpu


class Paged:
    """FlashInfer's wrapper, written plainly: what it says of its arguments, page by page."""

    def __init__(self, workspace, layout, **buffers):
        assert layout == "HND"
        self.buffers = buffers

    def plan(self, ends, table, lasts, q_heads, kv_heads, head_dim, page, **kinds):
        for name, given in (("indptr", ends), ("indices", table), ("last_page_len", lasts)):
            assert torch.equal(self.buffers[f"paged_kv_{name}_buffer"], given)
        self.ends, self.table, self.lasts, self.shape = ends, table, lasts, (kv_heads, page, head_dim)

    def run(self, query, cache):
        key, value = cache
        assert key.shape[1:] == value.shape[1:] == self.shape
        assert key.stride() == value.stride()
        rows = []
        for row, q in enumerate(query):
            pages = self.table[self.ends[row] : self.ends[row + 1]].long()
            k, v = (x[pages].transpose(0, 1).flatten(1, 2) for x in (key, value))
            live = (len(pages) - 1) * _flashinfer.PAGE + int(self.lasts[row])
            grouped = q.unflatten(0, (self.shape[0], -1)).float()
            weight = (grouped @ k[:, :live].float().mT * q.shape[-1] ** -0.5).softmax(-1)
            rows.append((weight @ v[:, :live].float()).flatten(0, 1).to(q.dtype))
        return torch.stack(rows)


@pytest.fixture
def plain_flashinfer(monkeypatch):
    module = types.ModuleType("flashinfer")
    module.BatchDecodeWithPagedKVCacheWrapper = Paged
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    monkeypatch.setattr(_flashinfer, "installed", lambda: True)


@torch.no_grad()
def compare(name: str, device: str, tolerance: float) -> None:
    """The last token that a static cache has room for: then all its slots hold one, and no mask is needed."""
    from transformers import StaticCache

    model = _common.build("tiny", torch.device(device))
    ids = torch.randint(0, 1000, (BATCH, SLOTS), generator=torch.Generator().manual_seed(1)).to(device)
    cache = StaticCache(model.config, max_cache_len=SLOTS)
    model(ids[:, :-1], past_key_values=cache)
    other = copy.deepcopy(cache)
    position = torch.full((BATCH, 1), SLOTS - 1, device=device)
    want = model(ids[:, -1:], past_key_values=cache, position_ids=position).logits
    own = model.config._attn_implementation
    with _dense.attending_by(name, model, BATCH, SLOTS):
        step = torch.compile(model, fullgraph=True, backend="inductor" if device == "cuda" else "eager")
        got = step(ids[:, -1:], past_key_values=other, position_ids=position).logits
    assert model.config._attn_implementation == own
    assert not _dense._planned
    assert float((got - want).abs().max()) < tolerance * float(want.abs().max())
    torch._dynamo.reset()


def test_a_step_by_sdpa_is_the_models():
    compare("sdpa-flash", "cpu", 2e-2)  # the CPU has one too


def test_a_step_by_flashinfer_is_the_models(plain_flashinfer, monkeypatch):
    runs, run = [], Paged.run
    monkeypatch.setattr(Paged, "run", lambda self, query, cache: runs.append(query.shape) or run(self, query, cache))
    compare("flashinfer", "cpu", 2e-2)
    assert len(runs) == 1 + 4, "once beforehand, then in each layer"


@torch.no_grad()
@pytest.mark.parametrize("name", _dense.SDPA)
def test_no_other_kernel_of_torch_may_run(name, monkeypatch):
    """In none of the layers; what attended before does so afterwards, and after an error."""
    allowed = lambda: {  # noqa: E731
        "sdpa-cudnn": torch.backends.cuda.cudnn_sdp_enabled(), "sdpa-flash": torch.backends.cuda.flash_sdp_enabled(),
        "math": torch.backends.cuda.math_sdp_enabled(), "efficient": torch.backends.cuda.mem_efficient_sdp_enabled(),
    }  # fmt: skip
    seen = []

    def attend(module, query, key, value, attention_mask, **kwargs):
        seen.append([k for k, on in allowed().items() if on])
        assert attention_mask is None
        return query.transpose(1, 2).contiguous(), None

    monkeypatch.setattr(_dense, "_sdpa", attend)
    model = _common.build("tiny", torch.device("cpu"))
    own, before = model.config._attn_implementation, allowed()
    model.lm_head.register_forward_hook(lambda *_: pytest.fail("after the layers"))
    with pytest.raises(pytest.fail.Exception, match="after"), _dense.attending_by(name, model, 1, SLOTS):
        model(torch.zeros(1, 1, dtype=torch.long))
    assert seen == [[name]] * 4
    assert (model.config._attn_implementation, allowed()) == (own, before)


def test_rows_are_of_the_attention_they_name(plain_flashinfer, monkeypatch):
    asked = []

    def attending_by(name, model, batch, length):
        asked.append((name, batch, length))
        return contextlib.nullcontext()

    monkeypatch.setattr(_dense, "attending_by", attending_by)
    monkeypatch.setattr(_flashinfer, "version", lambda: "1.2")
    monkeypatch.setattr(decode, "bare_tpot", lambda *_: {"tpot_ms": float(len(asked))})
    monkeypatch.setattr(decode, "collect", lambda: None)
    model, o = _common.build("tiny", torch.device("cpu")), decode.Options(shape="tiny")
    rows = [decode.run_static(model, 3, 48, o, *name) for name in ((), ("sdpa-cudnn",), ("flashinfer",))]
    assert asked == [("sdpa-cudnn", 3, 48), ("flashinfer", 3, 48)]
    assert [(r["method"], r["tpot_ms"], r.get("version")) for r in rows] == [
        ("hf-static", 0, None), ("sdpa-cudnn", 1, None), ("flashinfer", 2, "1.2"),
    ]  # fmt: skip


def test_what_torch_has_not_got_is_refused_at_once():
    with pytest.raises(RuntimeError, match="sdpa-cudnn cannot run here, leave it out of --dense"):
        _dense.try_out(("flashinfer", "sdpa-flash", "sdpa-cudnn"), torch.device("cpu"))


@pytest.mark.parametrize("x", [torch.zeros(2, 2, 20, 4), torch.zeros(2, 16, 2, 4).transpose(1, 2)])
def test_pages_are_runs_of_slots(x):
    with pytest.raises(ValueError, match="contiguous tensors of a multiple of 16 tokens"):
        _flashinfer.as_pages(x)


@GPU
@pytest.mark.parametrize("name", _dense.KERNELS)
def test_a_step_on_a_gpu_is_the_models(name):
    if name == _dense.FLASHINFER and not _flashinfer.installed():
        pytest.skip("flashinfer is not installed")
    compare(name, "cuda", 2e-2)


def test_the_fastest_dense_attention_is_what_methods_are_measured_against(monkeypatch):
    took = {"full": 4.0, "hf-static": 9.0, "sdpa-cudnn": 3.0, "quest": 1.5}
    row = lambda name, context: {"method": name, "context": context, "tpot_ms": 1.0 if context == 256 else took[name]}  # noqa: E731
    monkeypatch.setattr(decode, "run_method", lambda model, name, o, batch, context: row(name, context))
    monkeypatch.setattr(decode, "rows_of_method", lambda model, name, o, batch, context: [row(name, context)])
    monkeypatch.setattr(
        decode, "run_static", lambda model, batch, context, o, name="hf-static": row(name, context)
    )
    monkeypatch.setattr(_common, "prepare", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(_dense, "try_out", lambda *_: None)
    rows = decode.run(decode.Options(shape="tiny", contexts=(1024,)))["rows"]
    found = {r["method"]: (r["over_floor"], r.get("speedup")) for r in rows[1:]}
    assert found == {"full": (4, 0.75), "hf-static": (9, 1 / 3), "sdpa-cudnn": (3, 1), "quest": (1.5, 2)}


WRONG = {
    "--dense=nope": "dense must be different ones of sdpa-cudnn, sdpa-flash, flashinfer, got nope",
    "--dense=sdpa-flash,sdpa-flash": "dense must be different ones",
    "--dense=flashinfer": "flashinfer, which is not installed",
}


@pytest.mark.parametrize("arg", WRONG)
def test_wrong_options_are_refused(arg, monkeypatch):
    monkeypatch.setattr(_flashinfer, "installed", lambda: False)
    assert WRONG[arg] in refused("bench", "decode", arg)


@pytest.mark.parametrize("contexts", ["1000", "1024,1000"])
def test_flashinfer_needs_whole_pages(plain_flashinfer, contexts):
    assert "multiples of 16, got 1000" in refused("bench", "decode", "--dense=flashinfer", f"--contexts={contexts}")
