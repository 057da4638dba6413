"""The pinned memory of a `PinnedStore`, the copies between it and a device, and their order.

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
  is told; likewise of `in`, if the state is not fetched.
* An `in` copy of a slot whose `out` copy is in flight waits for its event.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ...backends.base import TransferRecord
from ...errors import BudgetError
from ...states.layout import ALIGN, Array, Layout
from ..tensors.streams import Event, Streams

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 64 << 20  # most pinned memory that is taken at once
_FIRST_SLOTS = 64


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
class Slot:
    """Pinned memory for one state."""

    memory: Tensor
    used: Event | None = None  # of the last copy that touched it


def slots_in(capacity_bytes: int | None, nbytes: int, *, rounded: bool) -> int | None:
    """Return how many slots of so many bytes fit, None if unbounded."""
    if capacity_bytes is None:
        return None
    return sum(growth(nbytes, capacity_bytes, rounded=rounded))


class PinnedMemory:
    """The slots of an open store.

    Parameters
    ----------
    name : str
        Of the store, for messages.
    layout : Layout
    streams : Streams
        Whose `host` memory it takes.
    capacity_bytes : int or None
    rounded : bool
        As for `growth`.

    Attributes
    ----------
    free : deque of Slot
    most : int or None
        How many slots there can be, None if unbounded; fewer once memory has run out.

    Raises
    ------
    RuntimeError, MemoryError
        If there is no memory for a first block.

    Notes
    -----
    Guarded by the lock of the store.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        streams: Streams,
        capacity_bytes: int | None,
        *,
        rounded: bool,
    ) -> None:
        self.free: deque[Slot] = deque()
        self.most = slots_in(capacity_bytes, layout.nbytes, rounded=rounded)
        self._name, self._layout, self._streams = name, layout, streams
        self._taken = 0  # slots so far
        self._growing = growth(layout.nbytes, capacity_bytes, rounded=rounded)
        self.grow()

    @property
    def left(self) -> int | None:
        """How many slots are free or not taken from the system yet; None if unbounded."""
        return None if self.most is None else len(self.free) + self.most - self._taken

    def grow(self) -> bool:
        """Take another block of memory; return whether there was any to take."""
        size, count = self._layout.nbytes, next(self._growing, 0)
        if count < 1:
            return False
        try:
            memory = self._streams.host(count * size)
        except (RuntimeError, MemoryError) as error:
            if not self._taken:
                raise
            logger.warning("tier %r takes no more memory: %s", self._name, error)
            self.most, self._growing = self._taken, iter(())
            return False
        for k in range(count):
            self.free.append(Slot(memory[k * size : (k + 1) * size]))
        self._taken += count
        return True


def require_slots(
    name: str, capacity_bytes: int | None, nbytes: int, least: int, *, rounded: bool
) -> None:
    """Raise BudgetError if a capacity holds fewer than `least` states of so many bytes."""
    slots = slots_in(capacity_bytes, nbytes, rounded=rounded)
    if slots is None or slots >= least:
        return
    enough = (nbytes * k for k in itertools.count(1))
    needed = next(n for n in enough if (slots_in(n, nbytes, rounded=rounded) or 0) >= least)
    raise BudgetError(
        f"tier {name!r}: its capacity of {capacity_bytes} bytes < "
        f"{needed} bytes needed for {least} states; raise it"
    )


@dataclass(slots=True)
class Entry:
    """Where one state is."""

    key: int
    slot: Slot | None
    places: Sequence[tuple[int, int]]  # of its tensors in a slot: where they begin, and their bytes
    written: Event | None = None  # of its `out` copy
    sources: list[Tensor] = field(default_factory=list)  # of that copy, until it is known done
    below: bool = False  # the tier below has it
    moving: bool = False  # the mover is at it, or will be
    lost: str = ""
    gone: bool = False  # dropped
    landing: list[Tensor] = field(default_factory=list)
    landed: Event | None = None
    wanted: bool = False
    read: bool = False  # since it was last wanted

    def lines(self, memory: Tensor) -> list[Tensor]:
        """Return the parts of some memory in which its tensors lie."""
        return [memory[at : at + nbytes] for at, nbytes in self.places]


class Copies:
    """What an open `PinnedStore` copies, on its streams.

    Parameters
    ----------
    layout : Layout
    streams : Streams
    transfers : deque of TransferRecord
        Of the store.

    Notes
    -----
    For the computing thread.
    """

    def __init__(self, layout: Layout, streams: Streams, transfers: deque[TransferRecord]) -> None:
        self._layout, self._streams, self._transfers = layout, streams, transfers
        self._places = [(leaf.offset, leaf.nbytes) for leaf in layout.leaves]
        self._queued: dict[Literal["write", "read"], deque[tuple[int, Event, Event]]] = {
            "write": deque(),
            "read": deque(),
        }

    def tell(self) -> None:
        """Add to the store's transfers the copies that are done by now, as their streams say."""
        for kind, copies in self._queued.items():
            while copies:
                key, began, ended = copies[0]
                span = self._streams.span(began, ended)
                if span is None:
                    break
                copies.popleft()
                self._transfers.append(TransferRecord(kind, key, *span, self._layout.nbytes))

    def fits(self, arrays: Sequence[Tensor | Array]) -> bool:
        """Whether a slot is large enough for a state."""
        return not self._layout.varied or self._placed(arrays)[1] <= self._layout.nbytes

    def _placed(self, arrays: Sequence[Tensor | Array]) -> tuple[list[tuple[int, int]], int]:
        """Return where in a slot the tensors of a state lie, and where they end."""
        if not self._layout.varied:
            return self._places, self._layout.nbytes
        places, at = [], 0
        for array in arrays:
            places.append((at, array.nbytes))
            at += -(-array.nbytes // ALIGN) * ALIGN
        return places, at

    def out(self, slot: Slot, key: int, arrays: Sequence[Tensor | Array]) -> Entry:
        """Queue the copy of a state into a slot."""
        streams = self._streams
        streams.wait("out", streams.record("compute"))
        if slot.used is not None:
            streams.wait("out", slot.used)
        began = streams.record("out")
        sources = [a if isinstance(a, Tensor) else torch.from_numpy(a) for a in arrays]
        entry = Entry(key, slot, self._placed(arrays)[0], sources=sources)
        for line, source in zip(entry.lines(slot.memory), sources, strict=True):
            if line.numel():
                streams.copy("out", line, source)
        entry.written = slot.used = streams.record("out")
        self._queued["write"].append((key, began, entry.written))
        return entry

    def land(self, entry: Entry) -> None:
        """Queue the copy to the device of a state that is in pinned memory, unless it is."""
        if entry.landed is not None:
            return
        assert entry.slot is not None
        streams = self._streams
        entry.landing = entry.lines(streams.empty(self._layout.nbytes))
        streams.wait("in", streams.record("compute"))
        if entry.slot.used is not None:
            streams.wait("in", entry.slot.used)
        began = streams.record("in")
        for line, piece in zip(entry.lines(entry.slot.memory), entry.landing, strict=True):
            if line.numel():
                streams.copy("in", piece, line)
        entry.landed = entry.slot.used = streams.record("in")
        self._queued["read"].append((entry.key, began, entry.landed))

    def landed(self, entry: Entry) -> list[Tensor]:
        """Return the tensors of a state, for the compute stream.

        Raises
        ------
        CopyFailed
            If a copy of it has failed.
        """
        self.land(entry)
        streams = self._streams
        assert entry.written is not None and entry.landed is not None
        # Of the way out, too: a copy that failed left another state's bytes in the slot.
        streams.wait("compute", entry.written)
        streams.wait("compute", entry.landed)
        found, entry.landing, entry.landed = entry.landing, [], None
        streams.used_by("compute", found)
        return found

    def let_go(self, entry: Entry) -> None:
        """Release the memory of copies that were not waited for."""
        if entry.landed is not None:
            self._streams.used_by("in", entry.landing)
            entry.landing, entry.landed = [], None
        if entry.sources:
            self._streams.used_by("out", entry.sources)
            entry.sources = []
