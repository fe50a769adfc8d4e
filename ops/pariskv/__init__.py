"""ParisKV: single tokens, found in two stages by a compressed copy of every key.

Per key the index keeps (views.py, Codes): in every subspace of m rotated coordinates the id of the nearest of 2^m sign
patterns, a 4-bit code per coordinate, and a weight. Nothing is learned from data: the rotation (_srht.py) and the
quantiser (_lloyd_max.py) are fixed, so they cannot drift.

A prompt:
    flush_ring        tokens in the ring go to the pool
    encode_keys       the keys that leave the ring: ids, codes, weights, and counts of the ids
    store_prompt      the tokens into pool and ring
    prompt_attention  exact attention

A decode step:
    append            the new token into the ring, rows that leave the ring into the pool
    encode_keys       the keys that leave the ring; in most steps none, and it returns at once
    centroid_votes    the rotated query, and how many votes every centroid gets
    rank_by_votes     stage I: the keys with the most votes become candidates; two launches
    rerank            stage II: estimates of <k, q> of the candidates, from codes and weights
    top_blocks        the best estimates; in rows of few keys every key
    fetch             the tokens into the hot buffer
    sparse_attention  ring and hot buffer

In an engine rows share one pool. There encode_tokens replaces encode_keys, and count_ids counts the ids of each row
before centroid_votes. rank_by_votes and rerank find keys through the table of blocks.

centroid_votes, rank_by_votes and rerank have kernels in CUDA C++ (csrc/), and in Triton for other shapes. encode_keys
and rerank share the codes (_code.py); encode_keys and centroid_votes share the rotation.
"""
