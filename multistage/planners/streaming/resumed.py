"""Schedules of durable runs: states are written whatever it costs, and taken up again.

A durable run writes states even where keeping everything in fast slots would
be quicker: what is not on the disk is computed again after a kill.  So where
streaming falls back to fast slots alone, the ring is taken, its spacing wide
enough for the writes to cost the computing thread next to nothing.

A resumed run begins with checkpoints in the tier.  Killed before the last
state was reached, it continues from the newest of them as a ring would.  A
sequence of unknown length does so by the ring alone, which needs no length.
Killed later, it has but a reverse sweep, which is that of `sweep` over the
checkpoints there are: reading ahead, Revolve between them.  Being the
schedule of whatever the disk held, it is as good as those checkpoints, not as
the plan the run began with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ...actions import Advance, Await, Drop, EndForward, Free, Load, Reverse, Schedule, Tape
from ...model.costs import Costs
from ...model.tier import Tier
from ..uniform import UniformPlan
from .form import Form, ring_prediction
from .online import IsLast
from .reserve import Reservation
from .streaming import streaming, streaming_spacing
from .sweep import Sweep, SweepMemory, reverse_sweep, ring_forward

# The share of the forward sweep that unneeded writes may take from it, inverted.
_SHARE = 20


def durable_plan(costs: Costs, slots: int, n_steps: int) -> UniformPlan:
    """Return the plan of a durable run: streaming, but one that writes states.

    Examples
    --------
    >>> from multistage.model.tier import Tier
    >>> costs = Costs(1.0, 2.0, tiers=(Tier(write_s=4.0, read_s=4.0),))
    >>> streaming(costs, 100, 50).writes, durable_plan(costs, 100, 50).writes
    (0, 13)
    """
    costs = _with_tier(costs)
    plan = streaming(costs, slots, n_steps)
    if plan.writes:
        return plan
    sweep = _sweep(costs, slots, n_steps)
    return UniformPlan.predicted(
        "streaming",
        costs,
        slots,
        n_steps,
        partial(_ring, costs, slots, n_steps),
        ring_prediction(Form(sweep.spacing, None), costs, slots, n_steps),
        note=f"Fast slots would do; a state is written every {sweep.spacing:.4g} steps to resume.",
        parameters={"spacing": sweep.spacing, "tail": -1},
    )


def _with_tier(costs: Costs) -> Costs:
    """Return costs with a tier; without one, a transfer is assumed to take the time of a step."""
    if costs.tier is not None:
        return costs
    return replace(costs, tiers=(Tier("durable", costs.forward_step_s, costs.forward_step_s),))


def _sweep(costs: Costs, slots: int, n_steps: int | None) -> Sweep:
    tier = costs.tier
    assert tier is not None
    spacing = max(streaming_spacing(costs), _SHARE * tier.write_overhead_s / costs.forward_step_s)
    if n_steps is None:
        return Sweep(slots, spacing, None, queue_depth=tier.queue_depth)
    return Form(spacing, None).sweep(costs, slots, n_steps, Reservation(costs))


def _ring(costs: Costs, slots: int, n_steps: int) -> Schedule:
    return _sweep(costs, slots, n_steps).schedule(n_steps)


def durable_online_schedule(costs: Costs, slots: int, is_last: IsLast) -> Schedule:
    """Return the schedule of a durable run of unknown length: the ring, writing states.

    Examples
    --------
    >>> schedule = durable_online_schedule(Costs(1.0, 2.0), 3, lambda i: i == 2)
    >>> [type(action).__name__ for action in schedule][:3]
    ['Save', 'Offer', 'Advance']
    """
    return _sweep(_with_tier(costs), slots, None).schedule(None, is_last)


def resumed_schedule(
    costs: Costs,
    slots: int,
    n_steps: int | None,
    stored: Sequence[int],
    end: int | None = None,
    is_last: IsLast | None = None,
) -> Schedule:
    """Return the schedule of a run that was killed.

    Parameters
    ----------
    n_steps : int or None
        None if the number of steps is unknown still.
    stored : sequence of int
        Steps of the checkpoints in the tier, ascending; all below `end`, or
        below `n_steps` where that is None.
    end : int or None
        Step of the adjoint to continue with, `EndForward` then being the first
        action; None if the forward sweep is not over.
    is_last : callable, optional
        With `n_steps` None: `is_last(i)`, asked of the states after the newest
        checkpoint as they are live.  A state that was stored was not the last.

    Examples
    --------
    >>> from multistage.model.tier import Tier
    >>> costs = Costs(1.0, 2.0, tiers=(Tier(write_s=4.0, read_s=4.0),))
    >>> actions = []
    >>> schedule = resumed_schedule(costs, 3, 100, [0, 4], end=6)
    >>> from multistage.actions import drive, Get
    >>> for action, send in drive(schedule):
    ...     actions.append(action)
    ...     send(0 if action == Get(4) else 1 if action == Get(0) else True)
    >>> [type(action).__name__ for action in actions[:5]], actions[1].step
    (['EndForward', 'Get', 'Await', 'Load', 'Get'], 4)
    """
    memory = SweepMemory(_sweep(_with_tier(costs), slots, n_steps))
    for step in stored:
        memory.stored.add(step)
        memory.readable.append(step)
    return _forward(memory, n_steps, is_last) if end is None else _reverse(memory, end)


def _forward(memory: SweepMemory, n: int | None, is_last: IsLast | None) -> Schedule:
    """Go on from the newest checkpoint that can be read, as a ring."""
    if n == 1:
        yield Tape(0)
        yield EndForward()
        yield Reverse(0)
        for step in memory.stored:
            yield Drop(step)
        return
    start, first = 0, 0.0
    while memory.readable:
        step = memory.readable[-1]
        yield from memory.prefetch()
        landed = yield Await(memory.pending.popleft()[1])
        if landed is False:
            memory.used -= 1
            memory.stored.discard(step)
            continue
        yield Load(step)
        yield Free(step)
        memory.used -= 1
        start = step
        if n is not None and step == n - 1:  # used up by the first adjoint step
            memory.stored.discard(step)
            yield Drop(step)
            break
        memory.readable.append(step)
        # The ring keeps and offers states that are not in the tier yet.
        yield Advance(step, step + 1)
        start = step + 1
        first = start + memory.sweep.spacing - 1
        if is_last is not None and is_last(start):
            yield from _reverse(memory, start)
            return
        break
    end = yield from ring_forward(memory, n, is_last, start, first)
    yield from reverse_sweep(memory, end)


def _reverse(memory: SweepMemory, end: int) -> Schedule:
    yield EndForward()
    memory.ended = True
    yield from reverse_sweep(memory, end)
