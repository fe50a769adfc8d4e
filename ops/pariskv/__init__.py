"""ParisKV: single tokens, found by centroid votes and ranked by 4-bit codes of the keys."""
