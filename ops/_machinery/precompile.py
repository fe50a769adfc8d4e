"""The CUDA C++ of ops, compiled before the ops are called: by calling them with fake tensors."""
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from torchsparsekv.ops._machinery.registry import OPS


class Ahead(TorchDispatchMode):
    """Under a FakeTensorMode: ops that are called do nothing, but afterwards the CUDA C++ that they need is there."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "torchsparsekv":
            with unset_fake_temporarily():  # tables that a kernel is compiled with are real
                OPS[func.name().partition("::")[2]].choose(*args)
        return func(*args, **(kwargs or {}))
