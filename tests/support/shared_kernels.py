"""Kernels that Triton would compile anew only because a number became 1 or no multiple of 16, as after a prompt.

`python tests/support/shared_kernels.py METHOD ...` sends a prompt and some steps through a tiny model. Its launchers
compile and run nothing. It prints a line for every kernel that was specialised in more than one way.
"""
import sys
from collections import defaultdict

import torch
from compile_kernels import compile_only
from transformers import LlamaConfig, LlamaForCausalLM
from triton.runtime.jit import JITFunction

import torchsparsekv
from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.patches import _attention

COMPILED = object()
FORMS: dict[JITFunction, dict[tuple, dict[str, str]]] = defaultdict(dict)


def launcher(kernel, grid):
    def launch(*args, **kwargs):
        kernel.warmup(*args, grid=grid, **kwargs)

    return launch


def remember(kernel, key, signature, device, constants, options, attributes, warmup):
    """In place of compiling. A number that is 1 is a constant like those that the kernel declares."""
    given = {p.name for p in kernel.params if not p.is_constexpr}
    form = {name: kind for name, kind in signature.items() if name in given}
    names = [p.name for p in kernel.params]
    form |= {names[i]: f"{form[names[i]]}, 16" for (i, *_), found in attributes.items() if found and names[i] in form}
    FORMS[kernel][tuple(sorted(form.items()))] = form
    kernel.device_caches[device][0][key] = COMPILED
    return COMPILED


def launch_all() -> None:
    """Ops of tensors on the CPU go to their launchers."""
    compile_only()
    JITFunction.__getitem__, JITFunction._do_compile = launcher, remember
    torch.cuda.is_current_stream_capturing = lambda: False
    _attention._check_mask = lambda *args: None  # lengths stay 0, where a mask that grows would contradict them
    for entry in load_all().values():
        for one in entry.chain.chain:
            if one.kind in ("triton", "torch"):
                entry.chain.unforced_on_cpu = one.launch


@torch.no_grad()
def live(method: str) -> None:
    sizes = dict(hidden_size=64, intermediate_size=64, num_hidden_layers=3, vocab_size=64, max_position_embeddings=8192)
    heads = dict(num_attention_heads=8, num_key_value_heads=2, head_dim=128)
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads)).eval()
    with torchsparsekv.patch(model, method, max_length=512):
        for tokens in (256, 241):
            ids = torch.randint(3, 60, (1, tokens))
            model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, disable_compile=True)


def specialised(method: str) -> None:
    FORMS.clear()
    live(method)
    if len(FORMS) < 5:
        raise AssertionError(f"{method} launched {len(FORMS)} kernels, so nothing was looked at")
    for kernel, forms in FORMS.items():
        first, *others = forms.values()
        differ = {n: [f[n] for f in (first, *others)] for n in first if any(f.get(n) != first[n] for f in others)}
        if differ:
            print(method, f"{kernel.__module__}.{kernel.__name__}", differ)


if __name__ == "__main__":
    launch_all()
    for method in sys.argv[1:]:
        specialised(method)
