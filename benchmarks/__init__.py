"""Measurements: speed (`torchsparsekv bench`), quality (`eval`, recall), a model to measure on, and their report."""
