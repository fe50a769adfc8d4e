"""Recall of ParisKV on structured keys: by context length and rule for the heads of a group, and under drift.

    python benchmarks/recall_pariskv.py lengths --contexts 8192 32768 131072
    python benchmarks/recall_pariskv.py drift --prompt-topics 2 --prompt-noise 0.05 --drift 3 --out drift.json
    torchsparsekv report drift.json -o drift.html

Keys are synthetic but shaped like those of a model: an offset with outlier channels, a decaying spectrum, topics that
last for a stretch of tokens, rotary positions. Queries look for one or two topics, the heads of a group partly for the
same ones. Measures, over the retrievable tokens:
- recall: share of the exact top-k that is chosen, exact by attention weight averaged over the heads of the group.
- recall of the mean query: against the exact top-k of q.k with the mean query, what the authors' code ranks by.
- candidates: share of the exact top-k that stage I passes on.
- mass: attention weight on what is chosen, as a share of what the exact top-k holds.
The baselines of `drift` have k-means centroids per subspace of the raw keys, learned on the prompt only. One counts
collisions the same way and then ranks its candidates exactly: it falls where the prompt is narrow and the output not,
as when a short problem is thought about at length; after a prompt of as many topics as the output about as far as
ParisKV. The other is product quantization as a cache of it works: what a key is to the query is what its centroids are.
It collapses after either prompt, since nothing tells apart the new keys that share their nearest old centroids.
"""
import argparse
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from torchsparsekv.benchmarks import _common
from torchsparsekv.ops.index.encode_keys import encode_keys
from torchsparsekv.ops.select.collide import candidates_of, collide
from torchsparsekv.ops.select.earn_points import earn_points, pair, points
from torchsparsekv.ops.select.rerank import rerank
from torchsparsekv.ops.select.top_blocks import top_blocks
from torchsparsekv.zoo.pariskv import ParisKV

STRETCH = 48  # tokens a topic lasts, on average
NOISE = 0.7  # of a key around its topic, in norms of a topic


def rope(x: Tensor, position: Tensor, theta: float = 5e5) -> Tensor:
    """Rotary positions in the half-split layout; x [..., tokens, d]."""
    half = x.shape[-1] // 2
    angle = position[:, None] * theta ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


@dataclass
class Stream:
    """Keys and queries of `heads` kv heads over `total` tokens; from `drift_from` on the distribution moves away."""

    total: int
    drift_from: int
    heads: int = 4
    group: int = 4
    d: int = 128
    topics: int = 128
    offset: float = 8.0  # of four channels
    drift: float = 1.5  # how far the offset moves, in norms of a topic; 0: nothing drifts, not even the topics
    prompt_topics: int | None = None  # those of the tokens before the drift; None: all
    prompt_noise: float = NOISE  # of these tokens
    seed: int = 0

    def __post_init__(self):
        g = self.g = torch.Generator().manual_seed(self.seed)
        spectrum = torch.arange(1, self.d + 1).float() ** -0.5
        self.basis = torch.linalg.qr(torch.randn(self.heads, self.d, self.d, generator=g)).Q * spectrum[:, None] * 3.2
        self.centres, self.moved = (self.draw(self.topics) for _ in range(2))
        offset, self.offset_q = self.draw(1), self.draw(1)
        for h in range(self.heads):
            offset[h, 0, torch.randperm(self.d, generator=g)[:4]] += self.offset
        change = torch.rand(self.total, generator=g) < 1 / STRETCH
        named = torch.randint(self.topics, (self.total,), generator=g)
        token = torch.arange(self.total)
        self.topic = named[(change.long() * token).cummax(0).values]
        prompt = token < self.drift_from
        self.topic[prompt] %= self.prompt_topics or self.topics
        noise = torch.where(prompt, self.prompt_noise, NOISE)[:, None]
        age = (token - self.drift_from).clamp(min=0) / max(1, self.total - self.drift_from)
        self.age = age[:, None] * (self.drift > 0)  # 0 before the drift, 1 at the end
        self.away = self.draw(1) * self.drift
        keys = offset + self.age * self.away + self.centre(token) + noise * self.draw(self.total)
        self.keys = rope(keys, token)

    def draw(self, n: int) -> Tensor:
        return torch.randn(self.heads, n, self.d, generator=self.g) @ self.basis

    def centre(self, token: Tensor) -> Tensor:
        """What the tokens are about: topics turn into other ones as the drift goes on."""
        z, age = self.topic[token], self.age[token]
        return (1 - age).sqrt() * self.centres[:, z] + age.sqrt() * self.moved[:, z]

    def query(self, end: int) -> Tensor:
        """[heads * group, d]: each head looks for the topic of one past token, half of them for a common one."""
        common = torch.randint(end, (1,), generator=self.g)
        parts = []
        for _ in range(self.group):
            own = torch.randint(end, (1,), generator=self.g)
            token = common if torch.rand((), generator=self.g) < 0.5 else own
            want = self.centre(token) + 0.4 * self.centre(torch.tensor([end - 1])) + 0.5 * self.draw(1)
            parts.append(rope(self.offset_q + want, torch.tensor([end])))
        return torch.cat(parts, 1).flatten(0, 1)


class Index:
    """The ParisKV index over the first tokens of a stream."""

    def __init__(self, stream: Stream, dtype: torch.dtype, device: str, **hyper):
        self.method = ParisKV(sink=0, full_threshold=0, **hyper)
        n, size = stream.total, 1 << (stream.d - 1).bit_length()
        lead, m = (1, stream.heads, n), self.method.m
        new = lambda *shape, dtype: torch.zeros(shape, dtype=dtype, device=device)  # noqa: E731
        self.pool = torch.stack([stream.keys, torch.zeros_like(stream.keys)], 2)[None].to(device, dtype).contiguous()
        self.ids, self.codes = new(*lead, size // m, dtype=torch.uint8), new(*lead, size // 2, dtype=torch.uint8)
        self.weights = new(*lead, size // m, dtype=torch.float16)
        self.counts = new(1, stream.heads, size // m, 1 << m, dtype=torch.int32)
        self.end = 0

    def grow(self, end: int) -> None:
        step = 4096
        while self.end < end:
            a, b = self.end, min(end, self.end + step)
            at = [torch.tensor([t], dtype=torch.int32, device=self.pool.device) for t in (b, b, a, b)]
            none = self.pool[:, :, :1, 0]
            encode_keys(
                none, self.pool, self.ids, self.codes, self.weights, self.counts, *at, step, self.method.m,
                self.method.seed,
            )  # fmt: skip
            self.end = b

    def choose(self, q: Tensor, k: int, group: str) -> tuple[Tensor, Tensor]:
        """(candidates, chosen) ids of one step; q [heads * group, d]."""
        x = q.to(self.pool)[None, :, None]
        retired = torch.tensor([self.end], dtype=torch.int32, device=x.device)
        ratios, seed = self.method.ratios, self.method.seed
        rotated, earned = earn_points(x, self.counts, retired, 0, ratios, group == "mean", seed)
        room = candidates_of(self.end, ratios, k, 0)
        rows = slice(0, self.end)
        ids, codes, weights = (t[:, :, rows].contiguous() for t in (self.ids, self.codes, self.weights))
        some = collide(earned, ids, retired, 0, ratios, k, 0, self.end)[..., :room].contiguous()
        estimates, peaks = rerank(rotated, codes, weights, some)
        return some[0].cpu(), top_blocks(estimates, k, peaks, some)[0].cpu()


class Prompted:
    """The baselines: k-means centroids per subspace, learned once."""

    def __init__(self, stream: Stream, prefill: int, m: int = 8, rounds: int = 6):
        self.stream, self.m = stream, m
        parts = stream.keys.unflatten(-1, (-1, m)).transpose(1, 2)  # [heads, spaces, tokens, m]
        seen = parts[:, :, :prefill]
        pick = torch.randperm(prefill, generator=stream.g)[:256]
        self.centroids = seen[:, :, pick].clone()
        for _ in range(rounds):
            names = torch.cdist(seen, self.centroids).argmin(-1)
            total = torch.zeros_like(self.centroids).scatter_add_(2, names[..., None].expand(-1, -1, -1, m), seen)
            count = torch.zeros((*names.shape[:2], 256)).scatter_add_(2, names, torch.ones(names.shape))
            self.centroids = torch.where(count[..., None] > 0, total / count[..., None].clamp(min=1), self.centroids)
        chunks = parts.split(8192, 2)
        self.names = torch.cat([torch.cdist(c, self.centroids).argmin(-1) for c in chunks], 2)

    def seen_by(self, q: Tensor, end: int) -> tuple[Tensor, Tensor, Tensor]:
        """(mean query of each kv head, its product with every centroid, the centroids of the keys)."""
        mean = q.unflatten(0, (self.stream.heads, -1)).mean(1)
        proxy = torch.einsum("hbm,hbcm->hbc", mean.unflatten(-1, (-1, self.m)), self.centroids)
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
        score = points(proxy, count, end, pair(end, ratios)[1]).gather(2, names).sum(1)
        some = score.topk(candidates_of(end, ratios, k, 0)).indices
        exact = (self.stream.keys[:, :end] @ mean[..., None])[..., 0].gather(1, some)
        return some, some.gather(1, exact.topk(k).indices)


def shares(wanted: Tensor, got: Tensor, n: int) -> float:
    hit = torch.zeros(*got.shape[:-1], n, dtype=torch.bool).scatter_(-1, got.long(), True)
    return float(hit.gather(-1, wanted).float().mean())


def exact(stream: Stream, q: Tensor, end: int, k: int):
    """(attention weight of each token, its top-k, the top-k of the mean query)."""
    x = q.unflatten(0, (stream.heads, -1))
    logits = x @ stream.keys[:, :end].transpose(1, 2) * stream.d**-0.5
    mass = logits.softmax(-1).mean(1)
    return mass, mass.topk(k).indices, logits.mean(1).topk(k).indices


def measure(stream: Stream, end: int, k: int, queries: int, choosers: dict) -> dict[str, dict[str, float]]:
    total = {name: torch.zeros(4, dtype=torch.float64) for name in choosers}
    for _ in range(queries):
        q = stream.query(end)
        mass, top, top_mean = exact(stream, q, end, k)
        for name, choose in choosers.items():
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
        choosers = {"pariskv " + rule: (lambda q, rule=rule: index.choose(q, o.k, rule)) for rule in ("mean", "max")}
        given = dict(end=end, k=o.k, ratios=index.method.ratios)
        choosers["k-means of the prompt"] = partial(prompted.colliding, **given)
        choosers["product quantization of the prompt"] = partial(prompted.quantized, **given)
        for name, result in measure(stream, end, o.k, o.queries, choosers).items():
            rows.append({"step": step, "method": name, **result})
            show(rows[-1])
    return rows


def show(row: dict) -> None:
    print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("what", choices=("lengths", "drift"))
    p.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768])
    p.add_argument("--prefill", type=int, default=2048)
    p.add_argument("--steps", type=int, default=16384)
    p.add_argument("--points", type=int, default=5)
    p.add_argument("--queries", type=int, default=8)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--group", type=int, default=4)
    p.add_argument("--offset", type=float, default=8.0, help="size of four outlier channels common to all keys")
    p.add_argument("--drift", type=float, default=1.5, help="how far that offset moves, in norms of a topic")
    p.add_argument("--prompt-topics", type=int, help="topics of the prompt; all of them unless given")
    p.add_argument("--prompt-noise", type=float, default=NOISE, help="how much keys of a topic differ in the prompt")
    p.add_argument("--first", type=int, default=0, help="the step at which the curve begins")
    p.add_argument("--k", type=int, default=100)
    p.add_argument("--beta", type=float)
    p.add_argument("--rho", type=float)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--dtype", default="float32")
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--out", type=Path)
    o = p.parse_args()
    o.dtype = getattr(torch, o.dtype)
    rows = {"lengths": lengths, "drift": drift}[o.what](o)
    given = {k: v if isinstance(v, (int, float, list)) else str(v) for k, v in vars(o).items() if v is not None}
    _common.finish(o.what, rows, given, o.out)


if __name__ == "__main__":
    main()
