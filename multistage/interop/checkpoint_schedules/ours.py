"""A plan as a schedule of checkpoint_schedules: surveyed once, then told in its actions."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ...actions import (
    Action,
    Advance,
    Await,
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
from ...plan import Plan
from ...simulate import simulate
from .package import theirs


@dataclass(slots=True)
class _Stored:
    """One checkpoint from its write until it is wanted no more."""

    on_disk: bool = False
    loads: int = 0


@dataclass(slots=True)
class _Survey:
    """What a first run through a plan's schedule has shown."""

    accepted: list[bool]  # of the offers, in order
    checkpoints: list[_Stored]  # in the order in which they were made
    tapes: list[bool]  # in the order of taping: whether its adjoint comes right after it
    loads: bool = False


def as_schedule(plan: Plan) -> Any:
    """Return a plan as a schedule of checkpoint_schedules, for one adjoint calculation.

    Parameters
    ----------
    plan : Plan
        Of any planner.  Whether an opportunistic one is offered room is
        decided here, by its predicted transfer times.

    Returns
    -------
    CheckpointSchedule
        It holds each checkpoint in one place, since those who run such
        schedules know no second copy: what a plan reads from the tier into a
        slot, and loads from there more than once, is copied from disk each time.

    Examples
    --------
    >>> from multistage.costs import Costs
    >>> from multistage.plan import plan
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
    survey = _survey(plan)

    class PlanSchedule(their.CheckpointSchedule):  # type: ignore[misc, name-defined]
        """A plan of multistage."""

        def __init__(self) -> None:
            super().__init__(plan.n_steps)
            self._done = False

        def _iterator(self) -> Iterator[Any]:
            for action in _Writer(plan, survey).actions():
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
            on_disk = [each.on_disk for each in survey.checkpoints if each.loads]
            if storage_type == their.StorageType.DISK:
                return any(on_disk)
            if storage_type == their.StorageType.RAM:
                return not all(on_disk) or not all(survey.tapes)
            return False

    return PlanSchedule()


class _Followed:
    """The checkpoints that exist while a schedule of ours runs."""

    def __init__(self) -> None:
        self.held: dict[int, int] = {0: 0}  # step -> number of the checkpoint in a slot
        self.stored: dict[int, int] = {}  # step -> number of the one on the tier
        self.reading: dict[int, int] = {}  # token -> step
        self.made = 1  # state 0 is the caller's, and can be loaded from the start
        self.tokens = 0

    def follow(self, action: Action, accepted: bool) -> int | None:
        """Follow one action; return the number of the checkpoint that it makes or loads."""
        match action:
            case Save(step):
                if step not in self.held:
                    self.held[step] = self._number(step)
                return self.held[step]
            case Put(step) | Offer(step):
                if not accepted:
                    return None
                self.tokens += 1
                if step not in self.held:
                    self.stored[step] = self._number(step)
                else:
                    self.stored[step] = self.held[step]
                return self.stored[step]
            case Get(step):
                self.reading[self.tokens] = step
                self.tokens += 1
                self.held[step] = self.stored[step]
                return self.stored[step]
            case Load(step):
                return self.held.get(step, 0)
            case Free(step) if step:
                self.held.pop(step, None)
            case Drop(step):
                self.stored.pop(step, None)
            case _:
                pass
        return None

    def _number(self, step: int) -> int:
        if step == 0:
            return 0
        if step in self.stored:
            return self.stored[step]
        self.made += 1
        return self.made - 1


def _survey(plan: Plan) -> _Survey:
    """Run a plan's schedule in virtual time and note what `_Writer` must know beforehand."""
    survey = _Survey([], [_Stored()], [])
    followed = _Followed()
    read: set[int] = set()  # numbers of checkpoints whose slot was filled by a read
    taped: dict[int, int] = {}

    def watched() -> Schedule:
        schedule, answer, last = plan.schedule(), None, -1
        while True:
            try:
                action = schedule.send(answer)
            except StopIteration:
                return
            answer = yield action
            if isinstance(action, Offer):
                survey.accepted.append(answer is not None)
            number = followed.follow(action, answer is not None)
            while len(survey.checkpoints) < followed.made:
                survey.checkpoints.append(_Stored())
            match action:
                case Get():
                    assert number is not None
                    read.add(number)
                case Free() | Save():
                    pass
                case Load():
                    assert number is not None
                    survey.checkpoints[number].loads += 1
                    survey.checkpoints[number].on_disk |= number in read
                    survey.loads = True
                    last = -1
                case Tape(step):
                    taped[step] = len(survey.tapes)
                    survey.tapes.append(False)
                    last = step
                case Advance():
                    last = -1
                case Reverse(step):
                    if step in taped and step == last:
                        survey.tapes[taped[step]] = True
                    last = -1
                case _:
                    pass

    simulate(watched(), plan.n_steps, plan.costs, plan.slots, checked=False)
    if not survey.loads:  # nothing but tapes: they stay in working memory
        survey.tapes = [True] * len(survey.tapes)
    return survey


class _Writer:
    """Says in their actions what a plan's schedule does."""

    def __init__(self, plan: Plan, survey: _Survey) -> None:
        self.plan = plan
        self.survey = survey
        self.their = theirs()
        self.left = [each.loads for each in survey.checkpoints]

    def actions(self) -> Iterator[Any]:
        their, survey = self.their, self.survey
        storage, followed = their.StorageType, _Followed()
        accepted, adjacent = deque(survey.accepted), deque(survey.tapes)
        tapes: dict[int, bool] = {}  # held, and whether in RAM
        forward: list[Any] | None = None  # a Forward that may still grow
        write: int | None = 0 if self.left[0] else None  # to be written when the live state moves
        ended = False
        for action, send in drive(self.plan.schedule()):
            taken = not isinstance(action, Offer) or accepted.popleft()
            token, made = followed.tokens, followed.made
            number = followed.follow(action, taken)
            match action:
                case Put() | Get() | Offer():
                    send(token if taken else None)
                case Await():
                    send(True)
                case _:
                    pass
            match action:
                case Save() | Put() | Offer():
                    if followed.made > made and self.left[made]:
                        write = number
                    continue
                case Advance(start, stop):
                    if forward is not None and write is None and forward[1] == start:
                        forward[1] = stop
                        continue
                    if forward is not None:
                        yield their.Forward(*forward)
                    place = self._place(write) if write is not None else self._nowhere(ended)
                    forward, write = [start, stop, write is not None, False, place], None
                    continue
                case Tape() | Reverse() | Load() | EndForward():
                    if forward is not None:
                        yield their.Forward(*forward)
                        forward = None
                case _:
                    continue
            match action:
                case Tape(step):
                    tapes[step] = not adjacent.popleft()
                    place = storage.RAM if tapes[step] else storage.WORK
                    if write is not None:
                        place = self._place(write)
                    yield their.Forward(step, step + 1, write is not None, True, place)
                    write = None
                case Reverse(step):
                    if step not in tapes:
                        yield their.Forward(step, step + 1, False, True, storage.WORK)
                    elif tapes.pop(step):
                        yield their.Move(step, storage.RAM, storage.WORK)
                    yield their.Reverse(step + 1, step, True)
                    write = None
                case Load(step):
                    assert number is not None
                    self.left[number] -= 1
                    move = their.Copy if self.left[number] else their.Move
                    yield move(step, self._place(number), storage.WORK)
                    write = None
                case EndForward():
                    ended = True
                    yield their.EndForward()
        yield their.EndReverse()

    def _place(self, number: int) -> Any:
        storage = self.their.StorageType
        return storage.DISK if self.survey.checkpoints[number].on_disk else storage.RAM

    def _nowhere(self, ended: bool) -> Any:
        """Return the storage of a Forward that stores nothing, in either sweep."""
        storage = self.their.StorageType
        return storage.WORK if ended else storage.NONE
