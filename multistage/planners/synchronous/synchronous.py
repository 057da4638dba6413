"""What planners for synchronous hierarchies share: their price, their bound, their UniformPlan.

In a synchronous hierarchy a transfer stops the computing thread: a write is
`Put` and `Await`, a read `Get` and `Await`.  Each costs `write_s` or `read_s`
and the thread's own overhead, and nothing hides behind anything, so that the
price of a schedule is a sum.  Simulated, it comes out the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from ...actions import Action, Schedule
from ...model.costs import Costs
from ...model.tier import Tier
from ...schedule.simulation import simulate
from ..bound import lower_bound
from ..predict import SIMULATED_STEPS
from ..single.binomial import forward_and_reverse
from ..single.revolve import ACTIONS_PER_STEP, revolve
from ..uniform import UniformPlan


@dataclass(slots=True)
class Counts:
    """What a synchronous schedule does.

    Attributes
    ----------
    forward_steps : int
        Steps run by `Advance` and `Tape`.
    taped_steps : int
        Those by `Tape`.
    writes, reads : list of int
        By tier.
    peak_slots : int
        Most fast slots taken.
    """

    forward_steps: int = 1
    taped_steps: int = 1
    writes: list[int] = field(default_factory=list)
    reads: list[int] = field(default_factory=list)
    peak_slots: float = 0


def transfer_s(tier: Tier) -> tuple[float, float]:
    """Return the seconds a write and a read stop the computing thread.

    Examples
    --------
    >>> transfer_s(Tier(write_s=4.0, read_s=3.0, write_overhead_s=1.0))
    (5.0, 3.0)
    """
    return tier.write_s + tier.write_overhead_s, tier.read_s + tier.read_overhead_s


def reversed_piece(actions: Iterator[Action], *, first: bool) -> Iterator[Action]:
    """Return the actions of one piece; the first one of a schedule ends its forward sweep."""
    return forward_and_reverse(actions) if first else actions


def synchronous_plan(
    planner: str,
    costs: Costs,
    slots: int,
    n_steps: int,
    make: Callable[[], Schedule],
    counts: Counts,
    *,
    note: str,
    parameters: Mapping[str, float | int | str],
) -> UniformPlan:
    """Return the plan of a schedule whose actions are counted.

    Exact; with `costs.action_s`, which not even the actions of a slot are
    free of, exact up to `SIMULATED_STEPS` steps and close above.
    """
    transfers = list(zip(costs.tiers, counts.writes, counts.reads, strict=False))
    turned = n_steps - counts.taped_steps
    makespan_s = (
        (counts.forward_steps - counts.taped_steps) * costs.forward_step_s
        + counts.taped_steps * (costs.taping_s + costs.reverse_step_s)
        + turned * costs.turn_s
    )
    stall_s = 0.0
    for tier, writes, reads in transfers:
        write_s, read_s = transfer_s(tier)
        makespan_s += writes * write_s + reads * read_s
        # The driver's own time for the `Await` passes while the transfer runs.
        stall_s += writes * max(0.0, tier.write_s - costs.action_s)
        stall_s += reads * max(0.0, tier.read_s - costs.action_s)
    writes, reads = sum(counts.writes), sum(counts.reads)
    if costs.action_s and n_steps <= SIMULATED_STEPS:
        makespan_s = simulate(make(), n_steps, costs, slots, checked=False).makespan_s
    elif costs.action_s:
        # Get, Await, Load, Free and Drop against the Save, Load and Free of a slot.
        makespan_s += (ACTIONS_PER_STEP * n_steps + 2 * (writes + reads)) * costs.action_s
    return UniformPlan(
        planner=planner,
        n_steps=n_steps,
        slots=slots,
        costs=costs,
        make=make,
        makespan_s=makespan_s,
        lower_bound_s=lower_bound(costs, slots, n_steps),
        forward_steps=counts.forward_steps,
        peak_slots=counts.peak_slots,
        writes=writes,
        reads=reads,
        stall_s=stall_s,
        parameters=dict(parameters),
        note=note,
    )


def without_tier(planner: str, costs: Costs, slots: int, n_steps: int, why: str) -> UniformPlan:
    """Return Revolve's plan under the name of a planner that finds nothing to add to it."""
    plain = revolve(costs, slots, n_steps)
    return replace(plain, planner=planner, note=f"{why}: plain Revolve from the fast slots.")
