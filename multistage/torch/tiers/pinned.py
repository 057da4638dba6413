"""`PinnedStore`: states in pinned host memory, copied by streams of their own.

On a machine without a CUDA device the same code runs on threads and plain
memory.  With a store below, the oldest states, which are needed last, move on
to it when few slots are left, and are read from there.

The computing thread alone calls the store below, whose writes and reads are made by threads
of that store: what has ended is noticed at the next call.  A state keeps its slot
until the store below has written it.  What is read from below passes through a free slot, or
through other memory if there is none: no read waits for a slot.

Why each reuse of memory is safe.  A *slot* is a piece of pinned memory; `out`
copies into it, `in` copies out of it.

* The source of an `out` copy: written on the compute stream before `put`, so
  `out` waits for an event recorded there first.  It is not written again
  before `wait_written`, which waits for the copy's event: the caller's promise.
  Nor is its memory handed on: the store refers to it until then.  Of a state
  that is dropped before, the allocator is told that `out` uses it.
* A slot that is filled again: the event of whatever used it last, the `in`
  copy that read it, is kept with it, and `out` waits for that: the stream that
  computes now need not be the one that waited for that copy.  A slot that the store
  below reads is free only when that has written it.
* The target of an `in` copy: allocated on the compute stream, whose earlier
  work may still be using that memory; `in` waits for an event recorded there
  after the allocation.  Its reader, the compute stream, waits for the copy's
  event in `get`; should that be another stream than allocated it, the allocator
  is told; likewise of `in`, if the state is not fetched.
* An `in` copy of a slot whose `out` copy is in flight waits for its event.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, cast

import numpy as np
import torch
from torch import Tensor

from ...backends.base import BaseStore, CheckpointLost, Store, StoreStats, TransferRecord
from ...backends.lifetimes import Hold
from ...errors import ArgumentError, BudgetError, StoreError
from ...states.layout import ALIGN, Array, Layout
from ...support.interrupts import Shield, whole
from ..tensors.streams import CopyFailed, Event, Streams, streams_for, the_device

_log = logging.getLogger(__name__)

SPARE = 3  # slots kept free for the next states, where a store below takes the oldest
_BLOCK_BYTES = 64 << 20  # most pinned memory that is taken at once
_FIRST_SLOTS = 64
_LONG_S = 60.0  # of one wait for the store below


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
            nbytes = 1 << (nbytes - 1).bit_length()
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


@dataclass(slots=True)
class Slot:
    """Pinned memory for one state."""

    memory: Tensor
    used: Event | None = None  # of the last copy that touched it


@dataclass(eq=False, slots=True)
class _State:
    """Where one state is."""

    key: int
    number: int  # in the store below: the key may be put again while a write there goes on
    slot: Slot | None
    places: Sequence[tuple[int, int]]  # of its tensors in a slot: where they begin, and their bytes
    written: Event  # of its `out` copy
    sources: list[Tensor]  # of that copy, until it is known done
    sinking: bool = False  # the store below writes it
    below: bool = False  # the store below has it
    lost: str = ""
    gone: bool = False  # dropped
    landing: list[Tensor] = field(default_factory=list)
    landed: Event | None = None

    def lines(self, memory: Tensor) -> list[Tensor]:
        """Return the parts of some memory in which its tensors lie."""
        return [memory[at : at + nbytes] for at, nbytes in self.places]


class PinnedStore(BaseStore):
    """States in pinned host memory, and beyond it in another store.

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
        self._below, self._given = below, streams
        self._below_open = False
        self._hold = Hold(self.name)
        self._opened: Streams | None = None

    # -------------------------------------------------------------------- life

    @property
    def transfers(self) -> deque[TransferRecord]:
        """Copies that are done, as their streams have them; those in flight come later."""
        if self._opened is not None:
            self._tell()
        return self._told

    def as_store(self) -> Store:
        """Return this store for an executor whose layout is one of tensors.

        `Store.get` returns arrays of NumPy: that these are tensors only such a layout knows.
        """
        return cast(Store, self)

    def parts(self) -> Sequence[Store]:
        """Return this store, the store below, and what that is built on."""
        return [self.as_store(), *(() if self._below is None else self._below.parts())]

    def check(self) -> None:
        """Raise StoreError if the store below cannot be used."""
        if self._below is not None:
            self._below.check()

    def notes(self) -> list[str]:
        """Return what a report should say of the store below."""
        return [] if self._below is None else self._below.notes()

    def buffer_bytes(self, layout: Layout) -> int:
        """Return 0: what it takes is a memory of its own; but for what is read ahead."""
        return 4 * layout.nbytes if layout.varied else 0

    def _slots(self, nbytes: int, capacity: int | None) -> int | None:
        if capacity is None:
            return None
        return sum(growth(nbytes, capacity, rounded=self._rounded))

    def capacity_states(self, layout: Layout) -> int | None:
        """Return how many states fit, the store below counted."""
        slots = self._slots(layout.nbytes, self.capacity_bytes)
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
            If there is no memory, no thread, the store below cannot be opened,
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
        self._require_slots(layout.nbytes, 1 if self._below is None else SPARE + 1)
        self._layout, self._nbytes = layout, layout.nbytes
        self._places = [(leaf.offset, leaf.nbytes) for leaf in layout.leaves]
        self.stats = StoreStats()
        self._told.clear()
        self._states: dict[int, _State] = {}
        self._order: deque[_State] = deque()  # in pinned memory, the oldest first
        self._sinking: deque[_State] = deque()  # on their way down
        self._below_full = self._below is None
        self._next_number = 0
        self._queued: dict[Literal["write", "read"], deque[tuple[int, Event, Event]]] = {
            "write": deque(),
            "read": deque(),
        }
        self._free: deque[Slot] = deque()
        self._taken = 0  # slots so far
        self._most = self._slots(layout.nbytes, self.capacity_bytes)  # fewer once memory runs out
        self._growing = growth(layout.nbytes, self.capacity_bytes, rounded=self._rounded)
        self._opened = streams_for(self._device) if self._given is None else self._given
        self._grow()
        if self._below is not None:
            self._below.open(layout)
            self._below_open = True

    def _require_slots(self, nbytes: int, least: int) -> None:
        """Raise BudgetError if the capacity holds fewer than `least` states of so many bytes."""
        slots = self._slots(nbytes, self.capacity_bytes)
        if slots is None or slots >= least:
            return
        enough = (nbytes * k for k in itertools.count(1))
        needed = next(n for n in enough if (self._slots(nbytes, n) or 0) >= least)
        raise BudgetError(
            f"tier {self.name!r}: its capacity of {self.capacity_bytes} bytes < "
            f"{needed} bytes needed for {least} states; raise it"
        )

    def close(self) -> None:
        """Stop everything, give memory back.  May be called twice."""
        with Shield(up=True):
            if self._hold.taken:
                self._close()

    def _close(self) -> None:
        failure: Exception | None = None
        if self._below_open:
            assert self._below is not None
            try:
                self._below.close()
            except Exception as error:  # the rest is given back all the same
                failure = error
            self._below_open = False
        if self._opened is not None and not self._hold.foreign:  # a child leaves threads alone
            try:
                self._opened.close()
                self._tell()
            except Exception as error:  # of the device
                failure = failure or error
        self._opened = None
        for name in ("_states", "_order", "_sinking", "_free", "_queued"):
            self.__dict__.pop(name, None)
        self._hold.give_back()
        if failure is not None:
            raise failure

    @property
    def _streams(self) -> Streams:
        self._hold.check()
        assert self._opened is not None
        return self._opened

    def _tell(self) -> None:
        """Add to `transfers` the copies that are done by now, as their streams say."""
        assert self._opened is not None
        for kind, copies in self._queued.items():
            while copies:
                key, began, ended = copies[0]
                span = self._opened.span(began, ended)
                if span is None:
                    break
                copies.popleft()
                self._told.append(TransferRecord(kind, key, *span, self._nbytes))

    # ------------------------------------------------------------------- slots

    def _grow(self) -> bool:
        """Take another block of memory; return whether there was any to take."""
        size, count = self._nbytes, next(self._growing, 0)
        if count < 1:
            return False
        try:
            memory = self._streams.host(count * size)
        except (RuntimeError, MemoryError) as error:
            if not self._taken:
                raise
            _log.warning("tier %r takes no more memory: %s", self.name, error)
            self._most, self._growing = self._taken, iter(())
            return False
        for k in range(count):
            self._free.append(Slot(memory[k * size : (k + 1) * size]))
        self._taken += count
        return True

    def _slot(self, block: bool) -> Slot | None:
        """Return a slot for another state, None if there is none."""
        while True:
            with Shield(up=True):
                self._advance()
                if self._free or self._grow():
                    return self._free.popleft()
            if not block:
                return None
            if self._sinking:
                assert self._below is not None
                self._below.ended(self._sinking[0].number, _LONG_S)
            elif self._below_full or not self._order:
                return None
            elif self._is_copied(self._order[0]):
                # What is refused now would be so again: this one stays, and all after it.
                self._below_full = not self._sink(self._order[0], block=True)

    def _is_copied(self, state: _State) -> bool:
        """Wait for the `out` copy of a state; return whether it is not lost."""
        try:
            self._streams.synchronize(state.written)
        except CopyFailed as error:
            state.lost = state.lost or f"checkpoint {state.key} could not be copied: {error}"
        return not state.lost

    def _release(self, state: _State) -> None:
        """Give back the slot of a state, whose next user waits for the last copy of it."""
        if state.slot is not None:
            self._free.append(state.slot)
            state.slot = None

    # --------------------------------------------------------------- the store below

    def _advance(self) -> None:
        """Note which writes below have ended; begin others, so that some slots stay free."""
        while self._sinking and self._below is not None:
            state = self._sinking[0]
            if not self._below.ended(state.number, 0.0):
                break
            self._sinking.popleft()
            self._sunk(state, self._below)
        if self._most is None:
            return
        left = len(self._free) + self._most - self._taken + len(self._sinking)
        while left < SPARE and self._order and not self._below_full:
            state = self._order[0]
            if state.slot is None or state.gone or state.lost:
                self._order.popleft()
            elif not state.written.query():
                break
            elif not self._is_copied(state):
                self._order.popleft()
            elif self._sink(state):
                left += 1
            else:
                break

    def _sink(self, state: _State, *, block: bool = False) -> bool:
        """Queue the write of the oldest state below; return whether it was accepted."""
        assert state.slot is not None and self._below is not None
        lines = [line.numpy() for line in state.lines(state.slot.memory)]
        taken = False
        try:
            taken = self._below.put(state.number, lines, block=block)
        except Exception:  # whatever a store raises: the state stays
            _log.debug("checkpoint %d could not be moved", state.key, exc_info=True)
        if taken:
            with Shield(up=True):
                state.sinking = True
                self._sinking.append(state)
                self._order.popleft()
        return taken

    def _sunk(self, state: _State, below: Store) -> None:
        """Enter what became of a write below."""
        state.sinking = False
        try:
            state.below = below.wait_written(state.number)
        except Exception:
            _log.debug("checkpoint %d could not be moved", state.key, exc_info=True)
        self._below_full = self._below_full or not (state.below or state.gone)
        if state.below or state.gone:
            self._release(state)
        if state.below and state.gone:
            below.drop(state.number)

    # ------------------------------------------------------------------ writes

    def put(self, key: int, arrays: Sequence[Tensor | Array], *, block: bool = False) -> bool:
        """Queue the copy of one state; see `Store.put`."""
        self._hold.check()
        places, nbytes = self._placed(arrays)
        slot = self._slot(block) if nbytes <= self._nbytes else None
        if slot is None:
            self.stats.refused += 1
            return False
        with Shield(up=True):  # half queued it would be waited for in vain
            self.drop(key)  # that was not dropped yet
            state = self._states[key] = self._out(slot, key, arrays, places)
            if self._below is not None:
                self._order.append(state)
            stats, nbytes = self.stats, self._nbytes
            stats.stored_bytes += nbytes
            stats.writes += 1
            stats.bytes_written += nbytes
            stats.peak_stored_bytes = max(stats.peak_stored_bytes, stats.stored_bytes)
            self._advance()
        return True

    def _placed(self, arrays: Sequence[Tensor | Array]) -> tuple[list[tuple[int, int]], int]:
        """Return where in a slot the tensors of a state lie, and where they end."""
        if not self._layout.varied:
            return self._places, self._nbytes
        places, at = [], 0
        for array in arrays:
            places.append((at, array.nbytes))
            at += -(-array.nbytes // ALIGN) * ALIGN
        return places, at

    def _out(
        self,
        slot: Slot,
        key: int,
        arrays: Sequence[Tensor | Array],
        places: Sequence[tuple[int, int]],
    ) -> _State:
        """Queue the copy of a state into a slot."""
        streams = self._streams
        streams.wait("out", streams.record("compute"))
        if slot.used is not None:
            streams.wait("out", slot.used)
        began = streams.record("out")
        sources = [a if isinstance(a, Tensor) else torch.from_numpy(a) for a in arrays]
        for (at, nbytes), source in zip(places, sources, strict=True):
            if nbytes:
                streams.copy("out", slot.memory[at : at + nbytes], source)
        written = slot.used = streams.record("out")
        self._queued["write"].append((key, began, written))
        self._next_number += 1
        return _State(key, self._next_number - 1, slot, places, written, sources)

    def wait_written(self, key: int) -> bool:
        """Block until the copy of `key` has left its source; False if it is lost."""
        self._hold.check()
        state = self._states.get(key)
        if state is None:
            return False
        copied = self._is_copied(state)
        state.sources = []
        self._tell()
        return copied

    # ------------------------------------------------------------------- reads

    def prefetch(self, key: int) -> None:
        """Queue the copy of `key` to the device, or the read of it from the store below."""
        self._hold.check()
        state = self._states.get(key)
        if state is None:
            return
        with Shield(up=True):
            self._advance()
            if state.landed is not None:
                return
            if state.slot is not None:
                self._land(state, state.slot)
            elif state.below and self._below is not None:
                self._below.prefetch(state.number)

    def _land(self, state: _State, slot: Slot) -> None:
        """Queue the copy to the device of a state that is in a slot."""
        streams = self._streams
        state.landing = state.lines(streams.empty(self._nbytes))
        streams.wait("in", streams.record("compute"))
        if slot.used is not None:
            streams.wait("in", slot.used)
        began = streams.record("in")
        for line, piece in zip(state.lines(slot.memory), state.landing, strict=True):
            if line.numel():
                streams.copy("in", piece, line)
        state.landed = slot.used = streams.record("in")
        self._queued["read"].append((state.key, began, state.landed))

    def get(self, key: int) -> list[Tensor]:
        """Return the state's tensors, for the compute stream.  Raises CheckpointLost."""
        self.prefetch(key)
        state = self._states.get(key)
        if state is None:
            raise CheckpointLost(f"tier {self.name!r} has no checkpoint {key}")
        streams = self._streams
        try:
            if state.lost:
                raise CheckpointLost(state.lost)
            if state.landed is None:
                self._rise(state)
            assert state.landed is not None
            # Of the way out, too: a copy that failed left another state's bytes in the slot.
            streams.wait("compute", state.written)
            streams.wait("compute", state.landed)
        except CopyFailed as error:
            self.drop(key)
            raise CheckpointLost(f"checkpoint {key} could not be copied: {error}") from error
        except CheckpointLost:
            self.drop(key)
            raise
        found, state.landing, state.landed = state.landing, [], None
        streams.used_by("compute", found)
        self.stats.reads += 1
        self.stats.bytes_read += self._nbytes
        self._tell()
        return found

    def _rise(self, state: _State) -> None:
        """Read a state from the store below, and queue its copy to the device."""
        assert self._below is not None
        try:
            arrays = self._below.get(state.number)
        except CheckpointLost as error:
            state.below = False
            raise CheckpointLost(f"checkpoint {state.key} could not be read: {error}") from error
        with Shield(up=True):
            slot = self._free.popleft() if self._free else None
            try:
                if slot is not None and slot.used is not None:
                    with contextlib.suppress(CopyFailed):  # of the state that had it before
                        self._streams.synchronize(slot.used)
                through = slot or Slot(torch.empty(self._nbytes, dtype=torch.uint8, device="cpu"))
                through.used = None
                for line, array in zip(state.lines(through.memory), arrays, strict=True):
                    np.copyto(line.numpy(), array)
                self._land(state, through)
            finally:
                if slot is not None:
                    self._free.append(slot)

    def drop(self, key: int) -> None:
        """Free the copy of `key`."""
        self._hold.check()
        with Shield(up=True):
            state = self._states.pop(key, None)
            if state is None:
                return
            state.gone = True
            streams = self._streams
            if state.landed is not None:  # nobody waited for these copies
                streams.used_by("in", state.landing)
                state.landing, state.landed = [], None
            if state.sources:
                streams.used_by("out", state.sources)
                state.sources = []
            self.stats.stored_bytes -= self._nbytes
            if state.sinking:
                assert self._below is not None
                self._below.cancel(state.number)
            else:
                self._release(state)
                if state.below and self._below is not None:
                    self._below.drop(state.number)
            while self._order and self._order[-1].gone:
                self._order.pop()
            self._advance()
