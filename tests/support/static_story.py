"""Random tokens that enter a layer with a static set, and the set by the definition of the paper."""
import layer
import torch
from layer import SINK, Layer, frontier

HEADS, DIM = 2, 16


def small(name: str, **hyper):
    """By the keys themselves where nothing else is said: such a set can be held against its definition."""
    return layer.small(name, **({} if name == "arkvale" else {"update_from": "keys"}) | hyper)


class Story:
    """Random tokens of rows that begin at `pads`; the first channel of a value is the token's position."""

    def __init__(self, length: int, group: int = 2, pads=(0, 3), seed: int = 0):
        g = torch.Generator().manual_seed(seed)
        draw = lambda h: torch.randn(len(pads), h, length, DIM, generator=g)  # noqa: E731
        self.pads, self.group, self.length = list(pads), group, length
        self.q, self.k, self.v = 3 * draw(HEADS * group), draw(HEADS), draw(HEADS)
        self.v[..., 0] = torch.arange(length) - torch.tensor(pads)[:, None, None]

    def layer(self, method) -> Layer:
        return Layer(method, batch=len(self.pads), heads=HEADS, group=self.group, dim=DIM, left_pad=self.pads)

    def feed(self, layer: Layer, first: int, end: int, *, whole: bool = False):
        """Tokens from `first` on: as one prompt, or one by one; the last answer."""
        parts = [(first, end)] if whole else [(i, i + 1) for i in range(first, end)]
        for a, b in parts:
            out = layer.feed(self.q[:, :, a:b], self.k[:, :, a:b], self.v[:, :, a:b])
        return out

    def heads(self):
        return [(b, h) for b in range(len(self.pads)) for h in range(HEADS)]

    def wanted(self, b: int, h: int, at: int, window: int, k: int, block: int = 1) -> list[int]:
        """The static set by the paper's definition, `at` tokens having come (padding counted)."""
        pad, mine = self.pads[b], slice(h * self.group, (h + 1) * self.group)
        end = frontier(at - pad, block=block)
        queries = self.q[b, mine, max(pad, at - window) : at].double()
        z = queries @ self.k[b, h, pad : pad + end].double().T * DIM**-0.5
        score = z.softmax(-1).mean((0, 1))[SINK:]
        return sorted((score.argsort(descending=True)[:k] + SINK).tolist())
