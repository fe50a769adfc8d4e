"""How fast: `torchsparsekv bench NAME` runs a module of these."""
