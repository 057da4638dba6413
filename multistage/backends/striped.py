"""One tier made of several paths, as of two disks: each state is cut into a part for each.

A schedule has few transfers in flight, often one.  States that went whole to one path or the other
would leave all others idle meanwhile; parts that take equally long keep all of them at work, and
the tier is what planners take it for: one channel each way, as fast as its paths together.  The
parts follow the rates that transfers show, there and back together, since bytes are read where
they were written.  States too small to be cut go whole to the path whose bytes would be read
soonest.

A path moves bytes on threads of its own and verifies its own checksums.  A part is read straight
into its place in the state's memory.

What a fault does:

============================  ================================================
a path fills up               states go to the others, as long as it has no
                              room; with all of them full, the tier is
writing a part fails          the state is lost; after some in a row on one
                              path, states go to the others until something of
                              it is dropped
reading a part fails          the state is lost
a path cannot be opened       `open` raises `StoreError`
============================  ================================================
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ..errors import ArgumentError
from ..states.layout import Array, Layout, places
from ..support.interrupts import Shield
from .arena import PAGE, landing_bytes, landing_pool, round_up
from .base import CheckpointLost, JoinedStore, Store, StoreStats, TransferRecord
from .medium import warn_full
from .streamed import StreamedStore

_FAILURES = 3  # in a row, then nothing more is written to a path
_LEAST = 256 << 10  # bytes of a state that is cut
_FADING = 0.8  # of what a path has shown, with each transfer


class _Part(NamedTuple):
    """Bytes of a record on one path; all but the last end with a page."""

    path: int
    start: int
    stop: int


@dataclass(eq=False, slots=True)
class _State:
    """One state, and where its parts are.

    Attributes
    ----------
    kinds : list of (shape, dtype, offset)
        Of its arrays.
    landing : array or None
        What it is being read into.
    cancelled : bool
        Its write was given up: a failure is no loss then.
    """

    nbytes: int
    kinds: list[tuple[tuple[int, ...], np.dtype[np.generic], int]]
    parts: list[_Part]
    landing: Array | None = None
    cancelled: bool = False


class StripedStore(JoinedStore):
    """Checkpoints cut into parts for several stores, whose bandwidths add up.

    Parameters
    ----------
    *paths : Store
        At least two, each on a device of its own.  Closed, and not used elsewhere.

    Raises
    ------
    ArgumentError
        For fewer than two, one that loses information, or shares that differ.
    StoreError
        From `open`, if a path cannot be used.

    Examples
    --------
    >>> from multistage.backends import MemoryStore
    >>> store = StripedStore(MemoryStore(), MemoryStore())
    >>> state = np.arange(1e6)
    >>> store.open(Layout.of(state))
    >>> store.put(7, [state])
    True
    >>> np.array_equal(store.get(7)[0], state), store.name
    (True, 'memory+memory')
    >>> store.close()
    """

    def __init__(self, *paths: Store) -> None:
        if len(paths) < 2:
            raise ArgumentError(f"a striped tier needs at least two paths, not {len(paths)}")
        super().__init__(
            "+".join(path.name for path in paths), paths, "the paths of a striped tier"
        )
        for path in paths:
            if not path.exact:
                raise ArgumentError(
                    f"the path {path.name!r} of a striped tier loses information, and cannot be "
                    "given parts of states; compress it by blosc"
                )
        if len({path.share for path in paths}) > 1:
            raise ArgumentError(
                "the paths of a striped tier differ in share="
                + ", ".join(str(path.share) for path in paths)
                + "; give all of them the same"
            )
        self.share = paths[0].share
        engines = [path.engine for path in paths]
        self.engine = engines[0] if len(set(engines)) == 1 else "+".join(engines)
        self.queue_depth = max(path.queue_depth for path in paths)
        capacities = [path.capacity_bytes for path in paths if path.capacity_bytes is not None]
        self.capacity_bytes = sum(capacities) if len(capacities) == len(paths) else None
        # Bytes and seconds of each path's latest transfers: kept from run to run.
        self._shown = [{"write": (0.0, 0.0), "read": (0.0, 0.0)} for _ in paths]
        self._moved = [0] * len(paths)
        self._shares = [1 / len(paths)] * len(paths)

    # ------------------------------------------------------------------ what it is

    @property
    def transfers(self) -> deque[TransferRecord]:
        """Finished transfers of parts, each as long as the whole tier takes for its bytes."""
        self._note()
        return self._told

    def notes(self) -> list[str]:
        """Return what share of the bytes each path took, and what the paths say."""
        total = sum(self._moved) or 1
        shares = (
            f"{100 * moved / total:.0f} % to {path.name}"
            for moved, path in zip(self._moved, self._stores, strict=True)
        )
        return [
            f"bytes striped: {', '.join(shares)}",
            *(n for p in self._stores for n in p.notes()),
        ]

    def buffer_bytes(self, layout: Layout) -> int:
        """Return the bytes of I/O buffers: those of the paths, which read into one memory."""
        inner, cut = self._inner(layout)
        found = sum(path.buffer_bytes(inner) for path in self._stores)
        if not cut:
            return found
        spared = sum(isinstance(path, StreamedStore) for path in self._stores)
        return found - (spared - 1) * landing_bytes(round_up(layout.nbytes))

    def capacity_states(self, layout: Layout) -> int | None:
        """Return how many states all paths hold together, None if unbounded."""
        inner, cut = self._inner(layout)
        if cut and self.capacity_bytes is not None:
            pages = sum((path.capacity_bytes or 0) // PAGE for path in self._stores)
            return pages // _pages(layout.nbytes)
        found = [path.capacity_states(inner) for path in self._stores]
        return None if None in found else sum(count for count in found if count is not None)

    def _inner(self, layout: Layout) -> tuple[Layout, bool]:
        """Return the layout that the paths are opened for, and whether they take parts."""
        together = (isinstance(p, StreamedStore) and p.per_extent(layout) > 1 for p in self._stores)
        return (layout, False) if any(together) else (layout.parted(), True)

    # -------------------------------------------------------------------- its life

    def _open(self, layout: Layout) -> None:
        inner, self._cuts = self._inner(layout)
        self._pool = landing_pool(round_up(layout.nbytes))
        self._told.clear()
        self.stats = StoreStats()
        self._states: dict[int, _State] = {}
        count = len(self._stores)
        self._used, self._moved = [0] * count, [0] * count
        self._failures = [0] * count  # to write to each path, in a row
        self._warned = False
        for path in self._stores:
            path.queue_depth = self.queue_depth
        self._open_all(inner)

    # ---------------------------------------------------------------------- writes

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Queue the writes of the parts of one state, of all or none; see `Store.put`."""
        self._hold.check()
        self._note()
        self.drop(key)
        offsets, nbytes = places([array.nbytes for array in arrays])
        kinds = [(a.shape, a.dtype, at) for a, at in zip(arrays, offsets, strict=True)]
        full = set[int]()
        while parts := self._placed(nbytes, full):
            if not block and any(self._stores[part.path].waits() for part in parts):
                break
            state = _State(nbytes, kinds, parts)
            try:
                with Shield(up=True):  # known before it is put: else Ctrl-C may lose it
                    self._states[key] = state
                    self._count(parts, 1)
                refusing, is_full = self._offer(key, state, arrays, block)
            except BaseException:
                self._forget(key)
                raise
            if refusing is None:
                self.stats.writes += 1
                self.stats.bytes_written += nbytes
                return True
            self._forget(key)
            if not is_full:
                break
            full.add(refusing)
        return self._refused(not parts)

    def _placed(self, nbytes: int, full: Set[int]) -> list[_Part]:
        """Return the parts of a record of so many bytes, none if there is no room.

        `full` are paths that have none, as they say: what was dropped there may still be moved.
        """
        left_out = {k for k, failed in enumerate(self._failures) if failed >= _FAILURES} | full
        there = [k for k in range(len(self._stores)) if k not in left_out]
        there.sort(key=lambda k: (self._used[k] + nbytes) / self._shares[k])
        pages, rooms = _pages(nbytes), {k: self._room(k) for k in there}
        if not self._cuts or nbytes < _LEAST:
            fits = [k for k in there if not self._cuts or rooms[k] >= pages]
            if fits or not self._cuts:
                ready = (k for k in fits if not self._stores[k].waits())
                return [_Part(next(ready, fits[0]), 0, nbytes)] if fits else []
        total = sum(self._shares[k] for k in there)
        left, taken = pages, dict.fromkeys(there, 0)
        for wanted in ({k: self._shares[k] / total for k in there}, dict.fromkeys(there, 1.0)):
            for k in there:  # then what has found no room
                more = min(left, rooms[k] - taken[k], max(1, round(pages * wanted[k])))
                taken[k] += more
                left -= more
        return [] if left else list(_in_a_row(taken, nbytes))

    def _room(self, path: int) -> int:
        """Return the pages that are left on a path, as far as is known."""
        capacity = self._stores[path].capacity_bytes
        return 1 << 62 if capacity is None else capacity // PAGE - self._used[path] // PAGE

    def _offer(
        self, key: int, state: _State, arrays: Sequence[Array], block: bool
    ) -> tuple[int | None, bool]:
        """Put each part on its path; return the path that refuses, if any, and if it is full."""
        for part in state.parts:
            path, pieces = self._stores[part.path], arrays
            if len(state.parts) > 1:
                pieces = _pieces(arrays, state, part)
            before = path.stats.refused_full
            if not path.put(key, pieces, block=block):
                return part.path, block or path.stats.refused_full > before
        return None, False

    def _count(self, parts: Sequence[_Part], sign: int) -> None:
        """Count the bytes that parts take on their paths from now on or, with -1, no more."""
        for part in parts:
            nbytes = part.stop - part.start
            self._used[part.path] += sign * (round_up(nbytes) if self._cuts else nbytes)
            self._moved[part.path] += nbytes * (sign > 0)
        self.stats.stored_bytes = sum(self._used)
        self.stats.peak_stored_bytes = max(self.stats.peak_stored_bytes, self.stats.stored_bytes)

    def _refused(self, is_full: bool) -> bool:
        self.stats.refused += 1
        self.stats.refused_full += is_full
        if is_full and self.warns and not self._warned:
            self._warned = True
            warn_full(f"tier {self.name!r}", "all of its paths are full or have failed")
        return False

    def wait_written(self, key: int) -> bool:
        """Block until the arrays of `key` are not read any more; False if they are lost."""
        self._hold.check()
        state = self._states.get(key)
        if state is None:
            return False
        written = True
        for number, path in self._paths_of(state):
            made = path.wait_written(key)
            written = written and made
            if self._failures[number] < _FAILURES and not state.cancelled:
                self._failures[number] = 0 if made else self._failures[number] + 1
        state.cancelled = state.cancelled and not written
        if not written:
            self._lose(key, state)
        return written

    def _lose(self, key: int, state: _State) -> None:
        self.stats.lost += not state.cancelled
        self._forget(key)

    def cancel(self, key: int) -> None:
        """Give up the write of a state; see `Store.cancel`."""
        self._hold.check()
        state = self._states.get(key)
        if state is not None:
            state.cancelled |= not self.ended(key, 0.0)  # what is written stays
            for _, path in self._paths_of(state):
                path.cancel(key)

    def ended(self, key: int, timeout_s: float) -> bool:
        """Wait for a write, no longer than so many seconds; see `Store.ended`."""
        self._hold.check()
        until_s = time.perf_counter() + timeout_s
        state = self._states.get(key)
        return state is None or all(
            path.ended(key, max(0.0, until_s - time.perf_counter()))
            for _, path in self._paths_of(state)
        )

    def waits(self) -> bool:
        """Whether a `put` with `block` would wait now."""
        self._hold.check()
        busy = [
            path.waits()
            for path, failed in zip(self._stores, self._failures, strict=True)
            if failed < _FAILURES
        ]
        return any(busy) if self._cuts else bool(busy) and all(busy)

    def _paths_of(self, state: _State) -> Iterator[tuple[int, Store]]:
        for part in state.parts:
            yield part.path, self._stores[part.path]

    # ----------------------------------------------------------------------- reads

    def prefetch(self, key: int) -> None:
        """Queue the reads of the parts of `key`, into one memory."""
        self._hold.check()
        state = self._states.get(key)
        if state is None:
            return
        if self._cuts and state.landing is None:
            state.landing = self._pool.take(state.nbytes)
        for part in state.parts:
            path = self._stores[part.path]
            if state.landing is not None and isinstance(path, StreamedStore):
                path.prefetch(key, state.landing[part.start : round_up(part.stop)])
            else:
                path.prefetch(key)

    def arrived(self, key: int, timeout_s: float) -> bool:
        """Wait for the reads of a state, no longer than so many seconds; see `Store.arrived`."""
        until_s = time.perf_counter() + timeout_s
        self.prefetch(key)
        state = self._states.get(key)
        return state is None or all(
            path.arrived(key, max(0.0, until_s - time.perf_counter()))
            for _, path in self._paths_of(state)
        )

    def get(self, key: int) -> list[Array]:
        """Block until the reads of `key` are done; return its arrays.  Raises CheckpointLost."""
        self.prefetch(key)
        state = self._states.get(key)
        if state is None:
            raise CheckpointLost(f"tier {self.name!r} has no checkpoint {key}")
        try:
            arrays = self._read(key, state)
        except CheckpointLost:
            self._lose(key, state)
            raise
        self.stats.reads += 1
        self.stats.bytes_read += state.nbytes
        return arrays

    def _read(self, key: int, state: _State) -> list[Array]:
        landing = state.landing
        for part in state.parts:
            found = self._stores[part.path].get(key)
            if landing is None:
                return found
            offsets, _ = places([array.nbytes for array in found])
            for array, at in zip(found, offsets, strict=True):
                place = landing[part.start + at : part.start + at + array.nbytes]
                if place.ctypes.data != array.ctypes.data:  # of a path that reads elsewhere
                    place[...] = array.reshape(-1).view(np.uint8)
        assert landing is not None
        state.landing = None  # landed for this reader alone: a later get reads again
        landing.flags.writeable = False
        return [np.ndarray(shape, dtype, landing, at) for shape, dtype, at in state.kinds]

    def drop(self, key: int) -> None:
        """Free the parts of `key`.  Unknown keys are ignored."""
        self._hold.check()
        state = self._states.get(key)
        if state is not None:
            self._forget(key)
            for number, _ in self._paths_of(state):
                self._failures[number] = 0  # it is tried again

    def _forget(self, key: int) -> None:
        with Shield(up=True):
            state = self._states.get(key)
            if state is not None:
                for _, path in self._paths_of(state):
                    path.drop(key)
                self._count(state.parts, -1)
                del self._states[key]

    # ----------------------------------------------------------------------- rates

    def _note(self) -> None:
        """Take note of the transfers that have ended, and of the rates that they show."""
        news = False
        for number, path in enumerate(self._stores):
            shown = self._shown[number]
            while path.transfers:
                record, news = path.transfers.popleft(), True
                seconds = record.stop_s - record.start_s
                nbytes, spent_s = shown[record.kind]
                nbytes, spent_s = _FADING * nbytes + record.nbytes, _FADING * spent_s + seconds
                shown[record.kind] = nbytes, spent_s
                working = sum(
                    share
                    for k, share in enumerate(self._shares)
                    if k == number or self._failures[k] < _FAILURES
                )
                start_s = record.stop_s - seconds * self._shares[number] / working
                self._told.append(record._replace(start_s=start_s))
        if news:
            self._shares = _shares(self._shown)


def _shares(shown: Sequence[dict[str, tuple[float, float]]]) -> list[float]:
    """Return the share of each path in the bytes, as it moves them there and back."""
    costs = [0.0] * len(shown)  # seconds a byte
    for kind in ("write", "read"):
        if all(nbytes and spent_s for nbytes, spent_s in (one[kind] for one in shown)):
            costs = [c + one[kind][1] / one[kind][0] for c, one in zip(costs, shown, strict=True)]
    rates = [1 / cost if cost else 1.0 for cost in costs]
    return [rate / sum(rates) for rate in rates]


def _pages(nbytes: int) -> int:
    return round_up(nbytes) // PAGE


def _in_a_row(taken: dict[int, int], nbytes: int) -> Iterator[_Part]:
    """Yield the parts of a record of so many bytes, of which each path takes some pages."""
    start = 0
    for path, pages in sorted(taken.items()):
        if pages:
            yield _Part(path, start, min(nbytes, start + pages * PAGE))
            start += pages * PAGE


def _pieces(arrays: Sequence[Array], state: _State, part: _Part) -> list[Array]:
    """Return the bytes of a state that are a part, array by array.

    As arrays begin at whole lines of a record or share one, and parts at whole pages, each lies
    in the part's own record where it lies in that of the state.
    """
    found: list[Array] = []
    for array, (_, _, at) in zip(arrays, state.kinds, strict=True):
        first, stop = max(at, part.start) - at, min(at + array.nbytes, part.stop) - at
        if first < stop:
            found.append(array.reshape(-1).view(np.uint8)[first:stop])
    return found
