"""How time falls with memory: plans for many numbers of slots."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence

from ..errors import ArgumentError, BudgetError
from ..model.costs import Costs
from ..support.progress import counting
from ..support.values import several, shown, whole
from .ranking import PLANNERS, RANKED
from .uniform import UniformPlan, require_costs, require_steps


def trade_off(
    costs: Costs,
    n_steps: int,
    planners: Sequence[str] = RANKED,
    *,
    slots: Iterable[int] | None = None,
    also: int | None = None,
    progress: bool | None = None,
) -> dict[str, tuple[UniformPlan, ...]]:
    """Return the plans of each planner for a range of fast slots.

    Parameters
    ----------
    costs : Costs
    n_steps : int
    planners : sequence of str
        Keys of `PLANNERS`.
    slots : iterable of int, optional
        Numbers of fast slots; by default a dozen from 1 to what keeps
        everything, each about so many times the one before.
    also : int, optional
        One more number, such as that of a plan to compare with.
    progress : bool or None
        Show a bar; None: on a terminal or in a notebook.

    Returns
    -------
    dict
        By planner, slots ascending; numbers of slots that a planner refuses
        are left out.

    Raises
    ------
    ArgumentError
        For unknown planners, or numbers below 1.

    Examples
    --------
    >>> curves = trade_off(Costs(1.0, 2.0), 100, ["revolve"], slots=[2, 10, 99])
    >>> [plan.makespan_s for plan in curves["revolve"]]
    [1046.0, 423.0, 300.0]
    """
    require_costs(costs)
    n = require_steps(n_steps, "trade_off")
    if isinstance(planners, str) or not several(planners):
        raise ArgumentError(f"planners={shown(planners)} must be several names of planners")
    names = list(planners)
    unknown = [name for name in names if not isinstance(name, str) or name not in PLANNERS]
    if unknown:
        raise ArgumentError(
            f"planners {shown(unknown)} are not known; choose from {', '.join(PLANNERS)}"
        )
    if slots is not None and not several(slots):
        raise ArgumentError(f"slots={shown(slots)} must be several numbers of slots")
    chosen = {whole(count, "slots", 1) for count in (_ladder(n) if slots is None else slots)}
    if also is not None:
        chosen.add(whole(also, "also", 1))
    if not chosen:
        raise ArgumentError("slots=[] must hold at least one number of slots")
    curves: dict[str, tuple[UniformPlan, ...]] = {}
    with counting("trade-off", len(names) * len(chosen), progress, " plans") as tick:
        for name in names:
            found = []
            for count in sorted(chosen):
                with contextlib.suppress(BudgetError):  # too few for this one
                    found.append(PLANNERS[name](costs, count, n))
                tick(name)
            curves[name] = tuple(found)
    return curves


_POINTS = 12


def _ladder(n_steps: int) -> set[int]:
    """Return about `_POINTS` numbers from 1 to `n_steps - 1`, evenly spaced in their logarithm."""
    most = max(1, n_steps - 1)
    return {round(most ** (k / (_POINTS - 1))) for k in range(_POINTS)}
