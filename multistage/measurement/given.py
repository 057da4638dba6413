"""What a user gives in place of what would be measured or planned: it must fit the chain.

Planners believe their costs, and the executor its plan.  Costs that call a
state its own tape where tapes are made, or a plan for smaller tapes, would
have more in memory than the budget allows, unseen by any report.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from ..errors import ArgumentError, BudgetError
from ..model.chain import Chain
from ..model.costs import NOT_KEPT, Costs
from ..planners import PLANNERS, Planner, UniformPlan

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")


def one_tape(chain: Chain[State, Adjoint]) -> bool:
    """Whether a chain has tapes, of which only the latest exists."""
    return not chain.state_is_tape and bool(getattr(chain, "one_tape", False))


def agreeing(costs: Costs, chain: Chain[State, Adjoint]) -> Costs:
    """Return given costs as those of a chain, of which no second tape may be kept perhaps.

    Raises
    ------
    ArgumentError
        If they disagree on what a tape is; how large one is shows when it is made.
    """
    if one_tape(chain) and not costs.state_is_tape:
        return replace(costs, tape_bytes=NOT_KEPT)
    if chain.state_is_tape and not costs.state_is_tape:
        raise ArgumentError(
            f"costs say that steps make tapes (tape_step_s={costs.tape_step_s:g}), but this "
            "chain's state is its own tape; give costs without tape_step_s, or a chain that tapes"
        )
    if costs.state_is_tape and not chain.state_is_tape:
        raise ArgumentError(
            "costs say that a state is its own tape (tape_step_s=None), but this chain makes "
            "tapes; give tape_step_s and tape_bytes, or no costs to have them measured"
        )
    if chain.state_is_tape and costs.tape_slots != 1:
        raise ArgumentError(
            f"costs say that a tape has tape_bytes={costs.tape_bytes} and a state "
            f"state_bytes={costs.state_bytes}, but this chain's state is its own tape; "
            "leave tape_bytes out"
        )
    return costs


def planner_of(planner: str | UniformPlan | Planner, n_steps: int | None) -> str | Planner:
    """Return the name of a planner, or the planner itself.

    Raises
    ------
    ArgumentError
        If there is none of that name, or the plan is for another number of steps.
    """
    if isinstance(planner, str):
        if planner != "auto" and planner not in PLANNERS:
            raise ArgumentError(
                f"planner {planner!r} is not known; choose 'auto' or one of {', '.join(PLANNERS)}"
            )
        return planner
    if not isinstance(planner, UniformPlan):
        if not callable(planner):
            raise ArgumentError(f"planner={planner!r} must be a name, a UniformPlan or a callable")
        return planner
    made = planner
    if made.n_steps != n_steps:
        raise ArgumentError(f"the plan is for {made.n_steps} steps, not n_steps={n_steps}")
    return lambda costs, slots, n: made


def planned(
    planner: Callable[[Costs, int, int], object], costs: Costs, slots: int, n_steps: int
) -> UniformPlan:
    """Return the plan of a user's planner, for these steps and within these slots.

    Raises
    ------
    ArgumentError
        If it returns no plan, or one for another number of steps or other tapes.
    BudgetError
        If the plan takes more slots.
    """
    made = planner(costs, slots, n_steps)
    if not isinstance(made, UniformPlan):
        raise ArgumentError(
            f"the planner returned {type(made).__name__}; it must return a UniformPlan"
        )
    if made.n_steps != n_steps:
        raise ArgumentError(f"the plan is for {made.n_steps} steps, not n_steps={n_steps}")
    if made.slots > slots:
        raise BudgetError(
            f"the plan takes {made.slots} fast slots, the budget holds {slots}; "
            "raise the budget or plan again"
        )
    theirs = made.costs
    if theirs.state_is_tape != costs.state_is_tape:
        kinds = {True: "a state is its own tape", False: "steps make tapes"}
        raise ArgumentError(
            f"in the plan's costs {kinds[theirs.state_is_tape]}, here "
            f"{kinds[costs.state_is_tape]}; plan again with the costs of this chain"
        )
    if costs.one_tape:  # a plan that keeps states only will do, whatever it took tapes for
        return made if theirs.one_tape else replace(made, seal=())
    if theirs.tape_slots < costs.tape_slots * (1 - 1e-9):
        raise ArgumentError(
            f"the plan is for tapes of {theirs.tape_slots:g} states, here one has "
            f"{costs.tape_slots:g}; plan again with the costs of this chain"
        )
    return made
