"""The part of the library that knows transformers. A family file says only what its models do differently."""
import importlib
import pkgutil

from torchsparsekv.patches._family import FAMILIES, Family


def all_families() -> dict[str, Family]:
    """The family of every known model_type. A new file in this folder adds a family."""
    for m in pkgutil.iter_modules(__path__):
        if not m.name.startswith("_"):
            importlib.import_module(f"{__name__}.{m.name}")
    return dict(sorted(FAMILIES.items()))
