"""Sparse KV-cache retrieval for Hugging Face models, as compiled custom ops."""
from torchsparsekv.api import methods, patch

__all__ = ["methods", "patch"]
__version__ = "0.1.0"
