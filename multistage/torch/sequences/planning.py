"""Plans of `unroll`: measured once for a kind of cell, made again where memory has changed."""

from __future__ import annotations

import functools
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FunctionType, MethodType
from typing import Generic, TypeVar

import torch
from torch import Tensor, nn

from ...backends.base import Store
from ...backends.urls import TierName
from ...errors import BudgetError
from ...model.budget import Budget
from ...model.stages import StageCosts
from ...model.tier import Tier
from ...support.free_memory import default_budget_bytes
from ..environment.holders import inside
from ..measurement.checking import Check, Checked
from ..tensors.states import TensorLayout, kind_of
from ..tiers.paging import PAGE_BYTES
from .cell import Cell
from .cell_costs import Sample, keep_bytes, node_bytes, offloaded, sample_chunks, tier_of
from .choosing_chunks import choose
from .exploring_cells import FEW
from .samples import Samples
from .through_time import ThroughTime
from .unroll_plan import UnrollPlan, UnrollPlanner

TRAVELS_BYTES = 256 << 10  # tapes' tensors of at least this travel
_DEVICE_SHARE = 0.9  # of the free memory of a CUDA device, where no limit is given
_REMEMBERED = 64

_V = TypeVar("_V")


@dataclass(frozen=True, slots=True)
class Settings:
    """The arguments of `unroll` on memory and plans; equal only if the plans are, as their keys."""

    memory: Budget | None
    tiers: tuple[TierName, ...]
    chunk: int | None
    planner: UnrollPlanner
    progress: bool | None
    check: Check = "error"
    costs: StageCosts | None = None


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

    def values(self) -> list[_V]:
        """Return what is kept."""
        with self._lock:
            return list(self._found.values())

    def got(self, key: object, find: Callable[[], _V]) -> _V:
        """Return what is known, or else find it; two threads may both find it."""
        known = self.get(key)
        return self.put(key, find()) if known is None else known


@dataclass(frozen=True, slots=True)
class _Measured:
    """What chunks of a kind of cell were seen to cost, for sequences of any length.

    Attributes
    ----------
    samples : sequence of Sample
    weight : (int, int, int)
        Of the cell that was measured.
    steps : int
        Of the sequence it was measured in.
    """

    samples: Sequence[Sample]
    weight: tuple[int, int, int]
    steps: int

    def serves(self, weight: tuple[int, int, int], steps: int, chunk: int | None) -> bool:
        """Whether it holds of a cell of some weight, and for sequences of some length.

        In sequences more than twice as long larger chunks may pay than were measured.
        """
        if any(now > then for now, then in zip(weight, self.weight, strict=True)):
            return False
        if chunk is not None and min(chunk, steps) not in [each.chunk for each in self.samples]:
            return False
        return steps <= 2 * self.steps


@dataclass(frozen=True, slots=True)
class _Known:
    """A plan for one length, and what it was made from."""

    measured: _Measured
    plan: UnrollPlan

    def holds(self, limit: int) -> bool:
        """Whether the plan is still right where so much memory is free."""
        if self.plan.peak_bytes > limit:
            return False
        return self.plan.planner == "keep" or limit <= 2 * self.plan.memory_bytes


_measured: Memory[_Measured] = Memory()  # by kind
_checked: Memory[Checked] = Memory()  # by kind, and whether steps run again
_plans: Memory[_Known] = Memory(512)  # by kind and length
_tiers: Memory[Tier] = Memory()
_sequences: Memory[int] = Memory(512)  # how many there were, by the objects of their cells


def samples_of(cells: Cell, chunks: int) -> Samples:
    """Return the chunks of the next sequence of some cells that are looked at more closely."""
    kind = tuple([_object_of(each.given) for each in cells.parts()])
    number = _sequences.put(kind, (_sequences.get(kind) or 0) + 1) - 1
    return Samples(number, chunks, watch=not cells.is_compiled())


def planned(
    chain: ThroughTime,
    leaves: Sequence[Tensor],
    layout: TensorLayout,
    store: Store | None,
    settings: Settings,
    check: Callable[[UnrollPlan], Checked],
) -> UnrollPlan:
    """Return the plan for a sequence, checked when it is made for a kind of cell.

    Cells of a kind are measured and checked once, for sequences of about any length: the
    same module type and parameters, or the same code, and a graph of about the same
    weight.  Where no limit is given, a plan
    is made again from those measurements when it no longer fits what is free, or
    more than twice as much is.

    Raises
    ------
    ArgumentError, BudgetError
        If there is none.
    StateError
        Of the check.
    """
    facts, inputs = chain.facts, chain.inputs
    kind = _key(chain, leaves, layout, settings)
    key = kind, inputs.steps
    measured = _measured.get(kind)
    if measured is not None and not measured.serves(facts.weight, inputs.steps, settings.chunk):
        measured = None
    known = _plans.get(key)
    if known is not None and known.measured is not measured:
        known = None
    if known is not None and settings.memory is not None:
        return known.plan
    if settings.memory is None:
        free = free_bytes(chain.device)
        if known is not None and known.holds(free):
            return known.plan
        budget = Budget(bytes=free)
    else:
        budget = settings.memory
    tapes = store is not None and settings.planner in ("auto", "offload")
    fresh = measured is None
    if measured is None:
        most = 1 << 62 if budget.bytes is None else budget.bytes
        found = sample_chunks(chain, leaves, chunk=settings.chunk, most_bytes=most, tapes=tapes)
        measured = _measured.put(kind, _Measured(found, facts.weight, inputs.steps))
    samples = _counted(measured, chain)
    limit_bytes = budget.bytes_of(lambda: keep_bytes(samples, inputs.steps))
    tier, travelling = None, None
    if store is not None:
        tier = _tiers.got(
            (settings.tiers, chain.device, layout.nbytes),
            lambda: tier_of(store, layout, chain.first(leaves).tensors),
        )
        if tapes and samples[-1].saved is not None:
            page = _page_tier(store, chain.device, settings)
            if page is not None:
                travelling = offloaded(samples, inputs.steps, TRAVELS_BYTES, page, PAGE_BYTES)
    plan = choose(
        samples,
        inputs.steps,
        limit_bytes,
        layout.nbytes,
        tier=tier,
        buffer_bytes=0 if store is None else store.buffer_bytes(layout.record),
        planner=settings.planner,
        chunk=settings.chunk,
        offload=travelling,
    )
    again = kind, plan.plan is not None
    if fresh or (checked := _checked.get(again)) is None:
        checked = _checked.put(again, check(plan))
    plan = replace(plan, checked=checked, by_values=any(each.by_values for each in samples))
    return _plans.put(key, _Known(measured, plan)).plan


def _counted(measured: _Measured, chain: ThroughTime) -> list[Sample]:
    """Return the samples of chunks that a sequence may have, with the nodes of its graphs."""
    steps = chain.inputs.steps
    looked_at = min(FEW, steps) if chain.cell.fused else 1
    nodes = node_bytes(chain.facts.weight[0] / looked_at, chain.device)
    return [replace(each, node_bytes=nodes) for each in measured.samples if each.chunk <= steps]


def _key(
    chain: ThroughTime, leaves: Sequence[Tensor], layout: TensorLayout, settings: Settings
) -> object:
    """Return what a plan is remembered by: equal for sequences that a plan may serve alike."""
    cell, facts = chain.cell, chain.facts
    return (
        identity(cell),
        _kinds(leaves),
        settings,
        facts.wants,
        cell.fused,
        layout.nbytes,
        _kinds(facts.parameters),
        facts.x_kinds,
        chain.around.settings,
        tuple(number.bit_length() for number in facts.weight),
    )


def _page_tier(store: Store, device: torch.device, settings: Settings) -> Tier | None:
    """Return a tier as pages of tapes see it; None if it has room for none."""
    blank = torch.empty(PAGE_BYTES, dtype=torch.uint8, device=device)
    layout = TensorLayout([blank], ["a page"])
    try:
        return _tiers.got((settings.tiers, device, "page"), lambda: tier_of(store, layout, [blank]))
    except BudgetError:  # room for states, but for no page of tapes
        if settings.planner == "offload":
            raise
        return None


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


def _kinds(leaves: Sequence[Tensor]) -> object:
    return tuple(kind_of(t) for t in leaves)


def free_bytes(device: torch.device) -> int:
    """Return the memory of a device that may be used where no limit is given."""
    if device.type != "cuda":
        return default_budget_bytes()
    free, _ = torch.cuda.mem_get_info(device)
    idle = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(_DEVICE_SHARE * (free + idle))
