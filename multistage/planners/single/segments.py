"""Tapes of whole segments: all of them, periodic checkpoints (sqrt(n)), recursive segments.

store-all
    Every tape is kept: plain backpropagation, the baseline without recomputation.
periodic
    Chen, Xu, Zhang & Guestrin 2016, "Training deep nets with sublinear memory
    cost", arXiv:1604.06174.  The steps are cut into equal segments; the state before
    each is kept and, in reverse, one segment at a time is taped: about 2n
    forward steps with sqrt(n) slots or more.
recursive
    After the same.  Each segment is cut again until its tapes fit: k log n slots and
    at most n log_{k+1} n more steps.

Periodic and recursive segments are not optimal; Revolve needs no more steps with the same
slots and free saves, unless tapes kept during the forward sweep save the second taping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from typing import TypeAlias

import numpy as np

from ...actions import Action, Advance, EndForward, Free, Load, Reverse, Save, Schedule, Tape
from ...errors import BudgetError
from ...model.costs import NOT_KEPT, Costs
from ...schedule.simulation import Simulation
from ...support.arrays import Integers, Reals
from ..base import MOST_STEPS, store_all_schedule
from ..predict import Counts, Draft, planner
from .binomial import forward_and_reverse


@planner("store-all")
def store_all(costs: Costs, slots: int, n_steps: int) -> Draft:
    """Return the plan that keeps every tape in fast memory.

    Raises
    ------
    BudgetError
        If the tapes do not fit.

    Examples
    --------
    >>> store_all(Costs(1.0, 2.0), slots=9, n_steps=10).makespan_s
    30.0
    """
    peak = (n_steps - 1) * costs.tape_slots
    if peak > slots and costs.tape_bytes >= NOT_KEPT:
        raise BudgetError("store-all keeps all tapes, and of these operators only one exists")
    if peak > slots:
        raise BudgetError(f"store-all needs {peak:g} fast slots, the budget has {slots}")
    return Draft(
        partial(store_all_schedule, n_steps),
        Counts(n_steps, n_steps, peak_slots=peak).take(costs, n_steps, 2 * n_steps + 1),
        note="Every tape stays in fast memory; nothing is recomputed.",
    )


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


@planner("periodic")
def periodic(costs: Costs, slots: int, n_steps: int) -> Draft:
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
    weight = costs.tape_slots
    longest = min(n_steps, int(slots / weight) + 2)
    lengths = _lengths(longest)
    peaks = _peaks(costs, n_steps, lengths)
    fitting = peaks <= slots
    if not fitting.any() and costs.one_tape:
        raise BudgetError(ONE_TAPE.format("periodic"))
    if not fitting.any():
        raise BudgetError(
            f"periodic needs about {2 * math.sqrt(n_steps * weight):.0f} fast slots for {n_steps} "
            f"steps, the budget has {slots}"
        )
    seconds = np.where(fitting, _seconds(costs, n_steps, lengths), math.inf)
    at = int(seconds.argmin())
    length = int(lengths[at])
    segments = -(-n_steps // length)
    forward_steps = n_steps + (segments - 1) * (length - 1)
    return Draft(
        partial(periodic_schedule, length, n_steps),
        Simulation(float(seconds[at]), forward_steps, peak_slots=float(peaks[at])),
        note=f"{segments} segments of {length} steps, each taped once more in reverse.",
        parameters={"segments": segments, "length": length},
    )


def _fits(length: int, free: int, weight: float) -> bool:
    return (length - 1) * weight <= free


def recursive_actions(
    start: int, stop: int, free: int, branch: int, weight: float
) -> Iterator[Action]:
    """Yield the reversal of start..stop-1, state `start` live, by recursive segments.

    `free` slots are left; a tape beyond the first takes `weight` of them.
    """
    if _fits(stop - start, free, weight):
        yield from taped_segment(start, stop)
        return
    part = -(-(stop - start) // (branch + 1))
    *starts, last = range(start, stop, part)
    for a in starts:
        yield Save(a)
        yield Advance(a, a + part)
    yield from recursive_actions(last, stop, free - len(starts), branch, weight)
    for k, a in reversed([*enumerate(starts)]):
        yield Load(a)
        yield Free(a)
        yield from recursive_actions(a, a + part, free - k, branch, weight)


@dataclass(frozen=True, slots=True)
class _Count:
    """What a recursive reversal takes: steps advanced, steps taped, slots at the peak, actions."""

    advanced: int
    taped: int
    peak: float
    actions: int


_Counter: TypeAlias = Callable[[int, int, int, bool], _Count | None]


def _counter(weight: float, state_is_tape: bool) -> _Counter:
    """Return a function that counts a reversal, None where its tapes do not fit.

    Its arguments are the steps, the free slots, the branching, and whether the last
    of the steps is n-1, whose tape is held too.
    """

    @cache
    def count(length: int, free: int, branch: int, last: bool) -> _Count | None:
        if _fits(length, free, weight):
            spared = 2 if state_is_tape and not last else 1
            return _Count(0, length - 1, max(0, length - spared) * weight, 2 * length - 1)
        part = -(-length // (branch + 1))  # as above
        saves = -(-length // part) - 1
        if not 1 <= saves <= free:
            return None
        # The last part first: it has the fewest slots, and most often decides that none fit.
        end = count(length - saves * part, free - saves, branch, last)
        others = None if end is None else alike(part, free, branch, 0, saves - 1)
        if end is None or others is None:
            return None
        return _Count(
            saves * part + end.advanced + others.advanced,
            end.taped + others.taped,
            max(saves, saves + end.peak, others.peak),
            4 * saves + end.actions + others.actions,
        )

    def alike(part: int, free: int, branch: int, first: int, final: int) -> _Count | None:
        """Count equal parts, of which part k of first..final has `free` - k slots.

        More slots never make a part run more steps, so parts between two that
        count alike count like them; only where the two differ is there more to see.
        """
        least = count(part, free - final, branch, False)
        most = least if first == final else count(part, free - first, branch, False)
        if least is None or most is None:
            return None
        if least == most:
            parts = final - first + 1
            return _Count(
                parts * least.advanced,
                parts * least.taped,
                final + least.peak,
                parts * least.actions,
            )
        middle = (first + final) // 2
        one = alike(part, free, branch, first, middle)
        other = alike(part, free, branch, middle + 1, final)
        if one is None or other is None:
            return None
        return _Count(
            one.advanced + other.advanced,
            one.taped + other.taped,
            max(one.peak, other.peak),
            one.actions + other.actions,
        )

    return count


@planner("recursive")
def recursive(costs: Costs, slots: int, n_steps: int) -> Draft:
    """Return the plan of recursive segments with the branching that costs least.

    Raises
    ------
    BudgetError
        If no branching fits.

    Examples
    --------
    >>> plan = recursive(Costs(1.0, 2.0), slots=6, n_steps=100)
    >>> plan.parameters["branch"], plan.peak_slots <= 6
    (1, True)
    """
    weight = costs.tape_slots
    count = _counter(weight, costs.state_is_tape)
    found = []
    for branch in sorted({*range(1, min(slots, 64) + 1), slots} - {0}):
        counts = count(n_steps, slots, branch, True)
        if counts is not None:
            taped = counts.taped + 1  # the last step's Tape, and EndForward, are two actions more
            takes = Counts(counts.advanced + taped, taped, peak_slots=counts.peak)
            found.append((takes.take(costs, n_steps, counts.actions + 2), branch))
    if not found and costs.one_tape:
        raise BudgetError(ONE_TAPE.format("recursive"))
    if not found:
        raise BudgetError(
            f"recursive needs about {math.ceil(math.log2(n_steps + 1))} fast slots for {n_steps} "
            f"steps, the budget has {slots}"
        )
    use, branch = min(found, key=lambda entry: (entry[0].makespan_s, entry[1]))
    return Draft(
        partial(_recursive_schedule, n_steps, slots, branch, weight),
        use,
        note=f"Segments are cut in {branch + 1} again and again until their tapes fit.",
        parameters={"branch": branch},
    )


def _recursive_schedule(n_steps: int, slots: int, branch: int, weight: float) -> Schedule:
    return forward_and_reverse(recursive_actions(0, n_steps, slots, branch, weight))
