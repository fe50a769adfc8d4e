"""Stage 1: keep the store and the index up to date."""
