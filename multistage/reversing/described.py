"""Plans of unequal steps as executors, reports and readers take them."""

from __future__ import annotations

import math
from dataclasses import replace

from ..planners.chain.heterogeneous import ChainPlan
from ..planners.uniform import UniformPlan
from ..schedule.rules import check


def described(chain: ChainPlan) -> UniformPlan:
    """Return a plan of unequal steps as a `UniformPlan`, its costs the means over the steps."""
    n, means = chain.n_steps, chain.costs.mean(chain.tiers)
    state_bytes = means.state_bytes
    used = check(chain.schedule(), n, 4 * n + 8, state_is_tape=True)
    plan = UniformPlan(
        planner=f"unequal, {chain.planner}",
        n_steps=n,
        slots=math.ceil(used.peak_slots) + 1,
        costs=means,
        make=chain.schedule,
        makespan_s=chain.makespan_s,
        lower_bound_s=chain.plain_s,
        forward_steps=used.forward_steps,
        peak_slots=chain.peak_bytes / state_bytes,
        writes=chain.writes,
        reads=chain.reads,
        note=f"{chain.summary()}; step times and sizes shown are means over the steps",
    )
    return replace(plan, seal=plan._vouched())
