"""One sweep through a schedule: what it holds in fast memory, and the loop that performs actions.

What differs between executors is what a sweep calls: the operators of the chain, the
slots that keep states and tapes, and `Elsewhere`, the slow tiers and what is done about
what they lose.  Adjoints are pushed, `reverse` computes them, or pulled:
`reverse_until(step)` performs what comes before the adjoint of a step and returns what its
caller computes it from.  One that is left out is not computed, and its tape is released.

The frequent actions do as little as they can: a step of the user's may take a microsecond.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Set
from itertools import chain
from typing import Any, NamedTuple, Protocol, TypeAlias, TypeVar

from ..actions import (
    Action,
    Advance,
    Answer,
    Await,
    Drop,
    EndForward,
    Evict,
    Free,
    Get,
    Load,
    Offer,
    Put,
    Reverse,
    Save,
    Schedule,
    Tape,
)
from ..errors import BudgetError, ScheduleError
from ..model.chain import Chain
from ..states.sharing import WEIGHED, apart_from, own_bytes
from ..states.slots import Kept, Slots, guarded, no_adjoint
from .ledger import Counts, Ledger
from .pushed import Pause

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")
ArrayT = TypeVar("ArrayT")

Wait: TypeAlias = Put | Evict | Await  # what a sweep may wait for transfers in
_WAITS = frozenset([Put, Evict, Await])
# Compute spans are recorded at most this often: a record takes 4 microseconds, and 30 where
# steps of the user's have emptied the caches.
_WINDOW_S = 4e-3


class Moved(NamedTuple):
    """What a transfer moves, and its tier."""

    step: int
    is_tape: bool
    is_write: bool
    tier: int
    name: str

    def __str__(self) -> str:
        what = "tape" if self.is_tape else "state"
        return f"{'write' if self.is_write else 'read'} of {what} {self.step}"


class Elsewhere(Protocol):
    """What is not in fast memory: slow tiers, and what they have lost.

    Each of the first methods performs one action for a sweep, whose `held`, `tapes`, `lost`
    and `used` it keeps up to date.
    """

    def write(self, sweep: Sweep, action: Offer | Put) -> Answer:
        """Queue a write."""

    def read(self, sweep: Sweep, action: Get) -> Answer:
        """Queue a read."""

    def wait(self, sweep: Sweep, action: Await) -> Answer:
        """Wait for a transfer; whether it succeeded."""

    def evict(self, sweep: Sweep, action: Evict) -> Answer:
        """Wait for a write, then release what was written; whether it succeeded."""

    def drop(self, sweep: Sweep, action: Drop) -> Answer:
        """Free the tier's copy."""

    def find(self, sweep: Sweep, step: int) -> Kept:
        """Return a state that no slot holds: state 0, or one at hand or computed again."""

    def find_tape(self, sweep: Sweep, step: int) -> object:
        """Return a tape, in place of one that was lost."""

    # What `multistage.execute.late` asks.

    def awaited(self, sweep: Sweep, action: Wait) -> Callable[[float], bool] | None:
        """Return what waits, no longer than some seconds, until an action would not wait.

        It answers whether that is so.  None if the action does not wait.
        """

    def moved(self, action: Wait | Offer) -> Moved:
        """Return what an action waits for, or offers."""

    def behind_s(self) -> float:
        """Return the seconds since the oldest write was queued that has not ended, else 0."""

    def seen_s(self, *, writes: bool) -> float:
        """Return the seconds that transfers take for a byte now; 0 if unknown."""

    def cancel(self, timeout_s: float) -> None:
        """Cancel all transfers; wait so many seconds for writes to end."""

    def stuck(self) -> list[int]:
        """Return states, and tapes as ~step, whose cancelled transfers go on all the same."""

    def abandon(self, sweep: Sweep) -> None:
        """Give up all that is there or on its way, once writes were cancelled."""


class Sweep:
    """One sweep, forward and back.

    Parameters
    ----------
    schedule : generator of actions
    chain : Chain
    slots : Slots
    elsewhere : Elsewhere
    origin : Kept
        State 0.
    live : pytree
        The live state, equal to it.
    ledger : Ledger, optional
    limit : float
        Fast slots; a schedule that takes more is stopped.
    tape_slots : float
        Slots one tape beyond the first takes.
    slot_bytes : int
        Of a slot, by which some tapes are weighed; 0 if they are not.
    heavier : callable, optional
        `heavier(step, nbytes)`, called for a tape that takes more than `tape_slots`.
    late : callable, optional
        `late(sweep, action)`, asked before a `Put`, `Evict` or `Await`, and after an `Offer` that
        was refused: the schedule to perform in its place and after it, None to go on.  See
        `multistage.execute.late`.

    Attributes
    ----------
    at : int
        Index of the live state, -1 when it is used up.
    end : int
        The next adjoint step is end - 1; 0 in the forward sweep.
    begun, given : int or None, tape
        The step whose adjoint was asked for last, and what that is computed from.
    held, tapes : dict
        Kept states, None for one on its way here, and kept tapes.
    lost : set of int
        States read in vain, which a `Free` may still name; ~i stands for tape i.
    used : float
        Fast slots taken.
    last : float
        When the last action ended that took time, by the clock.
    """

    __slots__ = (
        "__weakref__", "_aside", "_checks", "_due", "_heavier", "_opened", "_reverse_by",
        "_slot_bytes", "_until", "_wanted", "adjoint", "at", "begun", "chain", "clock", "counts",
        "elsewhere", "end", "given", "held", "in_place", "is_forward", "last", "late", "ledger",
        "limit", "live", "lost", "one_tape", "origin", "schedule", "slots", "state_is_tape",
        "tape_slots", "tapes", "used",
    )  # fmt: skip

    def __init__(
        self,
        schedule: Schedule,
        chain: Chain[State, Adjoint],
        slots: Slots[State, ArrayT],
        elsewhere: Elsewhere,
        origin: Kept,
        live: State,
        ledger: Ledger | None = None,
        *,
        limit: float = math.inf,
        tape_slots: float = 1.0,
        slot_bytes: int = 0,
        heavier: Callable[[int, int], None] | None = None,
        late: Callable[[Sweep, Wait | Offer], Schedule | None] | None = None,
    ) -> None:
        self.schedule, self.elsewhere, self.origin = schedule, elsewhere, origin
        self.slots: Slots[Any, Any] = slots
        # Of the chain's types, or None where it is used up.
        self.live: Any = live
        self.adjoint: Any = None
        self.given: Any = None
        self.at = self.end = 0
        self.begun: int | None = None
        self.is_forward = True
        self.held: dict[int, Kept | None] = {}
        self.tapes: dict[int, Kept] = {}
        self.lost: set[int] = set()
        self.used = 0.0
        self.tape_slots, self.limit = tape_slots, limit
        self.ledger, self.late = ledger, late
        self.counts = Counts() if ledger is None else ledger.counts
        self.clock = time.perf_counter if ledger is None else ledger.clock
        self.take(chain)
        self.in_place, self.state_is_tape = chain.in_place, chain.state_is_tape
        self.one_tape = not chain.state_is_tape and bool(getattr(chain, "one_tape", False))
        self._slot_bytes, self._heavier = slot_bytes, heavier
        self._checks = False  # the next state that a step returns
        self._wanted = False  # None is the adjoint of operators that keep it themselves
        self._until = -1  # the step whose adjoint is asked for
        self._opened: Kept | None = None  # what is given, where it is a state in a slot
        self._aside: Kept | None = None  # the live state, whose arrays that is in
        self.begin_window()

    def take(self, chain: Chain[State, Adjoint]) -> None:
        """Run this chain, in the part of the sweep that begins next."""
        self.chain: Chain[Any, Any] = chain
        self._reverse_by: Callable[[object, Any, int], Any] = guarded(self.slots, chain.reverse)

    def forward(self) -> bool:
        """Perform actions up to `EndForward`, or to a `Pause`; whether it was the former."""
        self._checks = True  # of what functional steps return the first, then what is kept
        if not self._perform(pulls=False):
            raise ScheduleError("the schedule ended without EndForward")
        return not self.is_forward

    def take_live(self) -> object:
        """Return the live state, which the sweep holds no more."""
        live, self.live, self.at = self.live, None, -1
        return live

    def reverse(self, adjoint: object) -> object:
        """Perform the rest of the schedule, adjoints included; return the last one."""
        self.begin_window()
        self._checks = self.in_place
        self.adjoint, self._wanted = adjoint, adjoint is not None
        del adjoint
        try:
            self._perform(pulls=False)
            return self.adjoint
        finally:
            self.adjoint = None

    def reverse_until(self, step: int, restart: Callable[[], Schedule]) -> object:
        """Perform actions until the adjoint of a step may begin; return what it is computed from.

        That is valid until the next step is asked for; asked for again, it is returned again.

        Parameters
        ----------
        step : int
        restart : callable
            Lets go of what is elsewhere and returns the schedule from its beginning: for
            steps whose adjoint has begun before, and after an error.

        Raises ScheduleError if the schedule cannot be followed, or ends before that step.
        """
        if step == self.begun:
            return self.given
        if step >= (self.end if self.begun is None else self.begun):
            self._start_over(restart)
        self._close_pulled()
        self.begin_window()
        self._checks = self.in_place
        self.begun = -1  # should an action fail, the next request starts over
        self._until = step
        if not self._perform(pulls=True):
            raise ScheduleError(f"the schedule ended without Reverse({step})")
        self.given = self._open(step, self._take_tape(step))
        self.begun = step
        return self.given

    def _start_over(self, restart: Callable[[], Schedule]) -> None:
        """Stand where the forward sweep ended, by running forward again."""
        self.begun = -1
        self.let_go()
        self.lost.clear()
        self.schedule = restart()
        self.live = self.slots.load(self.origin, None)
        self.at, self.end, self.used = 0, 0, 0.0
        self.counts.forward_s = 0.0  # `late` compares it with that of the plan so far
        self.is_forward = True
        self.begin_window()
        self.forward()
        self.take_live()
        self.begun = None

    def _close_pulled(self) -> None:
        """Release the tape that was given to the caller."""
        if self.begun is not None and self.begun >= 0:
            self.given = None
            self.end, self.begun = self.begun, None
            self.counts.reverse_steps += 1

    def hold(self, saved: Set[int], tapes: Set[int]) -> None:
        """Hold these states and tapes, and nothing else."""
        found = {i: self.elsewhere.find(self, i) for i in saved - self.held.keys()}
        for i in self.held.keys() - saved:
            if (kept := self.held.pop(i)) is not None:
                self.slots.release(kept)
            self.used -= 1
        self.held.update(found)
        for i in self.tapes.keys() - tapes:
            if (tape := self._take_tape(i)) is not None:
                self.slots.release(tape)

    def let_go(self) -> None:
        """Forget all states, tapes and adjoints: tracebacks may refer to an aborted sweep."""
        self.held.clear()
        self.tapes.clear()
        self.live = self.adjoint = self.given = self._opened = self._aside = None
        self.at = -1

    def begin_window(self) -> None:
        """Enter steps and their times into the timeline from now on."""
        self.last = now = self.clock()
        self._due = now + _WINDOW_S
        if self.ledger is not None:
            self.ledger.begin(now)

    def flush(self) -> None:
        """Enter the steps run since the last time."""
        if self.ledger is not None:
            self.ledger.record(self.last, self.at, self.end, self.used)
        self._due = self.last + _WINDOW_S

    def stalled(self, since: float) -> None:
        """Count what computing has waited since then."""
        if self.ledger is not None:
            self.ledger.stalled(since)

    def _perform(self, pulls: bool) -> bool:
        """Perform actions up to `EndForward` or, if it `pulls`, the adjoint that is asked for.

        False if they end before that.  Raises ScheduleError if they cannot be performed.
        """
        try:
            return self._loop(pulls)
        finally:
            self.flush()

    def _loop(self, pulls: bool) -> bool:
        """Perform actions, the frequent ones here.

        `for`, `type` and callables in local variables are used, since each call, `send`,
        `isinstance` and call of an attribute takes a share of what an action costs.
        """
        held, tapes, counts, clock = self.held, self.tapes, self.counts, self.clock
        slots, advance_by, reverse_by = self.slots, self.chain.advance, self._reverse_by
        apart, keep = slots.apart, slots.keep
        by_tape, one_tape, in_place = not self.state_is_tape, self.one_tape, self.in_place
        actions: Iterable[Any] | None = self.schedule  # narrowed by `kind`
        while actions is not None:
            for action in actions:
                kind = type(action)
                if kind is Reverse and not pulls:
                    step = action.step
                    if by_tape or tapes or self.at != step or step != self.end - 1:
                        adjoint = self._reverse(action)
                    else:  # the frequent case of a state that is its own tape
                        adjoint = apart(reverse_by(self.live, self.adjoint, step), self.live)
                        self.at = -1
                    if adjoint is None and self._wanted:
                        raise no_adjoint(step)
                    self.adjoint, self.end = adjoint, step
                    counts.reverse_steps += 1
                    now = clock()
                    counts.reverse_s += now - self.last
                elif kind is Advance:
                    start, stop = action.start, action.stop
                    if start != self.at or (one_tape and tapes):
                        raise self._cannot(action)
                    if stop - start == 1 or in_place:
                        self.live = advance_by(self.live, start, stop)
                    else:  # without a reference to the first state: memory may hold few
                        hand, self.live = [self.live], None
                        self.live = advance_by(hand.pop(), start, stop)
                    self.at = stop
                    if self._checks:  # of functional steps the first that a sweep makes
                        slots.check(self.live, stop)
                        self._checks = in_place
                    counts.forward_steps += stop - start
                    now = clock()
                    counts.forward_s += now - self.last
                else:
                    if kind is Save and action.step == self.at:
                        self.used = used = self.used + 1
                        if used > counts.peak_slots or used > self.limit:
                            self.reach(action, used)
                        held[self.at] = keep(self.live, self.at)
                    elif kind is Load:
                        self._load(action)
                    elif kind is Free:
                        self._free(action)
                    elif kind is Tape:
                        self._tape(action)
                    else:
                        actions = self._rare(action)
                        break
                    continue
                self.last = now
                if now > self._due:
                    self.flush()
            else:
                return False
        return True

    def _tape(self, action: Tape) -> None:
        step, tapes, slots = action.step, self.tapes, self.slots
        if step != self.at or (self.one_tape and tapes):
            raise self._cannot(action)
        if tapes:
            if not self.state_is_tape:
                slots.trim()
            self.used += self.tape_slots
            self.reach(action, self.used)
        if self.state_is_tape:
            tapes[step] = slots.keep(self.live, step)
            self.live = self.chain.advance(self.live, step, step + 1)
            if self.in_place:
                slots.check(self.live, step + 1)
        else:
            before = self.live
            self.live, tape = self.chain.tape(before, step)
            self._weigh_beside(action, tape, len(tapes))
            if self.one_tape:  # it is in the operators' own arrays
                tapes[step] = Kept(tape, ())
            else:
                tapes[step] = slots.keep_tape(tape, (before, self.live), step)
            del before, tape  # uncounted references would keep the states alive
            slots.check(self.live, step + 1)  # a tape may hold on to it
        self.at = step + 1
        self.counts.forward_steps += 1
        now = self.clock()
        self.counts.forward_s += now - self.last
        self.last = now
        if now > self._due:
            self.flush()

    def _load(self, action: Load) -> None:
        if self.one_tape and self.tapes:
            raise self._cannot(action)
        kept = self.held.get(action.step)
        if kept is None:
            kept = self.elsewhere.find(self, action.step)
        self.at = action.step
        self.live = kept.state if self.slots.shared else self.slots.load(kept, self.live)

    def _free(self, action: Free) -> None:
        step, held = action.step, self.held
        if step in held:
            if (kept := held.pop(step)) is not None:  # it is not being read
                self.slots.release(kept)
            self.used -= 1
        elif step in self.lost:
            # Its slot went with the checkpoint: the schedule did not look.
            self.lost.remove(step)
        else:
            raise illegal(action, "no slot holds it")

    def _rare(self, action: Any) -> Iterable[Action] | None:
        """Perform an action that is not frequent; return those that follow, None to stop there."""
        kind, elsewhere = type(action), self.elsewhere
        answer: Answer = None
        if self.late is not None and kind in _WAITS and self._leaves_tiers(action):
            return self.schedule
        if kind is Await:
            answer = elsewhere.wait(self, action)
        elif kind is Offer or kind is Put:
            answer = elsewhere.write(self, action)
            if answer is None and kind is Offer and self._leaves_tiers(action):
                return self.schedule
        elif kind is Get:
            answer = elsewhere.read(self, action)
        elif kind is Drop:
            answer = elsewhere.drop(self, action)
        elif kind is Evict:
            answer = elsewhere.evict(self, action)
        elif kind is Reverse:
            return None if self._pulled(action) else self.schedule
        elif kind is EndForward:
            self._end_forward(action)
            return None
        elif kind is Pause:
            return None
        elif kind is Save:
            raise self._cannot(action)
        else:
            raise ScheduleError(f"{action!r} is not an action")
        self.last = now = self.clock()  # the time of a transfer is not that of a step
        if now > self._due:
            self.flush()
        if answer is None:
            return self.schedule
        try:
            return chain((self.schedule.send(answer),), self.schedule)
        except StopIteration:
            return ()

    def _leaves_tiers(self, action: Wait | Offer) -> bool:
        """Whether another schedule goes on in place of this one, as a transfer is late."""
        schedule = None if self.late is None else self.late(self, action)
        if schedule is None:
            return False
        self.schedule.close()
        self.schedule, self.late = schedule, None
        return True

    def _end_forward(self, action: EndForward) -> None:
        if not self.is_forward:
            raise illegal(action, "the forward sweep is over")
        self.end, self.is_forward = self.at, False
        if self.ledger is not None:
            self.ledger.end_forward()

    def _reverse(self, action: Reverse) -> object:
        """Return the adjoint before a step, computed from a tape that is held, or made now."""
        step, reverse_by, slots = action.step, self._reverse_by, self.slots
        if step != self.end - 1:
            raise illegal(action, f"the next adjoint step is {self.end - 1}")
        tape = self._take_tape(step) if self.tapes else None
        # As `_open` and `_close` do, the frequent cases first.
        if tape is not None and self.state_is_tape and slots.shared and not self.in_place:
            given = tape.state
            adjoint = slots.apart(reverse_by(given, self.adjoint, step), given)
            slots.release(tape)
            return adjoint
        given = self._without(step) if tape is None else self._open(step, tape)
        del tape
        adjoint = reverse_by(given, self.adjoint, step)
        if self.state_is_tape or self.in_place:
            return self._close(given, adjoint)
        return adjoint if adjoint is None else apart_from(adjoint, given)

    def _pulled(self, action: Reverse) -> bool:
        """Return whether it is the adjoint that is asked for; release what others need."""
        step = action.step
        if step != self.end - 1:
            raise illegal(action, f"the next adjoint step is {self.end - 1}")
        if step == self._until:
            return True
        tape = self._take_tape(step)
        if tape is not None:
            self.slots.release(tape)
        elif ~step in self.lost:
            self.lost.remove(~step)
        elif self.at != step:
            raise self._cannot(Reverse(step))
        self._let_live_go(step - 1)
        if self.at == step:
            self.at = -1
        self.end = step
        return False

    def _take_tape(self, step: int) -> Kept | None:
        """Return the tape of a step, if held until now; its slot is free."""
        tape = self.tapes.pop(step, None)
        if tape is not None and self.tapes:
            self.used -= self.tape_slots
        return tape

    def _open(self, step: int, tape: Kept | None) -> object:
        """Return what the adjoint of a step is computed from; `tape` is its own, if held."""
        if tape is None:
            return self._without(step)
        self._let_live_go(step)
        if not self.state_is_tape:
            self.slots.release(tape)  # before it is used: an adjoint step may overwrite its tape
            return tape.state
        if self.in_place:
            return self._through_live(step, tape)
        self._opened = tape
        return tape.state if self.slots.shared else self.slots.load(tape, self.live)

    def _through_live(self, step: int, tape: Kept) -> object:
        """Put a tape into the live arrays, whose state is put aside if it may be needed."""
        if 0 <= self.at < step:
            # The tape stands yet.
            self.reach(Reverse(step), self.used + 1 + (self.tape_slots if self.tapes else 0))
            self._aside = self.slots.keep(self.live, self.at)
        else:
            self.at = -1
        self.live = given = self.slots.load(tape, self.live)
        self.slots.release(tape)
        return given

    def _without(self, step: int) -> object:
        """Return what the adjoint of a step is computed from, where its tape is not held."""
        if ~step in self.lost:
            self.lost.remove(~step)
            self._let_live_go(step)
            return self.elsewhere.find_tape(self, step)
        if self.at != step:
            raise self._cannot(Reverse(step))
        self.at = -1
        if self.state_is_tape:
            return self.live
        if not self.tapes:
            return self.chain.tape(self.live, step)[1]
        self.slots.trim()
        made = self.chain.tape(self.live, step)[1]
        self._weigh_beside(Reverse(step), made, len(self.tapes) - 1)
        self.reach(Reverse(step), self.used + self.tape_slots)  # it stands beside them until used
        return made

    def _close(self, given: object, adjoint: object) -> object:
        """Release what an adjoint was computed from; return the adjoint apart from it."""
        slots = self.slots
        if not self.state_is_tape:
            if adjoint is not None:  # the next tape may be in the same arrays
                adjoint = apart_from(adjoint, given)
        elif self._opened is not None:
            adjoint = slots.apart(adjoint, given)
            slots.release(self._opened)
            self._opened = None
        elif self._aside is not None:
            adjoint = slots.apart(adjoint, self.live)
            self.live = slots.load(self._aside, self.live)
            slots.release(self._aside)
            self._aside = None
        if self.at < 0 and (self.in_place or self.state_is_tape):
            adjoint = slots.apart(adjoint, self.live)
        return adjoint

    def _let_live_go(self, step: int) -> None:
        """Release a live state, if slots can, that no step up to this one starts from."""
        used_up = getattr(self.slots, "used_up", None)
        if used_up is not None and not 0 <= self.at <= step:
            self.live, self.at = used_up(self.live), -1

    def reach(self, action: Action, used: float) -> None:
        """Note how many slots are taken.  Raises BudgetError if they are more than there are."""
        self.counts.peak_slots = max(self.counts.peak_slots, used)
        if used > self.limit:
            raise BudgetError(
                f"{action} takes {used:.4g} fast slots of the {self.limit:.4g} in the budget, a "
                f"tape being {self.tape_slots:.4g} of them; raise the budget, or plan with the "
                "tapes as they are: give their bytes as tape_bytes, or call forward() again if "
                "measured"
            )

    def _weigh_beside(self, action: Tape | Reverse, tape: object, others: int) -> None:
        """Find out whether a tape takes more than assumed; `others` before it do so too then.

        Some tapes are weighed, and only beside another one.
        """
        if not self._slot_bytes or len(self.tapes) + 1 not in WEIGHED:
            return
        nbytes = own_bytes(tape, next(reversed(self.tapes.values())).state)
        taken = nbytes / self._slot_bytes
        if taken - self.tape_slots > 1e-9:
            if self._heavier is not None:
                self._heavier(action.step, nbytes)
            self.used += (taken - self.tape_slots) * others
            self.tape_slots = taken
            self.reach(action, self.used)

    def _cannot(self, action: Advance | Save | Tape | Load | Reverse) -> ScheduleError:
        """Return the error for an action that has nothing to start from, or uses up a tape."""
        if isinstance(action, Reverse):
            return illegal(action, f"neither its tape nor its state, live is {self.at}")
        start = action.start if isinstance(action, Advance) else action.step
        if start != self.at and not isinstance(action, Load):
            return illegal(action, f"the live state is {self.at}")
        (step,) = self.tapes
        only = "the chain has only its latest tape (one_tape)"
        return illegal(action, f"{only}, and that of step {step} is still needed")


def illegal(action: Action, seen: str) -> ScheduleError:
    """Return the error for an action that cannot be performed."""
    return ScheduleError(f"{action}, but {seen}")
