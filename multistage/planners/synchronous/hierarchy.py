"""H-Revolve and Disk-Revolve: the optimum where transfers stop the computing.

Herrmann & Pallez 2020, ACM TOMS 46(2), doi:10.1145/3378672, for any number of
tiers with their own capacity, write and read costs; Aupy, Herrmann, Hovland &
Robert 2016, doi:10.1137/15M1019222, is the case of one tier without bound.
The dynamic program and the schedule are in `levels`.

A state on its way to or from a tier takes a fast slot.  At every transfer of
these schedules all fast slots are free, so that none need be kept for it.

Optimal among the schedules that wait for each transfer where some order of the
tiers is that of both their write and their read costs; else the best of a few
orders.  With tiers that do overlap, `streaming` is faster.  About n^2 / 2 sums
per tier without bound and at most c n^2 / 2 with c states; a choice costs O(n)
again in the schedule.  Known gaps: `action_s` does not enter the choice, and
tapes are made right before their adjoint only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ... import native
from ...actions import Advance, Free, Get, Put, Save, Schedule, Tape, drive
from ...model.costs import Costs
from ...model.tier import Tier
from ..base import Plan, require_steps
from ..predict import Counts, counted_plan, transfer_s
from ..single.revolve import plain_revolve
from .levels import PLAIN_PER_S, PLANNING_S, PRUNED_PER_S, Level, solve, solving_s


def count_actions(schedule: Schedule, tiers: int) -> Counts:
    """Count what a schedule over some tiers does when nothing is lost, action by action."""
    counts, writes, reads, used = Counts(0), [0] * tiers, [0] * tiers, 0
    for action, send in drive(schedule):
        match action:
            case Advance(start, stop):
                counts.forward_steps += stop - start
            case Tape():
                counts.forward_steps += 1
            case Save():
                used += 1
            case Free():
                used -= 1
            case Put(_, tier):
                writes[tier] += 1
                counts.peak_slots = max(counts.peak_slots, used + 1)
                send(0)
            case Get(_, tier):
                reads[tier] += 1
                used += 1
                send(0)
        counts.peak_slots = max(counts.peak_slots, used)
    counts.writes, counts.reads = writes, reads
    return counts


def _orders(tiers: tuple[Tier, ...]) -> list[tuple[int, ...]]:
    """Return the orders of tiers worth solving: as given, and by what transfers cost."""
    keys: list[Callable[[int], float]] = [
        lambda k: k,
        lambda k: sum(transfer_s(tiers[k])),
        lambda k: transfer_s(tiers[k])[0],
        lambda k: transfer_s(tiers[k])[1],
    ]
    return list(dict.fromkeys(tuple(sorted(range(len(tiers)), key=key)) for key in keys))


def _levels(tiers: tuple[Tier, ...], order: tuple[int, ...], slots: int) -> tuple[Level, ...]:
    slow = (Level(tiers[k].capacity_states, *transfer_s(tiers[k])) for k in order)
    return (Level(slots), *slow)


def _over_tiers(
    planner: str, costs: Costs, tiers: tuple[Tier, ...], slots: int, n_steps: int, note: str
) -> Plan:
    first, *others = _orders(tiers)
    # What another order would take longer for than a planner may is not worth it.
    each_s = solving_s(_levels(tiers, first, slots), n_steps)
    others = others[: int(PLANNING_S / max(each_s, 1e-9))]
    solved = [
        (
            solve(_levels(tiers, order, slots), n_steps, costs.forward_step_s, most_s=PLANNING_S),
            order,
        )
        for order in (first, *others)
    ]
    hierarchy, order = min(solved, key=lambda pair: pair[0].seconds)
    counts = count_actions(hierarchy.schedule(order), len(tiers))
    used = {
        f"writes to {tier.name}": count for tier, count in zip(tiers, counts.writes, strict=True)
    }
    return counted_plan(
        planner,
        costs,
        slots,
        n_steps,
        partial(hierarchy.schedule, order),
        counts,
        note=note,
        parameters=used,
    )


# What "auto" spends on it at most: seconds for the tables, steps for the walk.
_CHEAP_S, _CHEAP_STEPS = 0.1, 10_000


def worth_ranking(costs: Costs, slots: int, n_steps: int) -> bool:
    """Whether `h-revolve` over several tiers is solved in a fraction of a second."""
    if len(costs.tiers) < 2 or n_steps > _CHEAP_STEPS:
        return False
    orders = _orders(costs.tiers)
    share = PLAIN_PER_S / PRUNED_PER_S if native.LIBRARY is None else 1.0
    levels = _levels(costs.tiers, orders[0], slots)
    return len(orders) * solving_s(levels, n_steps) <= _CHEAP_S * share


def h_revolve(costs: Costs, slots: int, n_steps: int | None) -> Plan:
    """Return the optimal plan that waits for every transfer, over all tiers of `costs`.

    Raises
    ------
    ArgumentError
        Where solving would take more than about a second.

    Examples
    --------
    >>> tiers = (Tier("host", 2.0, 2.0, capacity_states=4), Tier("file", 9.0, 9.0))
    >>> plan = h_revolve(Costs(1.0, 2.0, tiers=tiers), slots=3, n_steps=200)
    >>> plan.makespan_s, dict(plan.parameters)
    (1101.0, {'writes to host': 22, 'writes to file': 3})
    """
    n = require_steps(n_steps, "h-revolve")
    if not costs.tiers:
        return plain_revolve("h-revolve", costs, slots, n, "There is no slow tier")
    note = "Each state goes to the tier where it costs least; every transfer is waited for."
    return _over_tiers("h-revolve", costs, costs.tiers, slots, n, note)


def disk_revolve(costs: Costs, slots: int, n_steps: int | None) -> Plan:
    """Return the optimal plan that waits for every transfer to and from the first tier.

    Disk-Revolve knows no bound of the disk; where the tier has one, this is
    H-Revolve over that tier.

    Raises
    ------
    ArgumentError
        Where solving would take more than about a second.

    Examples
    --------
    >>> costs = Costs(1.0, 2.0, tiers=(Tier("file", 5.0, 5.0),))
    >>> disk_revolve(costs, slots=3, n_steps=100).makespan_s
    526.0
    """
    n = require_steps(n_steps, "disk-revolve")
    if costs.tier is None:
        return plain_revolve("disk-revolve", costs, slots, n, "There is no slow tier")
    note = f"States go to {costs.tier.name} where that costs least; every transfer is waited for."
    return _over_tiers("disk-revolve", costs, costs.tiers[:1], slots, n, note)
