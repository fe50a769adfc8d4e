"""Time per token and tokens per second of vLLM: its own backends, and ours with keys and values on device or host.

`flash` is vLLM's FlashAttention over 16-bit keys and values, `flash-fp8` over fp8 keys and values. Both need vLLM's
native code: with `--native`, norms and activations of all places are native kernels too.
With `--compiled`, torch.compile makes these kernels, which is vLLM's default.

Prompts are stored, not computed: their layers skip attention and MLP. Decode steps of the whole engine are timed,
scheduler and sampler included. With `--trace` our layers choose, but attend to the blocks that a real model
selected. An engine that fails gets a row that says so, and the next one is measured.
"""
import contextlib
import dataclasses
import importlib
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchsparsekv.engines import _blocks
from torchsparsekv.engines._blocks import BlockStore
from torchsparsekv.engines._options import read_options
from torchsparsekv.engines._vllm_seams import seam
from torchsparsekv.method import Method
from torchsparsekv_benchmarks import _results, _traces
from torchsparsekv_benchmarks._options import at_least, check_measured, different, option, parse, said
from torchsparsekv_benchmarks.speed import _common, decode
from torchsparsekv_benchmarks.speed._replay import Replay, replay_in_engine

BACKENDS = {
    "triton": "TRITON_ATTN", "flash": "FLASH_ATTN", "flash-fp8": "FLASH_ATTN", "device": None, "host": None,
    "auto": None,
}  # fmt: skip
OURS = tuple(place for place, backend in BACKENDS.items() if backend is None)
NATIVE = tuple(place for place, backend in BACKENDS.items() if backend == "FLASH_ATTN")
CHUNK = 8192  # tokens of a step with prompts
# Steps before those that are timed. In a replay the hot buffer first fills with blocks that steps select again.
WARM, WARM_REPLAY = 8, 64


@dataclass(frozen=True)
class Options:
    shape: str = "llama-3.1-8b"
    contexts: tuple[int, ...] = (32768, 131072)
    batches: tuple[int, ...] = option((1, 8, 0), "Requests, comma-separated; 0: the most admitted, up to --most.")
    places: tuple[str, ...] = option(
        ("triton", "device", "host"),
        "Backends to compare, comma-separated: triton, flash and flash-fp8 are vLLM's own; device, host and auto are "
        "ours, with keys and values there.",
    )
    native: bool = option(False, "vLLM has its native code, and uses it in all places.")
    compiled: bool = option(False, "torch.compile as vLLM uses it by default; needs native.")
    methods: tuple[str, ...] = option(("quest",), "Comma-separated; device, host and auto are measured with each.")
    budget: int = 1024
    hyper: tuple[str, ...] = option((), "Hyper-parameters of methods, as METHOD.NAME=VALUE, comma-separated.")
    block: int = option(16, "Tokens of a block of vLLM.")
    steps: int = 64
    most: int = option(64, "max_num_seqs of vLLM; with host the hot buffer has room for that many requests.")
    gpu_gib: float = option(0.0, "GiB of GPU memory that vLLM may use; 0: vLLM decides.")
    host_gib: float = option(0.0, "GiB of host memory for host and auto; 0: what the plugin takes by default.")
    device_gib: float = option(0.0, "GiB of the hot buffers of auto; 0: what the plugin takes by default.")
    grows: int = option(512, "Tokens that a request may generate.")
    trace: str = option("", "Layers choose, but attend to the blocks of this file, from `torchsparsekv record`.")
    shared: bool = option(False, "One engine for all contexts of a place, made for the longest; else one for each.")
    isolated: bool = option(False, "Every engine in a process of its own.")
    limit: int = option(300, "With isolated: seconds after which an engine is given up.")

    def check(self) -> None:
        different(self, "contexts", "batches", "places", "methods")
        at_least(self, contexts=1, batches=0, block=1, steps=1, most=1, limit=1, grows=self.steps + self.warm + 2)
        check_measured(self.hyper, self.methods)
        for name in self.methods:
            self.method(name)
        if unknown := sorted(set(self.places) - set(BACKENDS)):
            raise ValueError(f"places must be of {', '.join(BACKENDS)}, got {', '.join(unknown)}")
        if not self.native and (these := [place for place in self.places if place in NATIVE]):
            raise ValueError(f"places {', '.join(these)} need native: vLLM with its native code")
        if self.compiled and not self.native:
            raise ValueError("compiled needs native: vLLM with its native code")
        if self.trace and min(self.contexts) < (least := _traces.contents(Path(self.trace))[0]["length"]):
            raise ValueError(f"{Path(self.trace).name} needs contexts of at least {least}, got {min(self.contexts)}")
        for name in self.methods if self.trace else ():
            self.selected(name)

    @property
    def warm(self) -> int:
        return WARM_REPLAY if self.trace else WARM

    def method(self, name: str) -> Method:
        return read_options(self.ours(name), self.block).method

    def selected(self, name: str) -> torch.Tensor:
        """The blocks of the trace that this method selected."""
        return _traces.read(Path(self.trace), name, self.method(name).budget)

    def ours(self, method: str) -> dict[str, Any]:
        """What the library is told of a method."""
        return {"method": method, "budget": self.budget} | parse(self.hyper).get(method, {})

    def told(self, method: str) -> dict[str, Any]:
        """What a row says of a method: its own hyper-parameters, and the groups of its estimate of the rest."""
        if not method:
            return {}
        rest = self.method(method).rest
        steered = {"trace": Path(self.trace).name} if self.trace else {}
        return said(parse(self.hyper).get(method, {})) | ({"rest": rest} if rest else {}) | steered


@dataclass(frozen=True)
class Engine:
    """One vLLM. method: of the places of this library, else empty. contexts: of its requests."""

    place: str
    method: str
    contexts: tuple[int, ...]

    @property
    def named(self) -> dict[str, str]:
        """The first fields of its rows."""
        return {"place": self.place} | ({"method": self.method} if self.method else {})


def engines(o: Options) -> list[Engine]:
    together = [o.contexts] if o.shared else [(context,) for context in o.contexts]
    return [
        Engine(place, method, contexts)
        for contexts, place in itertools.product(together, o.places)
        for method in (o.methods if place in OURS else ("",))
    ]


@contextlib.contextmanager
def stored_prompts(most: int) -> Iterator[None]:
    """Steps of more than `most` tokens skip the MLP, steps with a prompt skip attention.

    Enter it after the engine has started: what vLLM compiled and captured computes both, and these steps bypass it.
    """
    from vllm.model_executor.models.llama import LlamaMLP, LlamaModel

    mlp, model, prompt = LlamaMLP.forward, LlamaModel.__call__, _blocks.table_prompt
    theirs = {impl: impl.forward for impl in _implementations()}

    def leaving_prompts_out(attend):
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *others, **more):
            if attn_metadata is not None and attn_metadata.max_query_len > 1:
                return output.fill_(0)
            return attend(self, layer, query, key, value, kv_cache, attn_metadata, output, *others, **more)

        return forward

    def leaving_mlp_out(self, ids, positions, *others, **more):
        if len(positions) <= most:
            return model(self, ids, positions, *others, **more)
        LlamaMLP.forward = lambda self, x: x
        try:
            return self.forward(ids, positions, *others, **more)
        finally:
            LlamaMLP.forward = mlp

    LlamaModel.__call__ = leaving_mlp_out
    for impl, attend in theirs.items():
        impl.forward = leaving_prompts_out(attend)
    _blocks.table_prompt = lambda q, *others: torch.zeros_like(q)
    try:
        yield
    finally:
        LlamaModel.__call__, _blocks.table_prompt = model, prompt
        for impl, attend in theirs.items():
            impl.forward = attend


def _implementations() -> list[Any]:
    """The attention of vLLM's own backends, as far as this vLLM has it."""
    found = []
    for module, name in (("triton_attn", "TritonAttentionImpl"), ("flash_attn", "FlashAttentionImpl")):
        with contextlib.suppress(ImportError):
            found.append(getattr(importlib.import_module(f"vllm.v1.attention.backends.{module}"), name))
    return found


def graph_sizes(most: int) -> list[int]:
    """The numbers of requests whose steps are captured. A step of fewer requests runs in the next larger graph, and one
    of more than the largest would run eagerly."""
    return sorted({1, *range(8, most, 8), most})


def engine_options(o: Options, of: Engine) -> dict[str, Any]:
    gib = {"host_gib": o.host_gib if of.place != "device" else 0, "device_gib": o.device_gib * (of.place == "auto")}
    ours = {"kv": of.place} | o.ours(of.method) | {name: x for name, x in gib.items() if x}
    total = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    share: dict[str, Any] = {"gpu_memory_utilization": o.gpu_gib * 2**30 / total} if o.gpu_gib and total else {}
    share |= {"kv_cache_dtype": "fp8"} if of.place == "flash-fp8" else {}
    return dict(
        graphs=graph_sizes(o.most) if total else (), native=o.native, compiled=o.compiled, load_format="dummy",
        dtype="bfloat16", max_model_len=max(of.contexts) + o.grows, max_num_seqs=o.most, max_num_batched_tokens=CHUNK,
        block_size=o.block, enable_prefix_caching=False, disable_log_stats=True, ours=ours if of.method else None,
        **share,
    )  # fmt: skip


@contextlib.contextmanager
def engine(
    path: str, backend: str, *, graphs: Sequence[int] = (), ours: dict[str, Any] | None = None, native: bool = False,
    compiled: bool = False, captured: str = "", **options: Any,
) -> Iterator[Any]:  # fmt: skip
    """A vLLM that is gone afterwards. graphs: the numbers of requests whose decode steps are captured; none: eager.

    ours: what the library is told. native: with vLLM's native kernels for all but attention. compiled: torch.compile
    makes those kernels. captured: the mode of graphs. Without it decode steps are captured, and with a backend of vLLM
    also the pieces of compiled steps with prompts.
    """
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    how: dict[str, Any] = {"mode": 3 if compiled and graphs else 0}
    if graphs:
        captured = captured or ("FULL_AND_PIECEWISE" if compiled and ours is None else "FULL_DECODE_ONLY")
        how |= {"cudagraph_mode": captured, "cudagraph_capture_sizes": [*graphs]}
    told: dict[str, Any] = {"additional_config": {"torchsparsekv": ours}} if ours is not None else {}
    if not native:
        how |= {"custom_ops": ["none"]}
        told |= {"kernel_config": {"ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}}}
    llm = vllm.LLM(
        path, attention_backend=backend, skip_tokenizer_init=True, generation_config="vllm", seed=0,
        enforce_eager=not graphs, compilation_config=how, **told, **options,
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
        # The next engine is to have a pool of its own: torch refuses one whose graphs are gone.
        type(current_platform)._global_graph_pool = None


@contextlib.contextmanager
def serving(o: Options, of: Engine) -> Iterator[tuple[Any, Replay | None]]:
    """An engine with random weights, and its replay, if there is a trace."""
    from transformers import AutoConfig

    fields = dict(_common.SHAPES[o.shape])
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        config = AutoConfig.for_model(fields.pop("model_type"), **fields, pad_token_id=0, eos_token_id=None)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        replay = None
        if o.trace and of.method:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
            layers, heads = config.num_hidden_layers, config.num_key_value_heads
            replay = Replay(o.selected(of.method), layers, o.most, heads, device)
            stack.enter_context(replay_in_engine(o.method(of.method), replay))
        llm = stack.enter_context(engine(folder, BACKENDS[of.place] or seam().NAME, **engine_options(o, of)))
        llm.apply_model(_randomise)
        stack.enter_context(stored_prompts(o.most))
        yield llm, replay


def _randomise(model: torch.nn.Module) -> None:
    """vLLM's dummy weights are so small that all keys are alike."""
    torch.manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim > 1:
                p.normal_(0, 0.02)
            else:  # of the norms
                p.fill_(1.0)


def stores_of(llm) -> list[BlockStore]:
    found: list[BlockStore] = []
    impls = lambda model: (x.impl for x in model.modules() if hasattr(x, "impl"))  # noqa: E731
    llm.apply_model(lambda model: found.extend(x.store for x in impls(model) if hasattr(x, "store")))
    return found


def admitted(llm, o: Options, context: int) -> int:
    """How many requests of that length the cache holds at a time."""
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    return (blocks - 1) // -(-(context + o.grows) // o.block)


def fetched(stores: list[BlockStore], step) -> float:
    """Blocks per kv head and layer that a step brings to the device."""
    hot = [s.hot for s in stores if s.hot is not None]
    held = [h.block_of.clone() for h in hot]
    step()
    new = [(h.block_of != was).float().sum(2).mean().item() for h, was in zip(hot, held)]
    return statistics.mean(new) if new else 0.0


def measure(llm, replay: Replay | None, o: Options, batch: int, context: int) -> dict[str, float]:
    """The median time of a step in which all requests decode."""
    from vllm import SamplingParams

    engine, ids = llm.llm_engine, [str(i) for i in range(batch)]
    # Greedy tokens of random weights repeat themselves, and so would the choice of blocks.
    sampling = SamplingParams(temperature=1.0, max_tokens=o.grows, ignore_eos=True, detokenize=False)
    g = torch.Generator().manual_seed(batch)
    put = replay or (lambda: None)
    for i in ids:
        prompt = torch.randint(3, 900, (context,), generator=g).tolist()
        engine.add_request(i, {"prompt_token_ids": prompt}, sampling)
    try:
        begun: set[str] = set()
        while len(begun) < batch:
            begun |= {x.request_id for x in engine.step() if x.outputs[0].token_ids}
        for _ in range(o.warm):
            put()
            engine.step()
        times = []
        for _ in range(o.steps):
            put()
            before = time.perf_counter()
            done = engine.step()
            times.append(time.perf_counter() - before)
            if len(done) != batch or any(x.finished for x in done):
                raise RuntimeError(f"{batch} requests were to decode together, {len(done)} did: raise grows")
        put()
        brought = fetched(stores_of(llm), engine.step)
    finally:
        engine.abort_request(ids)
    ms = statistics.median(times) * 1e3
    return {"tpot_ms": ms, "tokens_per_s": batch / ms * 1e3, "fetched_blocks": brought}


def run(o: Options, out: Path | None = None) -> dict:
    o.check()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # steps are called from here
    _common.prepare(o.methods, o)
    rows: list[dict] = []
    for row in rows_in_processes(o) if o.isolated else rows_here(o):
        print(row, flush=True)
        rows.append(row)
        _results.save("serve", rows, dataclasses.asdict(o), out)
    result = _results.finish("serve", rows, dataclasses.asdict(o), out)
    if all("failed" in row for row in rows):
        raise RuntimeError(f"nothing was measured: {rows[0]['failed']}")
    return result


def rows_here(o: Options) -> Iterator[dict]:
    for of in engines(o):
        yield from rows_of(o, of)
        decode.collect()  # nothing holds the engine any more, and the next one asks for most of the GPU


def rows_of(o: Options, of: Engine) -> Iterator[dict]:
    """Of one engine, by context and batch."""
    begun = time.perf_counter()
    try:
        with serving(o, of) as (llm, replay):
            print(f"{of}: started in {time.perf_counter() - begun:.1f} s", flush=True)
            for context in of.contexts:
                held = admitted(llm, o, context)
                room = min(held, o.most)
                for batch in dict.fromkeys(b or room for b in o.batches):
                    row = of.named | o.told(of.method) | {"context": context, "batch": batch, "admitted": held}
                    yield row | (_measured(llm, replay, o, batch, context) if 0 < batch <= room else {})
    except Exception as e:
        yield from failures(of, _said(e))


def _measured(llm, *how: Any) -> dict[str, Any]:
    try:
        return measure(llm, *how)
    except Exception as e:
        return {"failed": _said(e)}


def _said(e: Exception) -> str:
    traceback.print_exception(e)
    return f"{type(e).__name__}: {next(iter(str(e).splitlines()), '')}"


def failures(of: Engine, why: str) -> list[dict]:
    """The rows of an engine that did not start, or broke."""
    return [of.named | {"context": context, "failed": why} for context in of.contexts]


# ---------------------------------------------------------------- engines in processes of their own


def rows_in_processes(o: Options) -> Iterator[dict]:
    """The next process imports vLLM while the one before it measures, and touches the GPU when that one has ended."""
    all_of_them = engines(o)
    begun = [_begun(o, all_of_them[0])]
    try:
        for i, of in enumerate(all_of_them):
            process, pipe = begun.pop()
            begun += [_begun(o, x) for x in all_of_them[i + 1 : i + 2]]
            yield from _rows_of_process(process, pipe, of, o.limit)
    finally:
        for process, _ in begun:
            process.kill()


def _begun(o: Options, of: Engine) -> tuple[Any, Any]:
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=_in_process, args=(theirs, o, of))
    process.start()
    theirs.close()
    return process, pipe


def _rows_of_process(process, pipe, of: Engine, limit: float) -> Iterator[dict]:
    until = time.monotonic() + limit
    why = f"was given up after {limit} s"
    try:
        pipe.send("begin")
        while pipe.poll(max(until - time.monotonic(), 0)):
            if (row := pipe.recv()) is None:
                why = ""
                break
            yield row
    except (EOFError, OSError):
        process.join(10)
        why = f"its process ended with {process.exitcode}"
    finally:
        process.join(0 if why else 20)
        process.kill()
        process.join()
    if why:
        yield from failures(of, why)


def _in_process(pipe, o: Options, of: Engine) -> None:
    importlib.import_module("vllm.entrypoints.llm")
    pipe.recv()
    for row in rows_of(o, of):
        pipe.send(row)
    pipe.send(None)
