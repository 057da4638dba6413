"""A plan as a schedule of checkpoint_schedules: surveyed once, then told in its actions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ...actions import Advance, EndForward, Reverse, Tape
from ...errors import ScheduleError, ScheduleUsedError
from ...planners import UniformPlan
from .followed import Restart, Stored, Survey, events, survey
from .package import theirs

if TYPE_CHECKING:
    from checkpoint_schedules import CheckpointSchedule

_REFUSED = (
    "pyadjoint's gradients are wrong with schedules that recompute and tape in working memory: "
    "it clears the inputs of a taped step (pyadjoint issue 260); give it "
    "as_schedule(plan, replayable=True), one for each tape"
)


def as_schedule(plan: UniformPlan, *, replayable: bool = False) -> CheckpointSchedule:
    """Return a plan as a schedule of checkpoint_schedules, for one adjoint calculation.

    Parameters
    ----------
    plan : UniformPlan
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
            for action in _Writer(plan, seen).actions():
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
    on_disk = [each.on_disk for each in seen.checkpoints if each.restarts]
    if storage_type == storage.DISK:
        return any(on_disk)
    if storage_type == storage.RAM:
        return not all(on_disk) or any(seen.kept)
    return False


def _asked_by_pyadjoint() -> bool:
    """Whether the caller of the method that calls this is pyadjoint."""
    name = sys._getframe(2).f_globals.get("__name__", "")
    return str(name).partition(".")[0] == "pyadjoint"


class _Writer:
    """Says in their actions what a plan's schedule does."""

    def __init__(self, plan: UniformPlan, seen: Survey) -> None:
        self.plan = plan
        self.seen = seen
        self.their = theirs()
        self.left = [each.restarts for each in seen.checkpoints]
        self.forward: list[Any] | None = None  # the arguments of a Forward that may still grow
        self.ended = False

    def actions(self) -> Iterator[Any]:
        their, storage = self.their, self.their.StorageType
        kept = iter(self.seen.kept)
        entries: set[int] = set()  # steps whose tape is in RAM
        work = range(0)  # steps whose tapes are in working memory
        stored: int | None = None  # checkpoint to be written by the Forward that comes
        for event in events(self.plan, self.seen):
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
        return storage.DISK if self.seen.checkpoints[number].on_disk else storage.RAM

    def _nowhere(self) -> Any:
        """Return the storage of a Forward that stores nothing, in either sweep."""
        storage = self.their.StorageType
        return storage.WORK if self.ended else storage.NONE
