"""H-Revolve and Disk-Revolve: the optimum where transfers stop the computing.

Herrmann & Pallez 2020, ACM TOMS 46(2), doi:10.1145/3378672, for any number of
tiers with their own capacity, write and read costs; Aupy, Herrmann, Hovland &
Robert 2016, doi:10.1137/15M1019222, is the case of one tier without bound.
The dynamic program is in `levels`; here its operations become actions.

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
from ...actions import Advance, Drop, Free, Get, Load, Put, Schedule, waited
from ...model.costs import Costs
from ...model.tier import Tier
from ..base import Plan, require_steps
from ..predict import Counts, counted_plan, transfer_s
from ..single.binomial import forward_and_reverse, nu, reverse_actions
from ..single.revolve import plain_revolve
from .levels import (
    ADVANCE,
    DROP,
    ORIGIN,
    PLAIN_PER_S,
    PLANNING_S,
    PRUNED_PER_S,
    READ,
    REVERSE,
    WRITE,
    Hierarchy,
    Level,
    solve,
    solving_s,
)


def hierarchy_schedule(hierarchy: Hierarchy, slots: int, tiers: tuple[int, ...]) -> Schedule:
    """Yield the actions of a solved hierarchy: level 0 the fast slots, level k tier `tiers[k-1]`.

    O(slots + stored states) memory.  A checkpoint that is lost lets its
    interval merge with the one before; where all are lost, state 0 serves.
    """
    operations = hierarchy.operations()
    answer: bool | None = None
    landed: int | None = None  # the state that a slot still holds from its read
    ended = False
    while True:
        try:
            code, a, b = operations.send(answer)
        except StopIteration:
            return
        answer = None
        if landed is not None and code != DROP and not (code == REVERSE and b - a > 1):
            yield Free(landed)
            landed = None
        if code == REVERSE:
            held = landed is not None
            piece = reverse_actions(a, b, slots - held, keep_first=held)
            yield from (piece if ended else forward_and_reverse(piece))
            ended = True
            if held:
                yield Free(a)
                landed = None
        elif code == ADVANCE:
            yield Advance(a, b)
        elif code == DROP:
            yield Drop(b, tiers[a - 1])
        elif code == ORIGIN:
            yield Load(0)
        elif code == WRITE:
            answer = yield from waited(Put(b, tiers[a - 1]))
        else:
            answer = yield from waited(Get(b, tiers[a - 1]))
            if answer:
                yield Load(b)
                landed = b


def count_operations(hierarchy: Hierarchy, slots: int, tiers: tuple[int, ...]) -> Counts:
    """Count what the schedule does when nothing is lost, piece by piece."""
    counts, writes, reads = Counts(), [0] * len(tiers), [0] * len(tiers)
    for code, a, b in hierarchy.operations():
        if code == REVERSE:
            counts.forward_steps += nu(b - a, slots)
            counts.peak_slots = max(counts.peak_slots, min(slots, b - a - 1))
        elif code == ADVANCE:
            counts.forward_steps += b - a
        elif code in (WRITE, READ):
            (writes if code == WRITE else reads)[tiers[a - 1]] += 1
            counts.peak_slots = max(counts.peak_slots, 1)
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
    counts = count_operations(hierarchy, slots, order)
    used = {
        f"writes to {tier.name}": count for tier, count in zip(tiers, counts.writes, strict=True)
    }
    return counted_plan(
        planner,
        costs,
        slots,
        n_steps,
        partial(hierarchy_schedule, hierarchy, slots, order),
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
