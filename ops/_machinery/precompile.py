"""Compile the CUDA C++ of ops before they run, by calls with fake tensors."""
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

from torchsparsekv.ops._machinery.registry import OPS


class Ahead(TorchDispatchMode):
    """A mode for use in a FakeTensorMode. Called ops compute nothing, but the CUDA C++ that they need is compiled."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "torchsparsekv":
            with unset_fake_temporarily():  # a kernel may be compiled with tables, which are real tensors
                OPS[func.name().partition("::")[2]].choose(*args)
        return func(*args, **(kwargs or {}))
