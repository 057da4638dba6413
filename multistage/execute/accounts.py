"""Slots that a sweep takes, and what they may come to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..actions import Action, Reverse, Tape
from ..errors import BudgetError, ScheduleError

if TYPE_CHECKING:
    from .sweep import Sweep


def reach(sweep: Sweep, action: Action, used: float) -> None:
    """Note the most slots so far.

    Raises
    ------
    BudgetError
        If they are more than the budget.
    """
    sweep.peak = used
    if used > sweep.limit:
        raise BudgetError(
            f"{action} takes {used:.4g} fast slots of the {sweep.limit:.4g} in the budget, a tape "
            f"being {sweep.tape_slots:.4g} of them; raise the budget, or plan with the tapes as "
            "they are: give their bytes as tape_bytes, or call forward() again if measured"
        )


def weigh_beside(sweep: Sweep, action: Tape | Reverse, tape: object, others: int) -> None:
    """Find out whether a tape takes more than assumed; `others` before it do so too then.

    Raises
    ------
    BudgetError
        If that is more than the budget.
    """
    assert sweep.weigh is not None
    beside = next(reversed(sweep.tapes.values())).state
    taken = sweep.weigh(action.step, tape, beside, sweep.tape_slots)
    if taken > sweep.tape_slots:
        sweep.used += (taken - sweep.tape_slots) * others
        sweep.tape_slots = taken
        if sweep.used > sweep.peak:
            reach(sweep, action, sweep.used)


def illegal(action: Action, seen: str) -> ScheduleError:
    """Return the error for an action that cannot be performed."""
    return ScheduleError(f"{action}, but {seen}")


def only_latest(action: Action, tapes: Iterable[int]) -> ScheduleError:
    """Return the error for an action that a chain with but its latest tape cannot perform."""
    (step,) = tapes
    return illegal(
        action,
        f"the chain has only its latest tape (one_tape), and that of step {step} is still needed",
    )
