"""RetroInfer (arXiv 2505.02922): the best clusters are retrieved, the next best are estimated by their means.

A cluster is a unit of ops/clusters: neighbouring pool rows and a centroid. This family also keeps the mean key and the
mean value of each unit. They stand for the tokens of a unit that is estimated.

A prompt, or a chunk of one:
    flush_ring        tokens in the ring go to the pool
    cluster_ring      these tokens become clusters
    cluster_keys      k-means of the new keys: units, and the order of the tokens in the pool
    unit_means        the means of the new units
    store_prompt      the tokens, in that order, into pool and ring
    prompt_attention  exact attention

A decode step:
    append            key and value of the new token
    cluster_ring      tokens that leave the ring become clusters
    unit_means        the means of the new clusters; returns at once if there is none
    pick_units        the rows of the best units
    fetch             these rows into the hot buffer
    estimate_units    the next best units, and how many of their tokens are not retrieved; three launches
    sparse_attention  ring, hot buffer, and the means of the estimated units

The method is torchsparsekv/_methods/retroinfer.py.
"""
