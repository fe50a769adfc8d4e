"""The names that authors of methods and ops import. docs/develop explains methods, ops, families and engines."""
from torchsparsekv.check import check_method
from torchsparsekv.method import Method, Traits, option
from torchsparsekv.ops._machinery.chain import cuda, torch_kernels, triton
from torchsparsekv.ops._machinery.registry import register
from torchsparsekv.ops._machinery.signature import Changed, Of
from torchsparsekv.ops.index._leaving import leaving_keys, load_keys
from torchsparsekv.ops.rest.views import Rest
from torchsparsekv.ops.store.views import (
    Attention,
    Digests,
    KVStore,
    Leaving,
    Lengths,
    Query,
    Selection,
    Stats,
    Token,
)
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState, RingPlan

__all__ = [
    "Attention", "Buffer", "Buffers", "Changed", "Digests", "Geometry", "KVStore", "LayerState", "Leaving", "Lengths",
    "Method", "Of", "Query", "Rest", "RingPlan", "Selection", "Stats", "Token", "Traits", "check_method", "cuda",
    "leaving_keys", "load_keys", "option", "register", "torch_kernels", "triton",
]  # fmt: skip
