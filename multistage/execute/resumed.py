"""Where a run begins that an earlier process has left."""

from __future__ import annotations

from dataclasses import dataclass

from ..schedule.rules import Rules
from ..states.layout import Array
from .sweep import Sweep
from .transfers import Transfers


@dataclass(frozen=True, slots=True)
class Resumed:
    """What an earlier process left of the same computation.

    Attributes
    ----------
    stored : tuple of int
        Checkpoints in the first tier.
    last : list of arrays or None
        The last state; None if the forward sweep is not over.
    end : int or None
        With `last`: where the adjoint stands; the schedule begins with `EndForward`.
    """

    stored: tuple[int, ...]
    last: list[Array] | None = None
    end: int | None = None

    def take_up(self, sweep: Sweep, transfers: Transfers, state: object) -> None:
        """Let a sweep begin where the earlier process stopped."""
        for step in self.stored:
            transfers.stored[0].add(step)
        if self.last is not None and self.end is not None:
            # The live state is the last one, whatever the adjoint has come to:
            # the caller wants to see it, the schedule has no use for it.
            slots = sweep.slots
            sweep.live = slots.load(slots.adopt(self.last, -1), state)
            sweep.at = self.end

    def tell(self, rules: Rules) -> None:
        """Let the rules begin where the run does."""
        for step in self.stored:
            rules.stored[step, 0] = None
        rules.tier_used[0] = rules.tier_peak[0] = len(self.stored)
        if self.end is not None:
            rules.n_steps = rules.live = self.end
