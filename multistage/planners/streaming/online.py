"""Checkpoints for a sequence whose length is known only when it ends.

With a slow tier: the ring of `sweep`, which needs no knowledge of n; its
spacing is the best in the mean over many lengths.

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

import math
import operator
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from ... import native
from ...actions import Advance, EndForward, Free, Load, Save, Schedule
from ...model.costs import Costs
from ...schedule.simulation import Simulation
from ...support.arrays import Integers
from ..predict import ACTIONS_PER_STEP, Counts, with_actions
from ..single.binomial import beta, nu, repetitions, reverse_actions
from ..single.revolve import revolve_takes
from ..uniform import UniformPlan, require_steps
from .form import Form, ring_prediction, timed
from .reserve import Reservation
from .streaming import SPACINGS, streaming_spacing

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
    if costs.tier is None:
        return dynamic_schedule(slots, is_last)
    return _ring(costs, slots).sweep(costs, slots, 0, Reservation(costs)).schedule(None, is_last)


# Lengths that spacings are judged on, each so much longer than the one before it, up to the
# last (fewer without the C core).  Rings of more than an eighth of it use the least spacing.
_LONGER, _JUDGED_STEPS, _SIMULATED = 1.5, 1 << 14, 256


@lru_cache(maxsize=256)
def _ring(costs: Costs, slots: int) -> Form:
    """Return the ring whose spacing is best in the mean over many lengths.

    The lengths depend on nothing but the slots, and a faster tier has every
    spacing that a slower one has: in the mean it is not slower.  For one length
    it may be, by a part of a write that the end happens to meet.
    """
    least = Form(streaming_spacing(costs), None, online=True)
    most = _JUDGED_STEPS if native.available() else _SIMULATED
    if slots > most // 8:
        return least
    count = int(math.log(most / (slots + 2)) / math.log(_LONGER)) + 1
    lengths = [int((slots + 2) * _LONGER**k) for k in range(count)]
    shares = [1.0 / revolve_takes(costs, slots, n).makespan_s for n in lengths]
    reservation = Reservation(costs)

    def taken(form: Form) -> float:
        """Return its makespan as a share of Revolve's, summed over the lengths."""
        sweep = form.sweep(costs, slots, 0, reservation)
        return sum(
            timed(sweep, costs, n, online=True).makespan_s * share
            for n, share in zip(lengths, shares, strict=True)
        )

    wider = (spacing for spacing in SPACINGS if least.spacing < spacing < most)
    return min((least, *(replace(least, spacing=spacing) for spacing in wider)), key=taken)


def online(costs: Costs, slots: int, n_steps: int | None) -> UniformPlan:
    """Return the plan an online schedule would follow were its length `n_steps`.

    The schedule itself never looks at `n_steps`; the figures do.
    """
    n = require_steps(n_steps, "online (for its prediction)")
    make = partial(online_schedule, costs, slots, partial(operator.eq, n))
    if costs.tier is not None:
        run = ring_prediction(_ring(costs, slots), costs, slots, n)
    else:
        run = with_actions(_dynamic_takes(costs, slots, n), make, costs, slots, n)
    return UniformPlan.predicted(
        "online",
        costs,
        slots,
        n,
        make,
        run,
        note="Needs no knowledge of the number of steps.",
        parameters={"offline_steps": nu(n, slots) + 1},
    )


def checkpoints_after(slots: int, placed: int) -> Integers:
    """Return where `slots` >= 1 checkpoints stand once states 0..placed were offered to them.

    What `_Levels` arrives at step by step, in O(slots): with m slots beside
    that of state 0, all of them have level L after P(m, L) = beta(m, L+1) - 1
    states.  Then the newest goes one level up, the ones beside it are used up
    one after the other, the oldest first, and those behind it begin again.

    Examples
    --------
    >>> checkpoints_after(3, 8).tolist()
    [0, 6, 8]
    """
    held, base, m, left = [0], 0, slots - 1, placed
    while m and left:
        if left <= m:  # there is room yet
            return np.concatenate((held, base + np.arange(1, left + 1)))
        level = repetitions(left + 1, m) - 2  # the highest that all of them reached before
        before = beta(m, level + 1) - 1  # states until then
        since = left - before - 1  # states after the one that went up
        above = base + before + 1
        if since < m - 1:
            kept = base + _all_at(m, level)[since : m - 1]
            tail = np.arange(above, above + since + 1)
            return np.concatenate((held, kept, tail))
        held.append(above)
        base, m, left = above, m - 1, since
    return np.array(held)


def _all_at(slots: int, level: int) -> Integers:
    """Return where all of `slots` checkpoints stand when they reach `level` together."""
    # The first of m gets there after P(m, level-1) + 1 = beta(m, level) states.
    steps, found = beta(slots, level), []
    for m in range(slots, 0, -1):
        found.append(steps)
        steps = steps * m // (m + level)
    return np.cumsum(found)


def _dynamic_takes(costs: Costs, slots: int, n: int) -> Simulation:
    """Return what `dynamic_schedule` takes; the driver's actions are an estimate."""
    starts = checkpoints_after(slots, n - 1)
    gaps = np.diff(np.append(starts, n))
    # The k-th gap is reversed with its own slot and those of the gaps above it.
    free = slots - np.arange(len(gaps))
    once = gaps <= free + 1
    recomputed = int((gaps[once] - 1).sum())
    for length, left in zip(gaps[~once].tolist(), free[~once].tolist(), strict=True):
        recomputed += nu(length, left)
    # A save, an advance and a free for each state at first, then Revolve's.
    counts = Counts(n + recomputed, 0, peak_slots=min(slots, n))
    return counts.take(costs, n, (3 + ACTIONS_PER_STEP) * n)
