"""What functions reach by name: globals, and members of modules and classes."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import sys
import types
from collections.abc import Iterator, Sequence

_HEAP = 1 << 9  # Py_TPFLAGS_HEAPTYPE: a class made by a class statement, among others
# Functions that look names up by a string.
_BY_STRING = {"globals", "getattr", "vars", "attrgetter"}
# Packages that do not know a user's arrays by name.
_FOREIGN = sys.stdlib_module_names | {"numpy", "scipy", "torch", "jax", "numba", "multistage"}
_FOREIGN |= {"triton", "sympy", "torchgen", "functorch", "pytest"}
_KINDS = {
    **dict.fromkeys(("LOAD_GLOBAL", "LOAD_NAME"), "global"),
    **dict.fromkeys(("LOAD_DEREF", "LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF"), "free"),
    **dict.fromkeys(("STORE_DEREF", "DELETE_DEREF"), "set free"),
    "STORE_GLOBAL": "set global",
    "IMPORT_NAME": "import",
}
_FOLLOWING = ("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")


def named_by(value: object) -> Iterator[object]:
    """Yield what is reached by name from a function, a class, or the class of an object."""
    if isinstance(value, types.FunctionType):
        yield from _globals_of(value)
    elif isinstance(value, type):
        yield from _members(value, whole=True)
    elif type(value).__flags__ & _HEAP:
        yield from _members(type(value))


def _members(kind: type, *, whole: bool = False) -> Iterator[object]:
    """Yield the functions of a class and of its bases, and the members that they name.

    Parameters
    ----------
    whole : bool
        Whether to yield the other members, too.
    """
    names, rest = set[str](), dict[str, object]()
    for each in kind.__mro__:
        if not each.__flags__ & _HEAP or is_foreign(each.__module__):
            continue
        for name, member in vars(each).items():
            # Of a property, a static method, a cached property.
            for inner in ("fget", "__func__", "func"):
                member = getattr(member, inner, member)
            if isinstance(member, types.FunctionType):
                names |= _names_in(member.__code__)[1]
                yield member
            elif not name.startswith("__"):
                rest.setdefault(name, member)
    yield from rest.values() if whole else (rest[name] for name in names & rest.keys())


@functools.lru_cache(maxsize=256)
def has_methods(kind: type) -> bool:
    """Whether a class has functions of its own that may know arrays by name."""
    return any(
        isinstance(member, types.FunctionType)
        and member.__name__ != "__new__"  # a named tuple's
        and not is_foreign(member.__globals__.get("__name__"))
        for member in _members(kind)
    )


def _globals_of(function: types.FunctionType) -> Iterator[object]:
    """Yield the globals that a function names, and what it may name in modules."""
    if is_foreign(function.__globals__.get("__name__")):
        return
    globals_, attributes = _names_in(function.__code__)
    for name in globals_:
        value = function.__globals__.get(name, sys.modules.get(name))
        if isinstance(value, types.ModuleType):
            if not is_foreign(value.__name__):
                yield from (vars(value).get(each) for each in attributes)
        elif value is not None:
            yield value


@functools.lru_cache(maxsize=1024)
def _names_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """Return the names of globals and modules, and those of attributes, in the code of a function.

    Strings count as names where globals or attributes are looked up by a string.
    """
    found = names_in(code)
    globals_ = frozenset([name for kind, name, *_ in found if kind in ("global", "import")])
    attributes = frozenset([each for _, _, *following in found for each in following])
    if globals_ & _BY_STRING or "__dict__" in attributes:
        strings = {x for each in _codes(code) for x in each.co_consts if isinstance(x, str)}
        return globals_ | strings, attributes | strings
    return globals_, attributes


@functools.lru_cache(maxsize=8192)
def names_in(code: types.CodeType) -> tuple[tuple[str, ...], ...]:
    """Return what is named in code and in the functions within it.

    Each time a kind and a name, and the attributes that follow.  Kinds are "global", "import",
    "free" (a variable of a function around it, or shared with one within), "local", "set global",
    "set free", and "" for attributes of another value, which has no name.
    """
    found: list[tuple[str, ...]] = []
    for each in _codes(code):
        last: tuple[str, ...] = ("", "")
        for step in dis.get_instructions(each):
            if step.opname in _FOLLOWING:
                last += (step.argval,)
                continue
            found.append(last)
            kind = "local" if step.opname.startswith("LOAD_FAST") else _KINDS.get(step.opname, "")
            last = ("", "")
            if kind:
                names = step.argval  # a tuple where one instruction loads two
                last = (kind, names[-1] if isinstance(names, tuple) else names)
    return tuple([each for each in found if each != ("", "")])  # the last step names nothing


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


@functools.cache
def is_foreign(module: str | None) -> bool:
    """Whether a module is not the user's: its functions do not know his arrays by name."""
    return module is None or module.partition(".")[0] in _FOREIGN


def read_by(operator: object) -> Iterator[object]:
    """Yield what a function or a method reads by name, such as `self.model.u` or `TABLES`.

    Also what those read that it names.  Of an object only the attributes that are named count:
    a solver holds arrays that its adjoint does not use.
    """
    if isinstance(operator, functools.partial):
        given = (*operator.args, *operator.keywords.values())
        yield from (each for each in given if not _is_object(each))
        owner, operator = next(iter(operator.args), None), operator.func
    else:
        owner = None
    if _is_object(operator):
        operator = types.MethodType(type(operator).__call__, operator)
    left, seen = [_bound(operator, owner)], set[object]()
    while left:
        function, owner = left.pop()
        if not isinstance(function, types.FunctionType):
            if not _is_object(function):
                yield function
        elif function not in seen and not is_foreign(function.__globals__.get("__name__")):
            seen.add(function)
            left += [(each, None) for each in function.__defaults__ or ()]
            left += [(each, None) for each in (function.__kwdefaults__ or {}).values()]
            first = function.__code__.co_varnames[:1]
            left += [
                _bound(*_followed(function, owner, name, following))
                for kind, name, *following in names_in(function.__code__)
                if kind in ("global", "free") or (kind == "local" and name in first)
            ]


def _is_object(value: object) -> bool:
    """Whether a value is an instance of a user's class."""
    kind = type(value)
    return bool(kind.__flags__ & _HEAP) and not is_foreign(kind.__module__)


def _bound(value: object, owner: object) -> tuple[object, object]:
    """Return the function behind a value that is called or got, and what its first argument is."""
    if isinstance(value, types.MethodType):
        return value.__func__, value.__self__
    return getattr(value, "fget", getattr(value, "__func__", value)), owner


def _followed(
    function: types.FunctionType, owner: object, name: str, attributes: Sequence[str]
) -> tuple[object, object]:
    """Return the value of a name and the attributes that follow it, and what has the last one."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    value: object = None
    if name in cells:
        with contextlib.suppress(ValueError):  # not filled yet
            value = cells[name].cell_contents
    elif name in function.__code__.co_varnames[:1]:
        value = owner
    else:
        value = function.__globals__.get(name, sys.modules.get(name))
    has: object = None
    for each in attributes:
        if isinstance(value, types.ModuleType) and is_foreign(value.__name__):
            return None, None
        has, value = value, inspect.getattr_static(value, each, None)
        if isinstance(value, types.MemberDescriptorType):  # of `__slots__`
            value = getattr(has, each, None)
        if isinstance(value, property):
            break  # what its function reads counts
    return value, has
