"""OmniKV (ICLR 2025): a few filter layers choose tokens, and the layers after a filter layer attend to its choice.

The family has no index. It keeps the tokens that a filter layer chose at this step, one set for all heads (`selected`).
A filter layer has its pool on the device and attends to all tokens.

A prompt adds no op.

A decode step of a filter layer:
    filter_scores       the score of every retrievable token, over all heads
    top_blocks          the best tokens
    dense_attention     attention of the filter layer itself

A decode step of a layer after it:
    fetch               the chosen tokens that its hot buffer lacks
    sparse_attention    ring and chosen tokens

The method is torchsparsekv/_methods/omnikv.py.
"""
