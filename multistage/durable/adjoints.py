"""What a durable run writes as it goes: when an adjoint or a state is due, how it gets to disk.

It is copied by the computing thread and written by the store's writer.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from ..backends.arena import pages
from ..errors import ArgumentError, CheckpointWarning, StateError, StoreError
from ..model.chain import Chain
from ..states.layout import Array, Layout
from .agreement import Pace, Peers
from .folder import Folder
from .headers import BadFile
from .journal import arrays_in
from .records import OrderedLayout, Records
from .store import DurableStore

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")


class Adjoints:
    """The adjoints of one run, written at most every so many seconds.

    Parameters
    ----------
    store : DurableStore
        Of the run; its writer writes them.
    folder : callable
        Returns the open folder.
    peers : Peers
    every_s : float
        Seconds between two adjoints, at least.
    clock : callable
        Seconds.

    Attributes
    ----------
    on_disk : list of int
        The steps of those in the folder, the furthest last.
    unequal : bool
        Whether each adjoint has a layout of its own.
    """

    def __init__(
        self,
        store: DurableStore,
        folder: Callable[[], Folder],
        peers: Peers,
        every_s: float,
        clock: Callable[[], float],
    ) -> None:
        self.on_disk: list[int] = []
        self.unequal = False
        self._clock = clock
        self._due_s = np.inf  # when the next one is to be written
        self._pace: Pace | None = None  # of several ranks
        self._store, self._folder, self._peers = store, folder, peers
        self._every_s = every_s
        self._checked = False  # whether the layout was seen to stay
        self._layout: OrderedLayout | None = None  # of the adjoint that was given
        self._given = b""
        self._busy = False  # the writer is at one
        self._failure = ""
        self._buffer: Array | None = None
        self._safe = 0  # the furthest adjoint on this rank's disk

    def prepare(self, adjoint: object, newest: Records | None, remedy: str) -> None:
        """Take the layout of the adjoint that the caller gives.

        Parameters
        ----------
        newest : Records or None
            The one on disk that the run is resumed from, if any.
        remedy : str
            For the error, if it came from another adjoint.

        Raises
        ------
        ArgumentError
            If it is no pytree of arrays, or another than the run began with.
        """
        try:
            layout = OrderedLayout.of(adjoint)
        except StateError as error:
            raise ArgumentError(
                f"a durable run writes the adjoint, which must be a pytree of arrays: {error}"
            ) from error
        packed, _ = layout.pack(layout.arrays(adjoint, "the adjoint"))
        given = layout.digest(packed)
        if newest is not None and newest.given != given:
            raise ArgumentError(
                f"the adjoint differs from the one this run was reversed with down to step "
                f"{newest.least}; give that one, or {remedy}"
            )
        self._layout, self._given = layout, given
        self._buffer = pages(layout.record_bytes)

    def restored(self, newest: Records) -> object:
        """Return an adjoint that is on disk.  Raises StoreError."""
        layout, folder = self._layout, self._folder()
        assert layout is not None
        try:
            found, arrays = arrays_in(folder, layout, newest)
            return found.state(arrays)
        except (OSError, BadFile) as error:
            raise StoreError(
                f"the adjoint at step {newest.least} in {str(folder.path)!r} cannot be used: "
                f"{error}; begin again with forward()"
            ) from error

    def begin(self, step: int) -> None:
        """Begin a reverse sweep at `step`, whose adjoint is known to be safe."""
        self._safe = step
        self._busy = False
        self._due_s, self._checked = -np.inf, False
        if self._peers.size > 1:
            self._pace = Pace(step - 1, self._every_s, self._clock())

    def due(self, step: int) -> bool:
        """Whether it is time to write the adjoint at `step`; the same on all ranks."""
        pace = self._pace
        return self._clock() >= self._due_s if pace is None else step <= pace.step

    def snapshot(self, adjoint: object, step: int) -> None:
        """Copy the adjoint at `step` for the writer, unless that is still at the one before.

        Several ranks do so at a step where all of them do, and agree on the next one.
        """
        now, first = self._clock(), not self._checked
        if first:  # at the first step, not after hours
            self._looked_at(adjoint, step)
            self._checked = True
        write, safe = not self._busy, None
        if self._pace is not None:
            mine = self._pace.says(step, now, busy=self._busy, safe=self._safe)
            write, safe = self._pace.agreed(step, now, self._peers.most_of(mine))
            self._store.release(safe)
        elif first and self._every_s:
            self._due_s, write = now + self._every_s, False
        self._tell()
        if write and step:
            self._due_s = now + self._every_s
            self._copy(adjoint, step, safe)

    def _looked_at(self, adjoint: object, step: int) -> tuple[OrderedLayout, list[Array], str]:
        """Return the layout of an adjoint, its arrays and its form.  Raises StateError."""
        first, form = self._layout, ""
        assert first is not None
        layout, where = first, f"the adjoint of step {step}"
        if self.unequal:
            try:
                layout = OrderedLayout.of(adjoint)
                form = layout.form(first)
            except StateError as error:
                raise StateError(f"{where}: {error}") from None
        return layout, layout.arrays(adjoint, where), form

    def _copy(self, adjoint: object, step: int, safe: int | None = None) -> None:
        layout, arrays, form = self._looked_at(adjoint, step)
        size, buffer = layout.record_bytes, self._buffer
        if buffer is None or len(buffer) < size:
            self._buffer = buffer = pages(size)
        layout.fill(buffer[:size], layout.pack(arrays)[0])
        self._busy = True
        self._store.submit(partial(self._publish, buffer[:size], step, safe, form))

    def _publish(self, record: Array, step: int, safe: int | None, form: str) -> None:
        """Write an adjoint; on the writer.

        Then those of steps after `safe` are of no use, the one of all ranks
        (alone: this one), but one of them, in case that is damaged.
        """
        folder, size = self._folder(), len(record)
        try:
            file = Records(f"adjoint-{step}", 0 if self.unequal else size, given=self._given)
            file.add(step, size, form)
            file.write(folder, [record])
            self._safe = step
            if self._peers.size == 1:
                self._store.release(step)
                safe = step
            self.on_disk.append(step)
            while safe is not None and len(self.on_disk) > 2 and self.on_disk[1] > safe:
                folder.unlink(f"adjoint-{self.on_disk.pop(0)}")
        except Exception as error:  # the computing thread reports it to the caller
            self._failure = f"the adjoint at step {step} cannot be written: {error}"
        self._busy = False

    def finish(self, adjoint: object) -> None:
        """Write the adjoint of state 0; return when it is on disk."""
        self._store.flush()
        self._copy(adjoint, 0)
        self._store.flush()
        self._tell()

    def let_go(self) -> None:
        """Give back the memory that adjoints are copied to."""
        self._buffer = None

    def _tell(self) -> None:
        """Warn of an adjoint that could not be written."""
        failure, self._failure = self._failure, ""
        if failure:
            warn_unwritten(failure)


def warn_unwritten(what: str) -> None:
    """Warn of a file that a resumed run will lack."""
    warnings.warn(
        f"{what}; the run continues; if resumed, it would recompute more steps",
        CheckpointWarning,
        stacklevel=4,
    )


class Passed:
    """States that a forward sweep of unequal steps passes, written at most every so many seconds.

    Whatever its plan writes: as states of equal steps are, so that a killed run has them.  The
    store has them as states that were dropped already.  Several ranks write the same ones.

    Parameters
    ----------
    store : DurableStore
    every_s : float
        Seconds between two states, at least.
    clock : callable
        Seconds.
    see : callable
        Returns the layout of a live state, by its step.
    peers : Peers
    """

    def __init__(
        self,
        store: DurableStore,
        every_s: float,
        clock: Callable[[], float],
        see: Callable[[object, int], Layout],
        peers: Peers,
    ) -> None:
        self._store, self._every_s, self._clock, self._see = store, every_s, clock, see
        self._furthest, self._n_steps, self._due_s = 0, 0, 0.0
        self._peers = peers
        self._pace: Pace | None = None  # of several ranks, which counts down

    def begin(self, furthest: int, n_steps: int) -> None:
        """Begin a sweep, whose states up to one were made before; the last is not asked for."""
        self._furthest, self._n_steps = furthest, n_steps
        self._due_s = self._clock() + self._every_s
        if self._peers.size > 1:
            self._pace = Pace(-furthest - 1, self._every_s, self._clock())

    def _due(self, step: int) -> bool:
        """Whether a state is to be written; the same on all ranks."""
        pace, now, idle = self._pace, self._clock(), self._store.idle
        if pace is None:
            return now >= self._due_s and idle
        if -step > pace.step:
            return False
        said = self._peers.most_of(pace.says(-step, now, busy=not idle, safe=0))
        return pace.agreed(-step, now, said)[0]

    def look(self, state: object, step: int) -> None:
        """Copy state `step` for the writer, if it is new and time, and the writer is idle."""
        if step <= self._furthest:
            return
        self._furthest = step
        store = self._store
        if step == self._n_steps or not self._due(step):
            return
        if store.failure:
            warn_unwritten(f"a state cannot be written: {store.failure}")
            store.failure = ""
        layout = self._see(state, step)
        packed, _ = layout.pack(layout.arrays(state, step))
        if store.put(step, [np.array(array) for array in packed]):
            store.drop(step)  # from its index alone, until an adjoint below it is written
        self._due_s = self._clock() + self._every_s


class Recorded(Generic[State, Adjoint]):
    """A chain that hands its adjoints over when one is due, and its states if steps differ."""

    def __init__(
        self, chain: Chain[State, Adjoint], adjoints: Adjoints, passed: Passed | None = None
    ) -> None:
        self.in_place = chain.in_place
        self.state_is_tape = chain.state_is_tape
        self.one_tape = bool(getattr(chain, "one_tape", False))  # chains of before it was required
        self.advance = chain.advance
        self.tape = chain.tape
        step_back, due, snapshot = chain.reverse, adjoints.due, adjoints.snapshot

        def reverse(tape: object, adjoint: Adjoint, step: int) -> Adjoint:
            adjoint = step_back(tape, adjoint, step)
            # An adjoint of None is the executor's to refuse.
            if due(step) and adjoint is not None:
                snapshot(adjoint, step)
            return adjoint

        self.reverse = reverse
        if passed is None:
            return

        def advance(state: State, start: int, stop: int) -> State:
            for i in range(start, stop):
                state = chain.advance(state, i, i + 1)
                passed.look(state, i + 1)
            return state

        def tape(state: State, step: int) -> tuple[State, object]:
            after, made = chain.tape(state, step)
            passed.look(after, step + 1)
            return after, made

        self.advance, self.tape = advance, tape
