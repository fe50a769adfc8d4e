"""Model types that are refused by name, with the reason. The checks of modules would not refuse all of them."""

BY_REASON = {
    "its cache holds latents (MLA), and torchsparsekv's cache holds keys and values": (
        "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "longcat_flash", "minicpm3", "mistral4", "youtu",
    ),
    "an indexer of its own chooses the tokens that it attends to": (
        "deepseek_v32", "deepseek_v4", "glm_moe_dsa", "minimax_m3_vl", "minimax_m3_vl_text",
    ),
    "some of its layers use the keys and values of other layers": (
        "gemma3n", "gemma3n_text", "gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text",
    ),
    "its state-space or linear layers are not tested beside torchsparsekv's cache": (
        "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear", "mamba", "mamba2", "minimax",
        "nemotron_h", "olmo_hybrid", "recurrent_gemma", "rwkv", "xlstm", "zamba", "zamba2",
    ),
    "some of its layers attend within chunks of the context": ("llama4", "llama4_text"),
    "its keys and values are of different sizes": ("mimo_v2_flash",),
    "its attention does not go through transformers' dispatch": ("bloom", "falcon", "mpt"),
}  # fmt: skip
REFUSED = {model_type: reason for reason, types in BY_REASON.items() for model_type in types}
