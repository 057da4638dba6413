"""Schedules of unequal steps for the executor, of any number of steps.

plan
    `plan_at_once`, the optimal dynamic program, for as many steps as it solves in
    seconds.  More are divided into blocks, see `planners.chain.nested`.
groups
    With a slow tier, see `planners.chain.grouped`.
survey
    For costs or a number of steps that show themselves only as the steps run: the
    forward sweep keeps every k-th state, twice as far apart each time the memory is
    full; by its end sizes and times are known, and each interval is reversed by `plan`.
A *room* is memory beyond the least in which the steps at hand can be reversed at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, TypeAlias

from ...actions import Action, Advance, EndForward, Free, Load, Save, Schedule
from ...errors import BudgetError
from ...model.stages import StageCosts
from ...model.tier import Tier
from ..base import Plan
from ..single.binomial import forward_and_reverse, reverse_actions
from .at_once import SLOTS, beside, fastest, least_memory, plan_at_once
from .grouped import plan_grouped
from .memory import shifted
from .nested import plan_nested
from .sizes import Sizes

PersistentPlanner: TypeAlias = Literal["optimal", "revolve"]
# Steps that are planned at once: their dynamic program takes a second, or two with a tier, if
# those of more than `_FINE` are solved for fewer slots of memory.
MOST_AT_ONCE, _FINE, _FEWER = 340, 80, 200


def part(costs: StageCosts, start: int, stop: int) -> StageCosts:
    """Return the costs of steps start..stop-1 alone."""
    before = costs.stages[start - 1].output_bytes if start else costs.input_bytes
    return StageCosts(costs.stages[start:stop], before)


def plan(
    costs: StageCosts,
    room_bytes: int,
    planner: PersistentPlanner,
    *,
    first: int = 0,
    slots: int | None = None,
) -> Iterator[Action]:
    """Yield the actions that reverse all steps from live state 0.

    State 0 is held by the caller; the steps are called first, first + 1, ...  With `slots`
    they are Revolve's that keep so many states, whatever the room.
    """
    n = len(costs.stages)
    actions: Iterable[Action] | None = None
    if slots is None and n <= MOST_AT_ONCE:
        memory = room_bytes + least_memory(costs, planner)
        actions = plan_at_once(costs, memory, planner, resolution=_slots(costs)).actions
    elif slots is None:
        limit = room_bytes + least_in_pieces(costs) - costs.input_bytes
        actions = plan_nested(Sizes.of(costs), limit, tapes=planner == "optimal")
    if actions is None:  # without slots each from the start
        actions = forward_and_reverse(reverse_actions(0, n, slots or 0, keep_first=True))
    for action in actions:
        yield shifted(action, first)


def chain_plan(
    costs: StageCosts,
    room_bytes: int,
    planner: PersistentPlanner,
    rates: Tier | None = None,
    slots: int | None = None,
) -> Plan:
    """Return the plan of all steps, see `plan`, judged byte by byte; `rates` of a slow tier."""
    if slots is not None:
        return Plan.judged("revolve", costs, None, plan(costs, 0, planner, slots=slots))
    memory = least_beside(costs, planner) + room_bytes
    if len(costs.stages) <= MOST_AT_ONCE:
        slots = _slots(costs) if rates is None else SLOTS
        return plan_at_once(costs, memory, planner, rates, resolution=slots)
    return plan_in_pieces(costs, memory, planner, rates)


def least_beside(costs: StageCosts, planner: PersistentPlanner) -> int:
    """Return the bytes that `chain_plan` counts on beside its room."""
    whole = len(costs.stages) <= MOST_AT_ONCE
    return least_memory(costs, planner) if whole else least_in_pieces(costs)


def plan_within(costs: StageCosts, memory_bytes: int) -> Plan:
    """Return the plan of all steps within a limit, in pieces where there are too many.

    Raises
    ------
    BudgetError
        If there is none, or in pieces perhaps none.
    """
    if len(costs.stages) <= MOST_AT_ONCE:
        return plan_at_once(costs, memory_bytes)
    return plan_in_pieces(costs, memory_bytes, "optimal")


def plan_in_pieces(
    costs: StageCosts,
    limit: int | None,
    planner: PersistentPlanner,
    rates: Tier | None = None,
) -> Plan:
    """Return the fastest plan in pieces, within a limit in bytes.

    Raises
    ------
    BudgetError
        Below the limit in which each step can be reversed by itself, from state 0.
    """
    plain = plan_at_once(costs, None, "store-all")
    if planner == "optimal" and (limit is None or plain.peak_bytes <= limit):
        return plan_at_once(costs, limit, planner, rates)
    least = least_in_pieces(costs)
    most = least + sum(stage.output_bytes for stage in costs.stages)
    memory = most if limit is None else limit
    if memory < least:
        raise BudgetError.below(
            f"memory={limit} bytes < {least} bytes, in which {len(costs.stages)} steps are "
            "planned in pieces; raise the limit",
            least,
        )
    without = Plan.judged("pieces", costs, limit, plan(costs, memory - least, planner))
    if rates is None:
        return without
    away = plan_grouped(costs.whole, memory, rates, tapes=planner == "optimal")
    found = [without] + ([Plan.judged("pieces", costs, limit, away, rates)] if away else [])
    return beside(fastest(found), rates, without)


def _slots(costs: StageCosts) -> int:
    return SLOTS if len(costs.stages) <= _FINE else _FEWER


def least_in_pieces(costs: StageCosts) -> int:
    """Return memory enough to reverse each step by itself, from state 0."""
    before, gradient, most = 0, costs.input_gradient_bytes, 0
    largest = max(costs.input_gradient_bytes, *(stage.gradient_bytes for stage in costs.stages))
    for stage, reverse in zip(costs.stages, costs.reverse_bytes, strict=True):
        here = (
            stage.output_bytes + stage.forward_overhead_bytes + largest,
            stage.tape_bytes + stage.tape_overhead_bytes + largest,
            stage.tape_bytes + stage.gradient_bytes + gradient + reverse,
        )
        most = max(most, before + max(here))
        before, gradient = stage.output_bytes, stage.gradient_bytes
    return costs.input_bytes + most


def survey(
    room_bytes: Callable[[int], int],
    is_last: Callable[[int], bool],
    state_bytes: Callable[[int], int],
    reversing: Callable[[int, int, list[int]], Iterable[Action]],
) -> Schedule:
    """Yield the schedule of a first sweep.

    Parameters
    ----------
    room_bytes : callable
        `room_bytes(i)`: for kept states, once state i has been live; it may raise.
        State 0 is held by the caller.
    is_last : callable
        `is_last(i)`: whether state i is the last; asked once for i = 1, 2, ..., when
        state i is live.
    state_bytes : callable
        `state_bytes(i)`: of state i, once it has been live.
    reversing : callable
        `reversing(start, stop, kept)`: the actions that reverse those steps, which have
        run, from live state `start`, with the states `kept`; without `EndForward`.
    """
    kept: dict[int, int] = {}
    every, i = 1, 0
    while True:
        yield Advance(i, i + 1)
        i += 1
        if is_last(i):
            break
        size, room = state_bytes(i), room_bytes(i)
        while kept and size + sum(kept.values()) > room and i % every == 0:
            every *= 2
            for step in [step for step in kept if step % every]:
                del kept[step]
                yield Free(step)
        if i % every == 0 and size + sum(kept.values()) <= room:
            kept[i] = size
            yield Save(i)
    yield EndForward()
    end = i
    for start in reversed([0, *kept]):
        yield Load(start)
        yield from reversing(start, end, [step for step in kept if step <= start])
        if start:
            yield Free(start)
        end = start


def without_end(actions: Iterable[Action]) -> Iterator[Action]:
    """Yield actions of a sweep whose forward part has ended before."""
    return (action for action in actions if not isinstance(action, EndForward))
