"""`check_method`: check one layer of a method, without a model, for the properties that every method has."""
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from torchsparsekv.method import Method, all_methods, make_method
from torchsparsekv.ops.store.views import Attention, Selection
from torchsparsekv.state import Geometry, LayerState, RowLengths

KV_HEADS, GROUP, HEAD_DIM = 2, 2, 32
TURN = 9  # tokens of a second turn
MOST_STEPS = 40  # most decode steps after a prompt; fewer if tokens leave the ring earlier
CLOSE = dict(rtol=1e-4, atol=1e-5)


def check_method(method: str | type[Method] | Method, **hyper) -> list[str]:
    """Check a method of your own on random keys, on the CPU in float32.

    1. Selected blocks are distinct and lie between the sinks and the ring. If the method reorders the pool, the check
       cannot compare blocks with the begin of the ring.
    2. A sequence of a ragged batch has the same outputs as the sequence alone.
    3. With a full budget, each decode step equals dense attention.
    4. With a full budget, a second turn and the steps after it equal dense attention, as one long prompt would.

    Args:
        method: a class, its name, or an instance.
        hyper: hyper-parameters. Without a `budget`, an instance keeps its own, and a class or a name gets a budget of
            four blocks. Small `sink`, `window` and blocks make the check fast.

    Returns:
        One line for each property.

    Raises:
        AssertionError: a property does not hold.
    """
    small = _made(method, hyper)
    if small.traits.attends != "selected":
        return [f"{small.name} selects nothing: there is nothing to check"]
    run = _Run(small)
    together = [*run.outputs(small, watch=_check_places)]
    for row in range(len(run.padding)):
        alone = [one[0] for one in run.outputs(small, row)]
        same = [out[row, :, -one.shape[1] :] for one, out in zip(alone, together)]
        _check_equal(small, f"sequence {row} of a ragged batch differs from the sequence alone", alone, same)
    exact, dense = [*run.outputs(dataclasses.replace(small, budget=run.rows))], [*run.outputs(make_method("full"))]
    turn = 1 + run.steps
    said = "with a budget for all tokens, outputs differ from dense attention"
    _check_equal(small, said, exact[1:turn], dense[1:turn])
    _check_equal(small, "a second turn differs from dense attention", exact[turn:], dense[turn:])
    return [
        f"{small.name}: selected blocks are distinct and lie between sinks and ring",
        f"{small.name}: sequences of a ragged batch equal sequences alone",
        f"{small.name}: with a budget for all tokens, outputs equal dense attention",
        f"{small.name}: a second turn equals one long prompt",
    ]


def _made(method: str | type[Method] | Method, hyper: dict) -> Method:
    if isinstance(method, str):
        method = type(make_method(method, **hyper))
    if isinstance(method, Method):
        return dataclasses.replace(method, **hyper)
    if not (isinstance(method, type) and issubclass(method, Method)):
        known = ", ".join(all_methods())
        raise TypeError(f"check_method takes a subclass of Method, an instance, or one of {known}, got {method!r}")
    made = method(**hyper)
    return made if "budget" in hyper else dataclasses.replace(made, budget=4 * made.block_size)


class _Run:
    """Random tokens of three rows of different lengths. `outputs` feeds them to a layer of a method."""

    def __init__(self, method: Method):
        plan = method.ring_plan
        self.prompt = plan.sink + plan.window + 2 * plan.interval + 12 * method.block_size + method.budget
        self.padding = [self.prompt // 2, 3, 0]  # on the left, of each row
        self.steps = min(plan.interval + 1, MOST_STEPS)
        tokens = self.prompt + self.steps + TURN + self.steps
        self.rows = -(-tokens // method.block_size) * method.block_size
        g = torch.Generator().manual_seed(0)
        draw = lambda heads: torch.randn(3, heads, tokens, HEAD_DIM, generator=g)  # noqa: E731
        # Keys are whole numbers, and queries multiples of 1/4. So products are exact, and the order of a summation
        # does not decide between two blocks.
        self.q, self.k = (draw(GROUP * KV_HEADS) * 2).round() / 4, (draw(KV_HEADS) * 2).round()
        self.v, self.attention = draw(KV_HEADS), Attention(HEAD_DIM**-0.5)

    def outputs(self, method: Method, row: int | None = None, watch: Callable | None = None) -> Iterator[Tensor]:
        """The outputs of a prompt, of steps, of a second turn and of steps after it. `row` None: of all rows."""
        here, padding = (slice(None), self.padding) if row is None else (slice(row, row + 1), [0])
        cut = 0 if row is None else self.padding[row]
        q, k, v = (t[here, :, cut:] for t in (self.q, self.k, self.v))
        lengths = RowLengths(method.ring_plan, len(padding), self.rows, q.device)
        lengths.left_pad.copy_(torch.tensor(padding))
        g = Geometry(len(padding), KV_HEADS, HEAD_DIM, self.rows, torch.float32, GROUP)
        state = LayerState(method.buffers(g), lengths, q.device, pool_on_host=False)
        state.on_step, at = watch and partial(watch, method), 0
        for tokens in (self.prompt - cut, *[1] * self.steps, TURN, *[1] * self.steps):
            x, keys, values = (t[:, :, at : at + tokens] for t in (q, k, v))
            lengths.advance(tokens)
            if tokens == 1:
                yield method.decode(state, x, keys, values, self.attention)
            else:
                yield method.prefill(state, x, keys, values, self.attention, last=True)
            at += tokens


def _check_places(method: Method, s: LayerState, q: Tensor, a: Attention, selection: Selection, out: Tensor) -> None:
    """Check the selection of one decode step: the `on_step` function of the layer."""
    if selection.ids is None:
        return
    ids, ordered = selection.ids.long(), selection.ids.long().sort(-1).values
    begin = s.lengths.ring_begin[:, None] if selection.frontier is None else selection.frontier
    first, taken = ids * method.block_size, ids >= 0
    if ((ordered.diff(dim=-1) == 0) & (ordered[..., 1:] >= 0)).any():
        raise AssertionError(f"{method.name}: choose selects a block twice: {ids.tolist()}")
    if (taken & (first < s.lengths.sink)).any():
        raise AssertionError(f"{method.name}: choose selects blocks in the {s.lengths.sink} sinks")
    if not method.traits.reorders_pool and (taken & (first + method.block_size > begin[..., None])).any():
        raise AssertionError(f"{method.name}: choose selects blocks in the ring, which begins at {begin.tolist()}")


def _check_equal(method: Method, what: str, outputs: list[Tensor], others: list[Tensor]) -> None:
    for call, (got, want) in enumerate(zip(outputs, others, strict=True)):
        live = ~(want == 0).all(-1)  # left padding has no output
        if not torch.allclose(got[live], want[live], **CLOSE):
            difference = float((got - want)[live].abs().max())
            raise AssertionError(f"{method.name}: {what}, by {difference:.3g} at call {call}")
