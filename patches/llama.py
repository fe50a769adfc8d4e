"""Llama and the models that attend exactly like it."""
from torchsparsekv.patches._family import Family

Family(model_types=("llama", "mistral"))
