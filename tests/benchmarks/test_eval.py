"""The evaluation itself: it tells methods apart that differ, and those alike that do not; it refuses."""
import csv
import dataclasses
import json
from dataclasses import dataclass

import pytest
import torch
from byte_tokenizer import bytes_tokenizer
from cli import refused
from evaluating import evaluate, stand_in_for
from models import tiny
from standin import LENGTH, source
from transformers import DynamicCache

from torchsparsekv import host, method
from torchsparsekv._methods.quest import Quest
from torchsparsekv._methods.random import Random
from torchsparsekv_benchmarks.quality import ruler
from torchsparsekv_benchmarks.quality import run as quality
from torchsparsekv_benchmarks.quality.options import Options, settings
from torchsparsekv_benchmarks.quality.store import read
from torchsparsekv_benchmarks.recall_model import model as recall
from torchsparsekv_benchmarks.recall_model import tasks


@pytest.fixture(scope="module")
def model():
    return source()


@dataclass(frozen=True, kw_only=True)
class Drawn(Random):
    """A choice at random by torch's own generator, on its own in every layer."""

    def choose(self, s, q, a):
        live = super().choose(s, q, a).ids  # to know what may be chosen, and how many
        blocks = torch.arange(s.store.pool.shape[2] // self.block_size)
        can = (blocks >= self.sink // self.block_size) & (blocks * self.block_size < s.lengths.ring_begin)
        scores = torch.where(can, torch.rand(*live.shape[:2], len(blocks)), -torch.inf)
        return self.best(s, scores)


@dataclass(frozen=True, kw_only=True)
class PromptsOnly(Quest):
    """Quest that never takes into its index what is generated."""

    def step(self, s, q, leaving) -> None: ...


# ---------------------------------------------------------------- it tells methods apart


def test_the_dense_row_is_first_and_retrieval_keeps_what_a_draw_loses(model, tmp_path):
    table = evaluate(model, tmp_path, ("quest", "oracle", "random", "streaming"), probe=12)
    assert next(iter(table)) == "chain dense"
    assert table["chain dense"]["score"] == table["chain quest"]["score"] == table["chain oracle"]["score"] == 1
    for name in ("random", "streaming"):
        row = table[f"chain {name}"]
        assert row["score_high"] < 0.8
        assert row["loss_low"] > 0.2
        assert row["mass"] < 0.5
    for name in ("quest", "oracle"):
        row = table[f"chain {name}"]
        assert row["mass"] > 0.99
        assert row["error"] < 0.02
        assert 0.15 < row["density"] < 0.3
    few, many = table["chain quest"]["density"], table["chain streaming"]["density"]
    assert few <= many < few + 16 / LENGTH, "its window is larger by the budget; at most a block more than that"


def test_random_blocks_score_near_the_random_row(model, tmp_path, monkeypatch):
    stand_in_for(monkeypatch, "drawn", Drawn)
    torch.manual_seed(0)
    hyper = ("random.block_size=4", "drawn.block_size=4")
    table = evaluate(model, tmp_path, ("random", "drawn"), hyper=hyper, samples=40, probe=10)
    random, drawn = table["chain random"], table["chain drawn"]
    assert random["score_low"] < drawn["score_high"]
    assert drawn["score_low"] < random["score_high"]
    assert drawn["density"] == random["density"]
    assert max(random["score_high"], drawn["score_high"]) < 0.8


def test_an_index_that_is_never_updated_fails_on_what_was_generated(model, tmp_path, monkeypatch):
    """And only there: on what the prompt held it is as good as the method it was made from."""
    stand_in_for(monkeypatch, "prompts_only", PromptsOnly)
    hyper = ("quest.block_size=4", "prompts_only.block_size=4")
    table = evaluate(
        model, tmp_path, ("quest", "prompts_only"), tasks=("chain", "journal"), hyper=hyper, samples=3, budgets=(16,)
    )
    assert table["journal dense"]["score"] == table["journal quest"]["score"] == 1
    assert table["chain prompts_only"]["score"] == table["chain quest"]["score"] == 1
    assert table["journal prompts_only"]["score"] == 0


# ---------------------------------------------------------------- it is not fooled


def test_a_method_that_is_dense_in_secret_is_told_by_its_density(model, tmp_path, capsys):
    table = evaluate(model, tmp_path, ("pariskv", "quest"), hyper=(), samples=2)  # below pariskv's full_threshold
    assert table["chain pariskv"]["density"] == 1
    said = capsys.readouterr().out
    assert "!! pariskv 32 on chain at 256: density 1.00, nothing was left out" in said
    assert "!! quest" not in said


def test_a_patch_that_no_step_went_through_is_told(model, tmp_path, capsys, monkeypatch):
    generate = model.model.generate

    def with_a_cache_of_its_own(**how):
        return generate(**{**how, "past_key_values": DynamicCache()})

    monkeypatch.setattr(model.model, "generate", with_a_cache_of_its_own)
    with pytest.warns(UserWarning, match="this decode step is dense"):
        table = evaluate(model, tmp_path, ("quest",), samples=1)
    assert table["chain quest"]["density"] is None
    assert "!! quest 32 on chain at 256: no decode step ran through the patch" in capsys.readouterr().out


def test_every_method_gets_the_same_samples(model, tmp_path):
    evaluate(model, tmp_path, ("quest", "random"), samples=3)
    rows = [r for r in read(tmp_path / "eval.jsonl")[0] if "task" in r]
    told = {}
    for r in rows:
        told.setdefault(r["method"], []).append((r["index"], r["prompt_tokens"], r["depth"]))
    assert len(told) == 3
    assert len({tuple(x) for x in told.values()}) == 1


def test_a_batch_answers_as_its_samples_do_alone(model, tmp_path):
    """Of random blocks too: what is drawn does not depend on the batch."""
    methods = ("quest", "random", "pariskv")
    alone = evaluate(model, tmp_path / "1", methods, samples=6)
    batched = evaluate(model, tmp_path / "4", methods, samples=6, batch=4)
    assert batched["chain dense"]["score"] == alone["chain dense"]["score"]
    for name in ("chain quest", "chain random", "chain pariskv"):
        assert batched[name]["retrieval_rate"] == 1
        for what in ("score", "density", "mass", "error", "bytes_per_token"):
            assert batched[name][what] == pytest.approx(alone[name][what])
    outputs = [
        {(r["method"], r["index"]): r["output"] for r in read(tmp_path / n / "eval.jsonl")[0] if "task" in r}
        for n in ("1", "4")
    ]
    assert outputs[0] == outputs[1]


# ---------------------------------------------------------------- what it writes


def test_samples_and_table_are_written(model, tmp_path):
    table = evaluate(model, tmp_path, ("quest",), samples=2)
    head, *rows = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert head["benchmark"] == "eval"
    assert head["model"]["name"] == "stand-in"
    assert {"python", "torch", "torchsparsekv"} <= set(head["environment"])
    assert len(rows) == 4
    heads = next(r for r in rows if r["mass"])["mass"]["heads"]
    assert len(heads) == 3
    assert len(heads[0]) == 4
    assert heads[0] == pytest.approx([1] * 4, abs=1e-4), "the first layer is dense"
    with (tmp_path / "eval.csv").open() as f:
        told = list(csv.DictReader(f))
    assert [r["method"] for r in told] == ["dense", "quest"]
    assert float(told[1]["density"]) == pytest.approx(table["chain quest"]["density"])


def test_bytes_are_those_of_the_blocks_that_were_fetched(model, tmp_path):
    table = evaluate(model, tmp_path, ("oracle", "random", "full"), samples=2)
    token = 2 * 2 * 64 * 4  # kv heads, K and V, head_dim, fp32
    context = LENGTH - 2  # on average over the 3 decode steps
    assert table["chain full"]["bytes_per_token"] == 3 * context * token, "three layers, none of them sparse"
    assert table["chain random"]["bytes_per_token"] <= 2 * 32 * token
    assert table["chain random"]["bytes_per_token"] == pytest.approx(
        2 * 32 * token * (1 - table["chain random"]["hit_rate"])
    )
    assert table["chain oracle"]["bytes_per_token"] > 2 * (context - 50) * token / 2, "it reads every key"


# ---------------------------------------------------------------- models from a path


def test_any_model_from_a_path_gets_the_text_tasks(tmp_path):
    folder = tmp_path / "model"
    tokenizer = bytes_tokenizer()
    tiny(vocab_size=len(tokenizer), max_position_embeddings=4096).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    o = Options(
        model=str(folder), tasks=("vt", "niah_multikey_2"), lengths=(2600,), methods=("quest",), budgets=(64,),
        samples=1, probe=1, skip_layers=1, device="cpu",
    )  # fmt: skip
    table = quality.run(o, tmp_path / "eval.jsonl")
    assert [(r["task"], r["method"], r["score"]) for r in table] == [
        (task, method, 0) for method in ("dense", "quest") for task in o.tasks
    ], "random weights answer nothing"
    rows = [r for r in read(tmp_path / "eval.jsonl")[0] if "task" in r]
    assert all(2400 < r["prompt_tokens"] < 2600 and 0 <= r["depth"] <= 1 for r in rows)
    assert [r["density"] and round(r["density"], 2) for r in rows[2:]] == [0.07, 0.07]
    with pytest.raises(ValueError, match="unknown task single; ruler has: niah_multikey_2"):
        quality.run(dataclasses.replace(o, tasks=("single",)), tmp_path / "other.jsonl")


def test_the_recall_model_has_all_its_tasks(tmp_path, monkeypatch):
    """With random weights in three small layers: the shipped weights are judged elsewhere."""
    journal = pytest.importorskip("torchsparsekv_benchmarks.recall_model.journal")
    from torchsparsekv_benchmarks.recall_model import model

    small = model.build(num_hidden_layers=3, hidden_size=32, intermediate_size=32, head_dim=16)
    monkeypatch.setattr(model, "load", lambda *, device, dtype: (small.to(device, dtype), None))
    o = Options(
        lengths=(500,), methods=("quest",), budgets=(64,), samples=1, probe=1, device="cpu",
        tasks=("single", "multikey", "multivalue", "multiquery", "chain", "common", "journal"),
    )  # fmt: skip
    table = quality.run(o, tmp_path / "eval.jsonl")
    assert [r["task"] for r in table] == [*o.tasks, *o.tasks]
    rows = {r["task"]: r for r in read(tmp_path / "eval.jsonl")[0] if r.get("method") == "quest"}
    assert rows["journal"]["prompt_tokens"] + len(rows["journal"]["output"]) <= 500
    assert len(rows["journal"]["output"]) > 300
    assert journal.QUESTIONS > 1


@dataclass(frozen=True)
class Steered:
    """A sample that the model writes by sampling, kept to two words by its processor."""

    prompt: list[int]
    new_tokens: int = 40

    def processor(self, device):
        def keep(ids, scores):
            allowed = torch.zeros_like(scores, dtype=torch.bool)
            allowed[:, 7:9] = True
            return torch.where(allowed, 0.0, -torch.inf)

        return keep

    def score(self, output):
        return float(set(output) == {7, 8} and len(output) == 40)


def test_a_text_that_the_model_writes_is_sampled_alike_for_all(model, tmp_path):
    steered = dataclasses.replace(
        model, tasks=(), on_request=("written",), sample=lambda task, length, i: Steered(list(range(100, 150)))
    )
    table = evaluate(steered, tmp_path, ("quest",), tasks=("written",), samples=2)
    assert [r["score"] for r in table.values()] == [1, 1]
    rows = [r for r in read(tmp_path / "eval.jsonl")[0] if "task" in r]
    assert len({str(r["output"]) for r in rows}) == 1, "the processor leaves nothing to the model, the seed is the same"


# ---------------------------------------------------------------- what it runs


def test_all_methods_run_by_default():
    assert set(Options().methods) == set(method.all_methods()) - {"full"}, "which the dense model stands for"


def test_settings_of_a_run():
    o = Options(methods=("full", "streaming", "quest"), budgets=(32, 64), window=16, hyper=("quest.digest=float32",))
    made = settings(o)
    assert [s.label for s in made] == ["dense", "full", "streaming 32", "streaming 64", "quest 32", "quest 64"]
    assert made[0].patch is None
    assert [s.patch["window"] for s in made[2:]] == [48, 80, 16, 16]
    assert made[-1].patch["digest"] == "float32"
    assert all(s.patch["skip_layers"] == o.skip_layers for s in made[1:])
    small, large = (s.hyper for s in settings(Options(methods=("louiskv",), budgets=(64, 1024)))[1:])
    assert (small["cluster_size"], large["cluster_size"]) == (4, 16), "a default that depends on the budget"


def test_streaming_may_have_the_whole_length_in_its_window(model, tmp_path):
    """Window and budget together are above the length, of which neither is."""
    table = evaluate(model, tmp_path, ("streaming",), budgets=(LENGTH // 16 * 16,), samples=2, probe=0)
    assert table["chain streaming"]["density"] == 1.0
    assert table["chain streaming"]["score"] == table["chain dense"]["score"]


# ---------------------------------------------------------------- what it refuses

PARISKV_FEW = "pariskv.beta=0.1"
WRONG = {
    "no such method": (dict(methods=("qeust",)), "unknown method qeust; available: arkvale"),
    "no such task": (dict(tasks=("nope",)), "unknown task nope; stand-in has: chain, journal"),
    "no samples": (dict(samples=0), "samples must be at least 1, got 0"),
    "the same length twice": (dict(lengths=(256, 256)), "lengths must be one or more different values, got 256,256"),
    "no budget": (dict(budgets=()), "budgets must be one or more different values, got none"),
    "a budget of half a block": (dict(budgets=(33,)), "quest: budget must be a multiple of block_size 4, got 33"),
    "a budget above the length": (dict(budgets=(512,)), "a length of 256 tokens is below a budget of 512"),
    "longer than the model": (dict(lengths=(4096,)), "max_length 4096 is above the model's max_position_embeddings"),
    "not a hyper-parameter": (dict(hyper=("quest.nope=1",)), r"METHOD.NAME=VALUE .* got 'quest.nope=1'"),
    "not an assignment": (dict(hyper=("quest",)), r"METHOD.NAME=VALUE .* got 'quest'"),
    "a budget for one method": (dict(hyper=("quest.budget=64",)), "budget is the same for all methods"),
    "a value given twice": (dict(hyper=("quest.block_size=4",) * 2), "hyper sets quest.block_size twice"),
    "a value that is none": (dict(hyper=("quest.digest=int3",)), "digest must be one of .*, got 'int3'"),
    "no such dtype": (dict(dtype="int8"), "dtype must be one of auto, float32, float16, bfloat16, got 'int8'"),
    "no such place": (dict(offload="moon"), "offload must be one of auto, host, device, got 'moon'"),
    "too many dense layers": (dict(skip_layers=3), "skip_layers must be from 0 to 2, got 3"),
    "a size no cache can have": (
        dict(methods=("pariskv",), lengths=(1024,), budgets=(240,), hyper=("pariskv.full_threshold=0", PARISKV_FEW)),
        "budget 240 is above the .* candidates",
    ),
}


@pytest.mark.parametrize("what", WRONG)
def test_it_refuses_before_it_writes(model, tmp_path, what):
    options, says = WRONG[what]
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=says):
        evaluate(model, tmp_path, **{"methods": ("quest",), **options})
    assert not list(tmp_path.iterdir())
    assert not hasattr(model.model, "_torchsparsekv")


OF_RECALL = {
    "no such task": (dict(tasks=("nope",)), "unknown task nope; recall has: "),
    "a length without room for a sample": (dict(lengths=(64,)), "length is 64; a sample needs at least"),
    "longer than the model": (dict(lengths=(262144,)), "max_length 262144 is above the model's max_pos"),
    "too many dense layers": (dict(skip_layers=6), "skip_layers must be from 0 to 5, got 6"),
    "no such device": (dict(device="meta"), "runs on cpu and cuda, this model is on meta"),
}


@pytest.mark.parametrize("what", WRONG | OF_RECALL)
def test_it_refuses_before_weights_are_loaded(tmp_path, monkeypatch, what):
    def loaded(*_, **__):
        raise AssertionError("the weights were loaded")

    monkeypatch.setattr(recall, "load", loaded)
    options, says = (WRONG | OF_RECALL)[what]
    small = dict(methods=("quest",), tasks=("single",), hyper=("quest.block_size=4",))
    with pytest.raises((ValueError, TypeError, NotImplementedError), match=says):
        evaluate(None, tmp_path, **{**small, **options})
    assert not list(tmp_path.iterdir())


def test_file_of_another_benchmark_is_refused_before_weights_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(recall, "load", lambda *_, **__: pytest.fail("the weights were loaded"))
    (tmp_path / "eval.jsonl").write_text('{"benchmark": "eval-text"}\n')
    with pytest.raises(ValueError, match="is not a file of `torchsparsekv eval`: choose another file"):
        evaluate(None, tmp_path, ("quest",), tasks=("single",))


def test_cache_without_room_is_refused_before_weights_are_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(recall, "load", lambda *_, **__: pytest.fail("the weights were loaded"))
    monkeypatch.setattr(host, "available", lambda: 1024)
    with pytest.raises(MemoryError, match=r"a cache of 256 tokens x batch 1 needs .* host memory is free"):
        evaluate(None, tmp_path, ("quest",), tasks=("single",))


def test_memory_that_the_weights_took_counts(tmp_path, monkeypatch):
    """A cache that no longer fits is refused before the first sample."""
    loaded, load = [], recall.load
    monkeypatch.setattr(recall, "load", lambda *given, **how: loaded.append(1) or load(*given, **how))
    monkeypatch.setattr(host, "available", lambda: 1024 if loaded else 1 << 40)
    with pytest.raises(MemoryError, match="host memory is free"):
        evaluate(None, tmp_path, ("quest",), tasks=("single",))
    assert loaded
    assert not list(tmp_path.iterdir())


def test_quick_leaves_alone_what_was_given():
    o = quality.resolved(Options(quick=True, budgets=(32,)))
    assert o.budgets == (32,)
    assert o.samples < Options.samples
    assert dataclasses.replace(o, quick=False) == quality.resolved(dataclasses.replace(o, quick=False))


def test_quick_has_tasks_for_every_kind_of_model():
    """They are what its source has, and what fits the length."""
    assert set(quality.resolved(Options(quick=True)).tasks) <= set(tasks.TASKS)
    o = quality.resolved(Options(quick=True, model="a model from a path"))
    assert o.tasks
    assert set(o.tasks) <= set(ruler.TASKS)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--methods", "nope"], "eval: unknown method nope"),
        (["--lengths", "1k"], "eval: lengths takes int values with commas between them, got '1k'"),
        (["--out", "x.csv"], "eval: out must be a file of JSON lines"),
        (["--model", "./nothing-here"], "eval: there is no model at ./nothing-here"),
    ],
)
def test_the_command_refuses_with_2(args, says):
    assert says in refused("eval", *args)
