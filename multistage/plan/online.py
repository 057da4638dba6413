"""Checkpoints for a sequence whose length is known only when it ends.

With a slow tier: the ring of `sweep`, which needs no knowledge of n.

Without one: dynamic checkpointing after Wang, Moin & Iaccarino, "Minimal
repetition dynamic checkpointing algorithm for unsteady adjoint calculation",
SIAM J. Sci. Comput. 31 (2009) 2549-2567, doi:10.1137/080727890.  Every
checkpoint has a level.  A new one has level 0 and replaces a *dispensable*
one: one that a later checkpoint of higher level makes superfluous.  Where
there is none, the newest is replaced by one of a level higher.  Reversing the
gaps by Revolve with the slots that become free took at most 1.33 times the
forward steps of the offline optimum for s = 3..20, n <= 800.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ..actions import Advance, EndForward, Free, Load, Save, Schedule
from ..costs import Costs
from ..simulate import simulate
from .base import Plan, require_steps
from .binomial import nu, reverse_actions
from .bound import lower_bound
from .streaming import streaming_spacing
from .sweep import Sweep

IsLast = Callable[[int], bool]


class _Levels:
    """The checkpoints of the forward sweep: positions, ascending, and their levels."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.positions = [0]
        self.levels = [2**62]  # state 0 is never dispensable

    def place(self, step: int) -> int | None:
        """Record a checkpoint of `step`; return the one it replaces, if any."""
        if len(self.positions) < self.slots:
            self._append(step, 0)
            return None
        highest = found = -1
        for k in reversed(range(1, len(self.positions))):
            if self.levels[k] < highest:
                found = k
            highest = max(highest, self.levels[k])
        if found < 0:
            if self.slots == 1:
                return step  # state 0 fills the only slot
            found, level = len(self.positions) - 1, self.levels[-1] + 1
        else:
            level = 0
        gone = self.positions.pop(found)
        self.levels.pop(found)
        self._append(step, level)
        return gone

    def _append(self, step: int, level: int) -> None:
        self.positions.append(step)
        self.levels.append(level)


def dynamic_schedule(slots: int, is_last: IsLast) -> Schedule:
    """Yield the schedule for one memory level and a length that shows as it comes."""
    checkpoints = _Levels(slots)
    yield Save(0)
    yield Advance(0, 1)
    i = 1
    while not is_last(i):
        gone = checkpoints.place(i)
        if gone is not None and gone != i:
            yield Free(gone)
        if gone != i:
            yield Save(i)
        yield Advance(i, i + 1)
        i += 1
    yield EndForward()
    end = i
    while checkpoints.positions:
        start = checkpoints.positions.pop()
        yield Load(start)
        free = slots - len(checkpoints.positions) - 1
        yield from reverse_actions(start, end, free, keep_first=True)
        yield Free(start)
        end = start


def online_schedule(costs: Costs, slots: int, is_last: IsLast) -> Schedule:
    """Return a schedule for an unknown number of steps.

    Parameters
    ----------
    costs : Costs
    slots : int
        Fast slots, at least 1.
    is_last : callable
        `is_last(i)`: whether state i is the last; asked once for i = 1, 2, ...
        when state i is live.

    Examples
    --------
    >>> schedule = online_schedule(Costs(1.0, 2.0), 3, lambda i: i == 2)
    >>> [type(action).__name__ for action in schedule][:3]
    ['Save', 'Advance', 'Save']
    """
    tier = costs.tier
    if tier is None:
        return dynamic_schedule(slots, is_last)
    spacing = streaming_spacing(costs)
    return Sweep(slots, spacing, None, queue_depth=tier.queue_depth).schedule(None, is_last)


def online(costs: Costs, slots: int, n_steps: int | None) -> Plan:
    """Return the plan an online schedule would follow were its length `n_steps`.

    The schedule itself never looks at `n_steps`; the figures do.
    """
    n = require_steps(n_steps, "online (for its prediction)")
    make = partial(online_schedule, costs, slots, lambda i: i == n)
    run = simulate(make(), None, costs, slots)
    return Plan(
        planner="online",
        n_steps=n,
        slots=slots,
        costs=costs,
        make=make,
        makespan_s=run.makespan_s,
        lower_bound_s=lower_bound(costs, slots, n),
        forward_steps=run.forward_steps,
        peak_slots=run.peak_slots,
        writes=run.writes,
        reads=run.reads,
        stall_s=run.stall_s,
        parameters={"offline_steps": nu(n, slots) + 1},
        note="Needs no knowledge of the number of steps.",
    )
