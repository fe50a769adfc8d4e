"""Where torchsparsekv meets transformers. A family file says only what its models do differently."""
import importlib
import pkgutil

from torchsparsekv.patches._family import FAMILIES, Family


def all_families() -> dict[str, Family]:
    """Every known model_type; a file in patches/ is all it takes to add one."""
    for m in pkgutil.iter_modules(__path__):
        if not m.name.startswith("_"):
            importlib.import_module(f"{__name__}.{m.name}")
    return dict(sorted(FAMILIES.items()))
