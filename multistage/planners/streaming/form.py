"""Forms of the streaming schedule: candidates that can be laid over any length."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...model.costs import Costs
from .reserve import Reservation
from .sweep import Sweep

# A backlog grows over so many times the spacing; more states are not worth a try.
_DENSE = 6.0
# However positions are rounded, none falls right before the tail.
_WHOLE = 1 + 1e-6


@dataclass(frozen=True, slots=True)
class Form:
    """A candidate that can be laid over any length.

    Attributes
    ----------
    spacing : float
    tail : int or None
        Length of the tail; None for the ring.
    shift : int or None
        Where the tail starts: this many steps after the position nearest to
        its nominal start, or exactly there (None).
    reserve : bool
        Whether slots are given up late for the next read.
    depth : int
    end_spacing : float or None
        Spacing among the states that the ring keeps to the end, where it differs.
    online : bool
        A ring that does not know where the sequence ends.
    backlog : int
        States stored before the tail beyond those written by then: they wait in slots.
    """

    spacing: float
    tail: int | None
    shift: int | None = None
    reserve: bool = True
    depth: int = 4
    end_spacing: float | None = None
    online: bool = False
    backlog: int = 0

    def sweep(self, costs: Costs, slots: int, n_steps: int, reservation: Reservation) -> Sweep:
        """Lay the form over `n_steps` steps."""
        tier = costs.tier
        assert tier is not None
        drain = math.ceil(tier.queue_depth * tier.write_s / max(costs.turn_s, 1e-12))
        if self.online:
            return Sweep(
                slots,
                self.spacing,
                None,
                self.depth,
                tier.queue_depth,
                drain_steps=drain,
                reservation=reservation if self.reserve else None,
            )
        start = None
        if self.tail is not None:
            start = n_steps - self.tail
            if self.shift is not None:
                start = int(round(start / self.spacing) * self.spacing) + self.shift
            start = min(max(start, 0), n_steps - 1)
            if self.backlog:
                return self._with_backlog(slots, start, tier.queue_depth, drain, reservation)
        last = self.end_spacing or self.spacing
        kept = int(min(n_steps, slots * last / max(last - 1, slots / n_steps)))
        end_start = None if self.end_spacing is None else max(0, n_steps - 1 - kept)
        margin = math.ceil(2 * last + self.spacing)
        return Sweep(
            slots=slots,
            spacing=self.spacing,
            tail_start=start,
            depth=self.depth,
            queue_depth=tier.queue_depth,
            drain_steps=min(drain, n_steps),
            reservation=reservation if self.reserve else None,
            keep_from=max(0, n_steps - 1 - kept - margin),
            end_start=end_start,
            end_spacing=self.end_spacing or 1.0,
        )

    def ends(self, slots: int) -> int:
        """Return how many steps at the ends are not periodic."""
        if self.tail is None:
            return 4 * slots
        return self.tail + (math.ceil((_DENSE + 2) * self.spacing) if self.backlog else 0)

    def _with_backlog(
        self, slots: int, start: int, queue_depth: int, drain: int, reservation: Reservation
    ) -> Sweep:
        dense = min(start, math.ceil(_DENSE * self.spacing))
        closer = dense / (dense / self.spacing + self.backlog)
        return Sweep(
            slots,
            self.spacing,
            start,
            self.depth,
            queue_depth,
            drain_steps=drain,
            reservation=reservation if self.reserve else None,
            end_start=start - dense,
            end_spacing=max(1.0, closer * _WHOLE),
            backlog=self.backlog,
        )
