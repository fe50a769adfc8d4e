"""ClusterKV and LouisKV: clusters of prompt keys and segments of generated tokens, each with a mean key."""
