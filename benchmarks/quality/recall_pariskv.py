"""Recall of ParisKV on structured keys: by context length and rule for the heads of a group, and under drift.

    python benchmarks/quality/recall_pariskv.py lengths --contexts 8192 32768 131072
    python benchmarks/quality/recall_pariskv.py drift --prompt-topics 2 --prompt-noise 0.05 --drift 3 --out drift.json
    torchsparsekv report drift.json -o drift.html

Keys and queries are those of _recall.py, beside this file. Measures, over the retrievable tokens:
- recall: share of the exact top-k that is chosen, exact by attention weight averaged over the heads of the group.
- recall of the mean query: against the exact top-k of q.k with the mean query, what the authors' code ranks by.
- candidates: share of the exact top-k that stage I passes on.
- mass: attention weight on what is chosen, as a share of what the exact top-k holds.
The baselines of `drift` have k-means centroids per subspace of the raw keys, learned on the prompt only. One counts
collisions the same way and then ranks its candidates exactly: it falls where the prompt is narrow and the output not,
as when a short problem is thought about at length; after a prompt of as many topics as the output about as far as
ParisKV. The other is product quantization as a cache of it works: what a key is to the query is what its centroids are.
It loses most of its recall after either prompt: nothing tells apart new keys that share their nearest old centroids.
"""
from functools import partial

import torch
from torch import Tensor

from torchsparsekv._methods.pariskv import ParisKV
from torchsparsekv.ops.pariskv import _srht
from torchsparsekv.ops.pariskv.centroid_votes import beta_and_rho, centroid_votes, votes_of
from torchsparsekv.ops.pariskv.encode_keys import encode_keys
from torchsparsekv.ops.pariskv.rank_by_votes import candidates_of, rank_by_votes
from torchsparsekv.ops.pariskv.rerank import rerank
from torchsparsekv.ops.pariskv.views import Codes
from torchsparsekv.ops.select.top_blocks import top_blocks
from torchsparsekv.ops.store.rows import keys_of, rows_of
from torchsparsekv.ops.store.views import Lengths
from torchsparsekv_benchmarks.quality._recall import NOISE, Keys, Stream, exact, finish, parser, shares, show


class Index:
    """The ParisKV index over the first tokens of a stream."""

    def __init__(self, stream: Keys, dtype: torch.dtype, device: str, **hyper):
        self.method = ParisKV(sink=0, full_threshold=0, **hyper)
        n, size = stream.total, 1 << (stream.d - 1).bit_length()
        lead, m = (1, stream.heads, n), self.method.m
        new = lambda *shape, dtype: torch.zeros(shape, dtype=dtype, device=device)  # noqa: E731
        far = rows_of(stream.keys, torch.zeros_like(stream.keys))[None]
        self.far = Far(far.to(device, dtype).contiguous())
        self.codes = Codes(
            ids=new(*lead, size // m, dtype=torch.uint8), codes=new(*lead, size // 2, dtype=torch.uint8),
            weights=new(*lead, size // m, dtype=torch.float16),
            counts=new(1, stream.heads, size // m, 1 << m, dtype=torch.int32),
        )  # fmt: skip
        self.end = 0

    def lengths(self, begin: int, end: int, step: int = 1) -> Lengths:
        times = (torch.tensor([t], dtype=torch.int32, device=self.store.pool.device) for t in (end, end, begin, end))
        return Lengths._make((*times, 0, step))

    def grow(self, end: int) -> None:
        step = 4096
        while self.end < end:
            a, b = self.end, min(end, self.end + step)
            none = keys_of(self.store.pool)[:, :, :1]
            encode_keys(none, self.far, self.codes, self.lengths(a, b, step), self.method.m, self.method.seed)
            self.end = b

    def choose(self, q: Tensor, k: int, group: str) -> tuple[Tensor, Tensor]:
        """(candidates, chosen) ids of one step; q [heads * group, d]."""
        x = q.to(self.store.pool)[None, :, None]
        lengths, ratios, seed = self.lengths(self.end, self.end), self.method.ratios, self.method.seed
        rotated, votes = centroid_votes(x, self.codes, lengths, ratios, group == "mean", seed)
        room = candidates_of(self.end, ratios, k, 0)
        rows = [t[:, :, : self.end].contiguous() for t in self.codes[:3]]
        codes = Codes._make((*rows, self.codes.counts))
        some = rank_by_votes(votes, codes, lengths, ratios, k, 0, self.end)[..., :room].contiguous()
        return some[0].cpu(), top_blocks(rerank(rotated, codes, some), k, some)[0].cpu()


def patterns(m: int) -> Tensor:
    """The 2^m directions of ParisKV, [2^m, m]."""
    return ((torch.arange(1 << m)[:, None] >> torch.arange(m)) % 2 * 2.0 - 1) / m**0.5


class Prompted:
    """The baselines: k-means centroids per subspace, learned once; or with `rounds` 0 the fixed ones of ParisKV.

    normalise: keys have length 1 (which is all that they are told apart by, not what they are ranked by). rotate: keys
    and queries are rotated as ParisKV rotates them.
    """

    def __init__(
        self, stream: Keys, prefill: int, m: int = 8, rounds: int = 6, *, normalise: bool = False,
        rotate: bool = False,
    ):  # fmt: skip
        self.stream, self.m = stream, m
        self.turn = (lambda x: _srht.rotate(x, 0)) if rotate else (lambda x: x)
        keys = torch.nn.functional.normalize(stream.keys, dim=-1) if normalise else stream.keys
        parts = self.turn(keys).unflatten(-1, (-1, m)).transpose(1, 2)  # [heads, spaces, tokens, m]
        seen = parts[:, :, :prefill]
        pick = torch.randperm(prefill, generator=stream.g)[:256]
        self.centroids = seen[:, :, pick].clone() if rounds else patterns(m).expand(*seen.shape[:2], -1, -1)
        for _ in range(rounds):
            names = torch.cdist(seen, self.centroids).argmin(-1)
            total = torch.zeros_like(self.centroids).scatter_add_(2, names[..., None].expand(-1, -1, -1, m), seen)
            count = torch.zeros(total.shape[:3]).scatter_add_(2, names, torch.ones(names.shape))
            self.centroids = torch.where(count[..., None] > 0, total / count[..., None].clamp(min=1), self.centroids)
        chunks = parts.split(8192, 2)
        self.names = torch.cat([torch.cdist(c, self.centroids).argmin(-1) for c in chunks], 2)

    def seen_by(self, q: Tensor, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """(mean query of each kv head, its product with every centroid, the centroids of the keys)."""
        mean = q.unflatten(0, (self.stream.heads, -1)).mean(1)
        proxy = torch.einsum("hbm,hbcm->hbc", self.turn(mean).unflatten(-1, (-1, self.m)), self.centroids)
        return mean, proxy, self.names[:, :, :end]

    def quantized(self, q: Tensor, end: int, k: int, ratios: list[int]) -> tuple[Tensor, Tensor]:
        """Both stages by the inner product of the query with the centroids of a key."""
        _, proxy, names = self.seen_by(q, end)
        order = proxy.gather(2, names).sum(1).topk(candidates_of(end, ratios, k, 0)).indices
        return order, order[:, :k]

    def colliding(self, q: Tensor, end: int, k: int, ratios: list[int]) -> tuple[Tensor, Tensor]:
        """Candidates by collisions, ranked exactly."""
        mean, proxy, names = self.seen_by(q, end)
        count = torch.zeros(proxy.shape, dtype=torch.int64).scatter_add_(2, names, torch.ones_like(names))
        score = votes_of(proxy, count, end, beta_and_rho(end, ratios)[1]).gather(2, names).sum(1)
        some = score.topk(candidates_of(end, ratios, k, 0)).indices
        exact = (self.stream.keys[:, :end] @ mean[..., None])[..., 0].gather(1, some)
        return some, some.gather(1, exact.topk(k).indices)


def measure(stream: Stream, end: int, k: int, queries: int, selecting_layers: dict) -> dict[str, dict[str, float]]:
    total = {name: torch.zeros(4, dtype=torch.float64) for name in selecting_layers}
    for _ in range(queries):
        q = stream.query(end)
        mass, top, top_mean = exact(stream, q, end, k)
        for name, choose in selecting_layers.items():
            some, got = choose(q)
            held = mass.gather(1, got.long()).sum(-1) / mass.gather(1, top).sum(-1)
            row = (shares(top, got, end), shares(top_mean, got, end), shares(top, some, end), float(held.mean()))
            total[name] += torch.tensor(row)
    keys = ("recall", "recall_of_mean_query", "candidates", "mass")
    return {name: dict(zip(keys, (t / queries).tolist())) for name, t in total.items()}


def lengths(o) -> list[dict]:
    rows = []
    for n in o.contexts:
        stream = Stream(n, n, heads=o.heads, group=o.group, offset=o.offset, seed=o.seed)
        index = Index(stream, o.dtype, o.device, budget=o.k, beta=o.beta, rho=o.rho)
        index.grow(n)
        rules = {rule: (lambda q, index=index, rule=rule: index.choose(q, o.k, rule)) for rule in ("mean", "max")}
        for rule, result in measure(stream, n, o.k, o.queries, rules).items():
            rows.append({"context": n, "group": rule, **result})
            show(rows[-1])
    return rows


def drift(o) -> list[dict]:
    stream = Stream(
        o.prefill + o.steps, o.prefill, heads=o.heads, group=o.group, offset=o.offset, drift=o.drift,
        prompt_topics=o.prompt_topics, prompt_noise=o.prompt_noise, seed=o.seed,
    )  # fmt: skip
    index = Index(stream, o.dtype, o.device, budget=o.k, beta=o.beta, rho=o.rho)
    prompted = Prompted(stream, o.prefill)
    rows = []
    for step in torch.linspace(o.first, o.steps, o.points).int().tolist():
        end = o.prefill + step
        index.grow(end)
        selecting_layers = {"pariskv " + rule: (lambda q, rule=rule: index.choose(q, o.k, rule)) for rule in ("mean", "max")}
        given = dict(end=end, k=o.k, ratios=index.method.ratios)
        selecting_layers["k-means of the prompt"] = partial(prompted.colliding, **given)
        selecting_layers["product quantization of the prompt"] = partial(prompted.quantized, **given)
        for name, result in measure(stream, end, o.k, o.queries, selecting_layers).items():
            rows.append({"step": step, "method": name, **result})
            show(rows[-1])
    return rows


def main() -> None:
    p = parser(__doc__, "float32")
    p.add_argument("what", choices=("lengths", "drift"))
    p.add_argument("--prefill", type=int, default=2048)
    p.add_argument("--steps", type=int, default=16384)
    p.add_argument("--points", type=int, default=5)
    p.add_argument("--offset", type=float, default=8.0, help="size of four outlier channels common to all keys")
    p.add_argument("--drift", type=float, default=1.5, help="how far that offset moves, in norms of a topic")
    p.add_argument("--prompt-topics", type=int, help="topics of the prompt; all of them unless given")
    p.add_argument("--prompt-noise", type=float, default=NOISE, help="how much keys of a topic differ in the prompt")
    p.add_argument("--first", type=int, default=0, help="the step at which the curve begins")
    p.add_argument("--k", type=int, default=100)
    p.add_argument("--beta", type=float)
    p.add_argument("--rho", type=float)
    o = p.parse_args()
    o.dtype = getattr(torch, o.dtype)
    finish(o.what, {"lengths": lengths, "drift": drift}[o.what](o), o)


if __name__ == "__main__":
    main()
