"""The table of models, made from the families. `torchsparsekv models` prints it, docs/reference/models.md keeps it."""
from collections.abc import Sequence

from torchsparsekv.patches import all_families
from torchsparsekv.patches._family import MULTIMODAL, Family
from torchsparsekv.patches._refused import BY_REASON

HEAD = """# Supported models

A model is found by the `model_type` of its config. Layers with full attention run the method. Layers with a sliding
window attend exactly to that window, whatever the method. If a cache is not longer than the window, these layers run
the method too. transformers runs linear attention and convolutions itself.
"""


def markdown() -> str:
    rows: dict[Family, list[str]] = {}
    for name, family in all_families().items():
        rows.setdefault(family, []).append(name)
    known = [("model types", "layers", "transformers")]
    for family, names in sorted(rows.items(), key=lambda x: x[1]):
        known.append((_code(names), family.about, f">= {family.since}" if family.since else "any supported"))
    images = (
        f"Models with images, patched as a whole: {_code(MULTIMODAL)}. `gemma3` takes text only: tokens of its images "
        "attend to each other in both directions, which is refused.\n"
    )
    refused = [("refused", "because"), *((_code(sorted(names)), why) for why, names in BY_REASON.items())]
    return "\n".join([HEAD, _table(known), images, _table(refused)])


def _code(names) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{' --- |' * len(rows[0])}", *lines[1:]]) + "\n"
