"""Lower bounds on the makespan: the certificate printed with every plan.

The model is the simulator's.  n steps, s fast slots, one live state beside
them; a forward step takes T_A, a turn (an adjoint step from its state) T_B,
a state T_W to the first slow tier and T_R back, each direction first in,
first out.  A state under a write or a read occupies a slot.  What transfers
cost the computing thread is left out, which keeps the bounds valid.

Where a state is its own tape
    When state n-1 first exists, at t1 >= (n-1) T_A, every earlier state is in
    a fast slot or the working tape (at most s+1 of them, those being read
    included), or in the slow tier and read later (r of them, r T_W <= t1), or
    computed again.  The rest takes at least

        max(T_A + n T_B + T_A max(0, n-1-(s+1)-r), r T_R + T_B):

    producing state n is work beside the turns, and the last state read is
    reversed after its read.  The bound is the minimum over r with
    t1 = max((n-1) T_A, r T_W).

Where tapes are real
    Every step is taped once and reversed once; all but the k steps whose tapes
    fit in memory at the end of the forward sweep are run once more before.
"""

from __future__ import annotations

import math
from itertools import product

import numpy as np

from .. import native
from ..costs import Costs


def lower_bound(costs: Costs, slots: int, n_steps: int) -> float:
    """Return the closed-form lower bound on the makespan in seconds, in O(log slots).

    Parameters
    ----------
    costs : Costs
        Only the first tier counts; without one every state lives in the slots.
    slots : int
        Fast slots.
    n_steps : int
        At least 1.

    Examples
    --------
    >>> from multistage.costs import Tier
    >>> lower_bound(Costs(1.0, 2.0, tiers=(Tier(write_s=4.0, read_s=4.0),)), 20, 200)
    729.0
    """
    if not costs.state_is_tape:
        kept = min(n_steps, 1 + math.floor(slots / costs.tape_slots))
        taped_s = n_steps * (costs.taping_s + costs.reverse_step_s)
        return taped_s + (n_steps - kept) * min(costs.forward_step_s, costs.taping_s)
    step_s, turn_s, tier = costs.forward_step_s, costs.turn_s, costs.tier
    sweep_s, work_s = (n_steps - 1) * step_s, n_steps * turn_s + step_s
    # A tape restarts its own step only, but may be smaller than the state.
    at_hand = 1 + math.floor(slots / min(1.0, costs.tape_slots))
    missing = max(0, n_steps - 1 - at_hand)
    if tier is None:
        return sweep_s + work_s + missing * step_s
    most = missing if tier.capacity_states is None else min(missing, tier.capacity_states)

    def total_s(reads: float) -> float:
        forward_s = max(sweep_s, reads * tier.write_s)
        last_s = turn_s if reads >= 1 else 0.0
        computing_s = work_s + (missing - reads) * step_s
        return forward_s + max(computing_s, reads * tier.read_s + last_s)

    # Convex and piecewise linear from r = 1 on: least beside a kink.
    kinks = [
        sweep_s / tier.write_s if tier.write_s else most,
        (work_s + missing * step_s - turn_s) / (step_s + tier.read_s),
        (work_s + missing * step_s) / (step_s + tier.read_s),
        most,
        0.0,
    ]
    whole = (round_(kink) for kink in kinks for round_ in (math.floor, math.ceil))
    return min(total_s(min(max(reads, 0), most)) for reads in whole)


def priced_bound(costs: Costs, slots: int, n_steps: int) -> float:
    """Return a tighter lower bound for short problems, in seconds; at least `lower_bound`.

    Both channels get a price per second, a first one up to the time state n-1
    first exists and a second one after it; a dynamic programme finds the
    cheapest schedule at those prices, and prices are searched for the largest
    bound.  With T_1 and T_2 the lengths of the two phases, W_1 T_W <= T_1
    holds for the writes done in the first, W_2 T_W <= T_2 + T_W for the
    others, and R T_R <= T_2 + s T_R for the reads, at most s of which began
    in the first; at most s writes are issued in the first phase and done in
    the second.  What these corrections take off is subtracted.

    Known gap: the programme ranges over nested schedules, in which a
    checkpoint stays until its interval is reversed.  Never above the exact
    optimum on the instances tried (n <= 9).  O(s n^2) per price; n <= 512.

    Examples
    --------
    >>> from multistage.costs import Tier
    >>> costs = Costs(1.0, 1.0, tiers=(Tier(write_s=20.0, read_s=20.0),))
    >>> priced_bound(costs, 3, 200) >= lower_bound(costs, 3, 200)
    True
    """
    plain, tier = lower_bound(costs, slots, n_steps), costs.tier
    applies = costs.state_is_tape and tier is not None and 1 < n_steps <= _PRICED_STEPS
    if native.LIBRARY is None or tier is None or not applies:
        return plain
    if tier.capacity_states is not None or costs.tape_slots < 1:
        return plain
    step_s, turn_s = costs.forward_step_s, costs.turn_s
    room = min(slots + 1, n_steps)  # the working tape can hold a state
    work = np.empty(int(native.LIBRARY.ms_priced_work_len(n_steps, room)))
    kernel = native.LIBRARY.ms_priced

    def bound(prices: tuple[float, float, float]) -> float:
        first, second, read = prices
        if min(prices) < 0 or first > 0.98 or second + read > 0.98:
            return 0.0
        write_1, write_2 = first * tier.write_s, second * tier.write_s
        left, read_s = 1 - second - read, read * tier.read_s
        cheapest = kernel(
            n_steps,
            room,
            (1 - first) * step_s,
            write_1,
            left * step_s,
            write_2,
            read_s,
            work.ctypes.data,
        )
        taken_off = room * max(0.0, write_1 - write_2) + write_2 + room * read_s
        return float(left * (n_steps * turn_s + step_s) + cheapest - taken_off)

    best, at = max((bound(start), start) for start in _STARTS)
    stride = 0.16
    while stride > 0.004:
        moves = (
            (at[0] + i * stride, at[1] + j * stride, at[2] + k * stride) for i, j, k in _DIRECTIONS
        )
        value, there = max((bound(move), move) for move in moves)
        if value > best * (1 + 1e-12):
            best, at = value, there
        else:
            stride /= 2
    return max(plain, best)


_PRICED_STEPS = 512
_STARTS = (
    (0.0, 0.0, 0.0),
    (0.1, 0.02, 0.02),
    (0.3, 0.05, 0.05),
    (0.5, 0.1, 0.05),
    (0.2, 0.2, 0.2),
    (0.4, 0.05, 0.3),
)
_DIRECTIONS = tuple(move for move in product((-1, 0, 1), repeat=3) if 0 < sum(map(abs, move)) <= 2)
