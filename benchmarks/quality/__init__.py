"""Benchmarks of answers: tasks x lengths x methods x budgets, with the same samples for every method."""
