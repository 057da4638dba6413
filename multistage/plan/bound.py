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
    missing = max(0, n_steps - 1 - (slots + 1))
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
    """Return the larger of `lower_bound` and the priced bound, in seconds."""
    return lower_bound(costs, slots, n_steps)
