"""What a callable refers to: modules, tensors, generators, and the places that hold them.

A stage may be a module, but also a function that wraps one: `lambda x:
block(x)`, a closure, a partial, a bound method, an object with `__call__`.
What it computes depends on all that it reaches.  `Scope` walks there once:
through children and attributes of modules, cells of closures, defaults,
`__self__`, partials, the globals that its code names, small containers and
helper objects.  Each place found can be read, compared by identity, and put back.

What cannot be seen: state inside of extension objects, generators and iterators
of Python, dictionaries of more than 64 entries, sets and deques of more than
1024, the first items of longer lists, and whatever lies behind the code of other
libraries (torch, NumPy, the standard library).
"""

from __future__ import annotations

import builtins
import copy
import functools
import itertools
import re
from collections.abc import Container, Iterable, Sequence
from operator import is_
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...errors import ArgumentError
from ...states.naming import is_foreign, names_in
from ..tensors.checksums import Memory
from .places import ABSENT, LEAVES, Held, Place, Variables, are_alike, replacing, values_of, watched
from .randomness import Own, is_generator

Buffers: TypeAlias = Sequence[tuple[nn.Module, str]]
_numbers = itertools.count()  # of what was found
_MOST_PLACES = 256  # beside those of modules
_DEPTH = 6
_NAMESPACES = {"Namespace", "SimpleNamespace"}
_NOT_RUN = {"__init__", "__repr__", "extra_repr", "__getstate__", "__setstate__", "__reduce__"}
_GLOBAL_HOOKS: Any = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
)
_PARTS = {
    "_parameters": "parameter",
    "_buffers": "buffer",
    "_modules": "child",
    "_forward_hooks": "forward hook",
    "_forward_pre_hooks": "forward pre-hook",
}
_QUOTED = re.compile(r"^[a-z ]+ '([^']*)'")  # the path in a name with a kind
# What `nn.Module` itself keeps in an instance.
_INTERNAL = frozenset(vars(nn.Module()))


class Found:
    """What a scope held at one moment.

    Attributes
    ----------
    named : dict of str to nn.Module
        Nested ones too, each once, by name.
    places : tuple of Place
    held : tuple of dict or list
        What each place held.
    tensors : tuple of Tensor
        All of those, each once.
    generators : tuple of (str, generator)
        With names.
    scripted : tuple of ScriptModule
        Of which only parameters and buffers are known.
    number : int
        Of these contents: what is found later with the same number holds the same.
    addresses, memory : tuple, optional
        What `Environment` has worked out of it.
    """

    def __init__(
        self,
        named: dict[str, nn.Module],
        places: Iterable[Place],
        generators: Iterable[tuple[str, Own]],
        scripted: Iterable[torch.jit.ScriptModule],
    ) -> None:
        self.named, self.places = named, tuple(places)
        self.generators, self.scripted = tuple(generators), tuple(scripted)
        self._now = tuple([place.values() for place in self.places])  # values at any moment
        self._hold(self.now(), anew=True)

    def _hold(self, held: Sequence[Held], *, anew: bool) -> Found:
        self.held, self.tensors = tuple(held), _tensors_among(held, self.scripted)
        self._flat = tuple(itertools.chain.from_iterable(map(values_of, held)))
        if anew:
            self.number = next(_numbers)
            self.addresses: tuple[Buffers, Sequence[int], dict[int, int]] | None = None
            self.memory: tuple[Buffers, list[int], list[int], list[Memory | None]] | None = None
            self._devices: frozenset[torch.device] | None = None
        return self

    def holding(self, held: Sequence[Held], *, anew: bool = False) -> Found:
        """Return the same places with other contents; `anew`, with another number too."""
        return copy.copy(self)._hold(held, anew=anew)

    @property
    def modules(self) -> Iterable[nn.Module]:
        """Modules, nested ones too, each once."""
        return self.named.values()

    def holds(self) -> bool:
        """Whether the very same values are held now."""
        now = tuple(itertools.chain.from_iterable(self._now))
        return len(now) == len(self._flat) and all(map(is_, now, self._flat))

    def now(self) -> list[Held]:
        """Return what the places hold now."""
        return [place.read() for place in self.places]

    def devices(self) -> frozenset[torch.device]:
        """Return the devices that its tensors lie on."""
        if self._devices is None:
            self._devices = frozenset(t.device for t in self.tensors)
        return self._devices

    def by_name(self) -> dict[str, Tensor]:
        """Return parameters and buffers of a module that is alone, by name."""
        return {
            str(key): value
            for held in self.held
            if isinstance(held, dict)
            for key, value in held.items()
            if isinstance(value, Tensor)
        }

    def differences(self, but: Container[tuple[int, object]] = ()) -> list[str]:
        """Return the names of values that are others now, but for some entries of dicts."""
        if self.holds():
            return []
        return [
            name
            for place, held in zip(self.places, self.held, strict=True)
            for key, name in place.changed(held)
            if (id(place.owner), key) not in but
        ]

    def put_back(self, held: Sequence[Held] | None = None) -> None:
        """Make the places hold this again, or what is given."""
        if held is None and self.holds():
            return
        for place, before in zip(self.places, self.held if held is None else held, strict=True):
            place.put_back(before)

    def name_of(self, tensor: Tensor) -> str:
        """Return what a tensor is called, for messages."""
        for place, held in zip(self.places, self.held, strict=True):
            for name, value in place.entries(held):
                if value is tensor:
                    return name
        return f"a tensor of shape {tuple(tensor.shape)}"


class Scope:
    """Modules, tensors and generators that some values refer to; most are callables.

    Parameters
    ----------
    values : sequence of objects
        Each is searched by itself: how far a search goes is limited for each, and what
        another has seen from afar is not seen in full.

    Notes
    -----
    Threads may look at the same time.
    """

    def __init__(self, values: Sequence[object]) -> None:
        self.values = tuple(values)
        self._found = _without_results(self._find())

    def _find(self) -> Found:
        walks = [_Walk(value) for value in self.values]
        places = {place.identity: place for walk in walks for place in walk.places}
        generators = [each for walk in walks for each in walk.generators.values()]
        named: dict[str, nn.Module] = {}
        seen: set[int] = set()
        for name, module in [each for walk in walks for each in walk.modules]:
            if id(module) not in seen:
                seen.add(id(module))
                named[name if name not in named else f"{name} ({len(named)})"] = module
        return Found(
            named,
            places.values(),
            {id(generator): (name, generator) for name, generator in generators}.values(),
            {id(m): m for walk in walks for m in walk.scripted}.values(),
        )

    def look(self) -> Found:
        """Return what is held now; search again where more than numbers and tensors changed."""
        found = self._found
        if found.holds():
            return found
        now = found.now()
        if all(map(are_alike, found.held, now)):
            found = found.holding(now, anew=True)
        else:
            found = self._find()
        self._found = _without_results(found)
        return found

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """Modules, nested ones too, each once."""
        return tuple(self.look().modules)

    def parameters(self) -> list[Tensor]:
        """Return parameters of modules, and other tensors that require gradients; each once."""
        found = self.look()
        of_modules = [p for m in found.modules for p in m._parameters.values() if p is not None]
        of_modules += [p for m in found.scripted for p in m.parameters()]
        others = [t for t in found.tensors if t.requires_grad]
        return list({id(p): p for p in [*of_modules, *others]}.values())

    def buffers(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Return the buffers of all modules, a shared one at each of its places."""
        return buffers_among(self.look().modules)

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


def _tensors_among(
    held: Iterable[Held], scripted: Iterable[torch.jit.ScriptModule]
) -> tuple[Tensor, ...]:
    found = {id(x): x for each in held for x in values_of(each) if isinstance(x, Tensor)}
    found |= {id(x): x for m in scripted for x in (*m.parameters(), *m.buffers())}
    if any(is_lazy(x) for x in found.values()):
        raise ArgumentError(
            "a lazy module has parameters or buffers that have no shape yet; run the plain model "
            "once on a sample before, which initialises them"
        )
    return tuple([x for x in found.values() if not x.is_inference()])


def _without_results(found: Found) -> Found:
    """Return what a scope may refer to as long as it lives: no tensors but those registered.

    Others, such as an auxiliary loss that a stage leaves in an attribute, have
    graphs and memory that are not needed once the next has replaced them.
    """
    kept = {id(buffer) for _, _, buffer in buffers_among(found.modules)}
    if all(isinstance(t, nn.Parameter) or id(t) in kept for t in found.tensors):
        return found

    def registered(value: object) -> object:
        other = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        return ABSENT if other and id(value) not in kept else value

    return found.holding([replacing(held, registered) for held in found.held])


# ---------------------------------------------------------------------- the search


class _Walk:
    """Visits what a value refers to; collects modules, places and generators."""

    def __init__(self, value: object) -> None:
        self.modules: list[tuple[str, nn.Module]] = []
        self.scripted: list[torch.jit.ScriptModule] = []
        self.places: list[Place] = []
        self.generators: dict[int, tuple[str, Own]] = {}
        self._seen: dict[int, object] = {}  # referred to, or an address might be used again
        self._classes: set[type] = set()
        self._globals: dict[int, tuple[dict[str, object], dict[str, None]]] = {}
        self._left = _MOST_PLACES
        self.visit(value, "", 0)
        for hooks in _GLOBAL_HOOKS if self.modules else ():
            self._hold(hooks, "global forward hooks[", "]", 0)
        for space, names in self._globals.values():
            self.places.append(Place(Variables.of_dict(space, names), "global '", "'"))

    def visit(self, value: object, name: str, depth: int) -> None:
        """Visit a value that is reached by a name."""
        if depth > _DEPTH or isinstance(value, LEAVES) or id(value) in self._seen:
            return
        self._seen[id(value)] = value
        match value:
            case nn.Module():
                self._module(value, name, depth)
            case FunctionType():
                self._function(value, name, depth)
            case MethodType():
                self._all((value.__self__, value.__func__), name, depth)
            case functools.partial():
                self._all((value.func, *value.args), name, depth)
                self._hold(value.keywords, f"{name}[", "]", depth)
            case tuple() | frozenset():
                for number, each in enumerate(value if len(value) <= _MOST_PLACES else ()):
                    self.visit(each, f"{name}[{number}]", depth + 1)
            case _ if (owner := watched(value)) is not None:
                keyed = isinstance(owner, dict)
                self._hold(owner, f"{name}[" if keyed else name, "]" if keyed else "", depth)
            case type():
                self._class(value, depth)
            case _ if is_generator(value):
                self.generators[id(value)] = (f"generator {name}", value)
            case _ if not is_foreign(type(value).__module__) or type(value).__name__ in _NAMESPACES:
                attributes = getattr(value, "__dict__", None)
                if type(attributes) is dict:
                    self._hold(attributes, f"{name}.", "", depth)
                self._class(type(value), depth)

    def _hold(self, owner: Any, name: str, end: str, depth: int) -> None:
        """Watch a place, unless there are too many, and visit what it holds."""
        self._left -= 1
        if self._left < 0:
            return
        place = Place(owner, name, end)
        self.places.append(place)
        for inner, value in place.entries(place.read()):
            self.visit(value, inner, depth + 1)

    def _all(self, values: Iterable[object], name: str, depth: int) -> None:
        for value in values:
            self.visit(value, name, depth + 1)

    def _module(self, module: nn.Module, name: str, depth: int) -> None:
        if isinstance(module, torch.jit.ScriptModule):
            self.scripted.append(module)
            return
        name = _QUOTED.sub(r"\1", name)
        self.modules.append((name, module))
        own: Any = module.__dict__
        dot = f"{name}." if name else ""
        ours = type(module).__module__.split(".", 1)[0] == "multistage"
        if not ours:
            self.places.append(Place(own, f"attribute '{dot}", "'"))
        for key, kind in _PARTS.items():
            self.places.append(Place(own[key], f"{kind} '{dot}", "'"))
        for key, child in list(own["_modules"].items()):
            if child is not None and id(child) not in self._seen:
                self._seen[id(child)] = child
                # Nested modules count as deep as they lie: no depth is added.
                self._module(child, f"{dot}{key}", depth)
        if ours:  # a chain of other stages than modules
            chain = own.get("_multistage")
            self._all(chain.refers_to() if chain is not None else (), name, depth)
            return
        for key, value in list(own.items()):
            if key not in _INTERNAL:
                self.visit(value, f"attribute '{dot}{key}'", depth + 1)
        for key in ("_forward_hooks", "_forward_pre_hooks"):
            self._all(list(own[key].values()), name, depth)
        self._class(type(module), depth)

    def _class(self, kind: type, depth: int) -> None:
        for each in kind.__mro__:
            if each in self._classes or is_foreign(each.__module__):
                continue
            self._classes.add(each)
            names, functions = [], []
            for key, value in list(vars(each).items()):
                inner = getattr(value, "__func__", getattr(value, "fget", value))
                if isinstance(inner, FunctionType):
                    functions += [inner] if key not in _NOT_RUN else []
                elif not (key.startswith("__") or hasattr(type(value), "__get__")):
                    names += [key] if not isinstance(value, type) else []
            if names:
                get = lambda name, space=each.__dict__: space.get(name, ABSENT)  # noqa: E731
                put, drop = functools.partial(setattr, each), functools.partial(delattr, each)
                variables = Variables(names, get, put, drop)
                self._hold(variables, f"class attribute '{each.__name__}.", "'", depth)
            for function in functions:
                self._code(function, depth)

    def _function(self, function: FunctionType, name: str, depth: int) -> None:
        if function.__closure__:
            names = function.__code__.co_freevars
            variables = Variables.of_cells(dict(zip(names, function.__closure__, strict=True)))
            self.places.append(Place(variables, "variable '", "'"))
            for key, value in zip(variables.names, variables, strict=True):
                self._variable(value, key, _uses(function.__code__)[1].get(key), depth)
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        self._all(defaults, name or function.__name__, depth)
        if function.__dict__ or any(function.__name__ in each for each in _uses(function.__code__)):
            self._hold(function.__dict__, f"{function.__name__}.", "", depth)
        self._code(function, depth)

    def _variable(self, value: object, name: str, used: set[str] | None, depth: int) -> None:
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
            children: Any = value._modules
            variables = Variables.of_dict(children, sorted(used))
            self._hold(variables, f"child '{name}.", "'", depth)
        else:
            self.visit(value, f"variable '{name}'", depth + 1)

    def _code(self, function: FunctionType, depth: int) -> None:
        """Visit the globals that a function names."""
        space = function.__globals__
        # Not `__module__`, which decorators (torch.compile) take from what they decorate.
        if is_foreign(str(space.get("__name__", ""))):
            return
        for key, attributes in _uses(function.__code__)[0].items():
            value = space.get(key, ABSENT)
            if not isinstance(value, ModuleType):
                self._global(space, key, depth)
            elif not is_foreign(value.__name__):
                for attribute in attributes:
                    self._global(vars(value), attribute, depth)

    def _global(self, space: dict[str, object], key: str, depth: int) -> None:
        value = space.get(key, ABSENT)
        if isinstance(value, ModuleType) or (value is ABSENT and hasattr(builtins, key)):
            return
        if not isinstance(value, (FunctionType, type)):
            self._globals.setdefault(id(space), (space, {}))[1][key] = None
        self.visit(value, f"global '{key}'", depth + 1)


@functools.lru_cache(maxsize=8192)
def _uses(code: CodeType) -> tuple[dict[str, set[str]], dict[str, set[str] | None]]:
    """Return the globals and the free variables that code names, with the attributes it takes.

    None for a free variable that is used otherwise, too.
    """
    loaded: dict[str, set[str]] = {}
    free: dict[str, set[str] | None] = {}
    for kind, name, *following in names_in(code):
        if kind.endswith("global"):
            loaded.setdefault(name, set()).update(following[:1])
        elif kind.endswith("free"):
            known = free.setdefault(name, set())
            free[name] = None if known is None or not following else known | {following[0]}
    return loaded, free
