"""Models with linear attention or convolutions in some layers. transformers keeps the state of these layers."""
import torch

from torchsparsekv.patches._family import Family, Kept


def convolution(config) -> Kept:
    return {"convolution": ((config.hidden_size, config.conv_L_cache), None)}


def delta_rule(config) -> Kept:
    heads, k, v = config.linear_num_value_heads, config.linear_key_head_dim, config.linear_value_head_dim
    channels = 2 * config.linear_num_key_heads * k + heads * v
    return {
        "convolution": ((channels, config.linear_conv_kernel_dim), None),
        "linear attention": ((heads, k, v), torch.float32),
    }


Family(
    model_types=("lfm2", "lfm2_moe"), since="5.13", about="alternating convolutions and full attention",
    kept=convolution,
)  # fmt: skip
Family(
    model_types=("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), since="5.13",
    about="alternating linear and full attention", kept=delta_rule,
)  # fmt: skip
