"""Serving engines that decode with the methods of this library: one file an engine, and the block store they share."""
import importlib.metadata
import warnings

BACKEND = "torchsparsekv.engines.vllm.Backend"


def register() -> None:
    """Offer the backend to vLLM, which calls this in each of its processes (entry point vllm.general_plugins)."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
    except ImportError as e:
        version = importlib.metadata.version("vllm")
        warnings.warn(f"torchsparsekv cannot be used in vllm {version}, which has no such backends: {e}", stacklevel=1)
        return
    register_backend(AttentionBackendEnum.CUSTOM, BACKEND)
