"""What code names: globals, attributes of variables, members of classes; and whose code it is."""

from __future__ import annotations

import builtins
import dis
import functools
import sys
from collections.abc import Iterator
from types import CodeType, FunctionType

_OTHERS = {"torch", "numpy", "multistage", "triton", "sympy", "torchgen", "functorch", "pytest"}


# Operators that name globals and attributes, and by how many bits their argument is shifted.
_NAMING = {
    dis.opmap[name]: (
        name,
        int(name == "LOAD_GLOBAL" or (name == "LOAD_ATTR" and sys.version_info >= (3, 12))),
    )
    for name in (
        "LOAD_GLOBAL",
        "LOAD_NAME",
        "STORE_GLOBAL",
        "DELETE_GLOBAL",
        "LOAD_ATTR",
        "LOAD_METHOD",
        "STORE_ATTR",
    )
    if name in dis.opmap
}
_CACHE, _EXTENDED = dis.opmap.get("CACHE", -1), dis.opmap["EXTENDED_ARG"]


def steps_of(code: CodeType) -> Iterator[tuple[str, str]]:
    """Yield for each step of code its operator and the name it has, "" for both if it has none.

    What `dis.get_instructions` returns too, in a tenth of the time: models of a large library
    name thousands of functions.
    """
    raw, names = code.co_code, code.co_names
    argument = 0
    for operator, low in zip(raw[::2], raw[1::2], strict=True):
        if operator == _CACHE:
            continue
        argument = argument << 8 | low
        if operator == _EXTENDED:
            continue
        found = _NAMING.get(operator)
        yield ("", "") if found is None else (found[0], names[argument >> found[1]])
        argument = 0


@functools.lru_cache(maxsize=8192)
def global_names(
    code: CodeType,
) -> tuple[tuple[str, ...], frozenset[str], tuple[tuple[str, str], ...]]:
    """Return the globals that code loads or stores, those it stores, and attributes of globals."""
    loaded: dict[str, None] = {}
    stored: set[str] = set()
    attributes: dict[tuple[str, str], None] = {}
    last = ""
    for opname, name in steps_of(code):
        if opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            last = name
            if not hasattr(builtins, name):
                loaded[name] = None
            continue
        if opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            loaded[name] = None
            stored.add(name)
        elif opname and last:  # of an attribute
            attributes[last, name] = None
        last = ""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            more, also, inner = global_names(constant)
            loaded |= dict.fromkeys(more)
            stored |= also
            attributes |= dict.fromkeys(inner)
    return tuple(loaded), frozenset(stored), tuple(attributes)


@functools.lru_cache(maxsize=8192)
def attributes_used(code: CodeType, name: str) -> frozenset[str] | None:
    """Return the attributes that code takes of a free variable, None if it is used otherwise."""
    found: set[str] = set()
    loaded = False
    for step in dis.get_instructions(code):
        if loaded:
            if step.opname not in ("LOAD_ATTR", "LOAD_METHOD"):
                return None
            found.add(step.argval)
        loaded = step.opname == "LOAD_DEREF" and step.argval == name
        named = step.argval == name and not loaded
        if named and step.opname not in ("LOAD_CLOSURE", "LOAD_ATTR", "LOAD_METHOD"):
            return None
    for constant in code.co_consts:
        if isinstance(constant, CodeType) and name in constant.co_freevars:
            inner = attributes_used(constant, name)
            if inner is None:
                return None
            found |= inner
    return frozenset(found)


_NOT_RUN = {"__init__", "__repr__", "extra_repr", "__getstate__", "__setstate__", "__reduce__"}


def members_of(kind: type) -> tuple[list[FunctionType], tuple[str, ...]]:
    """Return the functions of a class that may run, and the names of its data."""
    functions: list[FunctionType] = []
    names: list[str] = []
    for key, value in list(vars(kind).items()):
        match value:
            case FunctionType():
                if key not in _NOT_RUN:
                    functions.append(value)
            case staticmethod() | classmethod():
                if isinstance(value.__func__, FunctionType):
                    functions.append(value.__func__)
            case property():
                functions += [f for f in (value.fget,) if isinstance(f, FunctionType)]
            case _:
                described = key.startswith("__") or hasattr(type(value), "__get__")
                if not described and not isinstance(value, type):
                    names.append(key)
    return functions, tuple(names)


@functools.cache
def is_others(module: str) -> bool:
    """Whether code of this module is not the user's: torch, NumPy, us, the standard library."""
    top = module.split(".", 1)[0]
    return top in _OTHERS or (top in sys.stdlib_module_names and top != "__main__")


def is_namespace(value: object) -> bool:
    """Return whether a value is a plain namespace."""
    return type(value).__name__ in ("Namespace", "SimpleNamespace")
