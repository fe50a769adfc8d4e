"""The table of families: a tiny config for each model type. A new one is a new row here; the tests need no edit."""
from cases import FAMILIES as FIRST
from cases import SIZES

EXPERTS = {
    **SIZES, "num_experts": 4, "num_experts_per_tok": 2, "num_local_experts": 4, "moe_intermediate_size": 32,
}  # fmt: skip
# Windows that prompts and steps of the tests go beyond, in every other layer; linear layers in their places.
WINDOW = {
    **SIZES, "num_hidden_layers": 4, "sliding_window": 13, "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
CONV = {**SIZES, "num_hidden_layers": 4, "layer_types": ["conv", "full_attention"] * 2}
LINEAR = {
    **SIZES, "num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
SHARED = {"shared_expert_intermediate_size": 32}
# Of these every one is run with every method; of the others with one, for nothing but the model differs.
WITH_EVERY_METHOD = tuple(FIRST)

FAMILIES = {
    **FIRST,
    "apertus": SIZES,
    "arcee": SIZES,
    "bitnet": SIZES,
    "cohere": SIZES,
    "cohere2": WINDOW,
    "ernie4_5": SIZES,
    "ernie4_5_moe": {**EXPERTS, "moe_num_experts": 4, "moe_k": 2},
    "exaone4": WINDOW,
    "gemma": SIZES,
    "gemma2": {**WINDOW, "attn_logit_softcapping": 0.5},  # so low that it shows
    "gemma3_text": WINDOW,
    "glm": SIZES,
    "glm4": SIZES,
    "glm4_moe": {**EXPERTS, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
    "gpt_oss": {**EXPERTS, **WINDOW},
    "granite": SIZES,
    "granitemoe": EXPERTS,
    "helium": SIZES,
    "hunyuan_v1_dense": SIZES,
    "hunyuan_v1_moe": {**EXPERTS, "moe_topk": 2},
    "lfm2": {k: v for k, v in CONV.items() if k != "head_dim"},
    "lfm2_moe": {k: v for k, v in {**EXPERTS, **CONV, "num_dense_layers": 1}.items() if k != "head_dim"},
    "minimax_m2": EXPERTS,
    "ministral": SIZES,
    "ministral3": SIZES,
    "mixtral": EXPERTS,
    "nemotron": SIZES,
    "olmo": SIZES,
    "olmo2": SIZES,
    "olmo3": WINDOW,
    "olmoe": EXPERTS,
    "phi": SIZES,
    "phi3": SIZES,
    "phimoe": EXPERTS,
    "qwen2_moe": {**EXPERTS, **SHARED},
    "qwen3_5_moe_text": {**EXPERTS, **LINEAR, **SHARED},
    "qwen3_5_text": LINEAR,
    "qwen3_moe": EXPERTS,
    "qwen3_next": {**EXPERTS, **LINEAR, **SHARED},
    "seed_oss": SIZES,
    "smollm3": SIZES,
    "stablelm": SIZES,
    "starcoder2": SIZES,
}
