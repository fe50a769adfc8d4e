"""Sparse KV-cache retrieval for Hugging Face models, as compiled custom ops.

These names are public, and torchsparsekv.extension has those that authors of methods and ops need. Everything else is
internal and may change between releases.
"""
from typing import TYPE_CHECKING, Any

from torchsparsekv.api import methods, patch, use_kernels
from torchsparsekv.check import check_method
from torchsparsekv.method import Method
from torchsparsekv.report import Report

if TYPE_CHECKING:
    from torchsparsekv.patches._cache import SparseCache
    from torchsparsekv.patches._handle import Handle

__all__ = ["Handle", "Method", "Report", "SparseCache", "check_method", "methods", "patch", "use_kernels"]
__version__ = "0.2.0"


def __getattr__(name: str) -> Any:
    """Handle and SparseCache need transformers, which is imported when one of the two names is first read."""
    if name == "Handle":
        from torchsparsekv.patches._handle import Handle

        return Handle
    if name == "SparseCache":
        from torchsparsekv.patches._cache import SparseCache

        return SparseCache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
