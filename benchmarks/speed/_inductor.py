"""Settings of the compiler that a benchmark can set: NAME=VALUE of torch._inductor.config."""
import json
from collections.abc import Sequence
from typing import Any


def settings(texts: Sequence[str]) -> dict[str, Any]:
    """`coordinate_descent_tuning=true` as {"coordinate_descent_tuning": True}; what the compiler has not is refused."""
    import torch._inductor.config as config

    known, found = config.get_config_copy(), {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or name not in known:
            raise ValueError(f"inductor must be NAME=VALUE of torch._inductor.config, got {text!r}")
        if name in found:
            raise ValueError(f"inductor sets {name} twice")
        try:
            found[name] = json.loads(value)
        except json.JSONDecodeError:
            found[name] = value
        if known[name] is not None and type(found[name]) is not type(known[name]):
            raise ValueError(f"inductor: {name} must have the type of its default, {known[name]!r}, got {value!r}")
    return found
