"""`PinnedStore`: states in pinned host memory, copied by streams of their own.

On a machine without a CUDA device the same code runs on threads and plain
memory.  With a tier below, the oldest states, which are needed last, move on
to it when the pinned memory fills, and come back in reverse order.

Why each reuse of memory is safe.  A *slot* is a piece of pinned memory; `out`
copies into it, `in` copies out of it.

* The source of an `out` copy: written on the compute stream before `put`, so
  `out` waits for an event recorded there first.  It is not written again
  before `wait_written`, which waits for the copy's event: the caller's promise.
  Nor is its memory handed on: the store refers to it until then.  Of a state
  that is dropped before, the allocator is told that `out` uses it.
* A slot that is filled again: the event of whatever used it last, the `in`
  copy that read it, is kept with it, and `out` waits for that: the stream that
  computes now need not be the one that waited for that copy.  A slot the tier
  below reads is free only when that tier has written it.
* The target of an `in` copy: allocated on the compute stream, whose earlier
  work may still be using that memory; `in` waits for an event recorded there
  after the allocation.  Its reader, the compute stream, waits for the copy's
  event in `get`; should that be another stream than allocated it, the allocator
  is told.  So it is of `in` if nobody gets it.
* An `in` copy of a slot whose `out` copy is in flight waits for its event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...backends.base import BaseStore, CheckpointLost, Store, StoreStats, TransferRecord
from ...backends.lifetimes import Hold
from ...errors import ArgumentError, StoreError
from ...states.layout import Layout
from ...support.interrupts import Shield
from ..tensors.streams import CopyFailed, Event, Streams, streams_for, the_device
from .pinned_memory import PinnedMemory, Slot, require_slots, slots_in
from .shuttle import SPARE, Entry, Shuttle


class PinnedStore(BaseStore):
    """States in pinned host memory, and beyond it in another tier.

    Parameters
    ----------
    capacity_bytes : int or None
        Most pinned memory it takes; None if unbounded.
    device : torch.device
        Where the states come from.
    below : Store, optional
        Takes the oldest states when the memory is used.
    streams : Streams, optional
        In place of the device's.

    Notes
    -----
    A `Store` whose arrays are one-dimensional uint8 tensors on `device`, or
    NumPy arrays if that is the CPU.  `get` returns tensors.
    """

    queue_depth = 2

    def __init__(
        self,
        capacity_bytes: int | None,
        device: torch.device,
        below: Store | None = None,
        streams: Streams | None = None,
    ) -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise ArgumentError(f"capacity_bytes={capacity_bytes} must not be negative")
        self.name = "pinned" if below is None else f"pinned+{below.name}"
        self.capacity_bytes = capacity_bytes
        self.exact = below is None or below.exact
        self.stats = StoreStats()
        self._told: deque[TransferRecord] = deque(maxlen=100_000)
        self._copies: dict[str, deque[tuple[int, Event, Event]]] = {
            "write": deque(),
            "read": deque(),
        }
        self._device = the_device(device)
        self._rounded = self._device.type == "cuda"
        self._below = below
        self._given = streams
        self._streams: Streams | None = None
        self._hold = Hold(self.name)
        self._below_open = False
        self._memory: PinnedMemory | None = None
        self._shuttle: Shuttle | None = None

    # -------------------------------------------------------------------- life

    @property
    def transfers(self) -> deque[TransferRecord]:
        """Copies that are done, as their streams have them; those in flight come later."""
        self._tell()
        return self._told

    def _tell(self) -> None:
        streams = self._streams
        for kind, copies in self._copies.items():
            while copies and streams is not None:
                key, began, ended = copies[0]
                span = streams.span(began, ended)
                if span is None:
                    break
                copies.popleft()
                self._told.append(TransferRecord(kind, key, *span, self._layout.nbytes))  # type: ignore[arg-type]

    def parts(self) -> Sequence[Store]:
        """Return this store, the tier below, and what that is built on."""
        return [self, *(() if self._below is None else self._below.parts())]

    def check(self) -> None:
        """Raise StoreError if the tier below cannot be used."""
        if self._below is not None:
            self._below.check()

    def notes(self) -> list[str]:
        """Return what a report should say of the tier below."""
        return [] if self._below is None else self._below.notes()

    def buffer_bytes(self, layout: Layout) -> int:
        """Return 0: what it takes is a memory of its own."""
        return 0

    def _slots(self, layout: Layout) -> int | None:
        return slots_in(self.capacity_bytes, layout.nbytes, rounded=self._rounded)

    def capacity_states(self, layout: Layout) -> int | None:
        """Return how many states fit, the tier below counted."""
        slots = self._slots(layout)
        if slots is None or self._below is None:
            return slots
        below = self._below.capacity_states(layout)
        return None if below is None else slots + below

    def open(self, layout: Layout) -> None:
        """Make streams, take the first memory.

        Raises
        ------
        BudgetError
            For less than one state.
        StoreError
            If there is no memory, no thread, the tier below cannot be opened,
            or the store is open.
        """
        self._hold.take()
        try:
            self._open(layout)
        except BaseException as error:
            self.close()
            if isinstance(error, (RuntimeError, MemoryError)):  # no thread, no memory
                raise StoreError(f"tier {self.name!r} cannot be used: {error}") from error
            raise

    def _open(self, layout: Layout) -> None:
        below, capacity = self._below, self.capacity_bytes
        least = 1 if below is None else SPARE + 1
        require_slots(self.name, capacity, layout.nbytes, least, rounded=self._rounded)
        self._layout = layout
        self.stats = StoreStats()
        self._told.clear()
        for copies in self._copies.values():
            copies.clear()
        streams = streams_for(self._device) if self._given is None else self._given
        self._streams = streams
        self._memory = PinnedMemory(self.name, layout, streams, capacity, rounded=self._rounded)
        if below is not None:
            below.open(layout)
            self._below_open = True
        self._shuttle = Shuttle(self.name, self._memory, streams, below)
        self._shuttle.start(self._device)

    def close(self) -> None:
        """Stop everything, give memory back.  May be called twice."""
        if not self._hold.taken:
            return
        failure: Exception | None = None
        if self._hold.foreign:
            self._abandon()
        else:
            failure = self._shut()
        self._hold.give_back()
        if failure is not None:
            raise failure

    def _abandon(self) -> None:
        """In a forked child: leave the threads to the parent."""
        if self._below_open and self._below is not None:
            self._below.close()
        self._streams, self._shuttle, self._memory, self._below_open = None, None, None, False

    def _shut(self) -> Exception | None:
        """Give everything back; return what failed: the rest is given back all the same."""
        failure: Exception | None = None
        if self._shuttle is not None:
            self._shuttle.stop()
        if self._below_open:
            assert self._below is not None
            try:
                self._below.close()
            except Exception as error:
                failure = error
            self._below_open = False
        if self._streams is not None:
            try:
                self._streams.close()
                self._tell()
            except Exception as error:  # of the device
                failure = failure or error
        self._streams = self._shuttle = self._memory = None
        return failure

    def _opened(self) -> tuple[Streams, Shuttle]:
        self._hold.check()
        assert self._streams is not None and self._shuttle is not None
        return self._streams, self._shuttle

    # ------------------------------------------------------------------ writes

    def put(self, key: int, arrays: Sequence[Any], *, block: bool = False) -> bool:
        """Queue the copy of one state; see `Store.put`."""
        streams, shuttle = self._opened()
        slot = shuttle.take(block)
        if slot is None:
            self.stats.refused += 1
            return False
        with Shield(up=True):  # half queued it would be waited for in vain
            shuttle.enter(self._filled(streams, slot, key, arrays))
            stats, nbytes = self.stats, self._layout.nbytes
            stats.stored_bytes += nbytes
            stats.writes += 1
            stats.bytes_written += nbytes
            stats.peak_stored_bytes = max(stats.peak_stored_bytes, stats.stored_bytes)
            shuttle.make_room()
        return True

    def _filled(self, streams: Streams, slot: Slot, key: int, arrays: Sequence[Any]) -> Entry:
        """Queue the copy of a state into a slot."""
        streams.wait("out", streams.record("compute"))
        if slot.used is not None:
            streams.wait("out", slot.used)
        began = streams.record("out")
        sources = [a if isinstance(a, Tensor) else torch.from_numpy(a) for a in arrays]
        for line, source in zip(slot.lines, sources, strict=True):
            if line.numel():
                streams.copy("out", line, source)
        written = slot.used = streams.record("out")
        self._copies["write"].append((key, began, written))
        return Entry(key, slot, written, sources)

    def wait_written(self, key: int) -> bool:
        """Block until the copy of `key` has left its source; False if it is lost."""
        streams, shuttle = self._opened()
        entry = shuttle.entries.get(key)
        if entry is None:
            return False
        assert entry.written is not None
        try:
            streams.synchronize(entry.written)
        except CopyFailed as error:
            shuttle.lose(entry, error)
        entry.sources = []
        self._tell()
        return not entry.lost

    # ------------------------------------------------------------------- reads

    def prefetch(self, key: int) -> None:
        """Queue the copy of `key` to the device, when it is in pinned memory."""
        streams, shuttle = self._opened()
        entry = shuttle.entries.get(key)
        if entry is not None:
            with Shield(up=True):
                if shuttle.want(entry):
                    self._land(streams, entry)

    def _land(self, streams: Streams, entry: Entry) -> None:
        """Queue the copy to the device of a state that is in pinned memory."""
        assert entry.slot is not None
        if entry.landed is not None:
            return
        target = streams.empty(self._layout.nbytes)
        leaves = self._layout.leaves
        entry.landing = [target[leaf.offset : leaf.offset + leaf.nbytes] for leaf in leaves]
        streams.wait("in", streams.record("compute"))
        if entry.slot.used is not None:
            streams.wait("in", entry.slot.used)
        began = streams.record("in")
        for line, piece in zip(entry.slot.lines, entry.landing, strict=True):
            if line.numel():
                streams.copy("in", piece, line)
        entry.landed = entry.slot.used = streams.record("in")
        self._copies["read"].append((entry.key, began, entry.landed))

    def get(self, key: int) -> list[Any]:
        """Return the state's tensors, for the compute stream.  Raises CheckpointLost."""
        streams, shuttle = self._opened()
        entry = shuttle.entries.get(key)
        if entry is None:
            raise CheckpointLost(f"tier {self.name!r} has no checkpoint {key}")
        self.prefetch(key)
        shuttle.wait(entry)
        if entry.lost:
            self._forget(entry)
            raise CheckpointLost(entry.lost)
        try:
            self._land(streams, entry)
            assert entry.written is not None and entry.landed is not None
            # Of the way out, too: a copy that failed left another state's bytes in the slot.
            streams.wait("compute", entry.written)
            streams.wait("compute", entry.landed)
        except CopyFailed as error:
            shuttle.lose(entry, error)
            self._forget(entry)
            raise CheckpointLost(entry.lost) from error
        self.stats.reads += 1
        self.stats.bytes_read += self._layout.nbytes
        self._tell()
        found, entry.landing, entry.landed = entry.landing, [], None
        streams.used_by("compute", found)
        shuttle.was_read(entry)
        return found

    def drop(self, key: int) -> None:
        """Free the copy of `key`."""
        _, shuttle = self._opened()
        entry = shuttle.entries.get(key)
        if entry is not None:
            with Shield(up=True):
                self._forget(entry)

    def _forget(self, entry: Entry) -> None:
        streams, shuttle = self._opened()
        # Of copies that nobody waited for.
        if entry.landed is not None:
            streams.used_by("in", entry.landing)
            entry.landing, entry.landed = [], None
        if entry.sources:
            streams.used_by("out", entry.sources)
            entry.sources = []
        self.stats.stored_bytes -= self._layout.nbytes
        shuttle.forget(entry)
