"""Places that hold values: read, compared by identity, and put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from operator import is_
from types import CellType, FunctionType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from ...states.layout import Array

Held: TypeAlias = dict[Hashable, object] | list[object]  # by key, or in order


_MOST_ENTRIES = 64  # of a dict whose contents are watched, or of a list that is watched whole
_DEEP = 8  # tuples in tuples that are told apart by what they hold
_MOST_ITEMS = 1024  # of a set or deque
_MOST_BYTES = 1 << 16  # of an array


class Absent:
    """Stands for a name that has no value."""


ABSENT = Absent()
LEAVES = (
    *(bool, int, float, complex, str, bytes, type(None), Absent),
    *(torch.dtype, torch.device, torch.Size, Tensor),
)


# Of these exact types, what is equal is the same.
PLAIN = frozenset({*LEAVES} - {Tensor, Absent})


class Variables:
    """Variables as entries: of a closure, of a namespace, of a class."""

    def __init__(
        self,
        names: Iterable[str],
        get: Callable[[str], object],
        put: Callable[[str, object], object],
        drop: Callable[[str], object],
    ) -> None:
        self.names, self.get, self._put, self._drop = tuple(names), get, put, drop

    def __iter__(self) -> Iterator[object]:
        return iter([self.get(name) for name in self.names])

    def put(self, name: str, value: object) -> None:
        """Give a variable a value, or none."""
        if value is ABSENT:
            self._drop(name)
        else:
            self._put(name, value)

    @classmethod
    def of_dict(cls, space: dict[str, object], names: Iterable[str]) -> Variables:
        """Return some entries of a dict."""
        get = lambda name: space.get(name, ABSENT)  # noqa: E731
        return cls(names, get, space.__setitem__, space.__delitem__)

    @classmethod
    def of_cells(cls, cells: dict[str, CellType]) -> Variables:
        """Return what a function takes from around it."""
        return cls(
            cells,
            lambda name: inside(cells[name]),
            lambda name, value: setattr(cells[name], "cell_contents", value),
            lambda name: delattr(cells[name], "cell_contents"),
        )


class Tail:
    """What a long list gets beyond the items it has: those that are appended, as to a log."""

    def __init__(self, owner: list[object]) -> None:
        self.owner, self.start = owner, len(owner)

    def __iter__(self) -> Iterator[object]:
        # Cleared since: another place is needed.
        return iter(self.owner[self.start :] if len(self.owner) >= self.start else [self])


class Bytes:
    """The bytes of a small NumPy array: the same object while nothing changes."""

    def __init__(self, owner: Array) -> None:
        self.owner, self._last = owner, owner.tobytes()

    def __iter__(self) -> Iterator[object]:
        now = self.owner.tobytes()
        if now != self._last:
            self._last = now
        return iter([self._last])


Owner: TypeAlias = (
    dict[Hashable, object] | list[object] | deque[object] | set[object] | Variables | Tail | Bytes
)


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Something that holds values, and what comes before and after a key in their names."""

    owner: Owner
    name: str
    end: str = ""

    @property
    def identity(self) -> int:
        """What two places have in common that are one."""
        return id(self.owner if isinstance(self.owner, (dict, list, deque, set)) else self)

    def values(self) -> Iterable[object]:
        """Return what it holds at any moment, to be iterated."""
        return self.owner.values() if isinstance(self.owner, dict) else self.owner

    def read(self) -> Held:
        """Return what it holds."""
        match self.owner:
            case dict():
                return dict(self.owner)
            case Variables(names=names):
                return dict(zip(names, self.owner, strict=True))
        return list(self.owner)

    def put_back(self, held: Held) -> None:
        """Make it hold this again, touching nothing that it holds already."""
        now = self.read()
        if is_same(now, held):
            return
        match self.owner:
            case Variables():
                assert isinstance(held, dict)
                for name, value in zip(self.owner.names, held.values(), strict=True):
                    if self.owner.get(name) is not value:
                        self.owner.put(name, value)
            case Bytes(owner=array):
                raw: Any = held[0]
                array[...] = np.frombuffer(raw, array.dtype).reshape(array.shape)
            case Tail(owner=items, start=start):
                cleared = len(held) == 1 and held[0] is self.owner
                if len(items) >= start and not cleared:
                    items[start:] = held
            case dict():
                assert isinstance(now, dict) and isinstance(held, dict)
                # Sharded parameters (FSDP2) are exchanged by hooks that know when.
                if any(hasattr(x, "full_tensor") for x in (*now.values(), *held.values())):
                    return
                if [*now] != [*held]:
                    self.owner.clear()  # the order counts, of parameters above all
                for key, value in held.items():  # `update` of a Counter adds
                    if self.owner.get(key, ABSENT) is not value:
                        self.owner[key] = value
            case set():
                self.owner.clear()
                self.owner.update(held)
            case _:
                self.owner.clear()
                self.owner.extend(held)

    def changed(self, held: Held) -> list[tuple[object, str]]:
        """Return keys and names of what it holds now and did not, or the other way round."""
        now = self.read()
        if isinstance(now, dict) and isinstance(held, dict):
            keys = dict.fromkeys([*held, *now])
            others = [k for k in keys if held.get(k, ABSENT) is not now.get(k, ABSENT)]
            return [(key, self.key(key)) for key in others]
        return [] if is_same(now, held) else [(None, self.name)]

    def key(self, key: object) -> str:
        """Return the name of an entry."""
        return f"{self.name}{key!r}]" if self.end == "]" else f"{self.name}{key}{self.end}"

    def entries(self, held: Held) -> Iterator[tuple[str, object]]:
        """Yield names and values of what it held."""
        if isinstance(held, dict):
            yield from ((self.key(key), value) for key, value in held.items())
        else:
            yield from ((f"{self.name}[{number}]", value) for number, value in enumerate(held))


def watched(value: object) -> Owner | None:
    """Return what is watched of a container, None if it has too many entries."""
    match value:
        case np.ndarray() if value.nbytes <= _MOST_BYTES and not value.dtype.hasobject:
            return Bytes(value)
        case list() if len(value) > _MOST_ENTRIES:
            return Tail(value)
        case list() | set() | deque() if len(value) <= _MOST_ITEMS:
            return value
        case dict() if len(value) <= _MOST_ENTRIES:
            return value
    return None


def inside(cell: CellType) -> object:
    """Return what a closure's cell holds, `ABSENT` before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return ABSENT


def values_of(held: Held) -> Iterable[object]:
    """Return the values that a place held."""
    return held.values() if isinstance(held, dict) else held


def is_same(a: Held, b: Held) -> bool:
    """Whether the very same values are held, in the same order and by the same keys."""
    return (
        len(a) == len(b)
        and all(map(is_, values_of(a), values_of(b)))
        and (not isinstance(a, dict) or [*a] == [*b])
    )


def are_alike(a: Held, b: Held) -> bool:
    """Whether nothing but numbers and tensors were exchanged, and few items appended."""
    keyed = isinstance(a, dict)
    if len(a) != len(b) or (keyed and [*a] != [*b]):
        return False
    pairs = zip(values_of(a), values_of(b), strict=True)
    return all(x is y or (isinstance(x, LEAVES) and isinstance(y, LEAVES)) for x, y in pairs)


def replacing(held: Held, other: Callable[[object], object]) -> Held:
    """Return what a place held with some values replaced."""
    if isinstance(held, dict):
        return {key: other(value) for key, value in held.items()}
    return [other(value) for value in held]


def described(every: Iterable[Held]) -> tuple[object, ...]:
    """Return what numbers and texts places held, what shapes tensors have, and which others."""
    each = [(*(held if isinstance(held, dict) else ()), *values_of(held)) for held in every]
    return tuple([tuple(map(_told, values)) for values in each])


def _told(value: object, depth: int = 0) -> object:
    """Return what tells a value from others that replace it."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if type(value) in PLAIN:
        return type(value), value
    if isinstance(value, tuple | FunctionType) and depth < _DEEP:
        inner = value if isinstance(value, tuple) else value.__defaults__ or ()
        head = type(value) if isinstance(value, tuple) else value.__code__
        return head, *(_told(each, depth + 1) for each in inner[:_MOST_ENTRIES])
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    return type(value), id(value)
