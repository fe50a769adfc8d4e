"""The CUDA sources: through the real compiler without a GPU; what they compute is tested with their ops, on one."""
import ctypes
import importlib
from pathlib import Path

import pytest
import torch
from world import DEVICE

from torchsparsekv.ops import _cuda
from torchsparsekv.ops._registry import load_all
from torchsparsekv.ops._top import GROUP

BOUNDS, COLLIDE, RERANK, TOP_BLOCKS = (
    importlib.import_module(f"torchsparsekv.ops.select.{name}")
    for name in ("bound_scores", "collide", "rerank", "top_blocks")
)
ATTENTION = importlib.import_module("torchsparsekv.ops.attend.sparse_attention")
FETCH = importlib.import_module("torchsparsekv.ops.gather.fetch")
VARIANTS = {
    "bound_scores": [
        dict(D=d, G=g, BOX=box, BF16=bf16, WARPS=BOUNDS.NATIVE_WARPS, GROUP=GROUP)
        for d, g, bf16 in ((64, 16, 0), (128, 1, 0), (128, 4, 1), (256, 8, 1)) for box in (0, 1)
    ],
    "rerank": [
        dict(B=b, F=f, WARPS=4, RESIDENT=r, GROUP=GROUP, **dict.fromkeys(("LOW0", "LOW1", "HIGH0", "HIGH1"), 2**32 - 1))
        for b, r in RERANK.NATIVE_SPACES.items() for f in (1, 4, RERANK.NATIVE_FIELDS)
    ],
    "earn_points": [
        dict(B=b, F=f, G=g, D=d, KIND=kind)
        for b, d in ((8, 48), (16, 128), (32, 256)) for f, g in ((1, 4), (4, 1), (7, 1)) for kind in (0, 1, 2)
    ],
    "collide": [
        dict(B=b, PACKS=p, BINS=COLLIDE._bins(b), THREADS=COLLIDE.NATIVE_STEP)
        for b in (8, 16, 32) for p in (1, COLLIDE.NATIVE_PACKS)
    ],
    "sparse_attention": [
        dict(D=d, G=g, P=p, BF16=bf16, WARPS=ATTENTION.NATIVE_WARPS, CLUSTER=c)
        for d, g, p, bf16, c in ((64, 8, 1, 0, 4), (128, 4, 16, 1, 8), (128, 1, 1, 0, 1), (256, 8, 16, 1, 2))
    ],
    "fetch": [
        FETCH._native(n, torch.empty((1, 1, places, p, 2, dim), dtype=torch.bfloat16, device="meta"))
        for n, places, p, dim in ((9, 9, 4, 16), (64, 128, 16, 128), (704, 704, 1, 128), (100, 2000, 1, 80),
                                  (FETCH.NATIVE_PLACES, FETCH.NATIVE_PLACES, 2, 256))
    ],
    "top_blocks": [
        TOP_BLOCKS._native(n, k, True) | {"GROUP": GROUP}
        for n, k in ((2048, 64), (4096, 64), (8192, 64), (16384, 100), (32768, 64), (65536, 64), (16384, 2048),
                     (131072, 800), (262144, 800))
    ],
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
    arch = "sm_90" if newest else "sm_{}{}".format(*_cuda.OLDEST[name])
    for defines in VARIANTS[name]:
        assert _cuda.compiled(nvrtc, name, arch, **defines)[:4] == b"\x7fELF"


def test_a_source_that_does_not_compile_says_so(nvrtc):
    with pytest.raises(RuntimeError, match=r"collide.cu does not compile for sm_90 with {'B': 16}(.|\n)*BINS"):
        _cuda.compiled(nvrtc, "collide", "sm_90", B=16)


def test_without_a_cuda_device_triton_is_left():
    assert _cuda.load("collide", torch.device("cpu"), **VARIANTS["collide"][0]) is None


@pytest.mark.gpu
def test_ops_take_their_native_kernels():
    """So that a library that cannot be loaded is not mistaken for one that is slow."""
    assert load_all()
    assert _cuda.load("collide", DEVICE, **VARIANTS["collide"][0]) is not None
    assert _cuda.load("top_blocks", DEVICE, **VARIANTS["top_blocks"][0]) is not None
