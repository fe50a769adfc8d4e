"""The tree of IceCache, as its ops take it."""
from typing import Annotated, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.signature import FLOATS, Of
from torchsparsekv.ops.store.rows import PACKED
from torchsparsekv.ops.store.views import I32, Fill, PerHead

AskedPages: TypeAlias = Annotated[Tensor, Of("batch heads asked", I32)]


class Tree(NamedTuple):
    """The inner nodes of a tree of keys: node 0 is the root, every other one is a token that was promoted.

    A node of level l has as children tokens of level l - 1, and all tokens of the highest level are children of the
    root. key: the promoted keys. code, scale: the same in 8 bits a channel, as queries are compared with them
    (ops/icecache/_tree.py: coded). norm2: their squared norms. parent: the node above. level: from 2 on; 0 for the root.
    open_page: the page that takes the node's next generated token, -1 for none. radius2: the largest squared norm of a
    key so far, the c^2 of the lifted space. done_count: of the programs that share a head, how many are through.
    """

    key: Annotated[Tensor, Of("batch heads nodes dim", "kv")]
    code: Annotated[Tensor, Of("batch heads nodes dim", PACKED)]
    scale: Annotated[Tensor, Of("batch heads nodes", torch.float32)]
    norm2: Annotated[Tensor, Of("batch heads nodes", torch.float32)]
    parent: Annotated[Tensor, Of("batch heads nodes", I32)]
    level: Annotated[Tensor, Of("batch heads nodes", I32)]
    open_page: Annotated[Tensor, Of("batch heads nodes", I32)]
    node_count: PerHead
    page_count: PerHead
    radius2: Annotated[Tensor, Of("batch heads", torch.float32)]
    done_count: PerHead
    placed: Annotated[Tensor, Of("batch heads page", I32)]


class Leaves(NamedTuple):
    """By pool row: the key of the token there, and the node it is a child of; of a token that is a node itself -2 less
    the number of that; -1 where no retrievable token is. `fill`: how many rows of a page hold one; they are its first.
    span: of the nodes in a page the least in the lower 16 bits and the greatest in the upper ones (ops/icecache/_tree.py:
    spans_of).

    key: the key itself, and then there are no scales; or 4-bit codes of what it differs by from its node in 8 bits,
    nothing where it is a node itself (ops/icecache/_residual.py).
    """

    key: Annotated[Tensor, Of("batch heads rows width", (*FLOATS, torch.uint8))]
    scale: Annotated[Tensor, Of("batch heads rows groups", torch.float16)]
    node: Annotated[Tensor, Of("batch heads rows", I32)]
    fill: Fill
    span: Annotated[Tensor, Of("batch heads blocks", I32)]


class Followed(NamedTuple):
    """Of a layer that follows another, by its own kv heads: the head of that one that each follows, -1 for that of the
    same number; the pages which that one chose, and how many rows of each page hold a token."""

    heads: PerHead
    asked: AskedPages
    fill: Fill


class Promotion(NamedTuple):
    """Which tokens rise in the tree, up to `levels`. every > 0: a seeded one of every so many. every = 0: each with
    `chance` of 2^31. What is drawn is a function of seed, position and level."""

    every: int
    chance: int
    levels: int
    seed: int


class View(NamedTuple):
    """How many nodes of a level a query expands: `share` millionths of those there are, but `least` at least and `most`
    at most; and nodes below number `least` anyway, the root among them."""

    share: int
    least: int
    most: int
    levels: int


class Visited(NamedTuple):
    """The products of nodes with the query heads of their kv head: of those that one reaches, which are the children of
    nodes that it expands, and -inf for the others. And the least product of nodes that it expands, of those that have
    tokens as children; the first nodes are expanded whatever theirs are. What visit_nodes returns stands for one."""

    products: Annotated[Tensor, Of("batch heads nodes group", torch.float32)]
    least: Annotated[Tensor, Of("batch heads group", torch.float32)]
