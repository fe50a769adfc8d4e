"""Serving engines: all that a step does apart from the choice of a method, for requests that share one pool.

The family keeps per layer: one pool of blocks for all requests, the index of a method by block, and, if the pool is in
host memory, one hot buffer (`SharedHot`, views.py). This family keeps nothing by row of the batch: with each call the
engine says where new tokens go, and which blocks a request has (`BlockTable` of ops/store/views.py). tables.py states
which tokens every step attends to.

A prompt, or a chunk of one:
    write_tokens        keys and values of the new tokens, into the rows that the engine gave them
    Method.written      page methods: filled_bounds, digests of blocks that become full; pariskv: encode_tokens
    filled_sums         sums of blocks that become full (only with the estimate of the rest)
    table_prompt        exact attention of one request over its past and its new tokens

A decode step, of all requests at once:
    write_tokens        the new token of each request
    Method.written      as above, and filled_sums
    Method.choose       the ops of the method, which take the block table: the best blocks or tokens of each request
    list_units          all units to attend to, by their place in the pool: sinks, newest units, selected units
    fetch_shared        the listed units that the hot buffer lacks (only if the pool is in host memory)
    listed_attention    attention over what is listed, and over the rest of each block

The caller is torchsparsekv/engines/_blocks.py.
"""
