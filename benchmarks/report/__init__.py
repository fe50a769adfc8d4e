"""A page of figures from files of `eval` and `bench` (make.py), and the tables of the docs (tables.py)."""
