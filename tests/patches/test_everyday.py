"""Forks, saving, moving, notebooks and reports of patched models."""
import io
import pickle
from dataclasses import dataclass

import pytest
import torch
from cases import METHODS, hyper_of
from generating import GREEDY
from models import dense_logits, greedy_logits, prompts, tiny
from world import DEVICE

import torchsparsekv
from torchsparsekv.method import _METHODS, Method, make_method

SMALL = dict(max_length=128, budget=8, sink=8, window=6, skip_layers=1, block_size=4)
IDS, MASK = prompts(2, 40)
ASKED, _ = prompts(3, 9, seed=6, ragged=False)


def patch(model, method="quest", **changes):
    return torchsparsekv.patch(model, method, **hyper_of(method, **{**SMALL, **changes}))


# ---------------------------------------------------------------- forks


def counted(cache) -> list[torch.Tensor]:
    """All that its reports are made of."""
    return [t.clone() for layer in cache.stored.values() for b, t in layer.state.tensors() if b.counts]


@pytest.mark.parametrize("method", METHODS)
def test_fork_continues_like_the_original(method):
    """And neither disturbs the other; each counts its own steps."""
    model = tiny()
    with patch(model, method) as handle, torch.no_grad():
        system = handle.make_cache(2)
        greedy_logits(model, IDS, MASK, 5, system)
        forks = [handle.fork(system) for _ in range(2)]
        asked, ones, before = ASKED[:2], torch.ones_like(ASKED[:2]), counted(system)
        assert any(bool(t.any()) for t in before)
        assert not any(bool(t.any()) for t in counted(forks[0]))
        got = [greedy_logits(model, asked, ones, 6, cache) for cache in forks]
        want = greedy_logits(model, asked, ones, 6, system)
        assert torch.equal(got[0], want)
        assert torch.equal(got[1], want)
        assert all(torch.equal(new, now - old) for new, now, old in zip(counted(forks[0]), counted(system), before))
        assert want.isfinite().all()


@pytest.mark.parametrize("method", METHODS)
def test_fork_into_several_rows_continues_like_the_original(method):
    model = tiny()
    with patch(model, method) as handle, torch.no_grad():
        system, whole = handle.make_cache(1), handle.make_cache(3)
        for cache, ids in ((system, IDS[1:]), (whole, IDS[1:].expand(3, -1))):
            model(ids, past_key_values=cache)
        got, want = (greedy_logits(model, ASKED, torch.ones_like(ASKED), 6, c) for c in (handle.fork(system, 3), whole))
        assert torch.allclose(got, want, atol=1e-5)


def test_generate_continues_a_fork():
    model = tiny()
    with patch(model) as handle:
        ids = torch.cat([IDS[1:], ASKED[:1]], 1)
        with torch.no_grad():
            system = handle.make_cache(1)
            model(IDS[1:], past_key_values=system)
        answers = [model.generate(ids, past_key_values=handle.fork(system), **GREEDY) for _ in range(2)]
        assert torch.equal(*answers)
        assert int(system.get_seq_length()) == 40


# ---------------------------------------------------------------- saving and moving


def test_patched_model_refuses_pickle_and_saves_weights(tmp_path):
    model = tiny()
    with patch(model) as handle:
        for save in (pickle.dumps, lambda m: torch.save(m, io.BytesIO()), lambda _: pickle.dumps(handle)):
            with pytest.raises(TypeError, match=r"patched model cannot be pickled: call unpatch\(\) first"):
                save(model)
        with pytest.raises(TypeError, match="cannot be pickled: keep the tokens"):
            pickle.dumps(handle.make_cache())
        model.save_pretrained(tmp_path)
        assert model.generate(IDS, **GREEDY).shape == (2, 56)
    again = type(model).from_pretrained(tmp_path).to(DEVICE).eval()
    assert "torchsparsekv" not in (tmp_path / "config.json").read_text()
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert torch.equal(pickle.loads(pickle.dumps(model))(IDS).logits, model(IDS).logits)


# ---------------------------------------------------------------- notebooks


def define(budget):
    @dataclass(frozen=True, kw_only=True)
    class Again(Method):
        name = "again"

        def effective(self):
            return {"version": budget}

    return Again


def test_notebook_cell_with_a_method_can_run_again():
    try:
        define(1)
        second = define(2)
        assert type(make_method("again")) is second
        with pytest.raises(TypeError, match="method 'again' is defined twice"):

            class Other(Method):
                name = "again"

        assert type(make_method("again")) is second
    finally:
        _METHODS.pop("again", None)


# ---------------------------------------------------------------- what a report says of short contexts


@pytest.mark.parametrize(("method", "limit"), [("quest", 8 + 6 + 96), ("pariskv", 512)])
def test_report_warns_when_nothing_was_retrieved(method, limit):
    model = tiny()
    hyper = {**SMALL, "budget": 96} if method == "quest" else dict(budget=16, sink=8, window=6)
    with torchsparsekv.patch(model, method, **hyper) as handle:
        model.generate(IDS, **GREEDY)
        said = (
            f"density 1.000: {method} attended to every token, so nothing was saved here; sequences of up to {limit} "
            "tokens are always attended to in full"
        )
        assert said in str(handle.report())
    with patch(model, "quest") as handle:
        model.generate(IDS, **GREEDY)
        assert "density 1.000" not in str(handle.report())


@pytest.mark.parametrize("method", [m for m in torchsparsekv.methods() if m not in ("full", "random")])
def test_rows_reported_as_dense_are_dense(method):
    """As many tokens as the report names: logits of the dense model, and with 1200 more other ones."""
    model, small = tiny(max_position_embeddings=2048), dict(budget=32, sink=32, window=16, skip_layers=0)
    with torchsparsekv.patch(model, method, max_length=2048, **small) as handle:
        whole, differ = handle.planned.method.dense_threshold, []
    for tokens in (whole, whole + 1200):
        ids, mask = prompts(1, tokens - 8, ragged=False)
        want = dense_logits(model, ids, mask, 8)
        with torchsparsekv.patch(model, method, max_length=2048, **small) as handle:
            got = greedy_logits(model, ids, mask, 8, handle.make_cache(1))
        differ.append(float((got - want).abs().max()))
    assert differ[0] < 1e-4 < differ[1]


def test_partly_empty_pages_are_reported():
    """icecache's tree: what it attended to is a bound, and no row is said to be whole that need not be."""
    model, (ids, _) = tiny(max_position_embeddings=2048), prompts(1, 500, ragged=False)
    small = dict(budget=480, sink=16, window=16, skip_layers=0, max_length=1024)
    with torchsparsekv.patch(model, "icecache", **small) as handle:
        model.generate(ids, max_new_tokens=12, do_sample=False)
        report = handle.report()
    assert all(r.at_most for r in report.layers)
    with torchsparsekv.patch(model, "icecache", **{**small, "budget": 512}) as handle:
        model.generate(ids[:, :300], max_new_tokens=60, do_sample=False)  # its pages have room for more than there is
        assert {r.density for r in handle.report().layers} == {1.0}
    assert "<=1.000" in str(report)
    assert "density 1.000" not in str(report)
    assert "<=: partly empty pages count as full" in str(report)
