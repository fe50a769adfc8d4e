"""Index: update what a method keeps of the keys that leave the ring. A decode step runs it after append.

`block_bounds` summarises every block by a volume around its keys. `copy_keys` copies every key in fp8. `observe` keeps
the last queries of a prompt; at a decode step `append` keeps the query.
"""
