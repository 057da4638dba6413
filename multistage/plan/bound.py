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
    When state n-1 first exists, after at least (n-1) T_A, every earlier state
    is in a fast slot (at most s of them, those being read included), or in
    the slow tier and read later (r, at most the time so far over T_W), or
    computed again.  So the rest takes at least

        max(n T_B + T_A max(0, n-1-s-r), r T_R + T_B),

    the last state read being reversed after its read.  The minimum over r is
    the bound.  Waiting in order to write more does not pay unless T_W < T_A;
    then r is only bounded by n-1.  Where a state is its own tape, producing
    state n from state n-1 is work beside the turns: T_A more.  Where tapes are
    real, k tapes kept in the forward sweep save k T_A there and need no state,
    but take slots.
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
    step_s = costs.forward_step_s
    if costs.state_is_tape:
        return n_steps * step_s + _after_forward(costs, slots, n_steps, 0)
    # With k tapes kept the total is convex in k: walk down to its minimum.
    low, high = 0, min(n_steps - 1, 1 + math.floor(slots / costs.tape_slots))

    def total(kept: int) -> float:
        return (n_steps - 1 - kept) * step_s + _after_forward(costs, slots, n_steps, kept)

    while low < high:
        middle = (low + high) // 2
        if total(middle) <= total(middle + 1):
            high = middle
        else:
            low = middle + 1
    return total(low)


def _after_forward(costs: Costs, slots: int, n_steps: int, kept: int) -> float:
    """Return the least time from state n-1 on, `kept` tapes being held; r may be fractional."""
    step_s, turn_s, tier = costs.forward_step_s, costs.turn_s, costs.tier
    states = slots - max(0, kept - 1) * costs.tape_slots
    missing = max(0.0, n_steps - 1 - kept - states)
    if tier is None:
        return n_steps * turn_s + missing * step_s
    most = missing
    if tier.write_s >= step_s:
        most = min(most, math.floor((n_steps - 1) * step_s / tier.write_s + 1e-9))
    if tier.capacity_states is not None:
        most = min(most, tier.capacity_states)
    # Recomputation falls and reading grows with r: the minimum is where they meet.
    meet = (n_steps * turn_s + missing * step_s - turn_s) / (step_s + tier.read_s)
    around: tuple[float, float]
    if kept == 0:
        around = (math.floor(min(most, meet)), min(math.floor(most), math.ceil(meet)))
    else:
        around = (min(most, meet), min(most, meet))
    return min(
        max(n_steps * turn_s + (missing - r) * step_s, r * tier.read_s + turn_s * (r > 0))
        for r in around
    )


def priced_bound(costs: Costs, slots: int, n_steps: int) -> float:
    """Return the larger of `lower_bound` and the priced bound, in seconds."""
    return lower_bound(costs, slots, n_steps)
