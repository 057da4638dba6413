"""What planners of steps that are alike share.

Their drafts become plans by `planner`; what a schedule takes is counted, or extended from
shorter ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import wraps
from typing import NamedTuple, ParamSpec

from ..actions import Schedule
from ..errors import ArgumentError
from ..model.costs import Costs
from ..model.tier import Tier
from ..schedule.simulation import Simulation, simulate
from ..support.values import shown, whole
from .base import Plan, Planner, require_steps

P = ParamSpec("P")

# Steps that are simulated in full: some 20 000 actions, a tenth of a second.
SIMULATED_STEPS = 4096
# An advance, a load and a reverse per step, and a save and a free for most.
ACTIONS_PER_STEP = 4.5

# Among so many numbers of periods one is found that is nearly whole.
_PHASES = 1024


class Draft(NamedTuple):
    """What a planner of equal steps finds: a schedule, and what it is predicted to take."""

    make: Callable[[], Schedule]
    use: Simulation
    note: str
    parameters: Mapping[str, float | int | str] = {}

    def plan(self, planner: str, costs: Costs, slots: int, n_steps: int) -> Plan:
        """Return the plan of a planner for these costs, slots and steps."""
        use = self.use
        return Plan(
            planner=planner,
            costs=costs,
            n_steps=n_steps,
            memory_bytes=slots * costs.state_bytes,
            make=self.make,
            makespan_s=use.makespan_s,
            forward_steps=use.forward_steps,
            peak_bytes=round(use.peak_slots * costs.state_bytes),
            writes=use.writes,
            reads=use.reads,
            stall_s=use.stall_s,
            tiers=costs.tiers,
            note=self.note,
            parameters=dict(self.parameters),
        )


def planner(name: str) -> Callable[[Callable[[Costs, int, int], Draft | Plan]], Planner]:
    """Return what makes a planner of a function that finds drafts, or plans of other planners.

    Its arguments are checked, NumPy's integers made Python's; its plans have its name and are
    sealed.
    """

    def planning(found_by: Callable[[Costs, int, int], Draft | Plan]) -> Planner:
        @wraps(found_by)
        def made(costs: Costs, slots: int, n_steps: int | None) -> Plan:
            require_costs(costs)
            n, slots = require_steps(n_steps, name), whole(slots, "slots", 1)
            found = found_by(costs, slots, n)
            if isinstance(found, Plan):
                return replace(found, planner=name)
            return found.plan(name, costs, slots, n)

        return sealing(made)

    return planning


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


@dataclass(slots=True)
class Counts:
    """What a schedule does that waits for every transfer, or that has none.

    Attributes
    ----------
    forward_steps : int
        Steps run by `Advance` and `Tape`.
    taped_steps : int
        Those by `Tape`.
    writes, reads : sequence of int
        By tier.
    peak_slots : float
        Most fast slots taken.
    """

    forward_steps: int = 1
    taped_steps: int = 1
    writes: Sequence[int] = ()
    reads: Sequence[int] = ()
    peak_slots: float = 0

    def take(self, costs: Costs, n_steps: int, actions: float) -> Simulation:
        """Return what a schedule of so many steps and actions takes: a sum."""
        moved = list(zip(costs.tiers, self.writes, self.reads, strict=False))
        seconds = (self.forward_steps - self.taped_steps) * costs.forward_step_s
        seconds += self.taped_steps * (costs.taping_s + costs.reverse_step_s)
        seconds += (n_steps - self.taped_steps) * costs.turn_s + actions * costs.action_s
        stall_s = 0.0
        for tier, writes, reads in moved:
            write_s, read_s = transfer_s(tier)
            seconds += writes * write_s + reads * read_s
            # The driver's own time for the `Await` passes while the transfer runs.
            stall_s += writes * max(0.0, tier.write_s - costs.action_s)
            stall_s += reads * max(0.0, tier.read_s - costs.action_s)
        counts = sum(self.writes), sum(self.reads)
        return Simulation(seconds, self.forward_steps, stall_s, *counts, self.peak_slots)


def transfer_s(tier: Tier) -> tuple[float, float]:
    """Return the seconds a write and a read take that stop the computing thread.

    Examples
    --------
    >>> transfer_s(Tier(write_s=4.0, read_s=3.0, write_overhead_s=1.0))
    (5.0, 3.0)
    """
    return tier.write_s + tier.write_overhead_s, tier.read_s + tier.read_overhead_s


def with_actions(
    use: Simulation, make: Callable[[], Schedule], costs: Costs, slots: int, n_steps: int
) -> Simulation:
    """Return a prediction whose seconds are exact where the driver's actions take time.

    Up to `SIMULATED_STEPS` steps; more are predicted as they were.
    """
    if not costs.action_s or n_steps > SIMULATED_STEPS:
        return use
    run = simulate(make(), n_steps, costs, slots, checked=False)
    return replace(use, makespan_s=run.makespan_s, stall_s=run.stall_s)


def counted(
    costs: Costs,
    slots: int,
    n_steps: int,
    make: Callable[[], Schedule],
    counts: Counts,
    note: str,
    parameters: Mapping[str, float | int | str],
) -> Draft:
    """Return the draft of a schedule whose actions are counted.

    Exact; with `costs.action_s`, which not even the actions of a slot are
    free of, exact up to `SIMULATED_STEPS` steps and close above.
    """
    # Get, Await, Load, Free and Drop against the Save, Load and Free of a slot.
    actions = ACTIONS_PER_STEP * n_steps + 2 * (sum(counts.writes) + sum(counts.reads))
    use = with_actions(counts.take(costs, n_steps, actions), make, costs, slots, n_steps)
    return Draft(make, use, note, parameters)


def predict(
    run: Callable[[int], Simulation], n_steps: int, *, period: float, head: int = 0
) -> Simulation:
    """Return the figures of a schedule of `n_steps` steps.

    Up to `SIMULATED_STEPS` steps, or a dozen periods beyond `head`, the
    schedule itself is run.  A longer one is in its steady state: its
    figures grow by the same amount with every whole number of periods, so two
    shorter runs are extended.

    Parameters
    ----------
    run : callable
        Returns the figures of a number of steps, each a run in virtual time.
    period : float
        Steps after which the schedule repeats, in the mean.
    head : int
        Steps at the ends that are not periodic.
    """
    enough = max(SIMULATED_STEPS, head + int(12 * period))
    if n_steps <= enough:
        return run(n_steps)
    # A span that holds nearly a whole number of periods, so that both short
    # runs end in the same phase as the long one.
    most = max(4, int(enough / (3 * period)))
    tried = range(max(1, most // 2, most - _PHASES), most + 1)
    periods = min(tried, key=lambda k: (_phase(k * period), -k))
    span = max(1, round(periods * period))
    repeats = -(-(n_steps - enough) // span)
    long_steps = n_steps - repeats * span
    return extended(run(long_steps - span), run(long_steps), repeats)


def extended(short: Simulation, long: Simulation, repeats: float) -> Simulation:
    """Return what so many more of the differences between two runs come to."""

    def grown(name: str) -> float:
        a, b = getattr(long, name), getattr(short, name)
        return float(a + repeats * (a - b))

    return Simulation(
        grown("makespan_s"),
        int(grown("forward_steps")),
        max(0.0, grown("stall_s")),
        int(grown("writes")),
        int(grown("reads")),
        long.peak_slots,
    )


def _phase(length: float) -> float:
    return round(abs(length - round(length)), 6)
