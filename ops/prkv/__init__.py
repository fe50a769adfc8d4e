"""PRKV: a static set of tokens at the front of the pool, beside pages that every step selects."""
