"""`PinnedStore`: states in pinned host memory, copied by streams of their own.

On a machine without a CUDA device the same code runs on threads and plain
memory.  With a tier below, the oldest states, which are wanted last, move on
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
* An `in` copy of a slot whose `out` copy is under way waits for its event.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...backends.base import BaseStore, CheckpointLost, Store, StoreStats, TransferRecord
from ...backends.lifetimes import Hold
from ...errors import ArgumentError, BudgetError, StoreError
from ...states.layout import Layout
from ...support.interrupts import Shield
from ..tensors.streams import CopyFailed, Event, Streams, streams_for, the_device

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 64 << 20  # most pinned memory that is taken at once
_FIRST_SLOTS = 64
_RETRY_S = 1e-3
_SPARE = 3  # slots kept free for the next states, where a tier below takes the oldest


def growth(size: int, capacity: int | None, *, rounded: bool) -> Iterator[int]:
    """Yield how many slots each block of memory has, within a capacity.

    Parameters
    ----------
    size : int
        Bytes of a slot.
    capacity : int or None
        Most bytes of all blocks; None if unbounded.
    rounded : bool
        Whether memory comes in powers of two, as PyTorch hands out what is
        pinned: then a block takes what it is rounded up to, and of that at
        least seven eighths are slots, while the capacity allows.

    Examples
    --------
    >>> list(growth(40, 400, rounded=False))
    [10]
    >>> list(growth(40, 400, rounded=True))
    [6, 3]
    """
    slots = 0
    left = capacity
    while True:
        # Twice as many each time: few allocations, and none for nothing.
        count = max(1, min(_BLOCK_BYTES // size, max(_FIRST_SLOTS, slots)))
        nbytes = count * size
        if rounded:
            nbytes = _power_of_two(nbytes)
            while 8 * (nbytes // size) * size < 7 * nbytes:
                nbytes *= 2
            while left is not None and nbytes > left:
                nbytes //= 2
            count = nbytes // size
        elif left is not None:
            count = min(count, left // size)
            nbytes = count * size
        if count < 1:
            return
        if left is not None:
            left -= nbytes
        slots += count
        yield count


def _power_of_two(number: int) -> int:
    """Return the least power of two that is not less."""
    return 1 << (number - 1).bit_length()


@dataclass(slots=True)
class _Slot:
    memory: Tensor
    lines: list[Tensor]
    used: Event | None = None  # of the last copy that touched it


@dataclass(slots=True)
class _Entry:
    """Where one state is."""

    key: int
    slot: _Slot | None
    written: Event | None = None  # of its `out` copy
    sources: list[Tensor] = field(default_factory=list)  # of that copy, until it is known done
    below: bool = False  # the tier below has it
    moving: bool = False  # the mover is at it
    lost: str = ""
    gone: bool = False  # dropped
    landing: list[Tensor] = field(default_factory=list)
    landed: Event | None = None
    wanted: bool = False
    read: bool = False  # since it was last wanted


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
        self._below = below
        self._given = streams
        self._streams: Streams | None = None
        self._hold = Hold(self.name)
        self._below_open = False
        self._mover: threading.Thread | None = None
        self._new_lock()
        self._entries: dict[int, _Entry] = {}

    # -------------------------------------------------------------------- life

    def _new_lock(self) -> None:
        # The computing thread takes the lock itself: entering a Condition, which
        # is Python code, Ctrl-C could come when it has the lock already.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    @property
    def transfers(self) -> deque[TransferRecord]:
        """Copies that are done, as their streams have them; those under way come later."""
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

    def _growth(self, layout: Layout, capacity: int | None) -> Iterator[int]:
        return growth(layout.nbytes, capacity, rounded=self._device.type == "cuda")

    def _slots(self, layout: Layout) -> int | None:
        capacity = self.capacity_bytes
        return None if capacity is None else sum(self._growth(layout, capacity))

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
        slots = self._slots(layout)
        least = 1 if self._below is None else _SPARE + 1
        if slots is not None and slots < least:
            enough = (layout.nbytes * k for k in itertools.count(1))
            needed = next(n for n in enough if sum(self._growth(layout, n)) >= least)
            raise BudgetError(
                f"tier {self.name!r}: its capacity of {self.capacity_bytes} bytes < "
                f"{needed} bytes needed for {least} states; raise it"
            )
        self._new_lock()  # a fork may have left the old one locked
        self._layout = layout
        self._most = slots
        self.stats = StoreStats()
        self._told.clear()
        for copies in self._copies.values():
            copies.clear()
        self._taken = 0  # slots so far
        self._growing = self._growth(layout, self.capacity_bytes)
        self._free: deque[_Slot] = deque()
        self._order: deque[_Entry] = deque()  # in pinned memory, the oldest first
        self._down_there: list[_Entry] = []  # in the tier below, the oldest first
        self._entries = {}
        self._urgent: deque[tuple[str, _Entry]] = deque()  # somebody waits
        self._tasks: deque[tuple[str, _Entry]] = deque()
        self._downs = 0  # states on their way down
        self._ups = 0  # on their way up though nobody waits yet
        self._below_full = False
        self._blocked = False  # the computing thread waits
        self._awaited: _Entry | None = None  # for this state, if it is for one
        self._closing = False
        self._streams = streams_for(self._device) if self._given is None else self._given
        self._grow()
        if self._below is not None:
            self._below.open(layout)
            self._below_open = True
            self._mover = threading.Thread(target=self._work, name="multistage-mover", daemon=True)
            self._mover.start()

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
        self._streams, self._mover, self._entries, self._below_open = None, None, {}, False

    def _shut(self) -> Exception | None:
        """Give everything back; return what failed: the rest is given back all the same."""
        failure: Exception | None = None
        if self._mover is not None:
            with self._lock:
                self._closing = True
                self._changed.notify_all()
            if self._mover.ident is not None:  # it was started
                self._mover.join()
            self._mover = None
        if self._below_open:
            assert self._below is not None
            try:
                self._below.close()
            except Exception as error:
                failure = error
            self._below_open = False
        streams = self._streams
        if streams is None:
            return failure
        try:
            streams.close()
            self._tell()
        except Exception as error:  # of the device
            failure = failure or error
        self._streams = None
        self._free.clear()
        self._order.clear()
        self._entries = {}
        return failure

    def _grow(self) -> bool:
        """Take another block of memory; return whether there was any to take."""
        assert self._streams is not None
        size, count = self._layout.nbytes, next(self._growing, 0)
        if count < 1:
            return False
        try:
            memory = self._streams.host(count * size)
        except (RuntimeError, MemoryError) as error:
            if not self._taken:
                raise
            logger.warning("tier %r takes no more memory: %s", self.name, error)
            self._most, self._growing = self._taken, iter(())
            return False
        for k in range(count):
            piece = memory[k * size : (k + 1) * size]
            lines = [piece[leaf.offset : leaf.offset + leaf.nbytes] for leaf in self._layout.leaves]
            self._free.append(_Slot(piece, lines))
        self._taken += count
        return True

    # ------------------------------------------------------------------ writes

    def put(self, key: int, arrays: Sequence[Any], *, block: bool = False) -> bool:
        """Queue the copy of one state; see `Store.put`."""
        self._hold.check()
        streams = self._streams
        assert streams is not None
        slot = self._take(block)
        if slot is None:
            self.stats.refused += 1
            return False
        with Shield(up=True):  # half queued it would be waited for in vain
            self._fill(slot, key, arrays)
        return True

    def _fill(self, slot: _Slot, key: int, arrays: Sequence[Any]) -> None:
        """Queue the copy of a state into a slot."""
        streams = self._streams
        assert streams is not None
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
        entry = _Entry(key, slot, written, sources)
        stats, nbytes = self.stats, self._layout.nbytes
        with self._lock:
            self._entries[key] = entry
            self._order.append(entry)
            stats.stored_bytes += nbytes
        stats.writes += 1
        stats.bytes_written += nbytes
        stats.peak_stored_bytes = max(stats.peak_stored_bytes, stats.stored_bytes)
        self._make_room()

    def _take(self, block: bool) -> _Slot | None:
        with self._lock:
            if self._free or self._grow():
                return self._free.popleft()
            if block:
                with self._waiting(None):
                    self._changed.wait_for(lambda: self._free or not self._downs)
            return self._free.popleft() if self._free else None

    @contextmanager
    def _waiting(self, entry: _Entry | None) -> Iterator[None]:
        """Tell the mover that the computing thread waits, and for what.  Holds the lock."""
        self._blocked, self._awaited = True, entry
        self._changed.notify_all()
        try:
            yield
        finally:
            self._blocked, self._awaited = False, None

    def _make_room(self) -> None:
        """Have the mover take the oldest states down, so that some slots stay free."""
        if self._below is None or self._most is None:
            return
        with self._lock:
            left = len(self._free) + self._most - self._taken + self._downs
            while left < _SPARE and self._order and not self._below_full:
                entry = self._order.popleft()
                if entry.slot is None or entry.gone or entry.moving:
                    continue
                entry.moving = True
                self._tasks.append(("down", entry))
                self._downs += 1
                left += 1
            self._changed.notify_all()

    def wait_written(self, key: int) -> bool:
        """Block until the copy of `key` has left its source; False if it is lost."""
        self._hold.check()
        entry = self._entries.get(key)
        if entry is None:
            return False
        assert self._streams is not None and entry.written is not None
        try:
            self._streams.synchronize(entry.written)
        except CopyFailed as error:
            self._lose(entry, error)
        entry.sources = []
        self._tell()
        return not entry.lost

    def _lose(self, entry: _Entry, error: Exception) -> None:
        with self._lock:
            entry.lost = entry.lost or f"checkpoint {entry.key} could not be copied: {error}"

    # ------------------------------------------------------------------- reads

    def prefetch(self, key: int) -> None:
        """Queue the copy of `key` to the device, when it is in pinned memory."""
        self._hold.check()
        entry = self._entries.get(key)
        if entry is None:
            return
        with Shield(up=True):
            with self._lock:
                entry.read = False
                if entry.slot is None or entry.moving:
                    entry.wanted = True
                    self._fetch(entry)
                    return
            self._land(entry)

    def _fetch(self, entry: _Entry) -> None:
        """Have the mover bring a state up.  Holds the lock."""
        if entry.below and entry.slot is None and not entry.moving:
            entry.moving = True
            self._urgent.append(("up", entry))  # first come, first served: no later one
            self._changed.notify_all()  # may take the last free slot

    def _land(self, entry: _Entry) -> None:
        """Queue the copy to the device of a state that is in pinned memory."""
        streams = self._streams
        assert streams is not None and entry.slot is not None
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
        self._hold.check()
        entry = self._entries.get(key)
        if entry is None:
            raise CheckpointLost(f"tier {self.name!r} has no checkpoint {key}")
        streams = self._streams
        assert streams is not None
        self.prefetch(key)
        with self._lock, self._waiting(entry):
            self._changed.wait_for(
                lambda: entry.lost or (entry.slot is not None and not entry.moving)
            )
        if entry.lost:
            self._forget(entry)
            raise CheckpointLost(entry.lost)
        try:
            self._land(entry)
            # Of the way out, too: a copy that failed left another state's bytes in the slot.
            streams.wait("compute", entry.written)
            streams.wait("compute", entry.landed)
        except CopyFailed as error:
            self._lose(entry, error)
            self._forget(entry)
            raise CheckpointLost(entry.lost) from error
        self.stats.reads += 1
        self.stats.bytes_read += self._layout.nbytes
        self._tell()
        found, entry.landing, entry.landed = entry.landing, [], None
        streams.used_by("compute", found)
        with self._lock:
            entry.wanted, entry.read = False, True
            self._changed.notify_all()
        return found

    def drop(self, key: int) -> None:
        """Free the copy of `key`."""
        self._hold.check()
        entry = self._entries.get(key)
        if entry is not None:
            with Shield(up=True):
                self._forget(entry)

    def _forget(self, entry: _Entry) -> None:
        streams = self._streams
        assert streams is not None
        # Of copies that nobody waited for.
        if entry.landed is not None:
            streams.used_by("in", entry.landing)
            entry.landing, entry.landed = [], None
        if entry.sources:
            streams.used_by("out", entry.sources)
            entry.sources = []
        with self._lock:
            entry.gone = True
            self._entries.pop(entry.key, None)
            self.stats.stored_bytes -= self._layout.nbytes
            if not entry.moving:
                self._release(entry)
            self._bring_back()

    def _release(self, entry: _Entry) -> None:
        """Give back what a dropped state holds.  Holds the lock."""
        if entry.slot is not None:
            self._free.append(entry.slot)
            entry.slot = None
        while self._order and self._order[-1].gone:
            self._order.pop()
        if entry.below:
            self._tasks.append(("drop", entry))
            entry.below = False
        self._changed.notify_all()

    def _bring_back(self) -> None:
        """Have the mover bring the latest of the states below up, while slots are free."""
        there = self._down_there
        while there and (there[-1].gone or there[-1].slot is not None):
            there.pop()
        if there and not there[-1].moving and not self._ups and len(self._free) > _SPARE:
            entry = there.pop()
            entry.moving = True
            self._ups += 1
            self._tasks.append(("ahead", entry))
            self._changed.notify_all()

    # --------------------------------------------------------------- the mover

    def _work(self) -> None:
        cuda = self._device.type == "cuda"
        with torch.cuda.device(self._device) if cuda else contextlib.nullcontext():
            self._move()

    def _move(self) -> None:
        """Move states between pinned memory and the tier below; the only one to call that."""
        while True:
            with self._lock:
                self._changed.wait_for(lambda: self._urgent or self._tasks or self._closing)
                if self._closing:
                    return
                task, entry = (self._urgent or self._tasks).popleft()
            try:
                if task == "down":
                    self._down(entry)
                elif task == "drop":
                    assert self._below is not None
                    self._below.drop(entry.key)
                elif not self._up(entry):
                    with self._lock:
                        if not self._urgent and not self._tasks:
                            self._changed.wait(_RETRY_S)
                        self._tasks.append((task, entry))
                    continue
            except Exception as error:  # whatever a tier raises: the state is lost, not the run
                with self._lock:
                    entry.lost = (
                        f"tier {self.name!r} could not move checkpoint {entry.key}: {error}"
                    )
                    entry.moving = False
                    if entry.gone:
                        self._release(entry)
            with self._lock:
                self._downs -= task == "down"
                self._ups -= task == "ahead"
                self._changed.notify_all()

    def _down(self, entry: _Entry) -> None:
        below, streams, slot = self._below, self._streams, entry.slot
        assert below is not None and streams is not None and slot is not None
        kept = False
        if not entry.gone:
            assert entry.written is not None
            streams.synchronize(entry.written)
            lines = [line.numpy() for line in slot.lines]
            kept = below.put(entry.key, lines, block=True) and below.wait_written(entry.key)
        with self._lock:
            entry.moving, entry.below = False, kept
            if entry.gone:
                self._release(entry)
            elif not kept:
                self._below_full = True  # this one stays, and all after it
            elif not entry.wanted:
                entry.slot = None
                self._free.append(slot)
                self._down_there.append(entry)

    def _found_slot(self, *, unread: bool) -> bool:
        """Whether a slot is free; if none is, take one whose state is below too and was read.

        Or was not read, which costs its way up once more.
        """
        if not self._free:
            for other in self._entries.values():
                if (
                    other.below
                    and other.slot is not None
                    and not other.moving
                    and (other.read or unread)
                ):
                    self._free.append(other.slot)
                    other.slot = None
                    break
        return bool(self._free)

    def _up(self, entry: _Entry) -> bool:
        """Bring a state up; return False if something else must come first.

        A slot for it is given back by the computing thread, in time.  Unless
        that waits itself: for another state, as when one was lost and an older
        one is wanted instead; for a slot, that a state on its way down will
        leave; or for this very state.  Then to wait for it would be for ever.
        """
        below, streams = self._below, self._streams
        assert below is not None and streams is not None
        with self._lock:
            self._changed.wait_for(
                lambda: (
                    self._found_slot(unread=self._awaited is entry)
                    or entry.gone
                    or self._closing
                    or self._blocked
                )
            )
            if entry.gone or self._closing:
                entry.moving = False
                self._release(entry)
                return True
            if not self._free:
                if self._awaited is not entry or self._downs:
                    return False
                raise OSError("no slot is free, and the states in them are nowhere else")
            slot = self._free.popleft()
        try:
            if slot.used is not None:
                with contextlib.suppress(CopyFailed):  # of the state that had the slot before
                    streams.synchronize(slot.used)
            for line, array in zip(slot.lines, below.get(entry.key), strict=True):
                np.copyto(line.numpy(), array)
        except BaseException:
            with self._lock:
                self._free.append(slot)
            raise
        slot.used = None
        with self._lock:
            entry.slot, entry.moving = slot, False
            if entry.gone:
                self._release(entry)
        return True
