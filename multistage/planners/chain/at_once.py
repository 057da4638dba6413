"""Chains of stages that are planned as a whole: by tables whose memory is known beforehand.

`planners.chain.heterogeneous` tells the algorithms, and plans longer chains in pieces.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace

from ...actions import Action
from ...model.stages import StageCosts
from ...model.tier import Tier
from .joint import plan_joint, smallest_with_tier
from .ladder import MORE, Ladder
from .memory import actions_of, plain_use, store_all
from .periodic import periodic, too_small
from .plan import ChainPlan, ChainPlanner
from .sizes import Sizes
from .smallest import smallest
from .table import default_threads

SLOTS = 500
# Of a table: one of some 1000 stages and `SLOTS` slots, which takes some 10 s to solve.
_TABLE_BYTES = 5 << 28


def table_bytes(stages: int, resolution: int) -> int:
    """Return about the bytes of a chain's table."""
    return (stages + 1) * (stages + 2) // 2 * int(4 * MORE * resolution)


def most_stages(resolution: int = SLOTS) -> int:
    """Return the stages of the longest chain that is planned as a whole.

    Examples
    --------
    >>> most_stages()
    1078
    """
    return max(1, int(math.sqrt(2 * _TABLE_BYTES / (4 * MORE * resolution))) - 2)


def plan_at_once(
    costs: StageCosts,
    limit: int | None,
    planner: ChainPlanner = "optimal",
    rates: Tier | None = None,
    *,
    segments: int | None = None,
    resolution: int = SLOTS,
    threads: int | None = None,
    progress: bool | None = False,
) -> ChainPlan:
    """Return the plan of a chain within a limit in bytes; see `plan_chain`."""
    plain = plain_use(costs)
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
    best = fastest(rivals)  # every state in the tier fits, where nothing else does
    if rates is None:
        return best
    no_tier_s, _, offload_s = (None if plan is None else plan.makespan_s for plan in rivals)
    return replace(best, tier=rates, no_tier_s=no_tier_s, offload_s=offload_s)


def fastest(plans: Iterable[ChainPlan | None]) -> ChainPlan:
    """Return the fastest plan, of those as fast the first."""
    return min((plan for plan in plans if plan is not None), key=lambda plan: plan.makespan_s)


def least_memory(costs: StageCosts, planner: ChainPlanner = "optimal") -> int:
    """Return the smallest limit, in bytes, within which the chain can be reversed."""
    least, _ = smallest(Sizes.of(costs), tapes=planner == "optimal")
    return least + costs.input_bytes


def _beside_tier(plan: ChainPlan, rates: Tier | None) -> ChainPlan:
    """Return a plan that keeps every tape, which no tier makes faster."""
    if rates is None:
        return plan
    return replace(plan, tier=rates, no_tier_s=plan.makespan_s, offload_s=plan.makespan_s)


def _all_states(true: Sizes) -> int:
    """Return what Revolve takes with every state in memory, or more."""
    one = max(
        int(true.tape[i] + true.gradient[i] + true.gradient[i + 1])
        + max(int(true.advance[i]), int(true.taping[i]), int(true.reverse[i]))
        for i in range(len(true))
    )
    return one + sum(int(x) for x in true.state)
