"""What planners of steps that are alike return: a lazy schedule with its predicted cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial, wraps
from typing import Any, ClassVar, ParamSpec, TypeAlias

from tabulate import tabulate

from ..actions import Schedule
from ..errors import ArgumentError
from ..model.costs import Costs
from ..model.tier import Tier
from ..schedule.simulation import Simulation, simulate
from ..support.units import format_bytes, format_seconds
from ..support.values import shown, whole_or_none
from .base import Plan, gap_of
from .bound import lower_bound

MOST_STEPS = 1 << 40

P = ParamSpec("P")
Planner: TypeAlias = "Callable[[Costs, int, int | None], UniformPlan]"


@dataclass(frozen=True, slots=True)
class UniformPlan(Plan):
    """A schedule of steps that are alike, where it comes from and what it is predicted to cost.

    What it has and does besides, see `Plan`; `planner` is a key of `PLANNERS`.

    Attributes
    ----------
    slots : int
        Fast slots the plan may take.
    costs : Costs
        What the prediction assumes.
    make : callable
        Returns a fresh schedule; see `schedule`.
    lower_bound_s : float
    peak_slots : float
        Most fast slots the schedule takes.
    note : str
        One sentence: what the planner does with these costs.
    parameters : mapping
        The planner's own numbers, such as the interval.
    candidates : tuple of UniformPlan
        The plans this one was chosen from (including an equal of itself).
    seal : tuple
        What `sealing` vouches for; see `sealed`.

    Examples
    --------
    >>> from multistage import plan
    >>> made = plan(Costs(1.0, 2.0), "4 slots", 20, planner="revolve")
    >>> made.planner, made.forward_steps, made.makespan_s == made.simulate().makespan_s
    ('revolve', 40, True)
    """

    FORMAT: ClassVar[str] = "multistage-plan-1"
    UNIT: ClassVar[str] = "steps"

    # `field()`: or what the base class has by these names would be their defaults.
    planner: str = field()
    n_steps: int = field()
    slots: int
    costs: Costs
    make: Callable[[], Schedule] = field(repr=False, compare=False)
    makespan_s: float
    lower_bound_s: float = field()
    forward_steps: int
    peak_slots: float
    writes: int = 0
    reads: int = 0
    stall_s: float = 0.0
    note: str = ""
    parameters: Mapping[str, float | int | str] = field(default_factory=dict)
    candidates: tuple[UniformPlan, ...] = field(default=(), repr=False)
    why: str = ""
    seal: tuple[object, ...] = field(default=(), repr=False, compare=False)

    @classmethod
    def predicted(
        cls,
        planner: str,
        costs: Costs,
        slots: int,
        n_steps: int,
        make: Callable[[], Schedule],
        use: Simulation,
        *,
        note: str,
        parameters: Mapping[str, float | int | str] | None = None,
    ) -> UniformPlan:
        """Return the plan of a schedule that takes what `use` says."""
        return cls(
            planner=planner,
            n_steps=n_steps,
            slots=slots,
            costs=costs,
            make=make,
            makespan_s=use.makespan_s,
            lower_bound_s=lower_bound(costs, slots, n_steps),
            forward_steps=use.forward_steps,
            peak_slots=use.peak_slots,
            writes=use.writes,
            reads=use.reads,
            stall_s=use.stall_s,
            note=note,
            parameters=dict(parameters or {}),
        )

    def schedule(self) -> Schedule:
        """Return a fresh, lazy schedule of this plan."""
        return self.make()

    @property
    def sealed(self) -> bool:
        """Whether this is what a planner of this package made, its schedule and its premises.

        Schedules of sealed plans are run as they are; all others are judged
        action by action.  Replacing `make`, `n_steps`, `slots` or `costs`
        breaks the seal.
        """
        return self.seal == self._vouched()

    def _vouched(self) -> tuple[object, ...]:
        return self.make, self.n_steps, self.slots, self.costs

    @property
    def peak_bytes(self) -> int:
        """Bytes of fast memory taken by checkpoints at the peak."""
        return round(self.peak_slots * self.costs.state_bytes)

    @property
    def memory_bytes(self) -> int:
        """Bytes of the fast slots that the plan may take."""
        return self.slots * self.costs.state_bytes

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The slow tiers of its costs."""
        return self.costs.tiers

    @property
    def gap(self) -> float:
        """How far the makespan lies above the lower bound, 0 at best."""
        return gap_of(self.makespan_s, self.lower_bound_s)

    def _simulation(self) -> partial[Simulation]:
        known = None if self.planner == "online" else self.n_steps
        return partial(simulate, self.schedule(), known, self.costs, self.slots)

    def _on(self, tier: Tier) -> UniformPlan:
        costs = replace(self.costs, tiers=(tier,))
        bound_s = lower_bound(costs, self.slots, self.n_steps)
        return replace(self, costs=costs, lower_bound_s=bound_s)

    def row(self) -> dict[str, str | int | float]:
        """Return the plan as one row of a table."""
        return {
            "planner": self.planner,
            "makespan": format_seconds(self.makespan_s),
            "above bound": f"{100 * self.gap:.2f} %",
            "recompute": round(self.recompute_factor, 3),
            "writes": self.writes,
            "reads": self.reads,
            "stall": format_seconds(self.stall_s),
            "peak slots": round(self.peak_slots, 1),
            "peak bytes": format_bytes(self.peak_bytes),
        }

    def table(self) -> str:
        """Return the candidates side by side as text, the chosen one marked."""
        plans = sorted(self.candidates or (self,), key=lambda plan: plan.makespan_s)
        rows = [{"": ">" if plan.planner == self.planner else "", **plan.row()} for plan in plans]
        return tabulate(rows, headers="keys", disable_numparse=True, stralign="right")

    def to_dict(self) -> dict[str, object]:
        """Return the plan as plain data, for JSON."""
        return {
            "format": self.FORMAT,
            **self._facts(),
            "n_steps": self.n_steps,
            "slots": self.slots,
            "why": self.why,
            "candidates": [candidate._facts() for candidate in self.candidates],
            "costs": self.costs.to_dict(),
        }

    def _facts(self) -> dict[str, Any]:
        return {
            "planner": self.planner,
            "makespan_s": self.makespan_s,
            "lower_bound_s": self.lower_bound_s,
            "recompute_factor": self.recompute_factor,
            "writes": self.writes,
            "reads": self.reads,
            "stall_s": self.stall_s,
            "peak_slots": self.peak_slots,
            "peak_bytes": self.peak_bytes,
            "parameters": dict(self.parameters),
            "note": self.note,
        }

    def summary(self) -> str:
        """Return the plan in one line."""
        room = f"{self.slots} fast slot{'' if self.slots == 1 else 's'}"
        return (
            f"plan {self.planner}: {self.n_steps} step{'' if self.n_steps == 1 else 's'}, {room} "
            f"of {format_bytes(self.costs.state_bytes)}"
        )

    def details(self) -> list[str]:
        """Return the rest of what printing it shows."""
        costs = self.costs
        head = (
            f"step {format_seconds(costs.forward_step_s)}, "
            f"adjoint step {format_seconds(costs.turn_s)}"
        )
        if tier := costs.tier:
            head += (
                f"; tier {tier.name}: write {format_seconds(tier.write_s)}, "
                f"read {format_seconds(tier.read_s)} per state "
                f"(rho = {costs.rho:.3g})"
            )
        lines = [head, "", self.table(), "", f"lower bound {format_seconds(self.lower_bound_s)}"]
        return [*lines, *(text for text in (self.note, self.why) if text)]


def sealing(planner: Callable[P, UniformPlan]) -> Callable[P, UniformPlan]:
    """Return a planner of this package whose plans are sealed, see `UniformPlan.sealed`.

    What is sealed must have been tested: the tests run every planner of
    `PLANNERS` through `check`.
    """

    @wraps(planner)
    def sealed(*args: P.args, **kwargs: P.kwargs) -> UniformPlan:
        made = planner(*args, **kwargs)
        return replace(made, seal=made._vouched())

    return sealed


def require_steps(n_steps: int | None, planner: str) -> int:
    """Return `n_steps`, known and at least 1.

    Raises
    ------
    ArgumentError
        Otherwise.
    """
    if n_steps is None:
        raise ArgumentError(
            f"planner {planner!r} must know n_steps beforehand; use planner 'online'"
        )
    n = whole_or_none(n_steps)
    if n is None or not 1 <= n <= MOST_STEPS:
        raise ArgumentError(f"n_steps={shown(n_steps)} must be an int, at least 1 and at most 2^40")
    return n


def require_costs(costs: Costs) -> None:
    """Raise ArgumentError unless these are costs of uniform steps."""
    if not isinstance(costs, Costs):
        raise ArgumentError(
            f"costs={shown(costs)} must be multistage.Costs; for stages that differ there is "
            "plan_chain"
        )
    for tier in costs.tiers:
        if tier.shared:
            raise ArgumentError(
                f"tier {shown(tier.name)} is one channel for both directions (shared), planners of "
                "steps that are alike count on two; leave shared out, or plan "
                "StageCosts.uniform(...) by plan_chain"
            )
