"""Periodic disk: every p-th state goes to the tier, each is read once, Revolve between them.

Aupy & Herrmann 2017, "Periodicity in optimal hierarchical checkpointing
schemes for adjoint computations", Optim. Methods Softw. 32(3) 594-624,
doi:10.1080/10556788.2016.1230612: asymptotically a period that depends on the
costs alone is optimal.  With k periods of p steps before a last piece that is
reversed from the fast slots at once,

    T = k (p T_A + w + nu(p, s) T_A + r) + nu(n - k p, s) T_A + turns.

The paper takes beta(s, t), t minimal with beta(s+1, t) > (w + r) / T_A, as the
period and the remainder as the last piece.  Here p and k are the best for the
n at hand: T is convex in k, so that each p costs O(log n).  Optimal among the
schedules of this form for n <= 65 536; above, among periods up to twice the
paper's.  No table: O(n) work at most, and none that grows beyond that n.
"""

from __future__ import annotations

from functools import partial
from math import inf

import numpy as np

from ...actions import Advance, Drop, Free, Get, Load, Put, Schedule, waited
from ...model.costs import Costs
from ..predict import Counts, Draft, counted, planner, transfer_s
from ..single.binomial import NuTable, beta, forward_and_reverse, nu, reverse_actions
from ..single.revolve import plain_revolve

_ALL_PERIODS = 1 << 16


def periodic_disk_schedule(period: int, count: int, slots: int, n_steps: int) -> Schedule:
    """Yield the schedule that stores states 0, p, ..., (count-1) p and waits for each.

    A checkpoint that is lost lets its period merge with the one before.
    """
    stored: list[int] = []
    for start in range(0, count * period, period):
        if (yield from waited(Put(start))):
            stored.append(start)
        yield Advance(start, start + period)
    end = count * period
    yield from forward_and_reverse(reverse_actions(end, n_steps, slots))
    while end:
        start = -1
        while stored and start < 0:
            if (yield from waited(Get(stored[-1]))):
                start = stored[-1]
                yield Drop(start)
            stored.pop()
        if start < 0:
            yield Load(0)
            yield from reverse_actions(0, end, slots)
            return
        yield Load(start)
        yield from reverse_actions(start, end, slots - 1, keep_first=True)
        yield Free(start)
        end = start


def asymptotic_period(slots: int, transfers_in_steps: float) -> int:
    """Return the paper's period for a write and a read that take so many steps together.

    Examples
    --------
    >>> asymptotic_period(3, 10.0)
    10
    """
    t = 0
    while beta(slots + 1, t) <= transfers_in_steps:
        t += 1
    return beta(slots, t)


def best_period(
    slots: int, n_steps: int, transfers_in_steps: float, capacity: int | None
) -> tuple[int, int]:
    """Return the period and the number of states stored that cost least; (0, 0) for none.

    Examples
    --------
    >>> best_period(3, 100, 10.0, None)
    (10, 8)
    """
    if n_steps == 1 or capacity == 0:
        return 0, 0
    longest = max(_ALL_PERIODS, 2 * asymptotic_period(slots, min(transfers_in_steps, n_steps)))
    longest = min(n_steps - 1, longest)
    periods = np.arange(1, min(longest, _ALL_PERIODS) + 1)
    if longest > _ALL_PERIODS:
        # Of longer ones as many as this lie so close that none in between is much better.
        more = np.geomspace(_ALL_PERIODS, longest, _ALL_PERIODS).astype(np.int64)
        periods = np.unique(np.concatenate((periods, more)))
    steps_of = NuTable(slots, n_steps)
    each = periods + transfers_in_steps + steps_of(periods)
    most = (n_steps - 1) // periods
    if capacity is not None:
        most = np.minimum(most, capacity)
    # The first count at which one more period saves the last piece less than it costs.
    low, high = np.zeros_like(periods), most.copy()
    while (open_ := low < high).any():
        middle = (low + high) // 2
        left = n_steps - middle * periods
        shorter = np.maximum(left - periods, 1)  # out of range where nothing is open
        pays = steps_of(left) - steps_of(shorter) > each
        low = np.where(open_ & pays, middle + 1, low)
        high = np.where(open_ & ~pays, middle, high)
    total = low * each + steps_of(n_steps - low * periods)
    best = int(total.argmin())
    return (int(periods[best]), int(low[best])) if low[best] else (0, 0)


@planner("periodic-disk")
def periodic_disk(costs: Costs, slots: int, n_steps: int) -> Draft:
    """Return the plan with the period and number of stored states that cost least.

    Examples
    --------
    >>> from multistage.model.tier import Tier
    >>> costs = Costs(1.0, 2.0, tiers=(Tier("file", 5.0, 5.0),))
    >>> plan = periodic_disk(costs, slots=3, n_steps=100)
    >>> plan.parameters["period"], plan.makespan_s
    (10, 526.0)
    """
    tier = costs.tier
    if tier is None:
        return plain_revolve(costs, slots, n_steps, "There is no slow tier")
    both = sum(transfer_s(tier)) / costs.forward_step_s
    period, count = best_period(
        slots, n_steps, both if both < inf else n_steps, tier.capacity_states
    )
    if count == 0:
        return plain_revolve(costs, slots, n_steps, "No period pays")
    last = n_steps - count * period
    counts = Counts(
        forward_steps=1 + count * (period + nu(period, slots)) + nu(last, slots),
        writes=[count],
        reads=[count],
        peak_slots=max(1, min(slots, max(last, period) - 1)),
    )
    return counted(
        costs,
        slots,
        n_steps,
        partial(periodic_disk_schedule, period, count, slots, n_steps),
        counts,
        f"State k * {period} is written {count} times and read once; Revolve between them.",
        {"period": period, "stored": count},
    )
