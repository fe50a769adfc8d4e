"""The Lloyd-Max quantiser of a coordinate of a uniform unit vector in R^m: 8 magnitudes of least mean squared error.

If u is uniform on the unit sphere of R^m, u_j^2 ~ Beta(1/2, (m-1)/2). With |u_j| = sin(x), x has the density
cos(x)^(m-2) on [0, pi/2] up to a constant: smooth for every m >= 2, and sin(x) cos(x)^(m-2) has a closed integral. So
Lloyd-Max needs one numerical integral, of a smooth function. The quantiser depends on m alone and is computed once.
"""
import functools
import math

import torch
from torch import Tensor

PANELS = 64  # of Simpson's rule, per cell


def _mass(edges: Tensor, m: int) -> Tensor:
    """The integral of cos^(m-2) over each cell, between `edges` in radians."""
    fraction = torch.linspace(0, 1, 2 * PANELS + 1, dtype=torch.float64)
    simpson = torch.full_like(fraction, 2.0)
    simpson[1::2], simpson[0], simpson[-1] = 4.0, 1.0, 1.0
    width = edges.diff()
    x = edges[:-1, None] + width[:, None] * fraction
    return (x.cos().clamp(min=0) ** (m - 2) * simpson).sum(-1) * width / (6 * PANELS)


def _first_moment(edges: Tensor, m: int) -> Tensor:
    """The integral of sin cos^(m-2) over each cell."""
    return -(edges.cos().clamp(min=0) ** (m - 1)).diff() / (m - 1)


@functools.cache
def quantiser(m: int, count: int = 8) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """(thresholds, levels): `count` magnitudes, and the thresholds halfway between neighbours."""
    if m < 2 or count < 2:
        raise ValueError(f"need m >= 2 and at least two levels, got m={m}, {count} levels")
    levels = ((torch.arange(count, dtype=torch.float64) + 0.5) / count) ** 1.5
    inner = (levels[1:] + levels[:-1]) / 2
    ends = torch.tensor([0.0, math.pi / 2], dtype=torch.float64)
    for _ in range(20000):  # a fixed point, reached in a few hundred rounds
        edges = torch.cat([ends[:1], inner.asin(), ends[1:]])
        levels = _first_moment(edges, m) / _mass(edges, m)
        before, inner = inner, (levels[1:] + levels[:-1]) / 2
        if float((inner - before).abs().max()) < 1e-13:
            break
    return tuple(inner.tolist()), tuple(levels.tolist())


@functools.cache
def polynomial(m: int) -> tuple[float, ...]:
    """Coefficients c0..c7 of the polynomial in t - 3.5 that takes the value of level t for t = 0..7.

    Kernels evaluate it instead of reading a table: 7 multiply-adds are faster than a gather or a tree of selects.
    """
    levels = torch.tensor(quantiser(m)[1], dtype=torch.float64)
    t = torch.arange(8, dtype=torch.float64) - 3.5
    return tuple(torch.linalg.solve(t[:, None] ** torch.arange(8, dtype=torch.float64), levels).tolist())
