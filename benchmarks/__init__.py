"""Measurements, one module each; `torchsparsekv bench NAME` runs them."""
