"""Places that hold values, whose contents can be read, compared by identity, and put back."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from operator import is_
from types import CellType, MappingProxyType
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ...states.layout import Array

Contents: TypeAlias = tuple[object, ...]
# Names of values by their groups (attributes, parameters, ...); None where they are fixed.
Keys: TypeAlias = Sequence[tuple[Hashable, ...]] | None
MOST_ENTRIES = 64  # of a container whose contents are watched
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
GLOBAL_HOOKS = (
    nn.modules.module._global_forward_hooks,
    nn.modules.module._global_forward_pre_hooks,
)
_K = TypeVar("_K", bound=Hashable)


class Absent:
    """Stands for a name that has no value."""


ABSENT = Absent()
LEAVES = (
    *(bool, int, float, complex, str, bytes, type(None), Absent),
    *(torch.dtype, torch.device, torch.Size, Tensor),
)


class Holder:
    """A place that holds values: its contents can be read and put back.

    Parameters
    ----------
    name : str
        Of the place.
    """

    _keys: Keys = None

    def __init__(self, name: str) -> None:
        self.name = name

    def place(self) -> tuple[object, ...]:
        """Return what two holders of the same values have in common; for as long as they live."""
        return (id(self),)

    def read(self) -> Contents:
        """Return what is held."""
        raise NotImplementedError

    def keys(self) -> Keys:
        """Return the names of the values, if they may change."""
        return None

    def write(self, contents: Contents, keys: Keys = None) -> None:
        """Put back what was read, by the names of that moment; by those at first if not given."""
        raise NotImplementedError

    def name_of(self, number: int) -> str:
        """Return the name of one of the values."""
        return self.name

    def has_same_keys(self) -> bool:
        """Whether the values still have the names they had when it was made."""
        return bool(self.keys() == self._keys)

    def differences(self, before: Contents, now: Contents) -> list[str]:
        """Return the names of values that are others now."""
        if len(now) != len(before):
            return [self.name or "its members"]
        pairs = enumerate(zip(before, now, strict=True))
        return [self.name_of(number) for number, (a, b) in pairs if a is not b]


class OfModule(Holder):
    """Attributes, parameters, buffers, children and forward hooks of a module."""

    def __init__(self, module: nn.Module, name: str, attributes: bool) -> None:
        super().__init__(name)
        d = module.__dict__
        self.module = module
        self._dicts: list[dict[str, Any]] = [d[k] for k in ("_parameters", "_buffers", "_modules")]
        self._hooks: list[dict[Any, Any]] = [d[k] for k in HOOKS]
        self._attributes = d if attributes else None
        self._parts = (d["_parameters"], d["_buffers"], d["_modules"], *self._hooks)
        self._keys: list[tuple[str, ...]] = self.keys()

    def place(self) -> tuple[object, ...]:
        return OfModule, id(self.module)

    def keys(self) -> list[tuple[str, ...]]:
        a, b, c, d, e = self._parts
        return [tuple(self._attributes or ()), tuple(a), tuple(b), tuple(c), tuple(d), tuple(e)]

    def read(self) -> Contents:
        # What running a stage spends most time on.  The dictionaries of a `Part` look values up
        # in the model when asked for them, so that a view may not be kept.
        a, b, c, d, e = self._parts
        if self._attributes is None:
            own: Any = (self.module.training,)
        else:
            own = self._attributes.values()
        if d or e:
            return (*own, *a.values(), *b.values(), *c.values(), *d.values(), *e.values())
        return (*own, *a.values(), *b.values(), *c.values())

    def write(self, contents: Contents, keys: Keys = None) -> None:
        rest, names = iter(contents), keys or self._keys
        if self._attributes is None:
            training = next(rest)
            assert isinstance(training, bool)
            self.module.training = training
        else:
            _fill(self._attributes, {key: next(rest) for key in names[0]})
        for part, own in zip(self._parts, names[1:], strict=True):
            wanted = {key: next(rest) for key in own}
            # Sharded parameters (FSDP2) are exchanged by hooks that know when.
            if not any(hasattr(x, "full_tensor") for x in (*wanted.values(), *part.values())):
                _fill(part, wanted)

    def name_of(self, number: int) -> str:
        own = self._keys[0] if self._attributes is not None else ("training",)
        names: list[str] = [f"attribute {self._path(k)!r}" for k in own]
        kinds = ("parameter", "buffer", "child", "forward hook", "forward pre-hook")
        for kind, keys in zip(kinds, self._keys[1:], strict=True):
            names += [f"{kind} {self._path(str(k))!r}" for k in keys]
        return names[number]

    def _path(self, key: str) -> str:
        return f"{self.name}.{key}" if self.name else key


class OfDict(Holder, Generic[_K]):
    """Entries of a dict, or attributes of an object."""

    def __init__(self, owner: dict[_K, object], name: str, of_object: bool = False) -> None:
        super().__init__(name)
        self._owner, self._of_object = owner, of_object
        self._keys: tuple[tuple[_K, ...]] = self.keys()

    def place(self) -> tuple[object, ...]:
        return OfDict, id(self._owner)

    def keys(self) -> tuple[tuple[_K, ...]]:
        return (tuple(self._owner),)

    def read(self) -> Contents:
        return tuple(self._owner.values())

    def write(self, contents: Contents, keys: Keys = None) -> None:
        _fill(self._owner, dict(zip((keys or self._keys)[0], contents, strict=True)))

    def name_of(self, number: int) -> str:
        key = self._keys[0][number]
        return f"{self.name}.{key}" if self._of_object else f"{self.name}[{key!r}]"


class OfCollection(Holder):
    """Items of a list, a deque or a set."""

    def __init__(self, owner: list[object] | deque[object] | set[object], name: str) -> None:
        super().__init__(name)
        self._owner = owner

    def read(self) -> Contents:
        return tuple(self._owner)

    def write(self, contents: Contents, keys: Keys = None) -> None:
        self._owner.clear()
        if isinstance(self._owner, set):
            self._owner.update(contents)
        else:
            self._owner.extend(contents)


class OfTail(Holder):
    """What a long list gets beyond the items it has: those that are appended, as to a log."""

    def __init__(self, owner: list[object], name: str) -> None:
        super().__init__(name)
        self._owner, self._start = owner, len(owner)

    def read(self) -> Contents:
        # Cleared since: another holder is needed.
        if len(self._owner) < self._start:
            return (ABSENT,)
        return tuple(self._owner[self._start :])

    def write(self, contents: Contents, keys: Keys = None) -> None:
        cleared = len(contents) == 1 and contents[0] is ABSENT
        if len(self._owner) >= self._start and not cleared:
            self._owner[self._start :] = contents

    def has_same_keys(self) -> bool:
        return 0 <= len(self._owner) - self._start <= MOST_ENTRIES


class OfArray(Holder):
    """The bytes of a small NumPy array."""

    def __init__(self, owner: Array, name: str) -> None:
        super().__init__(name)
        self._owner, self._last = owner, owner.tobytes()

    def read(self) -> Contents:
        now = self._owner.tobytes()
        if now != self._last:
            self._last = now
        return (self._last,)  # the same object while nothing changes

    def write(self, contents: Contents, keys: Keys = None) -> None:
        raw = contents[0]
        assert isinstance(raw, bytes)
        self._owner[...] = np.frombuffer(raw, self._owner.dtype).reshape(self._owner.shape)


class OfCells(Holder):
    """Variables that a function takes from around it."""

    def __init__(self, cells: Sequence[CellType], names: Sequence[str], name: str) -> None:
        super().__init__(name)
        self._cells, self._names = cells, names

    def read(self) -> Contents:
        return tuple([inside(cell) for cell in self._cells])

    def write(self, contents: Contents, keys: Keys = None) -> None:
        for cell, value in zip(self._cells, contents, strict=True):
            if inside(cell) is value:
                continue
            if value is ABSENT:
                del cell.cell_contents
            else:
                cell.cell_contents = value

    def name_of(self, number: int) -> str:
        return f"variable {self._names[number]!r}"


class OfNames(Holder):
    """Some names of a namespace: globals that code names, or attributes of a class."""

    def __init__(
        self,
        space: dict[str, object] | MappingProxyType[str, object],
        names: Sequence[str],
        name: str,
        owner: type | None,
    ) -> None:
        super().__init__(name)
        self._space, self._names, self._owner = space, tuple(names), owner

    def place(self) -> tuple[object, ...]:
        return OfNames, id(self._space), self._names

    def read(self) -> Contents:
        get = self._space.get
        return tuple([get(name, ABSENT) for name in self._names])

    def write(self, contents: Contents, keys: Keys = None) -> None:
        for name, value in zip(self._names, contents, strict=True):
            if self._space.get(name, ABSENT) is value:
                continue
            if self._owner is not None and value is ABSENT:
                delattr(self._owner, name)
            elif self._owner is not None:
                setattr(self._owner, name, value)
            elif isinstance(self._space, dict):
                if value is ABSENT:
                    del self._space[name]
                else:
                    self._space[name] = value

    def name_of(self, number: int) -> str:
        if self._owner is None:
            return f"global {self._names[number]!r}"
        return f"class attribute '{self._owner.__name__}.{self._names[number]}'"


def _fill(owner: dict[Any, Any], wanted: dict[Any, Any]) -> None:
    """Make a dict hold these entries, touching no others' values."""
    if tuple(owner) == tuple(wanted):
        for key, value in wanted.items():
            if owner[key] is not value:
                owner[key] = value
        return
    owner.clear()  # the order counts, of parameters above all
    owner.update(wanted)


def inside(cell: CellType) -> object:
    """Return what a closure's cell holds, `ABSENT` before it is assigned."""
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return ABSENT


def is_same(before: Contents, now: Contents) -> bool:
    """Whether the very same values are held."""
    return len(before) == len(now) and all(map(is_, before, now))


def are_alike(before: Contents, now: Contents) -> bool:
    """Whether nothing but numbers and tensors were exchanged."""
    return len(now) == len(before) and all(
        a is b or (isinstance(a, LEAVES) and isinstance(b, LEAVES))
        for a, b in zip(before, now, strict=True)
    )
