"""The options of an engine: the method and the home of keys and values, checked before memory is allocated."""
from collections.abc import Mapping
from dataclasses import dataclass

from torchsparsekv.method import LEAST_REST, Method, all_methods, as_int, hyper_parameters, make_method

PLACES = ("device", "host", "auto")


@dataclass(frozen=True)
class Options:
    """method: the method with its hyper-parameters.
    block_size: tokens of a block of the engine. The method selects whole blocks, or single tokens.
    kv: where keys and values are: "device" (in the engine's own cache), "host" (in pinned host memory), or "auto"
        ("device" if it has room for as many blocks as the host; else in pinned host memory, and on the device too
        while there is room).
    host_gib: how many GiB of host memory may be used. None: most of what is free.
    device_gib: with kv="auto", how many GiB of device memory hold keys and values. None: most of
        what vLLM may still use.
    """

    method: Method
    block_size: int
    kv: str
    host_gib: float | None
    device_gib: float | None


def serving_methods() -> list[str]:
    """The methods whose index requests can share: all of it is about single blocks."""
    return [name for name, cls in all_methods().items() if not cls().traits.no_engine]


def _check_method(name: object) -> None:
    known = serving_methods()
    if name in known:
        return
    others = all_methods()
    why = f": it {others[name]().traits.no_engine}" if isinstance(name, str) and name in others else ""
    raise ValueError(f"torchsparsekv: method must be one of {', '.join(known)}, got {name!r}{why}")


def read_options(given: object, block_size: int) -> Options:
    """Options from `{"method": ..., "kv": ..., "host_gib": ..., NAME: ...}`; `block_size` is the engine's."""
    if not isinstance(given, Mapping):
        raise TypeError(f'torchsparsekv needs additional_config={{"torchsparsekv": {{"method": ...}}}}, got {given!r}')
    hyper = {name: as_int(value) for name, value in given.items()}
    name, kv = hyper.pop("method", None), hyper.pop("kv", "device")
    gib = {"host_gib": hyper.pop("host_gib", None), "device_gib": hyper.pop("device_gib", None)}
    _check_method(name)
    if kv not in PLACES:
        raise ValueError(f"torchsparsekv: kv must be one of {', '.join(PLACES)}, got {kv!r}")
    for field, value in gib.items():
        where = ("host", "auto") if field == "host_gib" else ("auto",)
        if value is not None and (kv not in where or not isinstance(value, int | float) or not value > 0):
            places = " or ".join(f'kv="{place}"' for place in where)
            raise ValueError(
                f'torchsparsekv: {field} is a positive number of GiB, with {places}, got {value!r} and kv="{kv}"'
            )
    if (
        "block_size" in hyper_parameters(all_methods()[name])
        and hyper.setdefault("block_size", block_size) != block_size
    ):
        raise ValueError(
            f"torchsparsekv: block_size is that of the engine, {block_size}, got {hyper['block_size']}; "
            "give it to the engine"
        )
    if block_size < 1 or block_size & (block_size - 1):
        raise ValueError(f"torchsparsekv: block_size of the engine must be a power of two, got {block_size}")
    method = make_method(name, **hyper)
    decided = ": max_num_seqs and device_gib decide"
    for field, none, why in (("prefetch_async", None, ""), ("hot_budgets", "auto", decided)):
        if (given_value := getattr(method, field)) != none:
            raise ValueError(f"torchsparsekv: an engine has no {field}{why}, got {given_value!r}: leave it out")
    if method.traits.no_engine:
        raise ValueError(f"torchsparsekv: {method} cannot run in an engine: it {method.traits.no_engine}")
    method = make_method(name, **hyper | {"estimate_rest": _group(method, block_size)})
    return Options(method, block_size, kv, *(None if value is None else float(value) for value in gib.values()))


def _group(method: Method, block_size: int) -> int | bool:
    """`estimate_rest` in an engine, where groups are blocks. "auto" is off if blocks cannot be groups, or are smaller
    than the groups of patch(): each group costs time."""
    given, plan = method.estimate_rest, method.ring_plan
    if not method.rest:
        return False
    if given not in ("auto", True, block_size):
        raise ValueError(
            f"torchsparsekv: in an engine the groups of estimate_rest are its blocks of {block_size} tokens, got "
            f"{given}: give true, or block_size={given} to the engine"
        )
    whole = block_size > 1 and not plan.sink % block_size and not plan.interval % block_size
    if given == "auto":
        return block_size if whole and block_size >= LEAST_REST else False
    if whole:
        return block_size
    raise ValueError(
        f"torchsparsekv: estimate_rest needs blocks of 2 tokens or more that divide sink {plan.sink} and the interval "
        f"{plan.interval} at which tokens leave the window, got blocks of {block_size}"
    )
