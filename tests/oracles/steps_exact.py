"""The exact optimum of a short reversal: the oracle of the planners and bounds.

A* search over every schedule of the simulator's model, in whole time units:
one computing thread, a write and a read channel, s fast slots.  Where the
bounds of `bound` may be loose and the planners may lose, this is the truth,
for n <= 12.  The search is in `steps_exact.c`.

A state of the search says how many adjoint steps are left, which state is
live, what the computing thread and both channels do and how long still, and
which states are in the slots and in the tier (64 bits in all).  Saving a
state and starting a step or a transfer cost nothing; then time passes until
the next activity ends.  Starting only then loses nothing: whatever is begun
later could be begun at the last such moment.

The heuristic counts what the computing thread still has to do: the turns
left, and one forward step for each state below them that is neither live nor
in a slot, in the tier or in transfer.  Each of those needs a step of its own,
so the estimate is never too high (admissible) and the first goal reached is
optimal.

The optimum assumes what the planners assume: state 0 is a checkpoint like any
other, and a state is its own tape.  Known gap: real tapes are refused.
"""

from __future__ import annotations

import ctypes
from fractions import Fraction
from math import lcm
from typing import NamedTuple

import numpy as np

from multistage.model.costs import Costs

from .compiled import library

MAX_STEPS = 12
MAX_COMPUTE = 63
MAX_TRANSFER = 255


class Times(NamedTuple):
    """The four times in whole units; `write` 0 means that there is no slow tier."""

    forward: int
    turn: int
    write: int
    read: int


def exact_makespan(costs: Costs, slots: int, n_steps: int) -> float:
    """Return the least makespan of any schedule, in seconds.

    Parameters
    ----------
    costs : Costs
        With `tape_step_s` None.  Times must be whole multiples of one unit, a
        forward and an adjoint step together at most 63 of them, a transfer at
        most 255.  Only the first tier counts.
    slots : int
        Fast slots, at least 1.
    n_steps : int
        1 to 12.

    Examples
    --------
    >>> from multistage.model.tier import Tier
    >>> exact_makespan(Costs(1.0, 2.0, tiers=(Tier(write_s=2.0, read_s=1.0),)), 2, 6)
    19.0
    """
    assert costs.tape_step_s is None and 1 <= n_steps <= MAX_STEPS and slots > 0
    times, unit_s = whole_times(costs)
    return _search(times, min(slots, n_steps), n_steps) * unit_s


def whole_times(costs: Costs) -> tuple[Times, float]:
    """Return the times in whole units, of which there must be few, and the unit in seconds."""
    tier = costs.tier
    seconds = [costs.forward_step_s, costs.turn_s]
    if tier is not None and tier.capacity_states != 0:
        seconds += [tier.write_s, tier.read_s]
        assert min(tier.write_s, tier.read_s) > 0
    ratios = [Fraction(s / costs.forward_step_s).limit_denominator(MAX_COMPUTE) for s in seconds]
    per_step = lcm(*(ratio.denominator for ratio in ratios))
    units = [int(ratio * per_step) for ratio in ratios] + [0] * (4 - len(seconds))
    unit_s = costs.forward_step_s / per_step
    times = Times(*units)
    pairs = zip(units, seconds, strict=False)
    assert all(abs(k * unit_s - s) <= 1e-9 * max(s, unit_s) for k, s in pairs), seconds
    assert times.forward + times.turn <= MAX_COMPUTE and max(times[2:]) <= MAX_TRANSFER
    return times, unit_s


def _search(times: Times, slots: int, n_steps: int) -> int:
    """Run the search in C with growing tables."""
    search = library("steps_exact").exact_steps
    search.restype = ctypes.c_int64
    search.argtypes = [*[ctypes.c_int64] * 6, *[ctypes.c_void_p] * 2, ctypes.c_int64]
    search.argtypes += [ctypes.c_void_p, ctypes.c_int64]
    size = 1 << 16
    while True:
        keys = np.zeros(size, dtype=np.uint64)
        seconds = np.empty(size, dtype=np.int64)
        heap = np.empty(3 * size, dtype=np.int64)
        found = int(
            search(
                n_steps,
                slots,
                *times,
                keys.ctypes.data,
                seconds.ctypes.data,
                size,
                heap.ctypes.data,
                size,
            )
        )
        assert found >= -1, found
        if found >= 0:
            return found
        size *= 4
