"""Qwen: biases (2) or normalised queries and keys (3) change nothing at the seam."""
from torchsparsekv.patches._family import Family

Family(model_types=("qwen2", "qwen3"))
