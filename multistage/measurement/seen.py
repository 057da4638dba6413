"""Costs as a sweep has shown them, and whether they differ from those that were assumed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from ..backends.base import Store
from ..execute.ledger import Counts
from ..model.costs import Costs
from ..model.tier import Tier
from ..schedule.timeline import Timeline

# A plan is made again when what it rests on has changed by this factor.
_DRIFT = 1.3
_MOST_LEFT_OUT = 64


class FirstRates:
    """Rates of tiers from before sweeps corrected them: bounds of shares, and of new tries.

    A tier that plans leave out is used again after 1, 2, 4, ... 64 sweeps without it.  That one
    is planned for the rates from before; should the tier be late still, it costs a share of one
    sweep.
    """

    def __init__(self) -> None:
        self._tiers: tuple[Tier, ...] = ()
        self._sweeps, self._pause = 0, 1

    def begin(self, tiers: Iterable[Tier]) -> None:
        """Note the rates before a sweep, unless earlier ones are known."""
        self._tiers = self._tiers or tuple(tiers)

    def forget(self) -> None:
        """Forget rates that are no longer of these tiers."""
        self._tiers = ()

    def within_shares(self, seen: Sequence[Tier], stores: Sequence[Store]) -> tuple[Tier, ...]:
        """Return the rates that a sweep has shown, none faster than at first in a shared store.

        Others use the same bandwidth there.  What they leave idle for a while is theirs; what
        they take already shows.  Costs may tell of fewer tiers than there are stores, or more.
        """
        shared = map(_slower, seen, self._tiers, stores)
        return (*shared, *seen[len(stores) :])

    def after(self, tiers: Sequence[Tier], *, used: bool, late: bool) -> tuple[Tier, ...]:
        """Return the rates to plan with after a sweep that has ended."""
        self._sweeps = 0 if used else self._sweeps + 1
        if used and not late:
            self._pause = 1
        if self._sweeps < self._pause:
            return tuple(tiers)
        self._sweeps, self._pause = 0, min(_MOST_LEFT_OUT, 2 * self._pause)
        return self._tiers


def _slower(seen: Tier, first: Tier, store: Store) -> Tier:
    if all(part.share == 1 for part in store.parts()):
        return seen
    return replace(
        seen,
        write_s=max(seen.write_s, first.write_s),
        read_s=max(seen.read_s, first.read_s),
        write_bytes_per_s=min(seen.write_bytes_per_s, first.write_bytes_per_s),
        read_bytes_per_s=min(seen.read_bytes_per_s, first.read_bytes_per_s),
    )


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
