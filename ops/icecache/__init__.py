"""IceCache: a tree over the keys of each kv head, whose nodes own pages of similar tokens.

A page is a block of the pool. Per kv head the family keeps a `Tree` (inner nodes: the promoted tokens), the `Leaves`
(for every pool row a code of its key, and its node) and the pages that the last query selected. Views: views.py.

A prompt:
    top_tokens_of_last_queries  the tokens that the last queries look for; only where layers share and heads are matched
    plant_tree                  adds the tokens that leave the ring to the tree, and returns their order in the pool
    share_prompt                in a sharing layer, instead of plant_tree: matches heads and copies the order

A decode step, between `append` and `fetch`:
    insert_page                 adds a page of tokens that leaves the ring to the tree and to the pages of their nodes
    visit_nodes                 scores the nodes, and finds the threshold above which a node is expanded
    page_peaks                  the largest q.k of every page, over the tokens under expanded nodes
    best_pages                  the best pages of each query head, merged round-robin over the query heads of a kv head;
                                where its CUDA kernel does not fit, the launches of top_blocks and union_pages
    share_step                  in a sharing layer, instead of these four: copies the selection and the rows of tokens

A selecting layer has the tree. The sharing layers after it store their tokens in the same order and attend to the
pages that it selected, head by head (`SharedSelection`).

_tree.py has what plant_tree and insert_page share: levels, nearest nodes, spans of pages. _residual.py has the codes of
leaves, which these two write and page_peaks reads. Names that end in _tl are the Triton twins of torch functions.

Paper: IceCache (ICLR 2026), sections 3.3 and 4, appendices B and C.
"""
