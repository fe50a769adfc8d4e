"""ClusterKV and LouisKV: groups of similar or neighbouring tokens, each known by its mean key and retrieved whole.

A group is a unit (views.py): a run of pool rows and its centroid. Clusters of a prompt are units from the start.
Generated tokens become units when they leave the ring: LouisKV cuts them into segments, ClusterKV clusters them, or
with its hyper-parameter `run` cuts them into segments of `run` tokens. The budget counts tokens. Units are retrieved
best first; of the unit that exceeds the budget only the first rows are taken.

A prompt (LouisKV, and ClusterKV with `run`):
    flush_ring        tokens in the ring go to the pool
    close_segments    segments that leave the ring become units; what stays is cut anew
    cluster_keys      k-means of the prompt's keys: units, and the order of its tokens in the pool
    store_prompt      the tokens, in that order, into pool and ring
    prompt_attention  exact attention

A prompt (ClusterKV without `run`): cluster_ring instead of close_segments.

A decode step (LouisKV, and ClusterKV with `run`):
    append            the new token into the ring, rows that leave the ring into the pool
    find_boundary     decide whether to retrieve; if so, finished segments become units
    pick_units        the rows of the best units; two launches, which return at once without a boundary
    fetch             the rows into the hot buffer
    sparse_attention  ring and hot buffer

A decode step (ClusterKV without `run`): cluster_ring instead of find_boundary; every step retrieves.

The k-means of cluster_keys and cluster_ring is defined in _kmeans.py; its kernels for stretches of a prompt are in
_kmeans_kernels.py, those for a whole prompt in _kmeans_whole.py. close_segments and find_boundary share _segments.py.
"""
