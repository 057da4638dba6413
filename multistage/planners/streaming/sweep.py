"""The streaming schedule: one forward sweep that offers states, one reverse sweep that reads them.

Two forward sweeps share one reverse sweep:

ring
    Every state goes into a fast slot and states are offered to the tier as
    its channel idles.  When a slot is needed, a state already written goes
    first, then the oldest unwritten one.  The last s*rho/(rho-1) states so
    survive in one place or the other.  Needs no knowledge of n.
tail
    States are offered at the positions floor(k g) before `tail_start`; the
    steps from there on are reversed by Revolve from the fast slots.  With a
    backlog the last of them lie closer than the tier writes: idle slots hold
    what it has not taken yet, and it catches up while the tail runs forward.

The reverse sweep walks down from state n-1.  Its next anchor is the highest
state at hand, in a slot or in the tier; the interval above the anchor is
reversed by Revolve with the slots that are left, and reads of the anchors
below are queued as early as slots allow.  Where an interval needs all slots
for itself (g > s), one slot is given up for the next read at the moment that
costs least, and where that pays, the anchor leaves its own slot to the upper
part and is read again for the lower one (`reserve`).

Nothing here looks at a clock.  What a transfer's fate decides comes back as
an answer: a refused offer is tried again one step later, a lost checkpoint
drops out of the list, so that its interval merges with the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...actions import EndForward, Reverse, Schedule, Tape
from .forward_sweep import ring_forward, tail_forward
from .reserve import Reservation
from .reverse_sweep import reverse_sweep
from .sweep_memory import SweepMemory


@dataclass(frozen=True, slots=True)
class Sweep:
    """What fixes a streaming schedule.

    Attributes
    ----------
    slots : int
        Fast slots, staging and landing slots included.
    spacing : float
        g: steps between two offers, at least.
    end_start : int or None
        From here on states are offered at `end_spacing` instead.  In a ring
        they are those kept to the end: no recomputation hides the reads of
        those among them that the ring gives up.  Before a tail they are those
        that may be written while it runs.
    end_spacing : float
    backlog : int
        Tail only: most states kept in slots of their own until the tier takes them.
    tail_start : int or None
        Steps from here on are reversed from fast slots; None for the ring.
    keep_from : int
        Ring only: states before this one are offered but never kept, being
        evicted before the end anyway.  0 where n is unknown.
    depth : int
        Most reads in flight or landed ahead of their use.
    queue_depth : int
        The tier's q; an accepted offer proves all but the last q writes done.
    drain_steps : int
        Adjoint steps after which writes left in flight are surely done.
    reservation : Reservation or None
        When to give up a slot for the next read; None gives it up at once.
    extra : frozenset of int
        Positions offered besides the regular ones.
    skip : frozenset of int
        Regular positions not offered.
    """

    slots: int
    spacing: float
    tail_start: int | None
    depth: int = 4
    queue_depth: int = 2
    drain_steps: int = 0
    reservation: Reservation | None = None
    keep_from: int = 0
    end_start: int | None = None
    end_spacing: float = 1.0
    backlog: int = 0
    extra: frozenset[int] = frozenset()
    skip: frozenset[int] = frozenset()

    def schedule(
        self, n_steps: int | None, is_last: Callable[[int], bool] | None = None
    ) -> Schedule:
        """Return a fresh schedule of `n_steps` steps.

        With `n_steps` None (ring only), `is_last(i)` is asked when state i is
        live whether it is the last.
        """
        return _schedule(self, n_steps, is_last)


def _schedule(sweep: Sweep, n: int | None, is_last: Callable[[int], bool] | None) -> Schedule:
    if n == 1:
        yield Tape(0)
        yield EndForward()
        yield Reverse(0)
        return
    memory = SweepMemory(sweep)
    end = sweep.tail_start
    if end is None:
        end = yield from ring_forward(memory, n, is_last)
    else:
        assert n is not None
        yield from tail_forward(memory, n, end)
    yield from reverse_sweep(memory, end)
