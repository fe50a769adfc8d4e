"""`bench shapes`: needles planted in random weights are found by what retrieves, and by nothing else."""
import dataclasses
import functools
import json

import pytest
import torch
from cli import refused
from families import EXPERTS, LINEAR, WINDOW
from timer import watch as on_a_cpu

import torchsparsekv
from torchsparsekv_benchmarks.speed import _common, _planted, shapes
from torchsparsekv_benchmarks.speed.shapes import ANSWERS, SHAPES

watch = on_a_cpu  # the fixture

CONTEXT, LENGTH = 400, 512
TINY = dict(
    num_hidden_layers=2, hidden_size=128, intermediate_size=64, num_attention_heads=4, head_dim=64, vocab_size=512,
    max_position_embeddings=4096,
)  # fmt: skip
KEPT = ("rope_parameters", "norm_topk_prob", "model_type")  # of the real shape
LESS = {
    "gemma3-12b": {**WINDOW, **TINY, "query_pre_attn_scalar": 64}, "gpt-oss-20b": {**EXPERTS, **WINDOW, **TINY},
    "qwen3-30b-a3b": {**EXPERTS, **TINY},
    "qwen3-next-12": {**EXPERTS, **LINEAR, **TINY, "shared_expert_intermediate_size": 32},
}  # fmt: skip


def less(shape: str) -> dict:
    """Of that type, but tiny: its second layer attends to everything."""
    fields = {**LESS[shape], **{k: v for k, v in SHAPES[shape].items() if k in KEPT}}
    fields |= {k: v[:2] for k, v in fields.items() if k == "layer_types"}
    return {k: v for k, v in fields.items() if k not in ("pad_token_id", "eos_token_id")}


@functools.cache
def planted(shape: str):
    """The model in fp32, and its chain."""
    model = _common.build(shape, torch.device("cpu"), {shape: less(shape)}).float()
    return model, _planted.plant(model, LENGTH, ANSWERS)


def found(shape: str, **generate) -> int:
    """Answers that are right, but for the first, which is of the prompt."""
    model, chain = planted(shape)
    ids = chain.prompt(CONTEXT)
    said = model.generate(input_ids=ids, max_new_tokens=ANSWERS, do_sample=False, **generate)[0, CONTEXT:].tolist()
    assert said[0] == chain.answers[0], "prompts are dense"
    return int(shapes.right(said, chain).split(" of ")[0])


def found_by(shape: str, method: str, **hyper) -> int:
    model, _ = planted(shape)
    with torchsparsekv.patch(model, method, max_length=LENGTH, sink=16, window=16, skip_layers=1, **hyper):
        return found(shape, prefill_chunk_size=128)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_unpatched_model_finds_all(shape):
    assert found(shape) == ANSWERS - 1


@pytest.mark.parametrize("method", ["quest", "pariskv"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_retrieves_finds_all(shape, method):
    less_than_all = {"full_threshold": 0} if method == "pariskv" else {}
    assert found_by(shape, method, budget=32, **less_than_all) == ANSWERS - 1


@pytest.mark.parametrize("shape", SHAPES)
def test_what_does_not_retrieve_finds_few(shape):
    """By chance at most: the needles are neither sinks nor in the window, and no other token helps."""
    assert found_by(shape, "streaming") <= 2
    assert found_by(shape, "random", budget=32) <= 3


def test_needles_are_spread_and_out_of_the_text_s_order():
    _, chain = planted("qwen3-30b-a3b")
    at, ids = chain.depths(1000), chain.prompt(1000)[0]
    assert sorted(at) == [50, 162, 275, 387, 500, 612, 725, 837, 950]
    assert at != sorted(at)
    assert tuple(ids[at].tolist()) == chain.needles
    assert not set(ids.tolist()) & {*chain.answers}
    assert [int((ids == x).sum()) for x in (*chain.needles, chain.asking[0])] == [1] * (ANSWERS + 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_real_shape_has_still_channels_for_its_needles(shape):
    """At full length, of which no model is made here; and the planted layer is one that methods run in."""
    from transformers import AutoConfig, AutoModelForCausalLM

    o, fields = shapes.Options(), dict(SHAPES[shape])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    assert _planted.last_full_layer(config) == config.num_hidden_layers - 1
    with torch.device("meta"):
        rotary = type(AutoModelForCausalLM.from_config(config).model.rotary_emb)
    still, _ = _planted.still_channels(rotary(config), config.head_dim, o.context + o.grows, "cpu")
    assert len(still) >= ANSWERS


def test_rows(watch, monkeypatch, tmp_path):
    """Floor, dense and method of each shape, all needles found, on a CPU; a second call measures nothing."""
    two = ("gpt-oss-20b", "qwen3-next-12")
    monkeypatch.setattr(shapes, "SHAPES", {name: less(name) for name in two})
    monkeypatch.setattr(shapes.decode, "FLOOR_CONTEXT", 200)
    o = shapes.Options(
        shapes=two, context=840, chunk=256, budget=32, sink=16, window=16, skip_layers=1, steps=4, offload="device",
    )  # fmt: skip
    out = tmp_path / "shapes.json"
    rows = shapes.run(o, out)["rows"]
    want = [(s, m, n) for s in two for m, n in (("full", 200), ("full", 840), ("quest", 840))]
    assert [(r["shape"], r["method"], r["context"]) for r in rows] == want
    assert {(r["found"], r["found_compiled"]) for r in rows} == {("8 of 8", "8 of 8")}
    for floor, dense, quest in (rows[:3], rows[3:]):
        assert floor["over_floor"] == 1
        assert dense["speedup"] == 1
        assert quest["speedup"] == pytest.approx(dense["tpot_ms"] / quest["tpot_ms"])
        assert quest["over_floor"] == pytest.approx(quest["tpot_ms"] / floor["tpot_ms"])
        assert 0 < quest["hit_rate"] <= 1
        assert quest["prompt_s"] > 0
    assert json.loads(out.read_text())["rows"] == rows
    alone = dataclasses.replace(o, shapes=two[:1], floor=False)
    assert [(r["context"], "over_floor" in r) for r in shapes.run(alone)["rows"]] == [(840, False)] * 2
    monkeypatch.setattr(shapes, "measure", None)
    assert shapes.run(o, out)["rows"] == rows


def test_tokens_are_fed_as_often_as_the_locality_says(watch):
    model, chain = planted("qwen3-30b-a3b")
    changes = lambda locality: int((shapes.Fed(model, None, chain, locality).bank.diff() != 0).sum())  # noqa: E731
    assert changes(1) == 0
    assert 10 < changes(0.95) < 45
    assert changes(0) > 480


def test_too_long_a_context_has_no_channels_for_needles():
    model = _common.build("tiny", torch.device("cpu"), {"tiny": less("qwen3-30b-a3b")})
    with pytest.raises(ValueError, match="9 needles over 10000000000 positions need as many still channels"):
        _planted.plant(model, 10**10, ANSWERS)


WRONG = {
    "--shapes=nope": "unknown shape 'nope'; available: gemma3-12b", "--shapes=": "shapes must be one or more",
    "--context=262144": "context must be from 5620 (else needles are sinks or in the window) to 261",
    "--steps=0": "steps must be at least 1", "--context=4096": "got 4096",
    "--chunk=1": "chunk must be at least 2, got 1", "--methods=nope": "unknown method",
    "--chunk=131071": "chunk 131071 leaves a last chunk of one token of 131072",
    "--chunk=255": "a last chunk of one token of 256",
    "--methods=full": "methods must not name full",
    "--experts=eager": "experts must be one of batched_mm, grouped_mm, got 'eager'",
    "--locality=2": "locality must be between 0 and 1", "--hyper=pariskv.beta=0.1": "hyper sets pariskv",
}  # fmt: skip


@pytest.mark.parametrize("arg", WRONG)
def test_wrong_options_are_refused(arg):
    assert WRONG[arg] in refused("bench", "shapes", arg)

