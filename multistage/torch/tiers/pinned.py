"""`PinnedStore`: states in pinned host memory, copied by streams of their own.

On a machine without a CUDA device the same code runs on threads and plain
memory.  With a tier below, the oldest states, which are needed last, move on
to it when the pinned memory fills, and come back in reverse order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import cast

import torch
from torch import Tensor

from ...backends.base import BaseStore, CheckpointLost, Store, StoreStats, TransferRecord
from ...backends.lifetimes import Hold
from ...errors import ArgumentError, StoreError
from ...states.layout import Array, Layout
from ...support.interrupts import Shield, whole
from ..tensors.streams import CopyFailed, Streams, streams_for, the_device
from .copies import Copies, Entry, PinnedMemory, require_slots, slots_in
from .shuttle import SPARE, Shuttle


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
        self._device = the_device(device)
        self._rounded = self._device.type == "cuda"
        self._below = below
        self._given = streams
        self._streams: Streams | None = None
        self._hold = Hold(self.name)
        self._below_open = False
        self._memory: PinnedMemory | None = None
        self._copies: Copies | None = None
        self._shuttle: Shuttle | None = None

    # -------------------------------------------------------------------- life

    @property
    def transfers(self) -> deque[TransferRecord]:
        """Copies that are done, as their streams have them; those in flight come later."""
        if self._copies is not None:
            self._copies.tell()
        return self._told

    def as_store(self) -> Store:
        """Return this store for an executor whose layout is one of tensors.

        `Store.get` returns arrays of NumPy: that these are tensors only such a layout knows.
        """
        return cast(Store, self)

    def parts(self) -> Sequence[Store]:
        """Return this store, the tier below, and what that is built on."""
        return [self.as_store(), *(() if self._below is None else self._below.parts())]

    def check(self) -> None:
        """Raise StoreError if the tier below cannot be used."""
        if self._below is not None:
            self._below.check()

    def notes(self) -> list[str]:
        """Return what a report should say of the tier below."""
        return [] if self._below is None else self._below.notes()

    def buffer_bytes(self, layout: Layout) -> int:
        """Return 0: what it takes is a memory of its own; but for what is read ahead."""
        return 4 * layout.nbytes if layout.varied else 0

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
        whole(partial(self._take, layout), self.close)

    def _take(self, layout: Layout) -> None:
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
        self._nbytes = layout.nbytes
        self.stats = StoreStats()
        self._told.clear()
        streams = streams_for(self._device) if self._given is None else self._given
        self._streams = streams
        self._copies = Copies(layout, streams, self._told)
        self._memory = PinnedMemory(self.name, layout, streams, capacity, rounded=self._rounded)
        if below is not None:
            below.open(layout)
            self._below_open = True
        self._shuttle = Shuttle(self.name, self._memory, streams, below)
        self._shuttle.start(self._device)

    def close(self) -> None:
        """Stop everything, give memory back.  May be called twice."""
        with Shield(up=True):
            if self._hold.taken:
                self._close()

    def _close(self) -> None:
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
        self._streams = self._copies = self._shuttle = self._memory = None
        self._below_open = False

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
                if self._copies is not None:
                    self._copies.tell()
            except Exception as error:  # of the device
                failure = failure or error
        self._streams = self._copies = self._shuttle = self._memory = None
        return failure

    def _opened(self) -> tuple[Copies, Shuttle]:
        self._hold.check()
        assert self._copies is not None and self._shuttle is not None
        return self._copies, self._shuttle

    # ------------------------------------------------------------------ writes

    def put(self, key: int, arrays: Sequence[Tensor | Array], *, block: bool = False) -> bool:
        """Queue the copy of one state; see `Store.put`."""
        copies, shuttle = self._opened()
        slot = shuttle.take(block) if copies.fits(arrays) else None
        if slot is None:
            self.stats.refused += 1
            return False
        with Shield(up=True):  # half queued it would be waited for in vain
            shuttle.enter(copies.out(slot, key, arrays))
            stats, nbytes = self.stats, self._nbytes
            stats.stored_bytes += nbytes
            stats.writes += 1
            stats.bytes_written += nbytes
            stats.peak_stored_bytes = max(stats.peak_stored_bytes, stats.stored_bytes)
            shuttle.make_room()
        return True

    def wait_written(self, key: int) -> bool:
        """Block until the copy of `key` has left its source; False if it is lost."""
        copies, shuttle = self._opened()
        entry = shuttle.entries.get(key)
        if entry is None:
            return False
        assert entry.written is not None and self._streams is not None
        try:
            self._streams.synchronize(entry.written)
        except CopyFailed as error:
            shuttle.lose(entry, error)
        entry.sources = []
        copies.tell()
        return not entry.lost

    # ------------------------------------------------------------------- reads

    def prefetch(self, key: int) -> None:
        """Queue the copy of `key` to the device, when it is in pinned memory."""
        copies, shuttle = self._opened()
        entry = shuttle.entries.get(key)
        if entry is not None:
            with Shield(up=True):
                if shuttle.want(entry):
                    copies.land(entry)

    def get(self, key: int) -> list[Tensor]:
        """Return the state's tensors, for the compute stream.  Raises CheckpointLost."""
        copies, shuttle = self._opened()
        entry = shuttle.entries.get(key)
        if entry is None:
            raise CheckpointLost(f"tier {self.name!r} has no checkpoint {key}")
        self.prefetch(key)
        shuttle.wait(entry)
        if entry.lost:
            self._forget(entry)
            raise CheckpointLost(entry.lost)
        try:
            found = copies.landed(entry)
        except CopyFailed as error:
            shuttle.lose(entry, error)
            self._forget(entry)
            raise CheckpointLost(entry.lost) from error
        self.stats.reads += 1
        self.stats.bytes_read += self._nbytes
        copies.tell()
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
        copies, shuttle = self._opened()
        copies.let_go(entry)
        self.stats.stored_bytes -= self._nbytes
        shuttle.forget(entry)
