"""The version of vLLM that is installed, and the module that adapts this library to it.

Versions of vLLM differ in how a backend is named, registered and given its memory. A seam is a module with the code for
a range of versions. All seams offer the same names:

    NAME                what users pass as `attention_backend`
    register(path)      make vLLM find the backend by NAME
    Backend             the base class of the backend, with the methods that these versions of vLLM call
    declare(describe)   let layers with this backend describe a block of their cache: `describe(config, spec)` returns
                        the fields to replace in the spec that vLLM has made

An untested version gets the seam whose hooks it offers, and a warning. A version without the hooks of any seam is
refused.
"""
import importlib
import importlib.metadata
import warnings
from types import ModuleType

TESTED = {"0.26": "_vllm_026", "0.33": "_vllm_033"}  # seams by the beginning of the version


def version() -> str:
    return importlib.metadata.version("vllm").partition("+")[0]


def offered() -> str:
    """The seam whose hooks this vLLM offers; empty if none."""
    try:
        backend = importlib.import_module("vllm.v1.attention.backend").AttentionBackend
        registry = importlib.import_module("vllm.v1.attention.backends.registry")
    except (ImportError, AttributeError):
        return ""
    has = lambda x, *names: all(hasattr(x, name) for name in names)  # noqa: E731
    if has(backend, "customize_spec", "supported_kv_cache_layouts") and has(registry.AttentionBackendEnum, "register"):
        return "_vllm_033"
    if has(backend, "get_kv_cache_shape") and has(registry, "register_backend"):
        return "_vllm_026"
    return ""


def seam() -> ModuleType:
    """The seam of the installed vLLM."""
    have = version()
    name = next((x for begin, x in TESTED.items() if have == begin or have.startswith(f"{begin}.")), "")
    if not name:
        name, known = offered(), ", ".join(TESTED)
        if not name:
            raise ImportError(
                f"torchsparsekv works in vllm {known}, not in {have}, which has none of the hooks of either: "
                "pip install torchsparsekv[vllm]"
            )
        warnings.warn(
            f"torchsparsekv was tested in vllm {known}, not in {have}: compare its answers with those of another "
            "backend first",
            stacklevel=2,
        )
    return importlib.import_module(f"torchsparsekv.engines.{name}")
