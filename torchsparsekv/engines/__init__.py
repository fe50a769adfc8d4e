"""Serving engines that decode with the methods of this library: one file an engine, and the block store they share."""
import warnings

from torchsparsekv.engines import _vllm_seams

BACKEND = "torchsparsekv.engines.vllm.Backend"


def register() -> None:
    """Offer the backend to vLLM, which calls this in each of its processes (entry point vllm.general_plugins)."""
    try:
        _vllm_seams.seam().register(BACKEND)
    except ImportError as e:  # vLLM goes on without it
        warnings.warn(str(e), stacklevel=1)
