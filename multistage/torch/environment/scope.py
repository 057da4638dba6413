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

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, TypedDict

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ...errors import ArgumentError
from .holders import (
    ABSENT,
    Contents,
    Holder,
    are_alike,
    is_same,
)
from .randomness import Own
from .walk import Walk

_numbers = itertools.count()  # of what was found
Buffers: TypeAlias = Sequence[tuple[nn.Module, str]]


class Memo(TypedDict, total=False):
    """What others have worked out of the contents of a scope; see `Environment.places`."""

    devices: frozenset[torch.device]
    places: tuple[Buffers, Sequence[int], dict[int, int]]


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
    memo : Memo
        What others have worked out of it.
    """

    modules: tuple[nn.Module, ...]
    holders: tuple[Holder, ...]
    contents: tuple[Contents, ...]
    tensors: tuple[Tensor, ...]
    generators: tuple[tuple[str, Own], ...]
    scripted: tuple[torch.jit.ScriptModule, ...]
    number: int
    memo: Memo = field(default_factory=Memo, compare=False)

    def devices(self) -> frozenset[torch.device]:
        """Return the devices that its tensors lie on."""
        known = self.memo.get("devices")
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

    def put_back(self) -> None:
        """Make the holders hold this again."""
        for holder, contents in zip(self.holders, self.contents, strict=True):
            if not is_same(contents, holder.read()):
                holder.write(contents)

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
        walk = Walk()
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
        """Return what is held now; search again where more than numbers and tensors changed."""
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
        """Return parameters of modules, and other tensors that require gradients; each once."""
        found = self.look()
        of_modules = [p for m in found.modules for p in m._parameters.values() if p is not None]
        of_modules += [p for m in found.scripted for p in m.parameters()]
        others = [t for t in found.tensors if t.requires_grad]
        return list({id(p): p for p in [*of_modules, *others]}.values())

    def buffers(self) -> list[tuple[nn.Module, str, Tensor]]:
        """Return the buffers of all modules, a shared one at each of its places."""
        return buffers_among(self.look().modules)

    def generators(self) -> tuple[tuple[str, Own], ...]:
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


def _tensors_among(
    contents: Iterable[Contents], scripted: Iterable[torch.jit.ScriptModule]
) -> tuple[Tensor, ...]:
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
    graphs and memory that are not needed once the next has replaced them.
    """
    kept = {id(buffer) for _, _, buffer in buffers_among(found.modules)}
    if all(isinstance(t, nn.Parameter) or id(t) in kept for t in found.tensors):
        return found

    def held(value: object) -> object:
        other = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
        return ABSENT if other and id(value) not in kept else value

    contents = tuple([tuple([held(x) for x in values]) for values in found.contents])
    return replace(found, contents=contents, tensors=_tensors_among(contents, found.scripted))
