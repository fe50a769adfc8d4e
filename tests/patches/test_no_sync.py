"""A decode step never waits for the device; without a GPU, fake tensors show that."""
import pytest
import torch
from cases import METHODS, hyper_of
from models import prompts, tiny
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from world import DEVICE

import torchsparsekv
from torchsparsekv.ops._machinery.registry import load_all

SIZES = dict(max_length=128, budget=32, sink=8, window=6, skip_layers=1, block_size=4)


class Ops(TorchDispatchMode):
    """Which of our ops a step calls."""

    def __init__(self):
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "torchsparsekv":
            self.seen.add(func._schema.name.split("::")[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_decode_steps_call_no_op_that_syncs(method):
    """What syncs is marked so when it is registered, and such an op splits CUDA graphs."""
    model = tiny()
    ids, mask = prompts(2, 40)
    with torchsparsekv.patch(model, method, **hyper_of(method, **SIZES)) as handle:
        cache = handle.make_cache(2)
        model(ids, attention_mask=mask, past_key_values=cache)
        with Ops() as ops:
            model(ids[:, :1], past_key_values=cache)
    assert {"append", "dense_attention", "advance"} <= ops.seen
    entries = load_all()
    marked = {name for name, e in entries.items() if torch.Tag.cudagraph_unsafe in e.op.tags}
    assert marked >= {"store_prompt", "prompt_attention", "cluster_keys"}
    assert not ops.seen & marked


@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_decode_step_runs_on_fake_tensors(method):
    """`.item()`, `.tolist()`, a branch on a tensor: with fake tensors each of these raises."""
    model = tiny(num_hidden_layers=2).cpu()
    with torchsparsekv.patch(model, method, **hyper_of(method, **SIZES)) as handle:
        cache = handle.make_cache(2)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with mode:
            q, kv = torch.empty(2, 4, 1, 16), torch.empty(2, 2, 1, 16)
            for layer in cache.layers:
                if layer.advances:
                    layer.state.row_lengths.advance(1)
                a = torchsparsekv.ops.store.views.Attention(0.25)
                assert layer.method.decode(layer.state, q, kv, kv, a).shape == q.shape


def test_waiting_op_fails_the_check():
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        int(torch.ones(1).sum())


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
@torch.no_grad()
def test_eager_steps_do_not_sync(method):
    """As in a graph, but seen op by op; positions are given, since transformers' own are read on the host."""
    model = tiny(dtype=torch.bfloat16)
    ids, mask = prompts(2, 40)
    with torchsparsekv.patch(model, method, **hyper_of(method, **SIZES)) as handle:
        cache = handle.make_cache(2)
        model(ids, attention_mask=mask, past_key_values=cache)
        q, kv = torch.randn(2, 4, 1, 16, device=DEVICE).bfloat16(), torch.randn(2, 2, 1, 16, device=DEVICE).bfloat16()
        a = torchsparsekv.ops.store.views.Attention(0.25)

        def step():
            for layer in cache.layers:
                if layer.advances:
                    layer.state.row_lengths.advance(1)
                layer.method.decode(layer.state, q, kv, kv, a)

        step()  # kernels are compiled, and what that takes is over
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(12):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
