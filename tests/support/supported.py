"""Tiny models of the types that the installed transformers has."""
import pytest
import transformers
from models import MAX_LENGTH, tiny
from packaging.version import Version

from torchsparsekv.patches import all_families

FULL = dict(max_length=MAX_LENGTH, budget=MAX_LENGTH, skip_layers=1, sink=8, window=6, block_size=4)


def supported(family: str, **overrides):
    since = all_families()[family].since
    if since and Version(transformers.__version__) < Version(since):
        pytest.skip(f"supported since transformers {since}")
    return tiny(family, **overrides)
