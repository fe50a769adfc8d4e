"""PQCache: single tokens, found by product quantization of their keys.

A key is cut into `spaces` parts. The codebook of a head has `centroids` vectors for each part. At each prompt k-means
learns them from the keys of the row. The code of a part is the number of its nearest centroid. A step computes the
products of its queries with all centroids once. The estimated product with a key is then the sum of one table entry for
each part.

A prompt:
    flush_ring        tokens in the ring go to the pool
    learn_codebook    centroids from all keys after the sinks, and codes of all keys that left the ring
    store_prompt      the tokens into pool and ring
    prompt_attention  exact attention

A decode step:
    append            the new token into the ring, rows that leave the ring into the pool
    assign_codes      the codes of the keys that leave the ring
    code_logits       tables of products, and the estimated logit of every token and query head; two launches
    softmax_scores    the sum of the softmaxes of the query heads of a kv head; two launches
    top_blocks        the best tokens
    fetch             the tokens into the hot buffer
    sparse_attention  ring and hot buffer

learn_codebook takes k-means from ops/clusters and codes from assign_codes.
"""
