"""pool_dtype="int8": answers, memory and reports."""
import pytest
import torch
from cases import METHODS, hyper_of
from cli import answered, refused
from models import MAX_LENGTH, dense_logits, greedy_logits, prompts, tiny
from planned import allocated, folder  # noqa: F401
from snapshot import snapshot
from world import DEVICE

import torchsparsekv
from torchsparsekv.method import make_method
from torchsparsekv.ops.store.views import Attention
from torchsparsekv.probe import probe
from torchsparsekv.state import Geometry, LayerState, RowLengths
from torchsparsekv_benchmarks._options import Setup
from torchsparsekv_benchmarks.quality import options as quality

SMALL = dict(max_length=64, budget=16, sink=8, window=6, skip_layers=1, block_size=4)
WHOLE = dict(max_length=MAX_LENGTH, budget=MAX_LENGTH, sink=8, window=6, skip_layers=1, block_size=4)


def patched(model, method, sizes=SMALL, **changes):
    window = {"window": MAX_LENGTH} if method == "streaming" and sizes is WHOLE else {}
    return torchsparsekv.patch(model, method, pool_dtype="int8", **{**hyper_of(method, **sizes), **window, **changes})


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


# ---------------------------------------------------------------- what it answers


def step_of(x: torch.Tensor) -> torch.Tensor:
    """The distance of two numbers that a group of 64 channels can have."""
    return torch.cat([p.abs().amax(-1, keepdim=True).expand_as(p) for p in x.split(64, -1)], -1) / 127


def exact_and_bound(q, keys, values, scale):
    """Attention of one query over raw keys and values, and how far half a step of each can move it.

    Logits move by `e` at most, so weights by a factor of exp(2 e), around the answer; values by half a step.
    """
    weights = (keys @ q[:, :, None]).squeeze(-1).mul(scale).softmax(-1)[:, None]
    want = weights @ values
    e = (step_of(keys) / 2 * q.abs()[:, None]).sum(-1).amax(-1) * scale
    moved = (2 * e).exp()[:, None, None]
    bound = weights @ (values - want).abs() * (moved - 1) + moved * (weights @ step_of(values)) / 2
    return want.squeeze(1), bound.squeeze(1) * (1 + 1e-4) + 1e-5


@pytest.mark.parametrize("dim", [16, 80])
@pytest.mark.parametrize("method", METHODS)
def test_attention_over_an_int8_pool_is_dense_within_rounding(method, dim):
    """From the raw keys and values: a ragged prompt, steps, a second turn, steps."""
    rows, heads, group, scale = 96, 2, 2, dim**-0.5
    sizes = hyper_of(method, budget=rows, sink=8, window=rows if method == "streaming" else 6, block_size=4)
    m, g = make_method(method, **sizes), torch.Generator().manual_seed(3)
    lengths = RowLengths(m.ring_plan, 2, rows, DEVICE)
    geometry = Geometry(2, heads, dim, rows, torch.float32, group, pool_dtype=torch.int8)
    state = LayerState(m.buffers(geometry), lengths, DEVICE, pool_on_host=False)
    pad, far = [7, 0], 0.0
    keys = values = torch.empty(2, heads, 0, dim)
    for n in (30, *[1] * 20, 9, *[1] * 8):
        q, k, v = (torch.randn(2, h, n, dim, generator=g) for h in (heads * group, heads, heads))
        keys, values = torch.cat([keys, k], 2), torch.cat([values, v], 2)
        told = torch.tensor(pad, device=DEVICE) if keys.shape[2] == n else None
        lengths.advance(n, told)
        q_, k_, v_ = (x.to(DEVICE) for x in (q, k, v))
        a = Attention(scale)
        out = m.decode(state, q_, k_, v_, a) if n == 1 else m.prefill(state, q_, k_, v_, a, last=True)
        for b in range(2):
            for i in range(max(0, pad[b] - keys.shape[2] + n), n):
                end = keys.shape[2] - n + i + 1
                x, y = (t[b, :, pad[b] : end].repeat_interleave(group, 0) for t in (keys, values))
                want, bound = exact_and_bound(q[b, :, i], x, y, scale)
                off = (out[b, :, i].cpu() - want).abs()
                assert (off <= bound).all()
                far = max(far, float(off.max()))
    if method != "streaming":
        assert far > 1e-5, "nothing was rounded"


@pytest.mark.parametrize("method", METHODS)
def test_model_with_an_int8_pool_is_dense_within_rounding(method):
    """A ragged batch; whole, and in chunks with a fork in between. The dense layers have 8 bits too."""
    model = tiny(head_dim=64)
    ids, mask = prompts(3, 41)
    want = dense_logits(model, ids, mask, 20)
    with patched(model, method, WHOLE) as handle:
        got = greedy_logits(model, ids, mask, 20, handle.make_cache(3))
        with torch.no_grad():
            first = handle.make_cache(1)
            model(ids[2:, :17], past_key_values=first)
            model(ids[2:, 17:30], past_key_values=first)
            twin = handle.fork(first, 2)
            model(ids[2:, :5], past_key_values=first)  # which the fork must not see
            pair = model(ids[2:, 30:].expand(2, -1), past_key_values=twin).logits[:, -1]
    assert 1e-7 < apart(got, want) < 5e-3
    assert apart(pair, want[2:, 0].expand(2, -1)) < 5e-3


@pytest.mark.parametrize("cropped", [False, True])
def test_a_large_channel_of_the_keys_costs_a_dense_layer_little(cropped):
    """As in the first layers of models with a bias in their keys. A crop stores the keys once more."""
    model = tiny("qwen2", head_dim=64)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.k_proj.bias.view(-1, 64)[:, 9] = 100
    ids, _ = prompts(1, 41, ragged=False)
    with torchsparsekv.patch(model, "full", max_length=64, pool_dtype="int8") as handle, torch.no_grad():
        cache = handle.make_cache()
        if cropped:
            model(torch.cat([ids[:, :30], ids[:, :9]], 1), past_key_values=cache)
            cache.crop(30)
            model(ids[:, 30:40], past_key_values=cache)
        else:
            model(ids[:, :40], past_key_values=cache)
        got = model(ids[:, 40:], past_key_values=cache).logits[:, -1]
    with torch.no_grad():
        want = model(ids).logits[:, -1]
    assert 1e-7 < apart(got, want) < 5e-3, "0.01 if the keys are not rotated"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_models_take_an_int8_pool(dtype):
    model = tiny(dtype=dtype)
    ids, mask = prompts(2, 41)
    want = dense_logits(tiny(), ids, mask, 20)
    own = apart(dense_logits(model, ids, mask, 20), want)
    with patched(model, "quest", WHOLE) as handle:
        assert apart(greedy_logits(model, ids, mask, 20, handle.make_cache(2)), want) < 2 * own + 5e-3


@pytest.mark.parametrize("method", ["quest", pytest.param("pariskv", marks=pytest.mark.gpu)])
def test_triton_equals_references_with_an_int8_pool(method):
    model = tiny()
    ids, mask = prompts(2, 24)
    with patched(model, method) as handle:
        logits = {}
        for kind in ("reference", "triton"):
            with torchsparsekv.use_kernels(kind):
                logits[kind] = greedy_logits(model, ids, mask, 2, handle.make_cache(2))
    torch.testing.assert_close(logits["triton"], logits["reference"], atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("method", ["quest", "pariskv", "full"])
def test_generate_with_an_int8_pool_compiles_one_graph(method):
    from generating import auto_compiled

    model = tiny()
    ids, mask = prompts(2, 24)
    told = dict(input_ids=ids, attention_mask=mask, max_new_tokens=12, do_sample=False)
    with patched(model, method):
        want = model.generate(**told, disable_compile=True)
        assert torch.equal(model.generate(**told, **auto_compiled()), want)


def test_probe_measures_the_rounded_pool():
    """All of it was attended to, so nothing is missing of it; the rounding is no error here."""
    model = tiny()
    ids, mask = prompts(1, 41, ragged=False)
    with patched(model, "quest", WHOLE) as handle:
        cache = handle.make_cache()
        with probe(cache) as seen:
            greedy_logits(model, ids, mask, 9, cache)
    torch.testing.assert_close(seen.mass(), torch.ones_like(seen.mass()))
    assert seen.error().max() < 1e-4


# ---------------------------------------------------------------- what it takes, and says


@pytest.mark.parametrize(("method", "head_dim"), [*((m, 16) for m in METHODS), ("quest", 64), ("omnikv", 128)])
def test_planned_memory_equals_allocated_memory(method, head_dim):
    with patched(tiny(head_dim=head_dim), method) as handle, torch.no_grad():
        memory, cache = handle.plan(3, 48), handle.make_cache(3, 48)
        assert sum(r.nbytes for r in memory.rows) == sum(allocated(cache).values())
        for layer in cache.stored.values():
            dense = method != "full" and layer.method.traits.attends == "everything"  # among sparse ones
            slower = dense and head_dim == 16
            assert layer.state.store.pool.dtype == (torch.float32 if slower else torch.int8)
        report = handle.report()
        assert (memory.host_bytes, memory.device_bytes) == (report.host_bytes, report.device_bytes)


@pytest.mark.parametrize(("head_dim", "share"), [(64, 9 / 16), (128, 17 / 32), (256, 17 / 32)])
def test_int8_pool_takes_about_half_the_memory(head_dim, share):
    """Of what it takes in 16 bits; the rest of a cache is as it was."""
    pools, others = [], []
    for pool_dtype in (None, "int8"):
        model = tiny(dtype=torch.bfloat16, head_dim=head_dim)
        with torchsparsekv.patch(model, "quest", pool_dtype=pool_dtype, **SMALL | {"skip_layers": 0}) as handle:
            rows = handle.plan(2).rows
            pools.append(sum(r.nbytes for r in rows if r.name == "store.pool"))
            others.append({r.name: r.nbytes for r in rows if r.name != "store.pool"})
    assert pools[1] == pools[0] * share
    assert others[0] == others[1]


def test_fetched_bytes_are_counted_at_int8_size():
    """A quest step that misses: whole blocks of rows of 16 + 16 numbers, two scales, and what fills up 16 bytes."""
    model = tiny()
    ids, mask = prompts(1, 50, ragged=False)
    with patched(model, "quest") as handle:
        cache = handle.make_cache()
        greedy_logits(model, ids, mask, 5, cache)
        layer = handle.report().layers[-1]
    assert layer.blocks_fetched > 0
    assert layer.pool_bytes_read == layer.blocks_fetched * 4 * 48


def test_report_and_repr_name_the_pool_dtype():
    said = "pool_dtype int8: the pool holds keys and values in int8 with scales{}, the model computes in float32"
    with patched(tiny(head_dim=64), "quest") as handle:
        assert handle.report().notes == (said.format(""),)
    said = said.format(", except in dense layers")
    with patched(tiny(), "quest") as handle:
        assert "pool_dtype='int8'" in repr(handle)
        cache = handle.make_cache()
        assert handle.report().notes == (said,)
        assert said in str(handle.report())
        del cache
    with torchsparsekv.patch(tiny(), "quest", **SMALL) as handle:
        assert "pool_dtype" not in repr(handle)


def test_plan_command_takes_pool_dtype(folder):  # noqa: F811
    args = ("plan", folder, "--method", "quest", "--max-length", "64", "--set", "budget=16", "--skip-layers", "0")
    pools = []
    for told in ((), ("--pool-dtype", "int8")):
        said = answered(*args, *told)
        assert ("pool_dtype int8" in said) == bool(told)
        pools.append(sum(float(x.split()[2]) for x in said.splitlines() if x.startswith("store.pool")))
    assert pools[1] == pytest.approx(pools[0] * 48 / 128, abs=2e-3)
    assert "pool_dtype must be 'int8'" in refused(*args, "--pool-dtype", "int4")


def test_eval_and_bench_pass_pool_dtype_to_patch():
    """And refuse another type before a model is loaded."""
    assert quality.settings(quality.Options(pool_dtype="int8", methods=("quest",)))[1].patch["pool_dtype"] == "int8"
    assert "pool_dtype" not in quality.settings(quality.Options(methods=("quest",)))[1].patch
    assert Setup(pool_dtype="int8").patch("quest")["pool_dtype"] == "int8"
    assert "pool_dtype" not in Setup(pool_dtype="int8").patch("full"), "what others are held against"
    assert "pool_dtype" not in Setup().patch("quest")
    for command in (("eval",), ("bench", "decode")):
        assert "pool_dtype must be one of auto, int8, got 'fp4'" in refused(*command, "--pool-dtype", "fp4")


@pytest.mark.parametrize("wrong", ["fp4", "INT8", "", 8, torch.int8, True, ["int8"]])
def test_other_pool_dtypes_are_refused_first(wrong):
    model = tiny()
    before = snapshot(model)
    with pytest.raises(ValueError, match=r"^pool_dtype must be 'int8', or None for the type of the model, got") as e:
        torchsparsekv.patch(model, "quest", pool_dtype=wrong, **SMALL)
    assert repr(wrong) in str(e.value)
    assert snapshot(model) == before


def test_unsupported_head_dim_is_refused_with_an_int8_pool():
    with pytest.raises(ValueError, match="head_dim must be a multiple of 16 up to 256, this model has 24"):
        torchsparsekv.patch(tiny(head_dim=24), "quest", pool_dtype="int8", **SMALL)
