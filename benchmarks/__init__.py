"""Measurements: speed (`torchsparsekv bench`), quality (`eval`, `eval-text`), a model to measure on, and their report."""
