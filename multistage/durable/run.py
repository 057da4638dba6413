"""A durable run: what is on the disk, what to go on with, when to write an adjoint.

The folder is the journal.  Each of its files is complete or absent, so what
it holds is what was reached:

=====================  ========================================================
`run`                  the run began: steps, structure, digest of state 0, costs
`states-K`             these states were computed
`last`                 the forward sweep is over; this is its last state
`adjoint-K`            steps n-1..K are reversed; the newest two are kept
`adjoint-0`            the run is complete
=====================  ========================================================

An adjoint is copied by the computing thread and written by the store's writer.

Several ranks have a folder each; where they go on together, and at which steps
they write adjoints, is agreed (`agreement`).  Everything that may raise where
ranks agree raises on all of them.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
import warnings
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import xxhash

from ..backends.arena import pages
from ..errors import ArgumentError, CheckpointWarning, StateError, StoreError
from ..execute.executor import Resumed
from ..model.chain import Chain
from ..model.costs import Costs
from ..states.arrays import ArrayStates
from ..states.layout import Array
from ..version import __version__
from .agreement import Found, Pace, agree
from .folder import LAST, LEFTOVERS, LOCK, RUN, Folder
from .headers import (
    BadFile,
    Kind,
    RunFacts,
    adjoint_table,
    encode,
    parse_adjoint,
    parse_run,
    parse_states,
    run_table,
    states_table,
)
from .peers import Alone, Peers
from .records import OrderedLayout, checksum_of
from .store import LINGER_S, DurableStore

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")

_CHUNK = 4 << 20


class OrderedStates(ArrayStates):
    """Pytrees of NumPy arrays whose packed form tells their strides."""

    def layout(self, state: Any) -> OrderedLayout:
        return OrderedLayout.of(state)  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """An adjoint on the disk.

    Attributes
    ----------
    name : str
        Of its file.
    step : int
        Steps from here on are reversed.
    given : bytes
        Digest of the adjoint the sweep began with.
    checksum : int
        Of its record.
    offset, file_bytes : int
        Where the record begins, where the file ends.
    """

    name: str
    step: int
    given: bytes
    checksum: int
    offset: int
    file_bytes: int


class DurableRun:
    """The durable side of a `Reversal`.

    Attributes
    ----------
    length : int or None
        Number of steps; None while it is unknown.

    Parameters
    ----------
    path : str or Path
        The folder; made if it does not exist.
    every_s : float
        Seconds between two adjoints, at least.
    label : str
        Must be the same when the run is resumed.
    clock : callable
        Seconds.
    peers : Peers, optional
        The ranks of the run, each of which keeps a folder of its own in `path`.

    Raises
    ------
    ArgumentError
        If a value breaks its rule.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        every_s: float = 60.0,
        label: str = "",
        clock: Callable[[], float] = time.monotonic,
        *,
        peers: Peers | None = None,
    ) -> None:
        if not isinstance(every_s, (int, float)) or not 0 <= every_s < 1e9:
            raise ArgumentError(f"durable_every_s={every_s!r} must be a number of seconds >= 0")
        if not isinstance(label, str):
            raise ArgumentError(f"durable_label={label!r} must be a str")
        self._peers: Peers = Alone() if peers is None else peers
        self._parent = None if peers is None else Path(path)
        self.path = Path(path) if peers is None else Path(path) / rank_name(peers.rank)
        self.costs: Costs | None = None
        self.store = DurableStore(self._opened, linger_s=min(LINGER_S, every_s))
        self._probe = DurableStore(self._opened, "probe", lasting=False)
        self._every_s, self._label, self._clock = every_s, label, clock
        self._folder: Folder | None = None
        self._facts: RunFacts | None = None
        self._begun = False  # `run` is on the disk
        self._taken = False  # and a sweep of this process goes on with it
        self._checked = False  # whether the adjoint's layout was seen to stay
        self._stored: list[int] = []
        self._found_adjoints: list[Snapshot] = []
        self._last: list[Array] | None = None
        self._newest: Snapshot | None = None
        self._adjoint_layout: OrderedLayout | None = None
        self._given = b""
        self._due_s = 0.0
        self._busy = threading.Event()
        self._failure = ""
        self._buffer: Array | None = None
        self._snapshots: list[int] = []
        self._pace: Pace | None = None  # of several ranks
        self._safe = 0  # the furthest adjoint on this rank's disk
        self.complete = False
        self.length: int | None = None

    def _opened(self) -> Folder:
        assert self._folder is not None
        return self._folder

    # ---------------------------------------------------------------- beginning

    def attach(self, layout: OrderedLayout, n_steps: int | None, state: Any) -> None:
        """Open the folder and see what it holds for this run.

        Parameters
        ----------
        n_steps : int or None
            None if the end is found by `until`.

        Raises
        ------
        StoreError
            If the folder cannot be used, is in use, or holds another run.
        """
        self._layout, self._n_steps = layout, n_steps
        packed, _ = layout.pack(layout.arrays(state))
        structure, leaves = layout.describe()
        before = self._facts
        self._facts = RunFacts(
            n_steps=n_steps,
            structure=structure,
            leaves=leaves,
            record_bytes=layout.record_bytes,
            start=layout.digest(packed).hex(),
            label=self._label,
            package=__version__,
            rank=self._peers.rank,
            ranks=self._peers.size,
        )
        if self._folder is not None:
            if self._taken:
                self._restart()
                return
            facts = self._facts

            def compared() -> None:
                if self._begun and before is not None and (what := before.difference(facts)):
                    raise self._another(self._opened(), what)

            self._peers.gather(compared)
            return
        try:
            self._agree(self._peers.gather(self._opening))
        except BaseException:
            folder, self._folder = self._folder, None
            if folder is not None:
                if folder.made:  # there was none: the ranks refuse each other's
                    folder.remove()
                    self._leave()
                folder.close()
            raise

    def _opening(self) -> Found:
        """Open the folder, and tell what it holds.  Raises StoreError."""
        try:
            if self._parent is not None:
                _open_parent(self._parent)
            self._folder = folder = Folder(self.path, create=True)
            _ours_alone(folder)  # before a lock is left among the files of others
            folder.lock()
            return self._look(folder)
        except OSError as error:
            raise StoreError(
                f"durable folder {str(self.path)!r} cannot be read: {error}; choose another"
            ) from error

    def _agree(self, found: Sequence[Found]) -> None:
        """Go on where all ranks can.  Raises StoreError on all of them if they cannot."""
        peers, folder, agreed = self._peers, self._opened(), agree(found)
        if agreed.refusal:
            raise peers.everywhere(folder.refused(agreed.refusal))
        if not agreed.begun:
            if self._begun:
                self._begun = False
                _anew(folder)
                self.store.forget()
            self._last = None
            return
        if agreed.length is None:
            self._last, self.length = None, self._n_steps
            self._found_adjoints = []
        for each in self._found_adjoints:
            if agreed.adjoint is not None and each.step < agreed.adjoint:
                folder.unlink(each.name)  # a rank that was further goes back
            elif each.step == agreed.adjoint:
                self._newest = each
        self._snapshots = [
            each.step
            for each in reversed(self._found_adjoints)
            if agreed.adjoint is None or each.step >= agreed.adjoint
        ]
        below = agreed.length if agreed.adjoint is None else agreed.adjoint
        steps = self.store.adopt(self._layout, folder, below)
        if peers.size > 1:
            held = peers.gather(lambda: array("q", steps).tobytes())
            common = set.intersection(*(set(array("q", each)) for each in held))
            steps = [step for step in steps if step in common]
            self.store.keep(common)
        self._stored = steps
        self.complete = agreed.adjoint == 0

    @property
    def attached(self) -> bool:
        """Whether the folder is open, and locked."""
        return self._folder is not None

    @property
    def taken(self) -> bool:
        """Whether a sweep of this process has gone on with the run: the next begins anew.

        Then the store must be closed before `attach`.
        """
        return self._taken

    def _restart(self) -> None:
        """Forget what the folder holds: the next sweep begins with state 0.

        The process itself began that sweep.  It may have changed what its steps
        compute since, which no file tells.
        """
        self.store.forget()
        self._begun = self._taken = self.complete = False
        self._stored, self._last, self._newest, self._snapshots = [], None, None, []
        self.length = self._n_steps
        _anew(self._opened())

    def _leave(self) -> None:
        """Remove the folder of the ranks, if this was the last in it."""
        if self._parent is not None:
            with contextlib.suppress(OSError):
                self._parent.rmdir()

    def _another(self, folder: Folder, difference: str) -> StoreError:
        return folder.refused(
            f"it holds another run: {difference}; finish that one, name another folder, "
            f"or remove it with `multistage clean --force {self.path}`"
        )

    def _look(self, folder: Folder) -> Found:
        """Take up what is in the folder.  Raises OSError, and StoreError if it is another run."""
        self._begun = self.complete = False
        self._last, self._newest, self._found_adjoints = None, None, []
        self._stored, self._snapshots = [], []
        self.length = self._n_steps
        try:
            header, table = folder.header(RUN)
            facts, costs = parse_run(header, table)
        except FileNotFoundError:
            _anew(folder)  # killed before it began
            if others := [name for name in folder.others(folder.run) if name != LOCK]:
                raise _foreign(folder, others[0]) from None
            self.store.forget()
            self.costs = None
            return Found()
        except (OSError, BadFile) as error:
            if folder.owner(RUN) is None:
                raise _foreign(folder, RUN) from error
            raise folder.refused(
                f"its file {RUN!r} cannot be used: {error}; remove what is left of that run with "
                f"`multistage clean {self.path}`"
            ) from error
        assert self._facts is not None
        if difference := facts.difference(self._facts):
            raise self._another(folder, difference)
        folder.clear(keep=[name for name in folder.names() if not name.startswith(LEFTOVERS)])
        self._begun, self.costs = True, costs
        if costs is not None and costs.state_bytes != self._layout.nbytes:
            self.costs = None
        self._last = self._read_last(folder)
        if self._last is not None:
            assert self.length is not None
            found = snapshots(folder, header.run, self.length)
            self._found_adjoints = [each for each in found if intact(folder, each)]
        return Found(
            header.run,
            None if self._last is None else self.length,
            tuple(each.step for each in self._found_adjoints),
            self._last is not None or any(name.startswith("states-") for name in folder.names()),
        )

    def _read_last(self, folder: Folder) -> list[Array] | None:
        """Return the arrays of the last state, whose step is noted; None if it is not there."""
        try:
            header, table = folder.header(LAST)
            steps, checksums = parse_states(header, table, self._layout.record_bytes)
            (step,) = steps if len(steps) == 1 else (0,)
            if header.run != folder.run or step < 1 or self._n_steps not in (step, None):
                return None
            record = pages(self._layout.record_bytes, touch=False)[: self._layout.record_bytes]
            offset = len(header.prelude) + len(table)
            folder.read(LAST, offset + header.payload_bytes, offset, record)
        except (OSError, BadFile):
            return None
        arrays = self._layout.split(record)
        if arrays is None or checksum_of([record]) != checksums[0]:
            return None
        self.length = step
        return self._layout.unpack(arrays, None)

    def begin(self, costs: Costs) -> Resumed | None:
        """Return where to go on; or write that the run begins, and return None.

        Raises
        ------
        StoreError
            If that cannot be written.
        """
        self._taken = True
        if self._begun:
            end = None
            if self._last is not None:
                end = self.length if self._newest is None else self._newest.step
                assert end is not None
                self.store.release(end)
            return Resumed(tuple(self._stored), self._last, end)
        folder, facts = self._opened(), self._facts
        assert facts is not None

        def published() -> None:
            if folder.run != number:
                folder.clear()
                folder.number(number)
            try:
                table = run_table(facts, costs)
                folder.publish(RUN, [encode(Kind.RUN, folder.run, table, 0)])
            except OSError as error:
                raise folder.refused(f"nothing can be written to it: {error}") from error

        number = self._peers.gather(lambda: folder.run)[0]
        self._peers.gather(published)  # no rank takes a step before all have begun
        self._begun = True
        return None

    @property
    def probe(self) -> DurableStore:
        """A store in the same folder, to measure with."""
        return self._probe

    # --------------------------------------------------------------- the sweeps

    def ended(self, last: Any, n_steps: int) -> None:
        """Write the last state, that of step `n_steps`; return when it is on the disk."""
        self.length = n_steps
        if self._last is not None:
            self._last = None  # the caller has it
            return
        layout = self._layout
        pieces = layout.parts(layout.pack(layout.arrays(last, "the last state"))[0])
        table = states_table([n_steps], [checksum_of(pieces)])
        header = encode(Kind.STATES, self._opened().run, table, layout.record_bytes)
        try:
            self._opened().publish(LAST, [header, *pieces])
        except OSError as error:
            self._warn(f"the last state cannot be written: {error}")

    def start(self, adjoint: Adjoint) -> Adjoint:
        """Return the adjoint to go on with: `adjoint`, or the newest on the disk that came from it.

        Raises
        ------
        ArgumentError
            If it is no pytree of arrays, or another than the run began with.
        StoreError
            If the one on the disk has become unreadable.
        """
        newest = self._newest

        def prepared() -> None:
            self._prepare_adjoint(adjoint, newest)

        self._peers.gather(prepared)
        if newest is not None:
            layout = self._adjoint_layout
            assert layout is not None
            restored: list[Any] = []
            self._peers.gather(lambda: restored.append(self._restored(layout, newest)))
            (adjoint,) = restored
            self._newest = None
        assert self.length is not None
        self._safe = self.length if newest is None else newest.step
        self._busy.clear()
        self._due_s, self._checked = -np.inf, False
        if self._peers.size > 1:
            self._pace = Pace(self._safe - 1, self._every_s, self._clock())
        return adjoint

    def _prepare_adjoint(self, adjoint: Any, newest: Snapshot | None) -> None:
        try:
            layout: Any = OrderedLayout.of(adjoint)
        except StateError as error:
            raise ArgumentError(
                f"a durable run writes the adjoint, which must be a pytree of arrays: {error}"
            ) from error
        packed, _ = layout.pack(layout.arrays(adjoint, "the adjoint"))
        given = layout.digest(packed)
        if newest is not None and newest.given != given:
            raise ArgumentError(
                f"the adjoint differs from the one this run was reversed with down to step "
                f"{newest.step}; give that one, or remove the run with "
                f"`multistage clean --force {self.path}`"
            )
        self._adjoint_layout, self._given = layout, given
        size = layout.record_bytes
        self._buffer = pages(size)[:size]

    def _restored(self, layout: OrderedLayout, found: Snapshot) -> Any:
        try:
            if found.file_bytes != found.offset + layout.record_bytes:
                raise BadFile("it is not of this layout")
            record = pages(layout.record_bytes, touch=False)[: layout.record_bytes]
            self._opened().read(found.name, found.file_bytes, found.offset, record)
            arrays = layout.split(record)
            if arrays is None or checksum_of([record]) != found.checksum:
                raise BadFile("it was changed")
        except (OSError, BadFile) as error:
            raise StoreError(
                f"the adjoint at step {found.step} in {str(self.path)!r} cannot be used: {error}; "
                "begin again with forward()"
            ) from error
        return layout.state(layout.unpack(arrays, None))

    def chain(self, chain: Chain[State, Adjoint]) -> Chain[State, Adjoint]:
        """Return the chain that also writes its adjoints."""
        return _Recorded(chain, self)

    @property
    def due_s(self) -> float:
        """When the next adjoint is to be written."""
        return self._due_s

    def snapshot(self, adjoint: Any, step: int) -> None:
        """Copy the adjoint at `step` for the writer, unless that is still at the one before."""
        if not self._checked:  # at the first step, not after hours
            assert self._adjoint_layout is not None
            self._adjoint_layout.arrays(adjoint, f"the adjoint of step {step}")
            self._checked = True
            self._due_s = self._clock() + self._every_s
            if self._every_s:
                return
        if self._failure:
            failure, self._failure = self._failure, ""
            self._warn(failure)
        if self._busy.is_set() or not step:
            return
        self._due_s = self._clock() + self._every_s
        self._copy(adjoint, step)

    def snapshot_together(self, adjoint: Any, step: int) -> None:
        """Do the same at a step where all ranks do; agree on the next one."""
        layout, pace = self._adjoint_layout, self._pace
        assert layout is not None and pace is not None
        if not self._checked:
            layout.arrays(adjoint, f"the adjoint of step {step}")
            self._checked = True
        now = self._clock()
        mine = pace.says(step, now, busy=self._busy.is_set(), safe=self._safe)
        write, safe = pace.agreed(step, now, self._peers.most_of(mine))
        self.store.release(safe)
        if self._failure:
            failure, self._failure = self._failure, ""
            self._warn(failure)
        if write and step:
            self._copy(adjoint, step, safe)

    def _copy(self, adjoint: Any, step: int, safe: int | None = None) -> None:
        layout, buffer = self._adjoint_layout, self._buffer
        assert layout is not None and buffer is not None
        layout.fill(buffer, layout.pack(layout.arrays(adjoint, f"the adjoint of step {step}"))[0])
        self._busy.set()
        self.store.submit(partial(self._publish, buffer, step, safe))

    def _publish(self, record: Array, step: int, safe: int | None) -> None:
        """Write an adjoint; on the writer.

        Then those of steps after `safe` are of no use, the one of all ranks
        (alone: this one), but one of them, in case that is damaged.
        """
        name = f"adjoint-{step}"
        try:
            table = adjoint_table(step, checksum_of([record]), self._given)
            folder = self._opened()
            header = encode(Kind.ADJOINT, folder.run, table, len(record))
            folder.publish(name, [header, record])
            self._safe = step
            if self._peers.size == 1:
                self.store.release(step)
                safe = step
            self._snapshots.append(step)
            while safe is not None and len(self._snapshots) > 2 and self._snapshots[1] > safe:
                folder.unlink(f"adjoint-{self._snapshots.pop(0)}")
        except Exception as error:  # the computing thread tells the caller
            self._failure = f"the adjoint at step {step} cannot be written: {error}"
        self._busy.clear()

    def finish(self, adjoint: Any) -> None:
        """Write the adjoint of state 0, which ends the run; return when it is on the disk."""
        if not self.complete:
            self.store.flush()
            self._copy(adjoint, 0)
            self.store.flush()
            if self._failure:
                failure, self._failure = self._failure, ""
                self._warn(failure)
        self._peers.gather(lambda: None)  # complete on all ranks, or to be resumed on all
        self.complete = True
        self._buffer = None

    def discard(self) -> None:
        """Remove what a complete run reached, on all ranks; `close` does the rest.

        No rank's folder goes while another holds any progress: killed in
        between, the next call would miss it.  The store is closed.
        """
        folder = self._folder
        if folder is not None:
            folder.clear(keep=[RUN])
        self._peers.gather(lambda: None)

    def close(self, *, remove: bool) -> None:
        """Give the folder back; remove it and its files if wanted.  May be called twice.

        The store is closed by whoever opened it, before.
        """
        folder, self._folder = self._folder, None
        self._buffer = self._last = None
        if folder is None:
            return
        if remove or not self._begun:  # or there is nothing to resume
            folder.remove()
            self._leave()
        folder.close()
        self._begun = self._taken = False

    @staticmethod
    def _warn(what: str) -> None:
        warnings.warn(
            f"{what}; the run goes on, resumed it would compute more again",
            CheckpointWarning,
            stacklevel=3,
        )


class _Recorded(Generic[State, Adjoint]):
    """A chain that hands its adjoints to a durable run when one is due."""

    def __init__(self, chain: Chain[State, Adjoint], run: DurableRun) -> None:
        self.in_place = chain.in_place
        self.state_is_tape = chain.state_is_tape
        self.one_tape = bool(getattr(chain, "one_tape", False))  # chains of before it was required
        self.advance = chain.advance
        self.tape = chain.tape
        step_back, clock, snapshot = chain.reverse, run._clock, run.snapshot
        if run._peers.size > 1:
            self.reverse = _together(step_back, run)
            return

        def reverse(tape: object, adjoint: Adjoint, step: int) -> Adjoint:
            adjoint = step_back(tape, adjoint, step)
            if clock() >= run._due_s and adjoint is not None:  # None is the executor's to refuse
                snapshot(adjoint, step)
            return adjoint

        self.reverse = reverse


def _together(
    step_back: Callable[..., Adjoint], run: DurableRun
) -> Callable[[object, Adjoint, int], Adjoint]:
    """Return the adjoint step of one of several ranks, which act at agreed steps."""

    def reverse(tape: object, adjoint: Adjoint, step: int) -> Adjoint:
        adjoint = step_back(tape, adjoint, step)
        pace = run._pace
        if pace is not None and step <= pace.step:
            run.snapshot_together(adjoint, step)
        return adjoint

    return reverse


def rank_name(rank: int) -> str:
    """Return the name of a rank's folder."""
    return f"rank-{rank:04d}"


RANK_NAME = re.compile(r"rank-[0-9]{4,9}")


def _open_parent(path: Path) -> None:
    """See that a folder is one for folders of ranks.  Raises StoreError."""
    folder = Folder(path, create=True)
    try:
        for name in folder.names():
            if not RANK_NAME.fullmatch(name):
                raise folder.refused(
                    f"it holds {name!r}, which is no folder of a rank; "
                    "name a folder for this run alone"
                )
    finally:
        folder.close()


def _ours_alone(folder: Folder) -> None:
    if any(RANK_NAME.fullmatch(name) for name in folder.strangers()):
        raise folder.refused(
            "it holds the folders of an MPI program's ranks; resume that with MPIReversal, "
            "or name another folder"
        )
    if strangers := folder.strangers():
        raise folder.refused(
            f"it holds files that no durable run wrote, such as {strangers[0]!r}; "
            "name a folder for this run alone"
        )
    run = folder.known()
    if run is None and (others := folder.others(None)):
        raise _foreign(folder, others[0])


def _foreign(folder: Folder, name: str) -> StoreError:
    return folder.refused(
        f"its file {name!r} was not written by this run, nor by one that was killed here; "
        "move it, or name another folder"
    )


def _anew(folder: Folder) -> None:
    """Remove what a run left; let the next be another, lest it take up what could not go."""
    folder.clear()
    folder.number(os.urandom(16))


def snapshots(folder: Folder, run: bytes, n_steps: int | None) -> list[Snapshot]:
    """Return the adjoints in a folder whose headers are good, the furthest first."""
    found = []
    for name in folder.names():
        if not name.startswith("adjoint-"):
            continue
        try:
            header, table = folder.header(name)
            step, checksum, given = parse_adjoint(header, table)
        except (OSError, BadFile):
            continue
        if header.run == run and step >= 0 and (n_steps is None or step <= n_steps):
            offset = len(header.prelude) + len(table)
            size = offset + header.payload_bytes
            found.append(Snapshot(name, step, given, checksum, offset, size))
    return sorted(found, key=lambda each: each.step)


def intact(folder: Folder, found: Snapshot) -> bool:
    """Whether an adjoint's record passes its checksum; read piece by piece."""
    seen = xxhash.xxh3_64()
    piece = np.empty(_CHUNK, np.uint8)
    at = found.offset
    try:
        while at < found.file_bytes:
            part = piece[: min(_CHUNK, found.file_bytes - at)]
            folder.read(found.name, found.file_bytes, at, part)
            seen.update(part.data)
            at += len(part)
    except (OSError, BadFile):
        return False
    return int(seen.intdigest()) == found.checksum
