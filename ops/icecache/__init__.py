"""IceCache: a tree over the keys of each kv head; its leaves are pages of similar tokens."""
