"""The options of an engine: the method and the home of keys and values, checked before memory is allocated."""
from collections.abc import Mapping
from dataclasses import dataclass

from torchsparsekv._methods._pages import PageMethod
from torchsparsekv.method import as_int, make_method

PLACES = ("device", "host")
METHODS = ("arkvale", "pagemean", "quest")  # methods whose whole index is per block, so that requests can share blocks


@dataclass(frozen=True)
class Options:
    """method: the method with its hyper-parameters.
    kv: where keys and values are, "device" (in the engine's own cache) or "host" (in pinned host memory).
    host_gib: how many GiB of host memory may be used. None: most of what is free.
    """

    method: PageMethod
    kv: str
    host_gib: float | None


def read_options(given: object, block_size: int) -> Options:
    """Options from `{"method": ..., "kv": ..., "host_gib": ..., NAME: ...}`; `block_size` is the engine's."""
    if not isinstance(given, Mapping):
        raise TypeError(f'torchsparsekv needs additional_config={{"torchsparsekv": {{"method": ...}}}}, got {given!r}')
    hyper = {name: as_int(value) for name, value in given.items()}
    name, kv, host_gib = hyper.pop("method", None), hyper.pop("kv", "device"), hyper.pop("host_gib", None)
    if name not in METHODS:
        raise ValueError(f"torchsparsekv: method must be one of {', '.join(METHODS)}, got {name!r}")
    if kv not in PLACES:
        raise ValueError(f"torchsparsekv: kv must be one of {', '.join(PLACES)}, got {kv!r}")
    if host_gib is not None and (kv != "host" or not isinstance(host_gib, int | float) or not host_gib > 0):
        raise ValueError(f'torchsparsekv: host_gib is a positive number of GiB, with kv="host", got {host_gib!r}')
    if hyper.setdefault("block_size", block_size) != block_size:
        raise ValueError(
            f"torchsparsekv: block_size is that of the engine, {block_size}, got {hyper['block_size']}; "
            "give it to the engine"
        )
    method = make_method(name, **hyper)
    if method.prefetch_async is not None:
        raise ValueError(f"torchsparsekv: an engine has no prefetch_async, got {method.prefetch_async!r}: leave it out")
    if method.estimate_rest is not False:
        raise ValueError(f"torchsparsekv: an engine has no estimate_rest, got {method.estimate_rest!r}: leave it out")
    assert isinstance(method, PageMethod)
    return Options(method, kv, None if host_gib is None else float(host_gib))
