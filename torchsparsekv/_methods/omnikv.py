"""OmniKV: filter layers attend to everything and choose tokens for the layers after them (ICLR 2025)."""
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from torchsparsekv._methods._file import read_layers
from torchsparsekv._methods.full import Full
from torchsparsekv.method import Method, Traits, option
from torchsparsekv.ops.omnikv.filter_scores import filter_scores
from torchsparsekv.ops.select.top_blocks import top_blocks
from torchsparsekv.ops.store.views import I32, Attention, Selection
from torchsparsekv.state import Buffer, Buffers, Geometry, LayerState

AUTHORS, OF_LAYERS = (2, 8, 18), 32  # filter layers of the authors' example, and the layers of its model
SCORES = ("logits", "weights")


@dataclass(frozen=True, kw_only=True)
class OmniKV(Method):
    """Of "OmniKV: Dynamic Context Selection for Efficient Long-Context LLMs" and its code.

    A layer before the first filter layer is dense. A filter layer is dense too, and chooses one set of tokens for all
    heads. The layers after it attend to this set, beside sinks and window, up to the next filter layer. The first
    `wait_layers` of these layers are dense: in the paper they hide the transfer of the chosen tokens.

    A layer outside a model, as in `check_method`, chooses for itself.
    """

    name = "omnikv"

    filter_layers: tuple[int, ...] | str | None = option(
        None,
        "The filter layers, or a file of `torchsparsekv selecting-layers`. None: layers 2, 8 and 18 of 32, scaled to "
        "the layers of the model.",
    )
    wait_layers: int = option(1, "Layers behind each filter layer that are dense too.")
    score: str = option("logits", "Score of a token: the largest of its logits, or of its weights, over all heads.")

    def __post_init__(self) -> None:
        super().__post_init__()
        read_layers(self, "filter_layers")
        self.check_int("wait_layers", 0)
        self.check_one_of("score", SCORES)

    @cached_property
    def traits(self) -> Traits:
        return Traits(
            couples_heads=True, selects_every_step=True, cannot_crop="", no_engine="chooses in some layers for others"
        )

    # ---- which layer does what

    @classmethod
    def in_layers(cls, layers: Mapping[int, Method], count: int) -> Mapping[int, Method]:
        (method, *others), numbers = dict.fromkeys(layers.values()), [*layers]
        assert isinstance(method, cls)
        if others:
            two = f"{method}, {others[0]}"
            raise ValueError(f"{cls.name}: all its layers must have the same hyper-parameters, got {two}")
        filters = method.filters(numbers, count)
        dense = {i for i in numbers if i not in filters and not method.behind(i, numbers, filters)}
        return {i: method.filter if i in filters else Full() if i in dense else method for i in numbers}

    def filters(self, numbers: Sequence[int], count: int) -> list[int]:
        """The filter layers among the layers `numbers` of a model of `count` layers."""
        if isinstance(self.filter_layers, tuple):
            if missing := [i for i in self.filter_layers if i not in numbers]:
                raise ValueError(
                    f"{self.name}: filter_layers must be layers that run {self.name}, got {self.filter_layers}: layer "
                    f"{missing[0]} is not one of {', '.join(map(str, numbers))}"
                )
            return [*self.filter_layers]
        wanted = (int(i * count / OF_LAYERS + 0.5) for i in AUTHORS)
        found = [*dict.fromkeys(next(n for n in numbers if n >= i) for i in wanted if i <= numbers[-1])] or [numbers[0]]
        while len(found) > 1 and not self.behind(numbers[-1], numbers, found):  # no layer uses the last filter
            found.pop()
        return found

    def behind(self, layer: int, numbers: Sequence[int], filters: Sequence[int]) -> bool:
        """True if a layer attends to what a filter layer chose."""
        before = [f for f in filters if f <= layer]
        return bool(before) and numbers.index(layer) - numbers.index(before[-1]) > self.wait_layers

    @property
    def filter(self) -> "_Filter":
        """The method of a filter layer."""
        same = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return _Filter(**same | {"estimate_rest": False, "prefetch_async": None})

    @classmethod
    def shares_selection(cls, layers: Mapping[int, tuple[Method, int, int]]) -> dict[int, int]:
        found: dict[int, int] = {}
        for i, (method, heads, _) in layers.items():
            if isinstance(method, _Filter):
                latest, had = i, heads
                continue
            if heads != had:
                raise ValueError(
                    f"{cls.name}: layers that share a selection must have the same number of kv heads, got {heads} in "
                    f"layer {i}, and {had} in layer {latest}"
                )
            found[i] = latest
        return found

    # ---- a layer

    def buffers(self, g: Geometry) -> Buffers:
        return super().buffers(g) | ({} if g.follows else self.selected(g))

    def selected(self, g: Geometry) -> Buffers:
        """The tokens that a filter layer chose last. All heads have the same tokens."""
        return {"selected": Buffer((*g.lead, min(self.budget, g.rows)), I32, fill=-1)}

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        if s.anchor is not None:
            return Selection(s.anchor.selected)
        scored = filter_scores(q, s.store.pool, s.lengths, self.sink, self.window, a, self.score == "weights")
        s.selected.copy_(top_blocks(scored, s.selected.shape[2]).expand_as(s.selected))
        return Selection(s.selected)


@dataclass(frozen=True, kw_only=True)
class _Filter(Full, OmniKV):
    """A filter layer: dense, with a choice for the layers after it. The library sets it; users choose `omnikv`."""

    name = "omnikv_filter"

    @cached_property
    def traits(self) -> Traits:
        return Traits(attends="everything", couples_heads=True, no_rest="attends to every token", cannot_crop="")

    def buffers(self, g: Geometry) -> Buffers:
        return super().buffers(g) | self.selected(g)
