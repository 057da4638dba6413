"""Options of revolvers whose maker gives none: what `install` was called with."""

from __future__ import annotations

from dataclasses import dataclass

from ...backends.urls import Tiers
from ...model.budget import Budget
from ...model.costs import Costs
from ...planners import Planner, UniformPlan
from ..ranks import Communicator


@dataclass(slots=True)
class Options:
    """What `install` gave for revolvers whose maker leaves the memory open."""

    memory: Budget | int | str | None = None
    tiers: Tiers | None = None
    planner: str | UniformPlan | Planner | None = None
    costs: Costs | None = None
    progress: bool | None = None
    comm: Communicator | None = None

    @property
    def given(self) -> bool:
        """Whether it gave any."""
        every = (self.memory, self.tiers, self.planner, self.costs, self.progress)
        return any(value is not None for value in every)


defaults = Options()


def set_defaults(
    *,
    memory: Budget | int | str | None = None,
    tiers: Tiers | None = None,
    planner: str | UniformPlan | Planner | None = None,
    costs: Costs | None = None,
    progress: bool | None = None,
    comm: Communicator | None = None,
) -> None:
    """Set these options of revolvers that are given none.

    They hold for single-level revolvers in memory made with `n_checkpoints=None`; `comm` for all.
    """
    defaults.memory, defaults.tiers, defaults.planner = memory, tiers, planner
    defaults.costs, defaults.progress, defaults.comm = costs, progress, comm
