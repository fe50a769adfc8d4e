"""RaaS (arXiv 2502.11147): evicts the pages whose last good score is oldest; pages of the prompt stay.

The family keeps per layer the bounds of the keys of every page (`Digests`, as other page methods), and the kept pages
with their time stamps (`PageSet`, views.py). Evicted pages stay in the pool. Later steps never read them. The next
prompt does, because prompts of all methods attend to everything.

A prompt, or a chunk of one:
    block_bounds          bounds of its pages
    bound_scores          the bound of every page for the last query
    keep_prompt_pages     all pages of the prompt stay; if there are too many, the pages with the largest bounds

A decode step:
    append                key and value of the new token
    block_bounds          bounds of a page that leaves the ring
    stamp_pages           this page takes the place of the page with the oldest stamp; the better half of the kept pages
                          gets a new stamp
    fetch                 the kept pages that the hot buffer lacks: all of them after a prompt, then one or none
    sparse_attention      ring and kept pages

The method is torchsparsekv/_methods/raas.py.
"""
