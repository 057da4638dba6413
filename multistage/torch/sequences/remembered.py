"""What is remembered between sequences: costs, plans, checks and the rates of tiers."""

from __future__ import annotations

import functools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, TypeVar, cast

from torch import Tensor, nn

from ...model.stages import Stage
from ...model.tier import Tier
from ..environment.places import PLAIN, inside
from .cells import Cell, Cells
from .samples import Samples as Looks
from .unroll_plan import UnrollPlan

_REMEMBERED = 1024
_AGAIN = 20  # sequences after which a tier that was late is measured again

_V = TypeVar("_V")


@dataclass(slots=True)
class Known:
    """A plan, and the weight of the steps it was made for."""

    plan: UnrollPlan
    weight: tuple[int, ...]
    weighed: bool = False  # whether graphs were seen to hold to given costs

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What its chunks cost."""
        assert self.plan.plan is not None
        return self.plan.plan.stage_costs.stages

    def holds(self, weight: tuple[int, ...], limit: int | None) -> bool:
        """Whether the plan is right for steps of some weight, where so much memory is free."""
        if not all(now <= then for now, then in zip(weight, self.weight, strict=True)):
            return False
        if limit is None:
            return True
        if self.plan.peak_bytes > limit:
            return False
        return self.plan.planner == "keep" or limit <= 2 * self.plan.memory_bytes


class Remembered:
    """The one memory of `unroll`: what was found last, by class and key; for all threads.

    - Sampled, by kind: what chunks of equal steps cost;
    - Cost, by kind: what a step costs;
    - Known, by what tiers were given as, the kinds of steps and their order: plans;
    - Checked, by the kinds of steps, and whether steps run again;
    - Tier, by what tiers were given as, and what moves: how fast they are;
    - int, by what tiers were given as: after how many sequences those that were late are measured
      again;
    - tuple, by what tells cells apart, with the objects among it: how many sequences there were;
      by kind and what the cell refers to, the bytes that a step takes at most; `Checked`, of
      fused cells.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[type, object], object] = OrderedDict()

    def get(self, kind: type[_V], key: object) -> _V | None:
        """Return the value of a key, None if it is not kept; it is the last to be dropped."""
        with self._lock:
            if (kind, key) in self._found:
                self._found.move_to_end((kind, key))
            found: Any = self._found.get((kind, key))
            value: _V | None = found
        return value

    def put(self, key: object, value: _V) -> _V:
        """Keep a value, drop those beyond the limit, and return the value."""
        with self._lock:
            self._found[type(value), key] = value
            self._found.move_to_end((type(value), key))
            while len(self._found) > _REMEMBERED:
                self._found.popitem(last=False)
        return value

    def got(self, kind: type[_V], key: object, find: Callable[[], _V]) -> _V:
        """Return what is known, or else find it; two threads may both find it."""
        known = self.get(kind, key)
        return self.put(key, find()) if known is None else known

    def of_cells(
        self, cells: Sequence[object], what: object, find: Callable[[], _V], *, anew: bool
    ) -> _V:
        """Return what is known of these very cells, or else find it; always, if it is `anew`."""
        key, found, objects = self._of(cells, what)
        if found is None or anew:
            found = find()
            self.put(key, (found, objects))
        value: Any = found
        return cast(_V, value)

    def differ(self, cells: Sequence[object], what: object) -> bool:
        """Whether nothing is known of these very cells."""
        return self._of(cells, what)[1] is None

    def looks(self, cells: Cells, chunks: int) -> Looks:
        """Return the chunks of the next sequence of some cells that are looked at more closely."""
        key, number, objects = self._of(cells.callables, "sequences")
        number = number if isinstance(number, int) else 0
        self.put(key, (number + 1, objects))
        return Looks(number, chunks, watch=not cells.is_compiled())

    def _of(
        self, cells: Sequence[object], what: object
    ) -> tuple[object, object, tuple[weakref.ref[object], ...]]:
        """Return a key, and what is known by it if nothing can be other than it was.

        Others may have the addresses of objects that are gone; what cannot be referred to weakly
        may be another each time.
        """
        parts = [part for each in cells for part in _parts_of(each, set())]
        objects = [part for part in parts if type(part) not in PLAIN]
        key = what, tuple([(type(p), p) if type(p) in PLAIN else id(p) for p in parts])
        found, those = self.get(tuple, key) or (None, ())
        referred = tuple([weakref.ref(o) for o in objects if type(o).__weakrefoffset__])
        if len(referred) < len(objects) or any(each() is None for each in those):
            found = None
        return key, found, referred

    def was_late(self, tiers: object, plan: UnrollPlan, key: object, rates: Tier) -> None:
        """Plan the next sequences for a tier as slow as it was, until it is measured again."""
        if self.get(Tier, key) is not None:
            self.put(key, rates)
        self.put(("late", tiers), _AGAIN)
        self._drop(lambda _, value: isinstance(value, Known) and value.plan is plan)

    def renew(self, tiers: object) -> None:
        """Count a sequence with some tiers; forget their rates when they are to be measured."""
        left = self.get(int, ("late", tiers))
        if left:
            self.put(("late", tiers), left - 1)
        if left == 1:
            self._drop(
                lambda key, value: (
                    isinstance(value, Known | Tier) and isinstance(key, tuple) and key[0] == tiers
                )
            )

    def _drop(self, is_gone: Callable[[object, object], bool]) -> None:
        with self._lock:
            for (kind, key), value in list(self._found.items()):
                if is_gone(key, value):
                    del self._found[kind, key]


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


def _parts_of(given: object, seen: set[int]) -> Iterator[object]:
    """Yield what tells a cell from others; a function may be made each time.

    A container is as its items are, unless it may be a memory.
    """
    if type(given) in PLAIN:
        yield given
        return
    if isinstance(given, Tensor) or (id(given) in seen and not isinstance(given, FunctionType)):
        return
    inner: Iterable[object] = ()
    match given:
        case FunctionType() if id(given) in seen or given.__dict__:
            yield given  # its attributes may be a memory
        case FunctionType():
            yield given.__code__
            defaults = *(given.__defaults__ or ()), *(given.__kwdefaults__ or {}).values()
            inner = *map(inside, given.__closure__ or ()), len(defaults), *defaults
        case MethodType():
            inner = given.__self__, given.__func__
        case functools.partial():
            inner = given.func, given.args, *given.keywords, *given.keywords.values()
        case tuple() | frozenset():
            inner = len(given), *given
        case list() if _is_full(given):
            inner = len(given), *given
        case dict() if _is_full(given.values()):
            inner = len(given), *given, *given.values()
        case _:
            yield given
    seen.add(id(given))
    for each in inner:
        yield from _parts_of(each, seen)


def _is_full(items: Collection[object]) -> bool:
    """Whether nothing among some items seems to be there for a cell to remember in."""
    return bool(items) and all(
        x is not None and (not isinstance(x, Tensor) or (x.is_leaf and x.requires_grad))
        for x in items
    )
