"""The CUDA C++ kernels equal their references on a CPU too, by emulator.py, and the emulator notices mistakes."""
import pytest
import torch
from cases import OPS
from cases_packed import TAKING, packed
from emulator import as_call, emulate, translated
from kernels import ENTRIES, clones, close, tensors
from world import World

from torchsparsekv.ops._machinery import cuda
from torchsparsekv.ops.select._top import peaks_of
from torchsparsekv.ops.store.views import Scored

WORLDS = {
    "fp16": World(dim=64, group=2, heads=2, lengths=[33, 64], dtype=torch.float16),
    "bf16": World(dim=128, group=4, heads=2, lengths=[60, 1], dtype=torch.bfloat16),
}
# bound_scores needs digests in fp8, which the worlds do not have (test_bound_scores.py does).
NATIVE = [name for name, entry in ENTRIES.items() if "cuda" in entry.chain.kinds and name != "bound_scores"]
PACKED = [name for name in NATIVE if name in TAKING]


def compare(name: str, things: tuple) -> None:
    entry, wanted, given = ENTRIES[name], clones(things), clones(things)
    assert entry.chain.chosen(*given)[0] == "cuda"
    want, got = entry.reference(*wanted), entry.run("cuda", *given)
    for g, x in zip(tensors(given), tensors(wanted), strict=True):
        close(g, x, f"{name} argument")
    for g, x in zip(*(x if isinstance(x, tuple) else (x,) for x in (got, want)), strict=True):
        if isinstance(x, torch.Tensor):
            close(g, x, name)


@pytest.mark.parametrize(("world", "backward"), [("fp16", False), ("bf16", True)])
@pytest.mark.parametrize("name", [name for name in NATIVE if name != "dense_attention"])
def test_cuda_kernel_equals_reference(name, world, backward, monkeypatch):
    emulate(monkeypatch, backward)
    compare(name, OPS[name](WORLDS[world]))


@pytest.mark.parametrize("name", PACKED)
def test_cuda_kernel_of_a_packed_pool_equals_reference(name, monkeypatch):
    emulate(monkeypatch, backward=True)
    compare(name, packed(name, OPS[name](WORLDS["fp16"])))


@pytest.mark.parametrize(
    ("inline", "call"),
    [
        ('"" : "+r"(x)', "(void)0"),
        ('"prmt.b32 %0, %1, %2, 0x7;" : "=r"(x) : "r"(low[f(2)]), "r"(high)', "ptx_prmt_b32(x, low[f(2)], high, 0x7)"),
        ('"sub.f16x2 %0, %0, %1;" : "+r"(x) : "r"(y)', "ptx_sub_f16x2(x, x, y)"),
        ('"barrier.cluster.wait.acquire.aligned;" ::: "memory"', "ptx_barrier_cluster_wait_acquire_aligned()"),
        ('"fence.proxy.async;" ::: "memory"', 'ptx_unknown("fence.proxy.async")'),
    ],
)
def test_an_instruction_becomes_a_call(inline, call):
    assert as_call(inline) == call
    assert translated(f"int f() {{ asm volatile({inline}); }}") == f"int f() {{ {call}; }}"


def test_an_instruction_that_the_emulator_lacks_is_named(monkeypatch, tmp_path):
    changed(monkeypatch, tmp_path, "centroid_votes", "  __syncthreads();\n", '  asm volatile("bar.red 0;");\n', 0)
    emulate(monkeypatch, backward=False)
    with pytest.raises(RuntimeError, match=r"the emulator has no bar\.red"):
        ENTRIES["centroid_votes"].run("cuda", *OPS["centroid_votes"](WORLDS["bf16"]))


def changed(monkeypatch, tmp_path, kernel: str, old: str, new: str, nth: int) -> None:
    """The library with another csrc/`kernel`.cu: the nth `old` of its text is `new`."""
    for path in cuda.SOURCES.iterdir():
        (tmp_path / path.name).write_text(path.read_text())
    parts = (tmp_path / f"{kernel}.cu").read_text().split(old)
    assert len(parts) > nth + 1
    text = old.join(parts[: nth + 1]) + new + old.join(parts[nth + 1 :])
    (tmp_path / f"{kernel}.cu").write_text(text)
    monkeypatch.setattr(cuda, "SOURCES", tmp_path)


@pytest.mark.parametrize("nth", [0, 1])
def test_a_missing_barrier_is_noticed_in_one_of_the_two_orders(nth, monkeypatch, tmp_path):
    """Without the barrier behind the limits, or behind the votes."""
    changed(monkeypatch, tmp_path, "centroid_votes", "  __syncthreads();\n", "  __syncwarp();\n", nth)
    things, right = OPS["centroid_votes"](WORLDS["bf16"]), []
    want = ENTRIES["centroid_votes"].reference(*things)
    for backward in (False, True):
        emulate(monkeypatch, backward)
        got = ENTRIES["centroid_votes"].run("cuda", *clones(things))
        right.append(torch.equal(got[1], want[1]))
    assert not all(right)


@pytest.mark.parametrize("without", ["  wait();\n", "  s.bell.receive();\n"])
def test_a_program_that_does_not_wait_for_its_cluster_is_noticed(without, monkeypatch, tmp_path):
    """It sends pages before the others are ready, or reads pages before all have arrived."""
    changed(monkeypatch, tmp_path, "best_pages", without, "", 0)
    scores, noticed = torch.randn(1, 8, 64, generator=torch.Generator().manual_seed(0)), []
    for backward in (False, True):
        emulate(monkeypatch, backward)
        try:
            compare("best_pages", (Scored(scores, peaks_of(scores)), torch.zeros(1, 2, 7, dtype=torch.int32)))
        except (AssertionError, RuntimeError) as e:
            noticed.append(e)
    assert noticed


@pytest.mark.parametrize("barrier", ["__syncthreads", "__syncwarp"])
def test_threads_that_wait_for_ever_are_an_error(barrier, monkeypatch, tmp_path):
    changed(monkeypatch, tmp_path, "centroid_votes", "  __syncthreads();\n", f"  if (lane()) {barrier}();\n", 0)
    emulate(monkeypatch, backward=False)
    with pytest.raises(RuntimeError, match="wait for one another for ever"):
        ENTRIES["centroid_votes"].run("cuda", *OPS["centroid_votes"](WORLDS["bf16"]))
