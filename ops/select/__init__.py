"""Stage 2: decide which blocks a query attends to."""
