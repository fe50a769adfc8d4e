"""Every refusal has its words and leaves the model unchanged; a new refusal is a new row of the table."""
# ruff: noqa: E501 (in the table a row is a line)
import copy

import pytest
import torch
from cases import MANY_TOKENS, METHODS, OPS
from kernels import flat, on
from models import prompts, tiny
from refusing import IDS, MASK, SMALL, Row, generate, patch, used
from snapshot import snapshot
from transformers import AutoModelForSeq2SeqLM, GPT2Config, GPT2LMHeadModel, T5Config
from world import DEVICE, World

import torchsparsekv
from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.select.top_blocks import top_blocks

ENTRIES = load_all()


# ---------------------------------------------------------------- ways to ask for what is refused


def call(ids=IDS, mask=None, rows=2):
    return used(lambda model, handle: model(ids, attention_mask=mask, past_key_values=handle.make_cache(rows)))


def op(name, **spoil):
    """Call an op with valid arguments, except for those in `spoil`: name -> function of the valid one."""

    def act(_):
        things = flat(on(DEVICE, OPS[name](World(tokens=3 if name in MANY_TOKENS else 1))))
        args = dict(zip((f.name for f in ENTRIES[name].signature.flat), things, strict=True))
        assert set(spoil) <= set(args)
        ENTRIES[name].op(*(args | {n: change(args[n]) for n, change in spoil.items()}).values())

    return act


def strided(t):
    """The same values, every second element of a wider tensor."""
    return t.repeat_interleave(2, -1)[..., ::2]


def cut(t):
    return t[..., :-1].contiguous()


def but_one(t):
    return t[:, :, 1:].contiguous()


def nine_times(t):
    return t.repeat(1, 1, 9)


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


def patch_one_of_two(model):
    """Made of the config that the patched model has for as long as it is patched."""
    with torchsparsekv.patch(model, "quest", **SMALL):
        patch()(type(model)(model.config).eval())


def shorter(model, handle):
    cache = handle.make_cache(2)
    model(IDS, past_key_values=cache)
    model.generate(IDS[:, :12], past_key_values=cache, max_new_tokens=4)


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


def reorder(model, handle):
    handle.make_cache(2).reorder_cache(torch.tensor([1, 0], device=DEVICE))


def copy_cache(model, handle):
    copy.deepcopy(handle.make_cache(2))


ROWS = [
    # arguments of patch
    Row("method unknown", patch("qeust"), ValueError, f"unknown method 'qeust'; available: {', '.join(sorted(METHODS))}"),
    Row("hyper-parameter unknown", patch(pages=3), TypeError, r"no hyper-parameter pages; it has: .*budget.*block_size.*digest"),
    Row("argument misspelled", patch(offlaod="host"), TypeError, r"no hyper-parameter offlaod \(did you mean offload\?\); it has: budget"),
    Row("hyper-parameter misspelled", patch(bugdet=8), TypeError, r"no hyper-parameter bugdet \(did you mean budget\?\); it has: budget"),
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
    Row("hot_budgets zero", patch(hot_budgets=0), ValueError, r"hot_budgets must be at least 1, got 0"),
    Row("hot_budgets a fraction", patch(hot_budgets=2.5), TypeError, r"hot_budgets must be an int or 'auto', got 2.5"),
    *(
        Row(f"prefetch_async of {x!r}", patch(prefetch_async=x), ValueError, rf"prefetch_async must be None or a cosine, from -1 to 1, got {x!r}")
        for x in (1.5, "0.8", True, float("nan"))
    ),
    Row("prefetch_async with runs of clusterkv", patch("clusterkv", prefetch_async=0.8, run=4), ValueError, r"clusterkv: prefetch_async is for methods that"),
    Row("prefetch_async with louiskv", patch("louiskv", prefetch_async=0.8), ValueError, r"louiskv: prefetch_async is for methods that select at every step"),
    Row("budget not in blocks", patch(budget=18), ValueError, r"budget must be a multiple of block_size 4, got 18"),
    Row("sink not in blocks", patch(sink=5), ValueError, r"sink must be a multiple of block_size 4, got 5"),
    Row("sink above max_length", patch(sink=68), ValueError, r"sink 68 is above max_length 64"),
    Row("window above max_length", patch(window=65), ValueError, r"window 65 is above max_length 64"),
    Row("sink above the model's positions", patch(sink=516, max_length=None), ValueError, r"sink 516 is above the 512 tokens that the model takes"),
    Row("window above the model's positions", patch(window=513, max_length=None), ValueError, r"window 513 is above the 512 tokens"),
    Row("hot_gib too small for the smallest cache", patch(hot_gib=1e-9, max_length=None), ValueError, r"hot_gib 1e-09 is below the \d.*e-0\d GiB that one budget takes in a cache of 512"),
    Row("budget above max_length", patch(budget=68), ValueError, r"budget 68 is above max_length 64"),
    Row("max_length above the model's", patch(max_length=513), ValueError, r"513 is above the model's max_position_embeddings, 512"),
    Row("max_length zero", patch(max_length=0), ValueError, r"max_length must be a positive int, got 0"),
    Row("max_length a float", patch(max_length=64.0), ValueError, r"max_length must be a positive int, got 64.0"),
    Row("offload unknown", patch(offload="disk"), ValueError, r"offload must be one of auto, host, device, got 'disk'"),
    Row("skip_layers negative", patch(skip_layers=-1), ValueError, r"skip_layers must be from 0 to 2, got -1"),
    Row("skip_layers all", patch(skip_layers=3), ValueError, r"skip_layers must be from 0 to 2, got 3"),
    Row("skip_layers a bool", patch(skip_layers=True), ValueError, r"skip_layers must be from 0 to 2, got True"),
    Row("layers no dict", patch(layers=[1, 2]), TypeError, r"layers must be a dict of layer index to method, got \[1, 2\]"),
    Row("layers: no such layer", patch(layers={3: "full"}), ValueError, r"an entry for layer 3; this model has layers 0 to 2"),
    Row("layers: counted from the end", patch(layers={-1: "full"}), ValueError, r"an entry for layer -1; this model has layers 0 to 2"),
    Row("layers: index a bool", patch(layers={True: "full"}), ValueError, r"an entry for layer True; this model has"),
    Row("layers: index a string", patch(layers={"1": "full"}), ValueError, r"an entry for layer '1'; this model has"),
    Row("layers: a layer twice", patch(layers={1: "full", torch.tensor(1): "quest"}), ValueError, r"layers has two entries for layer 1"),
    Row("layers: method unknown", patch(layers={1: "qeust"}), ValueError, r"layers\[1\]: unknown method 'qeust'; available: arkvale"),
    Row("layers: method no name", patch(layers={1: dict(method=3)}), TypeError, r"layers\[1\]: method must be a name, got 3"),
    Row("layers: entry a number", patch(layers={1: 512}), TypeError, r"layers\[1\]: an entry is the name of a method or a dict of hyper-parameters, got 512"),
    Row("layers: hyper-parameter no name", patch(layers={1: {5: 3}}), TypeError, r"layers\[1\]: the keys of an entry are names of hyper-parameters, got 5"),
    Row("layers: hyper-parameter unknown", patch(layers={2: dict(pages=3)}), TypeError, r"layers\[2\]: method 'quest' has no hyper-parameter pages"),
    Row("layers: hyper-parameter of the other", patch(layers={2: dict(method="louiskv", digest="float8")}), TypeError, r"layers\[2\]: method 'louiskv' has no hyper-parameter digest"),
    Row("layers: hyper-parameter wrong", patch(layers={2: dict(budget=18)}), ValueError, r"layers\[2\]: quest: budget must be a multiple of block_size 4, got 18"),
    Row("layers: budget above max_length", patch(layers={2: dict(budget=68)}), ValueError, r"layers\[2\]: budget 68 is above max_length 64"),
    Row("budget a bool tensor", patch(budget=torch.tensor(True)), TypeError, r"budget must be an int, got tensor\(True\)"),
    Row("max_length a bool", patch(max_length=True), ValueError, r"max_length must be a positive int, got True"),
    Row("digest unknown", patch(digest="int4"), ValueError, r"digest must be one of float8, bfloat16, float32, got 'int4'"),
    Row("method a list", lambda model: torchsparsekv.patch(model, ["quest"]), ValueError, r"unknown method \['quest'\]; available: arkvale"),
    Row("digest a list", patch(digest=["float8"]), ValueError, r"digest must be one of float8, bfloat16, float32, got \['float8'\]"),
    Row("volume a list", patch("arkvale", volume=["ball"]), ValueError, r"volume must be one of cuboid-mean, cuboid, ball, got \['ball'\]"),
    Row("m a float", patch("pariskv", m=8.0), ValueError, r"m must be one of 2, 4, 8, got 8.0"),
    Row("m a list", patch("pariskv", m=[8]), ValueError, r"m must be one of 2, 4, 8, got \[8\]"),
    Row("rho a bool", patch("pariskv", rho=True), ValueError, r"rho must be None or in \(0, 1\], got True"),
    Row("growth a bool", patch("icecache", growth=True), ValueError, r"growth must be from 0 to 1, got True"),
    Row("tau minus one", patch("louiskv", tau=-1.0), ValueError, r"tau must be in \(-1, 1\].*got -1.0"),
    Row("tau above one", patch("louiskv", tau=1.01), ValueError, r"tau must be in \(-1, 1\].*got 1.01"),
    Row("tau not a number", patch("louiskv", tau=float("nan")), ValueError, r"tau must be in \(-1, 1\].*got nan"),
    Row("tau a bool", patch("louiskv", tau=True), ValueError, r"tau must be in \(-1, 1\].*got True"),
    Row("tau a missing file", patch("louiskv", tau="nowhere.json"), ValueError, r"nowhere.json is not a file of `torchsparsekv calibrate`"),
    Row("per_head a string", patch("louiskv", per_head="yes"), TypeError, r"per_head must be a bool, got 'yes'"),
    Row("memory of louiskv above one", patch("louiskv", memory=1.5), ValueError, r"memory must be from 0 to 1, got 1.5"),
    Row("segment_min above segment_max", patch("louiskv", segment_min=9, segment_max=8), ValueError, r"segments need shortest <= longest, got 9, 8"),
    Row("segment a float", patch("louiskv", segment_max=8.0), TypeError, r"segment_max must be an int, got 8.0"),
    Row("run zero", patch("clusterkv", run=0), ValueError, r"run must be from 1 to 4096, got 0"),
    Row("run above 4096", patch("clusterkv", run=4097), ValueError, r"run must be from 1 to 4096, got 4097"),
    Row("run a float", patch("clusterkv", run=2.0), TypeError, r"run must be an int, got 2.0"),
    Row("new_clusters above 64", patch("clusterkv", new_clusters=65), ValueError, r"new_clusters must be from 1 to 64, got 65"),
    Row("every not a multiple of new_clusters", patch("clusterkv", every=10), ValueError, r"every must be a multiple of new_clusters 4, got 10"),
    Row("budget below a cluster", patch("clusterkv", budget=8, cluster_size=16, run=4), ValueError, r"budget 8 is below one unit: a cluster has 16 tokens"),
    Row("budget below a segment", patch("louiskv"), ValueError, r"budget 16 is below one unit.*segment up to 32"),
    Row("block_size for clusterkv", patch("clusterkv", block_size=4), TypeError, r"method 'clusterkv' has no hyper-parameter block_size"),
    Row("cluster size one", patch("clusterkv", cluster_size=1), ValueError, r"cluster_size must be from 2 to 4096, got 1"),
    Row("cosine an int", patch("clusterkv", cosine=1), TypeError, r"cosine must be a bool, got 1"),
    Row("budget above the candidates of any cache", patch("pariskv", budget=100, max_length=None, full_threshold=0, beta=0.1, rho=0.2), ValueError, r"budget 100 is above the 51 candidates that beta 0.1 leaves of 502 tokens"),
    Row("stretch below a cluster", patch("clusterkv", stretch=8, cluster_size=16), ValueError, r"stretch 8 is below cluster_size 16"),
    Row("stretch above 4096", patch("clusterkv", stretch=8192), ValueError, r"stretch must be from 2 to 4096, got 8192"),
    Row("rounds zero", patch("clusterkv", rounds=0), ValueError, r"rounds must be from 1 to 100, got 0"),
    Row("rounds a bool", patch("clusterkv", rounds=True), TypeError, r"rounds must be an int, got True"),
    Row("seed of clusters negative", patch("clusterkv", seed=-1), ValueError, r"seed must be from 0 to 65535, got -1"),
    # models
    Row("not a transformers model", patch(), TypeError, r"takes a transformers PreTrainedModel, got Linear", lambda: torch.nn.Linear(2, 2)),
    Row("family unknown", patch(), NotImplementedError, r"model_type 'gpt2' is not supported; available: apertus, .*llama, .*qwen3_moe", gpt2),
    Row("encoder-decoder", patch(), NotImplementedError, r"encoder-decoder", t5),
    Row("training mode at patch", patch(), RuntimeError, r"call model.eval\(\) first", lambda: tiny().train()),
    Row("attention dispatch bypassed", patch(), NotImplementedError, r"LlamaForCausalLM does not use transformers' attention dispatch", no_dispatch),
    Row("double precision", patch(), TypeError, r"float32, float16 or bfloat16, got torch.float64", lambda: tiny(dtype=torch.float64)),
    Row("several devices", patch(), NotImplementedError, r"spread over several devices \(0, 1\)", spread_over_devices),
    Row("head_dim not a multiple of 16", patch(), ValueError, r"head_dim must be a multiple of 16 up to 256, this model has 24", lambda: tiny(head_dim=24)),
    Row("config of a patched model", patch_one_of_two, RuntimeError, r"is from a patched model, or is a copy of its config \(attention implementation 'torchsparsekv_over_sdpa'\)"),
    Row("patched twice", patch_twice, RuntimeError, r"patched already: <torchsparsekv active .*Quest.*unpatch"),
    # capacity
    Row("generate overruns", generate(max_new_tokens=46), ValueError, r"need a cache of 65 tokens, and max_length of this patch is 64"),
    Row("prompt overruns in generate", generate(*prompts(2, 70)), ValueError, r"need a cache of 73 tokens, and max_length of this patch is 64"),
    Row("prompt overruns", call(prompts(2, 65)[0]), ValueError, r"65 tokens after 0 overrun this cache of max_length 64"),
    Row("second prompt overruns", used(second_prompt_overruns), ValueError, r"20 tokens after 20 overrun this cache of max_length 32"),
    Row("generate overruns a given cache", generate(cache=lambda h: h.make_cache(2, 22)), ValueError, r"has room for 22 tokens, this call needs 23"),
    Row("cache above the limit", used(lambda m, h: h.make_cache(2, 65)), ValueError, r"max_length 65 is above the limit of this patch, 64"),
    Row("cache with length zero", used(lambda m, h: h.make_cache(2, 0)), ValueError, r"max_length must be a positive int, got 0"),
    Row("cache with length True", used(lambda m, h: h.make_cache(2, True)), ValueError, r"max_length must be a positive int, got True"),
    Row("cache with a fractional batch size", used(lambda m, h: h.make_cache(1.5)), TypeError, r"batch_size must be an int, got 1.5"),
    Row("fork with a string as batch size", used(lambda m, h: h.fork(h.make_cache(2), "2")), TypeError, r"batch_size must be an int, got '2'"),
    Row("cache with batch size zero", used(lambda m, h: h.make_cache(0)), ValueError, r"batch_size must be at least 1, got 0"),
    # modes of generate
    Row("beam search", generate(num_beams=2), ValueError, r"'beam_search' reorders or forks the cache"),
    Row("beam sampling", used(lambda m, h: m.generate(input_ids=IDS, num_beams=2, do_sample=True, max_new_tokens=2)), ValueError, r"'beam_sample' reorders"),
    Row("prompt lookup", generate(IDS[1:], MASK[1:], prompt_lookup_num_tokens=2), ValueError, r"'assisted_generation' reorders or forks"),
    Row("assisted decoding", generate(IDS[1:], MASK[1:], assistant_model=tiny()), ValueError, r"'assisted_generation' reorders or forks"),
    # transformers 5 moved contrastive search out, and asks for remote code before it would come to us
    Row("contrastive search", generate(penalty_alpha=0.6, top_k=4), ValueError, r"contrastive_search|Contrastive Search requires"),
    Row("use_cache=False", generate(use_cache=False), ValueError, r"use_cache=False would bypass torchsparsekv: leave it out$"),
    Row("static cache", generate(cache_implementation="static"), ValueError, r"cache_implementation='static' would bypass torchsparsekv: leave it out for a sparse cache, or pass 'dynamic' for dense attention$"),
    Row("shorter prompt on a used cache", used(shorter), ValueError, r"this call has 12 tokens and the SparseCache holds 20: pass the token ids of the whole conversation.*cache\.crop"),
    Row("prompt above the positions of the model", used(lambda m, h: m.generate(IDS.repeat(1, 26), attention_mask=torch.ones_like(IDS.repeat(1, 26)), max_new_tokens=4), max_length=None), ValueError, r"the prompt has 520 tokens, which leaves no room.*max_position_embeddings of the model is 512"),
    Row("crop of more than is held", used(lambda m, h: h.make_cache(2).crop(5)), ValueError, r"crop takes a number of tokens, from 0 to 0 here, got 5"),
    Row("SparseCache with another method", used(lambda m, h: torchsparsekv.SparseCache(m, "arkvale")), ValueError, r"patched already with Quest\(.*call SparseCache\(model, 'quest'\) without"),
    Row("prefill chunk size zero", generate(prefill_chunk_size=0), ValueError, r"prefill_chunk_size must be a positive int, got 0"),
    Row("patching an inner model", used(lambda m, h: torchsparsekv.patch(m.model)), RuntimeError, r"is patched already: unpatch it"),
    # other people's caches and masks
    Row("cache of another patch", used(of_another_patch), ValueError, r"from another patch"),
    Row("cache of the original in a deep copy", used(of_the_original), ValueError, r"from another patch"),
    Row("cache in an unpatched model", used(in_unpatched_model), RuntimeError, r"given to a model that is not patched"),
    Row("cache after unpatch", used(after_unpatch), RuntimeError, r"the patch that made this SparseCache is off"),
    Row("make_cache after unpatch", used(make_cache_after_unpatch), RuntimeError, r"this handle is unpatched"),
    Row("batch size", call(rows=3), ValueError, r"made for batch size 3, got 2"),
    Row("batch size in generate", generate(cache=lambda h: h.make_cache(3)), ValueError, r"made for batch size 3, this call has 2"),
    Row("reorder a cache", used(reorder), NotImplementedError, r"cannot be reordered, forked or cropped"),
    Row("copy a cache", used(copy_cache), TypeError, r"cannot be copied by copy or deepcopy: Handle.fork\(cache\) makes a copy"),
    Row("right padding", call(mask=MASK.flip(1)), ValueError, r"padded on the left only"),
    Row("right padding in generate", generate(mask=MASK.flip(1)), ValueError, r"padded on the left only"),
    Row("hole in the mask", call(mask=MASK.index_fill(1, torch.tensor([12], device=DEVICE), 0)), ValueError, r"padded on the left only"),
    Row("row with only padding", call(mask=MASK * MASK.new_tensor([[0], [1]])), ValueError, r"a row of the batch is nothing but padding"),
    Row("row with only padding, one token", call(IDS[:, :1], MASK.new_tensor([[0], [1]])), ValueError, r"a row of the batch is nothing but padding"),
    Row("4-D mask", call(mask=torch.ones(2, 1, 20, 20, dtype=torch.bool, device=DEVICE)), ValueError, r"a 4-D mask cannot be honoured"),
    Row("4-D mask, one token", call(IDS[:, :1], torch.ones(2, 1, 1, 1, dtype=torch.bool, device=DEVICE)), ValueError, r"a 4-D mask cannot be honoured"),
    Row("training mode in use", used(in_training_mode), RuntimeError, r"for inference: call model.eval\(\)"),
    Row("gradients of weights", used(with_gradients), RuntimeError, r"for inference: run under torch.no_grad"),
    Row("gradients of inputs", used(with_gradients_of_inputs), RuntimeError, r"for inference: run under torch.no_grad"),
    # tensors into ops
    Row("append: pool strided", op("append", store_pool=strided), ValueError, r"^store.pool must be contiguous, got shape \(2, 2, 64, 2, 16\) with strides \(8192, 4096, 64, 32, 2\)$"),
    Row("append: ring strided", op("append", store_ring=strided), ValueError, r"^store.ring must be contiguous, got shape \(2, 2, 14, 2, 16\) with strides \(1792, 896, 64, 32, 2\)$"),
    Row("append: k in half", op("append", token_k=torch.Tensor.half), TypeError, r"^dtypes must agree, got {'token.k': torch.float16, 'token.v': torch.float32}$"),
    Row("append: query without observed queries", op("append", token_q=lambda _: torch.zeros(2, 4, 1, 16)), ValueError, r"^give token.q and observed, both or neither$"),
    Row("append: k of two tokens", op("append", token_k=lambda k: k.repeat(1, 1, 2, 1)), ValueError, r"^token.k must have shape \(2, 2, 1, 16\), got \(2, 2, 2, 16\)$"),
    Row("append: length in int64", op("append", lengths_length=torch.Tensor.long), TypeError, r"^lengths.length must be torch.int32, got torch.int64$"),
    Row("append: length of fewer rows", op("append", lengths_length=cut), ValueError, r"^lengths.length must have shape \(2,\), got \(1,\)$"),
    Row("append: counts too narrow", op("append", stats_counts=cut), ValueError, r"^stats.counts must have shape \(2, 2, 5\), got \(2, 2, 4\)$"),
    Row("append: ring too short", op("append", store_ring=lambda r: r[:, :, :6].contiguous()), ValueError, r"^a ring of 6 rows cannot hold 4 sink rows and the 4 rows that leave together$"),
    Row("advance: seq_len in int32", op("advance", seq_len=torch.Tensor.int), TypeError, r"^seq_len must be torch.int64, got torch.int32$"),
    Row("advance: no tokens", op("advance", tokens=lambda _: 0), ValueError, r"^need tokens, interval >= 1 and sink, window >= 0, got 0, 4, 4 and 6$"),
    Row("advance: pad in float", op("advance", pad=lambda _: torch.zeros(2)), TypeError, r"^pad must be torch.int32 or torch.int64, got torch.float32$"),
    Row("flush_ring: pool of fewer rows", op("flush_ring", store_pool=lambda p: p[:1].contiguous()), ValueError, r"^store.pool must have shape \(2, 2, 64, 2, 16\), got \(1, 2, 64, 2, 16\)$"),
    Row("store_prompt: v reversed in memory", op("store_prompt", v=strided), ValueError, r"^v must have stride 1 in its last dimension, got strides \(192, 96, 32, 2\)$"),
    Row("store_prompt: pool in half", op("store_prompt", store_pool=torch.Tensor.half), TypeError, r"^dtypes must agree, got {'store.ring': torch.float32, .*'store.pool': torch.float16}$"),
    Row("store_prompt: order of fewer tokens", op("store_prompt", order=cut), ValueError, r"^order must have shape \(2, 2, 3\), got \(2, 2, 2\)$"),
    Row("block_bounds: centre in int8", op("block_bounds", digests_centre=torch.Tensor.char), TypeError, r"^digests.centre must be torch.float32 or torch.float16 or torch.bfloat16 or torch.float8_e4m3fn, got torch.int8$"),
    Row("block_bounds: too few centres", op("block_bounds", digests_centre=but_one), ValueError, r"^digests.spread must have shape \(2, 2, 15, 16\), got \(2, 2, 16, 16\)$"),
    Row("block_bounds: too few blocks", op("block_bounds", digests_centre=but_one, digests_spread=but_one), ValueError, r"^64 rows are not 15 blocks of 4$"),
    Row("block_bounds: volume 4", op("block_bounds", digests_volume=lambda _: 4), ValueError, r"^volume must be one of 0 \(box\), 1 \(ball\), 2 \(mean-box\), 3 \(mean\), got 4 with spreads \(2, 2, 16, 16\)$"),
    Row("block_bounds: balls with spreads of boxes", op("block_bounds", digests_volume=lambda _: 1), ValueError, r"^volume must be one of .*, got 1 with spreads \(2, 2, 16, 16\)$"),
    Row("bound_scores: spread cut", op("bound_scores", digests_spread=cut), ValueError, r"^spread has a value per channel \(boxes\) or per block \(ball, mean\), got \(2, 2, 16, 15\)$"),
    Row("bound_scores: spread of another type", op("bound_scores", digests_spread=torch.Tensor.half), TypeError, r"^spread must be torch.float32, got torch.float16$"),
    Row("bound_scores: q of three heads", op("bound_scores", q=lambda q: q[:, :3]), ValueError, r"^queries \(2, 3, 1, 16\) do not fit keys and values \(2, 2, 16, 16\)$"),
    Row("bound_scores: pinned in int64", op("bound_scores", pinned=torch.Tensor.long), TypeError, r"^pinned must be torch.int32, got torch.int64$"),
    Row("attention_mass: sink not in blocks", op("attention_mass", lengths_sink=lambda _: 3), ValueError, r"^64 rows and 3 sinks are not whole blocks of 4$"),
    Row("top_blocks: scores in half", op("top_blocks", scored_scores=torch.Tensor.half), TypeError, r"^scored.scores must be torch.float32, got torch.float16$"),
    Row("top_blocks: scores strided", op("top_blocks", scored_scores=strided), ValueError, r"^scored.scores must be contiguous, got shape \(2, 2, 64\) with strides \(256, 128, 2\)$"),
    Row("top_blocks: k zero", op("top_blocks", k=lambda _: 0), ValueError, r"^need k >= 1 and at least one score, got k=0, scores \(2, 2, 64\)$"),
    Row("top_blocks: width without row_sizes", lambda _: top_blocks((torch.zeros(1, 1, 4, device=DEVICE), None), 2, None, None, 0, 9), ValueError, r"take_all_up_to and width must be 0 without row_sizes, got 0 and 9"),
    Row("top_blocks: take_all_up_to without row_sizes", lambda _: top_blocks((torch.zeros(1, 1, 4, device=DEVICE), None), 2, None, None, 3, 0), ValueError, r"take_all_up_to and width must be 0 without row_sizes, got 3 and 0"),
    Row("top_blocks: row_sizes without ids", lambda _: top_blocks((torch.zeros(1, 1, 4, device=DEVICE), None), 2, None, torch.ones(1, dtype=torch.int32, device=DEVICE), 1, 2), ValueError, r"row_sizes needs ids"),
    Row("top_blocks: tensor instead of a view", lambda _: top_blocks(torch.zeros(2, 2, 64, device=DEVICE), 2), ValueError, r"^scored.scores must have shape \(batch, heads, n\), got \(2, 64\)$"),
    Row("fetch: ids in int64", op("fetch", selection_ids=torch.Tensor.long), TypeError, r"^selection.ids must be torch.int32, got torch.int64$"),
    Row("fetch: more blocks than slots", op("fetch", selection_ids=nine_times, hot_chosen=nine_times), ValueError, r"^45 blocks do not fit a hot buffer of 5$"),
    Row("fetch_shared: slot_of cut", op("fetch_shared", hot_slot_of=cut), ValueError, r"^\d+ pool rows are not \d+ blocks of 4$"),
    Row("fetch: slot_of cut", op("fetch", hot_slot_of=cut), ValueError, r"^64 pool rows are not 15 blocks of 4$"),
    Row("fetch: slot_of of fewer rows", op("fetch", hot_slot_of=lambda t: t[:1].contiguous()), ValueError, r"^hot.slot_of must have shape \(2, 2, 16\), got \(1, 2, 16\)$"),
    Row("fetch: chosen of fewer blocks", op("fetch", hot_chosen=cut), ValueError, r"^selection.ids must have shape \(2, 2, 4\), got \(2, 2, 5\)$"),
    Row("fetch: retrieve_now in bool", op("fetch", selection_retrieve_now=lambda _: torch.ones(2, 2, dtype=torch.bool)), TypeError, r"^selection.retrieve_now must be torch.int32, got torch.bool$"),
    Row("find_boundary: previous of one step", op("find_boundary", trigger_previous=lambda p: p[:, :1].contiguous()), ValueError, r"^trigger.previous must have shape \(2, 2, 4, 16\), got \(2, 1, 4, 16\)$"),
    Row("find_boundary: longest below shortest", op("find_boundary", rule_longest=lambda _: 0), ValueError, r"^need 1 <= shortest <= longest, got 1, 0$"),
    Row("find_boundary: cuts of a shorter ring", op("find_boundary", segments_cuts=cut), ValueError, r"^segments.cuts must have shape \(2, 2, 10\), got \(2, 2, 9\)$"),
    Row("close_segments: unit_count in int64", op("close_segments", units_unit_count=torch.Tensor.long), TypeError, r"^units.unit_count must be torch.int32, got torch.int64$"),
    Row("close_segments: centroid in half", op("close_segments", units_centroid=torch.Tensor.half), TypeError, r"^dtypes must agree, got {'units.centroid': torch.float16, 'ring': torch.float32}$"),
    Row("cluster_keys: first too short", op("cluster_keys", units_first=cut), ValueError, r"^units.first must have shape \(2, 2, 73\), got \(2, 2, 72\)$"),
    Row("cluster_keys: stretch not a power of two", op("cluster_keys", kmeans_stretch=lambda _: 12), ValueError, r"stretch a power of two.*stretch 12"),
    Row("cluster_keys: seed above 65535", op("cluster_keys", kmeans_seed=lambda _: 1 << 16), ValueError, r"^seed must be from 0 to 65535, got 65536$"),
    Row("pick_units: budget zero", op("pick_units", budget=lambda _: 0), ValueError, r"^budget must be at least 1, got 0$"),
    Row("pick_units: centroid in half", op("pick_units", units_centroid=torch.Tensor.half), TypeError, r"^dtypes must agree, got {'units.centroid': torch.float16, 'q': torch.float32}$"),
    Row("sparse_attention: frontier of fewer heads", op("sparse_attention", selection_frontier=lambda _: torch.ones(2, 1, dtype=torch.int32)), ValueError, r"^selection.frontier must have shape \(2, 2\), got \(2, 1\)$"),
    Row("sparse_attention: chosen strided", op("sparse_attention", hot_chosen=strided), ValueError, r"^hot.chosen must be contiguous, got shape \(2, 2, 5\) with strides \(20, 10, 2\)$"),
    Row("sparse_attention: two queries", op("sparse_attention", q=lambda q: q.repeat(1, 1, 2, 1)), ValueError, r"^q must have shape \(2, 4, 1, 16\), got \(2, 4, 2, 16\)$"),
    Row("sparse_attention: sinks of fewer heads", op("sparse_attention", attention_sink_logits=lambda _: torch.zeros(3)), ValueError, r"^attention.sink_logits must have shape \(4,\), got \(3,\)$"),
    Row("dense_attention: q in bfloat16", op("dense_attention", q=torch.Tensor.bfloat16), TypeError, r"^dtypes must agree, got {'q': torch.bfloat16, 'pool': torch.float32}$"),
    Row("dense_attention: pool without V", op("dense_attention", pool=lambda p: p[..., :1, :].contiguous()), ValueError, r"^pool must have shape \(2, 2, 64, 2, 16\), got \(2, 2, 64, 1, 16\)$"),
    Row("prompt_attention: k of fewer tokens", op("prompt_attention", k=lambda k: k[:, :, 1:]), ValueError, r"^k must have shape \(2, 2, 3, 16\), got \(2, 2, 2, 16\)$"),
]  # fmt: skip


def test_no_two_rows_have_one_name():
    assert len({row.id for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_call_is_refused_and_the_model_unchanged(row):
    model, state = row.model(), lambda m: snapshot(m) if hasattr(m, "config") else dict(vars(m))
    before = state(model)
    with pytest.raises(row.error, match=row.says):
        row.act(model)
    assert state(model) == before
