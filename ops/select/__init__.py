"""Select: decide which blocks of the pool a query attends to. A decode step runs it between the index and fetch.

First an op scores the blocks: `bound_scores` by their volumes, `softmax_scores` by softmaxes of estimated logits,
`attention_mass` by the true attention weights (it reads all keys), `random_scores` at random. Then `top_blocks` takes
the ids of the k best scores.
"""
