"""How an op is declared, which of its kernels runs, and what kernels share."""
