"""What revolvers are planned by: pyrevolve's schedules, transfers beside steps."""

from __future__ import annotations

from dataclasses import replace

from ...actions import Advance, Drop, Free, Get, Load, Put, Save, Schedule, waited
from ...model.costs import Costs
from ...planners import UniformPlan
from ...planners.bound import lower_bound
from ...planners.single.binomial import beta, forward_and_reverse, nu, reverse_actions
from ...planners.single.revolve import revolve
from ...planners.streaming.overlap import on_tier, overlap
from ...planners.synchronous.levels import (
    ADVANCE,
    DROP,
    ORIGIN,
    READ,
    REVERSE,
    WRITE,
    Hierarchy,
    Level,
    solve,
)
from ...planners.uniform import require_steps


def adjust(timesteps: int) -> int:
    """Return a number of snapshots that keeps memory and recomputation both logarithmic.

    About as many snapshots as runs of a step: the least such pair that
    reaches `timesteps`.

    Examples
    --------
    >>> adjust(20), adjust(21), adjust(1000)
    (3, 4, 7)
    """
    n = require_steps(timesteps, "revolve")
    snapshots = repeats = 1
    while beta(snapshots, repeats) < n:
        snapshots, repeats = snapshots + 1, repeats + 1
    while True:
        fewer = (snapshots - 1, repeats) if snapshots > repeats else (snapshots, repeats - 1)
        if min(fewer) < 1 or beta(*fewer) < n:
            return snapshots
        snapshots, repeats = fewer


def revolve_on_disk(
    n_checkpoints: int, costs: Costs, slots: int, n_steps: int | None
) -> UniformPlan:
    """Plan Revolve with its checkpoints on the tier, transfers beside the steps."""
    n = require_steps(n_steps, "revolve")

    def make() -> Schedule:
        plain = forward_and_reverse(reverse_actions(0, n, n_checkpoints))
        return overlap(on_tier(plain), slots, tape_slots=costs.tape_slots)

    plain = revolve(costs, n_checkpoints, n)
    return replace(
        plain,
        planner="revolve on disk",
        slots=slots,
        make=make,
        lower_bound_s=lower_bound(costs, slots, n),
        peak_slots=min(slots, n),
        note="Revolve with all checkpoints on disk; transfers are taken to hide behind steps.",
    )


def h_revolve_on_storages(
    levels: tuple[Level, ...], fast: bool, uf: float, costs: Costs, slots: int, n_steps: int | None
) -> UniformPlan:
    """UniformPlan H-Revolve over storages, level 0 in fast memory or on the first tier."""
    n = require_steps(n_steps, "h-revolve")
    solved = solve(levels, n, uf)
    capacity = levels[0].capacity or 1

    def make() -> Schedule:
        schedule = on_storages(solved, capacity, first_tier=1 if fast else 0)
        return overlap(schedule if fast else on_tier(schedule), slots, tape_slots=costs.tape_slots)

    steps = 0
    for code, a, b in solved.operations():
        if code == REVERSE:
            steps += nu(b - a, capacity)
        elif code == ADVANCE:
            steps += b - a
    # What is not steps are transfers, in units of uf.
    transfers_s = (solved.seconds / uf - steps) * costs.forward_step_s
    return UniformPlan(
        planner="h-revolve",
        n_steps=n,
        slots=slots,
        costs=costs,
        make=make,
        makespan_s=steps * costs.forward_step_s + transfers_s + n * costs.turn_s,
        lower_bound_s=n * (costs.forward_step_s + costs.turn_s),
        forward_steps=steps + 1,
        peak_slots=min(slots, n),
        note="H-Revolve over the storages, by their wd and rd; no transfer is taken to hide.",
    )


def on_storages(solved: Hierarchy, capacity: int, first_tier: int) -> Schedule:
    """Yield a hierarchy's actions: level 0 in slots, level k on tier k - `first_tier`."""
    operations = solved.operations()
    answer: bool | None = None
    ended = False
    while True:
        try:
            code, a, b = operations.send(answer)
        except StopIteration:
            return
        answer, tier = None, a - first_tier
        if code == REVERSE:
            piece = reverse_actions(a, b, capacity)
            yield from piece if ended else forward_and_reverse(piece)
            ended = True
        elif code == ADVANCE:
            yield Advance(a, b)
        elif code == ORIGIN:
            yield Load(0)
        elif code == WRITE:
            if a == 0:
                yield Save(b)
            else:
                yield from waited(Put(b, tier))
        elif code == READ:
            if a:
                yield from waited(Get(b, tier))
            yield Load(b)
            if a:
                yield Free(b)
        else:
            assert code == DROP
            yield Drop(b, tier) if a else Free(b)
