"""The board: prompts that are read once give every method the state that it would have read itself, and its answers."""
import dataclasses
import random

import pytest
import torch
from byte_tokenizer import bytes_tokenizer
from cli import refused
from models import tiny
from torch._inductor.utils import run_and_get_code

import torchsparsekv
from torchsparsekv.method import all_methods
from torchsparsekv.ops.store.rows import PACKED, as_numbers
from torchsparsekv_benchmarks import _traces
from torchsparsekv_benchmarks.quality import board, replay, suite, trace
from torchsparsekv_benchmarks.quality.ruler import TASKS, Ruler
from torchsparsekv_benchmarks.quality.sources import Source
from torchsparsekv_benchmarks.quality.store import read
from torchsparsekv_benchmarks.speed import _replay
from torchsparsekv_benchmarks.speed._replay import replay_in_cache

CHAT = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}[assistant]"


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 97) for _ in range(n)] for n in lengths]


def how(method: str) -> dict:
    return dict(method=method, max_length=512, budget=64, sink=32, window=64, skip_layers=1)


@pytest.mark.parametrize("name", [*sorted(all_methods()), "quest-int8"])
def test_replayed_prompts_leave_the_state_of_prompts_that_were_read(name, monkeypatch):
    """In dense layers in 8 bits too, which store rotated keys: their rounding moves the numbers of later layers."""
    method, _, packed = name.partition("-")
    rounded = dict(atol=1e-4, rtol=0) if packed else {}
    monkeypatch.setattr(replay, "QUERIES", 200)
    model, rows = tiny(num_hidden_layers=3, head_dim=64 if packed else 16), prompts([300, 257])
    ids, pad = replay.padded(rows, model.device)
    recording = replay.record(model, ids, pad, methods=[method])
    mask = (torch.arange(300) >= pad[:, None]).long()
    with torchsparsekv.patch(model, **how(method), pool_dtype=packed or None) as handle, torch.no_grad():
        read_itself = handle.make_cache(2, 512)
        positions = (torch.arange(300) - pad[:, None]).clamp_min(0)
        logits = model(ids, attention_mask=mask, position_ids=positions, past_key_values=read_itself).logits[:, -1]
        replayed = replay.filled(handle, recording, 512)
        torch.testing.assert_close(recording.logits[:, -1], logits)
        step = [replay.stepper(model, cache) for cache in (read_itself, replayed)]
        said = [replay.answers(s, logits, recording.lengths, 24) for s in step]
        assert torch.equal(*said)
        for i, layer in replayed.stored.items():
            for (buffer, mine), (_, its) in zip(layer.state.tensors(), read_itself.stored[i].state.tensors()):
                if mine is layer.state.store.pool and mine.dtype is PACKED:  # a number may be rounded to the next one
                    numbers = [as_numbers(x, torch.float32) for x in (mine, its)]
                    torch.testing.assert_close(*numbers, atol=float(numbers[0].abs().max()) / 100, rtol=0)
                    continue
                assert buffer.counts or torch.equal(mine, its) or mine.is_floating_point(), (i, buffer)
                if mine.is_floating_point() and mine.dtype.itemsize > 1:
                    torch.testing.assert_close(mine, its, **rounded)


@pytest.fixture(scope="module")
@torch.no_grad()
def source() -> Source:
    tokenizer = bytes_tokenizer(chat=CHAT)
    model = tiny(num_hidden_layers=3, vocab_size=260, max_position_embeddings=8192)
    for p in model.parameters():
        p.mul_(3)  # so that a wrong token or position changes what the model says next
    made = Ruler(tokenizer, suite.TASKS)
    return Source("tiny", "ruler", model, TASKS, made.sample, tuple(suite.TASKS), tokenizer)


def options(**given) -> board.Options:
    small = dict(model="tiny", lengths=(3000,), methods=("quest", "streaming"), budgets=(64,), samples=2, batch=2)
    return board.Options(**{**small, **given})


def generated(model, prompt: list[int], tokens: int) -> list[int]:
    ids = torch.tensor([prompt])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False)
    return out[0, len(prompt) :].tolist()


def test_answers_are_those_of_the_stock_generate(source, tmp_path):
    o = options(tasks=("niah_single_2",), methods=("quest",))
    board.run(o, tmp_path / "b.jsonl", source)
    rows = [r for r in read(tmp_path / "b.jsonl")[0] if r.get("method") == "quest"]
    assert len(rows) == 2
    for r in rows:
        prompt = source.sample("niah_single_2", 3000, r["index"]).prompt
        with torchsparsekv.patch(source.model, "quest", max_length=3000, **r["patch"]):
            told = generated(source.model, prompt, 128)
        assert told[: len(r["output"])] == r["output"]


def test_turns_go_on_over_one_cache(source, tmp_path):
    """Each answer equals that of the dense model to the whole conversation as one prompt. A turn begins with the last
    token of the answer before, which no step has read."""
    o = options(tasks=(board.TURNS,), methods=("quest",), samples=1, batch=1)
    read_ids: list[list[int]] = []
    hook = source.model.get_input_embeddings().register_forward_hook(lambda m, x, y: read_ids.append(x[0][0].tolist()))
    board.run(o, tmp_path / "b.jsonl", source)
    hook.remove()
    full = next(r for r in read(tmp_path / "b.jsonl")[0] if r.get("method") == "full")
    group = board.Prompts(source, o).group(board.TURNS, 3000, [0])
    said, (more,) = list(group.prompts[0]), group.more
    for turn in range(suite.TURNS):
        told = generated(source.model, said, group.new_tokens)
        assert told == full["output"][turn]
        said += told + (more[turn] if turn < len(more) else [])
    prompts_of_full = [x for x in read_ids if len(x) > 1][: suite.TURNS]
    assert prompts_of_full == [group.prompts[0], *([x[-1], *m] for x, m in zip(full["output"], more))]


def test_the_mean_over_tasks_is_paired_with_full(source, tmp_path):
    found = board.run(options(tasks=("vt", "niah_single_1")), tmp_path / "b.jsonl", source)
    mean = {r["method"]: r for r in found if r["task"] == board.MEAN}
    assert set(mean) == {"full", "quest", "streaming"}
    assert mean["quest"]["samples"] == 4
    assert {r["task"] for r in found} == {"vt", "niah_single_1", board.MEAN}
    before = (tmp_path / "b.jsonl").read_text()
    assert board.run(options(tasks=("vt", "niah_single_1")), tmp_path / "b.jsonl", source) == found
    assert (tmp_path / "b.jsonl").read_text() == before, "what is there is not measured again"


def test_what_cannot_be_is_refused_in_a_line(source, tmp_path):
    out = tmp_path / "b.jsonl"
    for given, said in (
        (dict(tasks=("nothing",)), "unknown task nothing"),
        (dict(lengths=(1 << 20,)), "--yarn"),
        (dict(budgets=(8000,)), "below a budget of 8000"),
        (dict(yarn=0.5), "yarn must be from 1"),
    ):
        with pytest.raises(ValueError, match=said):
            board.run(options(**given), out, source)
    assert "not the recall model" in refused("board", "--model", "recall")


# ---------------------------------------------------------------- traces


def traced(tmp_path, monkeypatch, source, method: str):
    text = tmp_path / "text.txt"
    text.write_text("".join(chr(97 + random.Random(i).randrange(26)) for i in range(3000)))
    monkeypatch.setattr(trace, "pretrained", lambda *a: (source.tokenizer, source.model))
    o = trace.Options(model="tiny", text=str(text), length=1024, steps=6, methods=(method,), layers=2, window=64)
    return o, trace.run(dataclasses.replace(o, skip_layers=1), tmp_path / "t.npz")


@pytest.mark.parametrize("method", ["quest=64", "pariskv=64"])
def test_a_trace_is_what_every_step_chose(method, tmp_path, monkeypatch, source):
    _, found = traced(tmp_path, monkeypatch, source, method)
    name, budget = method.split("=")
    ids = _traces.read(tmp_path / "t.npz", name, int(budget))
    assert torch.equal(ids, torch.from_numpy(found[method]))
    kv_heads = source.model.config.num_key_value_heads
    assert ids.shape[:2] == (2 * kv_heads, 6)
    assert ((ids.diff(dim=-1) > 0) | (ids[..., 1:] < 0)).all(), "ascending, none twice, -1 first"
    assert int((ids >= 0).sum(-1).min()) == int(budget) // (16 if name == "quest" else 1)
    with pytest.raises(ValueError, match="has no trace of quest=32; it has: "):
        _traces.read(tmp_path / "t.npz", "quest", 32)


def test_layers_attend_to_what_a_trace_has(tmp_path, monkeypatch, source):
    _, _ = traced(tmp_path, monkeypatch, source, "quest=64")
    ids = _traces.read(tmp_path / "t.npz", "quest", 64)
    with torchsparsekv.patch(source.model, "quest", max_length=1100, budget=64, sink=64, window=64, skip_layers=1) as h:
        cache = h.make_cache(2)
        prompt = torch.randint(1, 200, (2, 1024))
        with torch.no_grad():
            source.model(prompt, past_key_values=cache)
            with pytest.raises(ValueError, match="the trace has 3 blocks a step, quest selects 4 here"):
                replay_in_cache(cache, ids[..., :3])
            next_blocks = replay_in_cache(cache, ids)
            seen: list = []
            for i in (1, 2):
                cache.stored[i].state.on_step = lambda s, q, a, selection, out: seen.append(selection.ids.clone())
            for _ in range(8):
                next_blocks()
                source.model(prompt[:, :1], past_key_values=cache)
    for t in range(8):
        layers = torch.cat(seen[2 * t : 2 * t + 2], 1)
        for row, at in enumerate((t % 6, (t + 3) % 6)):
            assert torch.equal(layers[row], ids[:, at]), "layers take the heads in turn, rows begin at different steps"


def test_a_compiled_step_still_selects_before_it_replays():
    """In compiled code the selection is there, no kernel follows it, and nothing is copied."""

    def step(scores, blocks, hot):
        chosen = scores.argsort()
        _replay.instead_of(chosen, blocks)
        return hot.copy_(blocks[1])

    blocks, hot = torch.arange(12).view(3, 4), torch.zeros(4, dtype=torch.int64)
    found, (code,) = run_and_get_code(torch.compile(step, fullgraph=True), torch.rand(4), blocks, hot)
    assert found.tolist() == hot.tolist() == [4, 5, 6, 7]
    calls = code[code.index("def call(") : code.index("def benchmark_compiled_module")]
    assert calls.index("sort") < calls.index("instead_of")
    assert "clone" not in calls
    assert calls.count("cpp_fused") == 1


# ---------------------------------------------------------------- what a recording keeps


def test_replay_without_the_last_columns_equals_the_shorter_prompt(monkeypatch):
    """The queries before the columns that are left out are kept, however many columns that are."""
    monkeypatch.setattr(replay, "QUERIES", 40)
    model = tiny(num_hidden_layers=3)
    ids = torch.tensor(prompts([300]))
    recording = replay.record(model, ids, torch.zeros(1, dtype=torch.int32), most_left_out=100)
    shorter = replay.record(model, ids[:, :200], torch.zeros(1, dtype=torch.int32))
    with torchsparsekv.patch(model, **how("snapkv"), observe=32) as handle:
        caches = [replay.filled(handle, r, 512, 200) for r in (recording, shorter)]
        for i in (1, 2):
            queries = [c.stored[i].state.observed.queries for c in caches]
            torch.testing.assert_close(*queries)
            assert queries[0].abs().amin() > 0, "no query is a zero"
        steps = [replay.stepper(model, c) for c in caches]
        logits = torch.nn.functional.one_hot(ids[:, 200], model.config.vocab_size).float()
        assert torch.equal(*(replay.answers(s, logits, torch.tensor([200]), 20) for s in steps))


def test_replay_refuses_what_its_recording_does_not_keep(monkeypatch):
    model = tiny(num_hidden_layers=3)
    ids = torch.tensor(prompts([300]))
    recording = replay.record(model, ids, torch.zeros(1, dtype=torch.int32), most_left_out=9)
    with torchsparsekv.patch(model, **how("quest")) as handle:
        with pytest.raises(ValueError, match=r"a replay of 290 of 300 columns needs record\(most_left_out=10\)"):
            replay.filled(handle, recording, 512, 290)
        replay.filled(handle, recording, 512, 291)
    monkeypatch.setattr(replay, "QUERIES", 31)
    said = pytest.raises(ValueError, match="snapkv observes 32 queries, a recording keeps the last 31")
    with torchsparsekv.patch(model, **how("snapkv"), observe=32) as handle, said:
        replay.filled(handle, recording, 512)
    said = pytest.raises(ValueError, match=r"h2o reads all queries of a prompt: record\(methods=\['h2o'\]\)")
    with torchsparsekv.patch(model, **how("h2o")) as handle, said:
        replay.filled(handle, recording, 512)
