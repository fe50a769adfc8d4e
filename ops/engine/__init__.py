"""Serving engines: the stages of a page method over block tables, for requests that share one pool.

What the family keeps per layer: one pool of blocks for all requests, a digest of each block, and with the pool in host
memory one hot buffer (`SharedHot`, views.py). Nothing is kept per row of a batch: with each call the engine says where
new tokens go, and which blocks a request has (`Requests`). The law of what is always attended to is in tables.py.

A prompt, or a chunk of one:
    write_tokens        keys and values of the new tokens, into the rows that the engine gave them
    filled_bounds       digests of the blocks that they fill
    table_prompt        exact attention of one request over its past and its new tokens

A decode step, of all requests at once:
    write_tokens        the new token of each request
    filled_bounds       digests of the blocks that they fill
    table_scores        scores of the blocks of each request
    top_blocks          the best places in the table of each request
    list_blocks         ids and fills of all blocks that are attended to: sinks, newest blocks, selected blocks
    fetch_shared        blocks that the hot buffer lacks (with the pool in host memory only)
    listed_attention    attention over the listed blocks

top_blocks is of ops/select/, digests and scores are made by functions of block_bounds and bound_scores. The caller is
torchsparsekv/engines/_blocks.py.
"""
