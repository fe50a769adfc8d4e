"""The store of torchsparsekv, presented to transformers as a cache."""
import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from torchsparsekv.method import Method
from torchsparsekv.patches._family import head_dim_of
from torchsparsekv.state import Buffer, Clock, Geometry, LayerState, total_bytes

# As `kv_offset` in the mask arguments it says that the mask is for one of our caches. No real offset looks like it.
SENTINEL = -(1 << 40)


class SparseLayer(CacheLayerMixin):
    """One layer of a SparseCache. Holds the tensors; the maths is the method's."""

    is_compileable = True
    is_sliding = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, method: Method, state: LayerState, capacity: int, owner, *, advances: bool, last: bool):
        super().__init__()
        self.owner, self.method, self.state, self.capacity = owner, method, state, capacity
        self.advances = advances  # the first layer on its clock moves it
        self.last = last
        self.is_initialized, self.batch_size = True, state.pool.shape[0]

    def lazy_initialization(self, *args) -> None: ...

    def update(self, *args, **kwargs):
        """A patched model never comes here: its attention function, which also has the queries, stores them."""
        raise RuntimeError("this SparseCache was given to a model that is not patched, where nothing would fill it")

    def get_mask_sizes(self, query_length) -> tuple[int, int]:
        if not self.owner.active:
            raise RuntimeError("the patch that made this SparseCache was taken off the model")
        return self.capacity, SENTINEL

    def get_seq_length(self):
        return self.state.clock.seq_len

    def get_max_length(self) -> int:
        return self.capacity

    get_max_cache_shape = get_max_length  # the name before transformers 5.15

    def reset(self) -> None:
        self.state.reset()
        self.state.clock.reset()

    def offload(self) -> None: ...

    def prefetch(self) -> None: ...

    def _refuse(self, *args, **kwargs):
        raise NotImplementedError(
            "torchsparsekv caches cannot be reordered, forked or cropped (beam search, assisted decoding)"
        )

    reorder_cache = crop = batch_repeat_interleave = batch_select_indices = _refuse


class SparseCache(Cache):
    """One LayerState per layer, over clocks shared by the layers with the same timeline."""

    def __init__(self, plan: "Plan", batch: int, max_length: int, owner: object, *, pool_on_host: bool):
        self.owner, self.batch, self.max_length = owner, batch, max_length
        self.clocks: dict = {}
        layers = []
        for i, method in enumerate(plan.methods):
            advances = method.timeline not in self.clocks
            if advances:
                self.clocks[method.timeline] = Clock(method.timeline, batch, max_length, plan.device)
            buffers = plan.buffers(method, batch, max_length)
            on_host = pool_on_host and plan.may_offload(method)
            state = LayerState(buffers, self.clocks[method.timeline], plan.device, pool_on_host=on_host)
            last = i == len(plan.methods) - 1
            layers.append(SparseLayer(method, state, max_length, owner, advances=advances, last=last))
        super().__init__(layers=layers)

    def reset(self) -> None:
        for layer in self.layers:
            layer.reset()

    def check_room(self, tokens: int) -> None:
        """Raise on overrun where that costs no sync that matters. In a compiled or CUDA decode step it would: there the
        clock turns an overrun into NaN (ops/index/advance.py)."""
        seq_len = self.layers[0].get_seq_length()
        if torch.compiler.is_compiling() or (tokens == 1 and seq_len.is_cuda):
            return
        if int(seq_len) + tokens > self.max_length:
            raise ValueError(
                f"{tokens} tokens after {int(seq_len)} overrun this cache of max_length {self.max_length}; "
                "patch or make_cache with a larger one"
            )

    def __deepcopy__(self, memo):
        raise TypeError("a SparseCache owns fixed memory and cannot be copied; make a new one with Handle.make_cache")


class Plan:
    """Which method each layer runs, and the memory that takes."""

    def __init__(
        self, config, method: Method, dense: Method, skip_layers: int,
        dtype: torch.dtype, device: torch.device, shards: int,
    ):  # fmt: skip
        self.method, self.dtype, self.device = method, dtype, device
        self.kv_heads = config.num_key_value_heads // shards
        self.group = config.num_attention_heads // config.num_key_value_heads
        self.head_dim = head_dim_of(config)
        layers = config.num_hidden_layers
        self.methods = tuple(dense if i < skip_layers else method for i in range(layers))

    def may_offload(self, method: Method) -> bool:
        """The dense layers of a sparse method read their whole pool at every step: it stays on the device."""
        return self.method.dense or not method.dense

    def buffers(self, method: Method, batch: int, max_length: int) -> dict[str, Buffer]:
        block = self.method.block_size
        rows = -(-max_length // block) * block
        return method.buffers(Geometry(batch, self.kv_heads, self.head_dim, rows, self.dtype, self.group))

    def bytes(self, batch: int, max_length: int, *, pool_on_host: bool) -> tuple[int, int]:
        """(host, device) bytes of a cache, before it exists."""
        host = device = 0
        for m in self.methods:
            on_host = pool_on_host and self.may_offload(m)
            h, d = total_bytes(self.buffers(m, batch, max_length), pool_on_host=on_host)
            host, device = host + h, device + d
        return host, device
