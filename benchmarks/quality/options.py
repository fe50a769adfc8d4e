"""The options of an evaluation, and the settings of `patch` that follow from them."""
import dataclasses
import json
from dataclasses import dataclass
from typing import Any, get_args

from torchsparsekv.method import all_methods, make_method
from torchsparsekv_benchmarks._options import PoolChoice, at_least, different, option, parse, pool_told

BASE = "full"  # the dense model as a method, beside which all others of the board stand
DENSE = "dense"  # the unpatched model: the first row, beside which all others stand
RECALL = "recall"
DTYPES = ("auto", "float32", "float16", "bfloat16")
OF_THE_PATCH = ("skip_layers", "pool_dtype")  # options of patch() that are no hyper-parameters


# All that leave something out. The dense model always runs beside them, and has no other answers than `full`.
METHODS: tuple[str, ...] = tuple(n for n in all_methods() if make_method(n).traits.attends != "everything")


@dataclass(frozen=True)
class OnModel:
    """The options of every measurement of a model's answers."""

    model: str = option(
        RECALL,
        "recall is the project's own model. Or qwen-1.5b, qwen-0.5b, smollm2 (`make real-model`), a Hugging Face path "
        "or name, or a .gguf file.",
    )
    yarn: float = option(1.0, "Multiply the model's positions by this, with YaRN: 4 makes 128K of 32K.")
    sink: int = option(32, "First tokens, always attended to.")
    window: int = option(64, "Latest tokens, always attended to.")
    skip_layers: int = option(2, "First layers, which are dense.")
    device: str = option("auto", "Device of the model: auto, cpu or cuda.")
    dtype: str = option("auto", f"Type of the model: {', '.join(DTYPES)}. auto: as stored on a GPU, float32 on a CPU.")


@dataclass(frozen=True)
class Compared(OnModel):
    """The options of every comparison of methods on a model."""

    lengths: tuple[int, ...] = option((4096, 16384, 32768), "Tokens of prompt and answer together, comma-separated.")
    methods: tuple[str, ...] = option(METHODS, "Methods beside the dense model, comma-separated.")
    budgets: tuple[int, ...] = option((128, 256, 512), "Tokens retrieved per kv head and step, comma-separated.")
    samples: int = option(50, "Samples per task and length, the same for all methods.")
    probe: int = option(
        2, "Samples that also measure mass (the share of the attention weight that a step attends to) and error (of "
        "the attention output). Their steps are eager."
    )
    batch: int = option(
        1, "Samples in one generate(), if their prompts are equally long. Counts of blocks and tokens are then means."
    )
    window: int = option(
        64, "Latest tokens, always attended to. Methods that only attend to first and latest tokens (streaming) get a "
        "window that is larger by the budget."
    )
    hyper: tuple[str, ...] = option(
        ("pariskv.full_threshold=0",),
        "Hyper-parameters, comma-separated METHOD.NAME=VALUE. The default makes pariskv sparse on short sequences too.",
    )
    offload: str = "auto"
    pool_dtype: str = "auto"


@dataclass(frozen=True)
class Options(Compared):
    tasks: tuple[str, ...] = option(
        (), "Tasks, comma-separated. Empty: all tasks for the model, except journal and readout, which take long."
    )
    compiled: bool = option(False, "Let generate() compile the decode step (CUDA), for each method and budget.")
    quick: bool = option(
        False, "A small selection, minutes on a CPU. It only changes options that are left at their defaults."
    )


QUICK: dict[str, Any] = dict(lengths=(1024,), budgets=(64,), samples=6, probe=1, batch=6)
QUICK_RECALL, QUICK_RULER = ("single", "multikey"), ("niah_multikey_2", "vt")


def resolved(o: Options) -> Options:
    """With the selection of --quick in the fields that were left at their defaults."""
    if not o.quick:
        return o
    quick = QUICK | {"tasks": QUICK_RECALL if o.model == RECALL else QUICK_RULER}
    left = {f.name for f in dataclasses.fields(o) if getattr(o, f.name) == f.default}
    return dataclasses.replace(o, **{name: value for name, value in quick.items() if name in left})


def check_dtype(dtype: str) -> None:
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")


def check_compared(o: Compared) -> None:
    """All that can be known before a model is loaded."""
    at_least(o, samples=1, probe=0, batch=1)
    if not 1 <= o.yarn <= 64:
        raise ValueError(f"yarn must be from 1 (the model's own positions) to 64, got {o.yarn}")
    different(o, "lengths", "methods", "budgets")
    check_dtype(o.dtype)
    if o.pool_dtype not in get_args(PoolChoice):
        raise ValueError(f"pool_dtype must be one of {', '.join(get_args(PoolChoice))}, got {o.pool_dtype!r}")
    known = all_methods()
    unknown = [m for m in o.methods if m not in known]
    if unknown:
        raise ValueError(f"unknown method {', '.join(unknown)}; available: {', '.join(known)} ({DENSE} always runs)")
    parse(o.hyper)


@dataclass(frozen=True)
class Setting:
    """One row of the comparison: a method at a budget, the arguments of `patch`, and the hyper-parameters that follow.

    All but the method are None for the dense model.
    """

    method: str
    budget: int | None
    patch: dict[str, Any] | None
    hyper: dict[str, Any] | None = None

    @property
    def label(self) -> str:
        return self.method if self.budget is None else f"{self.method} {self.budget}"


def defaults_since(patch: dict[str, Any], method: str, hyper: dict[str, Any]) -> list[str]:
    """Hyper-parameters, as they acted, that what `patch` was told would not mean by today's defaults."""
    told = {k: v for k, v in patch.items() if k not in OF_THE_PATCH}
    now = json.loads(json.dumps(make_method(method, **told).effective()))
    return [f"{k}={v}" for k, v in hyper.items() if now.get(k, v) != v]


def widened(method: str) -> bool:
    """Whether it gets the budget in its window, to attend to as many tokens as the others."""
    return make_method(method).traits.attends == "recent"


def settings(o: Compared) -> list[Setting]:
    """The dense model, then every method at every budget; `full` has no budget, so it comes once."""
    out, hyper = [Setting(DENSE, None, None)], parse(o.hyper)
    for method in o.methods:
        dense = make_method(method).traits.attends == "everything"
        for budget in o.budgets[:1] if dense else o.budgets:
            patch = {"budget": budget, "sink": o.sink, "window": o.window, **hyper.get(method, {})}
            if widened(method):
                patch["window"] += budget
            means = make_method(method, **patch).effective()
            patch |= {"skip_layers": o.skip_layers, **pool_told(o.pool_dtype)}
            out.append(Setting(method, None if dense else budget, patch, means))
    return out
