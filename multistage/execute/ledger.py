"""Counts and timeline of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..backends.base import Store
from ..schedule.timeline import Timeline
from ..states.layout import Layouts
from ..states.slots import StateLayout

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
        Steps run by `Advance` and `Tape`.
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
    written_s : float
        When the last write ended, by the clock.
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
        self.begin(self.begin_s)
        self.seen_s = {"write": 0.0, "read": 0.0}
        self.written_s = 0.0

    def begin(self, now: float) -> None:
        """Begin a window of computing."""
        counts = self.counts
        self._since = now
        self._steps = counts.forward_steps, counts.reverse_steps
        self._seconds = counts.forward_s, counts.reverse_s

    def record(self, now: float, at: int, end: int, used: float) -> None:
        """Enter the window into the timeline, and what the stores did meanwhile; begin another.

        Parameters
        ----------
        now : float
            When it ended, by the clock.
        at, end : int
            The state and the adjoint that were reached.
        used : float
            Slots that are taken.
        """
        counts, timeline, layout = self.counts, self.timeline, self._layout
        forward_steps = counts.forward_steps - self._steps[0]
        reverse_steps = counts.reverse_steps - self._steps[1]
        forward_s = counts.forward_s - self._seconds[0]
        reverse_s = counts.reverse_s - self._seconds[1]
        # Within the window the two kinds alternate: draw one after the other.
        start = max(self._since, now - forward_s - reverse_s) - self.begin_s
        turn = start + forward_s
        if forward_steps:
            timeline.add("compute", "forward", start, turn, first=at, count=forward_steps)
        if reverse_steps:
            stop = turn + reverse_s
            timeline.add("compute", "reverse", turn, stop, first=end, count=reverse_steps)
        held = layout.held_bytes if isinstance(layout, Layouts) else used * layout.nbytes
        timeline.sample("fast", now - self.begin_s, held)
        self.drain()
        for store in self._stores:
            timeline.sample(store.name, now - self.begin_s, store.stats.stored_bytes)
        if self._progress is not None:
            self._progress(counts.forward_steps, counts.reverse_steps)
        self.begin(now)

    def drain(self) -> None:
        """Move the stores' finished transfers into the timeline."""
        begin = self.begin_s
        for store in self._stores:
            records = store.transfers
            while records:
                kind, key, start_s, stop_s, nbytes = records.popleft()
                if nbytes:
                    before_s, now_s = self.seen_s[kind], (stop_s - start_s) / nbytes
                    if kind == "write":
                        self.written_s = stop_s
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
