"""The search for what a callable refers to."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Iterable
from types import FunctionType, MethodType, ModuleType
from typing import Any, cast

import numpy as np
import torch
from torch import nn

from .holders import (
    ABSENT,
    GLOBAL_HOOKS,
    HOOKS,
    LEAVES,
    MOST_ENTRIES,
    Holder,
    OfArray,
    OfCells,
    OfCollection,
    OfDict,
    OfModule,
    OfNames,
    OfTail,
    inside,
)
from .naming import attributes_used, global_names, is_namespace, is_others, members_of
from .randomness import Own, is_generator

_MOST_ITEMS = 1024  # of a set or deque whose contents are watched
_MOST_BYTES = 1 << 16  # of an array whose contents are
_MOST_HOLDERS = 256  # beside modules
_DEPTH = 6
# What `nn.Module` itself keeps in an instance.
_INTERNAL = frozenset(vars(nn.Module()))


class Walk:
    """Visits what callables refer to; collects modules, holders and generators."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.scripted: list[torch.jit.ScriptModule] = []
        self.holders: list[Holder] = []
        self.generators: dict[int, tuple[str, Own]] = {}
        self._seen: dict[int, object] = {}  # referred to, or an address might be used again
        self._classes: set[type] = set()
        self._shallow: set[int] = set()  # modules visited without their children
        self._names: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        self._left = _MOST_HOLDERS

    def visit(self, value: object, name: str, depth: int) -> None:
        """Visit a value that is reached by a name."""
        if depth > _DEPTH or isinstance(value, LEAVES):
            return
        if id(value) in self._seen and id(value) not in self._shallow:
            return
        self._seen[id(value)] = value
        match value:
            case nn.Module():
                self._module(value, name, depth, children=True)
            case FunctionType():
                self._function(value, name, depth)
            case MethodType():
                self.visit(value.__self__, name, depth + 1)
                self.visit(value.__func__, name, depth + 1)
            case functools.partial():
                self.visit(value.func, name, depth + 1)
                self._all(value.args, name, depth)
                self._all(value.keywords.values(), name, depth)
            case tuple() | frozenset():
                if len(value) <= MOST_ENTRIES:
                    self._all(value, name, depth)
            case dict():
                if self._watch(len(value)):
                    self.holders.append(OfDict(value, name))
                    for key, entry in list(value.items()):
                        self.visit(entry, f"{name}[{key!r}]", depth + 1)
            case list() if len(value) > MOST_ENTRIES:
                if self._watch(0):
                    self.holders.append(OfTail(value, name))
            case list() | set() | deque():
                if self._watch(len(value), _MOST_ITEMS):
                    self.holders.append(OfCollection(value, name))
                    self._all(list(value), name, depth)
            case np.ndarray():
                if value.nbytes <= _MOST_BYTES and not value.dtype.hasobject and self._watch(0):
                    self.holders.append(OfArray(value, name))
            case type():
                if not is_others(value.__module__):
                    self._class(value, depth)
            case _ if is_generator(value):
                self.generators[id(value)] = (f"generator {name}", value)
            case _ if not is_others(type(value).__module__) or is_namespace(value):
                self._object(value, name, depth)
            case _ if callable(getattr(value, "refers_to", None)):
                self._referred(value, name, depth)

    def finish(self) -> None:
        """Make holders of the global hooks on forward, and of the globals that were named."""
        for hooks in GLOBAL_HOOKS if self.modules else ():
            self.holders.append(OfDict(cast("dict[int, object]", hooks), "global forward hooks"))
            self._all(list(hooks.values()), "global forward hook", 0)
        for space, names in self._names.values():
            self.holders.append(OfNames(space, tuple(names), "globals", None))

    def _watch(self, entries: int, most: int = MOST_ENTRIES) -> bool:
        self._left -= 1
        return entries <= most and self._left >= 0

    def _all(self, values: Iterable[object], name: str, depth: int) -> None:
        for number, value in enumerate(values):
            self.visit(value, f"{name}[{number}]", depth + 1)

    def _module(self, module: nn.Module, name: str, depth: int, *, children: bool) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            self.scripted.append(module)
            return
        if id(module) in self.modules:
            if children and id(module) in self._shallow:
                self._shallow.discard(id(module))
                self._children(module, name, depth)
            return
        self.modules[id(module)] = module
        if not children:
            self._shallow.add(id(module))
        kind = type(module)
        ours = kind.__module__.split(".", 1)[0] == "multistage"
        self.holders.append(OfModule(module, name, attributes=not ours))
        if children:
            self._children(module, name, depth)
        if ours:
            self._referred(module, name, depth)
            self.visit(module.__dict__.get("_multistage"), name, depth)
            return
        for key, value in list(module.__dict__.items()):
            if key not in _INTERNAL and not isinstance(value, LEAVES):
                self.visit(value, f"attribute '{name}.{key}'" if name else f"{key!r}", depth + 1)
        for hooks in HOOKS:
            self._all(list(module.__dict__[hooks].values()), name, depth)
        self._class(kind, depth)

    def _children(self, module: nn.Module, name: str, depth: int) -> None:
        for key, child in list(module._modules.items()):
            if child is None or (id(child) in self._seen and id(child) not in self._shallow):
                continue
            self._seen[id(child)] = child
            # Nested modules count as deep as they lie: no depth is added.
            self._module(child, f"{name}.{key}" if name else key, depth, children=True)

    def _referred(self, value: object, name: str, depth: int) -> None:
        """Visit what an object of ours says it refers to: modules without their children."""
        for each in getattr(value, "refers_to", tuple)():
            if isinstance(each, nn.Module):
                self._module(each, name, depth, children=False)
            else:
                self.visit(each, name, depth + 1)

    def _object(self, value: object, name: str, depth: int) -> None:
        kind = type(value)
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is dict and self._watch(0):
            self.holders.append(OfDict(attributes, name, of_object=True))
            for key, entry in list(attributes.items()):
                self.visit(entry, f"{name}.{key}", depth + 1)
        self._class(kind, depth)

    def _class(self, kind: type, depth: int) -> None:
        for each in kind.__mro__:
            if each in self._classes or is_others(each.__module__):
                continue
            self._classes.add(each)
            functions, names = members_of(each)
            if names and self._watch(0):
                self.holders.append(OfNames(each.__dict__, names, each.__name__, each))
                for key in names:
                    self.visit(each.__dict__.get(key), f"{each.__name__}.{key}", depth + 1)
            for function in functions:
                self._code(function, depth)

    def _function(self, function: FunctionType, name: str, depth: int) -> None:
        cells = function.__closure__ or ()
        if cells:
            names = function.__code__.co_freevars
            if self._watch(0):
                self.holders.append(OfCells(cells, names, name))
            for key, cell in zip(names, cells, strict=True):
                self._variable(inside(cell), key, attributes_used(function.__code__, key), depth)
        code, defaults = function.__code__, function.__defaults__ or ()
        positional = code.co_varnames[: code.co_argcount][-len(defaults) or code.co_argcount :]
        for key, value in [
            *zip(positional, defaults, strict=True),
            *(function.__kwdefaults__ or {}).items(),
        ]:
            self.visit(value, key, depth + 1)
        if function.__dict__ and self._watch(0):
            self.holders.append(OfDict(function.__dict__, function.__name__, of_object=True))
            for key, value in list(function.__dict__.items()):
                self.visit(value, key, depth + 1)
        self._code(function, depth)

    def _variable(self, value: object, name: str, used: frozenset[str] | None, depth: int) -> None:
        """Visit what a variable holds; of a module only the children that code names.

        `lambda x: self.block(x)` depends on the block, and not on the rest of
        the model, which other stages may be at work on.
        """
        # Attributes of the class and of the instance come before children.
        if (
            used
            and isinstance(value, nn.Module)
            and used <= value._modules.keys() - value.__dict__.keys()
            and not any(hasattr(type(value), key) for key in used)
        ):
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                self._module(value, name, depth, children=False)
            for key in sorted(used):
                self.visit(value._modules[key], f"{name}.{key}", depth + 1)
        else:
            self.visit(value, name, depth + 1)

    def _code(self, function: FunctionType, depth: int) -> None:
        """Visit the globals that a function names."""
        if is_others(function.__module__ or ""):
            return
        space = function.__globals__
        loaded, stored, attributes = global_names(function.__code__)
        for key in loaded:
            self._global(space, key, depth, always=key in stored)
        for owner, key in attributes:
            module = space.get(owner)
            if isinstance(module, ModuleType) and not is_others(module.__name__):
                self._global(vars(module), key, depth, always=False)

    def _global(self, space: dict[str, Any], key: str, depth: int, *, always: bool) -> None:
        value = space.get(key, ABSENT)
        if value is ABSENT and not always:
            return
        if not isinstance(value, (FunctionType, ModuleType, type)):
            known = self._names.setdefault(id(space), (space, {}))[1]
            known[key] = None
        if not isinstance(value, ModuleType):
            self.visit(value, key, depth + 1)
