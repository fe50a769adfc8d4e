"""The handle restores everything, affects one model only, and reports true numbers."""
import copy
import gc
import importlib.util
import json
import re

import pytest
import torch
from cases import METHODS, hyper_of
from models import prompts, tiny
from snapshot import snapshot
from world import DEVICE

import torchsparsekv
from torchsparsekv import host
from torchsparsekv.method import check_device, make_method
from torchsparsekv.patches import _memory

SMALL = dict(max_length=64, budget=8, sink=4, window=6, skip_layers=1, block_size=4)
IDS, MASK = prompts(2, 40)


def generate(model, steps=8):
    return model.generate(input_ids=IDS, attention_mask=MASK, max_new_tokens=steps, do_sample=False)


def patch(model, method="quest", **changes):
    return torchsparsekv.patch(model, method, **{**SMALL, **changes})


@torch.no_grad()
def run(model, cache, ids, mask, steps):
    model(ids, attention_mask=mask, past_key_values=cache)
    for t in range(steps):
        model(ids[:, t : t + 1].contiguous(), past_key_values=cache)


# ---------------------------------------------------------------- on, off


def test_unpatch_restores_everything():
    model = tiny()
    before, words = snapshot(model), generate(model)
    handle = patch(model)
    during = snapshot(model)
    for part in ("attributes", "hooks", "implementation", "config", "methods"):
        assert during[part] != before[part], f"the snapshot does not see {part}: this test could not fail"
    generate(model)
    handle.unpatch()
    assert snapshot(model) == before
    assert torch.equal(generate(model), words)


def test_patching_again_after_unpatch():
    model = tiny()
    patch(model).unpatch()
    with patch(model, "arkvale") as handle:
        generate(model)
        assert {r.method for r in handle.report().layers} == {"full", "arkvale"}


def test_user_hooks_survive_unpatch():
    model = tiny()
    attention = model.model.layers[1].self_attn
    seen = []
    ours = attention.register_forward_pre_hook(lambda module, args: seen.append("early"))
    handle = patch(model)
    later = attention.register_forward_pre_hook(lambda module, args: seen.append("late"))
    handle.unpatch()
    model(IDS)
    assert seen == ["early", "late"]
    ours.remove(), later.remove()


def test_context_manager_unpatches_after_an_error():
    model = tiny()
    before = snapshot(model)
    with pytest.raises(KeyError), patch(model) as handle:
        {False: "not active in its own block"}[handle.active]  # a KeyError if it is, as it should be
    assert not handle.active
    with pytest.raises(RuntimeError, match="this handle is unpatched"), handle:
        pass
    assert snapshot(model) == before
    handle.unpatch()  # once more does no harm
    assert snapshot(model) == before


def test_repr_says_what_is_active():
    model = tiny()
    with patch(model) as handle:
        parts = "active on LlamaForCausalLM", "Quest(", "budget=8", "max_length=64", "skip_layers=1", "offload='auto'"
        for part in parts:
            assert part in repr(handle)
    assert "unpatched" in repr(handle)
    assert "active" not in repr(handle)
    with patch(model, max_length=None) as handle:
        assert "max_length=grows to 512" in repr(handle)


def test_cache_without_a_length_reports_its_memory(recwarn):
    with patch(tiny(), max_length=None) as handle:
        with pytest.warns(UserWarning, match=r"has room for 512 tokens, .*: 0.0 MiB of host memory") as told:
            cache = handle.make_cache(3)
        mib = handle.report().device_bytes / 2**20
        assert cache.max_length == 512
        assert f" {mib:.1f} MiB on the device" in str(told[0].message)
        assert told[0].filename == __file__
        handle.make_cache(3, 64)
    with patch(tiny()) as handle:
        handle.make_cache(3)
    assert not [w for w in recwarn if "has room for" in str(w.message)]


def test_only_the_patched_instance_changes():
    model, other = tiny(), tiny()
    before, words = snapshot(other), generate(other)
    with patch(model):
        assert snapshot(other) == before
        assert torch.equal(generate(other), words)
        assert not torch.equal(generate(model, 16), generate(other, 16)), "the patch changes nothing: budget too large"


@pytest.mark.parametrize("first", ["original", "copy"])
def test_deepcopy_is_patched_independently(first):
    model = tiny()
    before = snapshot(model)
    handle = patch(model)
    generate(model)  # there is a cache to recycle, which the copy must not share
    twin = copy.deepcopy(model)
    own = twin._torchsparsekv
    assert own is not handle
    assert own.model is twin
    assert own.active
    words = generate(model, 16)
    assert torch.equal(generate(twin, 16), words)
    assert handle.report().layers == own.report().layers
    off, on = (handle, own) if first == "original" else (own, handle)
    off.unpatch()
    assert (off.active, on.active) == (False, True)
    assert torch.equal(generate(on.model, 16), words)
    assert not torch.equal(generate(off.model, 16), words)
    on.unpatch()
    assert snapshot(model) == before
    assert snapshot(twin)["attributes"] == before["attributes"]
    assert not any(any(h.values()) for h in snapshot(twin)["hooks"].values()), "a hook stayed on the copy"


# ---------------------------------------------------------------- report


def frontier(length):
    """Tokens below it have left the ring."""
    return SMALL["sink"] + max(0, (length - SMALL["sink"] - SMALL["window"]) // 4) * 4


def expected(lengths, steps, heads=2):
    """Counts of one quest layer by hand: per (row, head) and step the context, what is near, and the blocks chosen."""
    context = near = selected = 0
    for n in lengths:
        for now in range(n + 1, n + steps + 1):
            context += now * heads
            near += (min(now, SMALL["sink"]) + now - max(frontier(now), SMALL["sink"])) * heads
            retrievable = (frontier(now) - SMALL["sink"]) // SMALL["block_size"]
            selected += min(SMALL["budget"] // SMALL["block_size"], retrievable) * heads
    return context, near, selected


@pytest.mark.parametrize(("length", "steps"), [(3, 2), (12, 3), (40, 9)])
def test_report_counts_exactly(length, steps):
    """Two rows, of which the first is padded by 5 where the prompt is long enough."""
    model = tiny()
    ids, mask = prompts(2, length, ragged=length > 5)
    with patch(model) as handle:
        cache = handle.make_cache(2)
        run(model, cache, ids, mask, steps)
        report = handle.report()
    assert [r.layer for r in report.layers] == [0, 1, 2]
    assert [r.method for r in report.layers] == ["full", "quest", "quest"]
    lengths = mask.sum(1).tolist()
    context, near, selected = expected(lengths, steps)
    calls = 2 * 2 * steps  # rows, kv heads, steps
    for r in report.layers:
        assert r.steps == steps
        assert r.context_per_step == pytest.approx(context / calls)
    dense, sparse = report.layers[0], report.layers[1:]
    assert (dense.density, dense.blocks_selected, dense.blocks_fetched, dense.host_bytes_read) == (1.0, 0, 0, 0)
    for r in sparse:
        assert r.blocks_selected == selected
        assert r.attended_per_step == pytest.approx((near + 4 * selected) / calls)
        assert r.density == pytest.approx((near + 4 * selected) / context)
        assert (r.blocks_fetched > 0) == (selected > 0)
        assert r.blocks_fetched <= r.blocks_selected
        assert r.host_bytes_read == 0, "on this device the pool is not host memory"
        assert r.pool_bytes_read == r.blocks_fetched * 4 * 2 * 16 * 4  # tokens, K and V, head_dim, fp32


def test_report_equals_counts_by_hand():
    """The same for one number a reader can check: 40 tokens, budget 8 in pages of 4, one step."""
    model = tiny()
    with patch(model) as handle:
        cache = handle.make_cache(1)
        run(model, cache, *prompts(1, 40), 1)
        r = handle.report().layers[1]
    # 41 tokens; 4 sinks; 31 beyond sinks and window are 7 whole pages, so 32 have left the ring and 9 have not
    assert (r.steps, r.context_per_step, r.attended_per_step) == (1, 41, 4 + 9 + 8)
    assert r.density == pytest.approx(21 / 41)
    assert r.blocks_selected == 2 * 2  # two pages in each of two kv heads
    assert r.blocks_fetched == 4, "nothing can have been in the hot buffer at the first step"


@pytest.mark.gpu
def test_report_counts_bytes_from_the_host():
    model = tiny()
    with patch(model, offload="host") as handle:
        cache = handle.make_cache(2)
        run(model, cache, IDS, MASK, 9)
        report = handle.report()
    page = 4 * 2 * 16 * 4  # tokens, K and V, head_dim, fp32
    assert all(r.host_bytes_read == r.blocks_fetched * page > 0 for r in report.layers[1:])
    assert report.layers[0].host_bytes_read == 0


def test_cache_hits_are_not_fetched_again():
    """The budget covers every page there is: each is fetched once, however many steps ask for it."""
    model = tiny()
    with patch(model, budget=40) as handle:
        cache = handle.make_cache(1)
        run(model, cache, *prompts(1, 40), 6)
        r = handle.report().layers[1]
    pages = (frontier(46) - 4) // 4
    assert r.blocks_fetched == pages * 2
    assert r.blocks_selected == sum((frontier(n) - 4) // 4 for n in range(41, 47)) * 2
    assert r.hit_rate == pytest.approx(1 - r.blocks_fetched / r.blocks_selected)


def test_report_restarts_at_every_generate():
    model = tiny()
    with patch(model) as handle:
        for steps in (9, 5):
            generate(model, steps)
            assert {r.steps for r in handle.report().layers} == {steps - 1}  # the prompt gives the first token


def test_report_prints_a_table():
    model = tiny()
    with patch(model) as handle:
        generate(model)
        lines = str(handle.report()).splitlines()
    assert lines[0] == "torchsparsekv: quest"
    assert lines[1].split()[:6] == ["layer", "method", "steps", "context", "attended", "density"]
    assert lines[1].split()[6:] == ["selected", "fetched", "hits", "from", "host"]
    assert [line.split()[:3] for line in lines[2:5]] == [["0", "full", "7"], ["1", "quest", "7"], ["2", "quest", "7"]]
    assert len({len(line) for line in lines[1:5]}) == 1, "columns do not line up"
    assert re.fullmatch(r"cache memory: \S+ \S+ host, \S+ \S+ device", lines[5])
    assert len(lines) == 6, "a warning without a reason"


def test_report_warns_when_nothing_ran():
    model = tiny()
    with patch(model) as handle:
        assert "!! NOTHING TO REPORT ON" in str(handle.report())
        cache = handle.make_cache(2)
        model(IDS, attention_mask=MASK)  # no cache of ours
        assert "!! NO DECODE STEP RAN" in str(handle.report())
        assert "the model was not called, or with another cache" in str(handle.report())
        run(model, cache, IDS, MASK, 0)  # a prompt alone is no decode step
        assert "!! NO DECODE STEP RAN THROUGH THE PATCH: only a prompt did" in str(handle.report())
        run(model, cache, IDS[:, :1], None, 1)
        assert "!!" not in str(handle.report())
        del cache
        gc.collect()
        assert "!! NOTHING TO REPORT ON" in str(handle.report()), "a cache that is gone ran steps, for all we know"


def test_report_names_layers_that_never_ran():
    model = tiny()
    with patch(model) as handle:
        cache = handle.make_cache(2)
        run(model, cache, IDS, MASK, 1)
        cache.layers[2].state.stats.counts.zero_()
        assert "!! LAYERS NEVER REACHED: [2]" in str(handle.report())


@pytest.mark.parametrize("steps", [0, 3])
def test_report_as_dict_is_json_serialisable(steps):
    model = tiny()
    with patch(model) as handle:
        cache = handle.make_cache(2)
        run(model, cache, IDS, MASK, steps)
        report = handle.report()
    again = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert [r["steps"] for r in again["layers"]] == [steps] * 3
    assert again["method"] == "quest"
    assert bool(again["warnings"]) == (steps == 0)


# ---------------------------------------------------------------- memory


def tensors(cache):
    """Every tensor of the cache, found by looking and not by asking it."""
    holders = [layer.state for layer in cache.layers] + list(cache.row_lengths.values())
    values = [v for h in holders for v in vars(h).values()]
    held = [x for v in values for x in (v if isinstance(v, tuple) else (v,))]
    return [t for t in held if isinstance(t, torch.Tensor)]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("offload", ["device", "host"])
def test_memory_is_the_sum_of_the_tensors(method, offload):
    model = tiny()
    with torchsparsekv.patch(model, method, **hyper_of(method, **{**SMALL, "sink": 8}), offload=offload) as handle:
        cache = handle.make_cache(3)
        report = handle.report()
        found = tensors(cache)
        promised = sum(handle.planned.bytes(3, 64, **cache.place._asdict()))
        lengths = sum(x.nbytes for x in cache.row_lengths.values())
    assert len({t.data_ptr() for t in found if t.numel()}) == len([t for t in found if t.numel()]), "counted twice"
    assert report.host_bytes + report.device_bytes == sum(t.nbytes for t in found) == promised + lengths
    pools = sum(layer.state.store.pool.nbytes for layer in cache.layers if layer.state.pool_on_host)
    assert report.host_bytes == pools
    assert (pools > 0) == (offload == "host" and DEVICE.type == "cuda")


@pytest.mark.parametrize("when", ["patch", "make_cache", "generate"])
def test_short_host_memory_is_refused_before_allocating(monkeypatch, when):
    model = tiny()
    before = snapshot(model)
    grows = dict(max_length=None) if when != "patch" else {}
    monkeypatch.setattr(host, "available", lambda: 1000)
    monkeypatch.setattr(host, "pinned", lambda *a: pytest.fail("allocated"))
    monkeypatch.setattr("torchsparsekv.patches._handle.SparseCache", lambda *a, **k: pytest.fail("allocated"))
    says = r"a cache of \d+ tokens x batch \d needs .* GiB host and .* GiB device.*host memory is free"
    with pytest.raises(MemoryError, match=says), patch(model, offload="host", **grows) as handle:
        handle.make_cache(2, 64) if when == "make_cache" else generate(model)
    assert snapshot(model) == before


def test_cuda_without_triton_is_refused(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "triton" else find(name, *a))
    with pytest.raises(RuntimeError, match="the CUDA kernels need Triton: pip install triton"):
        check_device(torch.device("cuda"), make_method("quest"))
    check_device(torch.device("cpu"), make_method("quest"))  # the references need none


# ---------------------------------------------------------------- methods()


def test_methods_lists_every_hyper_parameter_and_default():
    found = torchsparsekv.methods()
    assert list(found) == sorted(METHODS)
    defaults = {name: {field: h.default for field, h in hyper.items()} for name, hyper in found.items()}
    common = dict(budget=1024, sink=64, window=256, hot_budgets="auto", prefetch_async=None, estimate_rest="auto")
    assert defaults["quest"] == {**common, "digest": "float8", "group": "max", "block_size": 16}
    assert defaults["arkvale"] == {
        **common, "digest": "float8", "group": "mean", "block_size": 32, "volume": "cuboid-mean"
    }  # fmt: skip
    assert defaults["streaming"] == {**common, "block_size": 16}
    assert defaults["oracle"] == {**common, "block_size": 1}
    assert defaults["full"] == common
    del found["quest"]["budget"]
    assert "budget" in torchsparsekv.methods()["quest"], "the caller was given our own table"


def test_methods_say_the_type_and_meaning_of_every_hyper_parameter():
    for name, hyper in torchsparsekv.methods().items():
        for field, h in hyper.items():
            assert h.meaning.endswith("."), f"{name}.{field}"
            assert h.type_name in repr(h)
            assert repr(h.default) in repr(h)
    quest, pariskv = (torchsparsekv.methods()[name]["budget"] for name in ("quest", "pariskv"))
    assert quest.type is int
    assert (quest.default, pariskv.default) == (1024, 1024)
    assert quest.meaning == pariskv.meaning, "a default alone was overridden"
    assert str(quest) == f"<int = 1024: {quest.meaning}>"
    assert torchsparsekv.methods()["icecache"]["r"].type_name == "float | None"


def test_help_of_patch_says_how_to_list_hyper_parameters():
    assert "torchsparsekv.methods()" in torchsparsekv.patch.__doc__


# ---------------------------------------------------------------- old names of hyper-parameters


def test_an_old_name_is_taken_with_one_warning():
    with pytest.warns(FutureWarning, match="fetch_late is now prefetch_async") as seen:
        handle = patch(tiny(), "quest", fetch_late=0.5, block_size=4, budget=8, sink=4, window=8)
    assert len([w for w in seen if "is now" in str(w.message)]) == 1
    with handle:
        assert handle.planned.method.prefetch_async == 0.5


def test_an_old_name_is_taken_in_an_entry_of_layers():
    small = dict(block_size=4, budget=8, sink=4, window=8)
    with pytest.warns(FutureWarning, match="fetch_late is now prefetch_async") as seen:
        handle = patch(tiny(), "quest", **small, prefetch_async=0.5, layers={1: {"fetch_late": 0.75}})
    assert len([w for w in seen if "is now" in str(w.message)]) == 1
    with handle:
        assert handle.planned.methods[1].prefetch_async == 0.75
        assert handle.planned.method.prefetch_async == 0.5


def test_old_and_new_name_together_are_refused():
    model = tiny()
    with pytest.raises(TypeError, match="fetch_late is the old name of prefetch_async: give prefetch_async alone"):
        patch(model, "quest", fetch_late=0.5, prefetch_async=0.5)
    with pytest.raises(TypeError, match=r"layers\[1\]: fetch_late is the old name of prefetch_async"):
        patch(model, "quest", layers={1: {"fetch_late": 0.5, "prefetch_async": 0.5}})
    assert not hasattr(model, "_torchsparsekv")


def test_an_old_name_that_the_method_does_not_have_is_refused():
    with pytest.warns(FutureWarning), pytest.raises(TypeError, match="no hyper-parameter selecting_layers"):
        patch(tiny(), "quest", choosers=(1,))


def test_auto_offload_uses_half_of_the_free_device_memory(monkeypatch):
    with patch(tiny(), offload="auto") as handle:
        needed = handle.planned.bytes(1, 64, pool_on_host=False)[1]
        handle.planned.device = torch.device("cuda")
        for free, on_host in ((2 * needed, False), (2 * needed - 1, True)):
            monkeypatch.setattr(_memory, "free_device_bytes", lambda device, free=free: free)
            assert _memory.pool_on_host(handle.planned, "auto", 1, 64) == on_host
