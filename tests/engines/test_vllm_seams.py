"""Which seam a version of vLLM gets. No vLLM is needed: stand-ins offer what a version offers."""
import importlib.metadata
import sys
from types import ModuleType, SimpleNamespace

import pytest

from torchsparsekv import engines
from torchsparsekv.engines import _vllm_seams as seams

OLD, NEW = {"get_kv_cache_shape": None}, {"customize_spec": None, "supported_kv_cache_layouts": None}


@pytest.fixture
def here(monkeypatch):
    """Makes a vLLM of that version the installed one, whose backends have these hooks."""

    def install(version: str, hooks: dict, **registry: object) -> None:
        theirs = importlib.metadata.version
        monkeypatch.setattr(importlib.metadata, "version", lambda name: version if name == "vllm" else theirs(name))
        found = {
            "vllm.v1.attention.backend": {"AttentionBackend": SimpleNamespace(**hooks)},
            "vllm.v1.attention.backends.registry": registry,
        }
        for name, names in found.items():
            module = ModuleType(name)
            module.__dict__.update(names)
            monkeypatch.setitem(sys.modules, name, module)
        for name in seams.TESTED.values():
            monkeypatch.setitem(sys.modules, f"torchsparsekv.engines.{name}", ModuleType(name))

    return install


@pytest.mark.parametrize(("version", "name"), [
    ("0.26.0", "_vllm_026"), ("0.26.2+cu130", "_vllm_026"), ("0.33.0", "_vllm_033"), ("0.33.1rc2", "_vllm_033"),
])  # fmt: skip
def test_tested_versions_get_their_seam(here, recwarn, version, name):
    here(version, {})
    assert seams.seam().__name__ == name
    assert not recwarn


@pytest.mark.parametrize(("version", "hooks", "name"), [
    ("0.27.1", OLD, "_vllm_026"), ("0.31.0", OLD | NEW, "_vllm_033"), ("0.34.0", NEW, "_vllm_033"),
    ("0.260.0", NEW, "_vllm_033"),
])  # fmt: skip
def test_other_versions_get_the_seam_whose_hooks_they_offer_with_a_warning(here, version, hooks, name):
    here(version, hooks, register_backend=None, AttentionBackendEnum=SimpleNamespace(register=None))
    with pytest.warns(UserWarning, match=f"tested in vllm 0.26, 0.33, not in {version}"):
        assert seams.seam().__name__ == name


@pytest.mark.parametrize(("hooks", "registry"), [
    ({}, {"AttentionBackendEnum": SimpleNamespace(register=None)}),
    (NEW, {"AttentionBackendEnum": SimpleNamespace()}),
    (OLD, {"AttentionBackendEnum": SimpleNamespace()}),
    (OLD, {}),
])  # fmt: skip
def test_version_without_the_hooks_is_refused_by_name(here, hooks, registry):
    here("0.40.0", hooks, **registry)
    with pytest.raises(ImportError, match=r"works in vllm 0\.26, 0\.33, not in 0\.40\.0, which has none of the hooks"):
        seams.seam()
    with pytest.warns(UserWarning, match=r"not in 0\.40\.0"):
        engines.register()


def test_vllm_without_backends_is_refused_by_name(here, monkeypatch):
    here("0.8.0", {})
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backend", None)
    with pytest.raises(ImportError, match=r"not in 0\.8\.0"):
        seams.seam()
