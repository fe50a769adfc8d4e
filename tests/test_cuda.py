"""The CUDA sources: through the real compiler without a GPU; what they compute is tested with their ops, on one."""
import ctypes
import importlib
from pathlib import Path

import pytest
import torch
from world import DEVICE

from torchsparsekv.ops import _cuda
from torchsparsekv.ops._registry import load_all

COLLIDE = importlib.import_module("torchsparsekv.ops.select.collide")
TOP_BLOCKS = importlib.import_module("torchsparsekv.ops.select.top_blocks")
VARIANTS = {
    "collide": [dict(B=b, F=f, BINS=COLLIDE._bins(b)) for b in COLLIDE.NATIVE_SPACES for f in (1, 4, 7)],
    "top_blocks": [
        TOP_BLOCKS._native(n, k, True)
        for n, k in ((2048, 64), (4096, 64), (8192, 64), (16384, 100), (32768, 64), (16384, 2048), (131072, 800))
    ],
}


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


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("name", VARIANTS)
def test_sources_compile(nvrtc, name, arch):
    for defines in VARIANTS[name]:
        assert _cuda.compiled(nvrtc, name, arch, **defines)[:4] == b"\x7fELF"


def test_a_source_that_does_not_compile_says_so(nvrtc):
    with pytest.raises(RuntimeError, match=r"collide.cu does not compile for sm_90 with {'B': 16}(.|\n)*BINS"):
        _cuda.compiled(nvrtc, "collide", "sm_90", B=16)


def test_without_a_cuda_device_triton_is_left():
    assert _cuda.load("collide", torch.device("cpu"), B=16, F=4, BINS=128) is None


@pytest.mark.gpu
def test_ops_take_their_native_kernels():
    """So that a library that cannot be loaded is not mistaken for one that is slow."""
    assert load_all()
    assert _cuda.load("collide", DEVICE, B=16, F=4, BINS=128) is not None
    assert _cuda.load("top_blocks", DEVICE, **TOP_BLOCKS._native(8192, 64, True)) is not None
