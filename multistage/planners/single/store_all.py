"""Store everything: plain backpropagation, the baseline without recomputation."""

from __future__ import annotations

from functools import partial

from ...actions import EndForward, Reverse, Schedule, Tape
from ...errors import BudgetError
from ...model.costs import NOT_KEPT, Costs
from ..bound import lower_bound
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
    return UniformPlan(
        planner="store-all",
        n_steps=n,
        slots=slots,
        costs=costs,
        make=partial(store_all_schedule, n),
        makespan_s=n * (costs.taping_s + costs.reverse_step_s) + (2 * n + 1) * costs.action_s,
        lower_bound_s=lower_bound(costs, slots, n),
        forward_steps=n,
        peak_slots=peak,
        note="Every tape stays in fast memory; nothing is recomputed.",
    )
