"""A store of each rank's own whose answers all ranks share.

A domain-decomposed operator communicates, so every rank must run the same
actions in the same order.  A schedule decides from the answers to its
transfers; so the answers must be the same everywhere:

put, blocking        always yes; a rank without room remembers that it holds
                     nothing
put, opportunistic   yes at least `spacing` steps after the last yes, where
                     `spacing` was agreed a block of writes ahead
wait_written         always yes, once this rank is done with the arrays
get                  agreed in one small reduction: lost on one rank is lost
                     on all

So a lost write shows when it is read, on every rank at once.  Nothing else is
agreed while steps run: one reduction per state read, and one that no rank
waits for per block of writes, none per step.

Why nothing waits forever: all reductions are made on a communicator of our
own, at places that every rank passes in the same order, since the schedule is
the same and has had the same answers.  Take the rank that is furthest behind:
what it waits for was started by the others earlier in that order, or needs
only their threads that never communicate.  So it moves on.  Where an error
takes one rank out of that order, nothing here communicates any more: `drop`,
`wait_written` and `close` are local.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ..backends.base import CheckpointLost, Store
from ..backends.wrapper import WrapperStore
from ..errors import MultistageError
from ..states.layout import Array, Layout
from .ranks import Ranks

# Opportunistic writes between two agreements.  Few, so that a tier that became
# slower is noticed soon; more than a usual queue, so that it can be noticed.
_BLOCK = 4
# What is left of the weight of a block when the next one is over: stores that
# coalesce small states are full only once in several blocks.
_MEMORY = 0.75
# If no rank waited for room, the next block may be this much denser.
_DENSER = 0.9


class AgreedStore(WrapperStore):
    """A store of each rank's own whose answers are the same on every rank.

    Parameters
    ----------
    inner : Store
        This rank's store, closed; on a disk of its own node, for example.
    ranks : Ranks
    clock : callable
        Seconds.

    Attributes
    ----------
    stalled_s : float
        Seconds `put` has waited for room since `open`.

    Notes
    -----
    Meets the contract of `Store` but for one thing: `put` with `block` and
    `wait_written` never say no.  A `put` that does not block may wait too,
    when it was agreed to take the state and this rank has no room yet: then
    the next blocks are agreed to be sparser.  `open` and `get` are collective.

    The rule of the spacing: a rank that took one state every g steps and
    waited for a share f of the time asks for one every g / (1 - f), which it
    could have taken without waiting; a rank that never waited asks for a
    little less than there is; one whose tier is full asks for no more at all.
    The largest wish holds for all, from the block after the next on.
    """

    def __init__(
        self, inner: Store, ranks: Ranks, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        super().__init__(inner)
        self._ranks = ranks
        self._clock = clock
        self.transfers = inner.transfers
        self._pending: Callable[[], float] | None = None
        self._reset()

    def _reset(self) -> None:
        self.stalled_s = 0.0
        self._missing: set[int] = set()  # taken, but not held by this rank
        self._begin(0)

    def _begin(self, key: int) -> None:
        """Start a forward sweep: whatever the schedule offers is taken until agreed otherwise."""
        self._last, self._next, self._spacing = -1, float(key), 1.0
        self._full = False
        self._steps = self._writes = self._elapsed_s = self._waited_s = 0.0
        self._start_block(key)

    def _start_block(self, key: int) -> None:
        self._block_key, self._block_s = key, self._clock()
        self._block_writes, self._block_waited_s = 0, 0.0

    def buffer_bytes(self, layout: Layout) -> int:
        """Return what the inner store says."""
        return self._inner.buffer_bytes(layout)

    def capacity_states(self, layout: Layout) -> int | None:
        """Return what the inner store says."""
        return self._inner.capacity_states(layout)

    def check(self) -> None:
        """Do nothing: a rank that raised alone would leave the others waiting; see `open`."""

    def open(self, layout: Layout) -> None:
        """Open every rank's store, or none.

        Raises
        ------
        StoreError
            On every rank, if it cannot be opened on one, with the message of that one.
        """
        self._pending = None
        ours = False

        def opened() -> None:
            nonlocal ours
            self._inner.open(layout)
            ours = True

        try:
            self._ranks.gather(opened)
        except MultistageError:
            if ours:  # else it may be open for others
                self._inner.close()
            raise
        self.stats, self.transfers = self._inner.stats, self._inner.transfers
        self._reset()

    # ------------------------------------------------------------------ writes

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Take a state if that was agreed; see `Store.put`."""
        if not block:
            if key <= self._last:  # offers ascend within a sweep: this is the next one
                self.settle()
                self._begin(key)
            self._last = key
            if self._block_writes == _BLOCK:
                self._agree(key)
            if key < self._next:
                self.stats.refused += 1
                return False
            self._next = max(self._next + self._spacing, key + self._spacing - 1)
            self._block_writes += 1
        if not self._inner.put(key, arrays):
            before = self._clock()
            if not self._inner.put(key, arrays, block=True):
                self._missing.add(key)
                self._full = True
            waited = self._clock() - before
            self.stalled_s += waited
            self._block_waited_s += waited
        return True

    def _agree(self, key: int) -> None:
        """End a block: take over what was agreed since the last one, and ask for the next."""
        wish = self._wish(key)
        self.settle()
        self._pending = self._ranks.most_later(wish)
        self._start_block(key)

    def _wish(self, key: int) -> float:
        """Return the spacing this rank asks for; see the class."""
        elapsed_s = self._clock() - self._block_s
        self._steps = _MEMORY * self._steps + key - self._block_key
        self._writes = _MEMORY * self._writes + self._block_writes
        self._elapsed_s = _MEMORY * self._elapsed_s + elapsed_s
        self._waited_s = _MEMORY * self._waited_s + self._block_waited_s
        if self._full:
            return float("inf")
        if not self._block_waited_s:
            return max(1.0, _DENSER * self._spacing)
        computed_s = max(self._elapsed_s - self._waited_s, 1e-3 * self._elapsed_s)
        return max(1.0, self._steps / self._writes * self._elapsed_s / computed_s)

    def settle(self) -> None:
        """Take over the spacing asked for last, if any was.  Collective."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._spacing = pending()

    def wait_written(self, key: int) -> bool:
        """Block until this rank is done with the arrays of `key`; True, see the class."""
        if key not in self._missing and not self._inner.wait_written(key):
            self._missing.add(key)
        return True

    def ended(self, key: int, timeout_s: float) -> bool:
        """Answer True: `wait_written` waits.  A clock of one rank must not decide for all."""
        return True

    def arrived(self, key: int, timeout_s: float) -> bool:
        """Answer True: `get` waits, for the same reason."""
        return True

    def cancel(self, key: int) -> None:
        """Do nothing: ranks agree on what is written, and one alone gives up none of it."""

    def waits(self) -> bool:
        """Answer False: `put` waits if it must."""
        return False

    # ------------------------------------------------------------------- reads

    def prefetch(self, key: int) -> None:
        """Queue this rank's read of `key`."""
        if key not in self._missing:
            self._inner.prefetch(key)

    def get(self, key: int) -> list[Array]:
        """Return this rank's arrays, when every rank has its own.  Collective.

        Raises
        ------
        CheckpointLost
            On every rank, if one has lost it.
        """
        arrays: list[Array] | None = None
        reason = "its write failed or found no room"
        if key not in self._missing:
            try:
                arrays = self._inner.get(key)
            except CheckpointLost as error:
                reason = str(error)
        ranks = self._ranks
        first = ranks.least(ranks.size if arrays is not None else ranks.rank)
        if arrays is not None and first == ranks.size:
            return arrays
        if arrays is not None:
            self.stats.lost += 1
            reason = f"rank {first} has lost it"
        self.drop(key)
        raise CheckpointLost(reason)

    def drop(self, key: int) -> None:
        """Free this rank's copy of `key`."""
        self._missing.discard(key)
        self._inner.drop(key)

    def close(self) -> None:
        """Close this rank's store, whatever the others do.  May be called twice."""
        # Not waited for: after an error the others may never get there.
        self._pending = None
        self._inner.close()
