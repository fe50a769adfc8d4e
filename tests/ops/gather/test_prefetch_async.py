"""With prefetch_async, heads whose query hardly moved attend to the selection of the step before."""
import re
from dataclasses import dataclass

import pytest
import torch
from cases import METHODS, hyper_of
from hypothesis import given
from hypothesis import strategies as st
from layer import Layer, small
from models import dense_logits, greedy_logits, prompts, tiny
from torch._dynamo.utils import counters
from torch._inductor.utils import get_code
from world import DEVICE

import torchsparsekv
from torchsparsekv._methods.quest import Quest
from torchsparsekv.method import Method, make_method
from torchsparsekv.ops._machinery.triton import compiles
from torchsparsekv.probe import LayerProbe
from torchsparsekv.report import layer_report
from torchsparsekv.state import Buffer, Geometry, checked, hot_buffer

ALWAYS, NEVER = 1.0, -1.0  # how often a step waits at these values of prefetch_async, unless queries are equal
NAMES = [name for name in METHODS if (t := make_method(name).traits).selects_every_step and not t.moves_selected]
DYNAMIC = {"prkv": dict(static_ratio=0, update_every=None)}  # as it may come late
# Methods whose blocks hold tokens in their order.
WHERE_TOKENS_ARE = ["quest", "arkvale", "oracle", "pagemean", "pariskv", "pqcache", "shadowkv"]
HEADS, GROUP, DIM, PROMPT, STEPS = 2, 2, 16, 60, 14


def test_methods_with_prefetch_async_are_pinned():
    assert sorted(NAMES) == [
        "arkvale", "clusterkv", "icecache", "omnikv", "oracle", "pagemean", "pariskv", "pqcache", "quest", "random",
        "shadowkv",
    ]  # fmt: skip


def drifting(seed: int, pad: int):
    """Keys, values and queries of two rows; some heads turn at some steps, the others drift."""
    g = torch.Generator().manual_seed(seed)
    draw = lambda heads, n: torch.randn(2, heads, n, DIM, generator=g)  # noqa: E731
    k, v, q = draw(HEADS, PROMPT + STEPS), draw(HEADS, PROMPT + STEPS), draw(HEADS * GROUP, PROMPT + STEPS)
    for t in range(PROMPT + 1, PROMPT + STEPS):
        turns = torch.rand(2, HEADS, generator=g).repeat_interleave(GROUP, 1) < 0.4
        q[:, :, t] = torch.where(turns[..., None], q[:, :, t], q[:, :, t - 1] + 0.3 * q[:, :, t])
    return q, k, v, [pad, 0]


def alike(q: torch.Tensor, t: int) -> torch.Tensor:
    """[rows, kv heads]"""
    cosine = torch.nn.functional.cosine_similarity(q[:, :, t].double(), q[:, :, t - 1].double(), dim=-1)
    return cosine.unflatten(1, (HEADS, GROUP)).mean(-1)


def attention_of(q, k, v, seen) -> torch.Tensor:
    weights = torch.softmax(k[sorted(seen)].double() @ q.double() * DIM**-0.5, -1)
    return weights @ v[sorted(seen)].double()


@pytest.mark.parametrize("name", WHERE_TOKENS_ARE)
@given(seed=st.integers(0, 999), pad=st.integers(0, 20), least=st.sampled_from([0.3, 0.7, 0.9]))
def test_head_attends_to_its_new_or_its_last_selection(name, seed, pad, least):
    """By brute force over raw keys, beside the same method without: what a head chose, the ring from where it left off,
    and which heads wait."""
    q, k, v, pads = drifting(seed, pad)
    sizes = dict(batch=2, heads=HEADS, group=GROUP, dim=DIM, left_pad=pads)
    late, plain = (
        Layer(small(name, budget=8, prefetch_async=x, estimate_rest=False), **sizes) for x in (least, None)
    )
    size, fresh, begins = late.method.block_size, None, None
    for t in [PROMPT, *range(PROMPT + 1, PROMPT + STEPS)]:
        span = slice(0, PROMPT) if t == PROMPT else slice(t - 1, t)
        out, _ = (layer.feed(q[:, :, span], k[:, :, span], v[:, :, span]) for layer in (late, plain))
        if t == PROMPT:
            continue
        last, before = fresh, begins
        fresh, begins = plain.choose(q[:, :, t - 1 : t]), plain.state.lengths.ring_begin.tolist()
        for b, h in ((b, h) for b in range(2) for h in range(HEADS)):
            n, sink = t - pads[b], late.row_lengths.plan.sink
            late_head = last is not None and bool(alike(q, t - 1)[b, h] >= least)
            ids, begin = (last[b, h], before[b]) if late_head else (fresh[b, h], begins[b])
            seen = {*range(min(sink, n)), *range(begin, n)}
            seen |= {x * size + i for x in ids.tolist() if x >= 0 for i in range(size)}
            for g in range(h * GROUP, (h + 1) * GROUP):
                want = attention_of(q[b, g, t - 1], k[b, h, pads[b] :], v[b, h, pads[b] :], seen)
                assert torch.allclose(out[b, g, 0].double().cpu(), want, atol=1e-4), (t, b, g, late_head)


@pytest.mark.parametrize("least", [NEVER, 0.6, ALWAYS])
@pytest.mark.parametrize("name", [*NAMES, *DYNAMIC])
def test_full_budget_is_dense(name, least):
    """Nothing falls between what was chosen a step ago and the ring, whoever waits."""
    model = tiny()
    ids, mask = prompts(3, 50)
    want = dense_logits(model, ids, mask, 24)
    told = hyper_of(name, max_length=128, budget=128, sink=8, window=6, block_size=4, skip_layers=1)
    with torchsparsekv.patch(model, name, **told | DYNAMIC.get(name, {}), prefetch_async=least) as handle:
        cache = handle.make_cache(3)
        got = greedy_logits(model, ids, mask, 24, cache)
        report = handle.report().layers[-1]
    assert torch.allclose(got, want, atol=2e-3), (got - want).abs().max()
    most = {NEVER: 0.1 if name != "icecache" else 0.3, 0.6: 1}.get(least, 1)  # its pages of 4 take tokens at a quarter
    assert 0 < report.waited <= most
    if name != "icecache":
        assert report.attended_per_step == report.context_per_step


@pytest.mark.parametrize("name", NAMES)
def test_queries_that_always_drift_answer_as_without_prefetch(name):
    """Every block is fetched before the step that wants it, and none behind it."""
    told = hyper_of(name, max_length=256, budget=16, sink=8, window=6, block_size=4, skip_layers=1)
    ids, mask = prompts(2, 120)
    logits, reports = [], []
    for least in (None, ALWAYS):
        model = tiny()
        with torchsparsekv.patch(model, name, **told, prefetch_async=least) as handle:
            cache = handle.make_cache(2)
            logits.append(greedy_logits(model, ids, mask, 20, cache))
            reports.append(handle.report().layers[-1])
    assert torch.equal(*logits)
    assert reports[0].blocks_fetched == reports[1].blocks_fetched > 0
    assert (reports[0].waited, reports[1].waited, reports[1].fetched_late) == (None, 1, 0)
    for name in ("attended_per_step", "blocks_selected", "hit_rate", "pool_bytes_read"):
        assert getattr(reports[0], name) == getattr(reports[1], name), name


def test_chosen_blocks_are_there_at_the_next_step():
    """A key that answers one query alone is found a step later by a late head, and at once by one that turned. A probe
    sees the same."""
    g = torch.Generator().manual_seed(0)
    k, v = (0.1 * torch.randn(1, 1, 80, DIM, generator=g) for _ in "kv")
    wanted = torch.nn.functional.normalize(torch.randn(DIM, generator=g), dim=-1)
    k[0, 0, 20], v[0, 0, 20] = 12 * wanted, 5.0
    away = torch.randn(DIM, generator=g)
    away = 12 * torch.nn.functional.normalize(away - (away @ wanted) * wanted, dim=-1)
    asked, k[0, 0, 40] = 12 * wanted, away
    for least, found in ((NEVER, [False, False, True]), (0.9, [False, True, True])):
        layer = Layer(small("oracle", budget=4, prefetch_async=least), heads=1, dim=DIM)
        layer.feed(*(x[:, :, :77] for x in (k, k, v)))
        answers, p = [], LayerProbe(layer.method)
        layer.state.on_step = p
        for t, q in zip((77, 78, 79), (away, asked, asked)):
            answers.append(layer.feed(q.view(1, 1, 1, -1), k[:, :, t : t + 1], v[:, :, t : t + 1]))
        assert [bool((x > 4.5).all()) for x in answers] == found
        assert [bool(x > 0.9) for x in p.mass[1:]] == found[1:]


def test_first_step_after_a_second_prompt_waits_for_all_heads():
    """The step before was another turn's."""
    q, k, v, _ = drifting(3, 0)
    layer = Layer(small("quest", budget=8, prefetch_async=NEVER), batch=2, heads=HEADS, group=GROUP, dim=DIM)
    waits = []
    for at, end in ((0, 40), (40, 41), (41, 42), (42, 60), (60, 61), (61, 62)):
        layer.feed(*(x[:, :, at:end] for x in (q, k, v)))
        waits.append(int(layer.state.prefetch.waits.sum()))
    assert waits == [0, 4, 4, 4, 8, 8]


def test_queries_at_the_threshold_do_not_wait():
    layer = Layer(small("quest", budget=8, prefetch_async=ALWAYS), heads=1, dim=DIM)
    one, k = torch.eye(DIM)[:1].view(1, 1, 1, DIM), torch.randn(1, 1, 40, DIM)
    layer.feed(k, k, k)
    for _ in range(5):
        layer.feed(one, k[:, :, :1], k[:, :, :1])
    assert int(layer.state.prefetch.waits.sum()) == 1


def test_hit_rate_counts_from_the_first_step():
    """What is fetched behind a step is chosen by that step, not by the next; while a row is short there is more to
    choose at every one."""
    q, k, v, _ = drifting(5, 0)
    sizes = dict(batch=2, heads=HEADS, group=GROUP, dim=DIM)
    layers = [Layer(small("quest", budget=32, prefetch_async=x), **sizes) for x in (NEVER, None)]
    reports = [layer_report(0, x.method, x.state) for x in layers]
    assert reports[0].waited is None
    for at, end in ((0, 14), *((t, t + 1) for t in range(14, 40))):
        for layer in layers:
            layer.feed(*(x[:, :, at:end] for x in (q, k, v)))
        late, plain = (layer_report(0, x.method, x.state) for x in layers)
        assert late.blocks_selected == plain.blocks_selected
        assert late.blocks_fetched == plain.blocks_fetched
        assert late.blocks_fetched <= late.blocks_selected
    assert late.blocks_selected > 0


@dataclass(frozen=True, kw_only=True)
class _Seldom(Quest):
    """A user's, as docs/develop/method.md has them."""

    name = "seldom_for_a_test"

    def buffers(self, g):
        return super().buffers(g) | {"hot": hot_buffer(g, self.block_size, 8, 4)}


class _Plain(Method):
    name = "plain_for_a_test"


def test_methods_must_declare_that_they_support_prefetch():
    with pytest.raises(ValueError, match=r"plain_for_a_test: prefetch_async is for methods that select at every step"):
        _Plain(prefetch_async=0.8)
    for method, buffers in ((_Seldom(prefetch_async=0.8), {}), (_Seldom(), {"prefetch": Buffer((1,), torch.int32)})):
        g = Geometry(1, 2, 16, 256, torch.float32)
        made = {name: x for name, x in method.buffers(g).items() if name != "prefetch"} | buffers
        with pytest.raises(TypeError, match=r"must have `prefetch` if prefetch_async is set"):
            checked(made, method.prefetch_async is not None)


def test_report_counts_prefetched_blocks():
    model = tiny()
    ids, mask = prompts(2, 120, ragged=False)
    told = dict(max_length=256, budget=8, block_size=4, sink=4, window=8, skip_layers=1)
    with torchsparsekv.patch(model, "quest", **told, prefetch_async=NEVER) as handle:
        cache = handle.make_cache(2)
        model.generate(ids, attention_mask=mask, max_new_tokens=20, do_sample=False, past_key_values=cache)
        report = handle.report()
        rows = report.layers[1:]
    for r in rows:
        assert 0 < r.fetched_late < r.blocks_fetched < r.blocks_selected
        assert r.waited == pytest.approx(1 / r.steps)  # the first step of all
        assert r.pool_bytes_read == r.blocks_fetched * 4 * 2 * 16 * 4  # blocks of keys and values in fp32
    fetched, late = (sum(getattr(r, x) for r in rows) for x in ("blocks_fetched", "fetched_late"))
    assert f"kv heads waited for their selection at {1 / rows[0].steps:.1%} of the steps" in str(report)
    assert f"{late / fetched:.1%} arrived after the attention of their step" in str(report)


def test_last_prefetching_layer_joins_the_side_stream():
    """A CUDA graph must not end before what was launched beside it."""
    with torchsparsekv.patch(tiny(), "quest", max_length=128, prefetch_async=0.8, skip_layers=1) as handle:
        layers = handle.make_cache(1).layers
    assert [layer.state.joins for layer in layers if "prefetch" in layer.state.buffers] == [False, True]


@torch.no_grad()
@torch._inductor.config.patch(force_disable_caches=True)  # their keys know nothing of what an op says that it changes
def test_inductor_keeps_prefetch_before_the_next_layer_without_copies():
    """An op that nobody waits for it would move to the end, behind a copy of the hot buffer: wrong beside a stream."""
    model = tiny(num_hidden_layers=3)
    ids, mask = prompts(1, 40)
    told = dict(max_length=128, sink=8, window=6, skip_layers=1, block_size=4, budget=16, step="compiled")
    with torchsparsekv.patch(model, "quest", **told, prefetch_async=0.5) as handle:
        cache = handle.make_cache(1)
        model(ids, attention_mask=mask, past_key_values=cache)
        code, *_ = get_code(torch.compile(model.forward, fullgraph=True), ids[:, :1], past_key_values=cache)
    calls = re.findall(r"torch\.ops\.torchsparsekv\.(\w+)\.default\((.*)\)", code)
    order = [name for name, _ in calls if name in ("sparse_attention", "prefetch_async", "append")]
    assert order == ["append", *2 * ["append", "sparse_attention", "prefetch_async"]]
    for name, taken in calls:
        if name == "prefetch_async":
            assert all(re.fullmatch(r"arg\d+_1|True|False", x) for x in taken.split(", ")[1:]), taken


@pytest.mark.gpu
@pytest.mark.parametrize("offload", ["host", "device"])
@pytest.mark.parametrize("least", [NEVER, 0.6, ALWAYS])
@pytest.mark.parametrize("name", ["quest", "pariskv", "icecache"])
def test_graph_with_a_side_stream_equals_the_eager_step(name, least, offload):
    """bf16: one graph, and what it leaves to another stream is there when the next replay wants it."""
    assert compiles(torch.device(DEVICE))
    counters.clear()
    shape = dict(num_hidden_layers=5, hidden_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64)
    model = tiny(dtype=torch.bfloat16, **shape)
    ids, mask = prompts(3, 150)
    told = hyper_of(name, max_length=384, sink=8, window=6, skip_layers=1, block_size=4, budget=32, offload=offload)
    with torchsparsekv.patch(model, name, **told, prefetch_async=least) as handle:
        caches = [handle.make_cache(3)]
        eager = greedy_logits(model, ids, mask, 100, caches[0])
        first = handle.report().layers[-1]
        step = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)
        caches.append(handle.make_cache(3))
        captured = greedy_logits(model, ids, mask, 100, caches[1], step)
        report = handle.report().layers[-1]
    assert counters["stats"]["unique_graphs"] == 1
    assert not any(counters["inductor"].get(name) for name in ("cudagraph_skips", "cudagraph_partitions"))
    assert (report.fetched_late > 0) == (first.fetched_late > 0) == (least != ALWAYS)
    assert captured.isfinite().all()
    apart = (captured - eager).float().norm(dim=-1) / eager.float().norm(dim=-1)
    assert apart.median() < 0.02, apart.median()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["quest", "pariskv"])
def test_captured_steps_equal_eager_steps(name):
    """To the last token: both are the same kernels."""
    model = tiny(dtype=torch.bfloat16, num_hidden_layers=5, hidden_size=512, num_attention_heads=8, head_dim=64)
    ids, mask = prompts(2, 200)
    told = hyper_of(name, max_length=512, sink=8, window=6, skip_layers=1, block_size=4, budget=32, step="captured")
    with torchsparsekv.patch(model, name, **told, prefetch_async=0.5) as handle:
        caches, answers = [handle.make_cache(2) for _ in range(3)], []
        for cache, way in zip(caches, (dict(disable_compile=True), {}, {})):
            told = dict(attention_mask=mask, max_new_tokens=200, do_sample=False, past_key_values=cache)
            answers.append(model.generate(ids, **told, **way))
        late = [r.fetched_late for r in handle.report().layers[1:]]
    assert min(late) > 0
    assert all(torch.equal(answers[0], x) for x in answers[1:])
