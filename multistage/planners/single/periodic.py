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

from ...actions import Action, Advance, EndForward, Free, Load, Reverse, Save, Schedule, Tape
from ...errors import BudgetError
from ...model.costs import Costs
from ..bound import lower_bound
from ..uniform import UniformPlan, require_steps

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


def periodic(costs: Costs, slots: int, n_steps: int | None) -> UniformPlan:
    """Return the plan with the longest segments that fit.

    Raises
    ------
    BudgetError
        If no segment length fits.

    Examples
    --------
    >>> periodic(Costs(1.0, 2.0), slots=20, n_steps=100).parameters["segments"]
    6
    """
    n = require_steps(n_steps, "periodic")
    weight = costs.tape_slots
    # At its turn a segment has all its tapes; where the last state is its own
    # tape that one takes no memory, and of the others one is working memory.
    spared = 2 if costs.state_is_tape else 1

    def peak(length: int) -> float:
        segments = -(-n // length)
        last = n - (segments - 1) * length
        # Forward: every start but the last beside the last segment's tapes;
        # reverse: one start fewer beside the tapes of a whole segment.
        tapes = max(0, length - spared) * weight
        in_reverse = segments - 2 + tapes if segments > 1 else 0.0
        return max(segments - 1 + (last - 1) * weight, in_reverse, segments - 1)

    least = 2 * math.sqrt(n * weight)
    longest = min(n, int(slots / weight) + 2)
    length = next((k for k in range(longest, 0, -1) if peak(k) <= slots), None)
    if length is None and costs.one_tape:
        raise BudgetError(ONE_TAPE.format("periodic"))
    if length is None:
        raise BudgetError(
            f"periodic needs about {least:.0f} fast slots for {n} steps, the budget has {slots}"
        )
    segments = -(-n // length)
    last = n - (segments - 1) * length
    forward = (segments - 1) * length * costs.forward_step_s + last * costs.taping_s
    turns = (segments - 1) * ((length - 1) * (costs.taping_s + costs.reverse_step_s) + costs.turn_s)
    actions = 2 * last + 1 + (segments - 1) * (2 * length + 3)
    return UniformPlan(
        planner="periodic",
        n_steps=n,
        slots=slots,
        costs=costs,
        make=partial(periodic_schedule, length, n),
        makespan_s=forward + last * costs.reverse_step_s + turns + actions * costs.action_s,
        lower_bound_s=lower_bound(costs, slots, n),
        forward_steps=n + (segments - 1) * (length - 1),
        peak_slots=peak(length),
        parameters={"segments": segments, "length": length},
        note=f"{segments} segments of {length} steps, each taped once more in reverse.",
    )
