"""Rings of checkpoints: of sequences of unknown length, of durable and of resumed runs.

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

Durable runs follow the same ring where streaming would fall back to fast slots alone: what
is not on the disk is computed again after a kill, so states are written whatever it costs,
at a spacing wide enough for the writes to cost the computing thread next to nothing.

A resumed run begins with checkpoints in the tier.  Killed before the last
state was reached, it continues from the newest of them as a ring would.  A
sequence of unknown length does so by the ring alone, which needs no length.
Killed later, it has but a reverse sweep, which is that of `sweep` over the
checkpoints there are: reading ahead, Revolve between them.  Being the
schedule of whatever the disk held, it is as good as those checkpoints, not as
the plan the run began with.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache, partial

import numpy as np

from ... import native
from ...actions import Advance, Await, Drop, EndForward, Free, Load, Reverse, Save, Schedule, Tape
from ...model.costs import Costs
from ...model.tier import Tier
from ...schedule.simulation import Simulation
from ...support.arrays import Integers
from ..base import Plan
from ..predict import ACTIONS_PER_STEP, Counts, Draft, planner, with_actions
from ..single.binomial import beta, nu, repetitions, reverse_actions
from ..single.revolve import revolve_takes
from .reserve import Reservation
from .streaming import SPACINGS, Form, ring_prediction, streaming, streaming_spacing, timed
from .sweep import Forward, Sweep, SweepMemory, reverse_sweep, ring_forward

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


@planner("online")
def online(costs: Costs, slots: int, n_steps: int) -> Draft:
    """Return the plan an online schedule would follow were its length `n_steps`.

    The schedule itself never looks at `n_steps`; the figures do.
    """
    make = partial(online_schedule, costs, slots, partial(operator.eq, n_steps))
    if costs.tier is not None:
        run = ring_prediction(_ring(costs, slots), costs, slots, n_steps)
    else:
        run = with_actions(_dynamic_takes(costs, slots, n_steps), make, costs, slots, n_steps)
    return Draft(
        make,
        run,
        note="Needs no knowledge of the number of steps.",
        parameters={"offline_steps": nu(n_steps, slots) + 1},
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


# The share of the forward sweep that unneeded writes may take from it, inverted.
_SHARE = 20


def durable_plan(costs: Costs, slots: int, n_steps: int) -> Plan:
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
    note = f"Fast slots would do; a state is written every {sweep.spacing:.4g} steps to resume."
    use = ring_prediction(Form(sweep.spacing, None), costs, slots, n_steps)
    parameters = {"spacing": sweep.spacing, "tail": -1}
    draft = Draft(partial(sweep.schedule, n_steps), use, note, parameters)
    return draft.plan("streaming", costs, slots, n_steps)


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
    >>> from multistage.actions import Await, drive, Get
    >>> for action, send in drive(schedule):
    ...     actions.append(action)
    ...     send({Get(4): 0, Get(0): 1}.get(action, isinstance(action, Await) or None))
    >>> [type(action).__name__ for action in actions[:5]], actions[1].step
    (['EndForward', 'Get', 'Await', 'Load', 'Get'], 4)
    """
    memory = SweepMemory(_sweep(_with_tier(costs), slots, n_steps))
    memory.readable.extend(stored)
    forward = _forward(memory, n_steps, is_last) if end is None else _ended(memory, end)
    return reverse_sweep(memory, forward)


def _forward(memory: SweepMemory, n: int | None, is_last: IsLast | None) -> Forward:
    """Go on from the newest checkpoint that can be read, as a ring."""
    if n == 1:
        yield Tape(0)
        yield EndForward()
        yield Reverse(0)
        return 0
    start, first = 0, 0.0
    while memory.readable:
        step = memory.readable[-1]
        yield from memory.prefetch()
        landed = yield Await(memory.pending.popleft()[1])
        if landed is False:
            memory.used -= 1
            continue
        yield Load(step)
        yield Free(step)
        memory.used -= 1
        start = step
        if n is not None and step == n - 1:  # used up by the first adjoint step
            yield Drop(step)
            break
        memory.readable.append(step)
        # The ring keeps and offers states that are not in the tier yet.
        yield Advance(step, step + 1)
        start = step + 1
        first = start + memory.sweep.spacing - 1
        if is_last is not None and is_last(start):
            return (yield from _ended(memory, start))
        break
    return (yield from ring_forward(memory, n, is_last, start, first))


def _ended(memory: SweepMemory, end: int) -> Forward:
    yield EndForward()
    memory.ended = True
    return end
