"""What is refused, with which words, and that a refusal leaves the model alone. One table; a new refusal is a new row."""
# ruff: noqa: E501 (in the table a row is a line)
import copy
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from cases import MANY_TOKENS, METHODS, OPS
from models import prompts, tiny
from snapshot import snapshot
from transformers import AutoModelForSeq2SeqLM, GPT2Config, GPT2LMHeadModel, T5Config
from world import DEVICE, World

import torchsparsekv
from torchsparsekv.ops._registry import load_all
from torchsparsekv.ops.select.top_blocks import top_blocks

ENTRIES = load_all()
SMALL = dict(max_length=64, budget=16, sink=4, window=6, skip_layers=1, block_size=4)
IDS, MASK = prompts(2, 20)


class Row(NamedTuple):
    id: str
    act: Callable  # takes the model; the model must be unchanged when it has raised
    error: type[Exception]
    says: str
    model: Callable = tiny


# ---------------------------------------------------------------- ways to ask for what is refused


def patch(method="quest", **changes):
    """At patch time."""
    return lambda model: torchsparsekv.patch(model, method, **{**SMALL, **changes})


def used(act, **changes):
    """While patched: `act(model, handle)`; leaving the block unpatches, so the model must be as before here too."""

    def run(model):
        with torch.no_grad(), torchsparsekv.patch(model, "quest", **{**SMALL, **changes}) as handle:
            act(model, handle)

    return run


def generate(ids=IDS, mask=MASK, cache=None, **options):
    def act(model, handle):
        kwargs = {} if cache is None else {"past_key_values": cache(handle)}
        options.setdefault("max_new_tokens", 4)
        model.generate(input_ids=ids, attention_mask=mask, do_sample=False, **kwargs, **options)

    return used(act)


def call(ids=IDS, mask=None, rows=2):
    return used(lambda model, handle: model(ids, attention_mask=mask, past_key_values=handle.make_cache(rows)))


def op(name, **spoil):
    """Call an op with valid arguments, except for those in `spoil`: name -> function of the valid one."""

    def act(_):
        args = OPS[name](World(tokens=3 if name in MANY_TOKENS else 1))
        known = [a.name for a in ENTRIES[name].op._schema.arguments]
        assert set(spoil) <= set(known)
        args = [a.to(DEVICE) if isinstance(a, torch.Tensor) else a for a in args]
        args = [spoil[n](a) if n in spoil else a for n, a in zip(known, args)]
        getattr(torch.ops.torchsparsekv, name)(*args)

    return act


def strided(t):
    """The same values, every second element of a wider tensor."""
    return t.repeat_interleave(2, -1)[..., ::2]


def cut(t):
    return t[..., :-1].contiguous()


def spread_over_devices():
    model = tiny()
    model.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    return model


def no_dispatch():
    model = tiny()
    model._can_set_attn_implementation = lambda: False
    return model


def t5():
    config = T5Config(d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, vocab_size=32)
    return AutoModelForSeq2SeqLM.from_config(config)


def gpt2():
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=1, vocab_size=97, n_positions=128)).eval()


# ---------------------------------------------------------------- the acts that take more than one line


def patch_twice(model):
    with torchsparsekv.patch(model, "quest", **SMALL):
        torchsparsekv.patch(model, "arkvale", **SMALL)


def of_another_patch(model, handle):
    with torchsparsekv.patch(tiny(), "quest", **SMALL) as other:
        model(IDS, past_key_values=other.make_cache(2))


def of_the_original(model, handle):
    copy.deepcopy(model)(IDS, past_key_values=handle.make_cache(2))


def in_unpatched_model(model, handle):
    tiny()(IDS, past_key_values=handle.make_cache(2))


def after_unpatch(model, handle):
    cache = handle.make_cache(2)
    model(IDS, past_key_values=cache)
    handle.unpatch()
    model(IDS[:, :1], past_key_values=cache)


def make_cache_after_unpatch(model, handle):
    handle.unpatch()
    handle.make_cache(2)


def second_prompt_overruns(model, handle):
    cache = handle.make_cache(2, 32)
    model(IDS, past_key_values=cache)
    model(IDS, past_key_values=cache)


def in_training_mode(model, handle):
    try:
        model.train()(IDS, past_key_values=handle.make_cache(2))
    finally:
        model.eval()


def with_gradients(model, handle):
    with torch.enable_grad():
        model(IDS, past_key_values=handle.make_cache(2))


def with_gradients_of_inputs(model, handle):
    model.requires_grad_(False)
    with torch.enable_grad():
        model(inputs_embeds=model.get_input_embeddings()(IDS).requires_grad_(), past_key_values=handle.make_cache(2))


def crop(model, handle):
    handle.make_cache(2).crop(-1)


def reorder(model, handle):
    handle.make_cache(2).reorder_cache(torch.tensor([1, 0], device=DEVICE))


def copy_cache(model, handle):
    copy.deepcopy(handle.make_cache(2))


ROWS = [
    # arguments of patch
    Row("method unknown", patch("qeust"), ValueError, f"unknown method 'qeust'; available: {', '.join(sorted(METHODS))}"),
    Row("hyper-parameter unknown", patch(pages=3), TypeError, r"no hyper-parameter pages; it has: .*budget.*block_size.*digest"),
    Row("hyper-parameter of another method", patch("streaming", digest="float8"), TypeError, r"'streaming' has no hyper-parameter digest"),
    Row("budget a float", patch(budget=16.0), TypeError, r"budget must be an int, got 16.0"),
    Row("window a string", patch(window="6"), TypeError, r"window must be an int, got '6'"),
    Row("sink a bool", patch(sink=True), TypeError, r"sink must be an int, got True"),
    Row("budget zero", patch(budget=0), ValueError, r"budget must be at least 4, got 0"),
    Row("budget negative", patch(budget=-16), ValueError, r"budget must be at least 4, got -16"),
    Row("window zero", patch(window=0), ValueError, r"window must be at least 1, got 0"),
    Row("sink negative", patch(sink=-4), ValueError, r"sink must be at least 0, got -4"),
    Row("block size zero", patch(block_size=0), ValueError, r"block_size must be a power of two, got 0"),
    Row("block size not a power of two", patch(block_size=6), ValueError, r"block_size must be a power of two, got 6"),
    Row("budget not in blocks", patch(budget=18), ValueError, r"budget must be a multiple of block_size 4, got 18"),
    Row("sink not in blocks", patch(sink=5), ValueError, r"sink must be a multiple of block_size 4, got 5"),
    Row("budget above max_length", patch(budget=68), ValueError, r"budget 68 is above max_length 64"),
    Row("max_length above the model's", patch(max_length=513), ValueError, r"513 is above the model's max_position_embeddings, 512"),
    Row("max_length zero", patch(max_length=0), ValueError, r"max_length must be a positive int, got 0"),
    Row("max_length a float", patch(max_length=64.0), ValueError, r"max_length must be a positive int, got 64.0"),
    Row("offload unknown", patch(offload="disk"), ValueError, r"offload must be one of auto, host, device, got 'disk'"),
    Row("skip_layers negative", patch(skip_layers=-1), ValueError, r"skip_layers must be from 0 to 2, got -1"),
    Row("skip_layers all", patch(skip_layers=3), ValueError, r"skip_layers must be from 0 to 2, got 3"),
    Row("skip_layers a bool", patch(skip_layers=True), ValueError, r"skip_layers must be from 0 to 2, got True"),
    Row("digest unknown", patch(digest="int4"), ValueError, r"digest must be one of float8, bfloat16, float32, got 'int4'"),
    Row("tau minus one", patch("louiskv", block_size=1, tau=-1.0), ValueError, r"tau must be in \(-1, 1\].*got -1.0"),
    Row("tau above one", patch("louiskv", block_size=1, tau=1.01), ValueError, r"tau must be in \(-1, 1\].*got 1.01"),
    Row("tau not a number", patch("louiskv", block_size=1, tau=float("nan")), ValueError, r"tau must be in \(-1, 1\].*got nan"),
    Row("tau a bool", patch("louiskv", block_size=1, tau=True), ValueError, r"tau must be in \(-1, 1\].*got True"),
    Row("tau of no file", patch("louiskv", block_size=1, tau="nowhere.json"), ValueError, r"nowhere.json is no file of `torchsparsekv calibrate`"),
    Row("per_head a string", patch("louiskv", block_size=1, per_head="yes"), TypeError, r"per_head must be a bool, got 'yes'"),
    Row("segments reversed", patch("louiskv", block_size=1, segment_min=9, segment_max=8), ValueError, r"segments need shortest <= longest, got 9, 8"),
    Row("segment a float", patch("louiskv", block_size=1, segment_max=8.0), TypeError, r"segment_max must be an int, got 8.0"),
    Row("run zero", patch("clusterkv", block_size=1, run=0), ValueError, r"run must be from 1 to 4096, got 0"),
    Row("run beyond a program", patch("clusterkv", block_size=1, run=4097), ValueError, r"run must be from 1 to 4096, got 4097"),
    Row("run a float", patch("clusterkv", block_size=1, run=2.0), TypeError, r"run must be an int, got 2.0"),
    Row("budget below a cluster", patch("clusterkv", block_size=1, budget=8, cluster_size=16), ValueError, r"budget 8 is below one unit: a cluster has 16 tokens"),
    Row("budget below a segment", patch("louiskv", block_size=1), ValueError, r"budget 16 is below one unit.*segment up to 32"),
    Row("clusters in blocks", patch("clusterkv"), ValueError, r"retrieves units of any size: block_size must be 1, got 4"),
    Row("cluster size 12", patch("clusterkv", block_size=1, cluster_size=12), ValueError, r"cluster_size must be a power of two, got 12"),
    Row("cluster size one", patch("clusterkv", block_size=1, cluster_size=1), ValueError, r"cluster_size must be from 2 to 4096, got 1"),
    Row("a size no cache can have", patch("pariskv", block_size=1, budget=100, max_length=None, full_threshold=0, beta=0.1, rho=0.2), ValueError, r"budget 100 is above the 51 candidates that beta leaves of 502 tokens"),
    Row("stretch below a cluster", patch("clusterkv", block_size=1, stretch=8, cluster_size=16), ValueError, r"stretch 8 is below cluster_size 16"),
    Row("stretch too long", patch("clusterkv", block_size=1, stretch=8192), ValueError, r"stretch must be from 2 to 4096, got 8192"),
    Row("no rounds", patch("clusterkv", block_size=1, rounds=0), ValueError, r"rounds must be from 1 to 100, got 0"),
    Row("rounds a bool", patch("clusterkv", block_size=1, rounds=True), TypeError, r"rounds must be an int, got True"),
    Row("seed of clusters negative", patch("clusterkv", block_size=1, seed=-1), ValueError, r"seed must be from 0 to 65535, got -1"),
    # models
    Row("not a transformers model", patch(), TypeError, r"takes a transformers PreTrainedModel, got Linear", lambda: torch.nn.Linear(2, 2)),
    Row("family unknown", patch(), NotImplementedError, r"no family for model_type 'gpt2'; available: llama, mistral, qwen2, qwen3", gpt2),
    Row("encoder-decoder", patch(), NotImplementedError, r"encoder-decoder", t5),
    Row("training mode at patch", patch(), RuntimeError, r"call model.eval\(\) first", lambda: tiny().train()),
    Row("dispatch bypassed", patch(), NotImplementedError, r"LlamaForCausalLM bypasses transformers' attention dispatch", no_dispatch),
    Row("double precision", patch(), TypeError, r"float32, float16 or bfloat16, got torch.float64", lambda: tiny(dtype=torch.float64)),
    Row("several devices", patch(), NotImplementedError, r"spread over several devices \(0, 1\)", spread_over_devices),
    Row("sliding window", patch(), NotImplementedError, r"layer 0 attends to a sliding window of 32", lambda: tiny("mistral", sliding_window=32)),
    Row("head_dim", patch(), ValueError, r"head_dim must be a multiple of 16 up to 256, this model has 24", lambda: tiny(head_dim=24)),
    Row("patched twice", patch_twice, RuntimeError, r"patched already: <torchsparsekv active .*Quest.*unpatch"),
    # capacity
    Row("generate overruns", generate(max_new_tokens=46), ValueError, r"need a cache of 65, this patch allows max_length=64"),
    Row("prompt overruns in generate", generate(*prompts(2, 70)), ValueError, r"need a cache of 73, this patch allows max_length=64"),
    Row("prompt overruns", call(prompts(2, 65)[0]), ValueError, r"65 tokens after 0 overrun this cache of max_length 64"),
    Row("second prompt overruns", used(second_prompt_overruns), ValueError, r"20 tokens after 20 overrun this cache of max_length 32"),
    Row("generate overruns a given cache", generate(cache=lambda h: h.make_cache(2, 22)), ValueError, r"holds 22 tokens, this call needs 23"),
    Row("cache above the limit", used(lambda m, h: h.make_cache(2, 65)), ValueError, r"max_length 65 is above the limit of this patch, 64"),
    Row("cache of length zero", used(lambda m, h: h.make_cache(2, 0)), ValueError, r"max_length must be a positive int, got 0"),
    Row("cache of no rows", used(lambda m, h: h.make_cache(0)), ValueError, r"batch_size must be at least 1, got 0"),
    # modes of generate
    Row("beam search", generate(num_beams=2), ValueError, r"'beam_search' reorders or forks the cache"),
    Row("beam sampling", used(lambda m, h: m.generate(input_ids=IDS, num_beams=2, do_sample=True, max_new_tokens=2)), ValueError, r"'beam_sample' reorders"),
    Row("prompt lookup", generate(IDS[1:], MASK[1:], prompt_lookup_num_tokens=2), ValueError, r"'assisted_generation' reorders or forks"),
    Row("assisted decoding", generate(IDS[1:], MASK[1:], assistant_model=tiny()), ValueError, r"'assisted_generation' reorders or forks"),
    # transformers 5 moved contrastive search out, and asks for remote code before it would come to us
    Row("contrastive search", generate(penalty_alpha=0.6, top_k=4), ValueError, r"contrastive_search|Contrastive Search requires"),
    Row("use_cache=False", generate(use_cache=False), ValueError, r"use_cache=False would bypass torchsparsekv"),
    Row("static cache", generate(cache_implementation="static"), ValueError, r"cache_implementation='static' would bypass torchsparsekv"),
    Row("a chunk of one token", generate(prefill_chunk_size=19), ValueError, r"cuts a prompt of 20 tokens so that one token"),
    Row("chunks of one token", generate(prefill_chunk_size=1), ValueError, r"prefill_chunk_size=1 cuts"),
    Row("patching an inner model", used(lambda m, h: torchsparsekv.patch(m.model)), RuntimeError, r"patched already, through"),
    # other people's caches and masks
    Row("cache of another patch", used(of_another_patch), ValueError, r"made by another patch"),
    Row("cache of the original in a deep copy", used(of_the_original), ValueError, r"made by another patch"),
    Row("cache in an unpatched model", used(in_unpatched_model), RuntimeError, r"given to a model that is not patched"),
    Row("cache after unpatch", used(after_unpatch), RuntimeError, r"the patch that made this SparseCache was taken off"),
    Row("make_cache after unpatch", used(make_cache_after_unpatch), RuntimeError, r"this handle is unpatched"),
    Row("batch size", call(rows=3), ValueError, r"made for batch size 3, got 2"),
    Row("batch size in generate", generate(cache=lambda h: h.make_cache(3)), ValueError, r"made for batch size 3, this call has 2"),
    Row("crop", used(crop), NotImplementedError, r"cannot be reordered, forked or cropped"),
    Row("reorder", used(reorder), NotImplementedError, r"cannot be reordered, forked or cropped"),
    Row("copy a cache", used(copy_cache), TypeError, r"cannot be copied; make a new one with Handle.make_cache"),
    Row("right padding", call(mask=MASK.flip(1)), ValueError, r"padded on the left only"),
    Row("right padding in generate", generate(mask=MASK.flip(1)), ValueError, r"padded on the left only"),
    Row("hole in the mask", call(mask=MASK.index_fill(1, torch.tensor([12], device=DEVICE), 0)), ValueError, r"padded on the left only"),
    Row("row of padding", call(mask=MASK * MASK.new_tensor([[0], [1]])), ValueError, r"a row of the batch is nothing but padding"),
    Row("row of padding, one token", call(IDS[:, :1], MASK.new_tensor([[0], [1]])), ValueError, r"a row of the batch is nothing but padding"),
    Row("4-D mask", call(mask=torch.ones(2, 1, 20, 20, dtype=torch.bool, device=DEVICE)), ValueError, r"a 4-D mask cannot be honoured"),
    Row("4-D mask, one token", call(IDS[:, :1], torch.ones(2, 1, 1, 1, dtype=torch.bool, device=DEVICE)), ValueError, r"a 4-D mask cannot be honoured"),
    Row("training mode in use", used(in_training_mode), RuntimeError, r"for inference: call model.eval\(\)"),
    Row("gradients of weights", used(with_gradients), RuntimeError, r"for inference: run under torch.no_grad"),
    Row("gradients of inputs", used(with_gradients_of_inputs), RuntimeError, r"for inference: run under torch.no_grad"),
    # tensors into ops
    Row("append: pool strided", op("append", pool=strided), ValueError, r"pool must be contiguous"),
    Row("append: ring strided", op("append", ring=strided), ValueError, r"ring must be contiguous"),
    Row("append: k in double", op("append", k=torch.Tensor.double), TypeError, r"dtypes must agree"),
    Row("append: k of two tokens", op("append", k=lambda k: k.repeat(1, 1, 2, 1)), ValueError, r"k must have shape \(2, 2, 1, 16\)"),
    Row("append: length in int64", op("append", length=torch.Tensor.long), TypeError, r"length must be torch.int32"),
    Row("append: length of fewer rows", op("append", length=cut), ValueError, r"length must have shape \(2,\), got \(1,\)"),
    Row("append: stats too narrow", op("append", stats=cut), ValueError, r"stats must have shape \(2, 2, 5\)"),
    Row("append: ring too short", op("append", ring=lambda r: r[:, :, :6].contiguous()), ValueError, r"a ring of 6 rows cannot hold"),
    Row("advance: seq_len in int32", op("advance", seq_len=torch.Tensor.int), TypeError, r"seq_len must be torch.int64"),
    Row("advance: no tokens", op("advance", tokens=lambda _: 0), ValueError, r"need tokens, interval >= 1"),
    Row("store_prompt: v reversed in memory", op("store_prompt", v=strided), ValueError, r"v must have stride 1 in its last dimension"),
    Row("store_prompt: pool in half", op("store_prompt", pool=torch.Tensor.half), TypeError, r"dtypes must agree"),
    Row("block_bounds: centre in int8", op("block_bounds", centre=torch.Tensor.char), TypeError, r"centre must be"),
    Row("block_bounds: too few blocks", op("block_bounds", centre=lambda c: c[:, :, 1:].contiguous()), ValueError, r"centre must have shape"),
    Row("bound_scores: spread cut", op("bound_scores", spread=cut), ValueError, r"spread .* does not fit centres"),
    Row("bound_scores: q of three heads", op("bound_scores", q=lambda q: q[:, :3]), ValueError, r"queries .* do not fit"),
    Row("attention_mass: sink not in blocks", op("attention_mass", sink=lambda _: 3), ValueError, r"not whole blocks of 4"),
    Row("top_blocks: scores in half", op("top_blocks", scores=torch.Tensor.half), TypeError, r"scores must be torch.float32"),
    Row("top_blocks: scores strided", op("top_blocks", scores=strided), ValueError, r"scores must be contiguous"),
    Row("top_blocks: none", op("top_blocks", k=lambda _: 0), ValueError, r"need k >= 1"),
    Row("top_blocks: width", lambda _: top_blocks(torch.zeros(1, 1, 4, device=DEVICE), 2, None, None, None, 0, 9), ValueError, r"few and width are of whole rows"),
    Row("top_blocks: few", lambda _: top_blocks(torch.zeros(1, 1, 4, device=DEVICE), 2, None, None, None, 3, 0), ValueError, r"few and width are of whole rows.*got 3 and 0"),
    Row("top_blocks: whole without ids", lambda _: top_blocks(torch.zeros(1, 1, 4, device=DEVICE), 2, None, None, torch.ones(1, dtype=torch.int32, device=DEVICE), 1, 2), ValueError, r"whole rows need ids"),
    Row("fetch: blocks in int64", op("fetch", blocks=torch.Tensor.long), TypeError, r"blocks must be torch.int32"),
    Row("fetch: more than fit", op("fetch", blocks=lambda b: b.repeat(1, 1, 9)), ValueError, r"blocks do not fit a hot buffer"),
    Row("fetch: table cut", op("fetch", table=cut), ValueError, r"pool rows are not 15 blocks"),
    Row("fetch: table of fewer rows", op("fetch", table=lambda t: t[:1].contiguous()), ValueError, r"table must have shape"),
    Row("store_prompt: order of fewer tokens", op("store_prompt", order=cut), ValueError, r"order must have shape \(2, 2, 3\)"),
    Row("find_boundary: previous of one step", op("find_boundary", previous=lambda p: p[:, :1].contiguous()), ValueError, r"previous must have shape \(2, 2, 4, 16\)"),
    Row("find_boundary: longest below shortest", op("find_boundary", longest=lambda _: 0), ValueError, r"need 1 <= shortest <= longest"),
    Row("find_boundary: cuts of a shorter ring", op("find_boundary", cuts=cut), ValueError, r"cuts must have shape \(2, 2, 10\)"),
    Row("settle_segments: units in int64", op("settle_segments", units=torch.Tensor.long), TypeError, r"units must be torch.int32"),
    Row("settle_segments: centroid in half", op("settle_segments", centroid=torch.Tensor.half), TypeError, r"dtypes must agree"),
    Row("cluster_keys: first too short", op("cluster_keys", first=cut), ValueError, r"first must have shape"),
    Row("cluster_keys: stretch 12", op("cluster_keys", stretch=lambda _: 12), ValueError, r"stretch a power of two.*stretch 12"),
    Row("cluster_keys: seed", op("cluster_keys", seed=lambda _: 1 << 16), ValueError, r"seed must be from 0 to 65535, got 65536"),
    Row("pick_units: no budget", op("pick_units", budget=lambda _: 0), ValueError, r"budget must be at least 1, got 0"),
    Row("pick_units: centroid in half", op("pick_units", centroid=torch.Tensor.half), TypeError, r"dtypes must agree"),
    Row("refetch: places of fewer", op("refetch", places=cut), ValueError, r"places must have shape"),
    Row("refetch: wanted in bool", op("refetch", wanted=torch.Tensor.bool), TypeError, r"wanted must be torch.int32"),
    Row("sparse_attention: retired of fewer heads", op("sparse_attention", retired=lambda r: r[:, :1].contiguous()), ValueError, r"retired must have shape \(2, 2\)"),
    Row("sparse_attention: places strided", op("sparse_attention", places=strided), ValueError, r"places must be contiguous"),
    Row("sparse_attention: two queries", op("sparse_attention", q=lambda q: q.repeat(1, 1, 2, 1)), ValueError, r"q must hold one token, got 2"),
    Row("sparse_attention: sinks of fewer heads", op("sparse_attention", sinks=lambda _: torch.zeros(3)), ValueError, r"sinks must have shape \(4,\)"),
    Row("dense_attention: q in bfloat16", op("dense_attention", q=torch.Tensor.bfloat16), TypeError, r"dtypes must agree"),
    Row("dense_attention: pool without V", op("dense_attention", pool=lambda p: p[..., :1, :].contiguous()), ValueError, r"pool must be"),
    Row("prompt_attention: k of fewer tokens", op("prompt_attention", k=lambda k: k[:, :, 1:]), ValueError, r"k must have shape"),
]  # fmt: skip


def test_the_table_names_every_row_once():
    assert len({row.id for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_refused_and_untouched(row):
    model = row.model()
    before = snapshot(model) if hasattr(model, "config") else dict(vars(model))
    with pytest.raises(row.error, match=row.says):
        row.act(model)
    after = snapshot(model) if hasattr(model, "config") else dict(vars(model))
    assert after == before


def test_decode_past_the_end_is_never_an_answer():
    """Where a check costs nothing it raises; on a GPU it would stall every step, so there the row turns into NaN."""
    model = tiny()
    with torch.no_grad(), torchsparsekv.patch(model, "quest", **{**SMALL, "max_length": 22, "budget": 8}) as handle:
        cache = handle.make_cache(2)
        model(IDS, past_key_values=cache)
        for _ in range(2):  # tokens 21 and 22 still fit
            assert model(IDS[:, :1], past_key_values=cache).logits.isfinite().all()
        kept = [layer.state.pool.clone() for layer in cache.layers]
        if DEVICE.type == "cpu":
            with pytest.raises(ValueError, match="1 tokens after 22 overrun this cache of max_length 22"):
                model(IDS[:, :1], past_key_values=cache)
        else:
            assert model(IDS[:, :1], past_key_values=cache).logits.isnan().all()
        assert all(torch.equal(layer.state.pool, old) for layer, old in zip(cache.layers, kept)), "overwritten"


def test_compiled_decode_past_the_end_is_nan():
    """No check is left in a compiled step: what the clock does there is seen on a CPU as well."""
    model = tiny(num_hidden_layers=2)
    with torch.no_grad(), torchsparsekv.patch(model, "quest", **{**SMALL, "max_length": 22, "budget": 8}) as handle:
        cache = handle.make_cache(2)
        model(IDS, past_key_values=cache)
        step = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
        fits = [bool(step(IDS[:, :1].clone(), past_key_values=cache).logits.isfinite().all()) for _ in range(2)]
        over = [bool(step(IDS[:, :1].clone(), past_key_values=cache).logits.isnan().all()) for _ in range(2)]
    assert (fits, over) == ([True, True], [True, True])
