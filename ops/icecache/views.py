"""The tensors of IceCache, grouped as its ops take them."""
from typing import Annotated, NamedTuple, TypeAlias

import torch
from torch import Tensor

from torchsparsekv.ops._machinery.signature import FLOATS, Of
from torchsparsekv.ops.store.rows import PACKED
from torchsparsekv.ops.store.views import I32, Fill, PerHead

SelectedPages: TypeAlias = Annotated[Tensor, Of("batch heads selected", I32)]


class Tree(NamedTuple):
    """The inner nodes of the tree of each kv head. Node 0 is the root; every other node is a promoted token.

    Leaves are level 1. The children of a node of level l are tokens of level l - 1. Tokens of the highest level are
    children of the root.

    key: the key of each node.
    code, scale: the key in 8 bits a channel, which queries are multiplied with (_tree.py: encode_nodes).
    norm2: the squared norm of the key.
    parent: the number of the node above.
    level: 2 or more; 0 for the root.
    open_page: the page that takes the next generated token of the node, -1 for none.
    node_count: nodes in use, with the root.
    page_count: how many pages nodes have opened. These pages lie after the first `region` pool rows (insert_page.py).
    max_norm2: the largest squared norm of any key so far: c^2 of the paper's lifted space.
    search_done_count: how many of the programs that search for a kv head have finished; 0 between launches.
    inserted_rows: the pool rows that took the tokens of the last inserted page.
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
    max_norm2: Annotated[Tensor, Of("batch heads", torch.float32)]
    search_done_count: PerHead
    inserted_rows: Annotated[Tensor, Of("batch heads page", I32)]


class Leaves(NamedTuple):
    """What the index keeps of every pool row and of every page.

    key: of a row, 4-bit codes of the key minus its parent's 8-bit key (_residual.py); or the key itself.
    scale: of a row, the scales of the codes; empty where `key` has keys.
    node: of a row, the parent of its token: a node number. A token that is node u itself has -2 - u (_tree.py:
        self_mark). A row without a retrievable token has -1.
    fill: of a page, how many rows hold a token; these rows come first.
    span: of a page, its smallest parent in the lower 16 bits and its largest in the upper 16 (_tree.py: spans_of).
    """

    key: Annotated[Tensor, Of("batch heads rows width", (*FLOATS, torch.uint8))]
    scale: Annotated[Tensor, Of("batch heads rows groups", torch.float16)]
    node: Annotated[Tensor, Of("batch heads rows", I32)]
    fill: Fill
    span: Annotated[Tensor, Of("batch heads blocks", I32)]


class SharedSelection(NamedTuple):
    """The selection of a sharing layer, which it copies from the selecting layer.

    source_heads: for each kv head, the kv head of the selecting layer that it copies; -1: the head of the same number.
    pages: the selected pages.
    fill: of a page, how many rows hold a token.
    """

    source_heads: PerHead
    pages: SelectedPages
    fill: Fill


class Promotion(NamedTuple):
    """Which tokens are promoted to the next level. The draw is a function of seed, position and level.

    every: promote one token out of this many. 0: promote by `chance` instead.
    chance: promote each token with probability chance / 2^31.
    levels: the levels of the tree, including the level of the leaves.
    """

    every: int
    chance: int
    levels: int
    seed: int


class FieldOfView(NamedTuple):
    """How many nodes of each level a query expands: a share of those in use, between a minimum and a maximum.

    share: in millionths.
    min_nodes: the minimum. Nodes below this number are always expanded, the root among them.
    max_nodes: the maximum.
    levels: the levels of the tree.
    """

    share: int
    min_nodes: int
    max_nodes: int
    levels: int


class Visited(NamedTuple):
    """The result of visit_nodes.

    products: the product of each query head of the group with each node that it reaches (a child of an expanded node);
        -inf for the other nodes, 0 for the root.
    threshold: a node of level 2 is expanded if its product is not below this.
    """

    products: Annotated[Tensor, Of("batch heads nodes group", torch.float32)]
    threshold: Annotated[Tensor, Of("batch heads group", torch.float32)]
