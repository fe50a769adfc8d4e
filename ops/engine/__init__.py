"""Serving engines: the same stages over block tables, for requests that share one pool."""
