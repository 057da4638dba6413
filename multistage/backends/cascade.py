"""One tier made of two stores: what the upper has no room for moves on to the lower.

Each state is put into the upper store.  The oldest move down, since they are needed last; when the
reverse sweep frees room above, the youngest of those below come up again, so that the lower
store works all the time and is waited for little.

The computing thread alone calls the two stores, whose own threads move the bytes: each call of the
cascade takes a few moves further.  A state is read where it came from until it has been written
where it goes; only then is its first copy dropped.  Small states that lie in one extent with one
that has moved go with it, by one call of the C core.

What a fault does:

============================  ================================================
the upper store fills up      what it holds then is its capacity from now on
a move down fails             the state stays above; after some in a row
                              nothing more is taken down, and the cascade is
                              full when the upper store is
a move up fails               the state stays below and is read from there
reading it to move it fails   the state is lost
============================  ================================================
"""

from __future__ import annotations

import itertools
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import ArgumentError, StoreError
from ..states.layout import Array, Layout
from ..support.interrupts import Shield
from .arena import round_up
from .base import CheckpointLost, JoinedStore, Store, StoreStats, TransferRecord
from .medium import warn_full
from .streamed import StreamedStore

_FAILURES = 3  # in a row, then nothing more is moved down
_SPARE_PART = 4  # states go down from when less than this part is free: writes seldom wait
_MOVES = 2  # that are under way at a time
_AT_ONCE = 4  # moves that one call may begin
_OFFERS = 3  # to a store that was busy, but is not any more
_LONG_S = 60.0  # of one wait for a move


@dataclass(eq=False, slots=True)
class State:
    """One state, and which store has it: neither once it is lost.

    Attributes
    ----------
    number : int
        Of it in both stores, where no other has had it: one with the same key may still be moved.
    target : Store or None
        Where it moves to.
    sent : bool
        Whether that store has been given it.
    stays : bool
        Not to be moved: it was asked for, or could not be brought up.
    placed : bool
        Counted among the bytes that are stored.
    cancelled : bool
        Its write was given up: a failure is no loss then.
    gone : bool
        Dropped; its copies are once its move has ended.
    """

    key: int
    number: int
    nbytes: int
    above: bool = True
    below: bool = False
    target: Store | None = None
    sent: bool = False
    stays: bool = False
    placed: bool = False
    cancelled: bool = False
    gone: bool = False


class CascadeStore(JoinedStore):
    """Checkpoints in one store, and beyond its capacity in a second one below it.

    Parameters
    ----------
    upper : Store
        Takes every state first: memory, a NUMA node, files.  Its capacity must
        be given.  Closed, and not used elsewhere.
    lower : Store
        Takes the oldest states when the upper fills: files, a remote store,
        or another cascade.

    Raises
    ------
    ArgumentError
        If the upper has no capacity, or a level loses information.
    StoreError
        From `open`, if a level cannot be used.

    Examples
    --------
    >>> import numpy as np
    >>> from multistage.backends import MemoryStore
    >>> from multistage.states.layout import Layout
    >>> store = CascadeStore(MemoryStore(32 << 10), MemoryStore())
    >>> layout = Layout.of(np.zeros(512))
    >>> store.open(layout)
    >>> all(store.put(key, [np.full(512, float(key))], block=True) for key in range(100))
    True
    >>> float(store.get(0)[0][0]), float(store.get(99)[0][0])
    (0.0, 99.0)
    >>> store.close()
    """

    _alike = True  # both levels take and return the same kind of arrays
    _kept_free = 0  # states there should be room for above; 0: a part of them

    def __init__(self, upper: Store, lower: Store) -> None:
        for what, level in (("upper", upper), ("lower", lower)):
            if not level.exact:
                raise ArgumentError(
                    f"the {what} level {level.name!r} of a cascade loses information, and more "
                    "each time that a state moves; compress it by blosc"
                )
        if upper.capacity_bytes is None:
            raise ArgumentError(
                f"the upper level {upper.name!r} of a cascade needs a capacity, as in "
                "file:///scratch?capacity=10GiB; what is beyond it moves on to the lower"
            )
        self._join(upper, lower)

    def _join(self, upper: Store, lower: Store) -> None:
        super().__init__(f"{upper.name}>{lower.name}", [upper, lower], "the levels of a cascade")
        self._upper, self._lower = upper, lower
        self.exact = lower.exact
        self.queue_depth = upper.queue_depth
        above, below = upper.capacity_bytes, lower.capacity_bytes
        self.capacity_bytes = None if above is None or below is None else above + below
        self._sunk = self._risen = self._failed = 0

    # ------------------------------------------------------------------ what it is

    @property
    def transfers(self) -> deque[TransferRecord]:
        """Finished transfers of the upper store, and reads of the lower one."""
        for level in self._stores:
            while level.transfers:
                record = level.transfers.popleft()
                if level is self._upper or record.kind == "read":
                    self._told.append(record)
        return self._told

    @property
    def levels(self) -> Sequence[Store]:
        """The upper store and the lower."""
        return self._stores

    def notes(self) -> list[str]:
        """Return what moved between the levels, and what the levels say."""
        said = f"{self._sunk} states moved down, {self._risen} brought up again"
        if self._failed:
            said += f", {self._failed} moves failed"
        return [said, *(note for level in self._stores for note in level.notes())]

    def buffer_bytes(self, layout: Layout) -> int:
        """Return the bytes of I/O buffers, those of the levels and of moves counted."""
        moving = _MOVES * round_up(layout.nbytes)
        return sum(level.buffer_bytes(layout) for level in self._stores) + moving

    def capacity_states(self, layout: Layout) -> int | None:
        """Return how many states both levels hold together, None if unbounded."""
        above, below = (level.capacity_states(layout) for level in self._stores)
        if above is None or below is None:
            return None
        together = self._together(layout, self._upper)
        return above + below // together * together

    def _together(self, layout: Layout, level: Store) -> int:
        """Return how many states share an extent, whose room is free once none is left there."""
        return level.per_extent(layout) if isinstance(level, StreamedStore) else 1

    # -------------------------------------------------------------------- its life

    def _open(self, layout: Layout) -> None:
        self._require_room(layout)
        self._upper.queue_depth = self.queue_depth
        most = self._upper.capacity_states(layout)
        self._most = 1 << 62 if most is None else most
        together = [self._together(layout, level) for level in self._stores]
        self._room = together[0]  # to be left above for what is put next
        self._lot = min(together)  # states that move as one
        # With one small state an extent is moved, which takes as long as many calls.
        self._at_a_time, self._seldom = (_MOVES, 1) if self._lot == 1 else (1, 8)
        self._looks = 0
        self._spare = self._kept_free or max(1, (most or 0) // _SPARE_PART)
        self._most_states = None if layout.varied else self.capacity_states(layout)
        self.stats = StoreStats()
        self._told.clear()
        self._states: dict[int, State] = {}
        self._above: OrderedDict[State, None] = OrderedDict()  # the oldest first
        self._below: OrderedDict[State, None] = OrderedDict()  # those that may come up
        self._moves: list[State] = []
        self._sunk = self._risen = self._failed = 0
        self._ended = self._failures = 0  # moves, well or not; moves down that failed in a row
        self._is_full = False  # the lower store, as far as the last move down has shown
        self._short = False  # a state found no room, which moves will make
        self._rising = False  # nothing was put since the last read
        self._warned = False
        self._numbers = itertools.count()
        self._open_all(layout)

    def _require_room(self, layout: Layout) -> None:
        if self._upper.capacity_states(layout) == 0:
            raise StoreError(
                f"tier {self.name!r}: the capacity of its upper level, "
                f"{self._upper.capacity_bytes} bytes < {round_up(layout.nbytes)} bytes of one "
                "state; raise it, or name the lower level alone"
            )

    # ---------------------------------------------------------------------- writes

    def put(self, key: int, arrays: Sequence[Array], *, block: bool = False) -> bool:
        """Queue the write of one state above; see `Store.put`."""
        self._hold.check()
        self._rising = False
        if key in self._states:
            with Shield(up=True):
                self._drop(key)
        nbytes = 0
        for array in arrays:
            nbytes += array.nbytes
        # Known before it is put: where Ctrl-C comes in between it is lost.
        state = self._states[key] = State(key, next(self._numbers), nbytes)
        try:
            accepted = self._placed(state, arrays, block)
        except BaseException:
            with Shield(up=True):
                self._drop(key)
            raise
        stats = self.stats
        if not accepted:
            del self._states[key]
            stats.refused += 1
            return False
        # Where Ctrl-C comes here it is not moved, or not counted.
        (self._above if state.above else self._below)[state] = None
        state.placed = True
        stats.stored_bytes += nbytes
        stats.peak_stored_bytes = max(stats.peak_stored_bytes, stats.stored_bytes)
        stats.writes += 1
        stats.bytes_written += nbytes
        self._go_on()
        return True

    def _placed(self, state: State, arrays: Sequence[Array], block: bool) -> bool:
        """Put a state above; as long as that is full, wait for moves down if it may block."""
        self._short = False
        if self._most_states is not None and len(self._states) > self._most_states:
            return self._refused()
        while not (accepted := self._offer(self._upper, state, arrays, block)):
            if accepted is not None:
                return False
            before = self._ended
            with Shield(up=True):
                self._advance(pressed=True)
            if self._ended > before:
                continue
            if not self._moves:
                # Below at once: what was dropped above is still being read there.
                if not self._takes():
                    return self._refused()
                if not self._alike:
                    if not self._unasked():
                        return self._refused()
                    continue
                state.above, state.below = False, True
                accepted = self._offer(self._lower, state, arrays, block)
                self._short = accepted is False
                return self._refused() if accepted is None else accepted
            if not block:
                self._short = True
                return False
            self._wait_for_move()
        return True

    def _unasked(self) -> bool:
        """Let states above move that were asked for, but not read; whether there are any."""
        asked = [each for each in self._above if each.stays and each.above]
        for each in asked:
            each.stays = False
        return bool(asked)

    def _offer(
        self, store: Store, state: State, arrays: Sequence[Array], block: bool
    ) -> bool | None:
        """Put a state into a store; return None if that is full, False if it is busy."""
        for _ in range(_OFFERS):
            before = store.stats.refused_full
            if store.put(state.number, arrays, block=block):
                return True
            if block or store.stats.refused_full > before:
                return None
            if store.waits():
                return False
        return None  # it says neither

    def _refused(self) -> bool:
        self.stats.refused_full += 1
        if self.warns and not self._warned:
            self._warned = True
            capacity = self.capacity_bytes
            used = f"its capacity of {capacity} bytes is used"
            warn_full(f"tier {self.name!r}", used if capacity else "both levels are full")
        return False

    def wait_written(self, key: int) -> bool:
        """Block until the arrays of `key` are not read any more; False if they are lost."""
        self._hold.check()
        state = self._states.get(key)
        if state is None:
            return False
        written = (state.above and self._upper.wait_written(state.number)) or (
            state.below and self._lower.wait_written(state.number)
        )
        state.cancelled = state.cancelled and not written
        if not written:
            self._lose(state)
        return written

    def _lose(self, state: State) -> None:
        with Shield(up=True):
            self.stats.lost += not state.cancelled
            self._drop(state.key)

    def cancel(self, key: int) -> None:
        """Give up the write of a state; see `Store.cancel`."""
        self._hold.check()
        state = self._states.get(key)
        if state is not None:
            state.cancelled |= not self.ended(key, 0.0)  # what is written stays
            self._level(state).cancel(state.number)

    def ended(self, key: int, timeout_s: float) -> bool:
        """Wait for a write, no longer than so many seconds; see `Store.ended`."""
        self._hold.check()
        state = self._states.get(key)
        return state is None or self._level(state).ended(state.number, timeout_s)

    def waits(self) -> bool:
        """Whether a `put` with `block` would wait now."""
        self._hold.check()
        self._go_on()
        is_full = self._short or len(self._above) >= self._most
        below = self._alike and self._takes()  # where it goes at once if nothing moves
        busy = self._moves or (below and self._lower.waits())
        return self._upper.waits() or (is_full and bool(busy))

    def _level(self, state: State) -> Store:
        """Return the store that a state is read from."""
        return self._upper if state.above else self._lower

    # ----------------------------------------------------------------------- reads

    def prefetch(self, key: int) -> None:
        """Queue a read of `key` in the store that has it."""
        self._hold.check()
        self._rising = True
        state = self._states.get(key)
        if state is not None:
            state.stays = True
            if state.target is self._upper and not state.sent:
                with Shield(up=True):
                    self._end_move(state)  # it is most likely dropped next
            if not state.above:
                self._below.pop(state, None)
            self._level(state).prefetch(state.number)

    def arrived(self, key: int, timeout_s: float) -> bool:
        """Wait for a read, no longer than so many seconds; see `Store.arrived`."""
        self.prefetch(key)
        state = self._states.get(key)
        return state is None or self._level(state).arrived(state.number, timeout_s)

    def get(self, key: int) -> list[Array]:
        """Block until the read of `key` is done; return its arrays.  Raises CheckpointLost."""
        self._hold.check()
        self._rising = True
        state = self._states.get(key)
        if state is not None and not state.stays:
            self.prefetch(key)
        self._go_on()
        if state is None:
            raise CheckpointLost(f"tier {self.name!r} has no checkpoint {key}")
        try:
            arrays = self._read(state)
        except CheckpointLost:
            self._lose(state)
            raise
        state.stays = not state.above
        self.stats.reads += 1
        self.stats.bytes_read += state.nbytes
        return arrays

    def _read(self, state: State) -> list[Array]:
        if state.above:
            try:
                return self._upper.get(state.number)
            except CheckpointLost:
                if not state.below:  # it was being brought up
                    raise
        elif not state.below:
            raise CheckpointLost("it could not be read to be moved to the lower level")
        return self._from_below(self._lower.get(state.number))

    def drop(self, key: int) -> None:
        """Free the copies of `key`.  Unknown keys are ignored."""
        self._hold.check()
        if self._moves:
            with Shield(up=True):
                self._drop(key)
        else:
            self._drop(key)

    def _drop(self, key: int) -> None:
        state = self._states.get(key)
        if state is None:
            return
        if state.target is None:
            self._free(state)  # first: after Ctrl-C it can be dropped again
        elif state.sent:
            state.target.cancel(state.number)
        state.gone = True
        self._above.pop(state, None)
        self._below.pop(state, None)
        if state.placed:
            state.placed = False
            self.stats.stored_bytes -= state.nbytes
        self._states.pop(key, None)

    def _free(self, state: State) -> None:
        """Drop the copies of a state that is gone."""
        self._upper.drop(state.number)
        if state.below:
            self._lower.drop(state.number)
            self._is_full = False

    # ----------------------------------------------------------------------- moves

    def _go_on(self) -> None:
        """Take moves further where there are any."""
        if self._moves:
            self._looks += 1
            if self._looks % self._seldom:
                return
        elif not self._next(False):
            return
        with Shield(up=True):
            self._advance()

    def _advance(self, *, pressed: bool = False) -> None:
        """Take moves further, and begin others; one down at least where room is `pressed` for."""
        for state in tuple(self._moves):
            self._further(state)
        pressed = pressed and all(each.target is self._upper for each in self._moves)
        for _ in range(_AT_ONCE):
            found = self._next(pressed) if len(self._moves) < self._at_a_time else None
            if found is None:
                return
            found.target = self._lower if found.above else self._upper
            self._moves.append(found)
            self._further(found)
            pressed = False

    def _next(self, pressed: bool) -> State | None:
        """Return the state to move now."""
        left = self._most - len(self._above)
        for each in self._moves:
            if not each.gone:
                left += 1 if each.target is self._lower else -1
        movable: Iterable[State]
        if pressed or (left < self._spare and not self._rising):
            movable = self._above if self._takes() else ()
        elif self._rising and left >= self._room + self._lot and self._alike:
            movable = reversed(self._below)
        else:
            return None
        return next((each for each in movable if not (each.target or each.stays)), None)

    def _takes(self) -> bool:
        """Whether the lower store takes states, as far as the last ones have shown."""
        return self._failures < _FAILURES and not self._is_full

    def _further(self, state: State, *, block: bool = False) -> None:
        """Take a move as far as it goes, without waiting unless it may block.

        Two that go the same way are sent, and end, in the order in which they began.
        """
        assert state.target is not None
        target, down = state.target, state.target is self._lower
        ahead = self._moves[0]
        second = ahead is not state and ahead.target is target
        try:
            if not state.sent:
                in_turn = ahead.sent or not second
                if not (in_turn and self._send(state, target, block)):
                    return
            if second or not target.ended(state.number, 0.0):
                return
            written = target.wait_written(state.number)
        except CheckpointLost:  # as it was read
            state.above, state.stays, written = False, True, False
        except Exception:  # whatever a store raises: the state stays where it is
            written = False
            self._failures += down
        else:
            self._failures = 0 if written else self._failures + (down and not state.gone)
        if written:
            self._moved(state, down)
        elif not state.gone:
            self._failed += 1
            if not down:
                state.above, state.stays = False, True
        self._end_move(state)

    def _send(self, state: State, target: Store, block: bool) -> bool:
        """Give a state to the store it moves to, once it was read; return whether that has it."""
        down = target is self._lower
        if not self._readable(state, 0.0):
            return False
        if not state.gone:
            if target.waits() and not block:
                return False
            arrays = self._from_above(state) if down else self._lower.get(state.number)
            if arrays is None:
                return False
            state.sent = True  # first: the store is at it
            accepted = self._offer(target, state, arrays, block)
            if accepted:
                state.above = True  # from now on, or below again if that fails
                return True
            if accepted is not None:
                state.sent = False
                return False
            self._is_full = self._is_full or down
            state.stays = state.stays or not down
        self._end_move(state)
        return False

    def _moved(self, state: State, down: bool) -> None:
        """Note that a state was written where it moved to, and let others go with it."""
        self._is_full = False  # or it was busy
        if state.gone:
            state.below = True
            return
        if down and state.stays:  # it was asked for meanwhile
            self._lower.drop(state.number)
            return
        (self._upper if down else self._lower).drop(state.number)
        for each in (state, *(self._along(state, down) if self._lot > 1 else ())):
            each.above, each.below = not down, down
            if down:
                self._sunk += 1
                self._above.pop(each, None)
                self._below[each] = None
            else:
                self._risen += 1
                self._below.pop(each, None)
                self._above[each] = None
                self._above.move_to_end(each, last=False)  # older than all that never went down

    def _along(self, state: State, down: bool) -> list[State]:
        """Move small states that lie in one extent with one that has moved; return them."""
        most = self._lot if down else min(self._lot, self._most - len(self._above) - self._room)
        found, ahead = list[State](), state
        for ahead in self._above if down else reversed(self._below):
            if ahead is not state:
                if ahead.stays or len(found) >= most:
                    break
                found.append(ahead)
        source, target = self._stores if down else reversed(self._stores)
        assert isinstance(source, StreamedStore) and isinstance(target, StreamedStore)
        moved = source.pass_on([each.number for each in found], target)
        if len(found) >= most and not ahead.stays:
            source.prefetch(ahead.number)  # most likely it moves next
        return found[:moved]

    def _end_move(self, state: State) -> None:
        self._moves.remove(state)
        self._ended += 1
        state.target, state.sent = None, False
        if state.stays and not state.above:
            self._above.pop(state, None)
            self._below.pop(state, None)
        if state.gone:
            self._free(state)

    def _wait_for_move(self) -> None:
        """Wait until a move may go on."""
        state = next((each for each in self._moves if each.sent), self._moves[0])
        if state.sent and state.target is not None:
            state.target.ended(state.number, _LONG_S)
        elif self._readable(state, _LONG_S):
            with Shield(up=True):
                self._further(state, block=True)

    # What pinned memory does another way.

    def _readable(self, state: State, timeout_s: float) -> bool:
        """Wait for the arrays of a state that moves, at most so long; whether they are there."""
        source = self._upper if state.target is self._lower else self._lower
        return source.arrived(state.number, timeout_s)

    def _from_above(self, state: State) -> list[Array] | None:
        """Return the arrays of a state above, for the store below; None if not there yet."""
        return self._upper.get(state.number)

    def _from_below(self, arrays: list[Array]) -> list[Array]:
        """Return arrays from the store below as the upper one returns them."""
        return arrays
