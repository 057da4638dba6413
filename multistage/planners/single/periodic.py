"""Periodic checkpoints (sqrt(n)), as used in deep learning.

Chen, Xu, Zhang & Guestrin 2016, "Training deep nets with sublinear memory
cost", arXiv:1604.06174.  The steps are cut into equal segments; the state before
each is kept and, in reverse, one segment at a time is taped: about 2n
forward steps with sqrt(n) slots or more.  Not optimal; Revolve needs no more
steps with the same slots and free saves, unless tapes kept during the forward
sweep save the second taping.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import numpy as np

from ...actions import Action, Advance, EndForward, Free, Load, Reverse, Save, Schedule, Tape
from ...errors import BudgetError
from ...model.costs import Costs
from ...schedule.simulation import Simulation
from ...support.arrays import Integers, Reals
from ..uniform import MOST_STEPS, UniformPlan, require_steps

# Of the lengths, each up to this is tried, and of longer ones one in 1000.
_EVERY_LENGTH = 1 << 20
ONE_TAPE = (
    "{} keeps the tapes of a segment, and of these operators only one exists; use planner='auto'"
)


def taped_segment(start: int, stop: int) -> Iterator[Action]:
    """Yield: tape steps start..stop-2, turn at the last, reverse the others from their tapes."""
    for i in range(start, stop - 1):
        yield Tape(i)
    for i in reversed(range(start, stop)):
        yield Reverse(i)


def periodic_schedule(length: int, n_steps: int) -> Schedule:
    """Yield the schedule with segments of `length` steps, the last one shorter."""
    starts = range(0, n_steps, length)
    for start in starts[:-1]:
        yield Save(start)
        yield Advance(start, start + length)
    for i in range(starts[-1], n_steps):
        yield Tape(i)
    yield EndForward()
    for i in reversed(range(starts[-1], n_steps)):
        yield Reverse(i)
    for start in reversed(starts[:-1]):
        yield Load(start)
        yield Free(start)
        yield from taped_segment(start, start + length)


def _lengths(longest: int) -> Integers:
    """Return the lengths to try, `longest` and those that smaller numbers have."""
    every = np.arange(1, min(longest, _EVERY_LENGTH) + 1)
    if longest <= _EVERY_LENGTH:
        return every
    longer = np.geomspace(_EVERY_LENGTH, MOST_STEPS, 14_000).astype(np.int64)
    return np.concatenate((every, longer[longer < longest], [longest]))


def _peaks(costs: Costs, n: int, lengths: Integers) -> Reals:
    """Return the fast slots that segments of some lengths take."""
    segments = -(-n // lengths)
    last = n - (segments - 1) * lengths
    # At its turn a segment has all its tapes; where the last state is its own
    # tape that one takes no memory, and of the others one is working memory.
    spared = 2 if costs.state_is_tape else 1
    # Forward: every start but the last beside the last segment's tapes;
    # reverse: one start fewer beside the tapes of a whole segment.
    in_reverse = segments - 2 + np.maximum(0, lengths - spared) * costs.tape_slots
    peaks: Reals = np.maximum(
        segments - 1 + (last - 1) * costs.tape_slots, np.where(segments > 1, in_reverse, 0.0)
    )
    return peaks


def _seconds(costs: Costs, n: int, lengths: Integers) -> Reals:
    """Return the makespan with segments of some lengths."""
    before = -(-n // lengths) - 1  # segments before the last
    last = n - before * lengths
    taped_s = costs.taping_s + costs.reverse_step_s
    actions = 2 * last + 1 + before * (2 * lengths + 3)
    seconds: Reals = (
        before * lengths * costs.forward_step_s
        + last * taped_s
        + before * ((lengths - 1) * taped_s + costs.turn_s)
        + actions * costs.action_s
    )
    return seconds


def periodic(costs: Costs, slots: int, n_steps: int | None) -> UniformPlan:
    """Return the plan with the fastest of the segment lengths that fit.

    More slots let more lengths fit, so that they never make the plan slower.

    Raises
    ------
    BudgetError
        If no segment length fits.

    Examples
    --------
    >>> periodic(Costs(1.0, 2.0), slots=20, n_steps=100).parameters
    {'segments': 17, 'length': 6}
    """
    n = require_steps(n_steps, "periodic")
    weight = costs.tape_slots
    longest = min(n, int(slots / weight) + 2)
    lengths = _lengths(longest)
    peaks = _peaks(costs, n, lengths)
    fitting = peaks <= slots
    if not fitting.any() and costs.one_tape:
        raise BudgetError(ONE_TAPE.format("periodic"))
    if not fitting.any():
        raise BudgetError(
            f"periodic needs about {2 * math.sqrt(n * weight):.0f} fast slots for {n} steps, the "
            f"budget has {slots}"
        )
    seconds = np.where(fitting, _seconds(costs, n, lengths), math.inf)
    at = int(seconds.argmin())
    length = int(lengths[at])
    segments = -(-n // length)
    forward_steps = n + (segments - 1) * (length - 1)
    return UniformPlan.predicted(
        "periodic",
        costs,
        slots,
        n,
        partial(periodic_schedule, length, n),
        Simulation(float(seconds[at]), forward_steps, peak_slots=float(peaks[at])),
        note=f"{segments} segments of {length} steps, each taped once more in reverse.",
        parameters={"segments": segments, "length": length},
    )
