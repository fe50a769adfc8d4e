"""Time per token and tokens per second of vLLM: its own backends, and ours with keys and values on device or host.

`flash` is vLLM's FlashAttention over 16-bit keys and values, `flash-fp8` over fp8 keys and values. Both need vLLM's
native code; `--native` says that it is installed. Then norms and activations of all places are native kernels too.

Prompts are stored, not computed: their layers skip attention and MLP. Decode steps of the whole engine are timed,
scheduler and sampler included.
"""
import contextlib
import dataclasses
import importlib
import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from torchsparsekv.engines._blocks import BlockStore
from torchsparsekv.engines._vllm_seams import seam
from torchsparsekv_benchmarks import _results
from torchsparsekv_benchmarks._options import at_least, different, option
from torchsparsekv_benchmarks.speed import _common, decode

BACKENDS = {"triton": "TRITON_ATTN", "flash": "FLASH_ATTN", "flash-fp8": "FLASH_ATTN", "device": None, "host": None}
OURS = tuple(place for place, backend in BACKENDS.items() if backend is None)
NATIVE = tuple(place for place, backend in BACKENDS.items() if backend == "FLASH_ATTN")
BLOCK, CHUNK, WARM = 16, 8192, 8  # tokens of a block, of a step with prompts; steps before those that are timed


@dataclass(frozen=True)
class Options:
    shape: str = "llama-3.1-8b"
    contexts: tuple[int, ...] = (32768, 131072)
    batches: tuple[int, ...] = option((1, 8, 0), "Requests, comma-separated; 0: the most admitted, up to --most.")
    places: tuple[str, ...] = option(
        ("triton", "device", "host"), "comma-separated: triton, flash and flash-fp8 are vLLM's own backends"
    )
    native: bool = option(False, "vLLM has its native code, and uses it in all places.")
    method: str = "quest"
    budget: int = 1024
    steps: int = 64
    most: int = option(64, "max_num_seqs of vLLM; with host the hot buffer has room for that many requests.")
    gpu_gib: float = option(0.0, "GiB of GPU memory that vLLM may use; 0: vLLM decides.")
    grows: int = option(512, "Tokens that a request may generate.")

    def check(self) -> None:
        different(self, "contexts", "batches", "places")
        at_least(self, contexts=1, batches=0, budget=BLOCK, steps=1, most=1, grows=self.steps + WARM + 2)
        if unknown := sorted(set(self.places) - set(BACKENDS)):
            raise ValueError(f"places must be of {', '.join(BACKENDS)}, got {', '.join(unknown)}")
        if not self.native and (these := [place for place in self.places if place in NATIVE]):
            raise ValueError(f"places {', '.join(these)} need native: vLLM with its native code")


@contextlib.contextmanager
def stored_prompts(most: int) -> Iterator[None]:
    """Steps of more tokens than there are requests leave attention and MLP out."""
    from vllm.model_executor.models.llama import LlamaMLP

    mlp, prompt = LlamaMLP.forward, BlockStore.prompt
    theirs = {impl: impl.forward for impl in _implementations()}

    def leaving_prompts_out(attend):
        def forward(self, layer, query, key, value, kv_cache, attn_metadata, output, *others, **more):
            if attn_metadata is not None and attn_metadata.max_query_len > 1:
                return output.fill_(0)
            return attend(self, layer, query, key, value, kv_cache, attn_metadata, output, *others, **more)

        return forward

    LlamaMLP.forward = lambda self, x: x if x.shape[0] > most else mlp(self, x)
    for impl, attend in theirs.items():
        impl.forward = leaving_prompts_out(attend)
    BlockStore.prompt = lambda self, q, *others: torch.zeros_like(q)  # type: ignore[method-assign]
    try:
        yield
    finally:
        LlamaMLP.forward, BlockStore.prompt = mlp, prompt  # type: ignore[method-assign]
        for impl, attend in theirs.items():
            impl.forward = attend


def _implementations() -> list[Any]:
    """The attention of vLLM's own backends, as far as this vLLM has it."""
    found = []
    for module, name in (("triton_attn", "TritonAttentionImpl"), ("flash_attn", "FlashAttentionImpl")):
        with contextlib.suppress(ImportError):
            found.append(getattr(importlib.import_module(f"vllm.v1.attention.backends.{module}"), name))
    return found


def engine_options(o: Options, place: str, context: int) -> dict[str, Any]:
    sizes = [n for n in sorted({1, *range(8, o.most + 8, 8)}) if n <= max(o.most, 1)]
    ours = {"method": o.method, "kv": place, "budget": o.budget}
    total = torch.cuda.get_device_properties(0).total_memory if torch.cuda.is_available() else 0
    share: dict[str, Any] = {"gpu_memory_utilization": o.gpu_gib * 2**30 / total} if o.gpu_gib and total else {}
    share |= {"kv_cache_dtype": "fp8"} if place == "flash-fp8" else {}
    return dict(
        graphs=sizes if total else (), native=o.native, load_format="dummy", dtype="bfloat16",
        max_model_len=context + o.grows, max_num_seqs=o.most, max_num_batched_tokens=CHUNK, block_size=BLOCK,
        enable_prefix_caching=False, disable_log_stats=True, ours=ours if place in OURS else None, **share,
    )  # fmt: skip


@contextlib.contextmanager
def engine(
    path: str, backend: str, *, graphs: Sequence[int] = (), ours: dict[str, Any] | None = None, native: bool = False,
    **options: Any,
) -> Iterator[Any]:  # fmt: skip
    """A vLLM that is gone afterwards, with graphs for decode steps of so many requests each; without any it is eager.

    ours: what the library is told. native: with vLLM's native kernels for all but attention.
    """
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.platforms import current_platform

    compiled: dict[str, Any] = {"mode": 0}
    if graphs:
        compiled |= {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [*graphs]}
    told: dict[str, Any] = {"additional_config": {"torchsparsekv": ours}} if ours is not None else {}
    if not native:
        compiled |= {"custom_ops": ["none"]}
        told |= {"kernel_config": {"ir_op_priority": {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}}}
    llm = vllm.LLM(
        path, attention_backend=backend, skip_tokenizer_init=True, generation_config="vllm", seed=0,
        enforce_eager=not graphs, compilation_config=compiled, **told, **options,
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        cleanup_dist_env_and_memory()
        # The next engine is to have a pool of its own: torch takes none whose graphs are all gone.
        type(current_platform)._global_graph_pool = None


@contextlib.contextmanager
def serving(o: Options, place: str, context: int) -> Iterator[Any]:
    """An engine with random weights."""
    from transformers import AutoConfig

    fields = dict(_common.SHAPES[o.shape])
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.for_model(fields.pop("model_type"), **fields, pad_token_id=0, eos_token_id=None)
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(folder)
        with engine(folder, BACKENDS[place] or seam().NAME, **engine_options(o, place, context)) as llm:
            llm.apply_model(_randomise)
            yield llm


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
    return (blocks - 1) // -(-(context + o.grows) // BLOCK)


def fetched(stores: list[BlockStore], step) -> float:
    """Blocks per kv head and layer that a step brings to the device."""
    hot = [s.hot for s in stores if s.hot is not None]
    held = [h.block_of.clone() for h in hot]
    step()
    new = [(h.block_of != was).float().sum(2).mean().item() for h, was in zip(hot, held)]
    return statistics.mean(new) if new else 0.0


def measure(llm, o: Options, batch: int, context: int) -> dict[str, float]:
    """Medians over steps in which all requests decode."""
    from vllm import SamplingParams

    engine, ids = llm.llm_engine, [str(i) for i in range(batch)]
    # Greedy tokens of random weights repeat themselves, and so would the choice of blocks.
    sampling = SamplingParams(temperature=1.0, max_tokens=o.grows, ignore_eos=True, detokenize=False)
    g = torch.Generator().manual_seed(batch)
    for i in ids:
        prompt = torch.randint(3, 900, (context,), generator=g).tolist()
        engine.add_request(i, {"prompt_token_ids": prompt}, sampling)
    begun: set[str] = set()
    while len(begun) < batch:
        begun |= {x.request_id for x in engine.step() if x.outputs[0].token_ids}
    for _ in range(WARM):
        engine.step()
    times = []
    for _ in range(o.steps):
        before = time.perf_counter()
        done = engine.step()
        times.append(time.perf_counter() - before)
        if len(done) != batch or any(x.finished for x in done):
            raise RuntimeError(f"{batch} requests were to decode together, {len(done)} did: raise grows")
    brought = fetched(stores_of(llm), engine.step)
    engine.abort_request(ids)
    ms = statistics.median(times) * 1e3
    return {"tpot_ms": ms, "tokens_per_s": batch / ms * 1e3, "fetched_blocks": brought}


def run(o: Options, out: Path | None = None) -> dict:
    o.check()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # steps are called from here
    _common.prepare((o.method,), o)
    rows: list[dict] = []
    for context, place in itertools.product(o.contexts, o.places):
        for row in rows_of(o, place, context):
            print(row, flush=True)
            rows.append(row)
            _results.save("serve", rows, dataclasses.asdict(o), out)
        decode.collect()  # nothing holds the engine any more, and the next one asks for most of the GPU
    return _results.finish("serve", rows, dataclasses.asdict(o), out)


def rows_of(o: Options, place: str, context: int) -> Iterator[dict]:
    """Of one engine, by batch."""
    with stored_prompts(o.most), serving(o, place, context) as llm:
        held = admitted(llm, o, context)
        room = min(held, o.most)
        for batch in dict.fromkeys(b or room for b in o.batches):
            row = {"place": place, "context": context, "batch": batch, "admitted": held}
            yield row | (measure(llm, o, batch, context) if batch <= room else {})
