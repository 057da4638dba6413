"""Costs as a sweep has shown them, and whether they differ from those that were assumed."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ..execute.ledger import Counts
from ..model.costs import Costs
from ..schedule.timeline import Timeline

# A plan is made again when what it rests on has changed by this factor.
_DRIFT = 1.3
_MOST_LEFT_OUT = 64


class LeftOut:
    """When a tier that plans leave out is used again: after 1, 2, 4, ... 64 sweeps without it.

    Then one is planned for the rates from before; should the tier be late still, that costs a
    share of one sweep.
    """

    def __init__(self) -> None:
        self._sweeps, self._pause = 0, 1

    def ended(self, *, used: bool, late: bool) -> bool:
        """Note a sweep that has ended; return whether the next is to use the tier again."""
        self._sweeps = 0 if used else self._sweeps + 1
        if used and not late:
            self._pause = 1
        if self._sweeps < self._pause:
            return False
        self._sweeps, self._pause = 0, min(_MOST_LEFT_OUT, 2 * self._pause)
        return True


def seen_costs(costs: Costs, timeline: Timeline, counts: Counts) -> Costs:
    """Return the assumed costs with everything replaced that the run has shown."""
    forward_s = counts.forward_s / counts.forward_steps if counts.forward_steps else 0.0
    if counts.reverse_steps:
        turn_s = counts.reverse_s / counts.reverse_steps
    else:  # stopped before
        turn_s = costs.turn_s
    # Where tapes are real, a turn tapes first; taping was not timed by itself.
    tape_s = costs.tape_step_s
    if tape_s is not None and forward_s:
        tape_s *= forward_s / costs.forward_step_s
    reverse_s = max(0.0, turn_s - (tape_s or 0.0))
    tiers = costs.tiers
    if len(tiers) == 1:  # the timeline does not distinguish tiers

        def per_state(kind: Literal["write", "read"], assumed: float) -> float:
            moved = timeline.bytes[kind]
            return timeline.totals_s[kind] * costs.state_bytes / moved if moved else assumed

        write_s = per_state("write", tiers[0].write_s)
        read_s = per_state("read", tiers[0].read_s)
        tiers = (replace(tiers[0], write_s=write_s, read_s=read_s),)
    return replace(
        costs,
        forward_step_s=forward_s or costs.forward_step_s,
        reverse_step_s=reverse_s,
        tape_step_s=tape_s,
        tiers=tiers,
    )


def drifted(assumed: Costs, seen: Costs) -> bool:
    """Whether a plan or its prediction would be another: the time of a step, or a ratio of times.

    Both count from a factor of 1.3 on.
    """
    ratios = [
        (assumed.forward_step_s, seen.forward_step_s),
        (assumed.turn_s / assumed.forward_step_s, seen.turn_s / seen.forward_step_s),
    ]
    if assumed.tier is not None and seen.tier is not None:
        ratios.append((assumed.rho, seen.rho))
        ratios.append(
            (
                assumed.tier.read_s / assumed.forward_step_s,
                seen.tier.read_s / seen.forward_step_s,
            )
        )
    return any(not a / _DRIFT <= b <= a * _DRIFT for a, b in ratios)
