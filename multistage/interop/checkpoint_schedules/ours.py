"""A plan as a schedule of checkpoint_schedules: surveyed once, then told in its actions.

Theirs has no slots and no second copies: a checkpoint is one entry, in RAM or
on disk, from its write to its last use.  And what lies in working memory lasts
to the next `Forward` only, so that an entry is fetched there right before the
`Forward` that restarts from it, and a tape that must outlive one is an entry.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

from ...actions import (
    Action,
    Advance,
    Drop,
    EndForward,
    Free,
    Get,
    Load,
    Offer,
    Put,
    Reverse,
    Save,
    Schedule,
    Tape,
    drive,
)
from ...errors import ScheduleError, ScheduleUsedError
from ...planners import Plan
from ...schedule.simulation import simulate
from .theirs import theirs

if TYPE_CHECKING:
    from checkpoint_schedules import CheckpointSchedule


@dataclass(frozen=True, slots=True)
class Stored:
    """Live state `step` becomes checkpoint `number`."""

    step: int
    number: int


@dataclass(frozen=True, slots=True)
class Restart:
    """Checkpoint `number`, of `step`, becomes the live state; a Forward follows."""

    step: int
    number: int


# `Reverse` always finds its tape: a turn is a `Tape` and a `Reverse`.
Event: TypeAlias = Stored | Restart | Advance | Tape | Reverse | EndForward


@dataclass(slots=True)
class Survey:
    """What a run of a plan's schedule in virtual time has shown."""

    run: list[Event] = field(default_factory=list)
    restarts: dict[int, int] = field(default_factory=dict)  # from each checkpoint
    on_disk: set[int] = field(default_factory=set)  # those that a slot got from a tier
    kept: list[bool] = field(default_factory=list)  # tapes in order: does it outlive a Forward

    def events(self) -> Iterator[Event]:
        """Yield what the schedule did, without the storing of what nothing restarts from."""
        for event in (Stored(0, 0), *self.run):
            if not isinstance(event, Stored) or event.number in self.restarts:
                yield event


_SLOT = -1  # in place of a tier's number


class Follower:
    """Follows the actions of one run, and says what each comes to."""

    def __init__(self) -> None:
        # Of the checkpoints that exist: their numbers, and where there are copies.
        # State 0 is the caller's, and can be loaded from the start.
        self.numbers: dict[int, int] = {0: 0}
        self.copies: dict[int, set[int]] = {0: {_SLOT}}
        self.read: set[int] = set()  # numbers of the checkpoints that were read from a tier
        self.tapes: set[int] = set()
        self.live: int | None = 0
        self.loaded: Restart | None = None  # not yet run from
        self.made = 1

    def follow(self, action: Action, taken: bool) -> Iterator[Event]:
        """Yield what an action does; `taken` says whether an offer was."""
        match action:
            case Save(step):
                yield from self._store(step, _SLOT)
            case Put(step, tier) | Offer(step, tier):
                if taken:
                    yield from self._store(step, tier)
            case Get(step):
                self.copies[step].add(_SLOT)
                self.read.add(self.numbers[step])
            case Load(step):
                if self.live != step:
                    self.loaded = Restart(step, self.numbers[step])
                    self.live = step
            case Free(step) if step:
                self._discard(step, _SLOT)
            case Drop(step, tier) if step:
                self._discard(step, tier)
            case Tape(step):
                yield from self._restart()
                self.tapes.add(step)
                self.live = step + 1
                yield action
            case Advance(_, stop):
                yield from self._restart()
                self.live = stop
                yield action
            case Reverse(step):
                if step in self.tapes:
                    self.tapes.remove(step)
                else:
                    yield from self._restart()
                    yield Tape(step)
                if self.loaded is None:
                    self.live = None  # the tape may have to be fetched to where it was
                yield action
            case EndForward():
                yield action
            case _:
                pass

    def _store(self, step: int, place: int) -> Iterator[Stored]:
        if step not in self.numbers:
            self.numbers[step], self.copies[step] = self.made, set()
            self.made += 1
            yield Stored(step, self.numbers[step])
        self.copies[step].add(place)

    def _discard(self, step: int, place: int) -> None:
        self.copies[step].discard(place)
        if not self.copies[step]:
            del self.copies[step], self.numbers[step]

    def _restart(self) -> Iterator[Restart]:
        if self.loaded is not None:
            yield self.loaded
            self.loaded = None


def survey(plan: Plan) -> Survey:
    """Run a plan's schedule in virtual time, and note what must be known beforehand."""
    seen = Survey()
    follower = Follower()

    def watched() -> Schedule:
        for action, send in drive(plan.schedule()):
            answer = yield action
            send(answer)
            for event in follower.follow(action, answer is not None):
                seen.run.append(event)
                if isinstance(event, Restart):
                    seen.restarts[event.number] = seen.restarts.get(event.number, 0) + 1
                    if event.number in follower.read:
                        seen.on_disk.add(event.number)

    simulate(watched(), plan.n_steps, plan.costs, plan.slots, checked=False)
    _mark_kept(seen)
    return seen


def _mark_kept(seen: Survey) -> None:
    """Find the tapes that outlive a `Forward`.

    Steps taped one after the other are one Forward, and what of them is
    reversed before anything else runs never leaves working memory.
    """
    run: dict[int, int] = {}  # steps of the Forward that may still grow -> index of the tape
    beside: dict[int, int] = {}  # index of a tape -> its step, whose state is a checkpoint too
    grows = gone = False  # gone: a tape was fetched to where the live state was
    stored: int | None = None

    def end() -> None:
        for index in run.values():
            seen.kept[index] = True
        run.clear()

    for event in seen.events():
        if gone and isinstance(event, Advance | Tape):
            raise _untold(f"{event} runs on from a state older than the adjoint step before it")
        match event:
            case Stored(step):
                stored = step
            case Tape(step):
                if stored is not None or not (grows and step - 1 in run):
                    end()
                if stored is not None:
                    beside[len(seen.kept)] = step
                run[step] = len(seen.kept)
                seen.kept.append(False)
                grows, stored = True, None
            case Reverse(step):
                if step in run:
                    del run[step]
                else:
                    end()
                    gone = True
                grows = False
            case Advance():
                end()
                stored = None
            case Restart(step):
                end()
                if stored not in (None, step):
                    raise _untold(f"state {stored} is stored, and no step run from it")
                gone = False
            case EndForward():
                pass
    for index, step in beside.items():
        if seen.kept[index]:
            raise _untold(f"both the state and the tape of step {step} are kept")


def _untold(what: str) -> ScheduleError:
    return ScheduleError(
        f"checkpoint_schedules has no actions for this plan: {what}; "
        "export a plan of another planner",
        None,
    )


_REFUSED = (
    "pyadjoint's gradients are wrong with schedules that recompute and tape in working memory: "
    "it clears the inputs of a taped step (pyadjoint issue 260); give it "
    "as_schedule(plan, replayable=True), one for each tape"
)


def as_schedule(plan: Plan, *, replayable: bool = False) -> CheckpointSchedule:
    """Return a plan as a schedule of checkpoint_schedules, for one adjoint calculation.

    Parameters
    ----------
    plan : Plan
        Of any planner.  Whether an opportunistic one is offered room is
        decided here, by its predicted transfer times.
    replayable : bool
        For pyadjoint, see Notes: every tape passes through RAM, which takes one
        entry more than the plan's slots, two where a state is its own tape.

    Returns
    -------
    CheckpointSchedule
        It passes that package's own test of validity; its entries in RAM are
        at most the plan's slots.
        Each checkpoint lies in one place, since the drivers of such schedules
        know no second copy: what a plan reads from the tier into a slot, and
        loads from there more than once, is copied from disk each time.
        A plan that only tapes is a `SingleMemoryStorageSchedule` of `n_steps`, which ends.

    Raises
    ------
    ArgumentError
        If checkpoint_schedules is not installed.
    ScheduleError
        If a user's planner does what their actions cannot express, such as
        keeping both the state and the tape of a step.

    Notes
    -----
    When pyadjoint runs a step again with its tape in working memory, it clears
    the inputs of that step, and the adjoint reads what the variables hold now:
    of states that are overwritten in place another step's values, of new
    arrays those of the first evaluation.  Its gradients are then wrong with
    every schedule that recomputes, its own Revolve included (the same clearing
    as in https://github.com/dolfin-adjoint/pyadjoint/issues/260, which was
    mended for `SingleMemoryStorageSchedule` alone).  What passed through RAM
    it restores.  An exported schedule that recomputes and is not `replayable`
    therefore raises ScheduleError when a tape of pyadjoint takes it.

    `tlm()` and `hessian()` of pyadjoint do not know of schedules at all: they
    are wrong with every one that recomputes, `replayable` or not.

    Examples
    --------
    >>> from multistage.model.costs import Costs
    >>> from multistage.planners import plan
    >>> schedule = as_schedule(plan(Costs(1.0, 2.0), "2 slots", n_steps=4))
    >>> for action in schedule:
    ...     print(action)
    Forward(0, 1, True, False, StorageType.RAM)
    Forward(1, 3, True, False, StorageType.RAM)
    Forward(3, 4, False, True, StorageType.WORK)
    EndForward()
    Reverse(4, 3, True)
    Copy(1, StorageType.RAM, StorageType.WORK)
    Forward(1, 2, False, False, StorageType.WORK)
    Forward(2, 3, False, True, StorageType.WORK)
    Reverse(3, 2, True)
    Move(1, StorageType.RAM, StorageType.WORK)
    Forward(1, 2, False, True, StorageType.WORK)
    Reverse(2, 1, True)
    Move(0, StorageType.RAM, StorageType.WORK)
    Forward(0, 1, False, True, StorageType.WORK)
    Reverse(1, 0, True)
    EndReverse()
    """
    their = theirs()
    seen = survey(plan)
    only_tapes = not seen.restarts
    if replayable and not only_tapes:
        seen.kept = [True] * len(seen.kept)
    # Drivers treat the class that only tapes better than any other: pyadjoint asks for it.
    base = their.SingleMemoryStorageSchedule if only_tapes else their.CheckpointSchedule

    class PlanSchedule(base):  # type: ignore[misc, valid-type]
        """A plan of multistage."""

        def __init__(self) -> None:
            super().__init__()
            self._max_n = plan.n_steps  # theirs that only tapes serves any number of steps
            self._done = False

        def __iter__(self) -> Iterator[Any]:
            self._require_unused()
            return self

        def __next__(self) -> Any:
            self._require_unused()
            return super().__next__()

        def _require_unused(self) -> None:
            if self._done:
                raise ScheduleUsedError(
                    "a schedule serves one adjoint calculation, and this one is used up; "
                    "make another with as_schedule(plan)"
                )

        def _iterator(self) -> Iterator[Any]:
            for action in _Writer(seen).actions():
                if isinstance(action, their.Forward):
                    self._n = action.n1
                elif isinstance(action, their.Reverse):
                    self._r += action.n1 - action.n0
                elif isinstance(action, their.Copy | their.Move):
                    self._n = action.n
                elif isinstance(action, their.EndReverse):
                    self._done = True
                yield action

        @property
        def is_exhausted(self) -> bool:
            return self._done

        def uses_storage_type(self, storage_type: Any) -> bool:
            if only_tapes:
                return bool(storage_type == their.StorageType.WORK)
            # Asked by pyadjoint before it takes the first action.
            if not replayable and _asked_by_pyadjoint():
                raise ScheduleError(_REFUSED)
            return _uses(seen, storage_type)

    return PlanSchedule()


def _uses(seen: Survey, storage_type: object) -> bool:
    """Whether a schedule keeps anything in a storage of theirs."""
    storage = theirs().StorageType
    if storage_type == storage.DISK:
        return bool(seen.on_disk)
    if storage_type == storage.RAM:
        return len(seen.on_disk) < len(seen.restarts) or any(seen.kept)
    return False


def _asked_by_pyadjoint() -> bool:
    """Whether the caller of the method that calls this is pyadjoint."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    return str(name).partition(".")[0] == "pyadjoint"


class _Writer:
    """Says in their actions what a plan's schedule does."""

    def __init__(self, seen: Survey) -> None:
        self.seen = seen
        self.their = theirs()
        self.left = dict(seen.restarts)
        self.forward: list[Any] | None = None  # the arguments of a Forward that may still grow
        self.ended = False

    def actions(self) -> Iterator[Any]:
        their, storage = self.their, self.their.StorageType
        kept = iter(self.seen.kept)
        entries: set[int] = set()  # steps whose tape is in RAM
        work = range(0)  # steps whose tapes are in working memory
        stored: int | None = None  # checkpoint to be written by the Forward that comes
        for event in self.seen.events():
            match event:
                case Stored(_, number):
                    stored = number
                case Advance(start, stop):
                    place = self._nowhere() if stored is None else self._place(stored)
                    yield from self._run(start, stop, stored is not None, False, place)
                    stored = None
                case Tape(step):
                    if next(kept):
                        entries.add(step)
                        yield from self._run(step, step + 1, False, True, storage.RAM)
                    else:
                        yield from self._run(step, step + 1, False, True, storage.WORK)
                        work = range(work.start if step == work.stop else step, step + 1)
                    stored = None
                case Reverse(step):
                    yield from self._flush()
                    if step in entries:
                        entries.remove(step)
                        yield their.Move(step, storage.RAM, storage.WORK)
                        yield their.Reverse(step + 1, step, True)
                    elif step == work.start:
                        yield their.Reverse(work.stop, step, True)
                        work = range(0)
                case Restart(step, number):
                    yield from self._flush()
                    self.left[number] -= 1
                    move = their.Copy if self.left[number] else their.Move
                    yield move(step, self._place(number), storage.WORK)
                case EndForward():
                    yield from self._flush()
                    self.ended = True
                    yield their.EndForward()
        yield their.EndReverse()

    def _run(self, start: int, stop: int, ics: bool, data: bool, place: Any) -> Iterator[Any]:
        """Run steps by the Forward at hand, or end it and begin another."""
        entry = ics or (data and place == self.their.StorageType.RAM)
        if self.forward is not None and self.forward[1] == start and not entry:
            same_data = self.forward[3] == data
            if same_data and (not data or self.forward[4] == place):
                self.forward[1] = stop
                return
        yield from self._flush()
        self.forward = [start, stop, ics, data, place]

    def _flush(self) -> Iterator[Any]:
        if self.forward is not None:
            yield self.their.Forward(*self.forward)
            self.forward = None

    def _place(self, number: int) -> Any:
        storage = self.their.StorageType
        return storage.DISK if number in self.seen.on_disk else storage.RAM

    def _nowhere(self) -> Any:
        """Return the storage of a Forward that stores nothing, in either sweep."""
        storage = self.their.StorageType
        return storage.WORK if self.ended else storage.NONE
