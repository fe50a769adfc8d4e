"""The CUDA sources compile without a GPU, and a forced kind of kernel is the kind that runs."""
import contextlib
import ctypes
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import OPS
from kernels import clones, flat, on
from world import DEVICE, World

import torchsparsekv
from torchsparsekv.ops._machinery import chain as _impl
from torchsparsekv.ops._machinery import cuda as _cuda
from torchsparsekv.ops._machinery.registry import load_all
from torchsparsekv.ops.select._top import GROUP

BOUNDS, COLLIDE, NODES, PEAKS, RERANK, TOP_BLOCKS, UNION, BEST = (
    importlib.import_module(f"torchsparsekv.ops.{name}")
    for name in (
        "select.bound_scores", "pariskv.rank_by_votes", "icecache.visit_nodes", "icecache.page_peaks", "pariskv.rerank",
        "select.top_blocks", "icecache.union_pages", "icecache.best_pages",
    )
)  # fmt: skip
ATTENTION = importlib.import_module("torchsparsekv.ops.attend._native")
DENSE = importlib.import_module("torchsparsekv.ops.attend.dense_attention")
FETCH = importlib.import_module("torchsparsekv.ops.gather.fetch")
VARIANTS = {
    "bound_scores": [
        dict(D=d, G=g, BOX=box, BF16=bf16, WARPS=BOUNDS.NATIVE_WARPS, GROUP=GROUP, UNIT=4)
        for d, g, bf16 in ((64, 16, 0), (128, 1, 0), (128, 4, 1), (256, 8, 1)) for box in (0, 1)
    ],
    "rerank": [
        dict(B=b, F=f, WARPS=4, RESIDENT=r, GROUP=GROUP, PAGE=page, LOW0=2**32 - 1, LOW1=1, HIGH0=2**32 - 1, HIGH1=1)
        for b, r in RERANK.NATIVE_SPACES.items() for f, page in ((1, 0), (4, 16), (RERANK.NATIVE_FIELDS, 0))
    ],
    "centroid_votes": [
        dict(B=b, PER_PROGRAM=each, F=f, G=g, D=d, KIND=kind)
        for b, d in ((8, 48), (16, 128), (32, 256)) for each in (1, 4)
        for f, g, kind in ((1, 4, 0), (4, 1, 1), (7, 1, 2))
    ],
    "rank_by_votes": [
        dict(B=b, PACKS=p, BINS=COLLIDE._bins(b), THREADS=COLLIDE.native_step(heads, 132, b, p), PAGE=page)
        for b in (8, 16, 32) for p, page in ((1, 0), (1, 16), (COLLIDE.NATIVE_PACKS, 0)) for heads in (8, 456)
    ],
    "sparse_attention": [
        ATTENTION.constants(d, g, p, d == 256, warps, c, rest, rest > 0 and p > 1, rest > 0 and warps == 16)
        | {"BF16": bf16}
        for d, g, p, bf16, c, warps in ((64, 8, 1, 0, 4, 12), (128, 4, 16, 1, 8, 11), (128, 4, 16, 1, 8, 16),
                                        (128, 1, 1, 0, 1, 8), (256, 8, 16, 1, 2, 8))
        for rest in (64, 0)
    ] + [
        ATTENTION.constants(128, 4, p, True, warps, c, rest, rest > 0, listed=True) | {"BF16": 1}
        for p, warps, c, rest in ((16, 11, 8, 0), (1, 16, 1, 64), (1, 8, 1, 64), (1, 8, 1, 0), (16, 16, 8, 64))
    ],
    "dense_attention": [
        DENSE.constants(d, g, dtype, resident, stages)
        for d, g, dtype, resident, stages in ((64, 8, torch.float16, 2, 4), (128, 4, torch.bfloat16, 2, 3),
                                              (128, 8, torch.bfloat16, 1, 2), (256, 7, torch.bfloat16, 1, 3))
    ],
    "fetch": [
        FETCH.native(n, torch.empty((1, 1, slots, p, 2, dim), dtype=dtype, device="meta"), torch.empty(0, dtype=pool))
        for n, slots, p, dim in ((9, 9, 4, 16), (64, 128, 16, 128), (704, 704, 1, 128), (100, 2000, 1, 80),
                                  (FETCH.NATIVE_IDS, 1 << 16, 16, 256))
        for dtype, pool in ((torch.bfloat16,) * 2, (torch.bfloat16, torch.int8), (torch.float16, torch.int8))
    ],
    "top_blocks": [
        TOP_BLOCKS.native(n, k, True) | {"GROUP": GROUP}
        for n, k in ((2048, 64), (4096, 64), (8192, 64), (16384, 100), (32768, 64), (65536, 64), (16384, 2048),
                     (131072, 800), (262144, 800))
    ],
    "page_peaks": [
        PEAKS.native(d, g, p, bf16)
        for d, g, p, bf16 in ((64, 1, 4, 0), (128, 4, 16, 1), (128, 3, 8, 1), (256, 8, 16, 0))
    ],
    "visit_nodes": [
        NODES.native(d, g, nodes, bf16)
        for d, g, nodes, bf16 in ((64, 1, 99, False), (128, 4, 8194, True), (256, 8, 32770, True), (128, 7, 99, False))
    ],
    "best_pages": [
        BEST.native(n, k, g)
        for n, k, g in ((2048, 64, 4), (10240, 64, 4), (40960, 64, 4), (40960, 128, 8), (100, 7, 1))
    ],
    "union_pages": [UNION.native(g, n) for g, n in ((1, 1), (4, 64), (8, 128))],
}  # fmt: skip


@pytest.fixture(scope="module")
def nvrtc() -> ctypes.CDLL:
    libraries = _cuda._libraries()
    if libraries:
        return libraries[0]
    nvidia = importlib.util.find_spec("nvidia")
    found = [f for p in nvidia.submodule_search_locations for f in Path(p).rglob("libnvrtc.so.*")] if nvidia else []
    if not found:
        pytest.skip("no NVRTC: `pip install nvidia-cuda-nvrtc`")
    return ctypes.CDLL(str(found[0]))


def test_every_source_has_its_variants():
    assert {p.name.removesuffix(".cu") for p in _cuda.SOURCES.iterdir() if p.name.endswith(".cu")} == set(VARIANTS)


@pytest.mark.parametrize("newest", [False, True])
@pytest.mark.parametrize("name", VARIANTS)
def test_sources_compile(nvrtc, name, newest):
    """Every variant where there is a GPU. Without one, one for the oldest GPU and every second for the newest."""
    arch = "sm_90" if newest else "sm_{}{}".format(*_cuda.OLDEST[name])
    some = VARIANTS[name][1::2] if newest else VARIANTS[name][:1]
    for defines in VARIANTS[name] if torch.cuda.is_available() else some:
        assert _cuda.compiled(nvrtc, name, arch, **defines)[:4] == b"\x7fELF"


def test_a_source_that_does_not_compile_says_so(nvrtc):
    with pytest.raises(RuntimeError, match=r"rank_by_votes.cu does not compile for sm_90 with {'B': 16}(.|\n)*BINS"):
        _cuda.compiled(nvrtc, "rank_by_votes", "sm_90", B=16)


def test_missing_cuda_device_is_the_reported_reason():
    sizes = VARIANTS["rank_by_votes"][0]
    assert _cuda.load("rank_by_votes", torch.device("cpu"), **sizes) == "these tensors are on cpu"


@pytest.mark.gpu
def test_ops_take_their_native_kernels():
    """So that a library that cannot be loaded is not mistaken for one that is slow."""
    assert load_all()
    for name, variants in VARIANTS.items():
        assert isinstance(_cuda.load(name, DEVICE, **variants[0]), _cuda.Module), name


def test_old_gpu_and_missing_nvrtc_are_reported_reasons(monkeypatch):
    """On a GPU that is too old, and without NVRTC."""
    load = _cuda._load  # nothing is to be remembered
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    reasons = {object(): "compute capability 7.5 is below 8.0", None: "no NVRTC or no driver was found"}
    for libraries, reason in reasons.items():
        monkeypatch.setattr(_cuda, "_libraries", lambda libraries=libraries: libraries)
        assert load("rank_by_votes", torch.device("cuda", 0), **VARIANTS["rank_by_votes"][0]) == reason


# ---------------------------------------------------------------- kinds of kernels that are forced

ENTRIES = load_all()


def call(name: str, device=DEVICE):
    """The op as others call it, and what it changed."""
    things = on(device, clones(OPS[name](World())))
    out = ENTRIES[name].call(*things)
    return flat(on("cpu", (*things, out)))


def same(x, y) -> bool:
    return torch.equal(x.nan_to_num(7), y.nan_to_num(7)) if isinstance(x, torch.Tensor) else x == y


def test_kind_is_forced_inside_the_with_block(monkeypatch):
    """Also by a name that there is not, which changes nothing."""
    monkeypatch.setattr(_impl, "_forced", None)
    with torchsparsekv.use_kernels("triton"):
        with contextlib.suppress(KeyError), torchsparsekv.use_kernels("reference"):
            assert _impl.forced() == "reference"
            raise KeyError
        with pytest.raises(ValueError):
            torchsparsekv.use_kernels("tritom")
        assert _impl.forced() == "triton"
        with torchsparsekv.use_kernels(None):
            assert _impl.forced() is None
    assert _impl.forced() is None
    torchsparsekv.use_kernels("cuda")
    assert _impl.forced() == "cuda"


@pytest.mark.parametrize("name", ["append", "top_blocks", "fetch"])
@pytest.mark.parametrize("kind", ["triton", "reference", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_forced_kind_runs(name, kind, monkeypatch):
    """And nothing else; an op without CUDA C++ goes on along its chain where that is asked for."""
    entry, ran = ENTRIES[name], []
    told = lambda fn, what: lambda *x: (ran.append(what), fn(*x))[1]  # noqa: E731
    spied = tuple(one._replace(launch=told(one.launch, one.kind)) for one in entry.chain.chain)
    monkeypatch.setattr(entry.chain, "chain", spied)
    monkeypatch.setattr(entry.chain, "reference", told(entry.chain.reference, "reference"))
    with torchsparsekv.use_kernels("reference"):
        want = call(name, "cpu")
    with torchsparsekv.use_kernels(kind):
        assert all(map(same, call(name), want))
    expected = "triton" if kind == "cuda" and kind not in entry.chain.kinds else kind
    assert ran == ["reference", expected]
    assert {one.kind for one in entry.chain.candidates("triton", ())} == {"triton"}


def test_a_cuda_kernel_may_be_for_some_arguments_only():
    """Others go on along the chain, also where CUDA C++ is forced, as in an op without it."""
    some = _impl.cuda(lambda x: "too large", lambda *_: None, serves=lambda x: x > 0)
    chain = _impl.Chain("some", (some, _impl.triton(lambda x: "by triton")), lambda x: "by the reference")
    assert chain.run((-1,), "cuda") == chain.run((-1,), None) == chain.run((1,), None) == "by triton"
    assert chain.chosen(-1) == ("triton", {})
    assert chain.chosen(1) == ("triton", {"cuda": "too large"})
    with pytest.raises(RuntimeError, match="some: kernels='cuda' cannot run here: cuda: too large"):
        chain.run((1,), "cuda")


@pytest.mark.parametrize("name", ["prompt_attention", "table_prompt", "snap_tokens"])
def test_prompt_attention_uses_kernels_of_torch(name, monkeypatch):
    """On a CPU as on a GPU, whichever kernels are asked for, but not where the reference is."""
    entry, ran = ENTRIES[name], []
    told = lambda fn, what: lambda *x: (ran.append(what), fn(*x))[1]  # noqa: E731
    (one,) = entry.chain.chain
    monkeypatch.setattr(entry.chain, "chain", (one._replace(launch=told(one.launch, one.kind)),))
    monkeypatch.setattr(entry.chain, "unforced_on_cpu", told(entry.chain.unforced_on_cpu, "unforced"))
    call(name, "cpu")
    with torchsparsekv.use_kernels("triton"):
        call(name)
    with torchsparsekv.use_kernels("reference"):
        call(name, "cpu")
        assert entry.chain.chosen() == ("reference", {})
    assert ran == ["unforced", "torch"]
    assert entry.chain.chosen() == ("torch", {})
    assert _impl.Chain(name, (one,), entry.reference).unforced_on_cpu is one.launch


REFUSED = {  # what is forced, for which op on the CPU, where Triton does not interpret
    ("cuda", "append"): "these tensors are on the CPU",
    ("triton", "fetch"): "these tensors are on the CPU, where Triton only runs in its interpreter: set "
    "TRITON_INTERPRET=1 before the import",
}


@pytest.mark.parametrize(("kind", "name"), REFUSED)
def test_a_forced_kind_that_cannot_run_is_refused(kind, name, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    says = f"{name}: kernels='{kind}' cannot run here: {REFUSED[kind, name]}"
    with torchsparsekv.use_kernels(kind), pytest.raises(RuntimeError, match=f"^{re.escape(says)}$"):
        call(name, "cpu")


def test_forced_kernel_with_unsupported_arguments_is_refused():
    things = on(DEVICE, OPS["bound_scores"](World()))
    halves = "queries in torch.float32 against centres in torch.float32, not halves against fp8"
    with pytest.raises(RuntimeError, match=f"^bound_scores: kernels='cuda' cannot run here: cuda: {halves}$"):
        ENTRIES["bound_scores"].run("cuda", *things)


@pytest.mark.parametrize("kind", ["tritom", "", "CUDA", 3])
def test_an_unknown_kind_is_refused(kind):
    with pytest.raises(ValueError, match=f"^kernels must be one of cuda, triton, reference, got {kind!r}$"):
        torchsparsekv.use_kernels(kind)


@pytest.mark.parametrize("kind", ["reference", "", "tritom"])
def test_the_environment_forces_a_kind(kind):
    """Empty is not set; another name is refused at the import."""
    program = "from torchsparsekv.ops._machinery.chain import forced; print(forced())"
    env = {**os.environ, _impl.VARIABLE: kind}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True)
    if kind == "tritom":
        says = "ValueError: TORCHSPARSEKV_KERNELS must be one of cuda, triton, reference, got 'tritom'"
        assert (done.returncode, done.stderr.splitlines()[-1]) == (1, says)
    else:
        assert (done.returncode, done.stdout) == (0, f"{kind or None}\n"), done.stderr


def test_fetch_takes_as_many_slots_as_its_plan_has_bits_for():
    """80 KiB, less 8 bytes for each of 256 ids."""
    for slots, refused in ((638_976, False), (639_104, True)):
        rows = torch.empty((1, 1, slots, 1, 2, 128), dtype=torch.bfloat16, device="meta")
        assert isinstance(FETCH.native(256, rows, rows), str) is refused
