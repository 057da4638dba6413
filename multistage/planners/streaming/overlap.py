"""Let the transfers of a synchronous schedule run while its steps do.

A synchronous schedule waits for each transfer where it asks for it.  Here the
same actions are put into another order: reads are asked for as early as a
fast slot is free, writes are waited for as late as their slot is needed, and
a checkpoint that is soon read again stays where it is.  The steps that run,
and so the gradient, do not change.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

from ...actions import (
    Action,
    Answer,
    Await,
    Drop,
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
    waited,
)
from ...errors import ScheduleError
from ...schedule.rules import Rules

# How many actions ahead reads are looked for.
_WINDOW = 64
_KEPT = -1  # in place of a token: the checkpoint never left its slot


def on_tier(schedule: Schedule | Iterable[Action], tier: int = 0) -> Schedule:
    """Yield a schedule of one memory level with its checkpoints on a slow tier.

    Needs one fast slot, which a state passes through.

    Examples
    --------
    >>> from multistage.schedule.rules import check
    >>> from multistage.planners.single.revolve import revolve_schedule
    >>> check(on_tier(revolve_schedule(3, 20)), n_steps=20, slots=1).tier_peak
    {0: 3}
    """
    for action, send in drive(schedule):
        match action:
            case Save(step):
                yield from waited(Put(step, tier))
            case Load(step):
                yield from waited(Get(step, tier))
                yield action
                yield Free(step)
            case Free(step):
                yield Drop(step, tier)
            case _:
                send((yield action))


def overlap(
    schedule: Schedule | Iterable[Action],
    slots: float,
    *,
    tape_slots: float = 1.0,
    state_is_tape: bool = False,
) -> Schedule:
    """Yield a synchronous schedule's actions with its transfers moved apart from their waits.

    Parameters
    ----------
    schedule : generator or iterable of actions
        Static, legal, and without `Offer`; read a little ahead.
    slots : float
        Fast slots to take; those beyond the schedule's own are what makes
        room for transfers in flight, two or three are enough.
    tape_slots : float
        Slots each tape beyond the first takes.
    state_is_tape : bool
        Whether a `Reverse` without a tape needs no slot for one, see `rules`.

    Raises
    ------
    ScheduleError
        At an `Offer`, whose answer decides what comes next.

    Examples
    --------
    >>> from multistage.model.costs import Costs
    >>> from multistage.model.tier import Tier
    >>> from multistage.planners.single.revolve import revolve_schedule
    >>> from multistage.schedule.simulation import simulate
    >>> costs = Costs(1.0, 2.0, tiers=(Tier("file", 1.0, 1.0),))
    >>> def schedule():
    ...     return on_tier(revolve_schedule(20, 60))
    >>> apart = simulate(overlap(schedule(), 4), 60, costs, 4)
    >>> simulate(schedule(), 60, costs, 4).makespan_s, apart.makespan_s
    (329.0, 219.0)
    """
    return _Overlap(schedule, slots, tape_slots, state_is_tape).schedule()


Key = tuple[int, int]  # step, tier


@dataclass(slots=True, eq=False)
class _Entry:
    """An action of the synchronous schedule, read ahead."""

    action: Action
    level: float  # slots that schedule takes after it
    most: float  # slots that schedule takes during it
    key: Key | None = None  # of the transfer it asks for or waits for
    is_write: bool = False
    extra: int = 0  # slots taken here besides, for reads that it asks for later
    out: int | None = None  # the token given to its Get


def _entries(
    schedule: Schedule | Iterable[Action], tape_slots: float, state_is_tape: bool
) -> Iterator[_Entry]:
    """Yield the actions of a synchronous schedule and the slots it takes after each."""
    rules = Rules(None, math.inf, tape_slots, state_is_tape=state_is_tape)
    for action, send in drive(schedule):
        key, is_write = None, False
        match action:
            case Put(step, tier) | Get(step, tier):
                key, is_write = (step, tier), type(action) is Put
            case Await(token) if token in rules.tokens:
                moved = rules.tokens[token]
                key, is_write = (moved.item, moved.tier), moved.is_write
            case Offer():
                raise ScheduleError(f"{action} in a schedule that must be static", None)
        answer = rules.usual_answer(action)
        rules.peak = 0.0  # of this action alone
        rules.apply(action, answer)
        send(answer)
        yield _Entry(action, rules.used, max(rules.used, rules.peak), key, is_write)


class _Overlap:
    def __init__(
        self,
        schedule: Schedule | Iterable[Action],
        slots: float,
        tape_slots: float,
        state_is_tape: bool,
    ) -> None:
        self.entries = _entries(schedule, tape_slots, state_is_tape)
        self.ahead: deque[_Entry] = deque(islice(self.entries, _WINDOW))
        self.slots = slots
        self.level = 0.0
        self.early = 0  # reads asked for, or kept, before their time
        self.reads: dict[Key, int] = {}  # tokens not awaited
        self.writes: dict[Key, tuple[int, bool]] = {}  # token, and whether it took a slot
        self.late: dict[Key, tuple[int, bool]] = {}  # those of them whose time to wait has come
        self.staged = 0  # slots these take
        self.stored: set[Key] = set()
        self.held: set[int] = set()

    def schedule(self) -> Schedule:
        look = True
        while self.ahead:
            if look:
                yield from self._read_early()
            entry = self.ahead.popleft()
            look = type(entry.action) in (Free, Await, Put)
            for new in islice(self.entries, 1):
                self.ahead.append(new)
                look = look or type(new.action) is Get
            yield from self._perform(entry)
            self.level = entry.level
        while self.late:
            yield from self._await_write(next(iter(self.late)))

    def _perform(self, entry: _Entry) -> Schedule:
        action, key = entry.action, entry.key
        match action:
            case Put(step):
                assert key is not None
                yield from self._room(entry)
                if step not in self.held and self._kept_for_next(step):
                    yield Save(step)
                    self.held.add(step)
                token = yield action
                assert isinstance(token, int)
                self.writes[key] = token, step not in self.held
                self.stored.add(key)
            case Get(step):
                assert key is not None
                if entry.out is None:
                    yield from self._room(entry)
                    entry.out = yield from self._get(action)
                else:
                    self.early -= 1
                self.reads[key] = entry.out
            case Await():
                assert key is not None
                if entry.is_write:
                    self.late[key] = self.writes.pop(key)
                    self.staged += self.late[key][1]
                elif (token := self.reads.pop(key)) != _KEPT:
                    yield Await(token)
            case Free(step):
                if self._kept_for_next(step):
                    return
                for pinned in [key for key in self.late if key[0] == step]:
                    yield from self._await_write(pinned)
                self.held.discard(step)
                yield action
            case Drop(step, tier):
                if (step, tier) in self.late:
                    yield from self._await_write((step, tier))
                self.stored.discard((step, tier))
                yield action
            case Save(step):
                yield from self._room(entry)
                self.held.add(step)
                yield action
            case Tape() | Reverse():
                yield from self._room(entry)
                yield action
            case _:
                yield action

    def _get(self, action: Get) -> Generator[Action, Answer, int]:
        token = yield action
        assert isinstance(token, int)
        self.held.add(action.step)
        return token

    def _room(self, entry: _Entry) -> Schedule:
        """Wait for writes until the slots of an entry are free."""
        while self.late and entry.most + entry.extra + self.staged > self.slots:
            yield from self._await_write(next(iter(self.late)))

    def _await_write(self, key: Key) -> Schedule:
        token, staged = self.late.pop(key)
        self.staged -= staged
        yield Await(token)

    def _kept_for_next(self, step: int) -> bool:
        """Whether a checkpoint may stay in its slot until it is read again."""
        before: list[_Entry] = []
        for entry in self.ahead:
            if _step(entry.action) == step:
                if type(entry.action) is not Get or entry.out is not None:
                    return False
                entry.out = _KEPT
                self.early += 1
                for other in before:
                    other.extra += 1
                return True
            if entry.most + entry.extra + 1 > self.slots:
                return False
            before.append(entry)
        return False

    def _read_early(self) -> Schedule:
        """Ask for the reads ahead whose slots are free from now on."""
        touched: set[int] = set()
        for at, entry in enumerate(self.ahead):
            action = entry.action
            if type(action) is Get and entry.out is None:
                step = action.step
                if (
                    step not in touched
                    and step not in self.held
                    and (step, action.tier) in self.stored
                ):
                    while self.staged > 1 and self.level + self.early + self.staged >= self.slots:
                        yield from self._await_write(next(iter(self.late)))
                    if self.level + self.early + self.staged + 1 > self.slots:
                        return
                    entry.out = yield from self._get(action)
                    self.early += 1
                    for other in islice(self.ahead, at):
                        other.extra += 1
            if entry.most + entry.extra + 1 > self.slots:
                return
            touched.add(_step(action))


def _step(action: Action) -> int:
    """Return the checkpoint whose slot or copy an action changes, -1 if none."""
    return action.step if isinstance(action, Save | Free | Put | Get | Drop) else -1
