"""What a schedule of ours does to states and tapes, as checkpoint_schedules divides it up.

Theirs has no slots and no second copies: a checkpoint is one entry, in RAM or
on disk, from its write to its last use.  And what lies in working memory lasts
to the next `Forward` only, so that an entry is fetched there right before the
`Forward` that restarts from it, and a tape that must outlive one is an entry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

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
from ...errors import ScheduleError
from ...planners import UniformPlan
from ...schedule.simulation import simulate


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
class Checkpoint:
    """One checkpoint from its write until it is needed no more."""

    on_disk: bool = False  # its slot was filled by a read at least once
    restarts: int = 0


@dataclass(slots=True)
class Survey:
    """What a run of a plan's schedule in virtual time has shown."""

    accepted: list[bool] = field(default_factory=list)  # of the offers, in order
    # In the order in which they were made.
    checkpoints: list[Checkpoint] = field(default_factory=lambda: [Checkpoint()])
    kept: list[bool] = field(default_factory=list)  # tapes in order: does it outlive a Forward

    @property
    def restarts(self) -> bool:
        """Whether any step is run again."""
        return any(each.restarts for each in self.checkpoints)


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
        self.tokens = 0

    def follow(self, action: Action, taken: bool) -> Iterator[Event]:
        """Yield what an action does; `taken` says whether an offer was."""
        match action:
            case Save(step):
                yield from self._store(step, _SLOT)
            case Put(step, tier) | Offer(step, tier):
                if taken:
                    self.tokens += 1
                    yield from self._store(step, tier)
            case Get(step):
                self.tokens += 1
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


def survey(plan: UniformPlan) -> Survey:
    """Run a plan's schedule in virtual time, and note what must be known beforehand."""
    seen = Survey()
    follower = Follower()

    def watched() -> Schedule:
        for action, send in drive(plan.schedule()):
            answer = yield action
            send(answer)
            if isinstance(action, Offer):
                seen.accepted.append(answer is not None)
            for event in follower.follow(action, answer is not None):
                match event:
                    case Stored():
                        seen.checkpoints.append(Checkpoint())
                    case Restart(_, number):
                        seen.checkpoints[number].restarts += 1
                        seen.checkpoints[number].on_disk |= number in follower.read
                    case _:
                        pass

    simulate(watched(), plan.n_steps, plan.costs, plan.slots, checked=False)
    _mark_kept(plan, seen)
    return seen


def events(plan: UniformPlan, seen: Survey) -> Iterator[Event]:
    """Yield what a plan's schedule does, in the run that was surveyed.

    `Stored` is left out where nothing restarts from that checkpoint.
    """
    follower, accepted = Follower(), deque(seen.accepted)
    if seen.checkpoints[0].restarts:
        yield Stored(0, 0)
    for action, send in drive(plan.schedule()):
        taken = not isinstance(action, Offer) or accepted.popleft()
        match action:
            case Put() | Get() | Offer():
                send(follower.tokens if taken else None)
            case Await():
                send(True)
            case _:
                pass
        for event in follower.follow(action, taken):
            if not isinstance(event, Stored) or seen.checkpoints[event.number].restarts:
                yield event


def _mark_kept(plan: UniformPlan, seen: Survey) -> None:
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

    for event in events(plan, seen):
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
