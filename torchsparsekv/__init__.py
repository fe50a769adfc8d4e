"""Sparse KV-cache retrieval for Hugging Face models, as compiled custom ops."""
from torchsparsekv.api import methods, patch, use_kernels

__all__ = ["methods", "patch", "use_kernels"]
__version__ = "0.2.0"
