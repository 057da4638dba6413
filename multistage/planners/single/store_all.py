"""Store everything: plain backpropagation, the baseline without recomputation."""

from __future__ import annotations

from functools import partial

from ...actions import EndForward, Reverse, Schedule, Tape
from ...errors import BudgetError
from ...model.costs import NOT_KEPT, Costs
from ..predict import Counts
from ..uniform import UniformPlan, require_steps


def store_all_schedule(n_steps: int) -> Schedule:
    """Yield: tape every step, then reverse every step."""
    for i in range(n_steps):
        yield Tape(i)
    yield EndForward()
    for i in reversed(range(n_steps)):
        yield Reverse(i)


def store_all(costs: Costs, slots: int, n_steps: int | None) -> UniformPlan:
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
    n = require_steps(n_steps, "store-all")
    peak = (n - 1) * costs.tape_slots
    if peak > slots and costs.tape_bytes >= NOT_KEPT:
        raise BudgetError("store-all keeps all tapes, and of these operators only one exists")
    if peak > slots:
        raise BudgetError(f"store-all needs {peak:g} fast slots, the budget has {slots}")
    return UniformPlan.predicted(
        "store-all",
        costs,
        slots,
        n,
        partial(store_all_schedule, n),
        Counts(n, n, peak_slots=peak).take(costs, n, 2 * n + 1),
        note="Every tape stays in fast memory; nothing is recomputed.",
    )
