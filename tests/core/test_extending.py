"""The code of docs/develop runs as it stands on the pages."""
import dataclasses
import re
from pathlib import Path
from typing import Annotated

import pytest
import torch
from models import dense_logits, greedy_logits, prompts, tiny

import torchsparsekv
from torchsparsekv import method
from torchsparsekv._methods.streaming import Streaming
from torchsparsekv.ops._machinery import registry
from torchsparsekv.ops._machinery.signature import Changed, Of, Signature
from torchsparsekv.ops.store.views import Leaving, NewKeys
from torchsparsekv.patches import _family, all_families
from torchsparsekv.state import OF_STATE, Buffer

PAGES = [Path(__file__).resolve().parents[2] / f"docs/develop/{name}.md" for name in ("method", "op", "family")]
CHECKED, PATCHED = "torchsparsekv.check_method(", "torchsparsekv.patch(model"
SIZES = dict(max_length=128, sink=8, window=6, skip_layers=1, block_size=4)


@pytest.fixture(scope="session")
def everything():
    """Files are imported only once: what is loaded while a table is another's is not in ours afterwards."""
    return method.all_methods(), registry.load_all(), all_families()


def code() -> list[str]:
    return [b for page in PAGES for b in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S)]


@pytest.fixture(scope="session")
def defined(everything, tmp_path_factory):
    """What the page defines, and what that put into each table; nobody knows it yet. Once in a process: torch takes an
    op's name only once, and a worker may be given these tests in several parts."""
    tables = method._METHODS, registry.OPS, _family.FAMILIES
    known = [dict(table) for table in tables]
    blocks = [b for b in code() if CHECKED not in b and PATCHED not in b]
    path = tmp_path_factory.mktemp("page") / "page.py"  # kernels are read from their file
    path.write_text("\n\n".join(blocks))
    names: dict = {"__name__": "page", "__file__": str(path)}
    exec(compile(path.read_text(), str(path), "exec"), names)
    added = []
    for table, before in zip(tables, known):
        added.append((table, {name: table.pop(name) for name in table.keys() - before.keys()}))
    return names, added


@pytest.fixture
def page(defined, monkeypatch):
    """The names that the page defines, known while the test runs."""
    names, added = defined
    for table, entries in added:
        for name, entry in entries.items():
            monkeypatch.setitem(table, name, entry)
    return names


@pytest.mark.parametrize("name", ["newest", "meanest"])
def test_methods_of_the_page_are_dense_at_full_budget(page, name):
    model = tiny()
    ids, mask = prompts(2, 60)
    with torchsparsekv.patch(model, name, budget=128, **SIZES) as handle:
        got = greedy_logits(model, ids, mask, 20, handle.make_cache(2))
    torch.testing.assert_close(got, dense_logits(model, ids, mask, 20), rtol=1e-4, atol=1e-4)
    with torchsparsekv.patch(model, name, budget=8, **SIZES) as handle:
        cache = handle.make_cache(2)
        greedy_logits(model, ids, mask, 20, cache)
        assert handle.report().layers[-1].blocks_selected == 2 * 2 * 2 * 20, "rows, heads, blocks, steps"
        chosen = cache.layers[-1].state.hot
        assert bool((chosen.block_of.gather(-1, chosen.chosen.long()) >= 2).all()), "none of the sinks"


def test_method_of_the_page_passes_the_check_that_the_page_names(page):
    (block,) = (b for b in code() if CHECKED in b)
    exec(compile(block, "method.md", "exec"), dict(page))


def test_brute_force_of_the_page_sees_what_the_method_selects(page):
    (block,) = (b for b in code() if PATCHED in b)
    model, steps = tiny(), []
    ids, mask = prompts(1, 200)

    def brute_force(s, q, a, selection, out):
        page["brute_force"](s, q, a, selection, out)
        with pytest.raises(AssertionError):
            page["brute_force"](s, -q, a, selection, out)
        steps.append(int(selection.ids.shape[2]))

    inputs = dict(input_ids=ids, attention_mask=mask)
    names = dict(page, torchsparsekv=torchsparsekv, model=model, inputs=inputs, brute_force=brute_force)
    exec(compile(block, "method.md", "exec"), names)
    assert steps == [64 // 16] * 19 * len(model.model.layers)


def test_op_of_the_page_passes_opcheck(page):
    from kernels import clones, flat, on
    from world import DEVICE, World

    w = World(tokens=5, seed=3)
    entry = registry.OPS["block_means"]
    means = torch.zeros(w.batch, w.heads, w.blocks, w.dim)
    things = (Leaving(w.k, w.pool(torch.maximum(w.begin, w.length))), means, w.lengths_view, w.block)
    there = on(DEVICE, clones(things))
    torch.library.opcheck(entry.op, tuple(flat(there)))
    entry.reference(*things)
    entry.run("triton", *there)
    torch.testing.assert_close(there[1].cpu(), things[1])
    assert means.abs().sum() > 0
    with pytest.raises(ValueError, match=r"means must have shape \(2, 2, blocks, 16\), got"):
        entry.call(Leaving(w.k, w.pool(w.length)), means[0], w.lengths_view, w.block)


def test_families_of_the_page_are_known(page):
    assert _family.FAMILIES["my_llama"].model_types == ("my_llama",)
    plain, capped = (_family.FAMILIES[name].layers(tiny().config)[0] for name in ("my_llama", "my_capped_llama"))
    assert capped == dataclasses.replace(plain, softcap=30.0)


# ---------------------------------------------------------------- what is said to those who forget something


def unannotated(k, block_size: int) -> None: ...
def open_ended(block_size: int): ...
def odd(sizes: dict) -> None: ...
def plain(k: NewKeys) -> None: ...
def giving(k: NewKeys) -> torch.Tensor: ...


WRONG_OPS = {
    "parameter without annotation": ("forgot", unannotated, "op 'forgot': the reference must annotate parameter 'k'"),
    "nothing said to return": ("forgot", open_ended, "op 'forgot': the reference must annotate the result"),
    "no type of an op": ("forgot", odd, "parameter 'sizes' of an op must be a view, .* got <class 'dict'>"),
    "no fake": ("forgot", giving, r"op 'forgot' returns something: give register\(\) a fake"),
    "name taken": ("append", plain, r"op 'append' is registered twice: by .*append.reference and .*plain"),
}


@pytest.mark.parametrize("what", WRONG_OPS)
def test_op_with_a_wrong_signature_is_refused(what):
    name, reference, says = WRONG_OPS[what]
    with pytest.raises((TypeError, ValueError), match=says):
        registry.register(name, reference)


Own = Annotated[torch.Tensor, Of("n", torch.float32)] | None


def as_written(x: Changed[Own] = None) -> None: ...
def as_python_3_10_reads_it(x: Changed[Own] | None = None) -> None: ...


@pytest.mark.parametrize("reference", [as_written, as_python_3_10_reads_it])
def test_signature_with_a_default_of_none_is_equal_on_every_python(reference):
    assert Signature("own", reference).schema == "(Tensor(a!)? x) -> ()"


def test_optional_tensors_share_a_size_that_no_other_tensor_has():
    """The first optional tensor may be None, and the second one still has the size to itself."""
    rows = Annotated[torch.Tensor, Of("rows", torch.float32)]
    some = Annotated[torch.Tensor, Of("rows some", torch.float32)]

    def plain(x: rows, a: some | None = None, b: some | None = None) -> None: ...

    verify, x = Signature("plain", plain).verifier(), torch.zeros(2)
    for a, b in ((None, None), (None, 3), (3, None), (3, 3), (0, 0)):
        verify(x, *(None if n is None else torch.zeros(2, n) for n in (a, b)))
    with pytest.raises(ValueError, match=r"b must have shape \(2, 3\), got \(2, 4\)"):
        verify(x, torch.zeros(2, 3), torch.zeros(2, 4))


def test_forcing_a_kernel_of_an_op_without_kernels_is_refused(monkeypatch):
    monkeypatch.setattr(registry, "OPS", {})
    registry.register("reference_alone", plain)(k := torch.zeros(1, 1, 1, 16))
    says = "reference_alone: kernels=None cannot run here: it has only a reference"
    with pytest.raises(RuntimeError, match=says):
        registry.OPS["reference_alone"].chain.on_cuda(k)


@pytest.fixture
def unnamed(everything, monkeypatch):
    monkeypatch.setattr(method, "_METHODS", dict(method._METHODS))


def test_method_without_choose_is_refused_by_name(unnamed):
    class Idle(method.Method):
        name = "idle"

    with pytest.raises(NotImplementedError, match=r"method 'idle' \(.*Idle\) does not define choose"):
        Idle().choose(None, None, None)


BUFFERS = {
    "missing: store, stats": lambda g, store: {"index": Buffer((*g.lead, 3), torch.float32)},
    "index must be a Buffer or a view of Buffers, got tensor": lambda g, store: store | {"index": torch.zeros(3)},
    "LayerState has lengths, on_step itself": lambda g, store: (
        store | dict.fromkeys(("on_step", "lengths"), store["store"])
    ),
}


@pytest.mark.parametrize("says", BUFFERS)
def test_impossible_buffers_are_refused(unnamed, says):
    class Bare(method.Method):
        name = "bare"

        def buffers(self, g):
            return BUFFERS[says](g, super().buffers(g))

    with pytest.raises(TypeError, match=says):
        torchsparsekv.patch(tiny(), "bare", budget=128, max_length=128)


def test_buffer_names_cannot_shadow_the_state():
    """Whatever a state is given beside its buffers."""
    with torchsparsekv.patch(tiny(), "quest", budget=16, sink=8, window=6, max_length=64, block_size=4) as handle:
        state = handle.make_cache(1).layers[-1].state
        assert vars(state).keys() - state.buffers.keys() == OF_STATE


FILLED = {"filled": (torch.float32, "device"), "small": (torch.float8_e4m3fn, "device"), "bulk": (torch.int32, "pool")}


def test_buffers_are_filled_at_the_start_and_copied_by_fork(unnamed):
    class Filled(Streaming):
        name = "filled"

        def buffers(self, g):
            return super().buffers(g) | {n: Buffer(g.lead, of, home, fill=3) for n, (of, home) in FILLED.items()}

    with torchsparsekv.patch(tiny(), "filled", **SIZES) as handle:
        cache = handle.make_cache(1)
        state = cache.layers[-1].state
        held = lambda s: {n: set(getattr(s, n).float().flatten().tolist()) for n in FILLED}  # noqa: E731
        assert held(state) == {n: {3.0} for n in FILLED}
        for name in FILLED:
            getattr(state, name).copy_(torch.tensor(5.0))
        assert held(handle.fork(cache).layers[-1].state) == {n: {5.0} for n in FILLED}
        cache.reset()
        assert held(state) == {n: {3.0} for n in FILLED}
