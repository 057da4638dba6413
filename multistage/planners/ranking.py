"""The planners by name, the choice between them, and what more memory would gain.

Every planner is a pure function `(costs, slots, n_steps) -> Plan`; `PLANNERS`
holds them by name, `plan` ranks them by predicted makespan.

Examples
--------
>>> from multistage import PLANNERS, Costs
>>> made = PLANNERS["revolve"](Costs(1.0, 2.0), 10, 100)
>>> made.forward_steps, made.makespan_s
(223, 423.0)
>>> "streaming" in PLANNERS
True
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import get_args

from .. import native
from ..errors import ArgumentError, BudgetError
from ..model.budget import Budget
from ..model.costs import Costs
from ..model.stages import StageCosts
from ..model.tier import Tier
from ..support.progress import counting
from ..support.units import format_seconds
from ..support.values import MOST, several, shown, whole
from .base import BUFFERS, Plan, Planner, require_steps
from .chain.at_once import ChainPlanner
from .chain.joint_bound import joint_lower_bound
from .chain.table import default_threads
from .files import actions_from_lists
from .predict import require_costs
from .single.revolve import pyrevolve, revolve
from .single.segments import periodic, recursive, store_all
from .streaming.interval import interval
from .streaming.online import online
from .streaming.streaming import streaming
from .synchronous.hierarchy import disk_revolve, h_revolve, worth_ranking
from .synchronous.mixed import mixed, worth_trying
from .synchronous.periodic_disk import periodic_disk
from .synchronous.stumm_walther import stumm_walther

PLANNERS: dict[str, Planner] = {
    "store-all": store_all,
    "streaming": streaming,
    "revolve": revolve,
    "pyrevolve": pyrevolve,
    "interval": interval,
    "periodic": periodic,
    "recursive": recursive,
    "online": online,
    "h-revolve": h_revolve,
    "disk-revolve": disk_revolve,
    "periodic-disk": periodic_disk,
    "stumm-walther": stumm_walther,
    "mixed": mixed,
}

# Ranked by "auto".  Of equals the first wins.  pyrevolve is Revolve again, and
# online pays for what it does not know.  Mixed joins where it is cheap to solve.
RANKED = ("store-all", "revolve", "streaming", "interval", "periodic", "recursive")


def plan(
    costs: Costs,
    memory: Budget | int | str,
    n_steps: int,
    planner: str = "auto",
    *,
    buffer_bytes: int = 0,
    progress: bool | None = None,
) -> Plan:
    """Choose a schedule and predict it.

    Parameters
    ----------
    costs : Costs
        Measured by `multistage.measure`, or assumed.
    memory : Budget, int or str
        Fast memory for checkpoints: bytes, `"512 MiB"` or `"32 slots"`.
    n_steps : int
        Steps to reverse, at least 1.
    planner : str
        A key of `PLANNERS`, or `"auto"` to rank them by predicted makespan.
    buffer_bytes : int
        I/O buffers of the tier, taken from a budget in bytes.
    progress : bool or None
        Show a bar while planners are ranked; None: on a terminal or in a notebook.

    Returns
    -------
    Plan
        With `candidates` and `why` when ranked.

    Raises
    ------
    ArgumentError
        For an unknown planner or n_steps < 1.
    BudgetError
        When the budget holds not even one state, or too little for `planner`.

    Examples
    --------
    >>> from multistage.model.tier import Tier
    >>> costs = Costs(1e-3, 2e-3, tiers=(Tier("file", 4e-3, 4e-3),))
    >>> chosen = plan(costs, "20 slots", n_steps=10_000)
    >>> chosen.planner, round(chosen.recompute_factor, 2)
    ('streaming', 1.75)
    """
    require_costs(costs)
    room = whole(buffer_bytes, "buffer_bytes")
    budget, reserved = Budget.parse(memory), {BUFFERS: room}
    slots = budget.slots_for(costs.state_bytes, room)
    n = require_steps(n_steps, planner)
    if not isinstance(planner, str) or planner != "auto":
        if not isinstance(planner, str) or planner not in PLANNERS:
            raise ArgumentError(
                f"planner {shown(planner)} is not known; "
                f"choose 'auto' or one of {', '.join(PLANNERS)}"
            )
        return PLANNERS[planner](costs, slots, n).within(budget.bytes, reserved)
    plans: list[Plan] = []
    refused: list[str] = []
    names = (
        *RANKED,
        *(("mixed",) if worth_trying(costs, slots, n) else ()),
        *_over_tiers(costs, slots, n),
    )
    with counting("planning", len(names), progress, " planners") as tick:
        for name in names:
            try:
                plans.append(PLANNERS[name](costs, slots, n))
            except BudgetError as error:
                refused.append(f"Left out: {error}.")
            tick(name)
    plans.sort(key=lambda candidate: candidate.makespan_s)
    best = plans[0].within(budget.bytes, reserved)
    return replace(best, candidates=tuple(plans), why="\n".join([_why(plans), *refused]))


def _over_tiers(costs: Costs, slots: int, n_steps: int) -> tuple[str, ...]:
    """Return the planners that wait for every transfer, where "auto" ranks them.

    They gain nothing over streaming on its one tier; over several they may.
    """
    if len(costs.tiers) < 2:
        return ()
    solved = worth_ranking(costs, slots, n_steps)
    return (*(("h-revolve", "stumm-walther") if solved else ()), "periodic-disk")


def _why(plans: list[Plan]) -> str:
    best = plans[0]
    if len(plans) == 1:
        return f"Chosen: {best.planner}, the only planner that fits the budget."
    second = plans[1]
    faster = 0.0 if second.makespan_s == best.makespan_s else math.inf
    if best.makespan_s:
        faster = second.makespan_s / best.makespan_s - 1
    head = f"Chosen: {best.planner}, the shortest predicted makespan"
    if faster < 1e-9:
        return f"{head} (equal to {second.planner})."
    saved = format_seconds(second.makespan_s - best.makespan_s)
    return f"{head}: {saved} ({100 * faster:.2g} %) less than {second.planner}."


def read_plan(data: Mapping[str, object]) -> Plan:
    """Return the plan that `Plan.to_dict` described: planned again, or its actions judged again.

    A schedule that is not listed follows from its planner, costs, memory and number of steps;
    nothing else in the data counts.

    Raises
    ------
    ArgumentError
        Naming what is wrong; for a planner that is not known.
    ScheduleError
        Naming the first action that is illegal or exceeds `memory_bytes`.
    """
    named = data.get("reserved", {})
    if not isinstance(named, dict) or not all(isinstance(name, str) for name in named):
        raise ArgumentError(f"reserved={shown(named)} must map names to bytes")
    reserved = {name: whole(nbytes, f"reserved[{name!r}]", -MOST) for name, nbytes in named.items()}
    return replace(_planned_again(data), reserved=reserved)


def _planned_again(data: Mapping[str, object]) -> Plan:
    planner, memory = data["planner"], data["memory_bytes"]
    if data["actions"]:
        return _read_listed(data, None if memory is None else whole(memory, "memory_bytes"))
    costs, n_steps = Costs.from_dict(data["costs"]), whole(data["n_steps"], "n_steps", 1)
    if not isinstance(planner, str) or planner not in PLANNERS:
        raise ArgumentError(
            f"planner {shown(planner)} is none of {', '.join(PLANNERS)}; "
            "its schedule is not in the file"
        )
    slots = whole(memory, "memory_bytes", most=MOST * costs.state_bytes) // costs.state_bytes
    if data.get("candidates"):
        found = plan(costs, f"{slots} slots", n_steps, progress=False)
        if found.planner == planner:
            return found
    return PLANNERS[planner](costs, slots, n_steps)


def _read_listed(data: Mapping[str, object], memory: int | None) -> Plan:
    """Return a plan whose actions are listed, and the candidates that it was chosen from."""
    planner, costs = data["planner"], StageCosts.from_dict(data["costs"])
    if not isinstance(planner, str) or planner not in get_args(ChainPlanner):
        raise ArgumentError(
            f"planner {shown(planner)} is not known; it is one of {get_args(ChainPlanner)}"
        )
    tiers = data["tiers"]
    if not isinstance(tiers, list) or len(tiers) > 1:
        raise ArgumentError(f"tiers={shown(tiers)} must be a list of one tier, or empty")
    tier = Tier.from_dict(tiers[0]) if tiers else None

    def judged(each: object) -> Plan:
        if not isinstance(each, dict) or not isinstance(each.get("planner"), str):
            raise ArgumentError(f"candidate {shown(each)} must name its planner")
        actions = actions_from_lists(each.get("actions"))
        return Plan.judged(each["planner"], costs, memory, actions, tier)

    candidates = data.get("candidates") or []
    if not isinstance(candidates, list):
        raise ArgumentError(f"candidates={shown(candidates)} must be a list of plans")
    return replace(judged(data), candidates=tuple(map(judged, candidates)))


@lru_cache(maxsize=64)
def chain_bound_s(costs: StageCosts, memory_bytes: int | None, tier: Tier) -> float | None:
    """Return a lower bound of a chain with a tier; None without the C core."""
    if native.LIBRARY is None:
        return None
    found = joint_lower_bound(costs, memory_bytes, tier, threads=default_threads())
    return found if math.isfinite(found) else None


def trade_off(
    costs: Costs,
    n_steps: int,
    planners: Sequence[str] = RANKED,
    *,
    slots: Iterable[int] | None = None,
    also: int | None = None,
    progress: bool | None = None,
) -> dict[str, tuple[Plan, ...]]:
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
    curves: dict[str, tuple[Plan, ...]] = {}
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
