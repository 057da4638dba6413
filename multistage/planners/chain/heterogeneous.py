"""Schedules of a chain whose stages differ in time and size, within a memory limit.

optimal
    Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova 2019, *Optimal
    checkpointing for heterogeneous chains* (RR-9302), theorem 1: the best
    schedule that keeps every checkpoint until it is used ("persistent"), and
    that may keep tapes from the forward sweep on.  O(L^3 S) for L stages and
    S slots of memory.
revolve
    The same without tapes kept: every stage is taped right before its adjoint
    (Griewank & Walther 2000; Gruslys et al. 2016, appendix C).
periodic
    Chen et al. 2016, as `torch.utils.checkpoint.checkpoint_sequential` does
    it: equal segments, each but the last run twice.
store-all
    Every tape is kept.

Differences from the printed algorithm: m_all counts the gradient of the
stage's output where it is larger and that of its input beside it; pairs are
solved by growing length; F_none runs to s'-1; the checkpoint branch is guarded.
Without the first of these, plans exceed the limit in a fifth of all chains.

Memory is cut into slots for the dynamic program alone.  Sizes are rounded to
the *nearest* slot, the program is solved for 15 % more slots than the limit
has, and every schedule of the table is judged with its true sizes: the fastest
that fits is taken.  So the limit is never exceeded, and rounding costs next to
nothing.  The slots' sizes come from a fixed ladder, of which all rungs below
the limit are considered; a schedule that one limit finds is therefore found by
every larger one, and more memory never makes a plan slower.  Rungs that cannot
be better, by a bound from sizes rounded down, are not solved.

Known gap: persistency.  Schedules that drop a checkpoint before its use can
be faster (the paper's figure 2: 2n + 2 instead of 3n + 1); where a tape pins
its input, as in autograd, they gain 0 to 0.25 % on average.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from ...actions import Action
from ...errors import ArgumentError
from ...model.budget import Memory, memory_bytes
from ...model.stages import StageCosts
from ...model.tier import Tier
from ...support.values import shown
from ...support.values import whole as whole_number
from .joint import plan_joint, smallest_with_tier
from .ladder import MORE, Ladder
from .memory import actions_of, plain_use, store_all
from .periodic import periodic, too_small
from .plan import CHAIN_PLANNERS as CHAIN_PLANNERS
from .plan import ChainPlan as ChainPlan
from .plan import ChainPlanner as ChainPlanner
from .short import MAX_STAGES, search_short
from .sizes import Sizes
from .smallest import smallest
from .table import Table, default_threads
from .traces import judge

SLOTS = 500

_MOST_SLOTS, _MOST_THREADS = 1 << 20, 1024


def plan_chain(
    costs: StageCosts,
    memory: Memory | None = None,
    planner: ChainPlanner = "optimal",
    *,
    tiers: Tier | str | Sequence[Tier | str] | None = None,
    segments: int | None = None,
    resolution: int = SLOTS,
    threads: int | None = None,
    progress: bool | None = None,
) -> ChainPlan:
    """Return the fastest schedule of a chain within a memory limit.

    Parameters
    ----------
    costs : StageCosts
    memory : int, str, float, Budget or None
        Bytes for activations and their gradients, the chain's input included:
        a number, a string such as `"4 GiB"`, or a fraction (a float up to 1, `"50 %"`)
        of what keeping every tape takes.  None for no limit.
    planner : {"optimal", "revolve", "periodic", "store-all"}
    tiers : Tier, str or sequence, optional
        A slow tier for states and tapes (the first, if several), as `Tier` or
        as a text such as `"write=2GB/s,read=1GB/s"`; with planner "optimal".  The
        plan is never slower than without it.  See `planners.chain.joint`.
    segments : int, optional
        For `periodic`: how many; the fastest number that fits, if None.
    resolution : int
        Parts that the dynamic program divides memory in, at least 16.
    threads : int, optional
        For the dynamic program of a long chain.
    progress : bool or None
        Show a bar while it is solved; None: on a terminal or in a notebook.

    Raises
    ------
    BudgetError
        If no schedule of this planner fits; the message names the smallest
        limit that works.
    ArgumentError
        For arguments out of range.

    Examples
    --------
    >>> from multistage.model.stages import Stage
    >>> costs = StageCosts.uniform(12, Stage("layer", 1.0, 2.0, 10, 30), 10)
    >>> plan = plan_chain(costs, 0.5)
    >>> plan.peak_bytes <= plan.memory_bytes, plan.makespan_s / plan.plain_s < 1.3
    (True, True)
    """
    _require_chain(costs)
    _require_known(planner)
    resolution = whole_number(resolution, "resolution", 16, _MOST_SLOTS)
    segments = _segments_for(planner, segments)
    if threads is not None:
        threads = whole_number(threads, "threads", 0, _MOST_THREADS)
    rates = _tier_for(planner, tiers)
    plain = plain_use(costs)
    limit = memory_bytes(memory, lambda: plain.peak_bytes)
    fits = limit is None or plain.peak_bytes <= limit

    def made(actions: Sequence[Action], tier: Tier | None = None) -> ChainPlan:
        return ChainPlan.judged(planner, costs, limit, actions, tier)

    if planner == "store-all" or (planner == "optimal" and fits):
        if not fits:
            raise too_small(planner, limit, plain.peak_bytes)
        return _beside_tier(made(store_all(costs)), rates)
    if planner == "periodic":
        return made(periodic(costs, limit, segments))
    tapes = planner == "optimal"
    true = Sizes.of(costs)
    least, trace = smallest(true, tapes=tapes)
    fewest = least if rates is None else min(least, smallest_with_tier(true, rates))
    if limit is not None and limit < fewest + costs.input_bytes:
        raise too_small(planner, limit, fewest + costs.input_bytes)
    # Revolve has all its states and one tape at most.
    whole = plain.peak_bytes if tapes else _all_states(true)
    within = (whole if limit is None else min(limit, whole)) - costs.input_bytes
    ladder = Ladder(true, whole, resolution, tapes, threads or default_threads())
    # Before the ladder, which frees the first rung's table.
    away = () if rates is None else plan_joint(true, *ladder.first(within), within, rates)
    rivals: list[ChainPlan | None] = [None]  # without the tier, joint, every tape to the tier
    if within >= least:
        rivals[0] = made(list(actions_of(ladder.best(within, trace, progress), len(true))))
    rivals += [None if actions is None else made(actions, rates) for actions in away]
    best = _fastest(rivals)  # every state in the tier fits, where nothing else does
    if rates is None:
        return best
    no_tier_s, _, offload_s = (None if plan is None else plan.makespan_s for plan in rivals)
    if len(costs.stages) <= MAX_STAGES:
        actions = search_short(true, within, rates, best.makespan_s)
        best = best if actions is None else _fastest([best, made(actions, rates)])
    return replace(best, tier=rates, no_tier_s=no_tier_s, offload_s=offload_s)


def _fastest(plans: Iterable[ChainPlan | None]) -> ChainPlan:
    """Return the fastest plan, of those as fast the first."""
    return min((plan for plan in plans if plan is not None), key=lambda plan: plan.makespan_s)


def _segments_for(planner: str, segments: int | None) -> int | None:
    if segments is None:
        return None
    segments = whole_number(segments, "segments", 1)
    if planner != "periodic":
        raise ArgumentError("segments, at least 1, goes with planner 'periodic'")
    return segments


def _tier_for(planner: str, tiers: Tier | str | Sequence[Tier | str] | None) -> Tier | None:
    rates = _first_tier(tiers)
    if rates is not None and planner != "optimal":
        raise ArgumentError(f"tiers go with planner 'optimal', not {planner!r}")
    return rates


def _first_tier(tiers: Tier | str | Sequence[Tier | str] | None) -> Tier | None:
    if tiers is None or isinstance(tiers, Tier | str):
        return None if tiers is None else Tier.parse(tiers).in_bytes()
    if not isinstance(tiers, Sequence) or not tiers:
        raise ArgumentError(
            f"tiers={shown(tiers)} must be a Tier, a text such as 'write=2GB/s,read=1GB/s', "
            "or a sequence of them, the fastest first"
        )
    return Tier.parse(tiers[0]).in_bytes()


def _beside_tier(plan: ChainPlan, rates: Tier | None) -> ChainPlan:
    """Return a plan that keeps every tape, which no tier makes faster."""
    if rates is None:
        return plan
    return replace(plan, tier=rates, no_tier_s=plan.makespan_s, offload_s=plan.makespan_s)


def smallest_memory(costs: StageCosts, planner: Literal["optimal", "revolve"] = "optimal") -> int:
    """Return the smallest limit, in bytes, within which the chain can be reversed.

    Examples
    --------
    >>> from multistage.model.stages import Stage
    >>> smallest_memory(StageCosts.uniform(4, Stage("layer", 1.0, 2.0, 10, 30), 10))
    70
    """
    _require_chain(costs)
    _require_either(planner)
    least, _ = smallest(Sizes.of(costs), tapes=planner == "optimal")
    return least + costs.input_bytes


def _require_chain(costs: StageCosts) -> None:
    if not isinstance(costs, StageCosts):
        raise ArgumentError(
            f"costs={shown(costs)} must be multistage.StageCosts; for uniform steps there is plan"
        )


def _require_known(planner: str) -> None:
    if not isinstance(planner, str) or planner not in CHAIN_PLANNERS:
        raise ArgumentError(
            f"planner {shown(planner)} is not known; choose one of {CHAIN_PLANNERS}"
        )


def _require_either(planner: str) -> None:
    if not isinstance(planner, str) or planner not in ("optimal", "revolve"):
        raise ArgumentError(f"planner {shown(planner)} must be 'optimal' or 'revolve'")


def memory_curve(
    costs: StageCosts,
    planner: Literal["optimal", "revolve"] = "optimal",
    *,
    resolution: int = SLOTS,
    threads: int | None = None,
) -> list[tuple[int, float]]:
    """Return the time-memory trade-off: (peak bytes, seconds), memory ascending, time falling.

    All points come from one table, whose slots divide what plain training
    takes, and from the schedule of the smallest memory.

    Examples
    --------
    >>> from multistage.model.stages import Stage
    >>> curve = memory_curve(StageCosts.uniform(4, Stage("layer", 1.0, 2.0, 10, 30), 10))
    >>> curve[0][0], curve[-1]
    (70, (150, 12.0))
    """
    _require_chain(costs)
    _require_either(planner)
    resolution = whole_number(resolution, "resolution", 16, _MOST_SLOTS)
    if threads is not None:
        threads = whole_number(threads, "threads", 0, _MOST_THREADS)
    true = Sizes.of(costs)
    plain = plain_use(costs)
    _, trace = smallest(true, tapes=planner == "optimal")
    seconds, peak = judge(true, trace)
    points = [(peak + costs.input_bytes, seconds)]
    if planner == "optimal":
        points.append((plain.peak_bytes, plain.makespan_s))
    unit = max(1.0, plain.peak_bytes - costs.input_bytes) / resolution
    table = Table(
        true.in_slots(unit),
        int(resolution * MORE),
        tapes=planner == "optimal",
        threads=threads or default_threads(),
    )
    for seconds_there, peak_there in zip(*table.curve(true), strict=True):
        if math.isfinite(seconds_there):
            points.append((int(peak_there) + costs.input_bytes, float(seconds_there)))
    curve: list[tuple[int, float]] = []
    for peak, seconds in sorted(points):
        if not curve or seconds < curve[-1][1]:
            curve.append((peak, seconds))
    return curve


def _all_states(true: Sizes) -> int:
    """Return what Revolve takes with every state in memory, or more."""
    one = max(
        int(true.tape[i] + true.gradient[i] + true.gradient[i + 1])
        + max(int(true.advance[i]), int(true.taping[i]), int(true.reverse[i]))
        for i in range(len(true))
    )
    return one + sum(int(x) for x in true.state)
