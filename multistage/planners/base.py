"""What every planner returns: a plan, which is data that prints, draws, saves and loads itself.

In a file the schedule of a chain is one list an action, such as `["Put", 3, 0, true]`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, fields
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol, Self, TypeAlias

from ..actions import (
    Action,
    Advance,
    Answer,
    Await,
    Drop,
    EndForward,
    Evict,
    Free,
    Get,
    Load,
    Offer,
    Put,
    Reverse,
    Save,
    Schedule,
    Tape,
)
from ..errors import ArgumentError
from ..model.costs import Costs
from ..model.stages import StageCosts
from ..model.tier import Tier
from ..schedule.simulation import Jitter, Simulation
from ..support.values import shown

_KINDS: dict[str, type[Action]] = {
    kind.__name__: kind
    for kind in (
        *(Advance, Tape, Reverse, Save, Load, Free, Offer, Put, Get, Await, Evict, Drop),
        EndForward,
    )
}
_MOST = 1 << 40


def actions_to_lists(actions: Iterable[Action]) -> list[list[str | int | bool]]:
    """Return actions as lists: the name and the values of each.

    Examples
    --------
    >>> actions_to_lists([Advance(0, 3), Put(3, tape=True)])
    [['Advance', 0, 3], ['Put', 3, 0, True]]
    """
    return [[type(action).__name__, *astuple(action)] for action in actions]


def actions_from_lists(data: object) -> tuple[Action, ...]:
    """Return the actions that `actions_to_lists` wrote; whether they are legal is not looked at.

    Raises
    ------
    ArgumentError
        Naming the first that is no action.
    """
    if not isinstance(data, list):
        raise ArgumentError(f"actions={shown(data)} must be a list of actions")
    return tuple(_action(k, entry) for k, entry in enumerate(data))


def read_json(path: str | Path) -> object:
    """Return what a plan's JSON file holds.  Raises ArgumentError if it cannot be read."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"the plan {str(path)!r} cannot be read: {error}") from error


def _action(index: int, entry: Any) -> Action:
    where = f"actions[{index}]"
    name = entry[0] if isinstance(entry, list) and entry else None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ArgumentError(f"{where}={shown(entry)} must be a list such as ['Tape', 3]")
    values: Sequence[Any] = entry[1:]
    named = fields(kind)
    least = sum(field.name not in ("tier", "tape") for field in named)
    if not least <= len(values) <= len(named):
        names = ", ".join(field.name for field in named)
        raise ArgumentError(f"{where}={shown(entry)} must have the values ({names})")
    for field, value in zip(named, values, strict=False):
        if field.name == "tape":
            if not isinstance(value, bool):
                raise ArgumentError(f"{where}: tape={shown(value)} must be true or false")
        elif isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
            raise ArgumentError(f"{where}: {field.name}={shown(value)} must be a number from 0 on")
    return kind(*values)


Subject = Literal["schedule", "timeline", "trade-off"]
Reader: TypeAlias = "Callable[[Mapping[str, object]], Plan]"


class Pictures(Protocol):
    """What draws plans and writes their pages; `multistage.planners.pages` does."""

    def draw_plan(self, plan: Plan, path: str | Path, subject: Subject) -> None:
        """Draw a picture of a plan to a file."""

    def save_plan(self, plan: Plan, path: str | Path) -> None:
        """Write a plan as a page, or as JSON."""

    def plan_html(self, plan: Plan) -> str:
        """Return a plan for a notebook's cell."""


class Plan:
    """A schedule and what it is predicted to cost: what all plans have and do.

    There are two kinds.  A `UniformPlan`, from `plan`, is of steps that are alike: its costs
    are numbers, its schedule is made as it is run, and 10^9 steps take no memory.  A
    `ChainPlan`, from `plan_chain`, is of stages that differ: its costs are those of each stage
    and its schedule is a tuple of actions.

    Attributes
    ----------
    planner : str
        Name of the planner, or of the planner.
    costs : Costs or StageCosts
        What the prediction assumes.
    tiers : tuple
        The slow tiers it was planned with.
    n_steps : int
        Steps, or stages.
    memory_bytes : int or None
        Fast memory the plan may take; None for no limit.
    makespan_s : float
        Predicted seconds from the start to the last adjoint step.
    lower_bound_s : float or None
        No schedule within these limits can be faster; None where that is not known.
    forward_steps : int
        Predicted steps run forward, the first sweep included.
    peak_bytes : int
        Predicted peak of fast memory.
    writes, reads : int
        Predicted transfers to and from the slow tiers.
    stall_s : float
        Predicted seconds the computing thread waits for transfers.

    Examples
    --------
    >>> import tempfile
    >>> from multistage import Costs, Stage, StageCosts, plan, plan_chain
    >>> layers = StageCosts.uniform(12, Stage("layer", 1.0, 2.0, 10, 30), 10)
    >>> plans = [plan(Costs(1.0, 2.0), "5 slots", 100), plan_chain(layers, "50 %")]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for made in plans:
    ...         made.save(f"{folder}/plan.json")
    ...         print(made.summary(), Plan.load(f"{folder}/plan.json") == made)
    ... # doctest: +ELLIPSIS
    plan revolve: 100 steps, 5 fast slots of 1 B True
    plan optimal: 12 stages within 195 B: ... True
    """

    __slots__ = ()

    FORMAT: ClassVar[str]
    UNIT: ClassVar[str]

    # What takes modules that import plans; see `enter`.
    _readers: ClassVar[Mapping[type[Plan], Reader]]
    _pictures: ClassVar[Pictures]

    costs: Costs | StageCosts
    makespan_s: float
    forward_steps: int
    stall_s: float

    # What the two kinds know in different ways.

    @property
    def planner(self) -> str:
        raise NotImplementedError

    @property
    def n_steps(self) -> int:
        raise NotImplementedError

    @property
    def tiers(self) -> tuple[Tier, ...]:
        raise NotImplementedError

    @property
    def memory_bytes(self) -> int | None:
        raise NotImplementedError

    @property
    def peak_bytes(self) -> int:
        raise NotImplementedError

    @property
    def lower_bound_s(self) -> float | None:
        raise NotImplementedError

    @property
    def writes(self) -> int:
        raise NotImplementedError

    @property
    def reads(self) -> int:
        raise NotImplementedError

    def schedule(self) -> Schedule:
        """Return a fresh schedule of this plan, for `check`, `simulate` and executors."""
        raise NotImplementedError

    def simulate(
        self,
        *,
        tiers: Tier | str | None = None,
        jitter: Jitter | None = None,
        seed: int = 0,
        timed: Callable[[Action, Answer, float], None] | None = None,
    ) -> Simulation:
        """Run the plan in virtual time, with its own tier or another; see `multistage.simulate`.

        Memory is bounded by the plan's, whatever the tier's rates.

        Examples
        --------
        >>> from multistage import Costs, Stage, StageCosts, plan, plan_chain
        >>> made = plan(Costs(1.0, 2.0), "5 slots", 100)
        >>> made.simulate().makespan_s == made.makespan_s
        True
        >>> costs = StageCosts.uniform(12, Stage("layer", 1.0, 2.0, 10, 40), 10)
        >>> made = plan_chain(costs, 0.4, tiers="write=60B/s,read=60B/s")
        >>> run = made.simulate(tiers="write=30B/s,read=30B/s")
        >>> run.makespan_s > made.makespan_s, run.peak_bytes <= made.memory_bytes
        (True, True)
        """
        plan = self if tiers is None else self.with_tier(tiers)
        return plan._simulation()(jitter=jitter, seed=seed, timed=timed)

    def _simulation(self) -> partial[Simulation]:
        """Return a call of `simulate` without what scatters and watches the run."""
        raise NotImplementedError

    def with_tier(self, tier: Tier | str) -> Self:
        """Return the plan with another tier in its place; the schedule stays.

        `lower_bound_s` is that of the new tier, all other predictions are those of the tier it
        was planned with.

        Raises
        ------
        ArgumentError
            If it has no tier, or several.
        """
        if not self.tiers:
            raise ArgumentError("the plan has no tier to replace; plan it with one")
        if len(self.tiers) > 1:
            raise ArgumentError(f"the plan has {len(self.tiers)} tiers; one can be replaced")
        return self._on(Tier.parse(tier))

    def _on(self, tier: Tier) -> Self:
        raise NotImplementedError

    def limits(self) -> dict[str, float | None]:
        """Return what fast memory and each tier may hold, in bytes; None without bound."""
        limits: dict[str, float | None] = {"fast": self.memory_bytes}
        for tier in self.tiers:
            room = tier.capacity_bytes
            if tier.capacity_states is not None and isinstance(self.costs, Costs):
                room = tier.capacity_states * self.costs.state_bytes
            limits[tier.name] = room
        return limits

    def summary(self) -> str:
        """Return the plan in one line."""
        raise NotImplementedError

    def table(self) -> str:
        """Return the plan beside its alternatives as text."""
        raise NotImplementedError

    def details(self) -> list[str]:
        """Return the lines that printing the plan shows below its summary."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, object]:
        """Return the plan as plain data, for JSON; `from_dict` reads it back."""
        raise NotImplementedError

    # What follows from that.

    @property
    def recompute_factor(self) -> float:
        """Forward steps run / steps."""
        return self.forward_steps / self.n_steps

    @property
    def gap(self) -> float | None:
        """How far the makespan lies above the lower bound, 0 at best; None if that is not known."""
        bound_s = self.lower_bound_s
        return None if bound_s is None else gap_of(self.makespan_s, bound_s)

    @property
    def title(self) -> str:
        """What it is a plan of, in few words."""
        return f"{self.planner}: {self.n_steps} {self.UNIT}"

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the plan that `to_dict` described, of either kind.

        What the data says of times and memory does not count: a plan of steps that are alike is
        planned again, the schedule of a chain is judged and simulated again.

        Raises
        ------
        ArgumentError
            Naming what is missing or wrong; for a planner that is none of `PLANNERS`.
        BudgetError
            Where the slots hold too little.
        ScheduleError
            Naming the first action of a chain that is illegal or exceeds `memory_bytes`.
        """
        readers = {kind: read for kind, read in cls._readers.items() if issubclass(kind, cls)}
        for kind, read in readers.items():
            if isinstance(data, dict) and data.get("format") == kind.FORMAT:
                found = read(data)
                assert isinstance(found, cls)
                return found
        formats = " or ".join(repr(kind.FORMAT) for kind in readers)
        found_format = data.get("format") if isinstance(data, dict) else None
        instead = "" if found_format is None else f", not {shown(found_format)}"
        raise ArgumentError(f"no plan: 'format' must be {formats}{instead}")

    @classmethod
    def require(cls, data: Mapping[str, object], names: Sequence[str]) -> None:
        """Raise ArgumentError unless the data of a plan has all of these names."""
        for name in names:
            if name not in data:
                raise ArgumentError(f"no plan of {cls.UNIT}: {name!r} is missing")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the plan that `save` wrote to a `.json` file, of either kind.

        Raises
        ------
        ArgumentError
            If it cannot be read, or for `from_dict`'s reasons; BudgetError and ScheduleError for
            its others.
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
        self._pictures.save_plan(self, path)

    def picture(
        self,
        path: str | Path,
        what: Subject = "schedule",
    ) -> None:
        """Draw the plan to a file; the suffix chooses the format.

        Parameters
        ----------
        path : str or Path
            `.svg` needs nothing; `.png`, `.pdf`, `.ps` and `.eps` need CairoSVG.
        what : {"schedule", "timeline", "trade-off"}
            What is kept where over both sweeps; what runs when in virtual
            time, compute and transfers, with the memory of each place; or time
            over memory, for this plan and its rivals.

        Raises
        ------
        ArgumentError
            If CairoSVG is needed and not installed; for an unknown suffix or
            subject; for uniform schedules of more than 20 000 steps.
        """
        self._pictures.draw_plan(self, path, what)

    def _repr_html_(self) -> str:
        return self._pictures.plan_html(self)

    def __str__(self) -> str:
        return "\n".join([self.summary(), *self.details()])


def gap_of(makespan_s: float, bound_s: float) -> float:
    """Return how far a makespan lies above a lower bound, as a share of that."""
    if not bound_s:  # steps that take no time
        return 0.0 if not makespan_s else math.inf
    gap = makespan_s / bound_s - 1
    return gap if abs(gap) > 1e-12 else 0.0  # rounding is no gap


def enter(readers: Mapping[type[Plan], Reader], pictures: Pictures) -> None:
    """Give plans what reads each kind from data, and what draws them.

    Planners import plans, so plans import no planner; `multistage.planners` calls this once.
    """
    Plan._readers = readers
    Plan._pictures = pictures
