"""Benchmarks of speed (`bench`) and of quality (`eval`, `eval-text`, `board`), the recall model, and tables."""
