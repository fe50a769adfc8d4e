"""Triton's interpreter with less to look up: the same programs run, and the same numbers come out.

At every launch, and whenever a jitted function calls another, the interpreter puts functions of its own in place of
those of triton.language. To find them it goes through all names there, which takes half of the time of our kernels.
"""
import functools
import inspect

import triton.language as tl
from triton.runtime import interpreter


def save_look_ups() -> None:
    """Call this before the first launch, while triton.language is as it was imported."""
    _remember_types()
    _remember_builtins()
    _patch_once_a_launch()


def _remember_types() -> None:
    type_of = interpreter._get_np_dtype  # makes a table at every call, except of a pointer
    known = functools.cache(type_of)
    pointer = tl.pointer_type
    interpreter._get_np_dtype = lambda t: (type_of if isinstance(t.scalar, pointer) else known)(t.scalar)


def _remember_builtins() -> None:
    packages = (tl, tl.core, tl.math, tl.tensor, tl.core.tensor_descriptor_base)
    names = {p: [name for name, member in inspect.getmembers(p) if tl.core.is_builtin(member)] for p in packages}

    def patch_builtin(package, *rest):
        for name in names[package]:
            member = getattr(package, name)
            if tl.core.is_builtin(member):
                interpreter._patch_attr(package, name, member, *rest)

    interpreter._patch_builtin = patch_builtin


def _patch_once_a_launch() -> None:
    """The first call of a module's function in a launch patches triton.language. Later calls skip that. The end of the
    launch restores it."""
    patch, launch, patched = interpreter._patch_lang, interpreter.GridExecutor.__call__, set()

    def patch_lang(fn):
        module = id(fn.__globals__)
        if module not in patched:
            patched.add(module)
            return patch(fn)  # what a launch undoes at its end

    def call(*args, **kwargs):
        patched.clear()
        try:
            return launch(*args, **kwargs)
        finally:
            patched.clear()

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_lang, call
