"""Recursive segments, as used in deep learning.

Chen, Xu, Zhang & Guestrin 2016, "Training deep nets with sublinear memory
cost", arXiv:1604.06174.  Each segment of `periodic` is cut again until its tapes
fit: k log n slots and at most n log_{k+1} n more steps.  Not optimal; Revolve needs
no more steps with the same slots and free saves, unless tapes kept during the
forward sweep save the second taping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from typing import TypeAlias

from ...actions import Action, Advance, Free, Load, Save, Schedule
from ...errors import BudgetError
from ...model.costs import Costs
from ...schedule.simulation import Simulation
from ..predict import Counts
from ..uniform import UniformPlan, require_steps
from .binomial import forward_and_reverse
from .periodic import ONE_TAPE, taped_segment


def _cut(start: int, stop: int, branch: int) -> list[int]:
    """Return where the segments of start..stop-1 begin, and `stop`."""
    part = -(-(stop - start) // (branch + 1))
    return [*range(start, stop, part), stop]


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
    *starts, _ = cuts = _cut(start, stop, branch)
    for a, b in pairwise(starts):
        yield Save(a)
        yield Advance(a, b)
    for k in reversed(range(len(starts))):
        if k < len(starts) - 1:
            yield Load(starts[k])
            yield Free(starts[k])
        yield from recursive_actions(cuts[k], cuts[k + 1], free - k, branch, weight)


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
        part = -(-length // (branch + 1))  # as `_cut` does
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


def _take(counts: _Count, costs: Costs, n: int) -> Simulation:
    taped = counts.taped + 1  # the last step's Tape, and EndForward, are two actions more
    found = Counts(counts.advanced + taped, taped, peak_slots=counts.peak)
    return found.take(costs, n, counts.actions + 2)


def recursive(costs: Costs, slots: int, n_steps: int | None) -> UniformPlan:
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
    n = require_steps(n_steps, "recursive")
    weight = costs.tape_slots
    count = _counter(weight, costs.state_is_tape)
    found = [
        (_take(counts, costs, n), branch)
        for branch in sorted({*range(1, min(slots, 64) + 1), slots})
        if branch > 0 and (counts := count(n, slots, branch, True)) is not None
    ]
    if not found and costs.one_tape:
        raise BudgetError(ONE_TAPE.format("recursive"))
    if not found:
        raise BudgetError(
            f"recursive needs about {math.ceil(math.log2(n + 1))} fast slots for {n} steps, "
            f"the budget has {slots}"
        )
    use, branch = min(found, key=lambda entry: (entry[0].makespan_s, entry[1]))
    return UniformPlan.predicted(
        "recursive",
        costs,
        slots,
        n,
        partial(_recursive_schedule, n, slots, branch, weight),
        use,
        note=f"Segments are cut in {branch + 1} again and again until their tapes fit.",
        parameters={"branch": branch},
    )


def _recursive_schedule(n_steps: int, slots: int, branch: int, weight: float) -> Schedule:
    return forward_and_reverse(recursive_actions(0, n_steps, slots, branch, weight))
