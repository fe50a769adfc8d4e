"""Load result files of all commands into one type."""
import contextlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torchsparsekv_benchmarks.quality import store

EVAL, DECODE, KERNELS, PREFILL, THROUGHPUT = "eval", "decode", "kernels", "prefill", "throughput"
TEXT, CLUSTERS, MEANS, BOARD, SERVE, HOT_BUFFER = "eval-text", "clusters", "means", "board", "serve", "hot_buffer"
NO_FIGURE = (
    CLUSTERS, "patterns", "parallel", "shapes", "first_call", "generate", "host_loop", "selecting_layers",
    "page_summaries", "token_choices", "kept_weight", "drift_rules", "packed_layers", "eval-server",
)  # fmt: skip
SAMPLED = (EVAL, TEXT, BOARD)  # files of samples, JSON lines
KNOWN = (EVAL, DECODE, KERNELS, PREFILL, THROUGHPUT, TEXT, BOARD, SERVE, HOT_BUFFER, *NO_FIGURE)


@dataclass(frozen=True)
class Result:
    path: Path
    benchmark: str
    commands: tuple[str, ...]  # one, but where `eval` was told to add to the file
    environment: dict[str, Any]
    options: dict[str, Any]
    rows: list[dict[str, Any]] = field(repr=False)
    model: dict[str, Any] = field(default_factory=dict)  # of `eval` and `eval-text`

    @property
    def hardware(self) -> str:
        e = self.environment
        return e.get("gpu") or e.get("cpu") or "hardware not recorded"

    @property
    def versions(self) -> str:
        e, names = self.environment, ("torchsparsekv", "torch", "triton", "transformers")
        return ", ".join(f"{n} {e[n]}" for n in names if n in e) or "versions not recorded"

    @property
    def about_model(self) -> str:
        """Name and data type. The benchmarks build theirs with random weights, in bfloat16."""
        if self.benchmark in SAMPLED:
            size = f"{self.model['parameters'] / 1e6:.1f}M parameters"
            return f"{self.model['name']} ({size}, {self.model['dtype']})"
        if self.benchmark == HOT_BUFFER:
            return f"Recorded selections of {self.options['model']}"
        if "shape" in self.options:
            return f"Random weights at the shape of {self.options['shape']}, bfloat16"
        if self.benchmark in (KERNELS, CLUSTERS):
            heads = "{q_heads} query on {kv_heads} kv heads, head_dim {head_dim}".format(**self.options)
            return f"One layer of {heads}, bfloat16"
        return f"{self.options.get('model', 'no model')}, {self.options.get('dtype', 'float32')}"


def load(paths: Iterable[Path]) -> list[Result]:
    found = [_load(Path(p)) for p in paths]
    if not found:
        raise ValueError("a report needs at least one file of results")
    return found


def means_of(path: Path) -> list[dict]:
    """The sources of a file of condense.py, none of any other file."""
    with contextlib.suppress(OSError, ValueError):
        found = json.loads(path.read_text())
        return found["sources"] if isinstance(found, dict) and found.get("benchmark") == MEANS else []
    return []


def _means(path: Path, sources: list[dict]) -> Result:
    """A file of condense.py. Only means over the samples of `board` can be drawn without the samples."""
    kinds = sorted({s["benchmark"] for s in sources})
    if kinds != [BOARD]:
        raise ValueError(f"{path} holds means of {', '.join(kinds)}: a report draws the samples, or means of {BOARD}")
    commands = tuple(c for s in sources for c in s["commands"])
    s = sources[0]
    return Result(path, BOARD, commands, s["environment"], s["options"], _object(path)["rows"], s["model"])


def _load(path: Path) -> Result:
    if not path.is_file():
        raise ValueError(f"{path} is a folder, not a file" if path.exists() else f"there is no file {path}")
    if sources := means_of(path):
        return _means(path, sources)
    lines = [_object(path)] if path.suffix == ".json" else store.read(path)[0]
    head = lines[0] if lines else {}
    benchmark = head.get("benchmark")
    if benchmark not in KNOWN:
        raise ValueError(f"{path} is not a file of results: benchmark is {benchmark!r}, not one of {', '.join(KNOWN)}")
    wanted = ("command", "environment", "options", *(("model",) if benchmark in SAMPLED else ("rows",)))
    absent = [k for k in wanted if k not in head]
    if absent:
        raise ValueError(f"{path} is not a whole file of `{benchmark}`: it has no {', '.join(absent)}")
    rows = [x for x in lines if "benchmark" not in x] if benchmark in SAMPLED else head["rows"]
    if not rows:
        raise ValueError(f"{path} has no rows")
    heads = store.heads(lines)
    commands, options = tuple(dict.fromkeys(h["command"] for h in heads)), heads[-1]["options"]
    return Result(path, benchmark, commands, head["environment"], options, rows, head.get("model", {}))


def _object(path: Path) -> dict:
    try:
        out = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} is not JSON: {e}") from e
    if not isinstance(out, dict):
        raise ValueError(f"{path} is not an object")
    return out
