"""The store: where the tokens of a layer live, and the ops that move them. Of other stages it imports only
ops/rest/views.py.

views.py names the tensors, rows.py lays a token out in memory.

A decode step: `advance` (once for all layers of the same ring) adds one token to the lengths; `append` writes the token
into the ring and copies the tokens that leave the ring into the pool.
A prompt: `advance`; then, in each layer, `flush_ring` copies the ring into the pool and `store_prompt` writes the new
tokens into both.
"""
