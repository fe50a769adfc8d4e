"""vLLM 0.26: the backend of a plugin is called CUSTOM, and the Attention layer describes a block of its cache without
asking the backend.

So `declare` replaces `get_kv_cache_spec` of the layer. Layers with other backends keep their description.
"""
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.model_executor.layers.attention import Attention as Layer
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.kv_cache_interface import KVCacheSpec

NAME = "CUSTOM"


def register(path: str) -> None:
    """vLLM has one backend of this name. If two plugins register it, the last plugin wins."""
    register_backend(AttentionBackendEnum[NAME], path)


class Backend(AttentionBackend):
    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        return (num_blocks, block_size * num_kv_heads * head_size)  # bytes: see `declare`


def declare(describe: Callable[[VllmConfig, KVCacheSpec], dict[str, Any]]) -> None:
    theirs = getattr(Layer.get_kv_cache_spec, "__wrapped__", Layer.get_kv_cache_spec)

    @functools.wraps(theirs)
    def spec(self: Layer, vllm_config: VllmConfig) -> KVCacheSpec | None:
        found = theirs(self, vllm_config)
        if found is None or not issubclass(self.attn_backend, Backend):
            return found
        return dataclasses.replace(found, **describe(vllm_config, found))

    Layer.get_kv_cache_spec = spec
