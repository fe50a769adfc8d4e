"""Attention weight that PRKV keeps by its static share, beside other methods, the oracle and other orders of the pool.

    python benchmarks/quality/static_mass.py --model smollm2 --parts 7680:448 512:3584 --budgets 512 1024

Queries and keys are those of a model over one text, by a dense forward (heads.py): every method sees the same ones and
takes them in as it would in its layers. Of every of the --parts, first so many tokens as a prompt, then so many one by
one; a short prompt and many steps are the long generation. Of every setting the mean, over layers, query heads and
every --every th step, of the softmax weight on what was attended to.

- `prkv S`: a static share of S. `prkv S literal`: with the pool in the paper's order (`Literal`). `prkv S literal
  anew`, where --only names it: in that order, made from the text's own each time (`Anew`).
- `moved`: rows of a head that an update moved, mean over all after the first, and the most.
- `snapkv` and `snapkv maxpool`, where --only names them: over 5 tokens by their mean, over 7 by their largest. They are
  SnapKV with a --window of its observation window, 32, and all steps.
- the oracle chooses single tokens by their true weights.
"""
import argparse
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from torchsparsekv._methods.prkv import PRKV
from torchsparsekv.method import Method, make_method
from torchsparsekv.ops.index.block_bounds import VOLUMES, bounds
from torchsparsekv.ops.prkv.relocate import gathered
from torchsparsekv.ops.select.bound_scores import bound_scores
from torchsparsekv.ops.store.rows import keys_of, values_of
from torchsparsekv.ops.store.views import Attention, Selection
from torchsparsekv.state import Geometry, LayerState, RowLengths
from torchsparsekv_benchmarks.quality import heads as model_heads
from torchsparsekv_benchmarks.quality.heads import Heads

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0, "auto")
SNAPKV: dict[str, dict[str, Any]] = {"snapkv": {}, "snapkv maxpool": dict(kernel_size=7, pooling="maxpool")}
LITERAL, ANEW = "literal", "literal anew"


@dataclass(frozen=True, kw_only=True)
class Literal(PRKV):
    """PRKV with algorithm 1 as it is written: the set in front, and behind it all others in their order."""

    def choose(self, s: LayerState, q: Tensor, a: Attention) -> Selection:
        self.choose_static(s, a)
        sink = s.lengths.sink
        for b, h in s.static.updated.nonzero().tolist():
            ids, end = s.static.ids[b, h, : int(s.static.count[b, h])].cpu(), int(s.lengths.ring_begin[b])
            rows = s.store.pool[b, h]
            order = self.order(rows, gathered(ids, sink, end).to(rows.device), len(ids))
            rows[sink:end] = rows[order]
            keys = keys_of(rows).unflatten(0, (-1, self.block_size))[: end // self.block_size]
            for to, new in zip(s.digests, bounds(keys, VOLUMES.index(self.shape), s.digests.centre.dtype)):
                to[b, h, : end // self.block_size] = new
            s.hot.slot_of[b, h], s.hot.block_of[b, h] = -1, -1
        return self.best(s, *bound_scores(q, s.digests, s.lengths, s.static.count))

    def order(self, rows: Tensor, order: Tensor, static: int) -> Tensor:
        """The order of the current layout: tokens that leave the set stay behind its front, side by side."""
        return order


@dataclass(frozen=True, kw_only=True)
class Anew(Literal):
    """The same, but those behind the set stand in their own order: which position they are of, `Fed` writes in them."""

    def order(self, rows: Tensor, order: Tensor, static: int) -> Tensor:
        rest = order[static:]
        return torch.cat([order[:static], rest[values_of(rows)[rest, 0].argsort()]])


class Fed:
    """A method in the layers of a model, which are rows of one batch. The first channel of a value is its position."""

    def __init__(self, method: Method, heads: Heads):
        layers, kv, tokens, dim = heads.keys.shape
        rows = -(-tokens // method.block_size) * method.block_size
        device = heads.keys.device
        self.method, self.heads, self.at = method, heads, 0
        self.lengths = RowLengths(method.ring_plan, layers, rows, device)
        g = Geometry(layers, kv, dim, rows, torch.float32, heads.group)
        self.state: Any = LayerState(method.buffers(g), self.lengths, device, pool_on_host=False)
        self.attention = Attention(heads.scale)
        every = getattr(method, "update_every", None)
        if every and hasattr(self.state, "static"):  # the turns of the layers
            self.state.static.stagger.copy_((torch.arange(layers, device=device) * every // layers)[:, None])

    def take(self, tokens: int) -> Selection:
        """The next ones: a prompt, or of a single one what it chooses."""
        span = slice(self.at, self.at + tokens)
        if span.stop > self.heads.tokens:
            raise ValueError(f"there are queries and keys of {self.heads.tokens} tokens, {span.stop} were asked for")
        q, k = self.heads.queries[:, :, span], self.heads.keys[:, :, span]
        v = torch.zeros_like(k)
        v[..., 0] = torch.arange(span.start, span.stop, device=v.device)
        self.at += tokens
        self.lengths.advance(tokens)
        s = self.state
        if tokens > 1:
            self.method.ingest(s, q, k, v, self.attention, join=True)
            return None
        self.method.ingest_token(s, q, k, v)
        return self.method.choose(s, q, self.attention)

    def kept(self, choice: Selection) -> Tensor:
        """Which tokens are attended to, [layers, kv heads, tokens]."""
        s, size = self.state, self.method.block_size
        out = torch.zeros(*s.store.pool.shape[:2], s.store.pool.shape[2] + 1, dtype=torch.bool)
        out[..., : s.lengths.sink] = True
        frontier = s.lengths.ring_begin[:, None].expand(out.shape[:2])
        if choice.frontier is not None:
            frontier = choice.frontier
        out |= torch.arange(out.shape[2]) >= frontier[..., None].cpu()
        if choice.ids is not None:
            row = (choice.ids.long()[..., None] * size + torch.arange(size)).masked_fill((choice.ids < 0)[..., None], 0)
            token = self.positions().gather(2, row.flatten(2)).unflatten(2, (-1, size))
            out.scatter_(2, token.masked_fill((choice.ids < 0)[..., None], out.shape[2] - 1).flatten(2), True)
        return out[..., : self.at]

    def positions(self) -> Tensor:
        """The token in every row of the pool."""
        return values_of(self.state.store.pool)[..., 0].long()


class Moved:
    """How many rows of a head the updates after the first have moved."""

    def __init__(self, fed: Fed):
        self.fed, self.before = fed, fed.positions()
        self.seen: list[int] = []

    def look(self) -> None:
        static, end = self.fed.state.static, int(self.fed.state.lengths.ring_begin[0])
        new = static.updated[:, 0] != 0
        if bool(new.any()):
            now = self.fed.positions()
            again = static.updated.bool() & (static.updates > 1)
            self.seen += (now != self.before)[:, :, :end].sum(-1)[again].tolist()
            self.before[new] = now[new]

    def join(self) -> None:
        """What left the ring is where it belongs."""
        begin, end = (int(t[0]) for t in self.fed.state.lengths[2:4])
        self.before[:, :, begin:end] = torch.arange(begin, end)


@lru_cache(1)
def weights(heads: Heads, steps: tuple[int, ...]) -> list[Tensor]:
    return [heads.weights(at) for at in steps]


def measured(method: Method, heads: Heads, prompt: int, steps: int, every: int) -> dict[str, Any]:
    """What a setting keeps, and what its updates moved."""
    fed, looked = Fed(method, heads), tuple(range(prompt, prompt + steps, every))
    wanted = dict(zip(looked, weights(heads, looked)))
    fed.take(prompt)
    static = getattr(fed.state, "static", None) if isinstance(method, PRKV) else None
    moved, mass = Moved(fed), []
    for at in range(prompt, prompt + steps):
        choice = fed.take(1)
        if static is not None:
            moved.join()
            moved.look()
        if at in wanted:
            keep = fed.kept(choice).repeat_interleave(heads.group, 1)
            mass.append((wanted[at] * keep).sum(-1))
    found = torch.stack(mass)
    row: dict[str, Any] = {"mass": round(float(found.mean()), 4)}
    row["by_layer"] = [round(x, 4) for x in found.mean((0, 2)).tolist()]
    if static is not None:
        if moved.seen:
            row |= {"moved": round(sum(moved.seen) / len(moved.seen), 1), "most_moved": max(moved.seen)}
        row["shares"] = [round(x, 4) for x in (static.target.float().mean(1) / method.budget).tolist()]
    return row


def settings(o: argparse.Namespace, budget: int) -> dict[str, Method]:
    """By label."""
    near = dict(sink=o.sink, window=o.window, budget=budget)
    pages = dict(near, block_size=o.block_size, update_every=o.update_every, update_from="keys")
    out: dict[str, Method] = {f"prkv {s}": make_method("prkv", static_ratio=s, **pages) for s in SHARES}
    for s in o.literal:
        out[f"prkv {s} {LITERAL}"] = Literal(static_ratio=s, **pages)
        if f"prkv {s} {ANEW}" in o.only:
            out[f"prkv {s} {ANEW}"] = Anew(static_ratio=s, **pages)
    out["quest"] = make_method("quest", **near, block_size=o.block_size)
    out["prkv_static"] = make_method("prkv_static", **near)
    for label, more in SNAPKV.items():
        if label in o.only:
            out[label] = make_method("snapkv", **near, **more)
    out["oracle"] = make_method("oracle", **near)
    return {k: m for k, m in out.items() if not o.only or k in o.only}


@model_heads.shown
def rows(o: argparse.Namespace):
    heads = model_heads.read(o)
    for part in o.parts:
        prompt, steps = map(int, part.split(":"))
        for budget in o.budgets:
            for label, method in settings(o, budget).items():
                row = {"prompt": prompt, "steps": steps, "budget": budget, "setting": label}
                row |= measured(method, heads, prompt, steps, o.every)
                yield row | {"model": o.model, "layers": list(heads.layers)}


def main() -> None:
    p = model_heads.parser(__doc__)
    p.add_argument("--parts", nargs="+", default=["7680:448"], metavar="PROMPT:STEPS")
    p.add_argument("--budgets", type=int, nargs="+", default=[512, 1024, 2048])
    p.add_argument("--every", type=int, default=7, help="steps from one that is looked at to the next")
    p.add_argument("--block-size", type=int, default=32)
    p.add_argument("--update-every", type=int, default=128)
    p.add_argument("--literal", type=float, nargs="*", default=[], help="shares to measure in the paper's order too")
    p.add_argument("--only", nargs="*", default=[], help="labels of settings, as 'prkv 0.25'; all by default")
    model_heads.run("static_mass", rows, p)


if __name__ == "__main__":
    main()
