"""Models of which the seam need know nothing more: their norms, rotations, experts and fused projections are theirs."""
from torchsparsekv.patches._family import Family

Family(
    model_types=(
        "apertus", "arcee", "bitnet", "cohere", "ernie4_5", "ernie4_5_moe", "gemma", "glm", "glm4",
        "glm4_moe", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "minimax_m2",
        "ministral", "ministral3", "mixtral", "olmo", "olmo2", "olmoe", "phi", "phi3", "phimoe",
        "seed_oss", "smollm3", "stablelm", "starcoder2",
    )
)  # fmt: skip
Family(model_types=("nemotron",), since="5.13")  # its attention goes through the dispatch since then
