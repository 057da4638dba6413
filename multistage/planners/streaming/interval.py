"""The paper's rule: every I-th state goes to the slow tier, Revolve inside.

Kukreja, Hueckelheim & Gorman 2018, "Backpropagation for long sequences:
beyond memory constraints with constant overheads", arXiv:1806.01117.
I = ceil(T_W / T_A); every interval is read back and reversed, by keeping all
its states where they fit, else by Revolve.  Where not even one interval lies
before the end, plain Revolve is the fallback.

The rule makes a plan slower where a tier gets faster: with quicker writes but
slow reads more states are read back, and nothing hides the reads (40 % slower
where T_W falls from 4 to 1 and T_R stays 20).  A longer interval is always
open to a faster tier, and so is Revolve: `interval` takes the best of them,
and so a slower tier is never faster.  `shortest_interval` is for callers who need
the tier used where that does not pay.

The paper prints T = n R(I, s) T_A + n T_B, which leaves out the forward
sweep.  Correct is T = n T_A (1 + nu(I, s) / I) + n T_B, so that its promise
never to be slower than Revolve holds only for long sequences.  Not optimal in general.

All intervals but the last are alike, so that the makespan is a closed form
(`_seconds`), exact where the driver's actions take no time.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial

import numpy as np

from ...actions import (
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
from ...model.costs import Costs
from ...schedule.simulation import Simulation
from ...support.arrays import Reals
from ..base import Plan
from ..predict import ACTIONS_PER_STEP, Draft, planner, with_actions
from ..single.binomial import NuTable, nu, reverse_actions
from ..single.revolve import plain_revolve


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


@planner("interval")
def interval(costs: Costs, slots: int, n_steps: int) -> Draft:
    """Return the best plan of the paper's form: I = ceil(rho), or longer, or Revolve.

    Examples
    --------
    >>> from multistage.model.tier import Tier
    >>> slow_reads = Costs(1.0, 1.0, tiers=(Tier(write_s=1.0, read_s=20.0),))
    >>> made = shortest_interval(slow_reads, 30, 1000)
    >>> made.makespan_s, interval(slow_reads, 30, 1000).makespan_s
    (20982.0, 2931.0)
    """
    why = "No interval pays, reaches the slow tier in time and fits there"
    plain = plain_revolve(costs, slots, n_steps, why)
    least = _least_length(costs, n_steps)
    if least >= n_steps:
        return plain
    lengths = _lengths(least, n_steps)
    seconds = _seconds(costs, slots, n_steps, lengths)
    made = _over(costs, slots, n_steps, int(lengths[seconds.argmin()]))
    if made.parameters["interval"] != least and costs.action_s:
        # With actions the closed form is an estimate: the shortest might be better.
        made = min(_over(costs, slots, n_steps, least), made, key=lambda each: each.use.makespan_s)
    return made if made.use.makespan_s <= plain.use.makespan_s else plain


def shortest_interval(costs: Costs, slots: int, n_steps: int) -> Plan | None:
    """Return the plan that writes the most the tier keeps up with, even where Revolve is faster.

    Where the tier keeps up with no interval, state 0 alone is written.  None for
    a single step, and where the tier has no room for a state.

    Examples
    --------
    >>> from multistage.model.tier import Tier
    >>> costs = Costs(1.0, 1.0, tiers=(Tier(write_s=4.0, read_s=4.0),))
    >>> interval(costs, 30, 20).writes, shortest_interval(costs, 30, 20).writes
    (0, 5)
    """
    tier = costs.tier
    if n_steps < 2 or tier is None or tier.capacity_states == 0:
        return None
    draft = _over(costs, slots, n_steps, min(n_steps, _least_length(costs, n_steps)))
    return draft.plan("interval", costs, slots, n_steps)


def _least_length(costs: Costs, n_steps: int) -> int:
    """Return the shortest interval that the tier keeps up with and has room for; n for none."""
    tier = costs.tier
    if tier is None or tier.capacity_states == 0 or costs.rho >= n_steps:
        return n_steps
    least = max(1, math.ceil(costs.rho - 1e-9))
    if tier.capacity_states is not None:
        least = max(least, -(-n_steps // tier.capacity_states))
    return least


def _lengths(least: int, n_steps: int) -> Reals:
    """Return the intervals tried: from `least` on, those that a slower tier would try, too."""
    longer = [_EVERY_LENGTH]
    while longer[-1] < n_steps:
        longer.append(longer[-1] + -(-longer[-1] // 64))
    lengths = np.array([*range(1, _EVERY_LENGTH), *longer], dtype=np.int64)
    lengths = lengths[(lengths > least) & (lengths < n_steps)]
    return np.concatenate(([least], lengths))


# Up to this length every interval is tried, beyond one in 64.
_EVERY_LENGTH = 1 << 12


def _seconds(costs: Costs, slots: int, n: int, lengths: Reals) -> Reals:
    """Return the makespan with each of some lengths, all at least rho."""
    tier = costs.tier
    assert tier is not None
    step_s, turn_s, action_s = costs.forward_step_s, costs.turn_s, costs.action_s
    read_s = tier.read_s
    starts = -(-n // lengths)
    above = n - 1 - (starts - 1) * lengths  # steps of the last interval, but for the last one
    ahead = slots >= 2
    steps_of = NuTable(slots, n)
    steps_beside = NuTable(slots - 1, n) if ahead else steps_of

    def reversing_s(length: Reals, beside: bool) -> Reals:
        seconds: Reals = length * turn_s + (steps_beside if beside else steps_of)(length) * step_s
        if action_s:
            seconds = seconds + ACTIONS_PER_STEP * length * action_s
        return np.where(length > 0, seconds, 0.0)

    writing = np.minimum(starts, min(slots, tier.queue_depth))
    forward_s = (n - 1) * step_s + starts * tier.write_overhead_s
    # One Put an interval, one Await a write, an Advance each but perhaps the last.
    forward_s = forward_s + (2 * starts + starts - (above == 0)) * action_s
    turn_first_s = costs.taping_s + costs.reverse_step_s + 3 * action_s
    since_s = above * step_s + (above > 0) * action_s + turn_first_s + writing * action_s
    last_write_s = np.maximum(0.0, tier.write_s - since_s)
    # Two intervals are unlike the others: the first reversed, and that from state 0.
    single = (starts == 1) | ((above == 0) & (starts == 2))
    first = np.where(above > 0, above, lengths)
    rest = starts - 1 - (above == 0)
    first_s = reversing_s(first, False)
    if ahead:
        first_s = np.where(single, first_s, reversing_s(first, True))
    whole_s = reversing_s(lengths, ahead)
    lowest_s = reversing_s(lengths, False)
    reversed_s = first_s + np.where(rest > 0, (rest - 1) * whole_s + lowest_s, 0.0)
    exposed_s = max(0.0, read_s - action_s)
    if ahead:  # each read but the first hides behind the reversal of the interval above
        behind_first_s = np.maximum(0.0, read_s - first_s - 2 * action_s)
        behind_s = np.maximum(0.0, read_s - whole_s - 2 * action_s)
        stalls_s = exposed_s + np.where(rest > 0, behind_first_s + (rest - 1) * behind_s, 0.0)
    else:
        stalls_s = (rest + 1) * exposed_s
    # Get, Await, Drop, Load and Free.
    moves_s = (rest + 1) * (tier.read_overhead_s + 5 * action_s) + (above == 0) * action_s
    seconds: Reals = forward_s + turn_first_s + last_write_s + reversed_s + stalls_s + moves_s
    return seconds


def _over(costs: Costs, slots: int, n: int, length: int) -> Draft:
    """Return the draft with intervals of `length` steps."""
    tier = costs.tier
    assert tier is not None
    starts = -(-n // length)
    above = n - 1 - (starts - 1) * length
    pieces = [above or length, *([length] if starts > 1 + (above == 0) else [])]
    ahead = slots >= 2 and starts > 1 + (above == 0)
    peak = max(1 + ahead + min(slots - 1 - ahead, max(0, piece - 2)) for piece in pieces)
    peak = max(peak, min(starts, slots, tier.queue_depth))
    # Beside a read ahead the free slots are one fewer, except above state 0.
    forward_steps = n + nu(length if len(pieces) > 1 else pieces[0], slots)
    if len(pieces) > 1:
        beside = slots - 1 if ahead else slots
        whole = starts - 2 - (above == 0)
        forward_steps += nu(pieces[0], beside) + whole * nu(length, beside)
    use = Simulation(
        float(_seconds(costs, slots, n, np.array([length]))[0]),
        forward_steps,
        _stall_s(costs, slots, n, length),
        writes=starts,
        reads=starts - (above == 0),
        peak_slots=peak,
    )
    make = partial(interval_schedule, length, slots, tier.queue_depth, n)
    return Draft(
        make,
        with_actions(use, make, costs, slots, n),
        note=f"State k * {length} is written; each interval is read back and reversed.",
        parameters={"interval": length},
    )


def _stall_s(costs: Costs, slots: int, n: int, length: int) -> float:
    """Return the seconds spent waiting: what instant transfers would not take."""
    tier = costs.tier
    assert tier is not None
    instant = replace(costs, tiers=(replace(tier, write_s=0.0, read_s=0.0),))
    lengths = np.array([length])
    waited = _seconds(costs, slots, n, lengths) - _seconds(instant, slots, n, lengths)
    return max(0.0, float(waited[0]))
