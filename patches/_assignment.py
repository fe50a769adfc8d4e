"""Choose a method for each layer from the arguments of patch(). All errors come before a model is touched."""
import dataclasses
from collections.abc import Mapping
from typing import NamedTuple

from torchsparsekv.method import (
    COMMON,
    Method,
    all_methods,
    as_int,
    check_skip_layers,
    layer_method,
    make_method,
    renamed,
)
from torchsparsekv.patches._family import Layer

SKIP_LAYERS = 2


class Assignment(NamedTuple):
    """The methods of a model's layers."""

    method: Method  # the method of layers without an entry
    methods: tuple[Method | None, ...]  # one per layer; None: a layer without keys and values
    skip_layers: int
    notes: tuple[str, ...]  # defaults that do not fit, and the values used instead
    warned: tuple[str, ...]  # notes that patch() also gives as warnings


def choose(
    method: Method, given: dict, shapes: tuple[Layer | None, ...], entries: Mapping | None, skip_layers: int | None,
    max_length: int | None, limit: int,
) -> Assignment:  # fmt: skip
    """The method of each layer. `given`: the hyper-parameters of `method` that the user named. `limit`: the most tokens
    of a cache."""
    notes: list[str] = []
    layers = len(shapes)
    if skip_layers is None:
        skip_layers = min(SKIP_LAYERS, layers - 1)
        if skip_layers < SKIP_LAYERS and method.traits.attends != "everything":
            notes.append(f"skip_layers {skip_layers}: the default of {SKIP_LAYERS} would skip all {layers} layers")
    else:
        skip_layers = as_int(skip_layers)
        check_skip_layers(skip_layers, layers)
    wanted = _checked(entries, layers)
    method = _fitted(method, given, max_length, limit, notes)
    dense = make_method("full")
    fixed = [_fixed(shape, limit) for shape in shapes]
    chosen = [dense if i < skip_layers else method for i in range(layers)]
    for i, entry in wanted.items():
        if fixed[i]:
            raise ValueError(f"layers[{i}]: this layer {fixed[i]}, so no method can run there")
        try:
            own, hyper = _entry(entry, method, given)
            chosen[i] = _fitted(own, hyper, max_length, limit, notes)
        except (TypeError, ValueError) as e:
            raise type(e)(f"layers[{i}]: {e}{_whose(entry, str(e))}") from e
    runs = _placed([_own(shape) if why else m for shape, m, why in zip(shapes, chosen, fixed)])
    idle = all(m is None or m.traits.attends in ("everything", "window") for m in runs)
    if any(fixed) and method.traits.attends != "everything" and idle:
        windowed = sum(map(bool, fixed))
        rest = ", the others are dense" if windowed < layers else ""
        notes.append(
            f"{method.name} runs in no layer: {windowed} of {layers} attend to a sliding window or keep no keys and "
            f"values{rest}"
        )
    elif idle and runs != tuple(chosen):
        notes.append(f"{method.name} runs in no layer: all {layers} layers are dense")
    every = dict.fromkeys(m for m in (method, *runs) if m is not None)
    warned = tuple(_saves_nothing(m, max_length) for m in every if _whole_rows(m, max_length))
    return Assignment(method, runs, skip_layers, (*dict.fromkeys(notes), *warned), warned)


def _placed(methods: list[Method | None]) -> tuple[Method | None, ...]:
    """The method of every layer, after `Method.in_layers`."""
    runs = [*methods]
    for cls in dict.fromkeys(type(m) for m in methods if m is not None):
        for i, m in cls.in_layers({i: m for i, m in enumerate(methods) if type(m) is cls}, len(methods)).items():
            runs[i] = m
    return tuple(runs)


def _whole_rows(method: Method, max_length: int | None) -> bool:
    """True if a retrieving method attends to all tokens of every sequence that fits a cache of `max_length`."""
    return max_length is not None and method.traits.attends == "selected" and max_length <= method.dense_threshold


def _saves_nothing(method: Method, max_length: int | None) -> str:
    return (
        f"nothing will be saved: {method.name} attends to every token of a sequence of up to {method.dense_threshold} "
        f"tokens (sink {method.sink}, window {method.window}, budget {method.budget}), and max_length is {max_length}"
    )


def _fixed(shape: Layer | None, limit: int) -> str:
    """What a layer does whatever the method; empty if the layer attends to all tokens of a cache."""
    if shape is None:
        return "has no keys and values"
    if shape.window is not None and shape.window < limit:
        return f"attends to a sliding window of {shape.window} tokens"
    return ""


def _own(shape: Layer | None) -> Method | None:
    return None if shape is None or shape.window is None else layer_method("window", window=shape.window)


def _checked(entries: Mapping | None, layers: int) -> dict[int, object]:
    """The entries of `layers`, with Python integers as keys."""
    if entries is None:
        return {}
    if not isinstance(entries, Mapping):
        raise TypeError(f"layers must be a dict of layer index to method, got {entries!r}")
    found: dict[int, object] = {}
    for key, entry in entries.items():
        i = as_int(key)
        if type(i) is not int or not 0 <= i < layers:
            raise ValueError(f"layers has an entry for layer {key!r}; this model has layers 0 to {layers - 1}")
        if i in found:
            raise ValueError(f"layers has two entries for layer {i}")
        found[i] = entry
    return found


def _entry(entry, method: Method, given: dict) -> tuple[Method, dict]:
    """The method of one entry, and the hyper-parameters that the user named for it."""
    if isinstance(entry, str):
        entry = {"method": entry}
    if not isinstance(entry, Mapping):
        raise TypeError(f"an entry is the name of a method or a dict of hyper-parameters, got {entry!r}")
    if wrong := [name for name in entry if not isinstance(name, str)]:
        raise TypeError(f"the keys of an entry are names of hyper-parameters, got {', '.join(map(repr, wrong))}")
    hyper = renamed({name: as_int(value) for name, value in entry.items()})
    name = hyper.pop("method", method.name)
    if not isinstance(name, str):
        raise TypeError(f"method must be a name, got {name!r}")
    if name == method.name:
        hyper = {**given, **hyper}
    else:
        hyper = {**_handed_on(name, given), **hyper}
    return make_method(name, **hyper), hyper


def _handed_on(name: str, given: dict) -> dict:
    """The budget, sink and window of patch() that an entry with another method inherits."""
    if name not in all_methods():
        return {}
    attends = make_method(name).traits.attends
    used = () if attends == "everything" else COMMON if attends == "selected" else ("sink", "window")
    return {n: given[n] for n in used if n in given}


def _whose(entry: object, said: str) -> str:
    """A hint for an error in budget, sink or window that the entry inherited from patch()."""
    for name in COMMON:
        if f"{name} must" in said and not (isinstance(entry, Mapping) and name in entry):
            return f"; the {name} is from patch(): give this layer its own {name}"
    return ""


def _fitted(method: Method, given: dict, max_length: int | None, limit: int, notes: list[str]) -> Method:
    """Refuse values that the user gave and that do not fit. Lower a default budget."""
    if method.traits.attends == "everything":
        return method
    most = f"max_length {max_length}" if max_length is not None else f"the {limit} tokens that the model takes"
    for name in COMMON:
        if name == "budget" and max_length is None:  # a budget above the limit says: all tokens
            continue
        if name in given and getattr(method, name) > limit:
            raise ValueError(f"{name} {getattr(method, name)} is above {most}")
    if method.budget <= limit or "budget" in given:
        return method
    budget = max(limit // method.block_size, 1) * method.block_size
    try:
        fitted = dataclasses.replace(method, budget=budget)
    except ValueError:  # the method refuses so low a budget
        notes.append(f"{method.name} keeps its default budget of {method.budget}, which holds all tokens of a cache")
        return method
    more = f"its default of {method.budget} is above the {limit} tokens of a cache"
    notes.append(f"{method.name} has budget {budget}: {more}")
    return fitted


def described(method: Method, beside: Method) -> str:
    """The name of a method and its differing hyper-parameters: from `beside` if both are the same method, else from the
    defaults."""
    usual = beside if type(beside) is type(method) else type(method)()
    differs = [
        f"{f.name}={getattr(method, f.name)!r}"
        for f in dataclasses.fields(method)
        if getattr(method, f.name) != getattr(usual, f.name)
    ]
    return f"{method.name}({', '.join(differs)})" if differs else method.name
