"""The Store protocol: a slow tier with asynchronous transfers.

One computing thread calls a store; the store moves bytes on threads of its
own.  Its life: `open`, any number of puts, prefetches, gets and drops,
`close`; then it can be opened again.  Between `open` and `close` it belongs to
one run.  A key (the step of the checkpoint) is put, then read any number of
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
from functools import partial
from typing import Literal, NamedTuple, Protocol, cast

from ..errors import ArgumentError, MultistageError
from ..states.layout import Array, Layout
from ..support.interrupts import Shield, whole
from .lifetimes import Hold


class CheckpointLost(MultistageError):
    """A checkpoint cannot be read back; the executor recomputes it.

    Examples
    --------
    >>> def get(key):  # of a store whose read has failed
    ...     raise CheckpointLost(f"state {key}: checksum mismatch")
    >>> try:
    ...     get(7)
    ... except CheckpointLost as error:
    ...     print(error)
    state 7: checksum mismatch
    """


class TransferRecord(NamedTuple):
    """One finished transfer, for the timeline; times are `time.perf_counter()`.

    Examples
    --------
    >>> record = TransferRecord("write", 7, start_s=2.0, stop_s=2.5, nbytes=1_000_000)
    >>> record.nbytes / (record.stop_s - record.start_s)  # bytes per second
    2000000.0
    """

    kind: Literal["write", "read"]
    key: int
    start_s: float
    stop_s: float
    nbytes: int


@dataclass(slots=True)
class StoreStats:
    """Counts since `open`; `refused_full` of `refused` met a full tier, `lost` none was cancelled.

    Examples
    --------
    >>> import numpy as np
    >>> from multistage.backends import MemoryStore
    >>> from multistage.states.layout import Layout
    >>> state = np.ones(1000)
    >>> store = MemoryStore()
    >>> store.open(Layout.of(state))
    >>> store.put(0, [state], block=True)
    True
    >>> store.wait_written(0)
    True
    >>> np.array_equal(store.get(0)[0], state), store.stats.writes
    (True, 1)
    >>> store.close()
    """

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
    """A slow tier; all that the rest of the package knows of one.

    Attributes
    ----------
    name : str
        Shown in tables, for example `"file"`.
    queue_depth : int
        Writes that may be waiting or in flight before `put` refuses; may be set before `open`.

    Notes
    -----
    Methods are called from one thread only.  A write that was accepted goes on when its
    key is dropped, unless it is cancelled; its room is given back once it is over.

    `BaseStore` has the answers of a store that is exact, unbounded and one place,
    `WrapperStore` those of a store around another; a class that derives from one of
    them writes the rest.

    Examples
    --------
    `check_store` tests whether a class meets this protocol.

    >>> from multistage.backends import MemoryStore
    >>> from multistage.backends.testing import check_store
    >>> check_store(MemoryStore)
    """

    name: str
    queue_depth: int

    @property
    def stats(self) -> StoreStats:
        """What was counted since `open`; a store may count only as it is asked."""
        ...

    @property
    def transfers(self) -> deque[TransferRecord]:
        """Finished transfers, appended by the store and popped by the caller.

        Bounded: the oldest fall off.
        """
        ...

    # What it is; known before `open`.

    @property
    def capacity_bytes(self) -> int | None:
        """The most bytes it takes, None if unbounded or unknown."""
        ...

    @property
    def exact(self) -> bool:
        """Whether `get` returns every bit that was put."""
        ...

    @property
    def engine(self) -> str:
        """Which of several engines moves its bytes; empty if there is one only."""
        ...

    @property
    def levels(self) -> Sequence[Store]:
        """The stores that states move through, the fastest first; empty for a single place.

        They may be measured one by one while this store is closed.
        """
        ...

    def parts(self) -> Sequence[Store]:
        """Return this store and every store it is built on: they belong to the same run."""
        ...

    def check(self) -> None:
        """Raise StoreError if the tier cannot be used, as far as that shows before `open`."""
        ...

    def notes(self) -> list[str]:
        """Return what a report should say of the tier besides its counts."""
        ...

    def buffer_bytes(self, layout: Layout) -> int:
        """Return the bytes of I/O buffers the store will hold for such states.

        If they vary, those of four that are read ahead included, or of one of 2 MiB and more.
        """
        ...

    def capacity_states(self, layout: Layout) -> int | None:
        """Return how many such states it can hold, None if unbounded."""
        ...

    @property
    def share(self) -> int:
        """How many divide its bandwidth while plans are run; 1 when it is measured.

        Costs that are measured count on this part of the rates.
        """
        ...

    # Its life.

    def open(self, layout: Layout) -> None:
        """Allocate buffers, start threads, prepare the tier for states of `layout`.

        Where that is `Layout.up_to` some bytes, each state may have arrays of its own number,
        shapes and dtypes, and `get` returns such.

        Raises
        ------
        StoreError
            If the tier cannot be used, with the reason and the remedy; if it takes equal states
            alone and these vary; or if the store is open: it holds another run's checkpoints.
        """
        ...

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Queue the write of one state; return whether it was accepted.

        `arrays` are C-contiguous, in record order, and stay unchanged until `wait_written(key)`.
        With `block` it waits for room in the queue, else it never blocks; False if the tier is
        full.  What it holds of `key` is replaced; after a put that was refused it may be gone.
        """
        ...

    def wait_written(self, key: int) -> bool:
        """Block until the write of `key` is done with its arrays; False if it failed."""
        ...

    def ended(self, key: int, timeout_s: float) -> bool:
        """Wait for the write of `key`, no longer than so many seconds; return whether it ended.

        0 s: without waiting.  Whether it failed `wait_written` tells.  A store that cannot
        tell answers True at once; so does any for an unknown key.  The arrays are therefore
        their owner's only after `wait_written`.
        """
        ...

    def cancel(self, key: int) -> None:
        """Ask that a write be given up, one in flight too where it can.  Never blocks.

        Once it has ended, `wait_written` answers False, as for one that failed, and the key
        is gone; or True if it was made after all: a store may do so.  The arrays stay
        unchanged until then.  An unknown key, or one that is written, is left as it is.
        """
        ...

    def waits(self) -> bool:
        """Whether a `put` with `block` would wait for other writes now, as far as is known."""
        ...

    def prefetch(self, key: int) -> None:
        """Queue a read of `key`, behind its write if that is still in flight.  Never blocks."""
        ...

    def get(self, key: int) -> list[Array]:
        """Block until the prefetched read is done; return the arrays, read-only.

        Prefetches first if necessary.  The memory belongs to the code that refers
        to the arrays: the store reuses it only when no reference is left.

        Raises
        ------
        CheckpointLost
            If the bytes cannot be read or fail their checksum.
        """
        ...

    def arrived(self, key: int, timeout_s: float) -> bool:
        """Wait for the read of `key`, no longer than so many seconds; return whether it ended.

        0 s: without waiting; a read that was not queued is.  Where it has ended, `get` does
        not wait.  A store that cannot tell answers True at once; so does any for an unknown key.
        """
        ...

    def drop(self, key: int) -> None:
        """Free the tier's copy of `key`, being read or not; unknown keys are ignored.

        Never blocks.  A read that has not begun is not made.
        """
        ...

    def close(self) -> None:
        """Stop the threads, give back memory and files.  May be called twice."""
        ...


class BaseStore:
    """Base of a store that is exact, unbounded, always usable, and one place.

    It implements the descriptive part of `Store`; a class that derives from it
    implements the transfers.

    Examples
    --------
    A store in a dict, without threads; `check_store` finds what is missing.

    >>> import numpy as np
    >>> from multistage import Reversal
    >>> from multistage.backends.testing import check_store
    >>> from multistage.errors import StoreError
    >>> class DictStore(BaseStore):
    ...     name, queue_depth = "dict", 1
    ...     def __init__(self):
    ...         self.stats, self.transfers, self.kept = StoreStats(), deque(maxlen=100), None
    ...     def buffer_bytes(self, layout):
    ...         return 0
    ...     def capacity_states(self, layout):
    ...         return None
    ...     def open(self, layout):
    ...         if self.kept is not None:
    ...             raise StoreError("tier 'dict' holds the checkpoints of another run")
    ...         self.stats, self.kept = StoreStats(), {}
    ...     def put(self, key, arrays, *, block=False):
    ...         self.kept[key] = [array.copy() for array in arrays]
    ...         for array in self.kept[key]:
    ...             array.flags.writeable = False
    ...         self.stats.writes += 1
    ...         return True
    ...     def wait_written(self, key):
    ...         return key in self.kept
    ...     def prefetch(self, key):
    ...         pass
    ...     def get(self, key):
    ...         if key not in self.kept:
    ...             raise CheckpointLost(f"tier 'dict' has no checkpoint {key}")
    ...         self.stats.reads += 1
    ...         return self.kept[key]
    ...     def drop(self, key):
    ...         self.kept.pop(key, None)
    ...     def close(self):
    ...         self.kept = None
    >>> check_store(DictStore)
    >>> steps = lambda x, i: np.sin(x), lambda x, a, i: np.cos(x) * a
    >>> gradients = []
    >>> for tiers in (None, DictStore()):
    ...     with Reversal(*steps, n_steps=50, memory="4 slots", tiers=tiers) as run:
    ...         last = run.forward(np.ones(3))
    ...         gradients.append(run.reverse(np.ones(3)))
    >>> np.array_equal(*gradients)
    True
    """

    capacity_bytes: int | None = None
    exact: bool = True
    engine: str = ""
    share: int = 1
    warns: bool = True  # that it is full: not as a part of another store, which may not be

    @property
    def levels(self) -> Sequence[Store]:
        """The stores that states move through: none but this one."""
        return ()

    def parts(self) -> Sequence[Store]:
        """Return this store alone."""
        return [cast(Store, self)]

    def check(self) -> None:
        """Do nothing: that the tier cannot be used shows when it opens."""

    def notes(self) -> list[str]:
        """Return nothing: the counts say it all."""
        return []

    def ended(self, key: int, timeout_s: float) -> bool:
        """Answer True: `wait_written` waits."""
        return True

    def arrived(self, key: int, timeout_s: float) -> bool:
        """Answer True: `get` waits."""
        return True

    def cancel(self, key: int) -> None:
        """Do nothing: the write is made."""

    def waits(self) -> bool:
        """Answer False: `put` waits if it must."""
        return False


def require_distinct(stores: Sequence[Store], what: str) -> None:
    """Raise ArgumentError if a store, or one it is built on, is there twice."""
    seen: set[int] = set()
    for store in stores:
        for part in store.parts():
            if id(part) in seen:
                raise ArgumentError(
                    f"{what} name the store {part.name!r} twice; it would "
                    "overwrite its own checkpoints: give each a store of its own"
                )
            seen.add(id(part))


def close_all(stores: list[Store]) -> Exception | None:
    """Close stores and forget them, the last first; return the first failure, if any.

    Interrupted, it can be called again and does the rest.
    """
    failure: Exception | None = None
    while stores:
        try:
            stores[-1].close()
        except Exception as error:  # the rest is given back all the same
            failure = failure or error
        stores.pop()
    return failure


class HeldStore(BaseStore):
    """Base of a store that one run holds from `open` to `close`.

    A class that derives from it implements `_open` and `_close`, and has `_hold` checked by
    each of its methods.

    Parameters
    ----------
    name : str
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.stats = StoreStats()
        self._hold = Hold(name)

    def open(self, layout: Layout) -> None:
        """Open the store, or nothing; see `Store.open`."""
        whole(partial(self._take, layout), self.close)

    def _take(self, layout: Layout) -> None:
        self._hold.take()
        try:
            self._open(layout)
        except BaseException:
            self.close()
            raise

    def _open(self, layout: Layout) -> None:
        """Open the store, which is held by now; what it leaves when it raises is closed."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the threads, give back memory and files.  May be called twice.

        Interrupted, it can be called again and does the rest.  In a forked child it leaves threads
        and files to the parent, and the store can be opened again.
        """
        with Shield(up=True):
            if self._hold.taken:
                failure = self._close()
                # Not if it was interrupted above: its threads may still write there.
                self._hold.give_back()
                if failure is not None:
                    raise failure

    def _close(self) -> Exception | None:
        """Give back what `_open` took, as far as it came; return the first failure."""
        raise NotImplementedError


class JoinedStore(HeldStore):
    """Base of a store that is made of others, its parts, which it opens and closes.

    Parameters
    ----------
    name : str
    stores : sequence of Store
    what : str
        What they are, for messages.
    """

    def __init__(self, name: str, stores: Sequence[Store], what: str) -> None:
        require_distinct(stores, what)
        super().__init__(name)
        self._stores = tuple(stores)
        self._opened: list[Store] = []
        self._told: deque[TransferRecord] = deque(maxlen=100_000)

    def parts(self) -> Sequence[Store]:
        """Return this store, those it is made of, and what they are built on."""
        return [cast(Store, self), *(part for store in self._stores for part in store.parts())]

    def check(self) -> None:
        """Raise StoreError if one of them cannot be used."""
        for store in self._stores:
            store.check()

    def _open_all(self, layout: Layout) -> None:
        """Open all of them; none warns that it is full, since another may not be."""
        for store in self._stores:
            for part in store.parts():
                if isinstance(part, BaseStore):
                    part.warns = False
            store.open(layout)
            self._opened.append(store)

    def _close(self) -> Exception | None:
        return close_all(self._opened)
