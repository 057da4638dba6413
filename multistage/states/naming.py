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
# Packages whose functions do not know a user's arrays by name.
_FOREIGN = sys.stdlib_module_names | {"numpy", "scipy", "torch", "jax", "numba", "multistage"}


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
    codes, globals_, attributes, strings = [code], set[str](), set[str](), set[str]()
    while codes:
        code = codes.pop()
        for each in dis.get_instructions(code):
            if each.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", "IMPORT_NAME")):
                globals_.add(each.argval)
            elif each.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "IMPORT_FROM")):
                attributes.add(each.argval)
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        strings.update(each for each in code.co_consts if isinstance(each, str))
    if globals_ & _BY_STRING or "__dict__" in attributes:
        return frozenset(globals_ | strings), frozenset(attributes | strings)
    return frozenset(globals_), frozenset(attributes)


def is_foreign(module: str | None) -> bool:
    """Whether the functions of a module do not know a user's arrays by name."""
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
            chains = _chains(function.__code__)
            left += [_bound(*_followed(function, owner, each)) for each in chains]


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
    function: types.FunctionType, owner: object, chain: Sequence[str]
) -> tuple[object, object]:
    """Return the value of a name and the attributes that follow it, and what has the last one."""
    name, *attributes = chain
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


def _chains(code: types.CodeType) -> Iterator[tuple[str, ...]]:
    """Yield the names of globals, of variables of functions around, and of the first argument.

    Each with those of the attributes that follow it.
    """
    codes, first = [code], code.co_varnames[:1]
    while codes:
        code = codes.pop()
        codes += [each for each in code.co_consts if isinstance(each, types.CodeType)]
        chain: tuple[str, ...] = ()
        for each in dis.get_instructions(code):
            if chain and each.opname in ("LOAD_ATTR", "LOAD_METHOD"):
                chain += (each.argval,)
                continue
            if chain:
                yield chain
            named = each.opname.startswith(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"))
            own = each.opname.startswith("LOAD_FAST") and each.argval in first
            chain = (each.argval,) if named or own else ()
