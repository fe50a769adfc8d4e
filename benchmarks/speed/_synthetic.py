"""Synthetic keys and queries with the structure that makes retrieval work, and an option for how fast attention moves.

Keys: runs of tokens share a topic. Noise and a few outlier channels are added. The first tokens are sinks, which have a
part of every topic. Queries: they follow one topic for a while and drift within it. Sometimes they jump to another.
So a selection of the best blocks changes a little at every step and much at a jump, and hit rates are neither 0 nor 1.
"""
from dataclasses import dataclass

import torch
from torch import Tensor

COMMON = 36.0  # the length of what queries of all topics have in common, if they do: three times that of a topic
SINKS = 4  # no method of the benchmarks retrieves them: they stay on the device


@dataclass(frozen=True)
class Topics:
    """`tokens_per_topic` about the retrieval budget: then one topic fills a selection and a jump replaces all of it."""

    heads: int
    dim: int
    topics: int
    group: int = 1  # query heads per kv head
    run: int = 64
    noise: float = 0.7
    seed: int = 0

    def _generator(self, salt: int, device) -> torch.Generator:
        return torch.Generator(device).manual_seed(self.seed * 1_000_003 + salt)

    def centres(self, device) -> Tensor:
        x = torch.randn(self.topics, self.heads, self.dim, generator=self._generator(1, device), device=device)
        return torch.nn.functional.normalize(x, dim=-1) * self.dim**0.5

    def outliers(self, device) -> Tensor:
        x = torch.zeros(self.heads, self.dim, device=device)
        channels = torch.randint(0, self.dim, (self.heads, 3), generator=self._generator(2, device), device=device)
        return x.scatter_(1, channels, 6.0)

    def keys(self, batch: int, begin: int, end: int, device, dtype) -> Tensor:
        """[batch, heads, end - begin, dim] of the tokens at those positions."""
        g = self._generator(begin + 3, device)
        runs = torch.arange(begin, end, device=device) // self.run
        topic = (runs * 2_654_435_761 % 4_294_967_291) % self.topics  # a fixed hash: the same from any chunk
        centres = self.centres(device)
        centre = centres[topic].transpose(0, 1)[None]
        centre[:, :, : max(0, SINKS - begin)] = centres.sum(0)[:, None]  # for any query about as good as its topic
        noise = torch.randn(batch, self.heads, end - begin, self.dim, generator=g, device=device) * self.noise
        return (centre + noise + self.outliers(device)[:, None]).to(dtype)

    def _common(self, many: int, device) -> Tensor:
        x = torch.randn(many + 1, self.heads, self.dim, generator=self._generator(7, "cpu"))
        return (torch.nn.functional.normalize(x, dim=-1) * COMMON).to(device)

    def queries(self, steps: int, locality: float, device, dtype, turning: float | None = None) -> Tensor:
        """[steps, heads * group, dim]. locality 1: one topic for ever; 0: another topic at every step.

        Queries of real models are alike from step to step whatever they find (cosines of 0.8 and more). With `turning`
        so are these: they have much in common, which changes at this share of the jumps and stays at the others.
        """
        g = self._generator(5, "cpu")
        centres, common = self.centres(device), None if turning is None else self._common(steps, device)
        topic, turns, drift = 0, 0, torch.randn(self.heads, self.dim, generator=g)
        out = []
        for _ in range(steps):
            if torch.rand((), generator=g) < (1 - locality):
                topic = int(torch.randint(0, self.topics, (), generator=g))
                turns += common is not None and bool(torch.rand((), generator=g) < turning)
            drift = locality * drift + (1 - locality**2) ** 0.5 * torch.randn(self.heads, self.dim, generator=g)
            q = centres[topic] + 0.5 * drift.to(device)
            out.append(q if common is None else q + common[turns])
        q = torch.stack(out).repeat_interleave(self.group, 1)
        own = torch.randn(q.shape[1:], generator=g).to(device) * 0.2  # heads of a group are alike, not the same
        return (q + own).to(dtype)
