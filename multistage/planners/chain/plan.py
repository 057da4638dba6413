"""What the planners of chains return: a schedule of unequal stages, and what it takes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import ClassVar, Literal, get_args

from tabulate import tabulate

from ... import native
from ...actions import Action, Advance, EndForward, Get, Put, Reverse, Save, Schedule, Tape
from ...errors import ArgumentError
from ...model.stages import StageCosts
from ...model.tier import Tier
from ...schedule.simulation import Simulation, simulate
from ...support.units import format_bytes, format_seconds
from ...support.values import MOST, shown, whole
from ...support.values import seconds as a_time
from ..base import Plan, actions_from_lists, actions_to_lists
from .joint_bound import joint_lower_bound
from .memory import plain_use
from .table import default_threads

# What `plan_chain` offers; plans that `pieces` makes of chains too long for it or not known.
ChainPlanner = Literal["auto", "optimal", "revolve", "periodic", "store-all", "pieces", "survey"]
CHAIN_PLANNERS: tuple[ChainPlanner, ...] = ("auto", "optimal", "revolve", "periodic", "store-all")


@dataclass(frozen=True, slots=True)
class ChainPlan(Plan):
    """A schedule of a chain of stages that differ, and what it is predicted to take.

    What it has and does besides, see `Plan`.

    Attributes
    ----------
    memory_bytes : int or None
        The limit it was made for.
    actions : tuple of Action
        The loss, which is the caller's, is between the sweeps, at `EndForward`.
    makespan_s, peak_bytes
        Of one forward and backward, by the byte-exact judge; the peak includes
        the chain's input.
    plain_s, plain_bytes
        The same with every tape kept, and without what the executor takes (`overhead_s`).
    tier : Tier or None
        The slow tier it was planned with.
    no_tier_s, offload_s : float or None
        The makespans of the alternatives, without the tier and with every tape sent
        to it; None where they do not fit, or no tier was given.
    given_up : int
        Tapes that the last run made again, as the tier was slower than planned; see
        `multistage.execute.late`.

    Examples
    --------
    >>> from multistage import Stage, plan_chain
    >>> plan = plan_chain(StageCosts.uniform(5, Stage("layer", 1.0, 2.0, 10, 30), 10), memory=0.6)
    >>> plan.planner, plan.fates()[0], plan.peak_bytes <= plan.memory_bytes
    ('optimal', 'input kept', True)
    """

    FORMAT: ClassVar[str] = "multistage-chain-plan-4"
    UNIT: ClassVar[str] = "stages"

    # `field()`: or what the base class has by these names would be their defaults.
    planner: ChainPlanner = field()
    costs: StageCosts
    memory_bytes: int | None = field()
    actions: tuple[Action, ...] = field(repr=False)
    makespan_s: float
    peak_bytes: int = field()
    forward_steps: int
    plain_s: float
    plain_bytes: int
    tier: Tier | None = None
    no_tier_s: float | None = None
    offload_s: float | None = None
    stall_s: float = 0.0
    given_up: int = field(default=0, compare=False)

    @classmethod
    def judged(
        cls,
        planner: ChainPlanner,
        costs: StageCosts,
        memory_bytes: int | None,
        actions: Iterable[Action],
        tier: Tier | None = None,
        *,
        no_tier_s: float | None = None,
        offload_s: float | None = None,
    ) -> ChainPlan:
        """Return a schedule as a plan, its times and its peak those of a simulation.

        Raises
        ------
        ScheduleError
            Naming the first action that is illegal or exceeds `memory_bytes`.

        Examples
        --------
        >>> from multistage import Stage
        >>> costs = StageCosts.uniform(1, Stage("a", 1.0, 2.0, 10, 30), 5)
        >>> actions = [Tape(0), EndForward(), Reverse(0)]
        >>> ChainPlan.judged("optimal", costs, None, actions).peak_bytes
        45
        """
        actions = tuple(actions)
        tiers = () if tier is None else (tier,)
        # What exceeds a whole number of the simulator's is no limit.
        limit = None if memory_bytes is None or memory_bytes > MOST else memory_bytes
        use = simulate(actions, None, costs, tiers=tiers, memory_bytes=limit, checked=False)
        plain = plain_use(costs)
        return cls(
            planner=planner,
            costs=costs,
            memory_bytes=memory_bytes,
            actions=actions,
            makespan_s=use.makespan_s,
            peak_bytes=use.peak_bytes,
            forward_steps=use.forward_steps,
            plain_s=plain.makespan_s - sum(stage.overhead_s for stage in costs.stages),
            plain_bytes=plain.peak_bytes,
            tier=tier,
            no_tier_s=no_tier_s,
            offload_s=offload_s,
            stall_s=use.stall_s,
        )

    @property
    def n_steps(self) -> int:
        """Stages, the loss not counted."""
        return len(self.costs.stages)

    @property
    def tiers(self) -> tuple[Tier, ...]:
        """The slow tier, if there is one."""
        return () if self.tier is None else (self.tier,)

    @property
    def writes(self) -> int:
        """States and tapes sent to the tier."""
        return sum(isinstance(action, Put) for action in self.actions)

    @property
    def reads(self) -> int:
        """States and tapes brought back."""
        return sum(isinstance(action, Get) for action in self.actions)

    def schedule(self) -> Schedule:
        """Return the actions one by one."""
        for action in self.actions:
            _ = yield action  # answers are not looked at

    @property
    def kept(self) -> tuple[int, ...]:
        """Stages whose tape is kept from the forward sweep on."""
        stop = next((k for k, a in enumerate(self.actions) if isinstance(a, EndForward)), None)
        return tuple(a.step for a in self.actions[:stop] if isinstance(a, Tape))

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is run twice."""
        return len(self.kept) == len(self.costs.stages)

    def runs(self) -> list[int]:
        """Return how often each stage is run forward."""
        return _runs(self.actions, len(self.costs.stages))

    @property
    def lower_bound_s(self) -> float | None:
        """Seconds that no nested schedule within the limit and with the tier undercuts.

        None without a tier, and where the C core is missing.
        Calculated when it is first asked for, in 0.1 to 1 s; see `planners.chain.joint_bound`.
        """
        if self.tier is None:
            return None
        return _bound_s(self.costs, self.memory_bytes, self.tier)

    def fates(self) -> list[str]:
        """Return what the forward sweep leaves of each stage.

        `tape kept`, `tape to tier`, `input kept`, `input to tier` or `recomputed`: neither,
        so that it runs again from an earlier state.  A tape and the state it starts from may
        both be left, as in `tape to tier, input kept`.
        """
        forward = list(itertools.takewhile(lambda a: not isinstance(a, Reverse), self.actions))
        saved = {a.step for a in forward if isinstance(a, Save)}
        sent = {a.step for a in forward if isinstance(a, Put) and not a.tape}
        tapes_sent = {a.step for a in forward if isinstance(a, Put) and a.tape}
        kept = set(self.kept)
        found = []
        for i in range(len(self.costs.stages)):
            state = "input to tier" if i in sent else "input kept" if i in saved else ""
            if i in tapes_sent:
                found.append("tape to tier" + (f", {state}" if state else ""))
            elif i in kept:
                found.append("tape kept" + (f", {state}" if i in sent else ""))
            else:
                found.append(state or ("recomputed" if i else "input kept"))
        return found

    def _simulation(self) -> partial[Simulation]:
        limit = self.memory_bytes
        return partial(
            simulate, self.actions, None, self.costs, tiers=self.tiers, memory_bytes=limit
        )

    def _on(self, tier: Tier) -> ChainPlan:
        return replace(self, tier=tier.in_bytes())

    def to_dict(self) -> dict[str, object]:
        """Return the plan as plain data, for JSON; `from_dict` reads it back.

        `fates`, `kept`, `runs` and the numbers that follow from schedule and costs are
        there for the reader's convenience.
        """
        return {
            "format": self.FORMAT,
            "planner": self.planner,
            "memory_bytes": self.memory_bytes,
            "makespan_s": self.makespan_s,
            "peak_bytes": self.peak_bytes,
            "stall_s": self.stall_s,
            "recompute_factor": self.recompute_factor,
            "plain_s": self.plain_s,
            "plain_bytes": self.plain_bytes,
            "lower_bound_s": self.lower_bound_s,
            "no_tier_s": self.no_tier_s,
            "offload_s": self.offload_s,
            "tier": None if self.tier is None else self.tier.to_dict(),
            "kept": list(self.kept),
            "fates": self.fates(),
            "runs": self.runs(),
            "costs": self.costs.to_dict(),
            "actions": actions_to_lists(self.actions),
        }

    def summary(self) -> str:
        """Return the plan in one line."""
        limit = "no limit" if self.memory_bytes is None else format_bytes(self.memory_bytes)
        slower = self.makespan_s / self.plain_s - 1 if self.plain_s else 0.0
        return (
            f"plan {self.planner}: {len(self.costs.stages)} stages within {limit}: "
            f"{format_seconds(self.makespan_s)}, {100 * slower:.1f} % over plain training; "
            f"peak {format_bytes(self.peak_bytes)} of {format_bytes(self.plain_bytes)}"
        )

    def comparison(self) -> list[tuple[str, str, str]]:
        """Return the plan beside its lower bound and its alternatives: name, time, difference."""
        rows = [("this plan", format_seconds(self.makespan_s), "")]
        if self.stall_s:
            rows.append(("  of which waiting", format_seconds(self.stall_s), ""))
        others = {
            "lower bound": self.lower_bound_s,
            "no tier": self.no_tier_s,
            "every tape to the tier": self.offload_s,
        }
        for name, seconds in others.items() if self.tier is not None else ():
            if seconds is None:
                known = name != "lower bound" and self.planner != "pieces"
                what = "does not fit" if known else "not known"
                rows.append((name, what, ""))
                continue
            more = f"{100 * (seconds / self.makespan_s - 1):+.1f} %" if self.makespan_s else ""
            rows.append((name, format_seconds(seconds), more))
        return rows

    def table(self) -> str:
        """Return the plan beside its lower bound and its alternatives as text."""
        return tabulate(
            self.comparison(),
            tablefmt="plain",
            disable_numparse=True,
            colalign=("left", "right", "right"),
        )

    def details(self) -> list[str]:
        """Return the rest of what printing it shows: its alternatives, and each stage."""
        rows = [
            (i, stage.name, what, runs, format_bytes(stage.tape_bytes))
            for i, (stage, what, runs) in enumerate(
                zip(self.costs.stages, self.fates(), self.runs(), strict=True)
            )
        ]
        stages = tabulate(
            rows,
            headers=("", "stage", "forward sweep", "runs", "tape"),
            disable_numparse=True,
            colalign=("right", "left", "left", "right", "right"),
        )
        beside = [] if self.tier is None else [f"tier {self.tier}", self.table()]
        if self.given_up:
            beside.append(
                f"tapes given up in the last run, as their writes were late: {self.given_up}"
            )
        return [*beside, stages]


@lru_cache(maxsize=64)
def _bound_s(costs: StageCosts, memory_bytes: int | None, tier: Tier) -> float | None:
    if native.LIBRARY is None:
        return None
    found = joint_lower_bound(costs, memory_bytes, tier, threads=default_threads())
    return found if math.isfinite(found) else None


def _runs(actions: Sequence[Action], stages: int) -> list[int]:
    counts = [0] * stages
    taped: set[int] = set()
    for action in actions:
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


_KNOWN = ("no_tier_s", "offload_s")
_READ = ("planner", "memory_bytes", "tier", "costs", "actions", *_KNOWN)


def read_chain(data: Mapping[str, object]) -> ChainPlan:
    """Return the plan that `ChainPlan.to_dict` described, its schedule judged again.

    Raises
    ------
    ArgumentError
        Naming what is missing or wrong.
    ScheduleError
        Naming the first action that is illegal or exceeds `memory_bytes`.
    """
    ChainPlan.require(data, _READ)
    planners: tuple[ChainPlanner, ...] = get_args(ChainPlanner)
    planner = next((known for known in planners if known == data["planner"]), None)
    if planner is None:
        raise ArgumentError(
            f"planner {shown(data['planner'])} is not known; it is one of {planners}"
        )
    costs = StageCosts.from_dict(data["costs"])
    tier = None if data["tier"] is None else Tier.from_dict(data["tier"])
    limit = data["memory_bytes"]
    limit = None if limit is None else whole(limit, "memory_bytes")
    actions = actions_from_lists(data["actions"])
    seconds = {name: _seconds(data[name], name) for name in _KNOWN}
    return ChainPlan.judged(planner, costs, limit, actions, tier, **seconds)


def _seconds(value: object, name: str) -> float | None:
    return None if value is None else a_time(value, name)
