"""The names that transformers gives to the cache, and the versions of transformers that the tests run with."""
import inspect

import transformers
from packaging.version import Version
from transformers.masking_utils import create_causal_mask

NAMES = ("cache", "past_key_values")  # up to 5.23 the second; later versions take it as an old name of the first
NAME = next(name for name in NAMES if name in (*inspect.signature(create_causal_mask).parameters, NAMES[-1]))
TESTED = "5.24"  # the newest minor version that the tests run with; newer versions are accepted if they fit


def name_in(kwargs: dict) -> str | None:
    """The name under which these arguments of a forward pass have a cache."""
    return next((name for name in NAMES if kwargs.get(name) is not None), None)


def cache_in(kwargs: dict):
    """The cache among the arguments of a forward pass, None if there is no cache."""
    return kwargs.get(name_in(kwargs) or NAME)


def renamed(kwargs: dict) -> dict:
    """The same arguments, with the cache under the name of the installed transformers. Two caches stay two, of
    which transformers takes one."""
    name = name_in(kwargs)
    if name in (None, NAME) or kwargs.get(NAME) is not None:
        return kwargs
    return {key: value for key, value in kwargs.items() if key not in NAMES} | {NAME: kwargs[name]}


def blamed() -> str:
    """A hint for refusals: the installed transformers is newer than the tested versions. Empty if it is not."""
    now = transformers.__version__
    if Version(now).release[:2] <= Version(TESTED).release[:2]:
        return ""
    return f"; this is transformers {now}, and torchsparsekv is tested up to {TESTED}: install transformers=={TESTED}.*"
