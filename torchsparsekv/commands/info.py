"""`torchsparsekv info`: print versions, GPUs, the speed of the link, host memory, and the methods refused here."""
import platform
import time
from importlib.metadata import PackageNotFoundError, version

import torch
import typer

import torchsparsekv
from torchsparsekv import host
from torchsparsekv.commands import app
from torchsparsekv.method import DEVICE_SHARE, all_methods, check_device, make_method

PACKAGES = ("transformers", "triton", "accelerate", "numpy")  # beside torch, whose version names its build
PIECE = 256 << 20  # bytes of one copy
SECONDS = 1.0


@app.command()
def info() -> None:
    """Print hardware and versions, and which methods would be refused on this machine, and why."""
    typer.echo(f"torchsparsekv {torchsparsekv.__version__}, Python {platform.python_version()}")
    typer.echo(", ".join([f"torch {torch.__version__}", *(f"{name} {_version(name)}" for name in PACKAGES)]))
    typer.echo(f"host memory: {host.available() / 2**30:.1f} GiB free; {host.memlock_said(host.memlock())}")
    devices = [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    if not devices:
        typer.echo("no CUDA device: the plain PyTorch implementations run on the CPU, which is slow")
    for device in devices:
        for line in about(device):
            typer.echo(line)
    for line in refusals(devices):
        typer.echo(line)


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"


def about(device: torch.device) -> list[str]:
    free, total = torch.cuda.mem_get_info(device)
    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    room = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    lines = [f"{device}: {name}, compute capability {major}.{minor}, {room}"]
    lines.append(f'    a cache with hot_budgets "auto" takes up to {DEVICE_SHARE * free / 2**30:.1f} GiB')
    try:
        lines.append(f"    reads pinned host memory at {link_speed(device) / 1e9:.1f} GB/s")
    except MemoryError as e:
        lines.append(f"    {PIECE >> 20} MiB of host memory cannot be pinned, so a pool cannot be kept there: {e}")
    wanted = host.available()
    if (limit := host.pinnable(wanted, device)) < wanted:
        lines.append(f"    {limit / 2**30:.2f} GiB of host memory can be pinned: this driver obeys the memlock limit")
    return lines


def link_speed(device: torch.device) -> float:
    """The bytes per second that the device reads from pinned host memory, measured for about a second."""
    far = host.pinned((PIECE,), torch.uint8, device)
    near = torch.empty_like(far)
    near.copy_(far)
    torch.cuda.synchronize(device)
    begin, copies = time.perf_counter(), 0
    while time.perf_counter() - begin < SECONDS:
        near.copy_(far)
        copies += 1
        torch.cuda.synchronize(device)
    return PIECE * copies / (time.perf_counter() - begin)


def refusals(devices: list[torch.device]) -> list[str]:
    """A line for each reason of a refusal with its methods, or a line that nothing is refused."""
    reasons: dict[str, list[str]] = {}
    if _version("transformers") == "missing":
        reasons["patch() needs transformers: pip install 'torchsparsekv[hf]'"] = ["all"]
    for name in all_methods():
        for device in devices:
            try:
                check_device(device, make_method(name))
            except (NotImplementedError, RuntimeError) as e:
                reasons.setdefault(f"on {device}: {e}", []).append(name)
    return [f"refused: {', '.join(names)}: {why}" for why, names in reasons.items()] or ["no method is refused here"]
