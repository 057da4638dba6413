"""What a callable refers to: modules, tensors, generators, and the places that hold them.

A stage may be a module, but also a function that wraps one: `lambda x:
block(x)`, a closure, a partial, a bound method, an object with `__call__`.
What it computes depends on all that it reaches.  `Scope` walks there once:
through children and attributes of modules, cells of closures, defaults,
`__self__`, partials, the globals that its code names, small containers and
helper objects.  Each place found is a holder, whose contents can be read,
compared by identity, and put back.

What cannot be seen: state inside of extension objects, generators and iterators
of Python, dictionaries of more than 64 entries, sets and deques of more than
1024, the first items of longer lists, and whatever lies behind the code of other
libraries (torch, NumPy, the standard library).
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...errors import ArgumentError
from .holders import (
    ABSENT,
    HOOKS,
    LEAVES,
    MOST_ENTRIES,
    Contents,
    Holder,
    OfArray,
    OfCells,
    OfCollection,
    OfDict,
    OfModule,
    OfNames,
    OfTail,
    are_alike,
    inside,
    is_same,
)
from .naming import attributes_used, global_names, is_namespace, is_others, members_of
from .randomness import is_generator

_MOST_ITEMS = 1024  # of a set or deque whose contents are watched
_MOST_BYTES = 1 << 16  # of an array whose contents are
_MOST_HOLDERS = 256  # beside modules
_DEPTH = 6
_numbers = itertools.count()  # of what was found

# What `nn.Module` itself keeps in an instance.
_INTERNAL = frozenset(vars(nn.Module()))


@dataclass(frozen=True, slots=True)
class Found:
    """What a scope held at one moment.

    Attributes
    ----------
    modules : tuple of nn.Module
        Nested ones too, each once.
    holders : tuple of Holder
    contents : tuple of tuple
        What each holder held.
    tensors : tuple of Tensor
        All of those, each once.
    generators : tuple of (str, generator)
        With names.
    scripted : tuple of ScriptModule
        Of which only parameters and buffers are known.
    number : int
        Of these contents: what is found later with the same number holds the same.
    memo : dict
        What others have worked out of it.
    """

    modules: tuple[nn.Module, ...]
    holders: tuple[Holder, ...]
    contents: tuple[Contents, ...]
    tensors: tuple[Tensor, ...]
    generators: tuple[tuple[str, Any], ...]
    scripted: tuple[Any, ...]
    number: int
    memo: dict[str, Any] = field(default_factory=dict, compare=False)

    def devices(self) -> frozenset[torch.device]:
        """Return the devices that its tensors lie on."""
        known: frozenset[torch.device] | None = self.memo.get("devices")
        if known is None:
            known = self.memo["devices"] = frozenset(t.device for t in self.tensors)
        return known

    def differences(self) -> list[str]:
        """Return the names of values that are others now."""
        return [
            name
            for holder, before in zip(self.holders, self.contents, strict=True)
            if not is_same(before, now := holder.read())
            for name in holder.differences(before, now)
        ]

    def name_of(self, tensor: Tensor) -> str:
        """Return what a tensor is called, for messages."""
        for holder, values in zip(self.holders, self.contents, strict=True):
            for number, value in enumerate(values):
                if value is tensor:
                    return holder.name_of(number)
        return f"a tensor of shape {tuple(tensor.shape)}"


class Scope:
    """Modules, tensors and generators that some values refer to; most are callables.

    Parameters
    ----------
    values : sequence of objects

    Notes
    -----
    Threads may look at the same time.
    """

    def __init__(self, values: Sequence[object]) -> None:
        self._values = tuple(values)
        self._found = _without_results(self._find())

    @classmethod
    def of(cls, *values: object) -> Scope:
        """Return the scope of some values."""
        return cls(values)

    def _find(self) -> Found:
        walk = _Walk()
        for value in self._values:
            walk.visit(value, "", 0)
        walk.finish()
        contents = tuple([holder.read() for holder in walk.holders])
        scripted = tuple(walk.scripted)
        return Found(
            tuple(walk.modules.values()),
            tuple(walk.holders),
            contents,
            _tensors_among(contents, scripted),
            tuple(walk.generators.values()),
            scripted,
            next(_numbers),
        )

    def look(self) -> Found:
        """Return what is held now; search anew where more than numbers and tensors changed."""
        found = self._found
        changed: list[Contents] | None = None
        for number, (holder, before) in enumerate(zip(found.holders, found.contents, strict=True)):
            now = holder.read()
            if is_same(before, now):
                continue
            if not (holder.has_same_keys() and are_alike(before, now)):
                found = self._find()
                self._found = _without_results(found)
                return found
            if changed is None:
                changed = list(found.contents)
            changed[number] = now
        if changed is not None:
            contents = tuple(changed)
            tensors = _tensors_among(contents, found.scripted)
            found = replace(
                found, contents=contents, tensors=tensors, number=next(_numbers), memo={}
            )
            self._found = _without_results(found)
        return found

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Modules, nested ones too, each once."""
        return self.look().modules

    def parameters(self) -> list[Tensor]:
        """Return parameters of modules, and other tensors that want gradients; each once."""
        found = self.look()
        of_modules = [p for m in found.modules for p in m._parameters.values() if p is not None]
        of_modules += [p for m in found.scripted for p in m.parameters()]
        others = [t for t in found.tensors if t.requires_grad]
        return list({id(p): p for p in [*of_modules, *others]}.values())

    def buffers(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Return the buffers of all modules, a shared one at each of its places."""
        return buffers_among(self.look().modules)

    def generators(self) -> tuple[tuple[str, Any], ...]:
        """Return generators of the values' own, with names."""
        return self.look().generators

    def seen_last(self) -> Found:
        """Return what was held when it was looked at last, but for results of runs."""
        return self._found


def buffers_among(modules: Iterable[nn.Module]) -> list[tuple[nn.Module, str, Tensor]]:
    """Return modules' own buffers: owner, name, tensor."""
    return [
        (module, key, buffer)
        for module in modules
        for key, buffer in module._buffers.items()
        if buffer is not None
    ]


def _tensors_among(contents: Iterable[Contents], scripted: Iterable[Any]) -> tuple[Tensor, ...]:
    found = {id(x): x for values in contents for x in values if isinstance(x, Tensor)}
    found |= {id(x): x for m in scripted for x in (*m.parameters(), *m.buffers())}
    if any(is_lazy(x) for x in found.values()):
        raise ArgumentError(
            "a lazy module has parameters or buffers that have no shape yet; run the plain model "
            "once on a sample before, which initialises them"
        )
    return tuple([x for x in found.values() if not x.is_inference()])


def merged(found: Sequence[Found]) -> Found:
    """Return what some scopes held, as one; what several of them hold is read once."""
    holders = tuple({holder.place(): holder for each in found for holder in each.holders}.values())
    contents = tuple([holder.read() for holder in holders])
    scripted = tuple({id(m): m for each in found for m in each.scripted}.values())
    return Found(
        tuple({id(m): m for each in found for m in each.modules}.values()),
        holders,
        contents,
        _tensors_among(contents, scripted),
        tuple({id(g): (name, g) for each in found for name, g in each.generators}.values()),
        scripted,
        next(_numbers),
    )


def _without_results(found: Found) -> Found:
    """Return what a scope may refer to as long as it lives: no tensors but those registered.

    Others, such as an auxiliary loss that a stage leaves in an attribute, have
    graphs and memory that nobody wants when the next has taken their place.
    """
    kept = {id(buffer) for _, _, buffer in buffers_among(found.modules)}
    if all(isinstance(t, nn.Parameter) or id(t) in kept for t in found.tensors):
        return found

    def held(value: Any) -> Any:
        other = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        return ABSENT if other and id(value) not in kept else value

    contents = tuple([tuple([held(x) for x in values]) for values in found.contents])
    return replace(found, contents=contents, tensors=_tensors_among(contents, found.scripted))


class _Walk:
    """Visits what callables refer to; collects modules, holders and generators."""

    def __init__(self) -> None:
        self.modules: dict[int, nn.Module] = {}
        self.scripted: list[Any] = []
        self.holders: list[Holder] = []
        self.generators: dict[int, tuple[str, Any]] = {}
        self._seen: dict[int, Any] = {}  # referred to, or an address might be used again
        self._classes: set[type] = set()
        self._shallow: set[int] = set()  # modules visited without their children
        self._names: dict[int, tuple[dict[str, Any], dict[str, None]]] = {}
        self._left = _MOST_HOLDERS

    def visit(self, value: Any, name: str, depth: int) -> None:
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
        """Make holders of the globals that were named."""
        for space, names in self._names.values():
            self.holders.append(OfNames(space, tuple(names), "globals", None))

    def _watch(self, entries: int, most: int = MOST_ENTRIES) -> bool:
        self._left -= 1
        return entries <= most and self._left >= 0

    def _all(self, values: Iterable[Any], name: str, depth: int) -> None:
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

    def _referred(self, value: Any, name: str, depth: int) -> None:
        """Visit what an object of ours says it refers to: modules without their children."""
        for each in getattr(value, "refers_to", tuple)():
            if isinstance(each, nn.Module):
                self._module(each, name, depth, children=False)
            else:
                self.visit(each, name, depth + 1)

    def _object(self, value: Any, name: str, depth: int) -> None:
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

    def _variable(self, value: Any, name: str, used: frozenset[str] | None, depth: int) -> None:
        """Visit what a variable holds; of a module only the children that code names.

        `lambda x: self.block(x)` depends on the block, and not on the rest of
        the model, which other stages may be at work on.
        """
        # Attributes of the class and of the instance come before children.
        narrow = (
            used
            and isinstance(value, nn.Module)
            and used <= value._modules.keys() - value.__dict__.keys()
            and not any(hasattr(type(value), key) for key in used)
        )
        if narrow and used:
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
