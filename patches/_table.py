"""The table of models, from what the families say: `torchsparsekv models` prints it, docs/models.md keeps it."""
from collections.abc import Sequence

from torchsparsekv.patches import all_families
from torchsparsekv.patches._family import MULTIMODAL, Family
from torchsparsekv.patches._refused import BY_REASON

HEAD = """# Supported models

By the `model_type` of a model's config. Layers that attend to everything run the method. Layers with a sliding window
attend to their window exactly, whatever the method, and keep no more than that; where a cache is no longer than the
window, they run the method too. Layers of linear attention and convolutions are left to transformers.
"""


def markdown() -> str:
    rows: dict[Family, list[str]] = {}
    for name, family in all_families().items():
        rows.setdefault(family, []).append(name)
    known = [("model types", "layers", "transformers")]
    for family, names in sorted(rows.items(), key=lambda x: x[1]):
        known.append((_code(names), family.about, f">= {family.since}" if family.since else "any supported"))
    images = (
        f"With images, patched as a whole: {_code(MULTIMODAL)}. Of `gemma3` text only: the tokens of an image see one "
        "another in both directions there, which is refused.\n"
    )
    refused = [("refused", "because"), *((_code(sorted(names)), why) for why, names in BY_REASON.items())]
    return "\n".join([HEAD, _table(known), images, _table(refused)])


def _code(names) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], f"|{' --- |' * len(rows[0])}", *lines[1:]]) + "\n"
