"""A schedule of checkpoint_schedules as a planner: judged, then run with its transfers apart."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ...actions import (
    Action,
    Advance,
    Answer,
    Await,
    Drop,
    EndForward,
    Free,
    Get,
    Load,
    Put,
    Reverse,
    Save,
    Schedule,
    Tape,
    drive,
)
from ...errors import ArgumentError, ScheduleError
from ...model.costs import Costs
from ...model.tier import Tier
from ...planners import Plan, Planner
from ...planners.base import require_steps
from ...planners.predict import Draft
from ...planners.streaming.overlap import overlap
from ...schedule.rules import Rules
from ...schedule.simulation import simulate

if TYPE_CHECKING:
    from checkpoint_schedules import CheckpointSchedule


def theirs() -> ModuleType:
    """Return checkpoint_schedules.  Raises ArgumentError if it is not installed."""
    try:
        import checkpoint_schedules
    except ImportError as error:
        raise ArgumentError(
            "checkpoint_schedules is not installed; "
            "pip install 'multistage-checkpointing[checkpoint-schedules]'"
        ) from error
    module: ModuleType = checkpoint_schedules
    return module


def actions_of(schedule: CheckpointSchedule, n_steps: int) -> Generator[Action, Answer, None]:
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
    >>> from multistage.schedule.rules import check
    >>> check(actions_of(Revolve(100, 5), 100), n_steps=100, slots=5).forward_steps
    317
    """
    return _Reader(schedule, n_steps).actions()


class _Reader:
    """Follows a schedule of theirs, action by action."""

    def __init__(self, schedule: CheckpointSchedule, n_steps: int) -> None:
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
        self.at: object = None  # their current action, for messages
        self.tapes: set[int] = set()
        self.saved: set[int] = set()
        self.stored: set[int] = set()

    def actions(self) -> Generator[Action, Answer, None]:
        their = theirs()
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
        ram, disk = theirs().StorageType.RAM, theirs().StorageType.DISK
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
        storage = theirs().StorageType
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


def as_planner(make: Callable[[], CheckpointSchedule]) -> Planner:
    """Return a planner that runs a schedule of checkpoint_schedules.

    Parameters
    ----------
    make : callable
        Returns a fresh schedule, such as `lambda: HRevolve(n, 10, 100)`.
        Called once for all sweeps of one number of steps and slots.

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
    ...     memory="7 slots", tiers="memory:",
    ... )
    >>> round(float(result.adjoint), 12)
    0.003698619786
    """
    if not callable(make) or hasattr(make, "finalize"):
        raise ArgumentError(
            "as_planner() needs a function that makes a schedule, since a schedule serves one "
            "sweep: as_planner(lambda: HRevolve(...))"
        )
    return partial(_plan, lru_cache(maxsize=1)(partial(_judge, make)))


def _plan(
    judged: Callable[[int, int, Costs], tuple[str, float, _Recorded]],
    costs: Costs,
    slots: int,
    n_steps: int | None,
) -> Plan:
    n = require_steps(n_steps, "checkpoint_schedules")
    # Times play no part in what is legal, and change after a sweep.
    tiers = tuple(Tier(capacity_states=tier.capacity_states) for tier in costs.tiers)
    taping_s = None if costs.state_is_tape else 0.0
    timeless = replace(
        costs,
        forward_step_s=1.0,
        reverse_step_s=1.0,
        tape_step_s=taping_s,
        action_s=0.0,
        tiers=tiers,
    )
    name, peak, recorded = judged(n, slots, timeless)

    def schedule() -> Schedule:
        return overlap(
            recorded, slots, tape_slots=costs.tape_slots, state_is_tape=costs.state_is_tape
        )

    run = simulate(schedule(), n, costs, slots, checked=False)
    note = "A schedule of checkpoint_schedules; its transfers run beside the steps."
    draft = Draft(schedule, replace(run, peak_slots=min(slots, peak)), note)
    return draft.plan(name, costs, slots, n)


_KINDS = (Advance, Tape, Reverse, Save, Load, Free, Put, Get, Await, Drop, EndForward)


class _Recorded:
    """The actions of a static schedule, 17 bytes each.

    Kept because a schedule of theirs can be run once, and making another may
    take seconds (H-Revolve fills tables) or give another than was judged.
    """

    def __init__(self) -> None:
        self.kinds = bytearray()
        self.first, self.second = array("q"), array("q")

    def append(self, action: Action) -> None:
        self.kinds.append(_KINDS.index(type(action)))
        first, second, *_ = *(getattr(action, name) for name in action.__match_args__), 0, 0
        self.first.append(first)
        self.second.append(second)

    def __iter__(self) -> Iterator[Action]:
        for code, *values in zip(self.kinds, self.first, self.second, strict=True):
            kind: Callable[..., Action] = _KINDS[code]
            yield kind(*values[: len(_KINDS[code].__match_args__)])


def _judge(
    make: Callable[[], CheckpointSchedule], n: int, slots: int, costs: Costs
) -> tuple[str, float, _Recorded]:
    """Run a schedule of theirs through the rules; return its name, most slots and actions.

    Raises
    ------
    ScheduleError
        Naming its action that broke a rule.
    """
    schedule, tier = make(), costs.tier
    bounded = tier is not None and tier.capacity_states is not None
    tier_slots = {0: tier.capacity_states or 0} if tier is not None and bounded else {}
    rules = Rules(
        n,
        slots,
        costs.tape_slots,
        tier_slots,
        state_is_tape=costs.state_is_tape,
        one_tape=costs.one_tape,
    )
    recorded = _Recorded()
    reader = _Reader(schedule, n)
    try:
        for action, send in drive(reader.actions()):
            if isinstance(action, Put | Get) and tier is None:
                raise ScheduleError("it uses a disk, but there is no tier; give tiers=", None)
            reply: Answer = None
            if isinstance(action, Put | Get):
                reply = rules.next_token
            elif isinstance(action, Await):
                reply = True
            rules.apply(action, reply)
            recorded.append(action)
            send(reply)
        rules.finish()
    except ScheduleError as error:
        raise ScheduleError(f"{type(schedule).__name__} at {reader.at!r}: {error}", None) from error
    return type(schedule).__name__, rules.peak, recorded
