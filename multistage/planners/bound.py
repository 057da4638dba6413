"""Lower bounds on the makespan: the certificate printed with every plan.

The model is the simulator's.  n steps, s fast slots, one live state beside
them; a forward step takes T_A, a turn (an adjoint step from its state) T_B.
Slow tier k takes T_Wk to write a state and T_Rk to read one, o_Wk and o_Rk of
which the computing thread loses, and holds c_k states; each direction of each
tier is first in, first out.  A state under a write or a read occupies a slot
until its `Await`.  State 0 is a checkpoint like any other, as it is for every
planner.  Whether a schedule waits for each transfer or overlaps it, over one
tier or all of them, makes no difference to what follows.

Where a state is its own tape
    State n-1 first exists at t1, before any adjoint step; what follows takes
    t2.  At t1 every earlier state is in a fast slot or the working tape (at
    most s+1 of them, those under a write or a read included), or is read
    from a tier later, or is computed again, by a forward step of its own.
    Let r_k states be read from tier k that are in no slot at t1.  They are in
    the tier together, so r_k <= c_k; their writes were awaited, one after the
    other, so r_k T_Wk <= t1; their reads start after t1 and the last one
    comes before a turn, so r_k T_Rk + T_B <= t2.  With r the sum of all r_k,

        r <= sum over k of min(c_k, t1 / T_Wk)
        r <= sum over k of min(c_k, (t2 - T_B) / T_Rk)
        t1 >= (n-1) T_A + r min_k o_Wk
        t2 >= T_A + n T_B + max(0, n-1-(s+1)-r) T_A + r min_k o_Rk,

    the T_A beside the turns being the step to state n.  The least t1 and t2
    that allow r are convex functions of r, piecewise linear with kinks where
    a tier is full, so that t1 + t2 is least at r = 0 or beside one of a few
    kinks; the bound is the least value over r.

Where tapes are real
    Every step is taped once and reversed once; all but the k steps whose tapes
    fit in memory at the end of the forward sweep are run once more before.

The driver
    Each state but the first is made live by an action of its own, each step
    has its `Reverse`, and there is one `EndForward`: 2 n + 1 actions at least,
    n + 2 of them after t1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from .. import native
from ..model.costs import Costs
from ..model.tier import Tier


def lower_bound(costs: Costs, slots: int, n_steps: int) -> float:
    """Return the closed-form lower bound on the makespan in seconds, in O(log n).

    Parameters
    ----------
    costs : Costs
        With any number of tiers, all of which a schedule may use at once;
        without one every state lives in the slots.
    slots : int
        Fast slots.
    n_steps : int
        At least 1.

    Examples
    --------
    >>> from multistage.model.tier import Tier
    >>> tier = Tier(write_s=4.0, read_s=4.0)
    >>> lower_bound(Costs(1.0, 2.0, tiers=(tier,)), 20, 200)
    729.0
    >>> lower_bound(Costs(1.0, 2.0, tiers=(tier, tier)), 20, 200)
    679.0
    """
    driver_s = (2 * n_steps + 1) * costs.action_s
    if not costs.state_is_tape:
        kept = min(n_steps, 1 + math.floor(slots / costs.tape_slots))
        taped_s = n_steps * (costs.taping_s + costs.reverse_step_s)
        return taped_s + (n_steps - kept) * min(costs.forward_step_s, costs.taping_s) + driver_s
    # A tape restarts its own step only, but may be smaller than the state.
    at_hand = 1 + math.floor(slots / min(1.0, costs.tape_slots))
    missing = max(0, n_steps - 1 - at_hand)
    return _Stored(costs, n_steps, missing, driver_s).least_s()


@dataclass(frozen=True, slots=True)
class _Stored:
    """The bound as a function of r, the states read from the tiers; `missing` are in no slot."""

    costs: Costs
    n_steps: int
    missing: int
    driver_s: float

    def least_s(self) -> float:
        """Return the least of `total_s` over all r: convex from r = 1 on."""
        tiers = [tier for tier in self.costs.tiers if tier.capacity_states != 0]
        low, high = 1, int(min(self.missing, sum(map(_capacity, tiers))))
        without_s = self.total_s(0, tiers)
        if high < 1:
            return without_s
        while low < high:
            r = (low + high) // 2
            if self.total_s(r + 1, tiers) < self.total_s(r, tiers):
                low = r + 1
            else:
                high = r
        return min(without_s, self.total_s(low, tiers))

    def total_s(self, r: int, tiers: list[Tier]) -> float:
        """Return the least seconds of a schedule that reads r states later."""
        step_s, turn_s, n = self.costs.forward_step_s, self.costs.turn_s, self.n_steps
        sweep_s = (n - 1) * step_s
        if not r:
            return sweep_s + self._after_s(0, tiers) + self.driver_s
        writing_s = _least_s([tier.write_s for tier in tiers], tiers, r)
        reading_s = _least_s([tier.read_s for tier in tiers], tiers, r) + turn_s
        first_s = sweep_s + r * min(tier.write_overhead_s for tier in tiers)
        after_s = self._after_s(r, tiers)
        action_s = (n + 2) * self.costs.action_s
        overlapped_s = max(first_s, writing_s) + max(after_s + action_s, reading_s)
        return max(first_s + after_s + self.driver_s, overlapped_s)

    def _after_s(self, r: int, tiers: list[Tier]) -> float:
        """Return what the computing thread does after state n-1 exists, in seconds."""
        costs = self.costs
        recomputed_s = (1 + self.missing - r) * costs.forward_step_s
        overhead_s = r * min((tier.read_overhead_s for tier in tiers), default=0.0)
        return self.n_steps * costs.turn_s + recomputed_s + overhead_s


def _capacity(tier: Tier) -> float:
    return math.inf if tier.capacity_states is None else tier.capacity_states


def _least_s(times: list[float], tiers: list[Tier], count: float) -> float:
    """Return the least seconds in which all tiers side by side move `count` states."""
    at_work: list[tuple[float, float, float]] = []  # full after so long, a state's time, capacity
    for time, tier in zip(times, tiers, strict=True):
        if time > _INSTANT_S:
            at_work.append((time * _capacity(tier), time, _capacity(tier)))
        else:
            count -= _capacity(tier)
    at_work.sort()
    for k, (full_s, _, capacity) in enumerate(at_work):
        if count <= 0:
            break
        seconds = count / sum(1 / time for _, time, _ in at_work[k:])
        if seconds <= full_s:
            return seconds
        count -= capacity
    return 0.0 if count <= 0 else math.inf


_INSTANT_S = 1e-300  # its inverse is still a number


class Prices(NamedTuple):
    """What the program of `priced_bound` pays: seconds, and prices of a second.

    Attributes
    ----------
    step, turn : float
        Seconds of a forward step and of a turn.
    first, second, reading : float
        Of the write channel in the first sweep and later, and of the read channel.
    write_1, keep_1, write_2, read : float
        Of a write and of a slot kept in the first sweep, of a write later and of a read.
    """

    step: float
    turn: float
    first: float
    second: float
    reading: float
    write_1: float
    keep_1: float
    write_2: float
    read: float


def priced_bound(costs: Costs, slots: int, n_steps: int) -> float:
    """Return a tighter lower bound for short problems, in seconds; at least `lower_bound`.

    Both channels get a price per second, a first one up to the time state n-1
    first exists and a second one after it, and so do slots at that time; a
    dynamic program finds the cheapest schedule at those prices, and prices
    are searched for the largest bound.

    The program counts the slots of the states that are kept until their turn
    or their eviction: they have no room for a transfer.  So a second of work is
    discounted by the price of the write channel only where a slot is free.  A
    read takes a slot from its beginning until its state is needed, so work is
    discounted by the price of the read channel only from some moment before a
    state is needed up to then, with one slot less; two such reads at once are
    counted as one.  Let F_1 and F_2 be the seconds of work in the two phases,
    of lengths T_1 and T_2, during which no slot is free for a write, and G_2
    those of the second in which no read has a slot.  Then W_1 T_W <= T_1 - F_1
    holds for the writes done in the first, W_2 T_W <= T_2 - F_2 + T_W for the
    others, and (R - R_1) T_R <= T_2 - G_2 for the reads, R_1 of which began in
    the first.  A read that begins before the part reversed ahead of its state
    is none: a state that stays in its slot so long needs no price.  At the
    turn A states kept, R_1 states under a read and those under a write take
    at most s slots: the live state is lost with the next step, and restarts
    nothing.  So a write of the first phase costs the lesser of two: its time
    in that phase, or its slot at the turn and its time later.  What these
    corrections take off is subtracted.

    Known gap: the program ranges over nested schedules, in which a
    checkpoint stays, in a slot or in the tier, until its interval is reversed.
    Never above the exact optimum on the instances tried (n <= 12).  O(s n^2)
    per price; n <= 512, one tier; elsewhere it is `lower_bound`.

    Examples
    --------
    >>> from multistage.model.tier import Tier
    >>> costs = Costs(1.0, 1.0, tiers=(Tier(write_s=20.0, read_s=20.0),))
    >>> priced_bound(costs, 3, 200) >= lower_bound(costs, 3, 200)
    True
    """
    plain, tier = lower_bound(costs, slots, n_steps), costs.tier
    one_tier = tier is not None and len(costs.tiers) == 1
    applies = costs.state_is_tape and one_tier and 1 < n_steps <= _PRICED_STEPS
    if native.LIBRARY is None or tier is None or not applies:
        return plain
    if tier.capacity_states is not None or costs.tape_slots < 1:
        return plain
    room = min(slots, n_steps)
    work = np.empty(int(native.LIBRARY.ms_priced_work_len(n_steps, room)))
    kernel = native.LIBRARY.ms_priced

    def bound(at: tuple[float, ...]) -> float:
        first, second, reading, keep = at
        if min(at) < 0 or first > 0.98 or second + reading > 0.98:
            return 0.0
        write_2, keep_1 = second * tier.write_s, keep * tier.write_s
        write_1 = min(first * tier.write_s, write_2 + keep_1)
        read = reading * tier.read_s
        prices = Prices(
            costs.forward_step_s,
            costs.turn_s,
            first,
            second,
            reading,
            write_1,
            keep_1,
            write_2,
            read,
        )
        cheapest = kernel(n_steps, room, np.array(prices).ctypes.data, work.ctypes.data)
        return float(cheapest - room * max(keep_1, read) - write_2)

    best, at = max((bound(start), start) for start in _STARTS)
    stride = 0.16
    while stride > 0.004:
        moves = (
            tuple(price + stride * way for price, way in zip(at, ways, strict=True))
            for ways in _DIRECTIONS
        )
        value, there = max((bound(move), move) for move in moves)
        if value > best * (1 + 1e-12):
            best, at = value, there
        else:
            stride /= 2
    return max(plain, best)


_PRICED_STEPS = 512
_STARTS: tuple[tuple[float, ...], ...] = (
    (0.0, 0.0, 0.0, 0.0),
    (0.1, 0.02, 0.02, 0.1),
    (0.3, 0.05, 0.05, 0.25),
    (0.5, 0.1, 0.05, 0.5),
    (0.2, 0.2, 0.2, 0.1),
    (0.4, 0.05, 0.3, 0.4),
)
_DIRECTIONS = tuple(move for move in product((-1, 0, 1), repeat=4) if 0 < sum(map(abs, move)) <= 2)
