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
