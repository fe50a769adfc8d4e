"""Keys shaped like those of a model, without a model: outlier channels, a decaying spectrum, topics, rotary positions.

A topic lasts for a stretch of tokens. A query looks for one or two topics, and the heads of a group share some of them.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

STRETCH = 48  # tokens of a topic, in the mean
NOISE = 0.7  # of a key around its topic, in norms of a topic
OUTLIERS, OFFSET = 4, 8.0  # channels with an offset that all keys share, and its size


def rope(x: Tensor, position: Tensor, theta: float = 5e5) -> Tensor:
    """Rotary positions in the half-split layout; x [..., tokens, dim]."""
    half = x.shape[-1] // 2
    angle = position[:, None] * theta ** (-torch.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


@dataclass
class StructuredKeys:
    """`keys` [heads, total, dim] of `heads` kv heads, and queries [heads * group, dim] to them."""

    total: int
    heads: int = 4
    group: int = 4
    dim: int = 128
    topics: int = 128
    seed: int = 0

    def __post_init__(self):
        g = self.g = torch.Generator().manual_seed(self.seed)
        spectrum = torch.arange(1, self.dim + 1).float() ** -0.5
        basis = torch.linalg.qr(torch.randn(self.heads, self.dim, self.dim, generator=g)).Q
        self.basis = basis * spectrum[:, None] * 3.2
        self.centres, offset, self.query_offset = self.draw(self.topics), self.draw(1), self.draw(1)
        for h in range(self.heads):
            offset[h, 0, torch.randperm(self.dim, generator=g)[:OUTLIERS]] += OFFSET
        change = torch.rand(self.total, generator=g) < 1 / STRETCH
        named, token = torch.randint(self.topics, (self.total,), generator=g), torch.arange(self.total)
        self.topic = named[(change.long() * token).cummax(0).values]
        self.keys = rope(offset + self.centres[:, self.topic] + NOISE * self.draw(self.total), token)

    def draw(self, n: int) -> Tensor:
        return torch.randn(self.heads, n, self.dim, generator=self.g) @ self.basis

    def query(self) -> Tensor:
        """Each head looks for the topic of one token; half of them look for a common one."""
        n = self.total
        common, parts = torch.randint(n, (1,), generator=self.g), []
        for _ in range(self.group):
            own = torch.randint(n, (1,), generator=self.g)
            token = common if torch.rand((), generator=self.g) < 0.5 else own
            newest = self.centres[:, self.topic[-1:]]
            want = self.centres[:, self.topic[token]] + 0.4 * newest + 0.5 * self.draw(1)
            parts.append(rope(self.query_offset + want, torch.tensor([n])))
        return torch.cat(parts, 1).flatten(0, 1)

    def logits(self, q: Tensor) -> Tensor:
        """[heads, group, tokens]; q [heads * group, dim]."""
        return q.unflatten(0, (self.heads, -1)) @ self.keys.transpose(1, 2) * self.dim**-0.5


def recalled(wanted: Tensor, chosen: Tensor, n: int) -> float:
    """Share of the wanted ids [heads, k] that are among the chosen ones."""
    found = torch.zeros(*chosen.shape[:-1], n, dtype=torch.bool).scatter_(-1, chosen.long(), True)
    return float(found.gather(-1, wanted).float().mean())
