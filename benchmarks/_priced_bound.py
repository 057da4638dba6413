"""A tighter lower bound of short problems, to judge planners by: both channels have a price."""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import numpy as np

from multistage import Costs, native
from multistage.planners.bound import lower_bound


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
    >>> from multistage import Tier
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
