"""How an op is declared, which of its kernels runs, and what kernels share.

signature.py reads the schema of an op off the annotations of its reference. registry.py registers it with torch.
chain.py picks the implementation: CUDA C++ (cuda.py), Triton (triton.py), torch's kernels or the reference.
Kernels share side_stream.py, grid_barrier.py, fp8.py and hash.py; check.py holds a check that many ops make.
"""
