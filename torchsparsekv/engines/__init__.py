"""Serving engines that can decode with the methods of this library. One file each, and what they share."""
import importlib.metadata
import warnings

BACKEND = "torchsparsekv.engines.vllm.Backend"


def register() -> None:
    """vLLM calls this in all of its processes, whatever backend is used there (entry point vllm.general_plugins)."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as e:
        had = importlib.metadata.version("vllm")
        warnings.warn(f"torchsparsekv cannot be used in vllm {had}, which has no such backends: {e}", stacklevel=1)
        return
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
