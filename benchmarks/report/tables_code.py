"""Tables from the code instead of results: the memory that the cache of a method takes."""

import torch

from torchsparsekv.method import all_methods, make_method
from torchsparsekv.state import HOT_BUDGETS, Geometry, total_bytes
from torchsparsekv_benchmarks.report.markdown import markdown, number, table
from torchsparsekv_benchmarks.report.style import tokens

CONTEXT, KV_HEADS, DIM, GROUP = 131072, 8, 128, 4
ABOUT = (
    f"One layer of {KV_HEADS} kv heads of head_dim {DIM}, bf16, batch 1, {tokens(CONTEXT)} tokens. Defaults of each "
    f"method, except hot buffers of {HOT_BUDGETS} budgets."
)


def mib(method: str) -> tuple[float, float]:
    """(pool in host memory, on the GPU: ring, index and hot buffer)."""
    geometry = Geometry(1, KV_HEADS, DIM, CONTEXT, torch.bfloat16, GROUP)
    host, device = total_bytes(make_method(method).buffers(geometry), pool_on_host=True)
    return host / 2**20, device / 2**20


@table("memory-layer")
def memory_layer() -> str:
    """The methods by what they keep on the GPU."""
    found = sorted((mib(m)[::-1], m) for m in all_methods())
    rows = [[f"`{m}`", number(host, 1), number(device, 1)] for (device, host), m in found]
    said = (
        f"{ABOUT} The pool is in host memory, that of `full` too. In a model with a sparse method the pools of dense "
        "layers stay on the GPU. Ring, index and hot buffer are on the GPU."
    )
    return markdown(said, ["method", "pool, MiB", "GPU, MiB"], rows)


def _of_method(method: str) -> None:
    @table(f"method-memory:{method}")
    def method_memory() -> str:
        host, device = mib(method)
        told = [
            ["pool, on the GPU or in host memory", number(host, 1)],
            ["ring, index and hot buffer, on the GPU", number(device, 1)],
        ]
        return markdown(ABOUT, ["buffers", "MiB"], told)


for _method in all_methods():
    _of_method(_method)
