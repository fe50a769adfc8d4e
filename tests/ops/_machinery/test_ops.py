"""Every op passes opcheck, and each of its kernels equals its reference."""
import pytest
import torch
from cases import MANY_TOKENS, OPS
from hypothesis import given
from hypothesis import strategies as st
from kernels import ENTRIES, KERNELS, flat, on, run_both
from world import DEVICE, World, worlds


def test_every_op_has_a_case():
    assert set(ENTRIES) == set(OPS)


def test_op_takes_at_most_eight_arguments():
    wide = {name: len(e.signature.parameters) for name, e in ENTRIES.items() if len(e.signature.parameters) > 8}
    assert not wide


@pytest.mark.parametrize("name", OPS)
def test_opcheck(name):
    things = on(DEVICE, OPS[name](World(tokens=3 if name in MANY_TOKENS else 1)))
    torch.library.opcheck(ENTRIES[name].op, tuple(flat(things)))


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
def test_kernel_equals_reference_in_worlds_found_by_fuzzing(name, world, picks):
    turn = map(int, picks)
    run_both(name, "triton", World(**world, pick=lambda *options: options[next(turn)]))
