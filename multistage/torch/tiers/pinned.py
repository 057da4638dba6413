"""`PinnedStore`: states in pinned host memory, copied by streams of their own; tiers by name.

`PinnedCascade` has a store below it, which the oldest states move on to and are read from.
A state keeps its slot until that store has written it.  What is read from below passes through a
free slot, or through other memory if there is none: no read waits for a slot.

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

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor

from ...backends.base import CheckpointLost, HeldStore, Store, StoreStats, TransferRecord
from ...backends.cascade import CascadeStore, State
from ...backends.memory import MemoryStore
from ...backends.urls import TierName, open_store, told
from ...errors import ArgumentError, BudgetError, StoreError
from ...states.layout import ALIGN, Array, Layout
from ...support.interrupts import Shield
from ...support.units import parse_bytes
from ..tensors.streams import CudaStreams, Event, the_device

_log = logging.getLogger(__name__)

# Pinned memory between a CUDA device and a tier that knows host memory only.
_BETWEEN_BYTES = 256 << 20
SPARE = 3  # slots kept free for the next states, where a store below takes the oldest
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

    slot: Slot
    places: Sequence[tuple[int, int]]  # of its tensors in a slot: where they begin, and their bytes
    written: Event  # of its `out` copy
    sources: list[Tensor]  # of that copy, until it is known done
    landing: list[Tensor] = field(default_factory=list)
    landed: Event | None = None


class PinnedStore(HeldStore):
    """States in pinned host memory.

    Parameters
    ----------
    capacity_bytes : int or None
        Most pinned memory it takes; None if unbounded.
    device : torch.device
        Where the states come from.
    streams : callable, optional
        Returns what takes the place of the device's.

    Notes
    -----
    A `Store` whose arrays are one-dimensional uint8 tensors on `device`.  `get` returns tensors.
    """

    queue_depth = 2

    def __init__(
        self,
        capacity_bytes: int | None,
        device: torch.device,
        streams: Callable[[torch.device], CudaStreams] = CudaStreams,
    ) -> None:
        if capacity_bytes is not None and capacity_bytes < 0:
            raise ArgumentError(f"capacity_bytes={capacity_bytes} must not be negative")
        super().__init__("pinned")
        self.capacity_bytes = capacity_bytes
        self._told: deque[TransferRecord] = deque(maxlen=100_000)
        self._device = the_device(device)
        self._rounded = self._device.type == "cuda"
        self._given = streams
        self._opened: CudaStreams | None = None

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

    def buffer_bytes(self, layout: Layout) -> int:
        """Return 0: what it takes is a memory of its own; but for what is read ahead."""
        return 4 * layout.nbytes if layout.varied else 0

    def _slots(self, nbytes: int, capacity: int | None) -> int | None:
        if capacity is None:
            return None
        return sum(growth(nbytes, capacity, rounded=self._rounded))

    def capacity_states(self, layout: Layout) -> int | None:
        """Return how many states fit."""
        return self._slots(layout.nbytes, self.capacity_bytes)

    def _open(self, layout: Layout) -> None:
        try:
            self._begin(layout)
        except (RuntimeError, MemoryError) as error:  # no thread, no memory
            raise StoreError(f"tier {self.name!r} cannot be used: {error}") from error

    def _begin(self, layout: Layout) -> None:
        self.require_slots(layout.nbytes, 1)
        self._layout, self._nbytes = layout, layout.nbytes
        self._places = [(leaf.offset, leaf.nbytes) for leaf in layout.leaves]
        self.stats = StoreStats()
        self._told.clear()
        self._states: dict[int, _State] = {}
        self._queued: dict[Literal["write", "read"], deque[tuple[int, Event, Event]]] = {
            "write": deque(),
            "read": deque(),
        }
        self._free: deque[Slot] = deque()
        self._taken = 0  # slots so far
        self._growing = growth(layout.nbytes, self.capacity_bytes, rounded=self._rounded)
        self._opened = self._given(self._device)
        self._grow()

    def require_slots(self, nbytes: int, least: int) -> None:
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

    def _close(self) -> Exception | None:
        failure: Exception | None = None
        if self._opened is not None and not self._hold.foreign:  # a child leaves threads alone
            try:
                self._opened.close()
                self._tell()
            except Exception as error:  # of the device
                failure = error
        self._opened = None
        for name in ("_states", "_free", "_queued"):
            self.__dict__.pop(name, None)
        return failure

    @property
    def _streams(self) -> CudaStreams:
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
            self._growing = iter(())
            return False
        for k in range(count):
            self._free.append(Slot(memory[k * size : (k + 1) * size]))
        self._taken += count
        return True

    def _slot(self) -> Slot | None:
        """Return a slot for another state, None if there is none."""
        with Shield(up=True):
            return self._free.popleft() if self._free or self._grow() else None

    # ------------------------------------------------------------------ writes

    def put(self, key: int, arrays: Sequence[Tensor | Array], *, block: bool = False) -> bool:
        """Queue the copy of one state; see `Store.put`."""
        self._hold.check()
        places, nbytes = self._placed(arrays)
        slot = self._slot() if nbytes <= self._nbytes else None
        if slot is None:
            self.stats.refused += 1
            self.stats.refused_full += nbytes <= self._nbytes
            return False
        with Shield(up=True):  # half queued it would be waited for in vain
            self.drop(key)  # that was not dropped yet
            self._states[key] = self._out(slot, key, arrays, places)
            stats, nbytes = self.stats, self._nbytes
            stats.stored_bytes += nbytes
            stats.writes += 1
            stats.bytes_written += nbytes
            stats.peak_stored_bytes = max(stats.peak_stored_bytes, stats.stored_bytes)
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
        return _State(slot, places, written, sources)

    def wait_written(self, key: int) -> bool:
        """Block until the copy of `key` has left its source; False if it is lost."""
        self._hold.check()
        state = self._states.get(key)
        if state is None:
            return False
        self._streams.synchronize(state.written)
        state.sources = []
        self._tell()
        return True

    # ------------------------------------------------------------------- reads

    def prefetch(self, key: int) -> None:
        """Queue the copy of `key` to the device."""
        self._hold.check()
        state = self._states.get(key)
        if state is not None and state.landed is None:
            with Shield(up=True):
                state.landing, state.landed = self._land(key, state.slot, state.places)

    def _land(
        self, key: int, slot: Slot, places: Sequence[tuple[int, int]]
    ) -> tuple[list[Tensor], Event]:
        """Queue the copy to the device of a state that is in a slot."""
        streams = self._streams
        landing = _lines(streams.empty(self._nbytes), places)
        streams.wait("in", streams.record("compute"))
        if slot.used is not None:
            streams.wait("in", slot.used)
        began = streams.record("in")
        for line, piece in zip(_lines(slot.memory, places), landing, strict=True):
            if line.numel():
                streams.copy("in", piece, line)
        landed = slot.used = streams.record("in")
        self._queued["read"].append((key, began, landed))
        return landing, landed

    def get(self, key: int) -> list[Tensor]:
        """Return the state's tensors, for the compute stream.  Raises CheckpointLost."""
        self.prefetch(key)
        state = self._states.get(key)
        if state is None:
            raise CheckpointLost(f"tier {self.name!r} has no checkpoint {key}")
        streams = self._streams
        assert state.landed is not None
        streams.wait("compute", state.landed)
        found, state.landing, state.landed = state.landing, [], None
        streams.used_by("compute", found)
        self.stats.reads += 1
        self.stats.bytes_read += self._nbytes
        self._tell()
        return found

    def held(self, key: int) -> list[Array] | None:
        """Return the arrays of a state, in its slot until it is dropped; None if not there yet."""
        state = self._states[key]
        if not state.written.query():
            return None
        return [line.numpy() for line in _lines(state.slot.memory, state.places)]

    def brought(self, arrays: Sequence[Array]) -> list[Tensor]:
        """Return tensors on the device, for the compute stream, of arrays of another store."""
        places, _ = self._placed(arrays)
        with Shield(up=True):
            slot = self._free.popleft() if self._free else None
            try:
                if slot is not None and slot.used is not None:
                    self._streams.synchronize(slot.used)
                through = slot or Slot(torch.empty(self._nbytes, dtype=torch.uint8, device="cpu"))
                through.used = None
                for line, array in zip(_lines(through.memory, places), arrays, strict=True):
                    np.copyto(line.numpy(), array)
                landing, landed = self._land(-1, through, places)
            finally:
                if slot is not None:
                    self._free.append(slot)
        self._streams.wait("compute", landed)
        self._streams.used_by("compute", landing)
        return landing

    def drop(self, key: int) -> None:
        """Free the copy of `key`."""
        self._hold.check()
        with Shield(up=True):
            state = self._states.pop(key, None)
            if state is None:
                return
            streams = self._streams
            if state.landed is not None:  # nobody waited for these copies
                streams.used_by("in", state.landing)
                state.landing, state.landed = [], None
            if state.sources:
                streams.used_by("out", state.sources)
                state.sources = []
            self.stats.stored_bytes -= self._nbytes
            self._free.append(state.slot)  # its next user waits for the last copy of it


def _lines(memory: Tensor, places: Sequence[tuple[int, int]]) -> list[Tensor]:
    """Return the parts of some memory in which the tensors of a state lie."""
    return [memory[at : at + nbytes] for at, nbytes in places]


class PinnedCascade(CascadeStore):
    """Pinned memory, and beyond it another store, which takes host arrays.

    Parameters
    ----------
    pinned : PinnedStore
    below : Store
        Takes the oldest states when few slots are left.  States that it has are read from it.
    """

    _alike = False
    _kept_free = SPARE

    def __init__(self, pinned: PinnedStore, below: Store) -> None:
        self._pinned = pinned
        self._join(pinned.as_store(), below)

    @property
    def levels(self) -> Sequence[Store]:
        """None: what is below takes host arrays, and is not measured with tensors of a device."""
        return ()

    def buffer_bytes(self, layout: Layout) -> int:
        """Return what the pinned store says: what is below takes no memory of the device."""
        return self._pinned.buffer_bytes(layout)

    def _require_room(self, layout: Layout) -> None:
        self._pinned.require_slots(layout.nbytes, SPARE + 1)

    def _readable(self, state: State, timeout_s: float) -> bool:
        return not timeout_s or self._pinned.wait_written(state.number)

    def _from_above(self, state: State) -> list[Array] | None:
        return self._pinned.held(state.number)

    def _from_below(self, arrays: list[Array]) -> list[Any]:
        return self._pinned.brought(arrays)


def open_tiers(tiers: Sequence[TierName], device: torch.device) -> Store | None:
    """Return the store that some tiers make for states on a device, None for no tier.

    Parameters
    ----------
    tiers : sequence of str or Store
        `"pinned:8GiB"` (or `"pinned:"`, unbounded), what
        `multistage.backends.urls.open_store` takes, or the first and one of the
        second, the fastest first; also in one string, as in
        `"pinned:8GiB > file:///scratch?capacity=1TiB > s3://bucket/run"`.
    device : torch.device
        Pinned memory is plain memory for states that lie on the host.

    Raises
    ------
    ArgumentError
        For an unknown tier, or tiers that do not go together.

    Examples
    --------
    >>> open_tiers(["pinned:1GiB", "memory:"], torch.device("cpu")).name
    'memory>memory'
    """
    found = list(tiers)
    if not found:
        return None
    if isinstance(found[0], str) and found[0].partition(":")[0] == "pinned":
        # Not a level as the others: it knows tensors, and moves what is below.
        found[:1] = [name.strip() for name in found[0].split(">", 1)]
    capacity: int | None = None
    first = found[0]
    pinned = isinstance(first, str) and first.partition(":")[0] == "pinned"
    if pinned:
        size = str(found.pop(0)).partition(":")[2].strip("/")
        capacity = parse_bytes(size, "capacity") if size else None
    if len(found) > 1:
        names = ", ".join(told(str(tier)) for tier in tiers)
        raise ArgumentError(
            f"tiers {names} do not go together; give one, or pinned: and one below it"
        )
    below = open_store(found[0]) if found else None
    if device.type == "cuda":
        upper = PinnedStore(capacity if pinned else _BETWEEN_BYTES, device)
        return upper.as_store() if below is None else PinnedCascade(upper, below)
    if not pinned or (below is not None and not below.exact):  # which no cascade has
        return below
    plain = MemoryStore(capacity, buffer_bytes=0)
    return plain if below is None or capacity is None else CascadeStore(plain, below)
