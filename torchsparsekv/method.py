"""The base class of every method: its hyper-parameters, its traits, its buffers and the hooks of its index."""
import dataclasses
import difflib
import importlib
import importlib.util
import operator
import pkgutil
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from torchsparsekv.ops.attend.dense_attention import dense_attention
from torchsparsekv.ops.attend.prompt_attention import prompt_attention
from torchsparsekv.ops.attend.sparse_attention import sparse_attention
from torchsparsekv.ops.attend.window_attention import window_attention
from torchsparsekv.ops.gather._admit import admit
from torchsparsekv.ops.gather.fetch import fetch
from torchsparsekv.ops.gather.prefetch_async import prefetch_async
from torchsparsekv.ops.gather.query_drift_gate import query_drift_gate
from torchsparsekv.ops.rest.group_sums import group_sums
from torchsparsekv.ops.rest.views import NO_REST, Rest
from torchsparsekv.ops.select.top_blocks import top_blocks
from torchsparsekv.ops.store.append import append
from torchsparsekv.ops.store.flush_ring import flush_ring
from torchsparsekv.ops.store.rows import PACKED
from torchsparsekv.ops.store.spread_channels import spread_channels
from torchsparsekv.ops.store.store_prompt import store_prompt
from torchsparsekv.ops.store.views import Attention, Leaving, Selection, Token
from torchsparsekv.report import Counts
from torchsparsekv.state import (
    Buffers,
    Geometry,
    LayerState,
    RingPlan,
    hot_buffer,
    prefetch_buffers,
    rest_buffers,
    store_buffers,
)

Step: TypeAlias = Literal["auto", "captured", "compiled"]  # how generate() makes a graph of a decode step on a GPU
Offload: TypeAlias = Literal["auto", "host", "device"]  # where the pool is to live
DEVICE_SHARE = 0.5  # of the free device memory, what a cache may take with offload="auto" or hot_budgets="auto"
PoolType: TypeAlias = Literal["int8"]  # types of the pool other than the model's type
_METHODS: dict[str, type["Method"]] = {}
# With estimate_rest=True a group has LEAST_REST tokens. In caches of more than REST_GROUPS * LEAST_REST rows groups are
# larger, up to MOST_REST. In caches of fewer than LEAST_REST rows groups are smaller. A group has at least one block.
LEAST_REST, MOST_REST, REST_GROUPS = 32, 128, 3072
RENAMED = {"fetch_late": "prefetch_async", "choosers": "selecting_layers"}  # old names, taken with a warning


def option(default: Any, meaning: str) -> Any:
    """A hyper-parameter: a field of a method with its default and one line of meaning."""
    return dataclasses.field(default=default, metadata={"meaning": meaning})


class HyperParameter(NamedTuple):
    """Type, default and meaning of one hyper-parameter, as `torchsparsekv.methods()` returns them."""

    type: Any
    default: Any
    meaning: str

    @property
    def type_name(self) -> str:
        return self.type.__name__ if type(self.type) is type else str(self.type)

    def __repr__(self) -> str:
        return f"<{self.type_name} = {self.default!r}: {self.meaning}>"


@dataclass(frozen=True)
class Traits:
    """Facts about a method that decode, prefill and patch need beyond its hooks.

    Attributes:
        attends: what a decode step attends to. "selected": the ring, and the blocks that `choose` selects. "recent":
            the ring. "window": the ring, and the layer keeps no pool. "everything": the whole pool.
        reorders_pool: a token may lie in any pool row, also beyond the length of its sequence. A method that only
            permutes tokens within the rows of their positions does not set this.
        moves_leaving: `step` stores the tokens that leave the ring at pool rows of its own choice (`leaving_rows`), or
            in another order at the rows of their positions.
        partial_blocks: a retrieved block may hold fewer than `block_size` tokens.
        couples_heads: all heads of a layer decide together, so one device must hold all of them.
        selects_every_step: each step selects for all heads, and the selection is `ids` and `fill` alone. Then a prompt
            fills the hot buffer.
        moves_selected: tokens of a selected block may move before the next step. `prefetch_async` needs
            `selects_every_step` without `moves_selected`.
        all_queries: the method reads the queries of a whole prompt, and not only of its last tokens.
        rest_helps: True if the method estimates the rest by default (`estimate_rest="auto"`). Measure answers and time
            with and without the estimate first.
        no_rest: why the method does not take `estimate_rest`; empty if it does. A method that takes `estimate_rest`
            must retrieve at decode steps, and must leave a token at the pool row that the token got when it left the
            ring (`leaving_rows`).
        least_capability: the lowest CUDA compute capability that the kernels compile for.
        older_devices: the hyper-parameter that lowers `least_capability`, as users write it.
        cannot_crop: why tokens cannot be taken back out of a cache. Empty if `prompt` builds the whole index from keys
            alone, without queries, and returns None. Then `SparseCache.crop` runs `prompt` again.
        no_engine: why the method cannot serve an engine (torchsparsekv/engines). It may be empty if the index entry of
            a token depends on the keys of the token's block alone, so that requests can share blocks. Then the method
            defines `written`.
    """

    attends: Literal["selected", "everything", "window", "recent"] = "selected"
    reorders_pool: bool = False
    moves_leaving: bool = False
    partial_blocks: bool = False
    couples_heads: bool = False
    selects_every_step: bool = False
    moves_selected: bool = False
    all_queries: bool = False
    rest_helps: bool = False
    no_rest: str = ""
    least_capability: tuple[int, int] = (8, 0)
    older_devices: str = ""
    cannot_crop: str = "does not say that its index can be built from keys alone (Traits.cannot_crop)"
    no_engine: str = "does not say that requests can share its index (Traits.no_engine)"


@dataclass(frozen=True, kw_only=True)
class Method:
    """Base of every method: a frozen dataclass of hyper-parameters. State lives in `LayerState`, maths in `ops`.

    A method declares its `traits` and its `buffers`, and defines three hooks. `prompt` takes many tokens into the index
    (`prompted` runs after it), `step` takes one token, and `choose` selects the blocks that a query attends to. Every
    method runs the same `decode` and `prefill`.
    """

    budget: int = option(1024, "Tokens retrieved per kv head and decode step, beside the sink and the window.")
    sink: int = option(64, "First tokens of a sequence; every step attends to them.")
    window: int = option(256, "Latest tokens of a sequence; every step attends to them.")
    hot_budgets: int | str = option(
        "auto", 'Size of the hot buffer on the device, in budgets. "auto": by the free memory of the device.'
    )
    prefetch_async: float | None = option(
        None,
        "If the query of a head has at least this cosine with its query of the last step, the head attends to its last "
        "selection, and fetches the new one after attention. None: every step waits for its new selection.",
    )
    estimate_rest: bool | int | str = option(
        "auto",
        "Estimate the tokens that a step does not retrieve, by means over groups of tokens. A number: tokens of a "
        f"group, a power of two. True: {LEAST_REST} to {MOST_REST}, by the length of the cache; fewer in a cache of "
        f"fewer than {LEAST_REST} tokens, and at least a block. In vLLM: a block of vLLM. False: leave the tokens out. "
        '"auto": True for the methods whose answers gain most.',
    )

    if TYPE_CHECKING:  # methods whose block size users choose have it as a field

        @property
        def block_size(self) -> int:
            """Tokens that are selected, stored and moved together."""

    else:
        block_size = 1

    name: ClassVar[str] = ""
    def __init_subclass__(cls) -> None:
        if "name" not in cls.__dict__:  # a shared base, not a method
            return
        # The cell of a notebook may run again: a class replaces an earlier class of the same module and name.
        had = _METHODS.get(cls.name)
        if had is not None and (had.__module__, had.__qualname__) != (cls.__module__, cls.__qualname__):
            raise TypeError(f"method {cls.name!r} is defined twice: {_METHODS[cls.name]} and {cls}")
        _METHODS[cls.name] = cls

    def __post_init__(self) -> None:
        self.check_int("block_size", power=True)
        for field, least in (("budget", self.block_size), ("sink", 0), ("window", 1)):
            self.check_int(field, least)
        self.check_int("hot_budgets", word="auto")
        for field in ("budget", "sink"):
            value = getattr(self, field)
            if value % self.block_size:
                raise ValueError(
                    f"{self.name}: {field} must be a multiple of block_size {self.block_size}, got {value}"
                )
        self._check_rest()
        if (value := self.prefetch_async) is None:
            return
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not -1 <= value <= 1:
            raise ValueError(f"{self.name}: prefetch_async must be None or a cosine, from -1 to 1, got {value!r}")
        if not self.traits.selects_every_step or self.traits.moves_selected:
            raise ValueError(
                f"{self.name}: prefetch_async is for methods that select at every step and move no token, "
                f"got {value!r}: leave it out"
            )

    def _check_rest(self) -> None:
        if (value := self.estimate_rest) is False or value == "auto":
            return
        power = type(value) is int and value >= 2 and value & (value - 1) == 0
        if value is not True and not power:
            raise ValueError(
                f'{self.name}: estimate_rest must be "auto", True, False or a power of two from 2 on, got {value!r}'
            )
        if self.traits.no_rest:
            raise ValueError(
                f"{self.name}: estimate_rest cannot be {value!r}: this method {self.traits.no_rest}"
            )

    def check_int(
        self, field: str, least: int = 1, most: int | None = None, *, power: bool = False, word: str | None = None
    ) -> None:
        """Refuse a hyper-parameter that is no int or outside these bounds; with `power`, also one that is no power of
        two. A `word` is allowed beside ints."""
        value = getattr(self, field)
        if word is not None and value == word:
            return
        if isinstance(value, bool) or not isinstance(value, int):
            kind = "an int" if word is None else f"an int or {word!r}"
            raise TypeError(f"{self.name}: {field} must be {kind}, got {value!r}")
        if power and (value < 1 or value & (value - 1)):
            raise ValueError(f"{self.name}: {field} must be a power of two, got {value}")
        if value < least or (most is not None and value > most):
            bounds = f"at least {least}" if most is None else f"from {least} to {most}"
            raise ValueError(f"{self.name}: {field} must be {bounds}, got {value}")

    def check_one_of(self, field: str, known: Iterable[str]) -> None:
        """Refuse a hyper-parameter that is not one of the words `known`."""
        value = getattr(self, field)
        if not isinstance(value, str) or value not in known:
            raise ValueError(f"{self.name}: {field} must be one of {', '.join(known)}, got {value!r}")

    def effective(self) -> dict[str, object]:
        """The hyper-parameters with the values that act, where a default such as None stands for another value."""
        return dataclasses.asdict(self) | {"estimate_rest": self.rest}

    @property
    def dense_threshold(self) -> int:
        """Rows of up to this many tokens are attended in full. `choose` runs for them too."""
        return self.sink + self.window + self.budget

    # ---- what a method declares

    @property
    def ring_plan(self) -> RingPlan:
        return RingPlan(self.sink, self.window, self.block_size)

    @cached_property
    def traits(self) -> Traits:
        """Facts that the library needs beyond the hooks."""
        return Traits()

    @cached_property
    def _attends(self) -> str:
        """`traits.attends`, for steps. torch.compile would guard every field of `traits` at every step."""
        return self.traits.attends

    @cached_property
    def _moves_leaving(self) -> bool:
        return self.traits.moves_leaving

    @cached_property
    def rest(self) -> bool | int:
        """`estimate_rest` as it acts."""
        if self.estimate_rest == "auto":
            return self.traits.rest_helps and not self.traits.no_rest
        assert not isinstance(self.estimate_rest, str)
        return self.estimate_rest

    def rest_group(self, rows: int) -> int:
        """Tokens of a group of `estimate_rest`, in a cache of `rows` pool rows."""
        if self.rest is not True:
            return self.rest
        group = max(min(LEAST_REST, 1 << (rows.bit_length() - 1)), 2, self.block_size)
        while group < MOST_REST and group * REST_GROUPS < rows:
            group *= 2
        return group

    @classmethod
    def in_layers(cls, layers: Mapping[int, "Method"], count: int) -> Mapping[int, "Method"]:
        """The method of each layer, for methods that differ from layer to layer.

        layers: the layers that run this class of method, in order. count: all layers of the model.
        """
        return layers

    @classmethod
    def shares_selection(cls, layers: Mapping[int, tuple["Method", int, int]]) -> dict[int, int]:
        """The earlier layer whose selection each layer shares; a layer that selects for itself is absent.

        layers: the layers that run this class of method or a subclass, in order, each as (method, kv heads, query
        heads). A dense layer may select for others: a step calls its `choose` too, which keeps the selection in the
        state of the layer.
        """
        return {}

    def hot_rows(self, g: Geometry) -> int:
        return min(self.budgets_held(g) * self.budget, g.rows)

    def budgets_held(self, g: Geometry) -> int:
        """`hot_budgets` in this cache."""
        return self.hot_budgets if isinstance(self.hot_budgets, int) else g.hot_budgets

    def buffers(self, g: Geometry) -> Buffers:
        """The buffers of one layer. A method extends the returned buffers with those of its index."""
        slots = self.hot_rows(g) // self.block_size
        chosen = min(self.budget, g.rows) // self.block_size
        found = store_buffers(g, self.ring_plan) | self.hot_buffers(g, slots, chosen)
        if not self.rest:
            return found
        if (group := self.rest_group(g.rows)) > g.rows and self.rest is not True:
            raise ValueError(f"{self.name}: estimate_rest must be at most the {g.rows} tokens of a row, got {group}")
        return found | {"rest": rest_buffers(g, group)}

    @final
    def hot_buffers(self, g: Geometry, slots: int, chosen: int) -> Buffers:
        """A hot buffer of `slots` blocks on the device. A step attends to at most `chosen` of them."""
        late = {} if self.prefetch_async is None else {"prefetch": prefetch_buffers(g, chosen)}
        return {"hot": hot_buffer(g, self.block_size, slots, chosen)} | late

    def prompt(self, s: LayerState, q: Tensor, leaving: Leaving, *, join: bool) -> Tensor | None:
        """A prompt, or a chunk of one, came: take the keys that leave the ring into the index.

        Tokens that were in the ring before are now in the pool too. `leaving.new` has the keys of all new tokens,
        including those that stay; the pool does not have them yet. Returns the order in which the pool stores the new
        tokens (ops/store/store_prompt.py), or None for the order of the text. `join`: see
        ops/_machinery/side_stream.py.
        """

    def prompt_values(self, s: LayerState, leaving: Leaving, v: Tensor, order: Tensor | None, *, join: bool) -> None:
        """The keys of a prompt, or of a chunk of one, are in the index: take the values `v`, if the index needs them.

        `order` is what `prompt` returned. Unless `Traits.no_rest` is set, an override calls `super()`, which sums the
        groups of `estimate_rest`.
        """
        if self.rest:
            group_sums(leaving, v, s.rest, s.lengths, order, join)

    def rest_of(self, s: LayerState, q: Tensor, selection: Selection, a: Attention) -> Rest:
        """What stands for the tokens that a step does not retrieve. Called once fetch is launched: an override must not
        write sums of groups, because attention may read them before fetch ends."""
        return s.rest if self.rest else NO_REST

    def observed_queries(self, s: LayerState) -> Tensor | None:
        """The tensor with the queries of the latest tokens (ops/index/observe.py). None: the method keeps none."""
        return None

    def prompted(self, s: LayerState, q: Tensor, k: Tensor, a: Attention) -> None:
        """A prompt, or a chunk of one, is in the index; `q` and `k` are its queries and keys. A method that selects
        once per prompt selects here what later steps attend to. The pool may not have these tokens yet."""

    def step(self, s: LayerState, q: Tensor, leaving: Leaving) -> None:
        """One token came: take the keys that leave the ring into the index. The pool has them already."""

    def engine_buffers(self, g: Geometry, blocks: int) -> Buffers:
        """Buffers of one layer that only an engine needs, beside those of the index. `g.batch` is the most requests of
        a step, and `blocks` the number of blocks of the engine's pool."""
        return {}

    def written(self, s: LayerState, k: Tensor, to: Tensor) -> None:
        """An engine stored new tokens of any requests: take their keys `k` [tokens, kv_heads, head_dim] into the index.
        `to` [tokens] has the pool row of each, -1 for a token that is not stored."""
        raise NotImplementedError(f"method {self.name!r} ({type(self).__qualname__}) does not define written")

    def leaving_rows(self, s: LayerState) -> Tensor | None:
        """The pool rows that took the tokens which left the ring at this step, [batch, kv_heads, interval]; None: those
        of their positions. Only methods that put tokens at rows of their own choice have them."""
        return None

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        """The blocks to attend to beside the ring; `Selection()` if the method selects none.

        Block `i` begins at pool row `i * block_size`. The rows of an engine share one pool: there, blocks are numbered
        in the order of the text, and `s.block_table` says where they are.
        """
        raise NotImplementedError(f"method {self.name!r} ({type(self).__qualname__}) does not define choose")

    def attended(self, s: LayerState, q: Tensor, a: Attention) -> None:
        """A step has attended to the ring and to the slots `s.hot.chosen`: update the index for later steps."""

    def weigh(self, s: LayerState, q: Tensor, a: Attention) -> Tensor | None:
        """Numbers that the query heads add to the logits of the blocks in `s.hot.chosen`, [batch, query heads, blocks].
        The blocks of this step are in the hot buffer by now. None: nothing is added."""
        return None

    def report_row(self, s: LayerState, counts: Counts) -> dict[str, Any]:
        """The fields of this layer's `LayerReport` that the method decides. A method may extend or replace them."""
        attended = counts.in_ring + counts.selected * self.block_size
        if self.traits.partial_blocks:
            attended = min(attended, counts.context)
        return {
            "attended_per_step": counts.per_step(attended),
            "pool_bytes_read": counts.fetched * self.block_size * counts.row_bytes,
            "retrieval_rate": float(self.traits.attends == "selected" and counts.steps > 0),
        }

    # ---- what it inherits

    def best(self, s: LayerState, scores: Tensor, peaks: Tensor | None = None) -> Selection:
        """As many of the best blocks as the budget allows; scores [batch, kv_heads, blocks of a row]."""
        want = (s.lengths.length.shape[0], s.store.pool.shape[1], s.row_capacity // self.block_size)
        if scores.shape != want:
            raise ValueError(f"{self.name}: scores must have one number per block, {want}, got {tuple(scores.shape)}")
        return Selection(top_blocks((scores, peaks), min(self.budget // self.block_size, scores.shape[-1])))

    @final
    def decode(self, s: LayerState, q: Tensor, k: Tensor, v: Tensor, a: Attention) -> Tensor:
        """One layer of one decode step; q, k, v are [batch, heads, 1, head_dim]."""
        if s.override_query is not None:
            q = s.override_query(s, q)
        q, k = self.spread(s, q, k)
        self.ingest_token(s, q, k, v)
        selection = Selection()
        if self._attends == "everything":
            if s.followers:
                self.choose(s, q, a)
            out = dense_attention(q, s.store.pool, s.lengths, a)
        else:
            selection = self.choose(s, q, a)
            if not isinstance(selection, Selection):
                raise TypeError(f"{self.name}: choose must return a Selection, got {type(selection).__name__}")
            if selection.ids is not None:
                if s.override_ids is not None:
                    selection = selection._replace(ids=s.override_ids(s, selection.ids))
                selection = self.in_time(s, q, selection)
                settled = (q, s.rest.sums) if self.rest else ()
                fetch(selection, s.store.pool, s.hot, s.stats, *settled)
                if (bias := self.weigh(s, q, a)) is not None:
                    selection = selection._replace(bias=bias)
            rest = self.rest_of(s, q, selection, a)
            if rest.group and selection.ids is not None:
                rest = rest._replace(settled=True)  # fetch comes after the kernels that wrote the sums and the query
            out = sparse_attention(q, s.store.ring, s.hot, s.lengths, selection, a, rest)
            self.attended(s, q, a)
        if s.on_step is not None:
            s.on_step(s, q, a, selection, out)
        if self.prefetch_async is not None:
            prefetch_async(out, s.prefetch, s.store.pool, s.hot, s.joins)
        return out

    @final
    def spread(self, s: LayerState, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys as `ingest` and attention take them. They are rotated in a layer that attends to its whole
        packed pool. Such layers are usually the first of a model, whose keys lose most in 8 bits."""
        packed = self._attends == "everything" and s.store.pool.dtype is PACKED
        return spread_channels(q, k) if packed else (q, k)

    @final
    def in_time(self, s: LayerState, q: Tensor, selection: Selection) -> Selection:
        """The selection, with the heads whose blocks are fetched before attention (`retrieve_now`). Without
        `prefetch_async` these are all heads."""
        if self.prefetch_async is None:
            return selection
        partial = self.traits.partial_blocks
        query_drift_gate(q, selection.ids, s.prefetch, s.stats, s.lengths, float(self.prefetch_async), partial)
        return selection._replace(retrieve_now=s.prefetch.now, frontier=s.prefetch.frontier)

    @final
    def ingest_token(self, s: LayerState, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Take one new token into the store and the index."""
        observed, later = self.observed_queries(s), self._moves_leaving
        rest = s.rest if self.rest and not later else NO_REST
        append(Token(k, v, None if observed is None else q), s.store, s.stats, s.lengths, observed, rest)
        leaving = Leaving(k, s.store.pool)
        self.step(s, q, leaving)
        if self.rest and later:  # the tokens got their pool rows in `step`
            group_sums(leaving, v, s.rest, s.lengths, rows=self.leaving_rows(s))

    @final
    def ingest(self, s: LayerState, q: Tensor, k: Tensor, v: Tensor, a: Attention, *, join: bool) -> None:
        """Take many new tokens into the store and the index."""
        flush_ring(s.store, s.lengths)
        leaving = Leaving(k, s.store.pool)
        order = self.prompt(s, q, leaving, join=join)
        self.prompt_values(s, leaving, v, order, join=join)
        store_prompt(k, v, s.store, s.lengths, order, join)
        self.prompted(s, q, k, a)
        if s.admits and self.traits.selects_every_step and not torch.compiler.is_compiling():
            admit(s.store.pool, s.hot, s.lengths, k.shape[2] + s.store.ring.shape[2], join)

    @final
    def prefill(self, s: LayerState, q: Tensor, k: Tensor, v: Tensor, a: Attention, *, last: bool) -> Tensor:
        """One layer of a prompt, or of a chunk of one: exact attention to all tokens that the layer may see."""
        join = last or torch.compiler.is_compiling()
        if s.on_prompt is not None:
            s.on_prompt(s, q, k, v, a)
        q, k = self.spread(s, q, k)
        if self._attends == "window":  # the past is in the ring alone, and `ingest` overwrites it
            out = window_attention(q, k, v, s.store.ring, s.lengths, a, self.window)
            self.ingest(s, q, k, v, a, join=join)
            return out
        self.ingest(s, q, k, v, a, join=join)
        return prompt_attention(q, k, v, s.store.pool, s.lengths, a, s.row_lengths.spans(k.shape[2]))


def all_methods() -> dict[str, type[Method]]:
    """Every method that users can choose, by name. A file in torchsparsekv/_methods or a class of the user adds one.

    A class whose name starts with an underscore is left out: the library alone uses it.
    """
    from torchsparsekv import _methods

    for m in pkgutil.iter_modules(_methods.__path__):
        importlib.import_module(f"{_methods.__name__}.{m.name}")
    return {name: cls for name, cls in sorted(_METHODS.items()) if not cls.__name__.startswith("_")}


def hyper_parameters(cls: type[Method]) -> dict[str, HyperParameter]:
    """The hyper-parameters of a method. A field that only changes a default keeps the meaning of the base class."""
    found = {}
    for f in dataclasses.fields(cls):
        declared = (vars(c).get("__dataclass_fields__", {}).get(f.name) for c in cls.__mro__)
        meanings = (d.metadata.get("meaning") for d in declared if d is not None)
        found[f.name] = HyperParameter(f.type, f.default, next(filter(None, meanings), ""))
    return found


def renamed(hyper: Mapping[str, Any], stacklevel: int = 3) -> dict[str, Any]:
    """The same hyper-parameters under their present names. Each old name gives one warning."""
    found = dict(hyper)
    for old, new in RENAMED.items():
        if old not in found:
            continue
        if new in found:
            raise TypeError(f"{old} is the old name of {new}: give {new} alone")
        warnings.warn(f"{old} is now {new}; the next release refuses {old}", FutureWarning, stacklevel=stacklevel)
        found[new] = found.pop(old)
    return found


# The arguments of patch() that are no hyper-parameters.
OF_PATCH = ("max_length", "offload", "pool_dtype", "hot_gib", "skip_layers", "layers", "step")


def make_method(name: str, **hyper) -> Method:
    known = all_methods()
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"unknown method {name!r}; available: {', '.join(known)}")
    hyper, fields = renamed(hyper), hyper_parameters(known[name])
    unknown = sorted(set(hyper) - set(fields))
    if own := sorted(set(unknown) & set(OF_PATCH)):
        raise TypeError(f"{' and '.join(own)} must be given to patch(), not to method {name!r}")
    if unknown:
        near = [x for n in unknown for x in difflib.get_close_matches(n, [*fields, *OF_PATCH], 1)]
        meant = f" (did you mean {', '.join(near)}?)" if near else ""
        raise TypeError(
            f"method {name!r} has no hyper-parameter {', '.join(unknown)}{meant}; it has: {', '.join(fields)}"
        )
    method = known[name](**hyper)
    traits_of(method)
    return method


COMMON = ("budget", "sink", "window")  # hyper-parameters of all methods that attend to a part of the cache


def named_method(name: str, hyper: Mapping[str, Any]) -> tuple[Method, dict[str, Any]]:
    """A method by the arguments of patch(), and the hyper-parameters that the user named. A budget, sink or window of
    None means the default of the method."""
    named = {n: as_int(x) for n, x in renamed(hyper, 4).items() if x is not None or n not in COMMON}
    return make_method(name, **named), named


def layer_method(name: str, **hyper) -> Method:
    """The method of layers that users cannot choose for, such as layers with a sliding window."""
    all_methods()
    return _METHODS[name](**hyper)


def traits_of(method: Method) -> Traits:
    """The traits, computed now: torch.compile cannot trace a cached property that has no value yet."""
    traits = method.traits
    if not isinstance(traits, Traits):
        raise TypeError(f"{method.name}: traits must be a Traits, got {traits!r}")
    assert (method._attends, method._moves_leaving) == (traits.attends, traits.moves_leaving)
    _ = method.rest
    return traits


def as_int(value):
    """Integers of numpy and torch as Python integers. Other values stay as they are, so that a check can name them."""
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
    have, need = torch.cuda.get_device_capability(device), method.traits.least_capability
    if have < need:
        lower = method.traits.older_devices
        hint = f"; with {lower} 8.0 is enough" if lower else ""
        raise NotImplementedError(
            f"{method.name} needs compute capability {need[0]}.{need[1]}, {torch.cuda.get_device_name(device)} has "
            f"{have[0]}.{have[1]}{hint}"
        )
