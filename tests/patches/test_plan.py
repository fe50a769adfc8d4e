"""plan() and `torchsparsekv plan` predict the memory of a cache by buffer."""
import gc
import re

import pytest
import torch
from cases import METHODS, hyper_of
from cli import answered, refused
from models import tiny
from planned import allocated
from planned import folder as of_a_tiny_model
from transformers import AutoConfig
from world import DEVICE

import torchsparsekv
from torchsparsekv import host
from torchsparsekv.patches import _memory as memory
from torchsparsekv.state import RowLengths

folder = of_a_tiny_model  # the fixture
SMALL = dict(max_length=64, budget=16, sink=8, window=6, skip_layers=1, block_size=4)


@pytest.mark.parametrize("method", METHODS)
def test_planned_memory_equals_allocated_memory(method):
    with torchsparsekv.patch(tiny(), method, **hyper_of(method, **SMALL)) as handle:
        for batch, length in ((1, None), (3, 48)):
            memory = handle.plan(batch, length)
            cache = handle.make_cache(batch, length)
            got = {}
            for row in memory.rows:
                got[row.name] = got.get(row.name, 0) + row.nbytes
            assert got == allocated(cache)
            report = handle.report()
            assert (memory.host_bytes, memory.device_bytes) == (report.host_bytes, report.device_bytes)
            assert all(x.nbytes == RowLengths.bytes_for(batch) for x in cache.row_lengths.values())
        assert "3 tokens" not in str(memory)
        assert str(memory).startswith("a cache of 48 tokens x batch 3\n")


@pytest.mark.gpu
@pytest.mark.parametrize("method", METHODS)
def test_planned_memory_is_within_1_percent_of_device_memory(method):
    hyper = hyper_of(method, max_length=131072, budget=1024, sink=64, window=256, skip_layers=1, block_size=16)
    with torchsparsekv.patch(tiny(max_position_embeddings=131072), method, **hyper, offload="host") as handle:
        gc.collect()
        torch.cuda.empty_cache()  # torch gives up to 1 MiB more than is asked for where that is left of a block
        before = torch.cuda.memory_allocated()
        cache = handle.make_cache()
        taken = torch.cuda.memory_allocated() - before
        assert taken == pytest.approx(handle.plan().device_bytes, rel=0.01, abs=1 << 14)  # of 512 bytes at a time
        assert handle.plan().host_bytes == handle.report().host_bytes
        del cache


def test_planning_allocates_nothing(monkeypatch):
    with torchsparsekv.patch(tiny(), "quest", **SMALL) as handle:
        monkeypatch.setattr(torch, "zeros", lambda *a, **k: pytest.fail("allocated"))
        monkeypatch.setattr(host, "pinned", lambda *a, **k: pytest.fail("allocated"))
        assert handle.plan(1000).device_bytes > 1000 * 64 * 2 * 2 * 16 * 4


# ---------------------------------------------------------------- commands


def test_plan_without_a_length_uses_the_limit_of_the_model(folder):
    """512 positions: less than what is taken where there are more."""
    small = ("plan", folder, "--method", "quest", "--set", "budget=64")
    assert answered(*small) == answered(*small, "--max-length", "512")


def test_plan_command_equals_the_plan_of_a_patched_model(folder):
    sizes = ("--max-length", "64", "--batch", "3", "--skip-layers", "1", "--offload", "host")
    told = answered("plan", folder, "--method", "quest", *sizes, *(
        x for name in ("budget", "sink", "window", "block_size") for x in ("--set", f"{name}={SMALL[name]}")
    ))  # fmt: skip
    with torchsparsekv.patch(tiny(), "quest", **SMALL) as handle:
        memory = handle.plan(3)
    said = {}
    for name, _, mib, _ in (x for x in map(str.split, told.splitlines()) if len(x) == 4 and x[1].isdigit()):
        said[name] = said.get(name, 0) + float(mib)
    for row in memory.rows:
        if "." in row.name:  # the pool comes in two lines, of the layers that keep it on the device and the others
            assert said[row.name] == pytest.approx(row.nbytes / 2**20, abs=2e-3)
    host_mib, device_mib = map(float, re.findall(r"([\d.]+) MiB", told.splitlines()[-1]))
    assert host_mib + device_mib == pytest.approx((memory.host_bytes + memory.device_bytes) / 2**20, abs=0.02)
    assert host_mib > 0
    assert "budget=16" in told


@pytest.mark.parametrize("limit", ["device", "host"])
def test_the_largest_batch_and_its_hot_buffers_fit_and_no_more_do(folder, limit, monkeypatch):
    """The GPU holds 2.01 GiB, of which 2 are left for a step; or little host memory is there."""
    monkeypatch.setattr(memory, "free_device_bytes", lambda _: 0)  # what is free here does not matter
    told = dict(max_length=128, budget=16, block_size=4, offload="host")
    model = tiny()
    with torchsparsekv.patch(model, "quest", **told) as handle:
        weights, plan = sum(p.nbytes for p in model.parameters()), handle.planned
    room, host_gib = 2.01 * 2**30 - 2 * 2**30 - weights, 1.0
    if limit == "host":
        host_gib = 5.5 * plan.bytes(1, 128, pool_on_host=True)[0] / 2**30
    said = answered(
        "plan", folder, "--method", "quest", "--max-length", "128", "--set", "budget=16", "--set", "block_size=4",
        "--offload", "host", "--gpu-gib", "2.01", "--host-gib", str(host_gib),
    )  # fmt: skip
    batch = int(re.search(r"largest batch: (\d+) sequences of 128 tokens", said)[1])
    need = lambda n: plan.bytes(n, 128, pool_on_host=True)  # noqa: E731
    assert need(batch)[0] <= host_gib * 2**30
    assert need(batch)[1] <= room
    assert batch == 5 if limit == "host" else need(batch + 1)[1] > room
    assert f"a cache of 128 tokens x batch {batch}" in said
    left = memory.hot_room(plan, batch, 128, room)
    assert 0 < float(re.search(r"with hot_gib up to ([\d.]+),", said)[1]) <= left / 2**30
    budgets = memory.placed(plan, "host", batch, 128, left / 2**30).hot_budgets
    assert plan.bytes(batch, 128, pool_on_host=True, hot_budgets=budgets)[1] <= room
    more = plan.bytes(batch, 128, pool_on_host=True, hot_budgets=budgets + 1)[1]
    assert budgets == plan.most_budgets(128) if limit == "host" else more > room
    every = plan.hot_bytes(batch, 128, pool_on_host=True, hot_budgets=plan.most_budgets(128))
    assert left == every if limit == "host" else left < every


@pytest.mark.parametrize(
    ("gib", "used", "said"), [(123.69, 123.6, "up to 123.6,"), (0.01237, 0.0123, "up to 0.0123,"), (2**-16, 2**-16, "")]
)
def test_room_for_hot_buffers_is_rounded_down_and_decides_however_small(gib, used, said, monkeypatch):
    """Else the table would be of the free memory of a GPU that happens to be here."""
    from torchsparsekv.commands import plan

    monkeypatch.setattr(memory, "largest_batch", lambda *_, **__: 3)
    monkeypatch.setattr(memory, "hot_room", lambda *_: int(gib * 2**30))
    batch, hot, line = plan._largest(None, 128, True, 0, plan.Room(3.0, 1.0))
    assert (batch, hot) == (3, pytest.approx(used))
    assert said in line
    assert ("hot_gib" in line) == bool(said)


def test_plan_command_and_patch_have_one_default_for_offload(folder):
    small = ("plan", folder, "--method", "quest", "--max-length", "128", "--set", "budget=16")
    told = answered(*small)
    assert told == answered(*small, "--offload", "auto")
    with torchsparsekv.patch(tiny(), "quest", max_length=128, budget=16) as handle:
        assert handle.offload == "auto"
        where = "host" if handle.plan().host_bytes else "device"
    assert f"offload auto: the pool on the {where}" in told
    assert "offload host: the pool on the host" in answered(*small, "--offload", "host")


def test_values_of_set_are_written_as_in_python_or_json(folder):
    small = ("plan", folder, "--method", "pariskv", "--max-length", "512", "--set", "budget=16")
    for python, json in (("False", "false"), ("True", "true")):
        told = answered(*small, "--set", f"estimate_rest={python}")
        assert told == answered(*small, "--set", f"estimate_rest={json}")
        assert f"estimate_rest={python}" in told
    assert answered(*small, "--set", "prefetch_async=None") == answered(*small, "--set", "prefetch_async=null")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the line is for machines without a GPU")
def test_plan_without_a_gpu_says_that_a_gpu_changes_the_sizes(folder):
    assert "No GPU is here: on a GPU, offload and hot_budgets of 'auto' use up to half" in answered("plan", folder)


def test_the_command_takes_an_old_name_with_a_warning(folder):
    small = ("plan", folder, "--method", "quest", "--set", "budget=64")
    with pytest.warns(FutureWarning, match="fetch_late is now prefetch_async"):
        assert answered(*small, "--set", "fetch_late=0.5") == answered(*small, "--set", "prefetch_async=0.5")
    both = refused(*small, "--set", "fetch_late=0.5", "--set", "prefetch_async=0.5")
    assert "plan: fetch_late is the old name of prefetch_async" in both


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["./nowhere"], "there is no model at ./nowhere"),
        (["MODEL", "--method", "qeust"], "unknown method 'qeust'"),
        (["MODEL", "--max-length", "100000"], "max_length 100000 is above the model's max_position_embeddings, 512"),
        (["MODEL", "--max-length", "64", "--set", "budget=128"], "budget 128 is above max_length 64"),
        (["MODEL", "--set", "budget"], "--set takes NAME=VALUE, got 'budget'"),
        (["MODEL", "--set", "budget=64", "--set", "budget=32"], "--set names budget twice"),
        (["MODEL", "--gpu-gib", "0", "--offload", "host"], "--gpu-gib must be finite, > 0, got 0.0"),
        (["MODEL", "--gpu-gib", "1", "--host-gib", "-1"], "--host-gib must be finite, > 0, got -1.0"),
        (["MODEL", "--host-gib", "1"], "--host-gib is for --gpu-gib"),
        (["MODEL", "--gpu-gib", "1"], "with --gpu-gib, --offload must be host or device, got 'auto'"),
        (["MODEL", "--gpu-gib", "1", "--batch", "2"], "--gpu-gib finds --batch and --hot-gib: leave these out"),
        (["MODEL", "--gpu-gib", "1", "--hot-gib", "2"], "--gpu-gib finds --batch and --hot-gib: leave these out"),
        (["MODEL", "--gpu-gib", "1", "--offload", "host"], "not one sequence of 512 tokens fits in 1 GiB of GPU"),
        (["MODEL", "--offload", "disk"], "offload must be one of auto, host, device, got 'disk'"),
    ],
)
def test_plan_command_refuses_wrong_arguments(folder, args, says):
    assert f"plan: {says}" in refused("plan", *(folder if a == "MODEL" else a for a in args))


def test_plan_of_an_unknown_model_is_refused_in_one_line(monkeypatch):
    def fail(name):
        raise OSError("no connection\nCheck it")

    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    assert refused("plan", "nowhere") == (
        "plan: nowhere is not a folder with a model, and the Hugging Face hub gave no model of this name: "
        "no connection\n"
    )


def test_info_lists_versions_and_devices():
    told = answered("info")
    for part in (f"torchsparsekv {torchsparsekv.__version__}", f"torch {torch.__version__}", "host memory: "):
        assert part in told
    assert ("GB/s" in told) == (DEVICE.type == "cuda")
    assert "no method is refused here" in told


def test_info_lists_what_would_be_refused(monkeypatch):
    from torchsparsekv.commands import info

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda d: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda d: "an old one")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    lines = info.refusals([torch.device("cuda", 0)])
    assert sum(line.count(name) for line in lines for name in ("quest", "full")) >= 2
    says = r"refused: .*: on cuda:0: \w+ needs compute capability \d\.\d, an old one has 7.5"
    assert all(re.match(says, x) for x in lines)


def test_version_option_prints_the_version():
    assert answered("--version") == f"torchsparsekv {torchsparsekv.__version__}\n"


def test_missing_model_is_refused():
    assert "calibrate: there is no model at ./nowhere" in refused("calibrate", "./nowhere", "README.md")
