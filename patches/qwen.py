"""Qwen: the biases of Qwen2, the normalised queries and keys of Qwen3, and experts make no difference to a patch."""
from torchsparsekv.patches._family import Family

Family(model_types=("qwen2", "qwen2_moe", "qwen3", "qwen3_moe"))
Family(
    model_types=("qwen2_vl_text", "qwen2_5_vl_text", "qwen3_vl_text"), about="full attention, in the models with images"
)
