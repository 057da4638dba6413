"""What is remembered between sequences: costs, plans, checks and the rates of tiers."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FunctionType, MethodType
from typing import Generic, TypeVar

from torch import nn

from ...model.tier import Tier
from ..environment.places import inside
from ..measurement.checking import Checked
from .cells import Cell, Cells
from .costs import KindCost, Sampled
from .samples import Samples as Looks
from .unroll_plan import UnrollPlan

_REMEMBERED = 64
_AGAIN = 20  # sequences after which a tier that was late is measured again

_V = TypeVar("_V")


class Memory(Generic[_V]):
    """What was found last, by kind; for all threads."""

    def __init__(self, most: int = _REMEMBERED) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._found: OrderedDict[object, _V] = OrderedDict()

    def get(self, key: object) -> _V | None:
        """Return the value of a key, None if it is not kept; it is the last to be dropped."""
        with self._lock:
            if key in self._found:
                self._found.move_to_end(key)
            return self._found.get(key)

    def put(self, key: object, value: _V) -> _V:
        """Keep a value, drop those beyond the limit, and return the value."""
        with self._lock:
            self._found[key] = value
            self._found.move_to_end(key)
            while len(self._found) > self._most:
                self._found.popitem(last=False)
        return value

    def drop(self, is_gone: Callable[[object, _V], bool]) -> None:
        """Forget the keys and values of which `is_gone` is true."""
        with self._lock:
            for key, value in list(self._found.items()):
                if is_gone(key, value):
                    del self._found[key]

    def got(self, key: object, find: Callable[[], _V]) -> _V:
        """Return what is known, or else find it; two threads may both find it."""
        known = self.get(key)
        return self.put(key, find()) if known is None else known


@dataclass(slots=True)
class Known:
    """A plan, and the nodes and bytes of the steps it was made for.

    Attributes
    ----------
    weighed : bool
        Whether graphs were seen to hold to given costs.
    """

    plan: UnrollPlan
    weight: tuple[int, int, int]
    weighed: bool = False

    def holds(self, weight: tuple[int, int, int], limit: int | None) -> bool:
        """Whether the plan is right for steps of some weight, where so much memory is free."""
        if not all(now <= then for now, then in zip(weight, self.weight, strict=True)):
            return False
        if limit is None:
            return True
        if self.plan.peak_bytes > limit:
            return False
        return self.plan.planner == "keep" or limit <= 2 * self.plan.memory_bytes


@dataclass(slots=True)
class Remembered:
    """The one memory of `unroll`, for all threads.

    Attributes
    ----------
    samples : Memory of Sampled
        What chunks of equal steps cost, by kind.
    kinds : Memory of KindCost
        What steps cost, by kind.
    plans : Memory of Known
        By what tiers were given as, the kinds of steps and their order.
    checked : Memory of Checked
        By the kinds of steps, and whether steps run again.
    sequences : Memory of int
        How many there were, by the objects of their cells.
    tiers : Memory of Tier
        How fast tiers are; the first item of a key is what they were given as.
    late : Memory of int
        By what tiers were given as: after how many sequences they are measured again.
    """

    samples: Memory[Sampled] = field(default_factory=Memory)
    kinds: Memory[KindCost] = field(default_factory=lambda: Memory(1024))
    plans: Memory[Known] = field(default_factory=lambda: Memory(512))
    checked: Memory[Checked] = field(default_factory=Memory)
    sequences: Memory[int] = field(default_factory=lambda: Memory(512))
    tiers: Memory[Tier] = field(default_factory=Memory)
    late: Memory[int] = field(default_factory=Memory)

    def looks(self, cells: Cells, chunks: int) -> Looks:
        """Return the chunks of the next sequence of some cells that are looked at more closely."""
        kind = tuple([_object_of(each.given) for each in cells.each])
        number = self.sequences.put(kind, (self.sequences.get(kind) or 0) + 1) - 1
        return Looks(number, chunks, watch=not cells.is_compiled())

    def was_late(self, tiers: object, plan: UnrollPlan, key: object, rates: Tier) -> None:
        """Plan the next sequences for a tier as slow as it was, until it is measured again."""
        if self.tiers.get(key) is not None:
            self.tiers.put(key, rates)
        self.late.put(tiers, _AGAIN)
        self.plans.drop(lambda _, known: known.plan is plan)

    def renew(self, tiers: object) -> None:
        """Count a sequence with some tiers; forget their rates when they are to be measured."""
        left = self.late.get(tiers)
        if left is None:
            return
        self.late.put(tiers, left - 1)
        if left == 1:
            self.late.drop(lambda key, _: key == tiers)
            self.tiers.drop(lambda key, _: _is_of(key, tiers))
            self.plans.drop(lambda key, _: _is_of(key, tiers))


def _is_of(key: object, tiers: object) -> bool:
    """Whether a key begins with what tiers were given as."""
    return isinstance(key, tuple) and key[0] == tiers


KNOWN = Remembered()


def identity(cell: Cell) -> object:
    """Return what distinguishes kinds of cells; plans of a kind are shared."""
    given = cell.given
    if isinstance(given, nn.Module):
        shapes = tuple((p.shape, p.dtype, p.device, p.requires_grad) for p in given.parameters())
        return type(given), cell.name, shapes, given.training
    # No object that keeps the cell, or what it refers to, alive.
    function = getattr(given, "func", given)  # of a partial
    return getattr(function, "__code__", type(function))


def _object_of(given: object) -> object:
    """Return what distinguishes cells by what they refer to; a function may be made each time."""
    match given:
        case FunctionType():
            return given.__code__, tuple([id(inside(each)) for each in given.__closure__ or ()])
        case MethodType():
            return id(given.__self__), _object_of(given.__func__)
        case functools.partial():
            return _object_of(given.func), tuple(map(id, given.args))
    return id(given)
