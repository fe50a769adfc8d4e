"""Files of results: the environment and the command that made the file, its rows, and its table."""
import contextlib
import importlib
import json
import os
import platform
import shlex
import sys
from pathlib import Path

import torch

import torchsparsekv
from torchsparsekv_benchmarks._table import table

FOLDER = Path(__file__).resolve().parent


def environment() -> dict:
    """Versions and hardware; what is not installed is not named."""
    out = {"python": platform.python_version(), "torchsparsekv": torchsparsekv.__version__, "torch": torch.__version__}
    for name in ("triton", "transformers"):
        with contextlib.suppress(ImportError):
            out[name] = importlib.import_module(name).__version__
    if torch.cuda.is_available():
        p = torch.cuda.get_device_properties(0)
        out |= {"gpu": p.name, "sms": p.multi_processor_count, "gpu_memory_gib": round(p.total_memory / 2**30, 1)}
    else:
        out |= {"cpu": processor(), "threads": torch.get_num_threads()}
    return out


def processor() -> str:
    """The name of the CPU where the system tells it, else its architecture."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith("model name")).split(":", 1)[1].strip()
    return platform.machine()


def program() -> str:
    """What was started: this project's command, alone or by torchrun, or a script of the benchmarks."""
    if "LOCAL_WORLD_SIZE" in os.environ:
        return f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']} -m torchsparsekv.cli"
    script = Path(sys.argv[0]).resolve()
    inside = script.is_relative_to(FOLDER)
    return f"python benchmarks/{script.relative_to(FOLDER).as_posix()}" if inside else "torchsparsekv"


def header(name: str, options: dict) -> dict:
    """What every file of results begins with."""
    return {
        "benchmark": name,
        "command": " ".join([program(), *map(shlex.quote, sys.argv[1:])]),
        "environment": environment(),
        "options": options,
    }


def cell(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return " ".join(map(cell, value))
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"
    return str(value)


def print_table(rows: list[dict]) -> None:
    """Columns in the order of their first appearance."""
    columns = list(dict.fromkeys(c for r in rows for c in r))
    print(table(columns, [[cell(r.get(c, "")) for c in columns] for r in rows]))


def begun(name: str, options: dict, out: Path | None) -> list[dict]:
    """The rows of a run that was stopped, so that it can go on; a file that something else made is refused."""
    if out is None or not out.exists():
        return []
    try:
        had, has = json.loads(out.read_text()), json.loads(json.dumps(header(name, options)))
        other = [k for k in ("benchmark", "environment", "options") if had[k] != has[k]]
    except (ValueError, KeyError, TypeError) as e:
        raise ValueError(f"{out} is not a file of results: {e!r}; choose another file") from e
    if other:
        was, now = ({k: x[k] for k in other} for x in (had, has))
        raise ValueError(f"{out} was made with {was}, this run has {now}: choose another file")
    return had["rows"]


def save(name: str, rows: list[dict], options: dict, out: Path | None) -> dict:
    """Write rows, options, environment and the command to `out`. If stopped, the old file stays whole."""
    result = header(name, options) | {"rows": rows}
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        part = out.with_name(f"{out.name}.part")
        part.write_text(json.dumps(result, indent=1) + "\n")
        part.replace(out)
    return result


def finish(name: str, rows: list[dict], options: dict, out: Path | None) -> dict:
    """Print the table and save the result."""
    result = save(name, rows, options, out)
    print_table(rows)
    print(result["environment"])
    return result
