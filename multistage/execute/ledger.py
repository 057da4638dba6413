"""Counts and timeline of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from ..backends.base import Store
from ..schedule.timeline import Timeline
from ..states.slots import StateLayout
from ..states.varied import Layouts

if TYPE_CHECKING:
    from .sweep import Sweep

State = TypeVar("State")
ArrayT = TypeVar("ArrayT")
PackingT = TypeVar("PackingT")

# A wait shorter than this is the price of the call, not a stall.
_STALL_S = 20e-6


@dataclass(slots=True)
class Counts:
    """What a run did, exactly.

    Attributes
    ----------
    forward_steps : int
        Steps run by `Advance`, `Tape` and recoveries.
    reverse_steps : int
    forward_s, reverse_s : float
        Seconds in those steps.
    stall_s : float
        Seconds the computing thread waited for stores.
    peak_slots : float
        Most fast slots taken at once, staging and landing included.
    writes, reads : int
        Transfers accepted.
    refused : int
        Offers that were not taken.
    lost : int
        Checkpoints that were written or read in vain.
    recovered_steps : int
        Steps run again because a checkpoint was lost.
    elapsed_s : float
        Seconds inside `forward` and `reverse`.
    late : str
        Why the sweep went on without its tiers; empty if it did not.
    """

    forward_steps: int = 0
    reverse_steps: int = 0
    forward_s: float = 0.0
    reverse_s: float = 0.0
    stall_s: float = 0.0
    peak_slots: float = 0.0
    writes: int = 0
    reads: int = 0
    refused: int = 0
    lost: int = 0
    recovered_steps: int = 0
    elapsed_s: float = 0.0
    late: str = ""


class Ledger:
    """Counts and timeline of one sweep, and the receiver of its progress.

    Parameters
    ----------
    layout : StateLayout
    stores : sequence of Store
    clock : callable
        Seconds, of the timeline and of what the stores stamp with.
    progress : callable, optional
        `progress(forward_steps, reverse_steps)`, called with every window.

    Attributes
    ----------
    begin_s : float
        When the sweep began, by the clock.
    seen_s : dict of kind to float
        Seconds that transfers took for a byte, the last ones above all; 0 if there were none.
    """

    def __init__(
        self,
        layout: StateLayout[State, ArrayT, PackingT],
        stores: Sequence[Store],
        clock: Callable[[], float],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.timeline, self.counts = Timeline(), Counts()
        self.clock, self._progress = clock, progress
        self._stores = stores
        self._layout: StateLayout[Any, Any, Any] = layout
        self.begin_s = clock()
        self.seen_s = {"write": 0.0, "read": 0.0}

    def record(self, sweep: Sweep) -> None:
        """Enter a window of computing into the timeline, and what the stores did meanwhile."""
        counts, timeline, layout = self.counts, self.timeline, self._layout
        counts.forward_steps += sweep.forward_steps
        counts.reverse_steps += sweep.reverse_steps
        counts.forward_s += sweep.forward_s
        counts.reverse_s += sweep.reverse_s
        # Within the window the two kinds alternate: draw one after the other.
        spent_s = sweep.forward_s + sweep.reverse_s
        at = max(sweep.window, sweep.last - spent_s) - self.begin_s
        turn = at + sweep.forward_s
        if sweep.forward_steps:
            count = sweep.forward_steps
            timeline.add("compute", "forward", at, turn, first=sweep.at, count=count)
        if sweep.reverse_steps:
            count, stop = sweep.reverse_steps, turn + sweep.reverse_s
            timeline.add("compute", "reverse", turn, stop, first=sweep.end, count=count)
        now = sweep.last - self.begin_s
        if isinstance(layout, Layouts):
            timeline.sample("fast", now, layout.held_bytes)
        else:
            timeline.sample("fast", now, sweep.used * layout.nbytes)
        self.drain()
        for store in self._stores:
            timeline.sample(store.name, now, store.stats.stored_bytes)
        if self._progress is not None:
            self._progress(counts.forward_steps, counts.reverse_steps)

    def drain(self) -> None:
        """Move the stores' finished transfers into the timeline."""
        begin = self.begin_s
        for store in self._stores:
            records = store.transfers
            while records:
                kind, key, start_s, stop_s, nbytes = records.popleft()
                if nbytes:
                    before_s, now_s = self.seen_s[kind], (stop_s - start_s) / nbytes
                    self.seen_s[kind] = now_s if not before_s else (3 * before_s + now_s) / 4
                self.timeline.add(
                    kind, kind, start_s - begin, stop_s - begin, first=key, nbytes=nbytes
                )

    def end_forward(self) -> None:
        """Note that the forward sweep is over."""
        self.timeline.end_forward_s = self.clock() - self.begin_s

    def stalled(self, since: float) -> None:
        """Enter what computing has waited since then, if it is more than a call takes."""
        now = self.clock()
        if now - since > _STALL_S:
            self.counts.stall_s += now - since
            self.timeline.add("compute", "stall", since - self.begin_s, now - self.begin_s)
