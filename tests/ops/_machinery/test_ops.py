"""Every operator: registered properly, and each of its implementations equal to its reference."""
import pytest
import torch
from cases import MANY_TOKENS, OPS
from hypothesis import given
from hypothesis import strategies as st
from world import DEVICE, TOLERANCE, World, worlds

from torchsparsekv.ops._machinery.chain import mapped, tensors
from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops._machinery.side_stream import wait_for_side_stream

ENTRIES = load_all()
KERNELS = [
    pytest.param(name, kind, marks=pytest.mark.gpu if kind == "cuda" else ())
    for name, entry in ENTRIES.items()
    for kind in entry.chain.kinds
]


def test_every_op_has_a_case():
    assert set(ENTRIES) == set(OPS)


def test_an_op_takes_eight_things_at_most():
    wide = {name: len(e.signature.parameters) for name, e in ENTRIES.items() if len(e.signature.parameters) > 8}
    assert not wide


def flat(things):
    """As the dispatcher sees them."""
    return [x for thing in things for x in (thing if isinstance(thing, tuple) else (thing,))]


def on(device, things):
    return mapped(things, lambda t: t.to(device))


def clones(things):
    return mapped(things, lambda t: t.clone(memory_format=torch.preserve_format))


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name):
    things = on(DEVICE, OPS[name](World(tokens=3 if name in MANY_TOKENS else 1)))
    torch.library.opcheck(ENTRIES[name].op, tuple(flat(things)))


def close(got: torch.Tensor, want: torch.Tensor, name: str):
    """Equal where integers, copies or NaN are concerned; within the rounding of the type elsewhere."""
    if got.dtype == torch.float8_e4m3fn:  # means are summed in another order: at most the neighbouring value
        return torch.testing.assert_close(got.float(), want.float(), rtol=0.13, atol=2**-9, equal_nan=True)
    tolerance = TOLERANCE.get(got.dtype, 0)
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda m: f"{name}: {m}")


def run_both(name: str, kind: str, w: World):
    entry, things = ENTRIES[name], OPS[name](w)
    want_things, got_things = clones(things), on(DEVICE, clones(things))
    if kind == "cuda" and entry.chain.chosen(*got_things)[0] != "cuda":
        return  # what it is not for; that most cases are is seen by the tests of the single op
    want = entry.reference(*want_things)
    got = entry.run(kind, *got_things)
    wait_for_side_stream(DEVICE)  # some may be told not to
    for g, x in zip(tensors(got_things), tensors(want_things), strict=True):
        close(g.cpu(), x, f"{name} argument")
    results = (want, got) if isinstance(want, tuple) else ((want,), (got,))
    for g, x in zip(*reversed(results), strict=True):
        if isinstance(x, torch.Tensor):
            close(g.cpu(), x, name)


@pytest.mark.parametrize(("name", "kind"), KERNELS)
@given(data=st.data())
def test_kernel_equals_reference(name, kind, data):
    tokens = st.integers(1, 9) if name in MANY_TOKENS else st.just(1)
    run_both(name, kind, data.draw(worlds(tokens=tokens)))


# What `make fuzz` found: worlds, and which options they pick. A mean in fp8 that lies between two such numbers; a row
# past its capacity, of which nothing goes to the pool.
FOUND = [
    ("relocate", dict(lengths=[1], heads=1, block=8, sink=0, window=1, interval=8, rows=176, seed=3, group=1),
     "110001"),
    ("flush_ring", dict(lengths=[21], past=frozenset([0])), "0"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "world", "picks"), FOUND)
def test_what_fuzzing_found(name, world, picks):
    turn = map(int, picks)
    run_both(name, "triton", World(**world, pick=lambda *options: options[next(turn)]))
