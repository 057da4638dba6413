"""A durable run: what is on the disk, what to continue with, when to write an adjoint.

`journal` reads what is on the disk; `Adjoints` writes what the reverse sweep has reached, and
`Passed` what the forward sweep has where steps differ.

Several ranks have a folder each; where they continue together, and at which steps
they write adjoints, is agreed (`agreement`).  Everything that may raise where
ranks agree raises on all of them.
"""

from __future__ import annotations

import contextlib
import os
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

from ..errors import ArgumentError, StoreError
from ..execute.executor import Resumed
from ..model.chain import Chain
from ..model.costs import Costs
from ..states.in_place import VariedStates
from ..states.layout import Array
from ..support.values import folder_path
from ..version import __version__
from .adjoints import Adjoints, Passed, Recorded, warn_unwritten
from .agreement import Alone, Found, Peers, agree
from .folder import LAST, LEFTOVERS, LOCK, RUN, SYSTEMS, Folder
from .headers import UNEQUAL, VERSION, BadFile, Kind, RunFacts, encode, run_table
from .journal import RANK_NAME, Journal, arrays_in, rank_name
from .records import OrderedLayout, Records
from .store import LINGER_S, DurableStore

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")

CLEAN = "multistage clean --force"  # removes a run that is not complete


class DurableRun:
    """The durable side of a `Reversal`.

    Attributes
    ----------
    length : int or None
        Number of steps; None while it is unknown.
    probe : DurableStore
        A store in the same folder, to measure with.
    states : VariedStates or None
        What describes states, where steps differ.
    begun : bool
        Whether the folder holds a run to be resumed.
    taken : bool
        Whether a sweep of this process has resumed the run: the next one starts again.  Then
        the store must be closed before `attach`.

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
        folder = folder_path(path, "durable")
        self._parent = None if peers is None else folder
        self.path = folder if peers is None else folder / rank_name(peers.rank)
        self.costs: Costs | None = None
        self.states: VariedStates | None = None
        self._passed: Passed | None = None
        self.store = DurableStore(self._opened, linger_s=min(LINGER_S, every_s))
        self.probe = DurableStore(self._opened, "probe", lasting=False)
        self._adjoints = Adjoints(self.store, self._opened, self._peers, every_s, clock)
        self._label, self._every_s, self._clock = label, every_s, clock
        self._folder: Folder | None = None
        self._facts: RunFacts | None = None
        self.taken = False
        self._outdated: bytes | None = None  # number of a run to be removed
        self._n_steps: int | None = None
        self._find_nothing()

    def _find_nothing(self) -> None:
        """Know of nothing in the folder."""
        self.begun = False
        self.complete = False
        self.length = self._n_steps
        self._stored: list[int] = []
        self._layouts: dict[int, OrderedLayout] = {}  # of what is there, where steps differ
        self._found_adjoints: tuple[Records, ...] = ()
        self._last: list[Array] | None = None
        self._newest: Records | None = None
        self._adjoints.on_disk = []

    def _opened(self) -> Folder:
        assert self._folder is not None
        return self._folder

    # ---------------------------------------------------------------- beginning

    def attach(self, layout: OrderedLayout, n_steps: int | None, state: object) -> None:
        """Open the folder and see what it holds for this run.

        Parameters
        ----------
        layout : OrderedLayout
            Of state 0.
        n_steps : int or None
            None if the end is found by `until`.

        Raises
        ------
        StoreError
            If the folder cannot be used, is in use, or holds another run.
        """
        self._layout, self._n_steps = layout, n_steps
        before = self._facts
        facts = facts_of(layout, state, n_steps, self._label, self._peers)
        self._facts = facts = replace(facts, unequal=self._passed is not None)
        if self._folder is not None:
            if self.taken:
                self._restart()
                return

            def compared() -> None:
                if self.begun and before is not None and (what := before.difference(facts)):
                    raise another_run(self._opened(), what)

            self._peers.gather(compared)
            return
        try:
            self._agree(self._peers.gather(self._opening))
        except BaseException:
            folder, self._folder = self._folder, None
            if folder is not None:
                try:
                    if folder.made:  # there was none: the ranks refuse each other's
                        folder.remove()
                        self._leave()
                finally:
                    folder.close()
            raise

    def _opening(self) -> Found:
        """Open the folder and return its contents.  Raises StoreError."""
        try:
            if self._parent is not None:
                open_parent(self._parent)
            while True:
                self._folder = folder = Folder(self.path, create=True)
                ours_alone(folder)  # before a lock is left among the files of others
                if folder.lock():
                    break
                folder.close()  # its last user has removed it: make another
            if folder.run == self._outdated:
                anew(folder)
            return self._look(folder)
        except OSError as error:
            raise StoreError(
                f"durable folder {str(self.path)!r} cannot be read: {error}; choose another"
            ) from error

    def _agree(self, found: Sequence[Found]) -> None:
        """Go on where all ranks can.  Raises StoreError on all of them if they cannot."""
        peers, folder = self._peers, self._opened()
        try:
            agreed = agree(found)
        except StoreError as error:
            raise peers.everywhere(folder.refused(str(error))) from None
        if agreed.run is None:
            if self.begun:
                self.begun = False
                anew(folder)
                self.store.forget()
            self._last = None
            return
        if agreed.length is None:
            self._last, self.length = None, self._n_steps
            self._found_adjoints = ()
        adjoint = next(iter(agreed.adjoints), None)
        for each in self._found_adjoints:
            if adjoint is not None and each.least < adjoint:
                folder.unlink(each.name)  # a rank that was further goes back
            else:
                self._adjoints.on_disk.insert(0, each.least)
                if each.least == adjoint:
                    self._newest = each
        below = agreed.length if adjoint is None else adjoint
        steps = self.store.adopt(self._layout, folder, below)
        self._layouts |= self.store.adopted
        if peers.size > 1:
            held = peers.gather(lambda: array("q", steps).tobytes())
            common = set.intersection(*(set(array("q", each)) for each in held))
            steps = [step for step in steps if step in common]
            self.store.keep(common)
        self._stored = steps
        self.complete = adjoint == 0

    @property
    def attached(self) -> bool:
        """Whether the folder is open, and locked."""
        return self._folder is not None

    def _restart(self) -> None:
        """Forget what the folder holds: the next sweep begins with state 0.

        The process itself began that sweep.  It may have changed what its steps
        compute since, which no file records.
        """
        self._outdated = self._opened().run  # if that fails, the next call does it
        self._peers.gather(lambda: anew(self._opened()))
        self.store.forget()
        self._find_nothing()
        self.taken = False

    def _leave(self) -> None:
        """Remove the folder of the ranks, if this was the last in it."""
        if self._parent is not None:
            with contextlib.suppress(OSError):
                self._parent.rmdir()

    def _look(self, folder: Folder) -> Found:
        """Take up what is in the folder.  Raises OSError, and StoreError if it is another run."""
        self._find_nothing()
        try:
            journal = Journal.of(folder)
        except FileNotFoundError:
            anew(folder)  # killed before it began
            if others := [name for name in folder.others(folder.run) if name != LOCK]:
                raise foreign(folder, others[0]) from None
            self.store.forget()
            self.costs = None
            return Found()
        except (OSError, BadFile) as error:
            if folder.owner(RUN) is None:
                raise foreign(folder, RUN) from error
            raise folder.refused(
                f"its file {RUN!r} cannot be used: {error}; remove what is left of that run with "
                f"`multistage clean {self.path}`"
            ) from error
        assert self._facts is not None
        if difference := journal.facts.difference(self._facts):
            raise another_run(folder, difference)
        folder.clear(keep=[name for name in folder.names() if not name.startswith(LEFTOVERS)])
        self.begun, self.costs = True, journal.costs
        if self.costs is not None and self.costs.state_bytes != self._layout.nbytes:
            self.costs = None
        if journal.last is not None:
            with contextlib.suppress(OSError, BadFile):  # else it is computed again
                layout, self._last = arrays_in(folder, self._layout, journal.last)
                self.length, self._found_adjoints = journal.n_steps, journal.adjoints
                if journal.facts.unequal:
                    self._layouts[journal.last.least] = layout
        return Found(
            journal.run,
            None if self._last is None else self.length,
            tuple(each.least for each in self._found_adjoints),
            self._last is not None or any(name.startswith("states-") for name in folder.names()),
        )

    def begin(self, costs: Costs | None) -> Resumed | None:
        """Return where to continue; or write that the run begins, and return None.

        `costs` are noted for those who resume, of steps that are alike.

        Raises
        ------
        StoreError
            If that cannot be written.
        """
        self.taken = True
        newest = max(self._stored, default=0) if self._last is None else self.length
        if self._passed is not None:
            assert newest is not None and self._n_steps is not None
            self._passed.begin(newest, self._n_steps)
        if self.begun:
            end = None
            if self._last is not None:
                end = self.length if self._newest is None else self._newest.least
                assert end is not None
                self.store.release(end)
            return Resumed(tuple(self._stored), self._last, end, self.length, self._layouts)
        folder, facts = self._opened(), self._facts
        assert facts is not None

        def published() -> None:
            if folder.run != number:
                folder.clear()
                folder.number(number)
            try:
                table = run_table(facts, costs)
                version = UNEQUAL if facts.unequal else VERSION
                folder.publish(RUN, [encode(Kind.RUN, folder.run, table, 0, version)])
            except OSError as error:
                raise folder.refused(f"nothing can be written to it: {error}") from error

        number = self._peers.gather(lambda: folder.run)[0]
        self._peers.gather(published)  # no rank writes a state before all have begun
        self.begun = True
        return None

    # --------------------------------------------------------------- the sweeps

    def ended(self, last: object, n_steps: int) -> None:
        """Write the last state, that of step `n_steps`; return when it is on the disk."""
        self.length = n_steps
        if self._last is not None:
            self._last = None  # the caller has it
            return
        layout, folder, form = self._layout, self._opened(), ""
        if self.store.layout_at is not None:
            layout = cast(OrderedLayout, self.store.layout_at(n_steps))
            form = layout.form(self._layout)
        file = Records(LAST, 0 if form else layout.record_bytes)
        file.add(n_steps, layout.record_bytes, form)
        try:
            pieces = layout.parts(layout.pack(layout.arrays(last, "the last state"))[0])
            file.write(folder, pieces)
        except OSError as error:
            warn_unwritten(f"the last state cannot be written: {error}")

    def start(self, adjoint: Adjoint) -> Adjoint:
        """Return `adjoint`, or the newest adjoint on the disk that was computed from it.

        Raises
        ------
        ArgumentError
            If it is no pytree of arrays, or another than the run began with.
        StoreError
            If the one on the disk has become unreadable.
        """
        newest = self._newest

        adjoints, remedy = self._adjoints, f"remove the run with `{CLEAN} {self.path}`"
        self._peers.gather(lambda: adjoints.prepare(adjoint, newest, remedy))
        begin = self.length if newest is None else newest.least
        if newest is not None:
            restored: list[object] = []
            self._peers.gather(lambda: restored.append(adjoints.restored(newest)))
            adjoint = cast(Adjoint, restored[0])
            self._newest = None
        assert begin is not None
        adjoints.begin(begin)
        return adjoint

    def chain(
        self, chain: Chain[State, Adjoint], *, unequal: bool = False
    ) -> Chain[State, Adjoint]:
        """Return the chain that also writes its adjoints, and its states where steps differ."""
        if unequal:
            self.states = states = VariedStates(chain.in_place, OrderedLayout)
            self.store.layout_at, self._adjoints.unequal = states.at, True
            every_s, clock, peers = self._every_s, self._clock, self._peers
            self._passed = Passed(self.store, every_s, clock, states.see, peers)
        return Recorded(chain, self._adjoints, self._passed)

    def finish(self, adjoint: object) -> None:
        """Write the adjoint of state 0, which ends the run; return when it is on the disk."""
        if not self.complete:
            self._adjoints.finish(adjoint)
        self._peers.gather(lambda: None)  # complete on all ranks, or to be resumed on all
        self.complete = True
        self._adjoints.let_go()

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
        """Give the folder back; remove it and its files if needed.  May be called twice.

        The code that opened the store closes it first.
        """
        folder, self._folder = self._folder, None
        self._last = None
        self._adjoints.let_go()
        if folder is None:
            return
        if remove or not self.begun:  # or there is nothing to resume
            folder.remove()
            self._leave()
        folder.close()
        self.begun = self.taken = False


def another_run(folder: Folder, difference: str) -> StoreError:
    """Return the error for a folder that holds a run which is not the caller's."""
    return folder.refused(
        f"it holds another run: {difference}; finish that one, name another folder, "
        f"or remove it with `{CLEAN} {folder.path}`"
    )


def foreign(folder: Folder, name: str) -> StoreError:
    """Return the error for a folder with a file that no run of ours wrote."""
    return folder.refused(
        f"its file {name!r} was not written by this run, nor by one that was killed here; "
        "move it, or name another folder"
    )


def facts_of(
    layout: OrderedLayout, state: object, n_steps: int | None, label: str, peers: Peers
) -> RunFacts:
    """Return what distinguishes a run that begins with a state."""
    packed, _ = layout.pack(layout.arrays(state))
    structure, leaves = layout.describe()
    return RunFacts(
        n_steps=n_steps,
        structure=structure,
        leaves=leaves,
        record_bytes=layout.record_bytes,
        start=layout.digest(packed).hex(),
        label=label,
        package=__version__,
        rank=peers.rank,
        ranks=peers.size,
    )


def anew(folder: Folder) -> None:
    """Remove what a run left; let the next be another, lest it take up what could not go.

    Raises StoreError.
    """
    try:
        folder.clear()
        folder.number(os.urandom(16))
    except OSError as error:
        raise folder.refused(f"what a run left in it cannot be removed: {error}") from error


def open_parent(path: Path) -> None:
    """See that a folder is one for folders of ranks.  Raises StoreError."""
    with contextlib.closing(Folder(path, create=True)) as folder:
        for name in folder.names():
            if not RANK_NAME.fullmatch(name) and not SYSTEMS.fullmatch(name):
                raise folder.refused(
                    f"it holds {name!r}, which is no folder of a rank; "
                    "name a folder for this run alone"
                )


def ours_alone(folder: Folder) -> None:
    """Raise unless everything in the folder belongs to this kind of run."""
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
        raise foreign(folder, others[0])
