"""Attention for vLLM: decode steps attend to the blocks that a method selects, prompts and their chunks to all tokens.

A block of the cache of this backend holds the index of a method, with keys and values or without. So layers with this
backend declare a block of bytes (`describe`). What differs between versions of vLLM is in the seams (_vllm_seams.py).
"""
import itertools
import logging
import weakref
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from vllm.config import ParallelConfig, VllmConfig, get_current_vllm_config
from vllm.distributed.parallel_state import get_world_group
from vllm.model_executor.layers.attention import Attention as Layer
from vllm.v1.attention.backend import (
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import AttentionSpec

from torchsparsekv import host
from torchsparsekv.engines import _vllm_seams
from torchsparsekv.engines._blocks import BlockStore
from torchsparsekv.engines._options import read_options
from torchsparsekv.ops._machinery.chain import mapped
from torchsparsekv.ops.store.views import Attention, Lengths

VERSION, SEAM = _vllm_seams.version(), _vllm_seams.seam()
USABLE = 0.8  # share of the free host memory that is used without `host_gib`
GIB = 2**30
SPARED = 2 * GIB  # of the device memory, what is left for steps with prompts at least
LOG = logging.getLogger("vllm.torchsparsekv")  # vLLM prints what its own loggers and their children say


def refuse(config: VllmConfig) -> None:
    """Refuse configurations that do not work with selected blocks."""
    parallel = config.parallel_config
    reasons = {
        "speculative decoding": config.speculative_config is not None,
        "KV connectors": config.kv_transfer_config is not None,
        "context parallelism": parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1,
        "a KV cache in another type than the model's": config.cache_config.cache_dtype != "auto",
        "sleep mode": config.model_config.enable_sleep_mode,  # it discards a cache, and the index would not know
    }
    for what, wanted in reasons.items():
        if wanted:
            raise NotImplementedError(f"torchsparsekv does not work with {what} in vllm {VERSION}")


def refuse_kinds(config: VllmConfig) -> None:
    """Refuse layers that describe their cache themselves: they attend to a part of it, or to later tokens."""
    for layer in config.compilation_config.static_forward_context.values():
        if _is_ours(layer) and getattr(type(layer), "get_kv_cache_spec", Layer.get_kv_cache_spec) is not (
            Layer.get_kv_cache_spec
        ):
            kind = type(layer).__name__
            raise NotImplementedError(f"torchsparsekv does not work in vllm {VERSION} on layers of type {kind}")


@dataclass(frozen=True)
class Prompt:
    """The new tokens of one request.

    row: its row in the tables. first, end: its tokens in the batch. past: how many tokens it had before.
    """

    row: int
    first: int
    end: int
    past: int


@dataclass(frozen=True)
class Metadata:
    """A batch. The first `decodes` requests have one new token each. `prompts` are requests whose new tokens attend to
    everything; one with a single new token of its prompt is also among the first `decodes`.

    lengths: tokens of each request. table: ids of its blocks. to: the row of the pool for each new token.
    """

    decodes: int
    prompts: tuple[Prompt, ...]
    lengths: Lengths
    table: Tensor
    to: Tensor


class Builder(AttentionMetadataBuilder):
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
    reorder_batch_threshold = 1

    def __init__(self, kv_cache_spec, layer_names: list[str], vllm_config: VllmConfig, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        refuse_kinds(vllm_config)
        self.reorder_batch_threshold = 1
        blocks = vllm_config.cache_config.num_gpu_blocks
        stores = [vllm_config.compilation_config.static_forward_context[name].impl.store for name in layer_names]
        self.store = stores[0]
        most = max(
            vllm_config.scheduler_config.max_num_seqs, vllm_config.compilation_config.max_cudagraph_capture_size or 0
        )
        self.begin = torch.zeros(most, dtype=torch.int32, device=device)  # captured graphs read it at this address
        if blocks is None or not stores[0].on_host:  # blocks is None while vLLM measures with a few blocks
            return
        room, need = host_room(vllm_config), blocks * sum(s.host_bytes for s in stores if s.pool is None)
        if need > room:
            most = room // sum(s.host_bytes for s in stores)
            raise MemoryError(
                f"torchsparsekv: {blocks} blocks take {need / GIB:.2f} GiB of host memory, {room / GIB:.2f} are there: "
                f"give num_gpu_blocks_override={most}"
            )
        for store in stores:
            store.allocate(blocks)

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> Metadata:
        m = common_attn_metadata
        decodes, prompts = m.num_reqs, tuple[Prompt, ...]()
        if m.max_query_len > 1:  # a captured graph has decode steps only
            starts = m.query_start_loc_cpu.tolist()
            new = [end - first for first, end in itertools.pairwise(starts)]
            lengths = m.seq_lens_cpu_upper_bound  # exact for requests that are still in their prompt
            lengths = (m.seq_lens.cpu() if lengths is None else lengths).tolist()
            decodes = next(i for i, n in enumerate(new) if n > 1)
            told = getattr(m, "is_prefilling", None)
            filling = told.tolist() if told is not None and told.device.type == "cpu" else [False] * m.num_reqs
            rows = [i for i in range(m.num_reqs) if new[i] and (i >= decodes or filling[i])]
            prompts = tuple(Prompt(i, starts[i], starts[i + 1], lengths[i] - new[i]) for i in rows)
        lengths = self.store.lengths(m.seq_lens)
        begin = self.begin[: m.num_reqs].copy_(lengths.ring_begin[: m.num_reqs])
        lengths = lengths._replace(ring_begin=begin)
        return Metadata(decodes, prompts, lengths, m.block_table_tensor, m.slot_mapping[: m.num_actual_tokens])


class Backend(SEAM.Backend):  # type: ignore[name-defined]
    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto"]

    @staticmethod
    def get_name() -> str:
        return SEAM.NAME

    @staticmethod
    def get_impl_cls() -> type["Impl"]:
        return Impl

    @staticmethod
    def get_builder_cls() -> type[Builder]:
        return Builder

    @staticmethod
    def use_cascade_attention(*args: object, **options: object) -> bool:
        return False

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return False


class Impl(AttentionImpl):
    """The attention of one layer."""

    def __init__(
        self, num_heads: int, head_size: int, scale: float, num_kv_heads: int | None = None, alibi_slopes=None,
        sliding_window: int | None = None, kv_cache_dtype: str = "auto", logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER, kv_sharing_target_layer_name: str | None = None, **others: Any,
    ):  # fmt: skip
        reasons = {
            "a sliding window": sliding_window is not None,
            "ALiBi": alibi_slopes is not None,
            f"attention of type {attn_type}": attn_type != AttentionType.DECODER,
            "a cache shared with another layer": kv_sharing_target_layer_name is not None,
            ", ".join(sorted(others)): any(x is not None for x in others.values()),  # MLA, attention sinks
        }
        for what, wanted in reasons.items():
            if wanted:
                raise NotImplementedError(f"torchsparsekv does not work in vllm {VERSION} on layers with {what}")
        config = get_current_vllm_config()
        refuse(config)
        Backend.config = weakref.ref(config)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads, self.kv_cache_dtype = num_kv_heads or num_heads, kv_cache_dtype
        self.attention = Attention(self.scale, logits_soft_cap or 0.0)
        self.block_size = config.cache_config.block_size
        given = (config.additional_config or {}).get("torchsparsekv")
        self.options = read_options(given, self.block_size)
        self.room: int | None = None  # bytes of host memory for all layers, set by `host_room`
        self.free: int | None = None  # bytes of device memory, set by `free_for_cache`
        self.store = BlockStore(
            self.options, self.num_kv_heads, head_size, torch.get_default_dtype(),
            torch.device(config.device_config.device), requests=config.scheduler_config.max_num_seqs,
            places=blocks_of_longest(config),
        )  # fmt: skip

    def forward(
        self, layer: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor,
        attn_metadata: Metadata, output: Tensor, output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError("torchsparsekv does not quantise the output of attention")
        m = attn_metadata
        if m is None or (self.store.on_host and self.store.pool is None):  # vLLM measures its memory
            return output.fill_(0)
        self.store.bind(kv_cache)
        tokens = len(m.to)
        self.store.write(key[:tokens], value[:tokens], m.to)
        if n := m.decodes:
            lengths = mapped(m.lengths, lambda t: t[:n])
            self.store.decode(query[:n], lengths, m.table[:n], self.attention, output[:n])
        for p in m.prompts:
            new = slice(p.first, p.end)
            output[new] = self.store.prompt(query[new], key[new], value[new], m.table[p.row], p.past, self.attention)
        return output


# ---------------------------------------------------------------- how large the cache is


def blocks_of_longest(config: VllmConfig) -> int:
    return -(-config.model_config.max_model_len // config.cache_config.block_size)


def least_of_ranks(config: VllmConfig, count: int) -> int:
    """The least `count` of all ranks: they measure memory at different moments, and must make the same plan."""
    if config.parallel_config.world_size == 1:
        return count
    least = torch.tensor([count], dtype=torch.int64, device="cpu")
    dist.all_reduce(least, dist.ReduceOp.MIN, group=get_world_group().cpu_group)
    return int(least)


def host_room(config: VllmConfig) -> int:
    """Bytes of host memory that each rank may fill with keys and values; measured once, before a rank fills any."""
    first = ours_in(config)[0]
    if first.room is None:
        free = least_of_ranks(config, host.available() // config.parallel_config.world_size)
        gib = first.options.host_gib
        if gib is not None and gib * GIB > free:
            raise MemoryError(f"torchsparsekv: host_gib={gib:g}, but {free / GIB:.2f} GiB are free for each rank")
        first.room = int(free * USABLE if gib is None else gib * GIB)
    return first.room


def free_for_cache(config: VllmConfig) -> int:
    """Bytes of device memory that vLLM may still use in each rank, or that its user gives to the cache; measured once,
    before the hot buffers are there."""
    first = ours_in(config)[0]
    if first.free is None:
        free, total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (0, 0)
        mine, given = int(config.cache_config.gpu_memory_utilization * total) - (total - free), given_bytes(config)
        first.free = max(least_of_ranks(config, mine if given is None else given), 0)
    return first.free


def given_bytes(config: VllmConfig) -> int | None:
    """What the user of vLLM gives to the cache on a GPU. vLLM then measures no memory for steps with prompts."""
    return config.cache_config.kv_cache_memory_bytes if torch.cuda.is_available() else None


def device_room(config: VllmConfig, index: int = 0) -> int:
    """Bytes of device memory that a hot buffer may fill with kv="auto", beside an index of `index` bytes.

    If vLLM measures its own memory afterwards, an eighth of the room, and at least 2 GiB, is left for steps with
    prompts.
    """
    ours = ours_in(config)
    gib, least = ours[0].options.device_gib, sum(impl.store.least_hot_bytes for impl in ours)
    if gib is not None and gib * GIB < least:
        requests = config.scheduler_config.max_num_seqs
        raise ValueError(
            f"torchsparsekv: device_gib={gib:g}, but steps of max_num_seqs={requests} requests need "
            f"{least / GIB:.2f} GiB: raise device_gib, or lower max_num_seqs or budget"
        )
    if gib is not None:
        return int(gib * GIB)
    room = free_for_cache(config) - index
    return max(room if given_bytes(config) is not None else min(room * 7 // 8, room - SPARED), 0)


def refuse_large_device_gib(config: VllmConfig) -> None:
    """Refuse a `device_gib` above the free device memory."""
    gib = ours_in(config)[0].options.device_gib
    if gib is None or not torch.cuda.is_available():
        return
    free = torch.cuda.mem_get_info()[0]
    if gib * GIB > free:
        raise MemoryError(f"torchsparsekv: device_gib={gib:g}, but {free / GIB:.2f} GiB of device memory are free")


def refuse_short_device(config: VllmConfig, room: int) -> None:
    """Refuse a `room` of device memory, measured without `device_gib`, that holds no step."""
    least = sum(impl.store.least_hot_bytes for impl in ours_in(config))
    if torch.cuda.is_available() and room < least:
        raise MemoryError(
            f"torchsparsekv: steps of max_num_seqs={config.scheduler_config.max_num_seqs} requests need "
            f"{least / GIB:.2f} GiB of device memory for keys and values, {room / GIB:.2f} are there: lower "
            "max_num_seqs or budget"
        )


def blocks_on_device(config: VllmConfig) -> int:
    """How many blocks the device holds with their index: in `device_gib`, or in what vLLM may still use. What steps
    with prompts need is a guess: vLLM measures it, but only after it asks for a plan."""
    ours = ours_in(config)
    gib, of_block = ours[0].options.device_gib, sum(impl.store.host_bytes for impl in ours)
    if gib is not None:
        return int(gib * GIB) // of_block
    room = free_for_cache(config) - (SPARED if given_bytes(config) is None else 0)
    return max(room, 0) // (of_block + sum(impl.store.page_bytes for impl in ours))


def _is_ours(layer: object) -> bool:
    return isinstance(getattr(layer, "impl", None), Impl)


def ours_in(config: VllmConfig) -> list[Impl]:
    return [x.impl for x in config.compilation_config.static_forward_context.values() if _is_ours(x)]


def plans_elsewhere(parallel: ParallelConfig) -> bool:
    """Whether workers have a copy of the configuration. Then vLLM learns only the number of bytes from their plan."""
    return parallel.world_size > 1 and parallel.distributed_executor_backend != "external_launcher"


def plan(config: VllmConfig) -> None:
    """With kv="auto" choose where keys and values live. Unless vLLM's own cache holds them, plan the number of blocks.
    It is the least of three: as many as requests can have, as host memory holds, and as have an index that fits half
    of the free device memory.

    vLLM asks every layer, and some layers again; the first plan holds for all of them.
    """
    ours = ours_in(config)
    if ours[0].room is not None:
        return
    refuse_large_device_gib(config)
    stores = [impl.store for impl in ours]
    longest, room = blocks_of_longest(config), host_room(config)
    wanted, of_block = config.cache_config.num_gpu_blocks_override, sum(s.host_bytes for s in stores)
    least = longest + 1 if wanted is None else wanted  # vLLM keeps one block to itself
    useful = least if wanted is not None else config.scheduler_config.max_num_seqs * longest + 1
    if stores[0].kv == "auto" and (fit := blocks_on_device(config)) >= max(least, min(useful, room // of_block)):
        for store in stores:
            store.kv = "device"
        if ours[0].options.device_gib is not None:  # else vLLM fills the memory that it may use
            set_blocks(config, min(fit, useful))
        LOG.info('torchsparsekv: kv="auto" keeps keys and values on the device, which holds about %d blocks', fit)
        return
    memory = {"host": (room, of_block)}
    if wanted is None and torch.cuda.is_available():
        memory["device"] = torch.cuda.mem_get_info()[0] // 2, sum(s.page_bytes for s in stores)
    counts = {name: have // block for name, (have, block) in memory.items()}
    what = min(counts, key=lambda name: counts[name])
    most = least_of_ranks(config, counts[what])
    if most < least:
        have, block = memory[what]
        more = ", or raise host_gib" if what == "host" else ""
        raise MemoryError(
            f"torchsparsekv: {least} blocks of {stores[0].block_size} tokens take {least * block / GIB:.2f} GiB of "
            f"{what} memory, {have / GIB:.2f} may be used: lower max_model_len (or num_gpu_blocks_override){more}"
        )
    blocks = min(most, useful)
    if stores[0].kv == "auto":
        room = device_room(config, blocks * sum(s.page_bytes for s in stores))
        refuse_short_device(config, room)
        for store in stores:
            store.reserve(room * store.host_bytes // of_block)
    set_blocks(config, blocks)
    LOG.info(
        "torchsparsekv: %d blocks, %.2f GiB of keys and values in host memory, %.2f GiB of hot buffers on the device",
        blocks, blocks * of_block / GIB, sum(s.hot_bytes for s in stores) / GIB,
    )  # fmt: skip


def set_blocks(config: VllmConfig, blocks: int) -> None:
    """Tell vLLM how many blocks to make, if the user has not."""
    if config.cache_config.num_gpu_blocks_override is None:
        config.cache_config.num_gpu_blocks_override = blocks
        if plans_elsewhere(config.parallel_config):
            config.cache_config.kv_cache_memory_bytes = blocks * sum(x.store.page_bytes for x in ours_in(config))


def describe(config: VllmConfig, spec: AttentionSpec) -> dict[str, Any]:
    """The fields of a specification that make a block of bytes of it."""
    refuse_kinds(config)
    impl = next(x for x in ours_in(config) if (x.num_kv_heads, x.head_size) == (spec.num_kv_heads, spec.head_size))
    if spec.block_size != impl.block_size:
        raise ValueError(
            f"torchsparsekv: vLLM changed its block_size from {impl.block_size} to {spec.block_size} after the layers "
            f"were made: give block_size={spec.block_size}"
        )
    if impl.store.on_host:
        plan(config)
    width = impl.store.page_bytes // spec.block_size
    return dict(num_kv_heads=1, head_size=width, head_size_v=0, dtype=torch.uint8)


SEAM.declare(describe)
