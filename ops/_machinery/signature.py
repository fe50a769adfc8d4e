"""The signature of an op, read from the annotations of its reference: schema, changed arguments, shapes and types.

A parameter is a tensor (`Annotated[Tensor, Of(...)]`), a number, a list of numbers, or a view: a NamedTuple of tensors
and numbers that belong together (ops/store/views.py). `Changed[...]` marks a tensor or view that the op writes. The
dispatcher gets flat arguments named `view_field`; all code written by hand gets views.
"""
import inspect
import re
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_CHANGED = "changed"
_X = TypeVar("_X")
Changed = Annotated[_X, _CHANGED]
SymInt = Annotated[int, "SymInt"]  # a number that torch.compile may leave open
NUMBERS = {int: "int", float: "float", bool: "bool", list[int]: "int[]", SymInt: "SymInt"}


class Of(NamedTuple):
    """The shape of a tensor in words, and its type.

    A word is a number, a name, or a sum or difference without spaces ("units+1"). A name means the same size everywhere
    in the op; it may also be the name of a number argument. `dtype` is a type, a tuple of allowed types, or a name:
    tensors with the same name have the same floating-point type. Tensors are contiguous; with `strided` only the last
    dimension must be dense. `packed` is one more allowed type, and a function from the usual last size to the last size
    in this type. A tensor may be packed only if another tensor of the op fixes the name of its type and its usual last
    size.
    """

    shape: str
    dtype: torch.dtype | tuple[torch.dtype, ...] | str
    strided: bool = False
    packed: tuple[torch.dtype, Callable[[int], int]] | None = None


class Flat(NamedTuple):
    """One argument of the dispatcher. `said` is its name in error messages, such as `view.field`."""

    name: str
    said: str
    type: str
    of: Of | None
    optional: bool
    changed: bool


def _unwrapped(hint: Any) -> tuple[Any, bool, bool]:
    """The hint without its wrappers, whether it allows None, and whether it is marked as changed. Python 3.10 wraps the
    hint of a parameter whose default is None once more, in Optional."""
    optional = changed = False
    while True:
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            optional = True
            (hint,) = (x for x in typing.get_args(hint) if x is not type(None))
        elif typing.get_origin(hint) is Annotated and _CHANGED in hint.__metadata__:
            changed = True
            rest = [x for x in hint.__metadata__ if x != _CHANGED]
            hint = hint.__origin__
            for x in rest:
                hint = Annotated[hint, x]
        else:
            return hint, optional, changed


def is_view(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields")


def _flat(name: str, said: str, hint: Any, changed: bool) -> Flat:
    hint, optional, also = _unwrapped(hint)
    if hint in NUMBERS:
        return Flat(name, said, NUMBERS[hint], None, optional, False)
    if hint is Tensor:
        return Flat(name, said, "Tensor", None, optional, changed or also)
    ofs = [x for x in getattr(hint, "__metadata__", ()) if isinstance(x, Of)]
    if len(ofs) != 1:
        raise TypeError(
            f"parameter {said!r} of an op must be a view, a Tensor, Annotated[Tensor, Of(shape, dtype)], int, float, "
            f"bool or list[int], got {hint}"
        )
    return Flat(name, said, "Tensor", ofs[0], optional, changed or also)


class Parameter(NamedTuple):
    name: str
    view: type | None
    flat: tuple[Flat, ...]
    default: Any


class Signature:
    """The parameters of one op with their views, and the code that converts views to flat arguments and back."""

    def __init__(self, name: str, reference: Callable):
        hints = typing.get_type_hints(reference, include_extras=True)
        given = inspect.signature(reference).parameters
        for p in (*given, "return"):
            if p not in hints:
                what = "the result" if p == "return" else f"parameter {p!r}"
                raise TypeError(f"op {name!r}: the reference must annotate {what}: annotations are the signature")
        self.name, self.result = name, hints.pop("return")
        self.parameters = tuple(self._parameter(p, hints[p], given[p].default) for p in given)
        self.flat = tuple(f for p in self.parameters for f in p.flat)

    def _parameter(self, name: str, hint: Any, default: Any) -> Parameter:
        bare, _, changed = _unwrapped(hint)
        if not is_view(bare):
            return Parameter(name, None, (_flat(name, name, hint, changed),), default)
        fields = typing.get_type_hints(bare, include_extras=True)
        flat = tuple(_flat(f"{name}_{f}", f"{name}.{f}", fields[f], changed) for f in bare._fields)
        return Parameter(name, bare, flat, default)

    @property
    def schema(self) -> str:
        marks = iter("abcdefghijklmnopqrstuvwxyz")
        one = lambda f: f"{f.type}{f'({next(marks)}!)' if f.changed else ''}{'?' if f.optional else ''} {f.name}"  # noqa: E731
        results = {None: "()", type(None): "()", Tensor: "Tensor"}
        result = results.get(self.result) or f"({', '.join('Tensor' for _ in typing.get_args(self.result))})"
        return f"({', '.join(map(one, self.flat))}) -> {result}"

    # ---- from views to flat arguments and back, as generated code, because it runs at every eager call

    def caller(self, op: Callable, doc: str | None) -> Callable:
        """The function that users of the op call. It takes views."""
        named = [p.name if p.default is inspect.Parameter.empty else f"{p.name}=_{p.name}" for p in self.parameters]
        passed = ", ".join(f"*{p.name}" if p.view else p.name for p in self.parameters)
        made = self._made(f"def {self.name}({', '.join(named)}):\n    return _op({passed})", _op=op)
        made.__doc__ = doc
        return made

    def grouped(self, fn: Callable, before: Callable | None = None) -> Callable:
        """`fn`, a function of views, as a function of flat arguments. `before` is called with the same views first."""
        lines = [
            f"_its_{p.name} = _new(_{p.name}_view, ({', '.join(f.name for f in p.flat)},))"
            for p in self.parameters if p.view
        ]  # fmt: skip
        passed = ", ".join(f"_its_{p.name}" if p.view else p.name for p in self.parameters)
        lines += [f"_before({passed})"] * (before is not None) + [f"return _fn({passed})"]
        code = f"def {self.name}({', '.join(f.name for f in self.flat)}):\n    " + "\n    ".join(lines)
        return self._made(code, _fn=fn, _before=before, _new=tuple.__new__)  # faster than _make of a NamedTuple

    def verifier(self) -> Callable:
        """A function of flat arguments that raises an error if shapes or types do not fit."""
        lines = _Lines(self._numbers())
        for f in self._in_order():
            lines.add(f)
        flat = ", ".join(f.name for f in self.flat)
        body = "\n".join(f"    {line}" for line in [*lines.done, "return"]).replace("_ALL_", flat)
        return self._made(f"def {self.name}({flat}):\n{body}", _explain=lambda *args: self.explain(args), **lines.names)

    def _made(self, code: str, **names: Any) -> Callable:
        names |= {f"_{p.name}_view": p.view for p in self.parameters}
        names |= {f"_{p.name}": p.default for p in self.parameters}
        exec(compile(code, f"<op {self.name}>", "exec"), names)
        return names[self.name]

    def _in_order(self) -> list[Flat]:
        """The order of the checks: tensors of views first, because the others must fit them; then tensors that may be
        packed; then sums, when their terms are known; then optional tensors."""
        tensors = [f for f in self.flat if f.of]
        views = {f.name for p in self.parameters if p.view for f in p.flat}
        order = sorted(tensors, key=lambda f: (bool(f.of and f.of.packed), f.name not in views))
        sums = [f for f in order if any(not w.isidentifier() and not w.isdigit() for w in words(f.of))]
        return sorted([f for f in order if f not in sums] + sums, key=lambda f: f.optional)

    def _numbers(self) -> dict[str, str]:
        """The number arguments whose names occur in shapes."""
        used = {w for f in self.flat for word in words(f.of) for w in re.split(r"[+-]", word)}
        named = {f.said.rpartition(".")[2]: f.name for f in self.flat if f.type == "int"}
        return {word: name for word, name in named.items() if word in used}

    def explain(self, args: tuple) -> None:
        """Raise the most precise error for arguments that do not fit."""
        given = dict(zip((f.name for f in self.flat), args))
        sizes: dict[str, Any] = {word: given[name] for word, name in self._numbers().items()}
        kinds: dict[str, dict[str, torch.dtype]] = {}
        for f in self._in_order():
            if given[f.name] is not None:
                _explain_one(f, given[f.name], sizes, kinds)
        raise AssertionError(f"{self.name}: arguments were refused, but none is wrong: {given}")


def words(of: Of | None) -> list[str]:
    return of.shape.split() if of else []


class _Lines:
    """The code of a verifier. The verifier calls `_explain` at the first argument that does not fit."""

    def __init__(self, numbers: dict[str, str]) -> None:
        self.done: list[str] = [f"{size_of(word)} = {name}" for word, name in numbers.items()]
        self.names: dict[str, Any] = {"FLOATS": FLOATS}
        self.sizes: set[str] = set(map(size_of, numbers))
        self.perhaps: set[str] = set()  # sizes that an optional tensor binds first: None if this tensor is None
        self.kinds: set[str] = set()

    def add(self, f: Flat) -> None:
        assert f.of is not None
        before, known = len(self.done), set(self.sizes)
        wrong = [*self._dtype(f), f"{f.name}.stride(-1) != 1" if f.of.strided else f"not {f.name}.is_contiguous()"]
        wrong += self._shape(f)
        self.done.append(f"if {' or '.join(wrong)}: return _explain(_ALL_)")
        if f.optional:
            new = sorted(self.sizes - known)
            self.perhaps.update(new)
            self.done[before:] = [
                *(f"{size} = None" for size in new),
                f"if {f.name} is not None:",
                *(f"    {line}" for line in self.done[before:]),
            ]

    def _dtype(self, f: Flat) -> list[str]:
        want = f.of.dtype  # type: ignore[union-attr]
        if not isinstance(want, str):
            self.names[f"_{f.name}_dtype"] = want if isinstance(want, tuple) else (want,)
            return [f"{f.name}.dtype not in _{f.name}_dtype"]
        if want in self.kinds:
            other = f" and {f.name}.dtype is not _packed_{f.name}" if self._may_be_packed(f) else ""
            return [f"({f.name}.dtype is not _of_{want}{other})"]
        if not f.optional:
            self.kinds.add(want)
            self.done.append(f"_of_{want} = {f.name}.dtype")
            return [f"_of_{want} not in FLOATS"]
        return [f"{f.name}.dtype not in FLOATS"]

    def _may_be_packed(self, f: Flat) -> bool:
        """True if other tensors fix the usual size and type of a tensor that may be packed."""
        of = f.of
        assert of is not None
        return of.packed is not None and of.dtype in self.kinds and self._known(words(of)[-1])

    def _shape(self, f: Flat) -> list[str]:
        name, parts = f.name, words(f.of)
        sizes = [*map(size_of, parts)]
        if self._may_be_packed(f):
            self.names[f"_packed_{name}"], self.names[f"_packed_size_{name}"] = f.of.packed  # type: ignore[union-attr, misc]
            last = f"_packed_size_{name}({sizes[-1]}) if {name}.dtype is _packed_{name} else {sizes[-1]}"
            sizes[-1] = f"({last})"
        if all(self._known(w) for w in parts):
            return [f"{name}.shape != ({', '.join(sizes)}{',' * (len(parts) == 1)})"]
        self.done.append(f"_shape = {name}.shape")
        return [
            f"len(_shape) != {len(parts)}",
            *(self._bind(w, f"_shape[{i}]", size) for i, (w, size) in enumerate(zip(parts, sizes))),
        ]

    def _known(self, word: str) -> bool:
        sizes = self.sizes - self.perhaps
        return all(w.isdigit() or size_of(w) in sizes for w in re.split(r"[+-]", word))

    def _bind(self, word: str, at: str, size: str) -> str:
        """A condition that is true if a size differs from the known size. A new name is bound on the way."""
        if self._known(word):
            return f"{at} != {size}"
        if size in self.perhaps:
            return f"({size} := {at} if {size} is None else {size}) != {at}"
        self.sizes.add(size_of(word))
        return f"({size_of(word)} := {at}) is None"


def size_of(word: str) -> str:
    """The variable of a size. The prefix keeps it apart from the names of arguments and of Python."""
    return re.sub(r"[a-z_]\w*", lambda m: f"n_{m[0]}", word)


def _explain_one(f: Flat, t: Tensor, sizes: dict[str, Any], kinds: dict[str, dict[str, torch.dtype]]) -> None:
    assert f.of is not None
    parts, shape = words(f.of), tuple(t.shape)
    packed = f.of.packed is not None and t.dtype is f.of.packed[0] and bool(kinds) and parts[-1] in sizes
    if packed:
        sizes = sizes | {parts[-1]: f.of.packed[1](sizes[parts[-1]])}  # type: ignore[index]
    elif isinstance(f.of.dtype, str):
        alike = kinds.setdefault(f.of.dtype, {})
        alike[f.said] = t.dtype
        if len(set(alike.values())) > 1:
            raise TypeError(f"dtypes must agree, got {alike}")
    allowed = FLOATS if isinstance(f.of.dtype, str) else f.of.dtype
    allowed = allowed if isinstance(allowed, tuple) else (allowed,)
    if not packed and t.dtype not in allowed:
        raise TypeError(f"{f.said} must be {' or '.join(map(str, allowed))}, got {t.dtype}")
    fits = len(parts) == len(shape)
    for word, size in zip(parts, shape):
        if word.isidentifier():
            fits &= sizes.setdefault(word, size) == size if len(parts) == len(shape) else word in sizes
        else:
            fits &= _sum(word, sizes) == size
    if not fits:
        expected = ", ".join(str(_sum(w, sizes)) for w in parts) + "," * (len(parts) == 1)
        raise ValueError(f"{f.said} must have shape ({expected}), got {shape}")
    if f.of.strided and t.stride(-1) != 1:
        raise ValueError(f"{f.said} must have stride 1 in its last dimension, got strides {t.stride()}")
    if not f.of.strided and not t.is_contiguous():
        raise ValueError(f"{f.said} must be contiguous, got shape {shape} with strides {t.stride()}")


def _sum(word: str, sizes: dict[str, Any]) -> Any:
    """The size of a word, or the word itself if its size is not known yet."""
    terms = re.split(r"([+-])", word)
    if any(not x.isdigit() and x not in sizes for x in terms[::2]):
        return word
    total, *values = (int(x) if x.isdigit() else sizes[x] for x in terms[::2])
    for sign, value in zip(terms[1::2], values):
        total += value if sign == "+" else -value
    return total
