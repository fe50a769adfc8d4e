"""Models that need no data of their own here: a patch does not touch norms, rotations, experts and projections."""
from torchsparsekv.patches._family import Family

Family(
    model_types=(
        "apertus", "arcee", "bitnet", "cohere", "ernie4_5", "ernie4_5_moe", "gemma", "glm", "glm4",
        "glm4_moe", "granite", "granitemoe", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "minimax_m2",
        "ministral", "ministral3", "mixtral", "olmo", "olmo2", "olmoe", "phi", "phi3", "phimoe",
        "seed_oss", "smollm3", "stablelm", "starcoder2",
    )
)  # fmt: skip
Family(model_types=("nemotron",), since="5.13")  # earlier versions bypass transformers' attention dispatch
