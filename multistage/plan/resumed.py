"""Schedules of durable runs: states are written whatever it costs, and taken up again.

A durable run writes states even where keeping everything in fast slots would
be quicker: what is not on the disk is computed again after a kill.  So where
streaming falls back to fast slots alone, the ring is taken, its spacing wide
enough for the writes to cost the computing thread next to nothing.

A resumed run begins with checkpoints in the tier.  Killed before the last
state was reached, it goes on from the newest of them as a ring would.  Killed
later, it has but a reverse sweep, which is that of `sweep` over the
checkpoints there are: reading ahead, Revolve between them.  Being the
schedule of whatever the disk held, it is as good as those checkpoints, not as
the plan the run began with.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from ..actions import Advance, Await, Drop, EndForward, Free, Load, Reverse, Schedule, Tape
from ..costs import Costs, Tier
from .base import Plan
from .bound import lower_bound
from .predict import predict
from .reserve import Reservation
from .streaming import Form, streaming, streaming_spacing
from .sweep import Sweep, SweepRun

# The share of the forward sweep that unneeded writes may take from it, inverted.
_SHARE = 20


def durable_plan(costs: Costs, slots: int, n_steps: int) -> Plan:
    """Return the plan of a durable run: streaming, but one that writes states.

    Examples
    --------
    >>> from multistage.costs import Tier
    >>> costs = Costs(1.0, 2.0, tiers=(Tier(write_s=4.0, read_s=4.0),))
    >>> streaming(costs, 100, 50).writes, durable_plan(costs, 100, 50).writes
    (0, 13)
    """
    costs = _with_tier(costs)
    plan = streaming(costs, slots, n_steps)
    if plan.writes:
        return plan
    sweep = _sweep(costs, slots, n_steps)
    make = partial(_ring, costs, slots)
    predicted = predict(make, costs, slots, n_steps, period=sweep.spacing, head=4 * slots)
    return Plan(
        planner="streaming",
        n_steps=n_steps,
        slots=slots,
        costs=costs,
        make=partial(make, n_steps),
        makespan_s=predicted.makespan_s,
        lower_bound_s=lower_bound(costs, slots, n_steps),
        forward_steps=predicted.forward_steps,
        peak_slots=predicted.peak_slots,
        writes=predicted.writes,
        reads=predicted.reads,
        stall_s=predicted.stall_s,
        parameters={"spacing": sweep.spacing, "tail": -1},
        note=f"Fast slots would do; a state is written every {sweep.spacing:.4g} steps to resume.",
    )


def _with_tier(costs: Costs) -> Costs:
    """Return costs with a tier; one nobody measured writes and reads a state in a step."""
    if costs.tier is not None:
        return costs
    return replace(costs, tiers=(Tier("durable", costs.forward_step_s, costs.forward_step_s),))


def _sweep(costs: Costs, slots: int, n_steps: int) -> Sweep:
    tier = costs.tier
    assert tier is not None
    spacing = max(streaming_spacing(costs), _SHARE * tier.write_overhead_s / costs.forward_step_s)
    return Form(spacing, None).sweep(costs, slots, n_steps, Reservation(costs))


def _ring(costs: Costs, slots: int, n_steps: int) -> Schedule:
    return _sweep(costs, slots, n_steps).schedule(n_steps)


def resumed_schedule(
    costs: Costs, slots: int, n_steps: int, stored: Sequence[int], end: int | None = None
) -> Schedule:
    """Return the schedule of a run that was killed.

    Parameters
    ----------
    stored : sequence of int
        Steps of the checkpoints in the tier, ascending; all below `end`, or
        below `n_steps` where that is None.
    end : int or None
        Step of the adjoint to go on with, `EndForward` then being the first
        action; None if the forward sweep is not over.

    Examples
    --------
    >>> from multistage.costs import Tier
    >>> costs = Costs(1.0, 2.0, tiers=(Tier(write_s=4.0, read_s=4.0),))
    >>> actions = []
    >>> schedule = resumed_schedule(costs, 3, 100, [0, 4], end=6)
    >>> from multistage.actions import drive, Get
    >>> for action, send in drive(schedule):
    ...     actions.append(action)
    ...     send(0 if action == Get(4) else 1 if action == Get(0) else True)
    >>> [str(action) for action in actions[:5]]
    ['EndForward()', 'Get(step=4, tier=0)', 'Await(token=0)', 'Load(step=4)', 'Get(step=0, tier=0)']
    """
    run = _Resumed(_sweep(_with_tier(costs), slots, n_steps), n_steps, stored)
    return run.forward() if end is None else run.reverse(end)


class _Resumed(SweepRun):
    """A sweep that finds checkpoints in the tier."""

    def __init__(self, sweep: Sweep, n_steps: int, stored: Sequence[int]) -> None:
        super().__init__(sweep, n_steps, None)
        for step in stored:
            self.stored.add(step)
            self.readable.append(step)

    def forward(self) -> Schedule:
        assert self.n is not None
        if self.n == 1:
            yield Tape(0)
            yield EndForward()
            yield Reverse(0)
            for step in self.stored:
                yield Drop(step)
            return
        while self.readable:
            step = self.readable[-1]
            yield from self._prefetch()
            landed = yield Await(self.pending.popleft()[1])
            if landed is False:
                self.used -= 1
                self.stored.discard(step)
                continue
            yield Load(step)
            yield Free(step)
            self.used -= 1
            self.start = step
            if step == self.n - 1:  # used up by the first adjoint step
                self.stored.discard(step)
                yield Drop(step)
            else:
                self.readable.append(step)
                # The ring keeps and offers states that are not in the tier yet.
                yield from self._one_on()
            break
        yield from self.schedule()

    def _one_on(self) -> Schedule:
        yield Advance(self.start, self.start + 1)
        self.start += 1
        self.first = self.start + self.sweep.spacing - 1

    def reverse(self, end: int) -> Schedule:
        yield EndForward()
        self.ended = True
        self.end = end
        yield from self._reverse_all()
