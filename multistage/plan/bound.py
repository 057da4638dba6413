"""Lower bounds on the makespan: the certificate printed with every plan.

The model is the simulator's.  n steps, s fast slots, one live state beside
them; a forward step takes T_A, a turn (an adjoint step from its state) T_B,
a state T_W to the first slow tier and T_R back, each direction first in,
first out.  A state under a write or a read occupies a slot.  State 0 is a
checkpoint like any other: a schedule that leans on the caller's copy of it
has one slot more; so has one that, where a state is its own tape, uses the
working tape to hold a state.  What transfers cost the computing thread is left out,
which keeps the bounds valid.

Closed form
    When state n-1 first exists, at t1 >= (n-1) T_A, every earlier state is in
    a fast slot (at most s of them, those being read included), or in the slow
    tier and read later (r of them, r T_W <= t1), or computed again.  The rest
    takes at least

        max(T_A + n T_B + T_A max(0, n-1-s-r), r T_R + T_B):

    producing state n is work beside the turns where a state is its own tape,
    and the last state read is reversed after its read.  The bound is the
    minimum over r with t1 = max((n-1) T_A, r T_W).  Where tapes are real, k of
    them kept in the forward sweep save T_A each there and need no state, but
    take slots; the minimum is then over k too, with r fractional.
"""

from __future__ import annotations

import math

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
    730.0
    """
    if costs.state_is_tape:
        return _least(costs, slots, n_steps, 0)
    # With k tapes kept the total is convex in k: walk down to its minimum.
    low, high = 0, min(n_steps - 1, 1 + math.floor(slots / costs.tape_slots))
    while low < high:
        middle = (low + high) // 2
        if _least(costs, slots, n_steps, middle) <= _least(costs, slots, n_steps, middle + 1):
            high = middle
        else:
            low = middle + 1
    return _least(costs, slots, n_steps, low)


def _least(costs: Costs, slots: int, n_steps: int, kept: int) -> float:
    """Return the bound with `kept` tapes held when state n-1 first exists."""
    step_s, turn_s, tier = costs.forward_step_s, costs.turn_s, costs.tier
    sweep_s = (n_steps - 1 - kept) * step_s + kept * costs.taping_s
    work_s = n_steps * turn_s + (step_s if costs.state_is_tape else -kept * costs.taping_s)
    in_slots = slots - max(0, kept - 1) * costs.tape_slots
    missing = max(0.0, n_steps - 1 - kept - in_slots)
    if tier is None:
        return sweep_s + work_s + missing * step_s
    most = missing if tier.capacity_states is None else min(missing, tier.capacity_states)

    def total_s(reads: float) -> float:
        forward_s = max(sweep_s, reads * tier.write_s)
        last_s = turn_s if reads >= 1 else 0.0
        computing_s = work_s + (missing - reads) * step_s
        return forward_s + max(computing_s, reads * tier.read_s + last_s)

    # Convex and piecewise linear from r = 1 on: least at a kink, or beside it.
    kinks = [
        sweep_s / tier.write_s if tier.write_s else most,
        (work_s + missing * step_s - turn_s) / (step_s + tier.read_s),
        (work_s + missing * step_s) / (step_s + tier.read_s),
        most,
        0.0,
    ]
    if costs.state_is_tape:
        kinks = [float(whole(kink)) for kink in kinks for whole in (math.floor, math.ceil)]
    return min(total_s(min(max(kink, 0.0), most)) for kink in kinks)


def priced_bound(costs: Costs, slots: int, n_steps: int) -> float:
    """Return the larger of `lower_bound` and the priced bound, in seconds."""
    return lower_bound(costs, slots, n_steps)
