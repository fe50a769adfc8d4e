"""Recall of the page methods on structured keys, by the storage type of their digests.

    python benchmarks/quality/recall_digests.py --contexts 32768 131072 --offsets 8 100

Keys and queries are those of _recall.py, beside this file, and the same ones for every digest. Measures, over the
retrievable tokens, pages of --block-size:
- recall: share of the exact top pages that is chosen, exact by the largest q.k of any key with any head of the group,
  which is what the digests bound.
- mass: attention weight on the chosen pages, averaged over the heads of the group.
- best: the same for the pages that hold most of it; no choice can have more.
"""
import torch
from torch import Tensor

from torchsparsekv.method import make_method
from torchsparsekv.ops.store.views import Attention
from torchsparsekv.state import Geometry, LayerState, RowLengths
from torchsparsekv_benchmarks.quality._recall import Stream, finish, logits, parser, shares, show

PAGE_METHODS = ("quest", "arkvale")
CHUNK = 32768  # tokens of the prompt that are taken in at a time


class Paged:
    """A page method that has taken in a stream, as the prompt of one layer."""

    def __init__(self, name: str, digest: str, stream: Stream, o):
        size, device = o.block_size, torch.device(o.device)
        self.method = make_method(name, digest=digest, budget=o.budget, block_size=size, sink=0, window=size)
        self.scale = Attention(stream.d**-0.5)
        self.lengths = RowLengths(self.method.ring_plan, 1, stream.total, device)
        g = Geometry(1, stream.heads, stream.d, stream.total, o.dtype, stream.group)
        self.state = LayerState(self.method.buffers(g), self.lengths, device, pool_on_host=False)
        for chunk in stream.keys.split(CHUNK, 1):
            k = chunk[None].to(device, o.dtype)
            self.lengths.advance(k.shape[2])
            self.method.ingest(self.state, k, k, k, self.scale, join=True)

    def choose(self, q: Tensor) -> Tensor:
        """Pages of each kv head; q [heads * group, d]."""
        choice = self.method.choose(self.state, q.to(self.state.store.pool)[None, :, None], self.scale)
        assert choice is not None
        return choice.ids[0].cpu()


def exact(stream: Stream, q: Tensor, end: int, size: int) -> tuple[Tensor, Tensor]:
    """(largest q.k, attention weight) of each page."""
    x = logits(stream, q, end)
    return x.amax(1).unflatten(-1, (-1, size)).amax(-1), x.softmax(-1).mean(1).unflatten(-1, (-1, size)).sum(-1)


def measure(stream: Stream, queries: int, selecting_layers: dict[tuple[str, str], Paged]) -> dict[tuple[str, str], Tensor]:
    """Means of recall, mass and best."""
    ((end, size),) = {(int(x.lengths.view.ring_begin[0]), x.method.block_size) for x in selecting_layers.values()}
    total = {name: torch.zeros(3, dtype=torch.float64) for name in selecting_layers}
    for _ in range(queries):
        q = stream.query(stream.total)
        most, mass = exact(stream, q, end, size)
        for name, paged in selecting_layers.items():
            got = paged.choose(q).long()
            top, best = (x.topk(got.shape[-1]) for x in (most, mass))
            held = mass.gather(1, got).sum(-1).mean(), best.values.sum(-1).mean()
            total[name] += torch.tensor([shares(top.indices, got, end // size), *held])
    return {name: t / queries for name, t in total.items()}


def digests(o) -> list[dict]:
    rows = []
    for offset in o.offsets:
        for n in o.contexts:
            stream = Stream(n, n, heads=o.heads, group=o.group, offset=offset, seed=o.seed)
            stream.keys = stream.keys.to(o.dtype).float()  # what is exact is so by the keys that a model has
            selecting_layers = {(m, d): Paged(m, d, stream, o) for m in PAGE_METHODS for d in o.digests}
            for (method, digest), means in measure(stream, o.queries, selecting_layers).items():
                found = dict(zip(("recall", "mass", "best"), means.tolist()))
                rows.append({"offset": offset, "context": n, "method": method, "digest": digest, **found})
                show(rows[-1])
    return rows


def main() -> None:
    p = parser(__doc__, "bfloat16")
    p.add_argument("--offsets", type=float, nargs="+", default=[8.0], help="sizes of four outlier channels of all keys")
    p.add_argument("--digests", nargs="+", default=["bfloat16", "float8"])
    p.add_argument("--budget", type=int, default=1024)
    p.add_argument("--block-size", type=int, default=16)
    o = p.parse_args()
    o.dtype = getattr(torch, o.dtype)
    finish("digests", digests(o), o)


if __name__ == "__main__":
    main()
