"""Benchmarks: speed (`torchsparsekv bench`), quality (`eval`, `eval-text`), a small model to run them on, tables."""
