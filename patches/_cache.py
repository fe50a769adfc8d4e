"""The store of torchsparsekv, presented to transformers as a cache."""
import inspect
import weakref

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, StaticCache

from torchsparsekv.method import Method, as_int, named_method
from torchsparsekv.ops._machinery.side_stream import wait_for_side_stream
from torchsparsekv.patches._crop import check_cropped, crop
from torchsparsekv.patches._family import Layer
from torchsparsekv.patches._memory import Placement
from torchsparsekv.patches._plan import Plan
from torchsparsekv.patches._unwrapped import unwrapped
from torchsparsekv.patches._use import Use
from torchsparsekv.report import cache_bytes, size_of
from torchsparsekv.state import LayerState, RingPlan, RowLengths

# As `kv_offset` of a mask it marks a mask of our caches. No real offset has this value.
SENTINEL = -(1 << 40)


class Offset(int):
    """SENTINEL, with the layer whose cache the mask is for."""

    layer: "SparseLayer"

    def __new__(cls, layer: "SparseLayer"):
        made = super().__new__(cls, SENTINEL)
        made.layer = layer
        return made


def check_active(owner) -> None:
    if not owner.active:
        raise RuntimeError("the patch that made this SparseCache is off the model: patch it, and make a new cache")


def check_owner(cache: "SparseCache", owner) -> None:
    if cache.owner is not owner:
        raise ValueError("this SparseCache is from another patch (of another model, or before unpatch())")


def handle_for(model, method: str, max_length: int | None, options: dict):
    """The handle of the patch on a model; a model without a patch is patched. `options`: keywords of patch()."""
    from torchsparsekv.patches._install import install  # _install imports this file

    handle = getattr(unwrapped(model), "_torchsparsekv", None)
    if handle is None:
        keywords = inspect.signature(install).parameters.keys() & options.keys()  # the others are hyper-parameters
        chosen, given = named_method(method, {n: x for n, x in options.items() if n not in keywords})
        return install(model, chosen, given, max_length=max_length, **{n: options[n] for n in keywords})
    if options or method != handle.planned.method.name:
        raise ValueError(
            f"this model is patched already with {handle.planned.method}: call SparseCache(model, "
            f"{handle.planned.method.name!r}) without options, or call unpatch() first"
        )
    return handle


class SparseLayer(CacheLayerMixin):
    """One layer of a SparseCache: the tensors, and the method that computes with them."""

    is_compileable = True
    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(
        self, method: Method, shape: Layer, state: LayerState, capacity: int, owner, use: Use, *, advances: bool,
        first: bool, last: bool,
    ):  # fmt: skip
        super().__init__()
        self.use = use
        self.owner, self.method, self.shape, self.state, self.capacity = owner, method, shape, state, capacity
        self.advances = advances  # the first of the layers that share row lengths advances them
        self.first, self.last = first, last
        self.is_initialized, self.batch_size = True, state.store.pool.shape[0]

    def lazy_initialization(self, *args) -> None: ...

    def update(self, *args, **kwargs):
        """Refuse a call: in a patched model the attention function stores keys and values, because it has the queries
        too."""
        raise RuntimeError("this SparseCache was given to a model that is not patched, which cannot fill it")

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        check_active(self.owner)
        return self.capacity, SENTINEL if torch.compiler.is_compiling() else Offset(self)

    def get_seq_length(self):
        return self.state.row_lengths.seq_len

    def get_max_length(self) -> int:
        return self.capacity

    get_max_cache_shape = get_max_length  # the name before transformers 5.15

    def reset(self) -> None:
        self.state.reset()
        self.state.row_lengths.reset()

    def offload(self) -> None: ...

    def prefetch(self) -> None: ...

    def _refuse(self, *args, **kwargs):
        raise NotImplementedError(
            "layers of a SparseCache cannot be reordered, forked or cropped (beam search, assisted decoding); for the "
            "whole cache there are cache.crop(length) and Handle.fork(cache)"
        )

    reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _refuse


class SparseCache(Cache):
    """The keys, values and indexes of a batch, as a cache of transformers. Its batch size and length are fixed."""

    # Each layer with keys and values has a LayerState. Layers with equal ring plans share row lengths. Other layers
    # (linear attention, convolutions) are transformers' own.

    patched_by: weakref.ref

    def __init__(
        self, model, method: str = "pariskv", *, batch_size: int = 1, max_length: int | None = None, **options
    ):  # fmt: skip
        """Make a cache for a model: `model.generate(ids, cache=SparseCache(model, "quest"))`.

        A model that is not patched gets a patch. The patch stays until `cache.handle.unpatch()`.

        Args:
            model: a transformers model.
            method: a name in `torchsparsekv.methods()`; of a patched model, that of the patch.
            batch_size: sequences of the cache.
            max_length: tokens of a sequence. None: that of the patch; if it has none, all positions of the model.
            options: keywords of patch(); refused for a patched model.
        """
        found = getattr(unwrapped(model), "_torchsparsekv", None)
        handle = handle_for(model, method, max_length, options)
        try:
            handle.make_cache(batch_size, max_length, into=self)
        except BaseException:
            if found is None:  # the patch is ours
                handle.unpatch()
            raise

    @classmethod
    def of_plan(
        cls, plan: Plan, batch: int, max_length: int, owner, place: Placement, *, into: "SparseCache | None" = None
    ) -> "SparseCache":
        cache = cls.__new__(cls) if into is None else into
        cache._build(plan, batch, max_length, owner, place)
        return cache

    def _build(self, plan: Plan, batch: int, max_length: int, owner, place: Placement) -> None:
        self.owner, self.batch, self.max_length, self.place = owner, batch, max_length, place
        self.use = Use()
        self.graphs: list = []  # decode steps of patches/_captured.py; `fixed` is what they assume
        self.fixed: list | None = None
        self.ids: torch.Tensor | None = None  # ids of the first tokens, with padding, as far as generate() saw them
        self.cut_off = False  # an error ended a generate(), and the tokens behind `ids` are of its answer
        self.row_lengths: dict[RingPlan, RowLengths] = {}
        own = StaticCache(plan.config, max_cache_len=max_length).layers if None in plan.methods else []
        last = max(plan.attending)
        layers = []
        for i, (method, shape) in enumerate(zip(plan.methods, plan.layers)):
            if method is None or shape is None:
                layers.append(own[i])
                continue
            ring = method.ring_plan
            first, advances = not self.row_lengths, ring not in self.row_lengths
            if advances:
                self.row_lengths[ring] = RowLengths(ring, batch, max_length, plan.device)
            buffers = plan.buffers(i, batch, max_length, place.hot_budgets)
            on_host = place.pool_on_host and plan.may_offload(i)
            anchor = layers[plan.anchors[i]].state if i in plan.anchors else None
            state = LayerState(buffers, self.row_lengths[ring], plan.device, pool_on_host=on_host, anchor=anchor)
            roles = dict(advances=advances, first=first, last=i == last)
            layers.append(SparseLayer(method, shape, state, max_length, owner, self.use, **roles))
        late = [layer.state for layer in layers if isinstance(layer, SparseLayer) and "prefetch" in layer.state.buffers]
        for state in late[:-1]:
            state.joins = False
        Cache.__init__(self, layers=layers)

    def __repr__(self) -> str:
        """The text tells how many tokens the longest row has, so the call waits for the device."""
        names = dict.fromkeys(layer.method.name for layer in self.stored.values())
        tokens = max(int(x.view.length.max()) for x in self.row_lengths.values())
        host, device = self.nbytes()
        return (
            f"<SparseCache {', '.join(names)}: {self.batch} rows, {tokens} of {self.max_length} tokens in the longest, "
            f"{size_of(host)} host, {size_of(device)} device>"
        )

    def nbytes(self) -> tuple[int, int]:
        """Bytes of this cache: (host, device)."""
        host, device = cache_bytes([layer.state for layer in self.stored.values()])
        return host, device + sum(x.nbytes for x in self.row_lengths.values()) + self.own_bytes()

    @property
    def handle(self):
        """The `Handle` of the patch that this cache belongs to."""
        return self.patched_by()

    def crop(self, max_length: int) -> None:
        """Go back to an earlier length, to regenerate an answer or to edit a message.

        The index is built again from the keys that stay. No forward pass runs. Methods that cannot do this refuse it
        with the reason.

        Args:
            max_length: tokens to keep; a negative number removes tokens from the end.
        """
        check_active(self.owner)
        self.use.check()
        if self.use.generating:
            raise RuntimeError("crop: a generate() is running on this SparseCache: wait for its end")
        held, length = int(self.get_seq_length()), as_int(max_length)
        if type(length) is not int or abs(length) > held:
            raise ValueError(f"crop takes a number of tokens, from {-held} to {held} here, got {max_length!r}")
        columns = held + length if length < 0 else length
        if columns == held:
            return
        if columns == 0:
            return self.reset()
        check_cropped(self)
        with torch.no_grad():
            crop(self, columns, length)
        if self.ids is not None:
            self.cut_off &= columns > self.ids.shape[1]
            self.ids = self.ids[:, :columns]

    def reset(self) -> None:
        """Empty the cache. Addresses and captured graphs stay valid."""
        wait_for_side_stream(next(iter(self.row_lengths.values())).seq_len.device)
        for layer in self.layers:
            layer.reset()
        self.ids, self.cut_off = None, False
        self.use.end_of_model()

    @property
    def stored(self) -> dict[int, SparseLayer]:
        """The layers that keep keys and values, by index."""
        return {i: layer for i, layer in enumerate(self.layers) if isinstance(layer, SparseLayer)}

    def own_bytes(self) -> int:
        """The bytes of transformers' own layers, which allocate when a prompt comes."""
        return sum(t.nbytes for t in self.own_tensors())

    def own_tensors(self) -> list[torch.Tensor]:
        own = [vars(x).values() for i, x in enumerate(self.layers) if i not in self.stored]
        given = [t for values in own for v in values for t in (v.values() if isinstance(v, dict) else (v,))]
        return [t for t in given if isinstance(t, torch.Tensor)]

    def check_room(self, tokens: int) -> None:
        """Raise on overrun, except in compiled steps and in decode steps on CUDA, which would have to wait for the
        device. There the row lengths turn an overrun into NaN (ops/store/advance.py)."""
        seq_len = self.get_seq_length()
        if torch.compiler.is_compiling() or (tokens == 1 and seq_len.is_cuda):
            return
        if int(seq_len) + tokens > self.max_length:
            raise ValueError(
                f"{tokens} tokens after {int(seq_len)} overrun this cache of max_length {self.max_length}; "
                "pass a larger max_length to patch() or make_cache()"
            )

    def check_copied(self) -> None:
        """Refuse a cache that cannot be copied, or that is in use."""
        if len(self.stored) < len(self.layers):
            raise NotImplementedError("fork cannot copy the state of linear-attention layers, which transformers keeps")
        self.use.check()
        if self.use.generating:
            raise RuntimeError("fork: a generate() is running on this SparseCache: wait for its end")

    def copy_from(self, other: "SparseCache") -> None:
        """Copy the tokens of a cache of the same plan and max_length. One row of `other` may fill several rows."""
        other.check_copied()
        rows = 0
        for ring, lengths in self.row_lengths.items():
            lengths.copy_from(other.row_lengths[ring])
            rows = max(rows, int(lengths.view.length.max()))
        self.ids = None if other.ids is None else other.ids.expand(self.batch, -1)
        self.cut_off = other.cut_off
        for mine, its in zip(self.stored.values(), other.stored.values()):
            mine.state.copy_from(its.state, None if mine.method.traits.reorders_pool else rows)

    def __copy__(self, memo=None):
        raise TypeError(
            "a SparseCache owns fixed memory and cannot be copied by copy or deepcopy: Handle.fork(cache) makes a copy"
            ", Handle.make_cache() an empty one"
        )

    __deepcopy__ = __copy__

    def __reduce__(self):
        raise TypeError("a SparseCache owns fixed memory and cannot be pickled: keep the tokens, and prompt again")
