"""PRKV: a static set of single tokens in front of the pool, beside pages that every step selects.

The family keeps per layer: the observation window (queries of the latest tokens, `Observed`), the static set
(views.py), and if the method has one, an fp8 copy of all keys on the device (`Coarse`, ops/index/copy_keys.py).

A prompt:
    observe             the queries of its last tokens; the next step chooses anew
    block_bounds        digests of all blocks that left the ring, and the fp8 copy of their keys

A decode step of `prkv`:
    append              key, value and query of the new token
    update_static_set   digests of blocks that left; where a head is due: choose the set, move it to the front
    bound_scores        scores of all pages; the pages of the static set score +inf
    top_blocks          the best pages, the static ones first
    fetch               pages that the hot buffer lacks
    sparse_attention    ring and selected pages

With `static_ratio="auto"`, block_bounds and static_target run before update_static_set: the size of the set follows
from the keys of all blocks that left the ring, the newest blocks included. A static share of 0 runs none of the ops of
this folder.

A decode step of `prkv_static` keeps single tokens and moves nothing: append, copy_keys, choose_static, fetch,
sparse_attention.

update_static_set runs the functions of block_bounds, choose_static and relocate in one launch. All ops with phases meet
at the counters `StaticSet.barrier`. The methods are torchsparsekv/_methods/prkv.py and prkv_static.py.
"""
