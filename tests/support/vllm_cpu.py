"""vLLM without its native code on a CPU: `PYTHONPATH=tests/support pytest -p vllm_cpu tests/engines`.

A vLLM that was built for no device has its scheduler, its paged cache, its workers and its models, but no kernels. This
plugin of pytest makes it a vLLM for CPUs: it defines the few native ops that a dense llama reaches there, in torch, and
lets users choose the attention backend. So real engines run these tests, and say nothing about speed.

Ranks and other processes of a test import this module first, as the tests do.
"""
import itertools
import os

os.environ |= {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1", "VLLM_DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_LOGGING_LEVEL": "WARNING",
}  # fmt: skip

import torch


def _slots(query_start, positions, table, slots, block_size):
    """The row of the cache of every token of a batch."""
    starts = query_start.tolist()
    slots.fill_(-1)
    for i, (first, end) in enumerate(itertools.pairwise(starts)):
        place = positions[first:end]
        slots[first:end] = table[i, (place // block_size).long()] * block_size + place % block_size


def _sampled(logits, seeds):
    """Tokens drawn by their logits, with a seed for each row."""
    g = torch.Generator()
    noise = torch.stack([torch.rand(logits.shape[1], generator=g.manual_seed(seed)) for seed in seeds.tolist()])
    return (logits - (-noise.log()).log()).argmax(-1)


NATIVE = {
    "init_cpu_memory_env(int[] nodes) -> ()": lambda nodes: None,
    "init_cpu_threads_env(str cores) -> str": lambda cores: "",
    "greedy_argmax(Tensor logits) -> Tensor": lambda logits: logits.argmax(-1),
    "fused_gumbel_argmax(Tensor logits, Tensor seeds) -> Tensor": _sampled,
    "compute_slot_mapping_kernel_impl(Tensor starts, Tensor positions, Tensor table, Tensor(a!) slots, "
    "int block_size) -> ()": _slots,
}
# Looked up where layers are made, and not called: `custom_ops=["none"]` runs torch in their place.
NATIVE |= {f"{name}(Tensor(a!) out, Tensor x) -> ()": lambda out, x: None for name in ("silu_and_mul",)}
_LIB = torch.library.Library("_C", "FRAGMENT")
for _schema, _fn in NATIVE.items():
    _LIB.define(_schema)
    _LIB.impl(_schema.partition("(")[0], _fn, "CompositeExplicitAutograd")


def _chosen(cls, selected_backend, *others, **more) -> str:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return (selected_backend or AttentionBackendEnum.CPU_ATTN).get_path()


def _install() -> None:
    from vllm.platforms.cpu import CpuPlatform

    CpuPlatform.get_attn_backend_cls = classmethod(_chosen)


try:
    _install()
except ImportError as e:
    print(f"vllm_cpu: {e}")
