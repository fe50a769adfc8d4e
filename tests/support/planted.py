"""A key planted among random tokens, and whether a method finds it."""
import torch
from layer import BLOCK, SINK, Layer, frontier

LENGTH = 160
LAST = frontier(LENGTH) - 1
# where the key is planted, and how many of the LENGTH tokens are prompt (the others are decoded one by one)
PLANTED = {
    "first page": (SINK, 120),
    "end of the first page": (SINK + BLOCK - 1, 120),
    "middle": (70, 120),
    "last page of the prompt": (frontier(120) - 1, 120),
    "in the ring when the prompt ended": (118, 120),
    "decoded": (131, 120),
    "last page of all": (LAST, 120),
    "everything in one prompt": (LAST, LENGTH - 1),
    "everything decoded": (70, 1),
}


def finds(method, position: int, prompt: int) -> bool:
    """Of 160 tokens one has a key along the last query and a value unlike the others': does the output show it?"""
    g = torch.Generator().manual_seed(position)
    dim, heads, group = 32, 2, 2
    noise = lambda h: torch.randn(1, h, LENGTH, dim, generator=g)  # noqa: E731
    q, k, v = noise(heads * group), 0.5 * noise(heads), 0.1 * noise(heads)
    wanted = torch.nn.functional.normalize(torch.randn(1, heads, dim, generator=g), dim=-1)
    k[:, :, position], v[:, :, position] = 12 * wanted, 5.0
    q[:, :, -1] = 12 * wanted.repeat_interleave(group, 1)  # its logit is 25, those of the others are below 10
    layer = Layer(method, heads=heads, group=group, dim=dim)
    out = layer.feed_parts(q, k, v, [prompt] + [1] * (LENGTH - prompt))[-1]
    assert int(layer.state.lengths.ring_begin[0]) > position, "still in the ring, where no method could miss it"
    return bool((out > 4.9).all())
