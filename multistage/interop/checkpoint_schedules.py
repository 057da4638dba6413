"""Schedules of checkpoint_schedules run here, and plans of ours as schedules of theirs.

Theirs to ours: `as_planner(make)` turns a schedule of that package into a
planner for `Reversal`.  It is judged action by action before a step runs;
then its transfers, which it waits for, run beside the steps as far as the
budget leaves slots for them.

Ours to theirs: `as_schedule(plan)` is a `CheckpointSchedule` for whoever takes
one, such as pyadjoint's `tape.enable_checkpointing`.

Both ways "RAM" are the fast slots and "disk" is the first slow tier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from ..actions import (
    Action,
    Advance,
    Answer,
    Await,
    Drop,
    EndForward,
    Free,
    Get,
    Load,
    Offer,
    Put,
    Reverse,
    Rules,
    Save,
    Schedule,
    Tape,
    drive,
)
from ..costs import Costs
from ..errors import ArgumentError, ScheduleError
from ..plan import Plan, Planner
from ..plan.base import require_steps
from ..plan.bound import lower_bound
from ..plan.overlap import overlap
from ..simulate import simulate


def _theirs() -> Any:
    try:
        import checkpoint_schedules
    except ImportError as error:
        raise ArgumentError(
            "checkpoint_schedules is not installed; "
            "pip install 'multistage-checkpointing[checkpoint-schedules]'"
        ) from error
    return checkpoint_schedules


# ----------------------------------------------------------------- theirs to ours


def actions_of(schedule: Any, n_steps: int) -> Generator[Action, Answer, None]:
    """Yield the actions of a checkpoint_schedules schedule, for one adjoint sweep.

    Parameters
    ----------
    schedule : CheckpointSchedule
        Fresh; used up.  Online ones are told `n_steps` when they reach it.
    n_steps : int

    Raises
    ------
    ScheduleError
        If it is for another number of steps, or ends before its EndReverse.

    Notes
    -----
    Adjoint data kept in RAM is a tape.  On disk there is the state before the
    step instead, and the step is run again: what a tape holds is known to the
    chain alone.

    Examples
    --------
    >>> from checkpoint_schedules import Revolve
    >>> from multistage.actions import check
    >>> check(actions_of(Revolve(100, 5), 100), n_steps=100, slots=5).forward_steps
    317
    """
    return _Reader(schedule, n_steps).actions()


class _Reader:
    """Follows a schedule of theirs, action by action."""

    def __init__(self, schedule: Any, n_steps: int) -> None:
        if not hasattr(schedule, "finalize") or not hasattr(schedule, "uses_storage_type"):
            raise ArgumentError(
                f"{type(schedule).__name__} is no CheckpointSchedule of checkpoint_schedules"
            )
        if schedule.max_n not in (None, n_steps):
            raise ScheduleError(
                f"the {type(schedule).__name__} is for {schedule.max_n} steps, not {n_steps}", None
            )
        self.schedule = schedule
        self.n = n_steps
        self.at: Any = None  # their action under way, for messages
        self.tapes: set[int] = set()
        self.saved: set[int] = set()
        self.stored: set[int] = set()

    def actions(self) -> Generator[Action, Answer, None]:
        their = _theirs()
        pending: int | None = None  # a step to be taped, once it is known what follows
        for action in self.schedule:
            self.at, kind = action, type(action)
            if pending is not None and not (kind is their.Reverse and action.n1 == pending + 1):
                yield Tape(pending)
                self.tapes.add(pending)
                pending = None
            if kind is their.Forward:
                pending = yield from self._forward(action)
            elif kind is their.Reverse:
                pending = None  # a step taped right before its adjoint is one action
                for step in range(action.n1 - 1, action.n0 - 1, -1):
                    self.tapes.discard(step)
                    yield Reverse(step)
            elif kind in (their.Copy, their.Move):
                yield from self._move(action, moved=kind is their.Move)
            elif kind is their.EndForward:
                yield EndForward()
            elif kind is their.EndReverse:
                break
            else:
                raise ScheduleError(f"{action!r} is no action of checkpoint_schedules", None)
        else:
            raise ScheduleError(f"{self.at!r} ended the schedule before an EndReverse", None)
        for step in sorted(self.saved):
            yield Free(step)
        for step in sorted(self.stored):
            yield Drop(step)

    def _forward(self, action: Any) -> Generator[Action, Answer, int | None]:
        """Yield what a Forward does; return a step left to be taped, if it is the last."""
        ram, disk = _theirs().StorageType.RAM, _theirs().StorageType.DISK
        start, stop = action.n0, min(action.n1, self.n)
        if action.write_ics:
            if action.storage == disk:
                yield from self._put(start)
            elif action.storage == ram:
                self.saved.add(start)
                yield Save(start)
        left = None
        if not action.write_adj_deps:
            yield Advance(start, stop)
        elif action.storage == disk:
            for step in range(start, stop):
                if step not in self.stored:
                    yield from self._put(step)
                if step == self.n - 1:
                    yield Tape(step)
                    self.tapes.add(step)
                else:
                    yield Advance(step, step + 1)
        else:
            for step in range(start, stop - 1):
                yield Tape(step)
                self.tapes.add(step)
            left = stop - 1
        if self.schedule.max_n is None and action.n1 >= self.n:
            self.schedule.finalize(self.n)
        return left

    def _put(self, step: int) -> Schedule:
        token = yield Put(step)
        self.stored.add(step)
        yield Await(token)  # type: ignore[arg-type]

    def _move(self, action: Any, *, moved: bool) -> Schedule:
        """Yield what a Copy or a Move does, the source being freed after a move."""
        storage = _theirs().StorageType
        step, source, target = action.n, action.from_storage, action.to_storage
        if source == storage.RAM:
            if step in self.tapes:
                return  # it is where the adjoint finds it
            if target == storage.WORK:
                yield Load(step)
            elif target == storage.DISK:
                yield from self._put(step)
            if moved:
                self.saved.discard(step)
                yield Free(step)
        elif source == storage.DISK:
            if target != storage.NONE and step not in self.tapes:
                token = yield Get(step)
                yield Await(token)  # type: ignore[arg-type]
                if target == storage.WORK:
                    yield Load(step)
                    yield Free(step)
                else:
                    self.saved.add(step)
            if moved:
                self.stored.discard(step)
                yield Drop(step)
        else:
            raise ScheduleError(f"{action!r} copies from neither RAM nor disk", None)


def as_planner(make: Callable[[], Any]) -> Planner:
    """Return a planner that runs a schedule of checkpoint_schedules.

    Parameters
    ----------
    make : callable
        Returns a fresh schedule whenever called, such as
        `lambda: HRevolve(n, 10, 100)`.

    Returns
    -------
    Planner
        For `Reversal(planner=...)`.  It judges the schedule as `check` does.

    Raises
    ------
    ArgumentError
        If `make` is a schedule in place of a function that makes one.

    Notes
    -----
    The budget holds the snapshots in RAM, and one more slot if there are some
    on disk, which states pass through.  Every slot beyond lets a transfer run
    while steps do.  An illegal schedule is rejected by a `ScheduleError` that
    names its action, before a step runs.

    Examples
    --------
    >>> import numpy as np
    >>> from checkpoint_schedules import HRevolve
    >>> from multistage import reverse
    >>> result = reverse(
    ...     lambda x, i: np.sin(x), lambda x, a, i: np.cos(x) * a, np.array(1.0), np.array(1.0),
    ...     n_steps=100, planner=as_planner(lambda: HRevolve(100, 4, 10)),
    ...     budget="7 slots", tier="memory:",
    ... )
    >>> round(float(result.adjoint), 12)
    0.003698619786
    """
    if not callable(make) or hasattr(make, "finalize"):
        raise ArgumentError(
            "as_planner() needs a function that makes a schedule, since a schedule serves one "
            "sweep: as_planner(lambda: HRevolve(...))"
        )
    return partial(_plan, make)


def _plan(make: Callable[[], Any], costs: Costs, slots: int, n_steps: int | None) -> Plan:
    n = require_steps(n_steps, "checkpoint_schedules")
    rules = _judge(make(), n, slots, costs)

    def schedule() -> Schedule:
        return overlap(actions_of(make(), n), slots, tape_slots=costs.tape_slots)

    run = simulate(schedule(), n, costs, slots, checked=False)
    return Plan(
        planner=type(make()).__name__,
        n_steps=n,
        slots=slots,
        costs=costs,
        make=schedule,
        makespan_s=run.makespan_s,
        lower_bound_s=lower_bound(costs, slots, n),
        forward_steps=rules.forward_steps,
        peak_slots=min(slots, rules.peak),
        writes=run.writes,
        reads=run.reads,
        stall_s=run.stall_s,
        note="A schedule of checkpoint_schedules; its transfers run beside the steps.",
    )


def _judge(schedule: Any, n: int, slots: int, costs: Costs) -> Rules:
    """Run a schedule of theirs through the rules; raise ScheduleError naming its action."""
    tier = costs.tier
    bounded = tier is not None and tier.capacity_states is not None
    tier_slots = {0: tier.capacity_states or 0} if tier is not None and bounded else {}
    rules = Rules(n, slots, costs.tape_slots, tier_slots)
    reader = _Reader(schedule, n)
    try:
        for action, send in drive(reader.actions()):
            if isinstance(action, Put | Get) and tier is None:
                raise ScheduleError("it uses a disk, but there is no tier; give tier=", None)
            reply: Answer = None
            if isinstance(action, Put | Get):
                reply = rules.next_token
            elif isinstance(action, Await):
                reply = True
            rules.apply(action, reply)
            send(reply)
        rules.finish()
    except ScheduleError as error:
        raise ScheduleError(f"{type(schedule).__name__} at {reader.at!r}: {error}", None) from error
    return rules


# ----------------------------------------------------------------- ours to theirs


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
    their = _theirs()
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
        self.their = _theirs()
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
