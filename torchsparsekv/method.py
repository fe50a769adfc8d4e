"""What a retrieval method is: hyper-parameters, the buffers it wants, and the three verbs of its index."""
import dataclasses
import importlib
import importlib.util
import json
import operator
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, final

import torch
from torch import Tensor

from torchsparsekv.ops.attend.dense_attention import dense_attention
from torchsparsekv.ops.attend.prompt_attention import prompt_attention
from torchsparsekv.ops.attend.sparse_attention import sparse_attention
from torchsparsekv.ops.attend.window_attention import window_attention
from torchsparsekv.ops.gather.fetch import fetch
from torchsparsekv.ops.gather.prefetch_async import prefetch_async
from torchsparsekv.ops.gather.query_drift_gate import query_drift_gate
from torchsparsekv.ops.select.top_blocks import top_blocks
from torchsparsekv.ops.store.append import append
from torchsparsekv.ops.store.flush_ring import flush_ring
from torchsparsekv.ops.store.store_prompt import store_prompt
from torchsparsekv.ops.store.views import Attention, Leaving, Selection, Token
from torchsparsekv.state import Buffers, Geometry, LayerState, RingPlan, hot_buffer, prefetch_buffers, store_buffers

Step: TypeAlias = Literal["auto", "captured", "compiled"]  # how generate() makes a graph of a decode step on a GPU
Offload: TypeAlias = Literal["auto", "host", "device"]  # where the pool is to live
PoolType: TypeAlias = Literal["int8"]  # what it may hold other than the model's type
_METHODS: dict[str, type["Method"]] = {}


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of every method. Holds no tensor: state lives in `LayerState`, maths in `ops`.

    A method says which buffers it needs and answers three questions: what to do when many tokens come (`prompt`, and
    `prompted` behind it), when one comes (`step`), and which blocks a query is to attend to (`choose`). How a step goes
    is the same for all.

    budget: tokens retrieved per kv head and decode step, beside the `sink` first and the `window` latest ones.
    hot_budgets: room for so many times the budget in the hot buffer, on the device: blocks that were chosen before and
        may be again. More of them cross the link less often.
    prefetch_async: None: what a step chooses is fetched before it attends. A number: a kv head attends to what the step
        before chose if its queries are alike, by their mean cosine at least so much, and what it chooses now comes
        while later layers compute (ops/gather/query_drift_gate.py). The lower it is, the less waits for the link, and the
        less exact are answers: docs/guide/memory.md.
    """

    budget: int = 1024
    sink: int = 64
    window: int = 256
    hot_budgets: int = 2  # with just one it would thrash
    prefetch_async: float | None = None

    if TYPE_CHECKING:  # these are fields where they can be chosen

        @property
        def block_size(self) -> int:
            """Tokens that are chosen, stored and moved together."""

        @property
        def reuse_every(self) -> int:
            """Of so many layers that follow one another the first chooses for all."""

        @property
        def selecting_layers(self) -> tuple[int, ...] | str | None:
            """The layers that choose, as a tuple, for those behind each; None: as `reuse_every` has it."""

    else:
        block_size = 1
        reuse_every = 1
        selecting_layers = None

    name: ClassVar[str] = ""
    retrieves: ClassVar[bool] = True  # chooses by content
    dense: ClassVar[bool] = False  # attends to everything
    scans: ClassVar[bool] = False  # reads all keys to choose
    offered: ClassVar[bool] = True  # users can choose it, by its name
    forgets: ClassVar[bool] = False  # what leaves its ring is gone: it keeps no pool
    places: ClassVar[bool] = False  # puts tokens at pool rows of its own choice, beyond the length of their row too
    regroups: ClassVar[bool] = False  # what it retrieves together depends on where prompts begin and end
    partial_blocks: ClassVar[bool] = False  # blocks that it retrieves may hold fewer tokens than block_size

    def __init_subclass__(cls) -> None:
        if "name" not in cls.__dict__:  # a shared base, not a method
            return
        # The cell of a notebook may be run again: a class of the same place and name replaces the one before.
        had = _METHODS.get(cls.name)
        if had is not None and (had.__module__, had.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"method {cls.name!r} is defined twice: {_METHODS[cls.name]} and {cls}")
        _METHODS[cls.name] = cls

    def __post_init__(self) -> None:
        self.check_int("block_size", power=True)
        for field, least in (("budget", self.block_size), ("sink", 0), ("window", 1), ("hot_budgets", 1)):
            self.check_int(field, least)
        for field in ("budget", "sink"):
            value = getattr(self, field)
            if value % self.block_size:
                raise ValueError(
                    f"{self.name}: {field} must be a multiple of block_size {self.block_size}, got {value}"
                )
        if self.prefetch_async is not None:
            self.check_prefetch_async(self.prefetch_async)

    def check_prefetch_async(self, value: object) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1 <= value <= 1:
            raise ValueError(f"{self.name}: prefetch_async must be None or a cosine, from -1 to 1, got {value!r}")
        if not self.selects_every_step:
            raise ValueError(
                f"{self.name}: prefetch_async is for methods that choose at every step and leave what they chose where it "
                f"is, got {value!r}: leave it out"
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

    def read_file(self, field: str, command: str, take: Callable[[Any], object]) -> None:
        """A hyper-parameter may be the path of a file that `command` wrote: then it is what `take` finds there."""
        path = getattr(self, field)
        if not isinstance(path, (str, Path)):
            return
        try:
            found = take(json.loads(Path(path).read_text()))
        except (OSError, ValueError, KeyError, TypeError) as e:
            raise ValueError(f"{self.name}: {path} is no file of `torchsparsekv {command}`: {e!r}") from e
        object.__setattr__(self, field, found)

    def check_one_of(self, field: str, known: Iterable[str]) -> None:
        """Refuse a hyper-parameter that is none of these words."""
        value = getattr(self, field)
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{self.name}: {field} must be one of {', '.join(known)}, got {value!r}")

    def effective(self) -> dict[str, object]:
        """The hyper-parameters as they act, which a default alone may not say."""
        return dataclasses.asdict(self)

    @property
    def dense_threshold(self) -> int:
        """Rows of so many tokens, and shorter ones, are attended to whole."""
        return self.sink + self.window + self.budget

    # ---- what a method declares

    @property
    def ring_plan(self) -> RingPlan:
        return RingPlan(self.sink, self.window, self.block_size)

    @property
    def couples_heads(self) -> bool:
        """Whether it decides by all heads of a layer together: then they must be on one device."""
        return False

    @property
    def selects_every_step(self) -> bool:
        """Whether every step chooses for all heads, and says nothing of a choice but ids and `fill`, of blocks that
        nothing moves between steps. Then it may be fetched late."""
        return False

    @final
    def chooses(self, layer: int, behind: int) -> bool:
        """Whether this layer does, where it is the `behind`th one after the last that did."""
        return layer in self.selecting_layers if isinstance(self.selecting_layers, tuple) else behind >= self.reuse_every

    @property
    def least_capability(self) -> tuple[int, int]:
        """The oldest CUDA compute capability its kernels compile for."""
        return (8, 0)

    def hot_rows(self, g: Geometry) -> int:
        return min(self.hot_budgets * self.budget, g.rows)

    def buffers(self, g: Geometry) -> Buffers:
        """Everything one layer keeps. Extend what this returns with the index."""
        slots = self.hot_rows(g) // self.block_size
        chosen = min(self.budget, g.rows) // self.block_size
        return store_buffers(g, self.ring_plan) | self.hot_buffers(g, slots, chosen)

    @final
    def hot_buffers(self, g: Geometry, slots: int, chosen: int) -> Buffers:
        """Room for so many blocks on the device, of which `chosen` at most are attended to."""
        late = {} if self.prefetch_async is None else {"prefetch": prefetch_buffers(g, chosen)}
        return {"hot": hot_buffer(g, self.block_size, slots, chosen)} | late

    def prompt(self, s: LayerState, q: Tensor, leaving: Leaving, *, join: bool) -> Tensor | None:
        """A prompt, or a chunk of one, came: take the keys that leave the ring into the index.

        Tokens that were in the ring are in the pool by now, and still in the ring. The keys of the new tokens, of those
        too that stay in the ring, are in `leaving.new` alone. Returns the order in which the pool is to take the new
        tokens (ops/store/store_prompt.py), or None for their own. `join`: see ops/_machinery/side_stream.py.
        """

    def observed_queries(self, s: LayerState) -> Tensor | None:
        """Where the queries of the latest tokens are kept, if they are (ops/index/observe.py)."""
        return None

    def prompted(self, s: LayerState, k: Tensor, a: Attention) -> None:
        """A prompt, or a chunk of one, with keys `k` is in the index: select what later steps attend to, if the method
        selects once a prompt. The pool may not have these tokens yet."""

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        """One token came: take the keys that leave the ring into the index. The pool has them already."""

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        """The blocks to attend to beside the ring; `Selection()` where there are never any."""
        raise NotImplementedError(f"method {self.name!r} ({type(self).__qualname__}) does not define choose")

    # ---- what it inherits

    def best(self, scores: Tensor, peaks: Tensor | None = None) -> Selection:
        """As many of the best blocks as the budget allows."""
        return Selection(top_blocks((scores, peaks), min(self.budget // self.block_size, scores.shape[-1])))

    @final
    def decode(self, s: LayerState, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> Tensor:
        """One layer of one decode step; q, k, v are [batch, heads, 1, head_dim]."""
        if s.override_query is not None:
            q = s.override_query(s, q)
        self.ingest_token(s, q, k, v)
        selection = Selection()
        if self.dense:
            out = dense_attention(q, s.store.pool, s.lengths, a)
        else:
            selection = self.choose(s, q, a)
            if selection.ids is not None:
                selection = self.in_time(s, q, selection)
                fetch(selection, s.store.pool, s.hot, s.stats)
            out = sparse_attention(q, s.store.ring, s.hot, s.lengths, selection, a)
        if s.on_step is not None:
            s.on_step(s, q, a, selection, out)
        if self.prefetch_async is not None:
            prefetch_async(out, s.prefetch, s.store.pool, s.hot, s.joins)
        return out

    @final
    def in_time(self, s: LayerState, q: Tensor, selection: Selection) -> Selection:
        """What of a selection is fetched before this step attends: all of it, unless heads may be late."""
        if self.prefetch_async is None:
            return selection
        query_drift_gate(q, selection.ids, s.prefetch, s.stats, s.lengths, float(self.prefetch_async), self.partial_blocks)
        return selection._replace(retrieve_now=s.prefetch.now, frontier=s.prefetch.frontier)

    @final
    def ingest_token(self, s: LayerState, q: Tensor, k: Tensor, v: Tensor) -> None:
        """One new token into the store and the index."""
        observed = self.observed_queries(s)
        append(Token(k, v, None if observed is None else q), s.store, s.stats, s.lengths, observed)
        self.step(s, q, Leaving(k, s.store.pool))

    @final
    def ingest(self, s: LayerState, q: Tensor, k: Tensor, v: Tensor, a: Attention, *, join: bool) -> None:
        """Many new tokens into the store and the index."""
        flush_ring(s.store, s.lengths)
        order = self.prompt(s, q, Leaving(k, s.store.pool), join=join)
        store_prompt(k, v, s.store, s.lengths, order, join)
        self.prompted(s, k, a)

    @final
    def prefill(self, s: LayerState, q: Tensor, k: Tensor, v: Tensor, a: Attention, *, last: bool) -> Tensor:
        """Many new tokens: exact attention over all that the layer may see, whatever the method."""
        join = last or torch.compiler.is_compiling()
        if self.forgets:  # all of its past is in the ring, where the new tokens will be
            out = window_attention(q, k, v, s.store.ring, s.lengths, a, self.window)
            self.ingest(s, q, k, v, a, join=join)
            return out
        self.ingest(s, q, k, v, a, join=join)
        return prompt_attention(q, k, v, s.store.pool, s.lengths, a, s.row_lengths.spans(k.shape[2]))


def all_methods() -> dict[str, type[Method]]:
    """Every method that users can choose, by name; a file in torchsparsekv/_methods is all it takes to be one."""
    from torchsparsekv import _methods

    for m in pkgutil.iter_modules(_methods.__path__):
        importlib.import_module(f"{_methods.__name__}.{m.name}")
    return {name: cls for name, cls in sorted(_METHODS.items()) if cls.offered}


def hyper_parameters(cls: type[Method]) -> dict[str, object]:
    return {f.name: f.default for f in dataclasses.fields(cls)}


def make_method(name: str, **hyper) -> Method:
    known = all_methods()
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"unknown method {name!r}; available: {', '.join(known)}")
    fields = hyper_parameters(known[name])
    unknown = sorted(set(hyper) - set(fields))
    if unknown:
        raise TypeError(f"method {name!r} has no hyper-parameter {', '.join(unknown)}; it has: {', '.join(fields)}")
    return known[name](**hyper)


def layer_method(name: str, **hyper) -> Method:
    """What layers of a certain kind need, whatever users choose."""
    all_methods()
    return _METHODS[name](**hyper)


def as_int(value):
    """Integers of numpy and torch as Python's; whatever is no integer stays as it is, to be refused by name."""
    if isinstance(value, bool) or (isinstance(value, torch.Tensor) and value.dtype == torch.bool):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return value


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
