"""vLLM 0.33: a backend has a name of its own, and adjusts how a layer describes a block of its cache."""
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from vllm.config import VllmConfig
from vllm.v1.attention.backend import AttentionBackend
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheLayout

NAME = "TORCHSPARSEKV"


def register(path: str) -> AttentionBackendEnum:
    """The entry of our backend. It is made once: vLLM loads plugins more than once in a process.

    vLLM sends its configuration, with the entry, to processes that have not loaded plugins yet. So unpickling the entry
    registers it.
    """
    if NAME not in AttentionBackendEnum.__members__:
        entry = AttentionBackendEnum.register(NAME, path)
        entry.__reduce_ex__ = lambda protocol: (register, (path,))
    return AttentionBackendEnum[NAME]


class Backend(AttentionBackend):
    # The configuration with which layers were made last: vLLM does not pass one when it asks for a specification.
    config: ClassVar[weakref.ref[VllmConfig] | None] = None
    describe: ClassVar[Callable[[VllmConfig, AttentionSpec], dict[str, Any]] | None] = None

    @classmethod
    def customize_spec(cls, spec: AttentionSpec) -> AttentionSpec:
        config = cls.config() if cls.config else None
        if Backend.describe is None or config is None:
            raise RuntimeError("torchsparsekv: vLLM asks for the cache of a layer before it has made any layer")
        return dataclasses.replace(spec, **Backend.describe(config, spec))

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        """The layouts that keep the blocks of a layer together. In other layouts a layer sees its cache with gaps."""
        return (KVCacheLayout.LBNHC, KVCacheLayout.LBHNC, KVCacheLayout.LHBNC)


def declare(describe: Callable[[VllmConfig, AttentionSpec], dict[str, Any]]) -> None:
    Backend.describe = staticmethod(describe)
