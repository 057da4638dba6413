"""What every planner returns: a Plan, a schedule with its predicted cost."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import wraps
from pathlib import Path
from typing import Any, Literal, ParamSpec, TypeAlias

from tabulate import tabulate

from ..actions import Schedule
from ..costs import Costs
from ..errors import ArgumentError
from ..units import format_bytes, format_seconds
from ..values import shown, whole
from .written import read_json

MOST_STEPS = 1 << 40
_FORMAT = "multistage-plan-1"

P = ParamSpec("P")
Planner: TypeAlias = "Callable[[Costs, int, int | None], Plan]"


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule, where it comes from and what it is predicted to cost.

    Attributes
    ----------
    planner : str
        Name of the planner, a key of `PLANNERS`.
    n_steps : int
    slots : int
        Fast slots the plan may take.
    costs : Costs
        What the prediction assumes.
    make : callable
        Returns a fresh schedule; see `schedule`.
    makespan_s : float
        Predicted seconds from the start to the last adjoint step.
    lower_bound_s : float
        No schedule with these slots and tiers can be faster.
    forward_steps : int
        Predicted steps run forward, the first sweep included.
    peak_slots : float
        Most fast slots the schedule takes.
    writes, reads : int
        Predicted transfers of states to and from the slow tiers.
    stall_s : float
        Predicted seconds the computing thread waits for transfers.
    note : str
        One sentence: what the planner does with these costs.
    parameters : mapping
        The planner's own numbers, such as the interval.
    candidates : tuple of Plan
        The plans this one was chosen from (including an equal of itself).
    seal : tuple
        What `sealing` vouches for; see `sealed`.
    """

    planner: str
    n_steps: int
    slots: int
    costs: Costs
    make: Callable[[], Schedule] = field(repr=False, compare=False)
    makespan_s: float
    lower_bound_s: float
    forward_steps: int
    peak_slots: float
    writes: int = 0
    reads: int = 0
    stall_s: float = 0.0
    note: str = ""
    parameters: Mapping[str, float | int | str] = field(default_factory=dict)
    candidates: tuple[Plan, ...] = field(default=(), repr=False)
    why: str = ""
    seal: tuple[object, ...] = field(default=(), repr=False, compare=False)

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
    def recompute_factor(self) -> float:
        """Forward steps run / n_steps."""
        return self.forward_steps / self.n_steps

    @property
    def peak_fast_bytes(self) -> float:
        """Bytes of fast memory taken by checkpoints at the peak."""
        return self.peak_slots * self.costs.state_bytes

    @property
    def gap(self) -> float:
        """How far the makespan lies above the lower bound, 0 at best."""
        if not self.lower_bound_s:  # steps that take no time
            return 0.0 if not self.makespan_s else math.inf
        return self.makespan_s / self.lower_bound_s - 1

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
            "peak bytes": format_bytes(self.peak_fast_bytes),
        }

    def table(self) -> str:
        """Return the candidates side by side as text, the chosen one marked."""
        plans = sorted(self.candidates or (self,), key=lambda plan: plan.makespan_s)
        rows = [{"": ">" if plan.planner == self.planner else "", **plan.row()} for plan in plans]
        return tabulate(rows, headers="keys", disable_numparse=True, stralign="right")

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data, for JSON."""
        return {
            "format": _FORMAT,
            **self._facts(),
            "n_steps": self.n_steps,
            "slots": self.slots,
            "why": self.why,
            "candidates": [candidate._facts() for candidate in self.candidates],
            "costs": asdict(self.costs),
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
            "peak_fast_bytes": self.peak_fast_bytes,
            "parameters": dict(self.parameters),
            "note": self.note,
        }

    @classmethod
    def from_dict(cls, data: Any) -> Plan:
        """Return the plan that `to_dict` described, planned anew.

        A schedule of uniform steps follows from its planner, costs, slots and number of
        steps; nothing else in the data counts.

        Raises
        ------
        ArgumentError
            Naming what is missing or wrong; for a planner that is none of `PLANNERS`.
        BudgetError
            Where the slots hold too little.
        """
        from . import PLANNERS, plan

        if not isinstance(data, dict) or data.get("format") != _FORMAT:
            raise ArgumentError(
                f"no plan of uniform steps: 'format' must be {_FORMAT!r}; "
                "plans of chains are read by ChainPlan"
            )
        for name in ("planner", "costs", "slots", "n_steps"):
            if name not in data:
                raise ArgumentError(f"no plan of uniform steps: {name!r} is missing")
        planner, costs = data["planner"], Costs.from_dict(data["costs"])
        slots, n_steps = whole(data["slots"], "slots"), whole(data["n_steps"], "n_steps", 1)
        if not isinstance(planner, str) or planner not in PLANNERS:
            raise ArgumentError(
                f"planner {shown(planner)} is none of {', '.join(PLANNERS)}; "
                "its schedule is not in the file"
            )
        if data.get("candidates"):
            found = plan(costs, f"{slots} slots", n_steps, progress=False)
            if found.planner == planner:
                return found
        return PLANNERS[planner](costs, slots, n_steps)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Return the plan that `save` wrote to a `.json` file, planned anew.

        Raises
        ------
        ArgumentError
            If it cannot be read, or for `from_dict`'s reasons.

        Examples
        --------
        >>> import tempfile
        >>> from multistage import plan
        >>> made = plan(Costs(1.0, 2.0), "5 slots", 100)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made.save(f"{folder}/plan.json")
        ...     Plan.load(f"{folder}/plan.json") == made
        True
        """
        return cls.from_dict(read_json(path))

    def save(self, path: str | Path) -> None:
        """Write the plan to a file: `.json`, which `load` reads back, or `.html`.

        The page is one file that needs no network.

        Raises
        ------
        ArgumentError
            For another suffix.
        """
        from ..drawing.plans import save_plan

        save_plan(self, path)

    def picture(
        self,
        path: str | Path,
        what: Literal["schedule", "timeline", "trade-off"] = "schedule",
    ) -> None:
        """Draw the plan to a file; the suffix chooses the format.

        Parameters
        ----------
        path : str or Path
            `.svg` needs nothing; `.png`, `.pdf` and others need matplotlib.
        what : {"schedule", "timeline", "trade-off"}
            Where checkpoints stand over both sweeps; what runs when in virtual
            time, with the memory of each tier; or makespan and recompute
            factor over the number of slots, for this planner and its rivals.

        Raises
        ------
        ArgumentError
            If matplotlib is needed and not installed; for an unknown suffix or
            subject; for schedules of more than 20 000 steps.
        """
        from ..drawing.plans import draw_plan

        draw_plan(self, path, what)

    def _repr_html_(self) -> str:
        from ..drawing.plans import plan_html

        return plan_html(self)

    def __str__(self) -> str:
        costs = self.costs
        head = (
            f"plan {self.planner}: {self.n_steps} steps, {self.slots} fast slots of "
            f"{format_bytes(costs.state_bytes)}\n"
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
        lines += [text for text in (self.note, self.why) if text]
        return "\n".join(lines)


def sealing(planner: Callable[P, Plan]) -> Callable[P, Plan]:
    """Return a planner of this package whose plans are sealed, see `Plan.sealed`.

    What is sealed must have been tested: the tests run every planner of
    `PLANNERS` through `check`.
    """

    @wraps(planner)
    def sealed(*args: P.args, **kwargs: P.kwargs) -> Plan:
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
    try:
        n = -1 if isinstance(n_steps, bool) else operator.index(n_steps)  # NumPy's ints too
    except TypeError:
        n = -1
    if not 1 <= n <= MOST_STEPS:
        raise ArgumentError(f"n_steps={shown(n_steps)} must be an int, at least 1 and at most 2^40")
    return n


def require_costs(costs: Costs) -> None:
    """Raise ArgumentError unless these are costs of uniform steps."""
    if not isinstance(costs, Costs):
        raise ArgumentError(
            f"costs={shown(costs)} must be multistage.Costs; for stages that differ there is "
            "plan_chain"
        )
