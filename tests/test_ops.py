"""Every operator: registered properly, and its kernel equal to its reference."""
import pytest
import torch
from cases import MANY_TOKENS, OPS
from hypothesis import given
from hypothesis import strategies as st
from world import DEVICE, TOLERANCE, World, worlds

from torchsparsekv.ops._registry import load_all

ENTRIES = load_all()


def test_every_op_has_a_case():
    assert set(ENTRIES) == set(OPS)


def on(device, args):
    return [a.to(device) if isinstance(a, torch.Tensor) else a for a in args]


def clones(args):
    return [a.clone(memory_format=torch.preserve_format) if isinstance(a, torch.Tensor) else a for a in args]


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name):
    args = on(DEVICE, OPS[name](World(tokens=3 if name in MANY_TOKENS else 1)))
    torch.library.opcheck(ENTRIES[name].op, tuple(args))


def close(got: torch.Tensor, want: torch.Tensor, name: str):
    """Equal where integers, copies or NaN are concerned; within the rounding of the type elsewhere."""
    if got.dtype == torch.float8_e4m3fn:  # means are summed in another order: at most the neighbouring value
        return torch.testing.assert_close(got.float(), want.float(), rtol=0.13, atol=2**-9, equal_nan=True)
    tolerance = TOLERANCE.get(got.dtype, 0)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{name}: {m}")


def run_both(name: str, w: World):
    args = OPS[name](w)
    want_args, got_args = clones(args), on(DEVICE, clones(args))
    want = ENTRIES[name].reference(*want_args)
    got = ENTRIES[name].cuda(*got_args)
    for i, (g, x) in enumerate(zip(got_args, want_args)):
        if isinstance(g, torch.Tensor):
            close(g.cpu(), x, f"{name} argument {i}")
    results = (want, got) if isinstance(want, tuple) else ((want,), (got,))
    for g, x in zip(*reversed(results), strict=True):
        if isinstance(x, torch.Tensor):
            close(g.cpu(), x, name)


@pytest.mark.parametrize("name", OPS)
@given(data=st.data())
def test_kernel_equals_reference(name, data):
    tokens = st.integers(1, 9) if name in MANY_TOKENS else st.just(1)
    run_both(name, data.draw(worlds(tokens=tokens)))
