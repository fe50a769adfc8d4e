"""Models that have linear attention or convolutions between their attention layers: transformers keeps that state."""
from torchsparsekv.patches._family import Family

Family(model_types=("lfm2", "lfm2_moe"), about="convolutions and full attention in turn", since="5.13")
Family(
    model_types=("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), since="5.13",
    about="linear and full attention in turn",
)  # fmt: skip
