"""The Store protocol: a slow tier with asynchronous transfers.

One computing thread calls a store; the store moves bytes on threads of its
own.  Its life: `open`, any number of puts, prefetches, gets and drops,
`close`; then it can be opened again.  Whoever opens it has it alone until
`close`.  A key (the step of the checkpoint) is put, then read any number of
times, then dropped; a dropped key may be put again.

Failures never pass silently and never raise out of a background thread:

=============================  ===============================================
what happens                   what the caller sees
=============================  ===============================================
no room, queue full, ENOSPC    `put` returns False; nothing was stored
the write fails later          `wait_written` returns False; the key is gone
the read fails, bad checksum   `get` raises `CheckpointLost`; the key is gone
the tier cannot be used        `open` raises `StoreError`
it is open already             `open` raises `StoreError`; nothing has changed
a forked child uses it         each method but `close` raises `StoreError`
=============================  ===============================================
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from ..errors import MultistageError
from ..states.layout import Array, Layout


class CheckpointLost(MultistageError):
    """A checkpoint cannot be read back; the executor recomputes it."""


class TransferRecord(NamedTuple):
    """One finished transfer, for the timeline; times are `time.perf_counter()`."""

    kind: Literal["write", "read"]
    key: int
    start_s: float
    stop_s: float
    nbytes: int


@dataclass(slots=True)
class StoreStats:
    """Counts since `open`; of the refused puts, `refused_full` were for want of room."""

    bytes_written: int = 0
    bytes_read: int = 0
    writes: int = 0
    reads: int = 0
    refused: int = 0
    refused_full: int = 0
    lost: int = 0
    stored_bytes: int = 0
    peak_stored_bytes: int = 0


class Store(Protocol):
    """A slow tier.

    Attributes
    ----------
    name : str
        Shown in tables, for example `"file"`.
    queue_depth : int
        Writes that may be waiting or under way before `put` refuses.
    stats : StoreStats

    Notes
    -----
    Methods are called from one thread only.
    """

    name: str
    queue_depth: int
    stats: StoreStats

    @property
    def transfers(self) -> deque[TransferRecord]:
        """Finished transfers, appended as they are told of and popped by the caller.

        Bounded: the oldest fall off.
        """
        ...

    def buffer_bytes(self, layout: Layout) -> int:
        """Return the bytes of I/O buffers the store will hold for such states."""
        ...

    def capacity_states(self, layout: Layout) -> int | None:
        """Return how many such states it can hold, None if unbounded."""
        ...

    def open(self, layout: Layout) -> None:
        """Allocate buffers, start threads, prepare the tier for states of `layout`.

        Raises
        ------
        StoreError
            If the tier cannot be used, with the reason and the remedy; or if
            the store is open: it holds another run's checkpoints.
        """
        ...

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Queue the write of one state; return whether it was accepted.

        `arrays` are C-contiguous, in record order, and must stay unchanged
        until `wait_written(key)`.  Never blocks, unless `block` is true: then
        it waits for room in the queue (still False if the tier is full).
        """
        ...

    def wait_written(self, key: int) -> bool:
        """Block until the write of `key` is done with its arrays; False if it failed."""
        ...

    def prefetch(self, key: int) -> None:
        """Queue a read of `key`, behind its write if that is still under way.  Never blocks."""
        ...

    def get(self, key: int) -> list[Array]:
        """Block until the prefetched read is done; return the arrays, read-only.

        Prefetches first if nobody did.  The memory belongs to whoever refers
        to the arrays: the store reuses it only when no reference is left.

        Raises
        ------
        CheckpointLost
            If the bytes cannot be read or fail their checksum.
        """
        ...

    def drop(self, key: int) -> None:
        """Free the tier's copy of `key`, being read or not; unknown keys are ignored.

        Never blocks.
        """
        ...

    def close(self) -> None:
        """Stop the threads, give back memory and files.  May be called twice."""
        ...
