"""estimate_rest: each step equals its definition, computed from the raw keys and values in fp64."""
import itertools
import re
from collections.abc import Callable

import pytest
import torch
from definition import check_steps, tensors
from hypothesis import given
from hypothesis import strategies as st
from layer import Layer, small
from models import dense_logits, greedy_logits, prompts, tiny
from torch._inductor.utils import run_and_get_code

import torchsparsekv
from torchsparsekv.method import Method, Traits, all_methods, make_method
from torchsparsekv.ops._machinery.chain import use_kernels
from torchsparsekv.ops.store.rows import keys_of
from torchsparsekv.ops.store.views import Attention
from torchsparsekv.state import Geometry

METHODS = {
    "quest": dict(budget=8), "arkvale": dict(budget=8), "pagemean": dict(budget=8), "random": dict(budget=8),
    "oracle": dict(budget=6, block_size=1),
    "omnikv": dict(budget=6),
    "pariskv": dict(budget=6, update_interval=5, full_threshold=0),
    "pqcache": dict(budget=6, m=4, bits=3, rounds=3),
    "shadowkv": dict(budget=8, outliers=1),
    "icecache": dict(budget=8, page_size=4, r=0.25, least_view=8),
    "prkv": dict(budget=8, static_ratio=0),
    "louiskv": dict(budget=8, cluster_size=4, stretch=16, segment_min=2, segment_max=4, tau=0.1),
    "clusterkv": dict(budget=8, cluster_size=4, every=10, new_clusters=2, rounds=2),
}  # fmt: skip
INTERPRETED = ("quest", "pariskv", "icecache")  # pages, tokens, and pages that move
REFUSED = {"full", "h2o", "magicpig", "prkv_static", "raas", "retroinfer", "snapkv", "streaming"}
SOFT, SINKS = 3.0, torch.tensor([0.5, -1.0, 2.0, 0.0])


def held_rows(s, b: int, h: int, fill: torch.Tensor | None) -> list[int]:
    """Pool rows of the tokens that have left the ring."""
    if fill is None:
        return list(range(s.lengths.sink, int(s.lengths.ring_begin[b])))
    p = s.hot.rows.shape[3]
    return [x * p + i for x, n in enumerate(fill[b, h].tolist()) for i in range(n)]


def retrieved_rows(s, b: int, h: int) -> set[int]:
    """Pool rows of the blocks that the step of a head attends to."""
    slots = s.hot.chosen[b, h]
    blocks, p = s.hot.block_of[b, h][slots[slots >= 0].long()].tolist(), s.hot.rows.shape[3]
    return {x * p + i for x in blocks for i in range(p)}


def by_definition(s, b: int, q, k, v, a: Attention, selection, group: int) -> torch.Tensor:
    """One row of a step, in fp64: q [heads, dim], and k and v [kv heads, tokens, dim] of all its tokens."""
    q, k, v = q.double(), k.double(), v.double()
    n, sink, left = k.shape[1], s.lengths.sink, int(s.lengths.ring_begin[b])
    each, out, groups = q.shape[0] // k.shape[0], torch.empty_like(q), s.store.pool.shape[2] // group + 1
    for h in range(k.shape[0]):
        begin = left if selection.frontier is None else int(selection.frontier[b, h])
        held, found = held_rows(s, b, h, selection.fill), retrieved_rows(s, b, h)
        # A method may put a token in the row of another one: tell them by their keys.
        stored = keys_of(s.store.pool[b, h, held]).double()
        token_of = dict(zip(held, torch.cdist(stored, k[h]).argmin(1).tolist() if held else []))
        assert sorted(token_of.values()) == list(range(sink, left))
        found = {r for r in held if (r in found and token_of[r] < begin) or token_of[r] >= begin}
        exact = [*range(min(sink, n)), *(token_of[r] for r in found if token_of[r] < begin), *range(begin, n)]
        keys, values, counts = [k[h, exact]], [v[h, exact]], [torch.ones(len(exact))]
        for g in range(groups):
            which = [token_of[r] for r in range(g * group, (g + 1) * group) if r in token_of and r not in found]
            if which:
                keys.append(k[h, which].mean(0, keepdim=True))
                values.append(v[h, which].mean(0, keepdim=True))
                counts.append(torch.tensor([float(len(which))]))
        z = q[h * each : (h + 1) * each] @ torch.cat(keys).T * a.scale
        z = (torch.tanh(z / a.softcap) * a.softcap if a.softcap else z) + torch.cat(counts).double().log()
        values = torch.cat(values)
        if a.sink_logits is not None:
            z = torch.cat([z, a.sink_logits[h * each : (h + 1) * each, None].double()], 1)
            values = torch.cat([values, torch.zeros(1, values.shape[1])])
        out[h * each : (h + 1) * each] = z.softmax(1) @ values
    return out


def of_groups(group: int):
    """The definition of a step that estimates the rest by groups of `group` rows."""
    return lambda *step: by_definition(*step, group)


@pytest.mark.parametrize(
    ("name", "kind"), [*((m, "reference") for m in METHODS), *((m, "triton") for m in INTERPRETED)]
)
def test_step_equals_definition_from_raw_keys_and_values(name, kind):
    """A prompt, generated tokens that leave the ring, a second turn, and more steps; groups of 8."""
    steps = (6, 3) if kind == "triton" else (24, 24)
    sizes = [50, *[1] * steps[0], 13, *[1] * steps[1]]
    assert check_steps(small(name, **METHODS[name], estimate_rest=8), sizes, of_groups(8), kind=kind) == sum(steps)


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_softcap_and_sink_logits_act_on_means(kind):
    attention = Attention(0.25, SOFT, SINKS)
    method = small("quest", budget=8, estimate_rest=16)
    check_steps(method, [60, *[1] * 5], of_groups(16), attention=attention, kind=kind)


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_ragged_rows_equal_definition(kind):
    """Rows of 60, 41 and 9 tokens: the last one has nothing outside its ring."""
    method = small("pariskv", **METHODS["pariskv"], estimate_rest=4)
    steps = 2 if kind == "triton" else 6
    assert check_steps(method, [60, *[1] * steps], of_groups(4), pads=(0, 19, 51), kind=kind) == 3 * steps


@pytest.mark.parametrize("kind", ["reference", "triton"])
def test_heads_that_fetch_late_count_the_tokens_of_their_ring_once(kind):
    """With prefetch_async a head may attend to tokens in the ring that are in the sums already."""
    ahead = []
    method = small("pariskv", budget=6, update_interval=2, full_threshold=0, prefetch_async=-1.0, estimate_rest=8)
    layer = Layer(method, group=2, device=torch.device("cpu"))
    sizes = [50, *[1] * (30 if kind == "reference" else 6)]
    q, k, v = tensors(sum(sizes))

    def on_step(s, q, a, selection, out):
        ahead.append(int((s.lengths.ring_begin[:, None] - selection.frontier).max()))
        end = int(s.row_lengths.seq_len)
        want = by_definition(s, 0, q[0, :, 0], k[0, :, :end], v[0, :, :end], a, selection, 8)
        torch.testing.assert_close(out[0, :, 0].double(), want, rtol=0, atol=2e-5)

    layer.state.on_step = on_step
    with use_kernels(kind):
        layer.feed_parts(q, k, v, sizes)
    assert max(ahead) > 0


@given(
    prompt=st.integers(2, 70), steps=st.integers(1, 12), group=st.sampled_from([2, 4, 8, 32, 128]),
    name=st.sampled_from(["quest", "oracle", "pariskv", "clusterkv"]), pad=st.integers(0, 40), seed=st.integers(0, 99),
    window=st.integers(1, 9), sink=st.sampled_from([0, 4, 8]),
)  # fmt: skip
def test_any_prompt_and_any_group_equal_definition(prompt, steps, group, name, pad, seed, window, sink):
    hyper = METHODS[name] | dict(window=window, sink=sink, estimate_rest=group)
    sizes = [prompt, *[1] * steps]
    check_steps(small(name, **hyper), sizes, of_groups(group), pads=(0, min(pad, prompt)), seed=seed)


@pytest.mark.parametrize("name", METHODS)
def test_full_budget_equals_dense_attention(name):
    budget = dict(budget=256) | (dict(beta=1.0, rho=1.0) if name == "pariskv" else {})
    layer = Layer(small(name, **{**METHODS[name], **budget, "estimate_rest": 8}), group=2, device=torch.device("cpu"))
    q, k, v = tensors(80)
    outs = layer.feed_parts(q, k, v, [60, *[1] * 20])
    for i, out in enumerate(outs[1:], 61):
        z = q[:, :, i - 1 : i].double() @ k[:, :, :i].double().repeat_interleave(2, 1).transpose(-1, -2) / 4
        want = z.softmax(-1) @ v[:, :, :i].double().repeat_interleave(2, 1)
        torch.testing.assert_close(out.double(), want, rtol=0, atol=2e-5)


def test_estimate_is_closer_to_dense_than_the_same_budget_alone():
    def error(rest: bool | int) -> float:
        layer = Layer(small("oracle", budget=8, estimate_rest=rest), group=2, device=torch.device("cpu"))
        q, k, v = tensors(220)
        outs = layer.feed_parts(q, k, v, [200, *[1] * 20])
        z = q[:, :, 200:].double() @ k.double().repeat_interleave(2, 1).transpose(-1, -2) / 4
        z = z.masked_fill(torch.arange(220) > torch.arange(200, 220)[:, None], -torch.inf)
        want = z.softmax(-1) @ v.double().repeat_interleave(2, 1)
        return float((torch.cat(outs[1:], 2) - want).norm() / want.norm())

    assert error(8) < error(32) < 0.6 * error(False)


# ---------------------------------------------------------------- models


def logits(model, ids, mask, steps=6, **hyper):
    with torchsparsekv.patch(model, hyper.pop("method"), max_length=128, skip_layers=1, **hyper) as handle:
        return greedy_logits(model, ids, mask, steps, handle.make_cache(batch_size=ids.shape[0]))


QUEST = dict(method="quest", block_size=4, budget=8, sink=4, window=6)


def test_model_with_rest_is_closer_to_dense():
    model, (ids, mask) = tiny(), prompts(2, 70)
    want = dense_logits(model, ids, mask, 6)
    error = lambda rest: float((logits(model, ids, mask, **QUEST, estimate_rest=rest) - want).norm())  # noqa: E731
    assert error(4) < 0.7 * error(False)


@torch.no_grad()
def test_ragged_rows_of_a_model_equal_rows_alone():
    model, (ids, mask) = tiny(), prompts(3, 60)
    feed = torch.arange(5, 23).view(3, 6).to(ids)

    def run(rows: slice, first: int):
        with torchsparsekv.patch(model, **QUEST, max_length=128, skip_layers=1, estimate_rest=True) as handle:
            cache, shown = handle.make_cache(batch_size=len(ids[rows])), mask[rows, first:]
            at = (shown.cumsum(-1) - 1).clamp(min=0)
            model(ids[rows, first:], attention_mask=shown, position_ids=at, past_key_values=cache)
            step = lambda t: model(feed[rows, t : t + 1], position_ids=at[:, -1:] + t + 1, past_key_values=cache)  # noqa: E731
            return torch.cat([step(t).logits for t in range(6)], 1)

    together = run(slice(None), 0)
    for b in range(3):
        alone = run(slice(b, b + 1), int((mask[b] == 0).sum()))
        torch.testing.assert_close(together[b : b + 1], alone, rtol=0, atol=2e-5)


def test_packed_pool_gives_nearly_the_same_estimate():
    model, (ids, mask) = tiny(head_dim=16), prompts(2, 70)
    one = logits(model, ids, mask, **QUEST, estimate_rest=8)
    packed = logits(model, ids, mask, **QUEST, estimate_rest=8, pool_dtype="int8")
    assert 0 < float((one - packed).norm()) < 0.02 * float(one.norm())


@torch.no_grad()
@pytest.mark.parametrize(("name", "more"), [("random", {}), ("omnikv", {"filter_layers": (1,), "wait_layers": 0})])
def test_compiled_step_computes_nothing_between_fetch_and_attention(name, more):
    """Attention reads the query and the ids while fetch still runs. The choice of `random` does not need the query, and
    layers of `omnikv` copy the ids of another layer."""
    model, ids = tiny(num_hidden_layers=4), torch.randint(3, 97, (1, 100))
    hyper = dict(max_length=256, budget=32, sink=16, window=16, skip_layers=1, estimate_rest=32, **more)
    with torchsparsekv.patch(model, name, **hyper) as handle:
        cache = handle.make_cache(1)
        model(ids, past_key_values=cache)
        step = torch.compile(model.forward, fullgraph=True)
        _, code = run_and_get_code(lambda: step(ids[:, :1], past_key_values=cache))
    made = code[0][code[0].index("def call(") :]
    call = r"^ +(?:buf\d+ = )?(?:torch\.ops\.torchsparsekv\.)?((?:cpp_fused|triton_|extern|\w+\.default)[\w.]*)\("
    called = re.findall(call, made, re.M)
    fetches = [i for i, x in enumerate(called) if x == "fetch.default"]
    assert len(fetches) > 1
    assert all(called[i + 1] == "sparse_attention.default" for i in fetches)


def test_fork_copies_the_sums():
    model, (ids, mask) = tiny(), prompts(1, 70)
    with torchsparsekv.patch(model, "quest", max_length=128, skip_layers=1, block_size=4, budget=8, sink=4, window=6,
                             estimate_rest=8) as handle:  # fmt: skip
        cache = handle.make_cache(batch_size=1)
        greedy_logits(model, ids, mask, 3, cache)
        fork = handle.fork(cache)
        more = torch.full((1, 1), 7, device=ids.device)
        with torch.no_grad():
            one = [model(more, past_key_values=cache).logits for _ in range(9)]
            two = [model(more, past_key_values=fork).logits for _ in range(9)]
    torch.testing.assert_close(torch.cat(one), torch.cat(two), rtol=0, atol=0)


def test_plan_cache_and_report_count_the_sums():
    model = tiny()
    with torchsparsekv.patch(model, "quest", max_length=128, skip_layers=1, estimate_rest=8, block_size=4) as handle:
        memory = handle.plan(batch_size=2)
        (row,) = [r for r in memory.rows if r.name == "rest.sums"]
        sparse = [x for x in handle.planned.methods if x.name == "quest"]
        assert len(sparse) > 1
        assert (row.layers, row.nbytes) == (len(sparse), len(sparse) * 2 * 2 * 16 * 2 * 16 * 4)  # fp32, as the model
        cache = handle.make_cache(batch_size=2)
        assert cache.nbytes() == (memory.host_bytes, memory.device_bytes)
        report = handle.report()
        assert report.rest_bytes == report.as_dict()["rest_bytes"] == row.nbytes
        assert f"of which {row.nbytes / 2**10:.2f} KiB for estimate_rest" in str(report)


# ---------------------------------------------------------------- what is refused


def refusal(make: Callable) -> str:
    with pytest.raises(ValueError, match="estimate_rest") as error:
        make()
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("wrong", [0, 1, 3, -8, 48, 2.0, "32", None])
def test_groups_that_are_no_power_of_two_are_refused(wrong):
    said = refusal(lambda: make_method("quest", estimate_rest=wrong))
    assert said == f'quest: estimate_rest must be "auto", True, False or a power of two from 2 on, got {wrong!r}'


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_methods_without_a_rest_to_estimate_are_refused(name):
    assert refusal(lambda: make_method(name, estimate_rest=True)).startswith(
        f"{name}: estimate_rest cannot be True: this method "
    )


def test_prkv_takes_it_without_a_static_set():
    assert "static_ratio=0" in refusal(lambda: make_method("prkv", estimate_rest=16))
    assert make_method("prkv", estimate_rest=16, static_ratio=0).rest_group(4096) == 16


def test_every_other_method_takes_it():
    assert set(METHODS) | REFUSED == set(all_methods())


def test_groups_larger_than_a_row_are_refused():
    method, g = make_method("quest", estimate_rest=256), Geometry(1, 2, 16, 128, torch.float32)
    said = refusal(lambda: method.buffers(g))
    assert said == "quest: estimate_rest must be at most the 128 tokens of a row, got 256"


def test_methods_that_gain_most_estimate_the_rest_by_default():
    """docs/results/answers.md has what each method gains."""
    assert {name for name in all_methods() if make_method(name).rest} == {"pagemean", "pariskv"}
    assert make_method("pariskv", estimate_rest=False).rest is False
    assert make_method("pariskv", prefetch_async=0.8).rest is True

    class Moving(Method):
        traits = Traits(rest_helps=True, no_rest="moves tokens")

    assert Moving().rest is False


@pytest.mark.parametrize("name", ["pagemean", "pariskv"])
@pytest.mark.parametrize("length", [1, 2, 17, 31, 63])
def test_default_groups_fit_small_caches(name, length):
    model = tiny()
    with torchsparsekv.patch(model, name, max_length=length) as handle:
        cache = handle.make_cache()
        assert all(s.state.rest.sums.shape[2] >= 1 for s in cache.stored.values() if s.method.name == name)
        ids = torch.full((1, 1), 5)
        with torch.no_grad():
            assert all(model(ids, past_key_values=cache).logits.isfinite().all() for _ in range(length))


@torch.no_grad()
def test_layers_that_share_selections_sum_the_tokens_of_their_own_pool():
    """icecache stores the tokens of a sharing layer in the order of another layer."""
    model, (ids, mask) = tiny(num_hidden_layers=4), prompts(2, 90)
    hyper = dict(max_length=192, budget=16, page_size=4, sink=4, window=6, r=0.25, skip_layers=1, reuse_every=3)
    with torchsparsekv.patch(model, "icecache", estimate_rest=8, **hyper) as handle:
        cache = handle.make_cache(batch_size=2)
        greedy_logits(model, ids, mask, 30, cache)
        shared = 0
        for layer in (x for x in cache.stored.values() if x.method.name == "icecache"):
            s = layer.state
            shared += s.anchor is not None
            fill = s.leaves.fill if s.anchor is None else s.shared.fill
            for b, h in itertools.product(range(2), range(fill.shape[1])):
                want = torch.zeros_like(s.rest.sums[b, h])
                rows = torch.tensor(held_rows(s, b, h, fill))
                assert len(rows) == int(s.lengths.ring_begin[b]) - s.lengths.sink
                want.index_add_(0, rows // 8, s.store.pool[b, h, rows].view(len(rows), *want.shape[1:]) / 8)
                torch.testing.assert_close(s.rest.sums[b, h], want, rtol=1e-5, atol=1e-5)
    assert shared == 2


def test_true_means_larger_groups_in_longer_caches():
    group = make_method("quest", estimate_rest=True).rest_group
    assert [group(n << 10) for n in (1, 64, 96, 97, 128, 192, 193, 1024)] == [32, 32, 32, 64, 64, 64, 128, 128]
    assert [make_method("oracle", estimate_rest=True).rest_group(n) for n in (1, 7, 16, 31, 32)] == [2, 4, 16, 16, 32]
    assert make_method("quest", estimate_rest=True, block_size=64, budget=1024).rest_group(1 << 10) == 64


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_default_sums_take_at_most_a_32nd_of_the_keys_and_values(dtype):
    for rows in (1 << 14, 1 << 17, 1 << 19):
        buffers = make_method("quest", estimate_rest=True).buffers(Geometry(1, 8, 128, rows, dtype))
        assert 32 * buffers["rest"].sums.nbytes <= buffers["store"].pool.nbytes
