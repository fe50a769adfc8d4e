"""Options that several benchmarks have: arguments of patch(), and hyper-parameters as METHOD.NAME=VALUE."""
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypeVar

from torchsparsekv.method import Method, Offload, PoolType, all_methods, hyper_parameters, make_method, renamed

PoolChoice: TypeAlias = Literal["auto", PoolType]
R = TypeVar("R", bound="Rows")
EQUAL = ("budget", "sink", "window")  # of all methods in a comparison: options of their own


def option(default: Any, about: str) -> Any:
    """A field and its line in --help."""
    return field(default=default, metadata={"help": about})


def parse(texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """`quest.block_size=32` as {"quest": {"block_size": 32}}."""
    out: dict[str, dict[str, Any]] = {}
    for text in texts:
        where, equals, value = text.partition("=")
        method, dot, name = where.partition(".")
        name = next(iter(renamed({name: value})))
        if not (equals and dot and method in all_methods() and name in hyper_parameters(all_methods()[method])):
            raise ValueError(f"hyper must be METHOD.NAME=VALUE with a method's own hyper-parameter, got {text!r}")
        if name in EQUAL:
            raise ValueError(f"{name} is the same for all methods: set it by its own option and not by {text!r}")
        if name in out.get(method, {}):
            raise ValueError(f"hyper sets {method}.{name} twice")
        try:
            out.setdefault(method, {})[name] = json.loads(value)
        except json.JSONDecodeError:
            out.setdefault(method, {})[name] = value
    return out


def check_measured(texts: Sequence[str], methods: Sequence[str], done: str = "hyper sets") -> None:
    """Raises where a hyper-parameter is of a method that is not measured."""
    unused = sorted({name for text in texts for name in parse([text])} - set(methods))
    if unused:
        raise ValueError(f"{done} {', '.join(unused)}, which is not measured; methods: {', '.join(methods)}")


def changes(also: Sequence[str]) -> list[tuple[str, str]]:
    """The method of each METHOD.NAME=VALUE that is another row, and that text."""
    return [(name, text) for text in also for name in parse([text])]


def check_also(also: Sequence[str], methods: Sequence[str]) -> None:
    check_measured(also, methods, "also changes")
    if repeats(also):
        raise ValueError(f"also must be different values, got {','.join(also)}")


def said(hyper: dict[str, Any]) -> dict[str, str]:
    """Of hyper-parameters, for a row of results, files without folders; nothing where a method has the defaults."""
    named = {k: Path(v).name if isinstance(v, str) else v for k, v in hyper.items()}
    return {"hyper": ", ".join(f"{k}={v}" for k, v in named.items())} if hyper else {}


def pool_told(pool_dtype: str) -> dict[str, str]:
    """The argument of `patch` for the pool's type."""
    return {} if pool_dtype == "auto" else {"pool_dtype": pool_dtype}


def at_least(options: Any, **least: int) -> None:
    """Raises where a number, or one of several, is lower than that; without any, too."""
    for name, bound in least.items():
        value = getattr(options, name)
        values = value if isinstance(value, tuple) else (value,)
        if min(values, default=bound - 1) < bound:
            raise ValueError(f"{name} must be at least {bound}, got {min(values, default='nothing')}")


def repeats(values: Sequence) -> bool:
    return len(set(values)) < len(values)


def different(options: Any, *names: str) -> None:
    """Raises where an option of several values has none, or one twice."""
    for name in names:
        values = getattr(options, name)
        if not values or repeats(values):
            raise ValueError(f"{name} must be one or more different values, got {','.join(map(str, values)) or 'none'}")


@dataclass(frozen=True)
class Setup:
    """How every method of a comparison is patched in."""

    budget: int = 1024
    sink: int = 64
    window: int = 256
    skip_layers: int = 2
    offload: Offload = "host"
    pool_dtype: PoolChoice = "auto"
    hyper: tuple[str, ...] = ()

    def check(self, methods: Sequence[str]) -> None:
        """Raises where a method is unknown, or refuses what it would be told, or a hyper-parameter has no method."""
        if repeats(methods):
            raise ValueError(f"methods must be different, got {', '.join(methods)}")
        check_measured(self.hyper, methods)
        for name in methods:
            self.method(name)

    def method(self, name: str) -> Method:
        return make_method(name, **self._method(name))

    def patch(self, name: str) -> dict[str, Any]:
        """The arguments of `patch` for this method. The dense baseline is dense in all layers, with its pool on
        the device in the model's type."""
        where = {"skip_layers": self.skip_layers, "offload": self.offload, **pool_told(self.pool_dtype)}
        return self._method(name) | ({"skip_layers": 0, "offload": "device"} if name == "full" else where)

    def told(self, name: str) -> dict[str, str]:
        """Its own hyper-parameters, for a row of results; nothing where it has the defaults."""
        return said(parse(self.hyper).get(name, {}))

    def recorded(self, methods: Sequence[str]) -> dict[str, Any]:
        """The options as a file holds them: with every hyper-parameter as it acts, since defaults may change later."""
        return dataclasses.asdict(self) | {"acts": {name: self.method(name).effective() for name in methods}}

    def _method(self, name: str) -> dict[str, Any]:
        return {k: getattr(self, k) for k in EQUAL} | parse(self.hyper).get(name, {})


@dataclass(frozen=True)
class Rows(Setup):
    """The rows of a table of decode steps: methods with their values, and what their steps select."""

    methods: tuple[str, ...] = ("quest",)
    also: tuple[str, ...] = option(
        (), "Adds a row of the table for each METHOD.NAME=VALUE, comma-separated: METHOD with this value."
    )
    locality: float = 0.95
    trace: str = option(
        "", "Instead of --locality: replay the selections of a real model, from a file of `torchsparsekv record`."
    )

    def asked(self: R) -> list[tuple[str, R]]:
        """The methods in the order of their rows, each with the options that it has there."""
        more = [(name, dataclasses.replace(self, hyper=(*self.hyper, text))) for name, text in changes(self.also)]
        return [*((name, self) for name in self.methods), *more]
