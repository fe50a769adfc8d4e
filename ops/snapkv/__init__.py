"""SnapKV (arXiv 2404.14469): the tokens of a prompt that its last queries attended to most, and no other tokens of it.

The family keeps per layer: the observation window (queries of the last tokens of the prompt, `Observed`) and the kept
tokens (`SnapSet`, views.py). The pool still has all tokens: the next prompt chooses from everything.

A prompt:
    observe             the queries of its last tokens
    snap_tokens         choose the tokens that stay; it may wait for the device

A decode step:
    append              key, value and query of the new token
    keep_leaving        tokens that leave the ring join the kept ones while there is room
    fetch               the kept tokens that the hot buffer lacks: all of them after a prompt, then few
    sparse_attention    ring and kept tokens

`Observed` and observe are shared with PRKV. The method is torchsparsekv/_methods/snapkv.py.
"""
