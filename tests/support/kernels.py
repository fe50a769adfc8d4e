"""Every op with its kernels, and what runs a kernel beside its reference."""
import pytest
import torch
from cases import OPS
from world import DEVICE, TOLERANCE, World

from torchsparsekv.ops._machinery.chain import mapped, tensors
from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops._machinery.side_stream import wait_for_side_stream
from torchsparsekv.ops.pariskv.views import Codes
from torchsparsekv.ops.store.views import OWN_POOLS, BlockTable, Lengths

ENTRIES = load_all()
KERNELS = [
    pytest.param(name, kind, marks=pytest.mark.gpu if kind == "cuda" else ())
    for name, entry in ENTRIES.items()
    for kind in entry.chain.kinds
]


def flat(things):
    """As the dispatcher sees them."""
    return [x for thing in things for x in (thing if isinstance(thing, tuple) else (thing,))]


def on(device, things):
    return mapped(things, lambda t: t.to(device))


def clones(things):
    return mapped(things, lambda t: t.clone(memory_format=torch.preserve_format))


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


# What a chain with CUDA C++ chooses of arguments that this is for, and the reason if it does not.
NATIVE = ("cuda", {}) if DEVICE.type == "cuda" else ("triton", {"cuda": "these tensors are on cpu"})


def until(ends: list[int], sink: int) -> Lengths:
    """Of rows whose tokens from `sink` up to `ends` can be retrieved."""
    end = torch.tensor(ends, dtype=torch.int32)
    return Lengths(end, end, end, end, sink, 1)


def in_blocks(codes: Codes, block_size: int, g: torch.Generator) -> tuple[Codes, BlockTable]:
    """The codes of rows with pools of their own as those of one pool, whose blocks lie in no order. 0: as they are."""
    if block_size == 0:
        return codes, OWN_POOLS
    batch, heads, rows = codes.ids.shape[:3]
    places = -(-rows // block_size)
    table = torch.randperm(batch * places + 5, generator=g)[: batch * places].view(batch, places).to(torch.int32)

    def moved(t: torch.Tensor) -> torch.Tensor:
        pool = t.new_full((heads, batch * places + 5, block_size, t.shape[3]), 77)
        padded = torch.nn.functional.pad(t, (0, 0, 0, places * block_size - rows)).unflatten(2, (places, block_size))
        pool[:, table.long()] = padded.transpose(0, 1)
        return pool.flatten(1, 2)[None]

    return codes._replace(ids=moved(codes.ids), codes=moved(codes.codes), weights=moved(codes.weights)), BlockTable(
        table, block_size
    )
