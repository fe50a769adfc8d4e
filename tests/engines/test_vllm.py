"""In vLLM itself, where a version of it is installed: tokens equal those of full attention, and what is refused.

On a GPU the other side is also vLLM's Triton backend, and its FlashAttention if vLLM has its native code. Transformers'
greedy tokens are it everywhere.
"""
import importlib
import importlib.metadata
import itertools
import json
import os
import pickle
import subprocess
import sys
from types import SimpleNamespace

import pytest
import ranks
import torch
import vllm_ranks
from transformers import LlamaConfig, LlamaForCausalLM
from vllm_serving import GPU, NATIVE, NEW, SIZES, counter, ragged, serving, tiny_llama, tokens_of

vllm = pytest.importorskip("vllm", reason="vllm is not installed")
engine = pytest.importorskip("torchsparsekv.engines.vllm", exc_type=ImportError)
serve = importlib.import_module("torchsparsekv_benchmarks.speed.serve")

SMALL = {"sink": 16, "window": 16}


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    path = tmp_path_factory.mktemp("llama")
    return str(path), tiny_llama(path)


@pytest.fixture(scope="module")
def expected(llama):
    _, model = llama
    out = []
    with torch.no_grad():
        for p in ragged():
            made = model.generate(torch.tensor([p]), max_new_tokens=NEW, do_sample=False)
            out.append(made[0, len(p) :].tolist())
    return out


PLACED = [*itertools.product(("quest", "arkvale", "pagemean", "pariskv"), ("device", "host", "auto"))]
WAYS = [pytest.param(False, id="eager"), pytest.param(True, id="graphs", marks=pytest.mark.gpu)]
native = [pytest.mark.gpu, pytest.mark.skipif(not NATIVE, reason="needs vLLM's native code")]


def full(method: str, kv: str) -> dict:
    """Options that select all tokens. With "auto" all blocks fit on a GPU. A CPU counts as a device without memory, so
    there they are in a hot buffer."""
    device = {"device_gib": 0.125} if kv == "auto" and GPU else {}
    return {"method": method, "kv": kv, "budget": 256, **SMALL, **device}


@pytest.mark.parametrize("graphs", WAYS)
@pytest.mark.parametrize(("method", "kv"), PLACED)
def test_full_budget_gives_the_tokens_of_full_attention(llama, expected, method, kv, graphs):
    """In few blocks: requests are preempted and their blocks given to others. In chunks; prefixes are computed once."""
    with serving(llama[0], graphs=graphs, ours=full(method, kv), num_gpu_blocks_override=24) as llm:
        alike, _ = tokens_of(llm, ragged()[-1:])
        got, done = tokens_of(llm, ragged())
        assert got == expected
        assert alike == expected[-1:]
        assert [x.num_cached_tokens for x in done[-3:]] > [0, 0, 0]
        assert counter(llm, "vllm:num_preemptions") > 0


@pytest.mark.skipif(GPU and torch.cuda.device_count() < 2, reason="a rank needs a GPU of its own")
@pytest.mark.parametrize("graphs", WAYS)
def test_two_ranks_give_the_tokens_of_full_attention(llama, expected, graphs, pytestconfig):
    """Each has half of the heads. With host memory that they see differently, they plan as many blocks."""
    told = {}
    for method, kv in itertools.product(("quest", "pariskv"), ("device", "host", "auto")):
        blocks = {"num_gpu_blocks_override": vllm_ranks.PLANNED} if kv != "host" else {}  # the device has room for more
        told[f"{method} {kv}"] = {"graphs": graphs, "ours": full(method, kv), **blocks}
    loaded = pytestconfig.option.plugins
    found = ranks.torchrun("vllm_ranks.py", llama[0], json.dumps(told), *loaded, gpus=True)
    assert set(found) == set(told)
    for name, each in found.items():
        for rank in each:
            assert rank["tokens"] == expected, name
            assert (rank["heads"], rank["blocks"]) == ([1, 1], vllm_ranks.PLANNED), name
            assert rank["preempted"] > 0, name


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_triton_backend_gives_the_same_tokens(llama, expected, graphs, monkeypatch):
    """Its products are of 10 bits where nobody says otherwise: other tokens, in fp32."""
    monkeypatch.setenv("TRITON_F32_DEFAULT", "ieee")
    with serving(llama[0], "TRITON_ATTN", graphs) as llm:
        assert tokens_of(llm, ragged())[0] == expected


@pytest.mark.parametrize("captured", ["FULL_DECODE_ONLY", "FULL_AND_PIECEWISE"])
@pytest.mark.parametrize("kv", [pytest.param(x, marks=native) for x in ("device", "host", "auto")])
def test_compiled_model_gives_the_same_tokens(llama, expected, kv, captured):
    """With the graphs of decode steps alone, and with those that vLLM captures by default."""
    with serving(llama[0], graphs=True, compiled=True, captured=captured, ours=full("quest", kv)) as llm:
        assert tokens_of(llm, ragged())[0] == expected


@pytest.mark.parametrize("kv", [pytest.param(x, marks=native) for x in ("device", "host", "auto")])
@pytest.mark.parametrize("method", ["quest", "pariskv"])
def test_flash_attention_gives_the_same_tokens_or_the_next_best(llama, method, kv):
    """In bfloat16. Tokens are compared until two are as good as each other; the requests differ after that."""
    with serving(llama[0], "FLASH_ATTN", graphs=True, dtype="bfloat16") as llm:
        dense, done = tokens_of(llm, ragged(), logprobs=5)
    with serving(llama[0], graphs=True, dtype="bfloat16", ours=full(method, kv)) as llm:
        got, _ = tokens_of(llm, ragged())
    same = 0
    for theirs, ours, request in zip(dense, got, done):
        for a, b, known in zip(theirs, ours, request.outputs[0].logprobs):
            if a != b:
                assert b in known
                assert known[a].logprob - known[b].logprob < 1.0
                break
            same += 1
    assert same > len(dense) * NEW / 4


# ---------------------------------------------------------------- a needle

IDS, MARK, ASK, FILL = 16, 16, 17, 18  # channels of the embedding: which needle, that it is one, that it is looked for
NEEDLES, ANSWERS, FILLERS = 8, 32, 64  # the first token of each kind


@pytest.fixture(scope="module")
def finder(tmp_path_factory):
    """One layer that looks for the one needle in its context, and says which it is, at every step anew."""
    config = LlamaConfig(**{**SIZES, "hidden_size": 64, "num_hidden_layers": 1, "rope_theta": 1e9, "head_dim": 32})
    model = LlamaForCausalLM(config).float().eval()
    for name, p in model.named_parameters():
        if "norm" not in name:
            p.data.zero_()
    embed, attention, say = model.model.embed_tokens.weight.data, model.model.layers[0].self_attn, model.lm_head.weight
    for i in range(IDS):
        embed[NEEDLES + i, i] = embed[NEEDLES + i, MARK] = 4.0
        embed[ANSWERS + i, ASK] = 4.0
        say.data[ANSWERS + i, 32 + i] = 1.0
    embed[FILLERS:, FILL] = 4.0
    embed[3, ASK] = 4.0  # the question
    slow = 31  # a channel that positions hardly turn
    attention.q_proj.weight.data[slow::32, ASK] = 8.0
    attention.k_proj.weight.data[slow::32, MARK] = 8.0
    for h in range(2):
        attention.v_proj.weight.data[32 * h : 32 * h + IDS, :IDS] = torch.eye(IDS)
    for h in range(4):
        attention.o_proj.weight.data[32 : 32 + IDS, 32 * h : 32 * h + IDS] = torch.eye(IDS)
    path = tmp_path_factory.mktemp("finder")
    model.save_pretrained(path)
    return str(path)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("graphs", WAYS)
@pytest.mark.parametrize("kv", ["device", "host", "auto"])
def test_each_of_sixteen_requests_finds_its_needle(finder, kv, graphs, dtype):
    """With "auto" a quarter of the blocks fit on the device, in float32."""
    prompts = []
    for i in range(IDS):
        length = 300 + 23 * i
        prompt = [FILLERS + (7 * j + i) % 60 for j in range(length)]
        prompt[40 + (37 * i) % (length - 120)] = NEEDLES + i
        prompts.append([*prompt, 3])
    ours = {"method": "quest", "kv": kv, "budget": 32, **SMALL} | ({"device_gib": 0.0015} if kv == "auto" else {})
    usual = dict(max_num_seqs=16, max_model_len=768, max_num_batched_tokens=512, dtype=dtype)
    with serving(finder, graphs=graphs, ours=ours, **usual) as llm:
        got, _ = tokens_of(llm, prompts, 20)
    assert got == [[ANSWERS + i] * 20 for i in range(IDS)]


# ---------------------------------------------------------------- what is refused, and how


def config_of(path: str, ours: object = None, **options):
    """What vLLM would start with."""
    given = ours if ours is not None else {"method": "quest"}
    usual = dict(max_model_len=256, max_num_seqs=4, block_size=16, attention_backend=engine.SEAM.NAME)
    args = usual | {"additional_config": {"torchsparsekv": given}, "skip_tokenizer_init": True} | options
    return importlib.import_module("vllm.engine.arg_utils").EngineArgs(path, **args).create_engine_config()


def layer(config, **options):
    """One attention layer as vLLM makes it."""
    with vllm.config.set_current_vllm_config(config):
        made = engine.Impl(4, 64, 0.125, 2, **options)
    config.compilation_config.static_forward_context = {"0": SimpleNamespace(impl=made)}
    return made


def test_name_of_the_backend_can_be_sent_to_a_process_without_plugins(llama):
    """`vllm serve` sends the configuration to the process of its engine before that process loads plugins."""
    sent = pickle.dumps(config_of(llama[0]).attention_config.backend)
    command = [sys.executable, "-c", "import pickle, sys; print(pickle.load(sys.stdin.buffer).name)"]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(x for x in sys.path if x)}
    done = subprocess.run(command, input=sent, env=env, capture_output=True, timeout=120)
    assert done.stdout.decode().splitlines()[-1:] == [engine.SEAM.NAME], done.stderr.decode()[-2000:]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (dict(sliding_window=128), "layers with a sliding window"),
        (dict(q_lora_rank=8, kv_b_proj=object()), "layers with kv_b_proj, q_lora_rank"),
        (dict(sinks=torch.zeros(4)), "layers with sinks"),
        (dict(alibi_slopes=[1.0]), "layers with ALiBi"),
        (dict(attn_type="encoder"), "layers with attention of type encoder"),
        (dict(kv_sharing_target_layer_name="1"), "layers with a cache shared with another layer"),
    ],
)
def test_unsupported_layers_are_refused(llama, options, said):
    with pytest.raises(NotImplementedError, match=said):
        layer(config_of(llama[0]), **options)


@pytest.mark.parametrize("kind", ["ChunkedLocalAttention", "RSWAAttention", "PrefillPrefixLMAttention"])
def test_layers_with_another_kind_of_cache_are_refused(llama, kind):
    """vLLM asks all layers, or, where none is of the usual kind, makes metadata."""
    config = config_of(llama[0])
    made, kinds = layer(config), importlib.import_module("vllm.model_executor.layers.attention")
    usual, other = SimpleNamespace(impl=made), object.__new__(getattr(kinds, kind))
    other.__dict__["impl"] = made
    config.compilation_config.static_forward_context = {"0": usual, "1": other}
    spec = SimpleNamespace(num_kv_heads=2, head_size=64, block_size=16)
    for ask in (
        lambda: engine.describe(config, spec), lambda: engine.Builder(None, ["1"], config, torch.device("cpu")),
    ):  # fmt: skip
        with pytest.raises(NotImplementedError, match=f"on layers of type {kind}"):
            ask()


@pytest.mark.parametrize(
    ("ours", "options", "said"),
    [
        ("quest", {}, "needs additional_config"),
        ({"method": "icecache"}, {}, "got 'icecache': it stores the tokens of a request in the order of its tree"),
        ({"method": "quest", "kv": "disk"}, {}, "kv must be one of device, host, auto, got 'disk'"),
        ({"method": "quest", "ratio": 3}, {}, "has no hyper-parameter ratio; it has: budget, sink"),
        ({"method": "quest", "block_size": 32}, {}, "block_size is that of the engine, 16, got 32"),
        ({"method": "quest"}, {"block_size": 48}, "block_size of the engine must be a power of two, got 48"),
    ],
)
def test_unknown_options_are_refused(llama, ours, options, said):
    with pytest.raises((ValueError, TypeError), match=said):
        layer(config_of(llama[0], ours, **options))


@pytest.mark.parametrize(
    ("part", "field", "value", "said"),
    [
        (None, "speculative_config", object(), "speculative decoding"),
        (None, "kv_transfer_config", object(), "KV connectors"),
        ("parallel_config", "decode_context_parallel_size", 2, "context parallelism"),
        ("parallel_config", "prefill_context_parallel_size", 2, "context parallelism"),
        ("cache_config", "cache_dtype", "fp8", "a KV cache in another type"),
        ("model_config", "enable_sleep_mode", True, "sleep mode"),
    ],
)
def test_unsupported_engine_settings_are_refused(llama, part, field, value, said):
    config = config_of(llama[0])
    setattr(getattr(config, part) if part else config, field, value)
    with pytest.raises(NotImplementedError, match=said):
        engine.refuse(config)


def test_layers_refuse_unsupported_engine_settings(llama):
    (config := config_of(llama[0])).kv_transfer_config = object()
    with pytest.raises(NotImplementedError, match="KV connectors"):
        layer(config)


def test_changed_block_size_is_refused(llama):
    config = config_of(llama[0])
    layer(config)
    with pytest.raises(ValueError, match="changed its block_size from 16 to 32"):
        engine.describe(config, SimpleNamespace(num_kv_heads=2, head_size=64, block_size=32))


def test_quantised_outputs_are_refused(llama):
    made, nothing = layer(config_of(llama[0])), torch.zeros(0)
    for scale in ("output_scale", "output_block_scale"):
        with pytest.raises(NotImplementedError, match="does not quantise"):
            made.forward(None, nothing, nothing, nothing, nothing, None, nothing, **{scale: torch.ones(1)})


def test_soft_cap_of_a_layer_reaches_its_attention(llama):
    assert layer(config_of(llama[0]), logits_soft_cap=30.0).attention == (0.125, 30.0, None)
    assert layer(config_of(llama[0])).attention == (0.125, 0.0, None)


def test_requests_decoding_beside_prompts_are_decode_steps(llama):
    """Rows: two that decode, two chunks of prompts, one prompt of a single token, one that pads the batch. Where vLLM
    says so, the second is the last token of a prompt."""
    new, lengths = [1, 1, 5, 16, 1, 0], [40, 7, 9, 16, 1, 0]
    starts = torch.tensor([0, *itertools.accumulate(new)], dtype=torch.int32)
    length, to = torch.tensor(lengths, dtype=torch.int32), torch.arange(32)
    batch = engine.CommonAttentionMetadata(
        query_start_loc=starts, query_start_loc_cpu=starts, seq_lens=length, num_reqs=6, num_actual_tokens=24,
        max_query_len=16, max_seq_len=40, block_table_tensor=torch.zeros(6, 3, dtype=torch.int32), slot_mapping=to,
    )  # fmt: skip
    config = config_of(llama[0], {"method": "quest", **SMALL}, max_num_seqs=8)
    layer(config)
    builder = engine.Builder(None, ["0"], config, torch.device("cpu"))
    for known, filling in itertools.product((None, length), (None, torch.tensor(new) > 1, torch.arange(6) > 0)):
        batch.seq_lens_cpu_upper_bound, batch.is_prefilling = known, filling
        found = builder.build(0, batch)
        more = [(1, 1, 2, 6)] if filling is not None and filling[1] else []
        rows = [(p.row, p.first, p.end, p.past) for p in found.prompts]
        assert found.decodes == 2
        assert rows == [*more, (2, 2, 7, 4), (3, 7, 23, 0), (4, 23, 24, 0)]
        assert found.to.tolist() == [*range(24)]
        assert found.lengths.ring_begin.tolist() == [16, 16, 16, 16, 16, 16]
        assert found.lengths.ring_begin.data_ptr() == builder.begin.data_ptr()


def test_short_host_memory_is_refused_with_numbers(llama, monkeypatch):
    config = config_of(llama[0], {"method": "quest", "kv": "host", "host_gib": 1.5})
    layer(config)
    monkeypatch.setattr(engine.host, "available", lambda: 1 << 30)
    with pytest.raises(MemoryError, match=r"host_gib=1.5, but 1.00 GiB are free for each rank"):
        engine.plan(config)
    config = config_of(llama[0], {"method": "quest", "kv": "host"})
    block = layer(config).store.host_bytes
    monkeypatch.setattr(engine.host, "available", lambda: 20 * block)
    with pytest.raises(MemoryError, match=r"17 blocks of 16 tokens take .* GiB of host memory, .* may be used"):
        engine.plan(config)
    layer(config)
    config.cache_config.num_gpu_blocks_override = 41
    monkeypatch.setattr(engine.host, "available", lambda: 50 * block)
    with pytest.raises(MemoryError, match="41 blocks"):
        engine.plan(config)


def test_memory_lost_after_planning_does_not_change_the_plan(llama, monkeypatch):
    """Whoever is next to look, a layer or a rank, finds that less is free; the pool is pinned from the fifth left."""
    config = config_of(llama[0], {"method": "quest", "kv": "host"})
    made = layer(config)
    for free in (50, 48):
        monkeypatch.setattr(engine.host, "available", lambda: free * made.store.host_bytes)  # noqa: B023
        engine.plan(config)
        assert config.cache_config.num_gpu_blocks_override == 40  # what four fifths hold, of 65 for all requests
    config.cache_config.num_gpu_blocks = 40
    engine.Builder(None, ["0"], config, torch.device("cpu"))
    assert made.store.pool is not None


def test_device_memory_that_holds_no_step_is_refused(llama):
    config = config_of(llama[0], {"method": "quest", "kv": "auto", "device_gib": 1e-6})
    made = layer(config)
    with pytest.raises(ValueError, match=r"device_gib=1e-06, but steps of max_num_seqs=\d+ requests need 0.0\d GiB"):
        engine.device_room(config)
    enough = made.store.least_hot_bytes
    config = config_of(llama[0], {"method": "quest", "kv": "auto", "device_gib": enough / engine.GIB})
    layer(config)
    assert engine.device_room(config) == enough


@pytest.mark.parametrize(("used", "index", "room"), [(10, 20, 52.5), (10, 78, 0), (60, 20, 8), (70, 15, 3)])
def test_most_of_the_device_memory_that_vllm_may_use_holds_keys_and_values(llama, monkeypatch, used, index, room):
    """In GiB, of a device with 100 of which vLLM may use nine tenths; at least 2 are left for steps with prompts."""
    config = config_of(llama[0], {"method": "quest", "kv": "auto"})
    config.cache_config.gpu_memory_utilization = 0.9
    layer(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: ((100 - used) * engine.GIB, 100 * engine.GIB))
    assert engine.device_room(config, index * engine.GIB) == pytest.approx(room * engine.GIB)


def auto(monkeypatch, config, store, on_host: int, on_device: int) -> None:
    """Give kv="auto" memory for as many blocks on the host, and on the device with their index."""
    monkeypatch.setattr(engine, "SPARED", 0)
    monkeypatch.setattr(engine.host, "available", lambda: int(on_host * store.host_bytes / engine.USABLE) + 1)
    free = on_device * (store.host_bytes + store.page_bytes)
    config.cache_config.gpu_memory_utilization = 1.0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (free, 2 * free))


@pytest.mark.parametrize(("given", "kept"), [(200, "device"), (80, "auto")])
def test_memory_that_the_user_gives_to_the_cache_counts_instead_of_what_is_free(llama, monkeypatch, given, kept):
    """Of 300 free blocks with their index. 2 GiB for steps with prompts are not taken off what is given."""
    config = config_of(llama[0], {"method": "quest", "kv": "auto", "budget": 16, **SMALL}, max_num_seqs=5)
    store = layer(config).store
    auto(monkeypatch, config, store, 100, 300)
    monkeypatch.setattr(engine, "SPARED", 2 * engine.GIB)
    config.cache_config.kv_cache_memory_bytes = given * (store.host_bytes + store.page_bytes)
    engine.plan(config)
    assert store.kv == kept
    hot = given * (store.host_bytes + store.page_bytes) - 81 * store.page_bytes
    assert kept == "device" or store.slots == hot // store.host_bytes


@pytest.mark.parametrize(
    ("on_host", "on_device", "given", "device"),
    [(30, 29, None, False), (30, 30, None, True), (30, 99, None, True), (80, 64, None, False), (80, 65, None, True),
     (3, 16, None, False), (80, 40, 40, True), (80, 40, 41, False)],
)  # fmt: skip
def test_auto_is_the_device_if_it_holds_as_many_blocks_as_the_host(
    llama, monkeypatch, on_host, on_device, given, device
):
    """Or 65, for all requests, or as many as the user asks for; one request needs 17. vLLM then counts the blocks that
    fit, as with kv="device"."""
    config = config_of(llama[0], {"method": "quest", "kv": "auto", "budget": 16, **SMALL})
    store = layer(config).store
    whole = layer(config_of(llama[0], {"method": "quest", "kv": "device", "budget": 16, **SMALL})).store.page_bytes
    auto(monkeypatch, config, store, on_host, on_device)
    config.cache_config.num_gpu_blocks_override = given
    if on_host < 17 and not device:
        with pytest.raises(MemoryError, match="17 blocks of 16 tokens take"):
            engine.plan(config)
        return
    engine.plan(config)
    assert (store.kv == "device", store.page_bytes == whole) == (device, device)
    planned = given or (None if device else min(on_host, 65))
    assert config.cache_config.num_gpu_blocks_override == planned
    config.cache_config.num_gpu_blocks = planned or 30
    engine.Builder(None, ["0"], config, torch.device("cpu"))
    assert (store.hot is None) == device


@pytest.mark.parametrize(
    ("on_device", "said"),
    [(30, 'kv="auto" keeps keys and values on the device, which holds about 30 blocks'),
     (29, "30 blocks, 30.00 GiB of keys and values in host memory, {hot:.2f} GiB of hot buffers on the device")],
)  # fmt: skip
def test_log_says_where_keys_and_values_are(llama, monkeypatch, on_device, said):
    """In GiB; here a block has one."""
    config = config_of(llama[0], {"method": "quest", "kv": "auto", "budget": 16, **SMALL})
    store, lines = layer(config).store, []
    auto(monkeypatch, config, store, 30, on_device)
    monkeypatch.setattr(engine, "GIB", store.host_bytes)
    monkeypatch.setattr(engine.LOG, "info", lambda text, *numbers: lines.append(text % numbers))
    engine.plan(config)
    hot = store._hot_rows.nbytes / engine.GIB if store.kv == "auto" else 0
    assert lines == ["torchsparsekv: " + said.format(hot=hot)]


def test_auto_on_the_device_takes_no_more_than_device_gib(llama, monkeypatch):
    """Of 65 blocks for all requests the host holds 20, and `device_gib` 30."""
    options = {"method": "quest", "kv": "auto", "budget": 16, **SMALL}
    block = layer(config_of(llama[0], options)).store.host_bytes
    config = config_of(llama[0], options | {"device_gib": 30 * block / engine.GIB})
    store = layer(config).store
    auto(monkeypatch, config, store, 20, 99)
    engine.plan(config)
    assert (store.kv, config.cache_config.num_gpu_blocks_override) == ("device", 30)


def test_device_gib_above_what_is_free_is_refused(llama, monkeypatch):
    config = config_of(llama[0], {"method": "quest", "kv": "auto", "device_gib": 3})
    layer(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (2 * engine.GIB, 9 * engine.GIB))
    with pytest.raises(MemoryError, match=r"device_gib=3, but 2\.00 GiB of device memory are free"):
        engine.plan(config)


def test_all_layers_choose_one_place(llama, monkeypatch):
    """The device has just enough for the blocks of a layer with 2 kv heads and one with 4."""
    config = config_of(llama[0], {"method": "quest", "kv": "auto"})
    made = [layer(config), layer(config)]
    with vllm.config.set_current_vllm_config(config):
        made[1] = engine.Impl(4, 64, 0.125, 4)
    config.compilation_config.static_forward_context = {str(i): SimpleNamespace(impl=x) for i, x in enumerate(made)}
    monkeypatch.setattr(engine.host, "available", lambda: 0)
    monkeypatch.setattr(engine, "blocks_on_device", lambda _: 17)
    engine.plan(config)
    assert [x.store.kv for x in made] == ["device", "device"]


def test_ranks_share_the_least_free_device_memory(llama, monkeypatch):
    """It is measured once."""
    config = config_of(llama[0], {"method": "quest", "kv": "auto"})
    layer(config)
    monkeypatch.setattr(engine, "least_of_ranks", lambda _, count: count - 7)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config.cache_config.gpu_memory_utilization = 1.0
    for free in (100, 50):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 200))
        assert engine.free_for_cache(config) == 93


def test_device_that_holds_no_step_is_refused_without_device_gib(llama, monkeypatch):
    config = config_of(llama[0], {"method": "quest", "kv": "auto"})
    made = layer(config)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(MemoryError, match=r"steps of max_num_seqs=4 requests need .* GiB of device memory"):
        engine.refuse_short_device(config, made.store.least_hot_bytes - 1)
    engine.refuse_short_device(config, made.store.least_hot_bytes)


@pytest.mark.parametrize("launcher", ["mp", "external_launcher"])
def test_workers_with_their_own_configuration_share_the_plan_in_bytes(llama, monkeypatch, launcher):
    config = config_of(llama[0], {"method": "quest", "kv": "host"})
    config.parallel_config.world_size, config.parallel_config.distributed_executor_backend = 2, launcher
    monkeypatch.setattr(engine, "least_of_ranks", lambda _, count: count)
    made = layer(config)
    engine.plan(config)
    assert config.cache_config.num_gpu_blocks_override == 65
    told = 65 * made.store.page_bytes if launcher == "mp" else None
    assert config.cache_config.kv_cache_memory_bytes == told


def test_planned_pool_above_host_memory_is_refused(llama, monkeypatch):
    """Where workers are processes of their own, vLLM has the last word on the plan."""
    config = config_of(llama[0], {"method": "quest", "kv": "host"})
    made = layer(config)
    config.cache_config.num_gpu_blocks = 50
    monkeypatch.setattr(engine.host, "available", lambda: 40 * made.store.host_bytes)
    with pytest.raises(MemoryError, match="give num_gpu_blocks_override=32"):
        engine.Builder(None, ["0"], config, torch.device("cpu"))


def test_memory_with_gaps_between_the_blocks_of_a_layer_is_refused(llama):
    """Some layouts of vLLM put other layers there; a flat view would be a copy, and nobody would read it."""
    store = layer(config_of(llama[0])).store
    pages = torch.zeros(4, 2, store.page_bytes, dtype=torch.uint8)
    store.bind(pages[:2].flatten(0, 1))
    with pytest.raises(ValueError, match="needs memory without gaps"):
        store.bind(pages[:, 0])


@pytest.mark.parametrize(
    ("place", "compiled"),
    [*((place, False) for place in serve.OURS), *(pytest.param(place, False, marks=native) for place in serve.NATIVE),
     pytest.param("flash", True, marks=native), pytest.param("device", True, marks=native)],
)  # fmt: skip
def test_benchmark_measures_what_its_rows_say(place, compiled, monkeypatch, tmp_path):
    """Every request decodes in every timed step; one that is not admitted is said and not timed."""
    monkeypatch.setattr(serve._common, "prepare", lambda *_: torch.device("cpu"))
    theirs = serve.engine_options  # which take all the memory there is
    monkeypatch.setattr(serve, "engine_options", lambda *x: {**theirs(*x), "kv_cache_memory_bytes": 64 << 20})
    options: dict = dict(gpu_gib=4.0) if GPU else {}
    options |= dict(native=NATIVE, compiled=compiled, device_gib=0.125 if place == "auto" else 0.0)
    options |= dict(contexts=(1500,), batches=(1, 3, 0, 9), places=(place,), budget=64, steps=3, most=4, grows=40)
    rows = serve.run(serve.Options(shape="tiny", **options), tmp_path / "serve.json")["rows"]
    assert [r["batch"] for r in rows] == [1, 3, 4, 9]
    assert all(r["tpot_ms"] > 0 and r["tokens_per_s"] > 0 for r in rows[:3])
    assert "tpot_ms" not in rows[3]
    assert (rows[2]["fetched_blocks"] > 0) == (place == "host")


def test_benchmark_stores_prompts_without_computing_them(monkeypatch):
    """In the benchmark: steps of more tokens than there are requests; all is as before afterwards."""
    llama = importlib.import_module("vllm.model_executor.models.llama")
    monkeypatch.setattr(llama.LlamaMLP, "forward", lambda self, x: x + 1)
    monkeypatch.setattr(llama.LlamaModel, "__call__", lambda self, ids, positions: self.forward(ids, positions) + 10)
    monkeypatch.setattr(llama.LlamaModel, "forward", lambda self, ids, positions: llama.LlamaMLP.forward(None, ids))
    model, x = object.__new__(llama.LlamaModel), torch.zeros(5)
    before = llama.LlamaMLP.forward, llama.LlamaModel.__call__, serve._blocks.table_prompt
    with serve.stored_prompts(4):
        assert (model(x, x) == 0).all()
        assert (model(x[:4], x[:4]) == 11).all()  # computed, by what vLLM compiled
        assert not serve._blocks.table_prompt(x + 1, x, x).any()
    assert (llama.LlamaMLP.forward, llama.LlamaModel.__call__, serve._blocks.table_prompt) == before


def test_engine_releases_its_graph_pool(llama, monkeypatch):
    """torch refuses a pool whose graphs are gone."""
    platform = type(importlib.import_module("vllm.platforms").current_platform)
    with serving(llama[0], ours={"method": "quest"}):
        monkeypatch.setattr(platform, "_global_graph_pool", object())
    assert platform._global_graph_pool is None
