"""The paper's rule: every I-th state goes to the slow tier, Revolve inside.

Kukreja, Hueckelheim & Gorman 2018, "Backpropagation for long sequences:
beyond memory constraints with constant overheads", arXiv:1806.01117.
I = ceil(T_W / T_A); every interval is read back and reversed, by keeping all
its states where they fit, else by Revolve.  Where not even one interval lies
before the end, plain Revolve is the fallback.

The paper prints T = n R(I, s) T_A + n T_B, which leaves out the forward
sweep.  Correct is T = n T_A (1 + nu(I, s) / I) + n T_B, so that its promise
never to be slower than Revolve holds only for long sequences; see
`printed_factor` and `corrected_factor`.  Not optimal in general.
"""

from __future__ import annotations

import math
from functools import partial

from ..actions import (
    Advance,
    Await,
    Drop,
    EndForward,
    Free,
    Get,
    Load,
    Put,
    Reverse,
    Save,
    Schedule,
    Tape,
)
from ..costs import Costs
from .base import Plan, require_steps
from .binomial import nu, reverse_actions
from .bound import lower_bound
from .predict import predict
from .revolve import revolve


def printed_factor(interval: int, slots: int) -> float:
    """Return the recompute factor R(I, s) as the paper draws it, without the forward sweep.

    Examples
    --------
    >>> round(printed_factor(1024, 100), 3)
    1.901
    """
    return (nu(interval, slots) + 1) / interval


def corrected_factor(interval: int, slots: int) -> float:
    """Return forward steps run / n in the steady state, the forward sweep included.

    Examples
    --------
    >>> corrected_factor(8, 100)
    1.875
    """
    return 1 + nu(interval, slots) / interval


def interval_schedule(interval: int, slots: int, queue: int, n_steps: int) -> Schedule:
    """Yield the paper's schedule: two phases over intervals of fixed length.

    One slot lands the checkpoint of the interval at work, one the next; the
    others serve inside the interval.  With a single slot nothing is read ahead.
    A checkpoint that is lost is computed again from state 0.
    """
    starts = range(0, n_steps, interval)
    writes: list[tuple[int, int]] = []
    lost: set[int] = set()

    def settle() -> Schedule:
        """Await the oldest write."""
        start, token = writes.pop(0)
        if (yield Await(token)) is False:
            lost.add(start)

    for start in starts:
        if len(writes) == min(slots, queue):
            yield from settle()
        token = yield Put(start)
        assert token is not None
        writes.append((start, int(token)))
        stop = min(start + interval, n_steps)
        if stop < n_steps:
            yield Advance(start, stop)
        elif stop - start > 1:
            yield Advance(start, n_steps - 1)
    yield Tape(n_steps - 1)
    yield EndForward()
    yield Reverse(n_steps - 1)
    while writes:
        yield from settle()
    ahead: dict[int, int] = {}
    lost_above = n_steps - 1
    for start in reversed(starts):
        stop, lost_above = lost_above, start
        if start == stop:
            if start not in lost:
                yield Drop(start)
            continue
        if start not in ahead and start not in lost:
            token = yield Get(start)
            assert token is not None
            ahead[start] = int(token)
        if start not in lost and (yield Await(ahead.pop(start))) is False:
            lost.add(start)
        if start in lost:
            yield Load(0)
            if start > 0:
                yield Advance(0, start)
            yield Save(start)
        else:
            yield Drop(start)
            yield Load(start)
        free = slots - 1
        if start > 0 and start - interval not in lost and free > 0:
            token = yield Get(start - interval)
            assert token is not None
            ahead[start - interval] = int(token)
            free -= 1
        yield from reverse_actions(start, stop, free, keep_first=True)
        yield Free(start)


def interval(costs: Costs, slots: int, n_steps: int | None) -> Plan:
    """Return the plan of the paper, or Revolve's where it does not apply."""
    n = require_steps(n_steps, "interval")
    tier = costs.tier
    length = max(1, math.ceil(costs.rho - 1e-9)) if tier else n
    full = tier is not None and tier.capacity_states is not None
    if tier is None or length >= n or (full and -(-n // length) > (tier.capacity_states or 0)):
        fallback = revolve(costs, slots, n)
        return Plan(
            planner="interval",
            n_steps=n,
            slots=slots,
            costs=costs,
            make=fallback.make,
            makespan_s=fallback.makespan_s,
            lower_bound_s=fallback.lower_bound_s,
            forward_steps=fallback.forward_steps,
            peak_slots=fallback.peak_slots,
            note="No state reaches the slow tier in time or all of them would not fit: Revolve.",
        )
    make = partial(interval_schedule, length, slots, tier.queue_depth)
    predicted = predict(make, costs, slots, n, period=length)
    return Plan(
        planner="interval",
        n_steps=n,
        slots=slots,
        costs=costs,
        make=partial(make, n),
        makespan_s=predicted.makespan_s,
        lower_bound_s=lower_bound(costs, slots, n),
        forward_steps=predicted.forward_steps,
        peak_slots=predicted.peak_slots,
        writes=predicted.writes,
        reads=predicted.reads,
        stall_s=predicted.stall_s,
        parameters={"interval": length},
        note=f"State k * {length} is written; each interval is read back and reversed.",
    )
