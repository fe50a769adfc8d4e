"""What every benchmark shares: timing, the environment it ran in, tables, JSON."""
import contextlib
import importlib
import json
import platform
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import torchsparsekv
from torchsparsekv.benchmarks._options import Setup, at_least
from torchsparsekv.commands._table import table
from torchsparsekv.method import check_device, check_skip_layers

# Real shapes, random weights. `kv` is what matters here: layers, heads, head_dim.
SHAPES: dict[str, dict] = {
    "llama-3.1-8b": dict(
        model_type="llama", num_hidden_layers=32, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=128256, max_position_embeddings=1 << 21,
    ),
    "qwen3-8b": dict(
        model_type="qwen3", num_hidden_layers=36, hidden_size=4096, intermediate_size=12288, num_attention_heads=32,
        num_key_value_heads=8, head_dim=128, vocab_size=151936, max_position_embeddings=1 << 21,
    ),
    "qwen2.5-7b-1m": dict(
        model_type="qwen2", num_hidden_layers=28, hidden_size=3584, intermediate_size=18944, num_attention_heads=28,
        num_key_value_heads=4, vocab_size=152064, max_position_embeddings=1 << 21,
    ),
    "tiny": dict(
        model_type="llama", num_hidden_layers=4, hidden_size=256, intermediate_size=512, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, vocab_size=1000, max_position_embeddings=1 << 17,
    ),
}  # fmt: skip


def prepare(methods: Sequence[str], options: object = None) -> torch.device:
    """The device to measure on; raises at once, and not after minutes, where there is none or an option is refused."""
    check(methods, options)
    if not torch.cuda.is_available():
        raise RuntimeError("this benchmark needs a CUDA device")
    device = torch.device("cuda")
    for name in methods:
        check_device(device, _setup(options).method(name))
    return device


def _setup(options: object) -> Setup:
    return options if isinstance(options, Setup) else Setup()


def check(methods: Sequence[str], options: object = None) -> None:
    """Raises where a method is refused, a shape unknown, or a number makes no sense, of the options that these have."""
    shape, locality = getattr(options, "shape", None), getattr(options, "locality", 1)
    if shape is not None and shape not in SHAPES:
        raise ValueError(f"unknown shape {shape!r}; available: {', '.join(SHAPES)}")
    if not 0 <= locality <= 1:
        raise ValueError(f"locality must be between 0 and 1, got {locality}")
    least_one = ("context", "contexts", "steps", "repeats", "points")
    at_least(options, **{x: 1 for x in least_one if hasattr(options, x)})
    if shape is not None:
        _check_shape(shape, options)
    _setup(options).check(methods)


def _check_shape(name: str, options: Any) -> None:
    """Raises where a model of this shape has too few layers or positions."""
    shape = SHAPES[name]
    check_skip_layers(getattr(options, "skip_layers", 0), shape["num_hidden_layers"])
    if not hasattr(options, "grows"):
        return
    longest = max(options.contexts) if hasattr(options, "contexts") else options.context
    positions, grows = shape["max_position_embeddings"], options.grows
    if longest + grows > positions:
        raise ValueError(
            f"contexts may have {positions - grows} tokens at most ({name} has {positions} positions, a run adds "
            f"{grows}), got {longest}"
        )


def build(shape: str, device: torch.device):
    """A model of that shape with random weights, made on the device."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(SHAPES[shape])
    config = AutoConfig.for_model(fields.pop("model_type"), **fields, pad_token_id=0, eos_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


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
    """What was started: this project's command, or a script of the benchmarks."""
    script = Path(sys.argv[0])
    return f"python benchmarks/{script.name}" if script.suffix == ".py" and script.name != "cli.py" else "torchsparsekv"


def header(name: str, options: dict) -> dict:
    """What every file of results begins with."""
    return {
        "benchmark": name,
        "command": " ".join([program(), *map(shlex.quote, sys.argv[1:])]),
        "environment": environment(),
        "options": options,
    }


def time_loop(step: Callable[[int], object], steps: int, repeats: int = 3) -> float:
    """Median over `repeats` of the milliseconds per call of `steps` calls in a row, by device events."""
    times = []
    for r in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        begin.record()
        for i in range(steps):
            step(r * steps + i)
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / steps)
    return statistics.median(times)


def time_graph(
    calls: Sequence[Callable[[], object]], refresh: Callable[[], object] = lambda: None, repeats: int = 9
) -> float:
    """Microseconds per call: the calls (each with inputs of its own) captured in one CUDA graph, median of replays.

    `refresh` runs before every replay, outside the timed part: it puts new values into the captured inputs.
    """
    for f in calls:
        f()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for f in calls:
            f()
    times = []
    for _ in range(repeats + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        refresh()
        torch.cuda.synchronize()
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[2:])


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
        raise ValueError(f"{out} was made with {was}, this is {now}: choose another file")
    return had["rows"]


def save(name: str, rows: list[dict], options: dict, out: Path | None) -> dict:
    """Write rows, options, environment and the command to `out`: all of it or, if stopped here, what was there."""
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
