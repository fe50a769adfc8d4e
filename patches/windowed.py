"""Models with sliding windows in some layers, which run the window method (_assignment.py)."""
import dataclasses

from torchsparsekv.patches._family import Family, Layer, layer_of


def with_sinks(config, layer: int) -> Layer | None:
    said = layer_of(config, layer)
    return said and dataclasses.replace(said, sink_logits=True)


ALTERNATING = "alternating sliding windows and full attention"
Family(model_types=("cohere2", "exaone4", "gemma2", "gemma3_text", "olmo3"), about=ALTERNATING)
Family(model_types=("gpt_oss",), about=f"{ALTERNATING}; sink logits", layer=with_sinks)
