"""MagicPIG: a sample of tokens by locality-sensitive hashing, weighted so that attention to the sample estimates
attention to all tokens.

A key has a code of `bits` signs in each of `tables` tables (_planes.py). A query head samples the tokens whose codes
equal its own in two tables or more. The chance that a token is sampled follows from the angle between query and key.
Attention subtracts the logarithm of this chance from the logit of a sampled token. The mean key is subtracted from a
key before the key is hashed.

A prompt:
    flush_ring        tokens in the ring go to the pool
    hash_prompt       the mean key, and the codes of all keys that left the ring
    store_prompt      the tokens into pool and ring
    prompt_attention  exact attention

A decode step:
    append            the new token into the ring, rows that leave the ring into the pool
    hash_keys         the codes of the keys that leave the ring
    find_collisions   the codes of the queries, for each token the table in which its codes match the second time, and
                      how many tables the budget has room for; three launches
    top_blocks        the sample
    fetch             the tokens into the hot buffer
    sample_bias       minus the logarithm of the chances of the sampled tokens
    sparse_attention  ring and hot buffer, with these numbers added to the logits
"""
