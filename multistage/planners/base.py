"""What every planner returns: a plan, which is data that prints, draws, saves and loads itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import ClassVar, Literal, Protocol, Self, TypeAlias

from tabulate import tabulate

from ..actions import Action, Advance, Answer, EndForward, Get, Put, Reverse, Save, Schedule, Tape
from ..errors import ArgumentError
from ..model.costs import Costs
from ..model.stages import StageCosts
from ..model.tier import Tier
from ..schedule.simulation import Jitter, Simulation, simulate
from ..support.units import format_bytes, format_seconds
from ..support.values import MOST, shown, whole_or_none
from .bound import lower_bound
from .files import actions_to_lists, read_json

Planner: TypeAlias = "Callable[[Costs, int, int | None], Plan]"
Subject = Literal["schedule", "timeline", "trade-off"]

MOST_STEPS = 1 << 40
# What a limit pays for beside a plan: see `Plan.reserved`.
BUFFERS, NOT_USED = "buffers of the tiers", "not used"
FORMAT = "multistage-plan-2"


class Pages(Protocol):
    """What reads, bounds and draws plans, and writes pages: `multistage.planners.pages`."""

    def read_plan(self, data: Mapping[str, object]) -> Plan:
        """Return the plan that data of the present format describe."""

    def chain_bound_s(
        self, costs: StageCosts, memory_bytes: int | None, tier: Tier, /
    ) -> float | None:
        """Return a lower bound of a chain with a tier; None without the C core."""

    def draw_plan(self, plan: Plan, path: str | Path, subject: Subject) -> None:
        """Draw a picture of a plan to a file."""

    def save_plan(self, plan: Plan, path: str | Path) -> None:
        """Write a plan as a page, or as JSON."""

    def plan_html(self, plan: Plan) -> str:
        """Return a plan for a notebook's cell."""


@dataclass(frozen=True, slots=True)
class Plan:
    """A schedule, where it comes from and what it is predicted to cost.

    `plan` makes those of steps that are alike: their costs are numbers, their schedule is made
    as it is run, and 10^9 steps take no memory.  `plan_chain` makes those of stages that
    differ: their costs are those of each stage, and their schedule is a tuple of actions.

    Attributes
    ----------
    planner : str
        Name of the planner.
    costs : Costs or StageCosts
        What the prediction assumes.
    n_steps : int
        Steps or stages.
    memory_bytes : int or None
        Fast memory the plan may take; None for no limit.
    make : callable
        Returns a fresh schedule; see `schedule`.
    makespan_s : float
        Predicted seconds from the start to the last adjoint step.
    forward_steps : int
        Predicted steps run forward, the first sweep included.
    peak_bytes : int
        Predicted peak of fast memory; of stages with the chain's input.
    writes, reads : int
        Predicted transfers to and from the slow tiers.
    stall_s : float
        Predicted seconds the computing thread waits for transfers.
    tiers : tuple of Tier
        The slow tiers it was planned with.
    actions : tuple of Action
        The schedule of stages; the loss, which is the caller's, is at `EndForward`.  Empty
        where the schedule is made as it is run.
    note : str
        One sentence: what the planner does with these costs.
    parameters : mapping
        The planner's own numbers, such as the interval.
    candidates : tuple of Plan
        The plans this one was chosen from (including an equal of itself).  Of stages with a
        tier: the plans "no tier" and "every tape to the tier", where they fit.
    why : str
        Why it was chosen.
    reserved : mapping
        What the limit that the user gave pays for beside the plan, in bytes by name; see `within`.
    seal : tuple
        What `planners.predict.sealing` vouches for; see `sealed`.
    given_up : int
        Tapes that the last run made again, as the tier was slower than planned; see
        `multistage.execute.late`.

    Examples
    --------
    >>> import tempfile
    >>> from multistage import Stage, plan, plan_chain
    >>> layers = StageCosts.uniform(12, Stage("layer", 1.0, 2.0, 10, 30), 10)
    >>> plans = [plan(Costs(1.0, 2.0), "5 slots", 100), plan_chain(layers, "50 %")]
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     for made in plans:
    ...         made.save(f"{folder}/plan.json")
    ...         print(made.summary(), Plan.load(f"{folder}/plan.json") == made)
    ... # doctest: +ELLIPSIS
    plan revolve: 100 steps within 5 fast slots of 1 B: 517 s True
    plan optimal: 12 stages within 195 B: ... True
    """

    _pages: ClassVar[Pages]

    planner: str
    costs: Costs | StageCosts
    n_steps: int
    memory_bytes: int | None
    make: Callable[[], Schedule] = field(repr=False, compare=False)
    makespan_s: float
    forward_steps: int
    peak_bytes: int
    writes: int = 0
    reads: int = 0
    stall_s: float = 0.0
    tiers: tuple[Tier, ...] = ()
    actions: tuple[Action, ...] = field(default=(), repr=False)
    note: str = ""
    parameters: Mapping[str, float | int | str] = field(default_factory=dict, hash=False)
    candidates: tuple[Plan, ...] = field(default=(), repr=False)
    why: str = ""
    reserved: Mapping[str, int] = field(default_factory=dict, hash=False)
    seal: tuple[object, ...] = field(default=(), repr=False, compare=False)
    given_up: int = field(default=0, compare=False)

    @classmethod
    def judged(
        cls,
        planner: str,
        costs: StageCosts,
        memory_bytes: int | None,
        actions: Iterable[Action],
        tier: Tier | None = None,
    ) -> Self:
        """Return a schedule of stages as a plan, its times and its peak those of a simulation.

        Raises
        ------
        ScheduleError
            Naming the first action that is illegal or exceeds `memory_bytes`.

        Examples
        --------
        >>> from multistage import Stage
        >>> costs = StageCosts.uniform(1, Stage("a", 1.0, 2.0, 10, 30), 5)
        >>> actions = [Tape(0), EndForward(), Reverse(0)]
        >>> Plan.judged("optimal", costs, None, actions).peak_bytes
        45
        """
        actions = tuple(actions)
        tiers = () if tier is None else (tier,)
        # What exceeds a whole number of the simulator's is no limit.
        limit = None if memory_bytes is None or memory_bytes > MOST else memory_bytes
        use = simulate(actions, None, costs, tiers=tiers, memory_bytes=limit, checked=False)
        return cls(
            planner=planner,
            costs=costs,
            n_steps=len(costs.stages),
            memory_bytes=memory_bytes,
            make=partial(played, actions),
            makespan_s=use.makespan_s,
            forward_steps=use.forward_steps,
            peak_bytes=use.peak_bytes,
            writes=sum(isinstance(action, Put) for action in actions),
            reads=sum(isinstance(action, Get) for action in actions),
            stall_s=use.stall_s,
            tiers=tiers,
            actions=actions,
        )

    def schedule(self) -> Schedule:
        """Return a fresh schedule of this plan, for `check`, `simulate` and executors."""
        return played(self.actions) if self.actions else self.make()

    @property
    def sealed(self) -> bool:
        """Whether this is what a planner of this package made, its schedule and its premises.

        Schedules of sealed plans are run as they are; all others are judged
        action by action.  Replacing `make`, `actions`, `n_steps`, `memory_bytes` or
        `costs` breaks the seal.
        """
        return self.seal == self._vouched()

    def _vouched(self) -> tuple[object, ...]:
        return self.make, self.actions, self.n_steps, self.memory_bytes, self.costs

    def within(self, limit_bytes: int | None, reserved: Mapping[str, int]) -> Self:
        """Return the plan of a limit in bytes, of which so much was reserved before planning.

        `memory_bytes` and all of `Plan.reserved` are the limit together: what else the planner
        was not given, such as a part of a slot, is "not used".  What is negative is in
        `memory_bytes`, though the limit does not pay for it.

        Examples
        --------
        >>> from multistage import plan
        >>> made = plan(Costs(1.0, 2.0, state_bytes=100), 1050, 100, buffer_bytes=300)
        >>> made.memory_bytes, made.reserved
        (700, {'buffers of the tiers': 300, 'not used': 50})
        """
        if limit_bytes is None or self.memory_bytes is None:
            return self
        left = limit_bytes - sum(reserved.values()) - self.memory_bytes
        named = {**reserved, NOT_USED: left}.items()
        return replace(self, reserved={name: nbytes for name, nbytes in named if nbytes})

    @property
    def tier(self) -> Tier | None:
        """The first slow tier, or None."""
        return self.tiers[0] if self.tiers else None

    @property
    def slots(self) -> int:
        """Fast slots that the plan may take, in states; of stages in the largest of them."""
        if self.memory_bytes is None:
            raise ArgumentError("the plan has no limit (memory_bytes=None), and so no slots")
        return self.memory_bytes // self.costs.largest_state_bytes

    @property
    def peak_slots(self) -> float:
        """Most fast slots that the schedule takes."""
        return self.peak_bytes / self.costs.largest_state_bytes

    @property
    def lower_bound_s(self) -> float | None:
        """Seconds that no schedule within the limit and with the tiers undercuts.

        None of stages without a tier, or where the C core is missing: then it is not known.  Of
        stages it is calculated when it is first asked for, in 0.1 to 1 s, for nested schedules;
        see `planners.chain.joint_bound`.
        """
        if isinstance(self.costs, Costs):
            return lower_bound(self.costs, self.slots, self.n_steps)
        if self.tier is None:
            return None
        return self._pages.chain_bound_s(self.costs, self.memory_bytes, self.tier)

    @property
    def gap(self) -> float | None:
        """How far the makespan lies above the lower bound, 0 at best; None if that is not known."""
        bound_s = self.lower_bound_s
        return None if bound_s is None else gap_of(self.makespan_s, bound_s)

    @property
    def recompute_factor(self) -> float:
        """Forward steps run / steps."""
        return self.forward_steps / self.n_steps

    @property
    def plain_s(self) -> float:
        """Seconds with every tape of a chain kept, and without what the executor takes."""
        costs = self.stage_costs.whole
        return plain_use(costs).makespan_s - sum(stage.overhead_s for stage in costs.stages)

    @property
    def plain_bytes(self) -> int:
        """Bytes with every tape of a chain kept."""
        return plain_use(self.stage_costs.whole).peak_bytes

    @property
    def step_costs(self) -> Costs:
        """The costs of a plan of equal steps.  Raises ArgumentError for another plan."""
        if not isinstance(self.costs, Costs):
            raise ArgumentError("the plan is of stages that differ, not of steps that are alike")
        return self.costs

    @property
    def stage_costs(self) -> StageCosts:
        """The costs of a plan of stages that differ.  Raises ArgumentError for another plan."""
        if not isinstance(self.costs, StageCosts):
            raise ArgumentError("the plan is of steps that are alike, not of stages that differ")
        return self.costs

    @property
    def kept(self) -> tuple[int, ...]:
        """Stages whose tape is kept from the forward sweep on."""
        _ = self.stage_costs  # or no action is listed
        stop = next((k for k, a in enumerate(self.actions) if isinstance(a, EndForward)), None)
        return tuple(a.step for a in self.actions[:stop] if isinstance(a, Tape))

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is run twice."""
        whole = not any(stage.way for stage in self.stage_costs.stages)
        return whole and len(self.kept) == self.n_steps

    def runs(self) -> list[int]:
        """Return how often each stage is run forward."""
        counts = [0] * len(self.stage_costs.stages)
        taped: set[int] = set()
        for action in self.actions:
            if isinstance(action, Advance):
                for i in range(action.start, action.stop):
                    counts[i] += 1
            elif isinstance(action, Tape):
                counts[action.step] += 1
                taped.add(action.step)
            elif isinstance(action, Reverse):
                counts[action.step] += action.step not in taped
                taped.discard(action.step)
        return counts

    def fates(self) -> list[str]:
        """Return what the forward sweep leaves of each stage.

        `tape kept`, `tape kept in part` (the rest is made again from it), `tape to tier`,
        `input kept`, `input to tier` or `recomputed`: neither, so that it runs again from an
        earlier state.  A tape and the state it starts from may both be left, as in `tape to
        tier, input kept`.
        """
        forward = list(itertools.takewhile(lambda a: not isinstance(a, Reverse), self.actions))
        saved = {a.step for a in forward if isinstance(a, Save)}
        sent = {a.step for a in forward if isinstance(a, Put) and not a.tape}
        tapes_sent = {a.step for a in forward if isinstance(a, Put) and a.tape}
        kept = set(self.kept)
        found = []
        ways = [stage.way for stage in self.stage_costs.stages]
        for i in range(self.n_steps):
            state = "input to tier" if i in sent else "input kept" if i in saved else ""
            if i in tapes_sent:
                found.append("tape to tier" + (f", {state}" if state else ""))
            elif i in kept:
                in_part = " in part" if ways[i] else ""
                found.append(f"tape kept{in_part}" + (f", {state}" if i in sent else ""))
            else:
                found.append(state or ("recomputed" if i else "input kept"))
        return found

    def candidate(self, planner: str) -> Plan | None:
        """Return the candidate of a planner; None if there is none."""
        return next((each for each in self.candidates if each.planner == planner), None)

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
        >>> from multistage import Stage, plan, plan_chain
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
        run = partial(simulate, jitter=jitter, seed=seed, timed=timed)
        costs = plan.costs
        if isinstance(costs, Costs):
            known = None if plan.planner == "online" else plan.n_steps
            return run(plan.schedule(), known, costs, plan.slots)
        return run(plan.actions, None, costs, tiers=plan.tiers, memory_bytes=plan.memory_bytes)

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
        tier, costs = Tier.parse(tier), self.costs
        if not isinstance(costs, Costs):
            return replace(self, tiers=(tier.in_bytes(),))
        costs = replace(costs, tiers=(tier,))
        return replace(self, costs=costs, tiers=costs.tiers)

    def limits(self) -> dict[str, float | None]:
        """Return what fast memory and each tier may hold, in bytes; None without bound."""
        limits: dict[str, float | None] = {"fast": self.memory_bytes}
        for tier in self.tiers:
            room = tier.capacity_bytes
            if tier.capacity_states is not None:
                room = tier.capacity_states * self.costs.largest_state_bytes
            limits[tier.name] = room
        return limits

    @property
    def room(self) -> str:
        """What it may take, as text."""
        if self.memory_bytes is None:
            return "no limit"
        if isinstance(self.costs, Costs):
            slots = f"{self.slots} fast slot{'' if self.slots == 1 else 's'}"
            return f"{slots} of {format_bytes(self.costs.state_bytes)}"
        return format_bytes(self.memory_bytes)

    @property
    def title(self) -> str:
        """What it is a plan of, in few words."""
        unit = self.costs.UNIT if self.n_steps != 1 else self.costs.UNIT[:-1]
        return f"{self.planner}: {self.n_steps} {unit}"

    def summary(self) -> str:
        """Return the plan in one line."""
        more = ""
        if self.actions:
            slower = self.makespan_s / self.plain_s - 1 if self.plain_s else 0.0
            more = (
                f", {100 * slower:.1f} % over plain training; peak {format_bytes(self.peak_bytes)} "
                f"of {format_bytes(self.plain_bytes)}"
            )
        return f"plan {self.title} within {self.room}: {format_seconds(self.makespan_s)}{more}"

    def row(self) -> dict[str, str | int | float]:
        """Return the plan as one row of a table."""
        gap = self.gap
        return {
            "planner": self.planner,
            "makespan": format_seconds(self.makespan_s),
            "above bound": "not known" if gap is None else f"{100 * gap:.2f} %",
            "recompute": round(self.recompute_factor, 3),
            "writes": self.writes,
            "reads": self.reads,
            "stall": format_seconds(self.stall_s),
            **({} if self.actions else {"peak slots": round(self.peak_slots, 1)}),
            "peak bytes": format_bytes(self.peak_bytes),
        }

    def ranked(self) -> list[Plan]:
        """Return the candidates, or the plan alone; the fastest first."""
        return sorted(self.candidates or (self,), key=lambda plan: plan.makespan_s)

    def table(self) -> str:
        """Return the candidates side by side as text, the chosen one marked."""
        rows = [
            {"": ">" if plan.planner == self.planner else "", **plan.row()}
            for plan in self.ranked()
        ]
        return tabulate(rows, headers="keys", disable_numparse=True, stralign="right")

    def details(self) -> list[str]:
        """Return the lines that printing the plan shows below its summary."""
        bound_s, given_up, reserved = self.lower_bound_s, "", ""
        bound = "not known" if bound_s is None else format_seconds(bound_s)
        if self.given_up:
            given_up = f"tapes given up in the last run, as their writes were late: {self.given_up}"
        if self.reserved and self.memory_bytes is not None:
            limit = format_bytes(self.memory_bytes + sum(self.reserved.values()))
            parts = [f"{name} {format_bytes(nbytes)}" for name, nbytes in self.reserved.items()]
            reserved = f"limit {limit}, of which {', '.join(parts)}"
        tiers = (f"tier {tier}" for tier in self.tiers)
        lines = [*self.costs.facts(), *tiers, "", self.table(), "", f"lower bound {bound}"]
        lines += filter(None, (self.note, self.why, given_up, reserved))
        if not self.actions:
            return lines
        headers, rows = self.stage_rows()
        align = ("right", "left", "left", "right", *("right" for _ in headers[4:]))
        table = tabulate(rows, headers=headers, disable_numparse=True, colalign=align)
        return [*lines, "", table]

    def stage_rows(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        """Return what becomes of each stage, as the headers and rows of a table."""
        headers = ("", "stage", "forward sweep", "runs", "tape", "output", "forward", "backward")
        rows: list[tuple[str, ...]] = [
            (
                f"{i}",
                stage.name,
                what,
                f"{runs}",
                format_bytes(stage.tape_bytes),
                format_bytes(stage.output_bytes),
                format_seconds(stage.forward_s),
                format_seconds(stage.backward_s),
            )
            for i, (stage, what, runs) in enumerate(
                zip(self.stage_costs.stages, self.fates(), self.runs(), strict=True)
            )
        ]
        return headers, rows

    def to_dict(self) -> dict[str, object]:
        """Return the plan as plain data, for JSON; `from_dict` reads it back."""
        data: dict[str, object] = {
            "format": FORMAT,
            **self._facts(),
            "n_steps": self.n_steps,
            "memory_bytes": self.memory_bytes,
            "lower_bound_s": self.lower_bound_s,
            "why": self.why,
            "reserved": dict(self.reserved),
            "candidates": [candidate._facts() for candidate in self.candidates],
            "tiers": [tier.to_dict() for tier in self.tiers],
            "costs": self.costs.to_dict(),
        }
        # For the reader's convenience.
        if self.actions:
            data |= {"plain_s": self.plain_s, "plain_bytes": self.plain_bytes}
            data |= {"fates": self.fates(), "runs": self.runs()}
        else:
            data |= {"slots": self.slots, "peak_slots": self.peak_slots}
        return data

    def _facts(self) -> dict[str, object]:
        return {
            "planner": self.planner,
            "makespan_s": self.makespan_s,
            "recompute_factor": self.recompute_factor,
            "writes": self.writes,
            "reads": self.reads,
            "stall_s": self.stall_s,
            "peak_bytes": self.peak_bytes,
            "parameters": dict(self.parameters),
            "note": self.note,
            "actions": actions_to_lists(self.actions),
        }

    @classmethod
    def from_dict(cls, data: object) -> Plan:
        """Return the plan that `to_dict` described.

        What the data says of times and memory does not count: a plan without a list of actions is
        planned again, a list of actions is judged and simulated again.

        Raises
        ------
        ArgumentError
            Naming what is missing or wrong; for an unknown planner; for a file of an earlier
            version.
        BudgetError
            Where the memory holds too little.
        ScheduleError
            Naming the first action that is illegal or exceeds `memory_bytes`.
        """
        found = data.get("format") if isinstance(data, dict) else None
        if not isinstance(data, dict) or found != FORMAT:
            instead = "" if found is None else f", not {shown(found)}"
            old = isinstance(found, str) and found.startswith(("multistage-plan", "multistage-ch"))
            remedy = "; plan again, and save the plan" if old else ""
            raise ArgumentError(f"no plan: 'format' must be {FORMAT!r}{instead}{remedy}")
        for name in ("planner", "costs", "n_steps", "memory_bytes", "tiers", "actions"):
            if name not in data:
                raise ArgumentError(f"no plan: {name!r} is missing")
        return cls._pages.read_plan(data)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Return the plan that `save` wrote to a `.json` file.

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
            For another suffix; for steps that are alike and `.json`, which holds no schedule of
            theirs: if it may not be its planner's, as the plan was changed or is of a durable run.
        """
        self._pages.save_plan(self, path)

    def picture(self, path: str | Path, what: Subject = "schedule") -> None:
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
            subject; for schedules of more than 20 000 steps.
        """
        self._pages.draw_plan(self, path, what)

    def _repr_html_(self) -> str:
        return self._pages.plan_html(self)

    def __str__(self) -> str:
        return "\n".join([self.summary(), *self.details()])


def gap_of(makespan_s: float, bound_s: float) -> float:
    """Return how far a makespan lies above a lower bound, as a share of that."""
    if not bound_s:  # steps that take no time
        return 0.0 if not makespan_s else math.inf
    gap = makespan_s / bound_s - 1
    return gap if abs(gap) > 1e-12 else 0.0  # rounding is no gap


def enter(pages: Pages) -> None:
    """Give plans what reads and draws them.

    Planners import plans, so plans import no planner; `multistage.planners` calls this once.
    """
    Plan._pages = pages


def played(actions: Iterable[Action]) -> Schedule:
    """Yield actions as a schedule, which looks at no answer."""
    for action in actions:
        _ = yield action


def store_all_schedule(n_steps: int) -> Schedule:
    """Yield: tape every step, then reverse every step."""
    for i in range(n_steps):
        yield Tape(i)
    yield EndForward()
    for i in reversed(range(n_steps)):
        yield Reverse(i)


@lru_cache(maxsize=64)
def plain_use(costs: StageCosts) -> Simulation:
    """Return what the schedule that keeps every tape takes."""
    return simulate(store_all_schedule(len(costs.stages)), None, costs, checked=False)


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
