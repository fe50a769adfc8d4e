"""What a retrieval method is: hyper-parameters, the buffers it wants, and how it updates and searches its index."""
import dataclasses
import importlib
import importlib.util
import pkgutil
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchsparsekv.ops.attend.prompt_attention import prompt_attention
from torchsparsekv.ops.attend.sparse_attention import sparse_attention
from torchsparsekv.ops.gather.fetch import fetch
from torchsparsekv.ops.index.append import append
from torchsparsekv.ops.index.store_prompt import store_prompt
from torchsparsekv.ops.select.top_blocks import top_blocks
from torchsparsekv.state import Buffer, Geometry, LayerState, Timeline, common_buffers, hot_buffers

Offload: TypeAlias = Literal["auto", "host", "device"]  # where the pool is to live
_METHODS: dict[str, type["Method"]] = {}


class Attention(NamedTuple):
    """What a model wants of its attention beside q, k and v."""

    scale: float
    softcap: float = 0.0
    sinks: Tensor | None = None  # one extra logit per query head


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of every method. Holds no tensor: state lives in `LayerState`, maths in `ops`.

    budget: tokens retrieved per kv head and decode step, beside the `sink` first and the `window` latest ones.
    block_size: consecutive tokens that are chosen, stored and moved together; a power of two.
    """

    budget: int = 1024
    sink: int = 64
    window: int = 256
    block_size: int = 16

    name: ClassVar[str] = ""
    retrieves: ClassVar[bool] = True  # chooses by content
    dense: ClassVar[bool] = False  # attends to everything
    scans: ClassVar[bool] = False  # reads all keys to choose
    regroups: ClassVar[bool] = False  # what it retrieves together depends on where prompts begin and end

    def __init_subclass__(cls) -> None:
        if "name" not in cls.__dict__:  # a shared base, not a method
            return
        if cls.name in _METHODS:
            raise TypeError(f"method {cls.name!r} is defined twice: {_METHODS[cls.name]} and {cls}")
        _METHODS[cls.name] = cls

    def __post_init__(self) -> None:
        self.check_int("block_size", power=True)
        for field, least in (("budget", self.block_size), ("sink", 0), ("window", 1)):
            self.check_int(field, least)
        for field in ("budget", "sink"):
            value = getattr(self, field)
            if value % self.block_size:
                raise ValueError(
                    f"{self.name}: {field} must be a multiple of block_size {self.block_size}, got {value}"
                )

    def check_int(self, field: str, least: int = 1, most: int | None = None, *, power: bool = False) -> None:
        """Refuse a hyper-parameter that is no int, beyond these bounds, or with `power` no power of two."""
        value = getattr(self, field)
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{self.name}: {field} must be an int, got {value!r}")
        if power and (value < 1 or value & (value - 1)):
            raise ValueError(f"{self.name}: {field} must be a power of two, got {value}")
        if value < least or (most is not None and value > most):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"{self.name}: {field} must be {bounds}, got {value}")

    def settled(self) -> dict[str, object]:
        """The hyper-parameters as they act, which a default alone may not say."""
        return dataclasses.asdict(self)

    # ---- what a method declares

    @property
    def timeline(self) -> Timeline:
        return Timeline(self.sink, self.window, self.block_size)

    @property
    def least_capability(self) -> tuple[int, int]:
        """The oldest CUDA compute capability its kernels compile for."""
        return (8, 0)

    def buffers(self, g: Geometry) -> dict[str, Buffer]:
        """Everything one layer keeps. Extend what this returns with the index."""
        places = min(2 * self.budget, g.rows) // self.block_size  # a buffer of just the budget would thrash
        return common_buffers(g, self.timeline) | hot_buffers(g, self.block_size, places)

    def update(self, s: LayerState, k: Tensor) -> None:
        """Stage 1: take the blocks that leave the ring into the index. `k` holds the new keys, the pool the others."""

    def select(self, s: LayerState, q: Tensor, a: Attention) -> Tensor:
        """Stage 2: ids of the blocks to attend to, int32 [batch, kv_heads, n], distinct, -1 = none."""
        raise NotImplementedError

    # ---- what it inherits

    def best(self, scores: Tensor, peaks: Tensor | None = None) -> Tensor:
        """As many of the best blocks as the budget allows."""
        return top_blocks(scores, min(self.budget // self.block_size, scores.shape[-1]), peaks)

    def frontier(self, s: LayerState) -> Tensor:
        """Where attention takes over from the retrieved tokens to the ring: [batch] or [batch, kv_heads]."""
        return s.clock.retired

    def places(self, s: LayerState, q: Tensor, a: Attention) -> Tensor:
        """Stages 2 and 3: the chosen blocks as places of the hot buffer, fetched where they were not there."""
        chosen = self.select(s, q, a)
        return fetch(chosen, s.pool, s.hot, s.table, s.resident, s.age, s.arrivals, s.stats)

    def attend(self, s: LayerState, q: Tensor, a: Attention) -> Tensor:
        """Stages 2 to 4."""
        c, t = s.clock, self.timeline
        return sparse_attention(
            q, s.ring, s.hot, self.places(s, q, a), c.length, self.frontier(s), a.sinks, t.sink, a.scale, a.softcap
        )

    def decode(self, s: LayerState, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> Tensor:
        """One layer of one decode step; q, k, v are [batch, heads, 1, head_dim]."""
        c, t = s.clock, self.timeline
        append(k, v, s.ring, s.pool, s.stats, c.length, c.leaving, c.retired, t.sink, t.interval)
        self.update(s, k)
        return self.attend(s, q, a)

    def take_in(self, s: LayerState, k: Tensor, v: Tensor, *, join: bool) -> None:
        """Many new tokens into the store and the index; `join`: see ops/_side.py."""
        c = s.clock
        store_prompt(k, v, s.ring, s.pool, c.start, c.length, c.leaving, c.retired, None, self.timeline.sink, join)
        self.update(s, k)

    def prefill(self, s: LayerState, q: Tensor, k: Tensor, v: Tensor, a: Attention, *, last: bool) -> Tensor:
        """Many new tokens: exact attention over all that came before, whatever the method."""
        c = s.clock
        self.take_in(s, k, v, join=last or torch.compiler.is_compiling())
        return prompt_attention(q, k, v, s.pool, c.start, c.length, a.sinks, a.scale, a.softcap, c.spans(k.shape[2]))


def all_methods() -> dict[str, type[Method]]:
    """Every method by name; a file in torchsparsekv/zoo is all it takes to be one."""
    from torchsparsekv import zoo

    for m in pkgutil.iter_modules(zoo.__path__):
        importlib.import_module(f"{zoo.__name__}.{m.name}")
    return dict(sorted(_METHODS.items()))


def hyper_parameters(cls: type[Method]) -> dict[str, object]:
    return {f.name: f.default for f in dataclasses.fields(cls)}


def make_method(name: str, **hyper) -> Method:
    known = all_methods()
    if name not in known:
        raise ValueError(f"unknown method {name!r}; available: {', '.join(known)}")
    fields = hyper_parameters(known[name])
    unknown = sorted(set(hyper) - set(fields))
    if unknown:
        raise TypeError(f"method {name!r} has no hyper-parameter {', '.join(unknown)}; it has: {', '.join(fields)}")
    return known[name](**hyper)


def check_skip_layers(skip_layers: int, layers: int) -> None:
    if type(skip_layers) is not int or not 0 <= skip_layers < layers:
        raise ValueError(f"skip_layers must be from 0 to {layers - 1}, got {skip_layers!r}")


def check_device(device: torch.device, method: Method) -> None:
    if device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"torchsparsekv runs on cpu and cuda, this model is on {device}")
    if device.type == "cpu":
        return
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("the CUDA kernels need Triton: pip install triton")
    have, need = torch.cuda.get_device_capability(device), method.least_capability
    if have < need:
        hint = '; digest="bfloat16" needs 8.0' if need == (8, 9) else ""
        raise NotImplementedError(
            f"{method.name} needs compute capability {need[0]}.{need[1]}, {torch.cuda.get_device_name(device)} has "
            f"{have[0]}.{have[1]}{hint}"
        )
