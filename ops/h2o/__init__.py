"""H2O (arXiv 2306.14048): the tokens with the most attention so far, and the latest tokens; all others are evicted.

The family keeps per layer the attention that every token received, and which tokens are kept (`HeavySet`, views.py).
Evicted tokens stay in the pool. Later steps never read them. The next prompt does, because prompts of all methods
attend to everything.

A prompt, or a chunk of one:
    add_prompt_attention    the attention that the queries of the prompt pay to every token; it may wait for the device
    keep_heaviest           choose the tokens that stay

A decode step:
    append              key and value of the new token
    evict_lightest      a token that leaves the ring takes the place of the kept token with the least attention
    fetch               the kept tokens that the hot buffer lacks: all of them after a prompt, then one or none
    sparse_attention    ring and kept tokens
    add_attention       the attention that this step paid to each of them

The method is torchsparsekv/_methods/h2o.py.
"""
