"""The arguments of an `MPIReversal`, checked on one rank and described for the others."""

from __future__ import annotations

from functools import partial
from typing import TypeVar

from ..errors import ArgumentError
from ..model.stages import StageCosts
from ..reversing.arguments import Arguments

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")


def facts_to_agree(
    checked_here: partial[Arguments[State, Adjoint]], on_error: str
) -> dict[str, object]:
    """Check the arguments of this rank; return what must be the same on every rank.

    Raises
    ------
    ArgumentError, BudgetError, StoreError
        If an argument breaks its rule on this rank.
    """
    words = checked_here.keywords
    if on_error not in ("abort", "raise"):
        raise ArgumentError(f"on_error={on_error!r} must be 'abort' or 'raise'")
    if isinstance(words["costs"], StageCosts):
        raise ArgumentError(
            "costs=StageCosts(...) are those of unequal steps, and MPIReversal plans "
            "uniform ones; give Costs, or leave them out to have them measured"
        )
    given = checked_here()
    same = ("n_steps", "durable_every_s", "durable_label")
    planner = words["planner"]  # what one of the user's own makes is compared later
    return {name: words[name] for name in same} | {
        "planner": planner if isinstance(planner, str) else "one of your own",
        "on_error": on_error,
        "having a tier": words["tiers"] is not None,
        "having a durable folder": words["durable"] is not None,
        "having costs": words["costs"] is not None,
        "having a tape": not given.chain.state_is_tape,
    }
