"""What the measurements of recall share: structured keys, the exact choice, options and rows.

Keys are synthetic but shaped like those of a model: an offset with outlier channels, a decaying spectrum, topics that
last for a stretch of tokens, rotary positions. Queries look for one or two topics, the heads of a group partly for the
same ones.
"""
import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from torchsparsekv_benchmarks import _results

STRETCH = 48  # tokens a topic lasts, on average
NOISE = 0.7  # of a key around its topic, in norms of a topic


def rope(x: Tensor, position: Tensor, theta: float = 5e5) -> Tensor:
    """Rotary positions in the half-split layout; x [..., tokens, d]."""
    half = x.shape[-1] // 2
    angle = position[:, None] * theta ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


class Keys(Protocol):
    """Keys [heads, total, d] and queries to them, synthetic or of a model, and where numbers are drawn from."""

    @property
    def keys(self) -> Tensor: ...
    @property
    def g(self) -> torch.Generator: ...
    @property
    def heads(self) -> int: ...
    @property
    def group(self) -> int: ...
    @property
    def total(self) -> int: ...
    @property
    def d(self) -> int: ...
    def query(self, end: int) -> Tensor: ...


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


def shares(wanted: Tensor, got: Tensor, n: int) -> float:
    hit = torch.zeros(*got.shape[:-1], n, dtype=torch.bool).scatter_(-1, got.long(), True)
    return float(hit.gather(-1, wanted).float().mean())


def logits(stream: Keys, q: Tensor, end: int) -> Tensor:
    """[heads, group, tokens]; q [heads * group, d]."""
    return q.unflatten(0, (stream.heads, -1)) @ stream.keys[:, :end].transpose(1, 2) * stream.d**-0.5


def exact(stream: Keys, q: Tensor, end: int, k: int):
    """(attention weight of each token, its top-k, the top-k of the mean query)."""
    x = logits(stream, q, end)
    mass = x.softmax(-1).mean(1)
    return mass, mass.topk(k).indices, x.mean(1).topk(k).indices


def show(row: dict) -> None:
    print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


def parser(about: str | None, dtype: str) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768])
    p.add_argument("--queries", type=int, default=8)
    p.add_argument("--heads", type=int, default=4)
    p.add_argument("--group", type=int, default=4)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--dtype", default=dtype)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    p.add_argument("--out", type=Path)
    return p


def given(o: argparse.Namespace) -> dict:
    """The options, as a file of results has them."""
    return {k: v if isinstance(v, (int, float, list)) else str(v) for k, v in vars(o).items() if v is not None}


def finish(name: str, rows: list[dict], o: argparse.Namespace) -> None:
    _results.finish(name, rows, given(o), o.out)
