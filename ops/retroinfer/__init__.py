"""RetroInfer (arXiv 2505.02922): the best clusters are retrieved, the next best are estimated by their means.

The clusters are units of ops/clusters: runs of pool rows with a mean key each. This family adds the mean key and value
of each unit, which stand for its tokens where it is not retrieved.

A prompt, or a chunk of one:
    flush_ring        tokens in the ring go to the pool
    cluster_ring      those become clusters
    cluster_keys      k-means of the new keys: units, and the order of the tokens in the pool
    unit_means        the means of the new units
    store_prompt      the tokens, in that order, into pool and ring
    prompt_attention

A decode step:
    append            key and value of the new token
    cluster_ring      tokens that leave the ring become clusters
    unit_means        their means; returns at once if none is new
    pick_units        the rows of the best units
    fetch             these rows into the hot buffer
    estimate_units    how many tokens of each of the next best units are left; three launches
    sparse_attention  ring, hot buffer, and the means of these units

The method is torchsparsekv/_methods/retroinfer.py.
"""
