"""ShadowKV: selects chunks of neighbouring tokens by the softmax of their mean keys, and always the chunks that their
mean key describes badly.

The mean key of a chunk, after rotation, is its landmark. A prompt marks outliers: the chunks with the least cosine
between a key and the landmark. Every step attends to the outliers, and to the chunks whose landmarks have the largest
softmax weight of any query head.

A prompt:
    flush_ring        tokens in the ring go to the pool
    keep_landmarks    the landmark of every chunk that leaves the ring, and the least cosine of a key to it
    mark_outliers     the chunks of the row with the least cosines
    store_prompt      the tokens into pool and ring
    prompt_attention  exact attention

A decode step:
    append            the new token into the ring, rows that leave the ring into the pool
    keep_landmarks    the same for a chunk that leaves the ring; in most steps no chunk leaves, and it returns at once
    landmark_logits   the products of all query heads and landmarks
    softmax_scores    the largest softmax of the query heads of a kv head; two launches
    top_blocks        the outliers and the best chunks
    fetch             the chunks into the hot buffer
    sparse_attention  ring and hot buffer

The paper keeps the keys as factors of low rank on the device, and fetches values alone. Here keys stay as they are, and
are fetched with their values.
"""
