"""Random tokens of two rows that enter a layer in parts."""
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from layer import Layer


@dataclass
class Past:
    """Random tokens of two rows, the first padded; `sizes` says how they come in."""

    length: int
    pad: int
    group: int
    sizes: list
    seed: int
    whole: bool  # whole numbers: every sum is exact whatever its order, and there are many ties

    heads = 2
    dim = 16

    def __post_init__(self):
        g = torch.Generator().manual_seed(self.seed)
        draw = lambda h, n: torch.randn(2, h, n, self.dim, generator=g)  # noqa: E731
        few = lambda t: (2 * t).round().clamp(-2, 2) if self.whole else t  # noqa: E731
        self.q = few(draw(self.heads * self.group, self.length))
        self.k, self.v = few(draw(self.heads, self.length)), draw(self.heads, self.length)
        self.query = few(draw(self.heads * self.group, 1))

    def fill(self, method) -> Layer:
        layer = Layer(method, batch=2, heads=self.heads, group=self.group, dim=self.dim, left_pad=[self.pad, 0])
        layer.feed_parts(self.q, self.k, self.v, self.sizes)
        return layer

    def heads_of_rows(self):
        """(row, kv head, its real keys [tokens, dim], the group's queries [group, dim]) in double precision."""
        for b, first in enumerate((self.pad, 0)):
            for h in range(self.heads):
                mine = slice(h * self.group, (h + 1) * self.group)
                yield b, h, self.k[b, h, first:].double(), self.query[b, mine, 0].double()


@st.composite
def pasts(draw, whole=False, most=90):
    sizes = draw(st.lists(st.one_of(st.just(1), st.integers(2, 40)), min_size=1, max_size=12))
    while sum(sizes) > most:
        sizes.pop()
    sizes = sizes or [most]
    length = sum(sizes)
    prompt, group = draw(st.integers(0, length - 1)), draw(st.sampled_from([1, 2, 3, 4]))
    return Past(length, prompt, group, sizes, draw(st.integers(0, 999)), whole)
