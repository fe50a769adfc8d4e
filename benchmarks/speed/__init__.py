"""Benchmarks of speed: `torchsparsekv bench NAME` runs the module NAME."""
