"""One sweep through a schedule, and what it holds in fast memory.

What differs between executors is what a sweep calls: the operators of the chain, the
slots that keep states and tapes, and `Elsewhere`, the slow tiers and what is done about
what they lose.

push
    `reverse` calls the adjoint of each step.
pull
    `reverse_until(step)` performs what comes before the adjoint of a step and returns
    what that adjoint is computed from; the caller computes it.  Steps are asked for in
    descending order.  One that is left out is not computed, and its tape is released.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection
from typing import Any, TypeVar

from ..actions import Await, Evict, Put, Schedule
from ..errors import MultistageError, ScheduleError
from ..states.slots import Kept, Slots, guarded
from ..states.tapes import WEIGHED
from .adjoints import close_adjoint, open_adjoint
from .ledger import Ledger
from .loop import perform
from .protocols import Elsewhere, Operators

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")
ArrayT = TypeVar("ArrayT")

# Compute spans are recorded at most this often: a record takes 4 microseconds.
_WINDOW_S = 1e-3


class Sweep:
    """One sweep, forward and back.

    Parameters
    ----------
    schedule : generator of actions
    chain : Operators
    slots : Slots
        Where states and tapes are kept.
    elsewhere : Elsewhere
    origin : Kept
        State 0.
    live : pytree
        The live state, equal to it.
    ledger : Ledger, optional
    look : callable, optional
        `look(state, step)`, called with the last state of the forward sweep; it may raise.
    limit : float
        Fast slots; a schedule that takes more is stopped.
    tape_slots : float
        Slots one tape beyond the first takes.
    weigh : callable, optional
        `weigh(step, tape, beside, tape_slots)`: slots that a tape takes beside another, if
        more than `tape_slots`.  Called for some tapes; None if tapes are not weighed.

    late : callable, optional
        `late(sweep, action)`, asked before a `Put`, `Evict` or `Await`: the schedule to perform
        in its place and after it, None to perform it.  See `multistage.execute.late`.

    Attributes
    ----------
    at : int
        Index of the live state, -1 when it is used up.
    end : int
        The next adjoint step is end - 1; 0 in the forward sweep.
    begun : int or None
        The step whose adjoint was asked for last.
    given : tape
        What that is computed from.
    held : dict
        Kept states; None for one on its way here.
    tapes : dict
        Kept tapes.
    lost : set of int
        States read in vain, which a `Free` may still name; ~i stands for tape i.
    used : float
        Fast slots taken.
    """

    __slots__ = (
        "__weakref__", "adjoint", "advance_by", "apart", "aside", "at", "begun", "check", "clock",
        "copies", "due", "elsewhere", "end", "forward_s", "forward_steps", "given", "hand", "held",
        "hold", "is_forward", "keep", "last", "late", "ledger", "lends", "limit", "live", "look",
        "lost", "one_tape", "opened", "origin", "peak", "release", "reverse_by",
        "reverse_s", "reverse_steps", "schedule", "shared", "slots", "state_is_tape", "tape_by",
        "tape_slots", "tapes", "until", "used", "used_up", "wanted", "weigh", "weighed", "window",
    )  # fmt: skip

    def __init__(
        self,
        schedule: Schedule,
        chain: Operators[State, Adjoint],
        slots: Slots[State, ArrayT],
        elsewhere: Elsewhere,
        origin: Kept,
        live: State,
        ledger: Ledger | None = None,
        *,
        look: Callable[[State, int], object] | None = None,
        limit: float = math.inf,
        tape_slots: float = 1.0,
        weigh: Callable[[int, object, object, float], float] | None = None,
        late: Callable[[Sweep, Put | Evict | Await], Schedule | None] | None = None,
    ) -> None:
        self.schedule, self.elsewhere, self.origin = schedule, elsewhere, origin
        # Of the chain's types, or None where it is used up.
        self.live: Any = live
        self.at = self.end = 0
        self.begun: int | None = None
        self.is_forward = True
        self.held: dict[int, Kept | None] = {}
        self.tapes: dict[int, Kept] = {}
        self.lost: set[int] = set()
        self.used = 0.0
        self.tape_slots, self.limit = tape_slots, limit
        self.look: Callable[[Any, int], object] | None = look
        self.ledger = ledger
        self.clock = time.perf_counter if ledger is None else ledger.clock
        self.slots: Slots[Any, Any] = slots
        self.take(chain)
        self.copies, self.state_is_tape = chain.in_place, chain.state_is_tape
        self.one_tape = not chain.state_is_tape and bool(getattr(chain, "one_tape", False))
        self.shared = slots.shared
        # Whether adjoints are computed from a slot's state as it is.
        self.lends = chain.state_is_tape and slots.shared and not chain.in_place
        self.keep: Callable[[Any, int], Kept] = slots.keep
        self.release: Callable[[Kept], None] = slots.release
        self.apart: Callable[[Any, Any], Any] = slots.apart
        self.hold: Callable[[object, tuple[Any, Any], int], Kept]
        self.hold = not_held if self.one_tape else slots.keep_tape
        self.used_up: Callable[[Any], Any] | None = getattr(slots, "used_up", None)
        self.check: Callable[[Any, int], None] | None = None
        self.weigh, self.late = weigh, late
        self.weighed: Collection[int] = () if weigh is None else WEIGHED
        self.adjoint: Any = None
        self.wanted = False  # None is the adjoint of operators that keep it themselves
        self.until = -1  # the step whose adjoint is asked for
        self.given: Any = None
        self.opened: Kept | None = None  # what is given, where it is a state in a slot
        self.aside: Kept | None = None  # the live state, whose arrays that is in
        self.hand: list[Any] = []
        self.peak = 0.0
        # What was run since the ledger was last written to, and when.
        self.window = self.last = self.due = 0.0
        self.forward_steps = self.reverse_steps = 0
        self.forward_s = self.reverse_s = 0.0

    def take(self, chain: Operators[State, Adjoint]) -> None:
        """Run this chain, in the part of the sweep that begins next."""
        self.advance_by: Callable[[Any, int, int], Any] = chain.advance
        self.tape_by: Callable[[Any, int], tuple[Any, object]] = chain.tape
        self.reverse_by: Callable[[object, Any, int], Any] = guarded(self.slots, chain.reverse)

    def forward(self) -> None:
        """Perform actions up to `EndForward`.

        Raises
        ------
        ScheduleError
            If the schedule cannot be followed.
        """
        # What a functional step returns is looked at once here, then where it is kept.
        self.check = self.slots.check
        if not self._perform(pulls=False):
            raise ScheduleError("the schedule ended without EndForward")

    def take_live(self) -> object:
        """Return the live state, which the sweep holds no more."""
        live, self.live, self.at = self.live, None, -1
        return live

    def reverse(self, adjoint: object) -> object:
        """Perform the rest of the schedule, adjoints included; return the last one.

        Parameters
        ----------
        adjoint : pytree
            Of the last state or, after `reverse_until(step)`, of the state before that step.
        """
        self._close_pulled()
        self.check = self.slots.check if self.copies else None
        self.adjoint, self.wanted = adjoint, adjoint is not None
        del adjoint
        try:
            self._perform(pulls=False)
            return self.adjoint
        finally:
            self.adjoint = None

    def reverse_until(self, step: int, restart: Callable[[], Schedule] | None = None) -> object:
        """Perform actions until the adjoint of a step may begin.

        Parameters
        ----------
        step : int
        restart : callable, optional
            Lets go of what is elsewhere and returns the schedule from its beginning: for
            steps whose adjoint has begun before, and after an error.

        Returns
        -------
        tape
            What the adjoint is computed from: the step's tape or, where a state is its own
            tape, the state before it.  Valid until the next step is asked for; asked for
            the same step again, it is returned again.

        Raises
        ------
        MultistageError
            If the adjoint of that step or of one below it has begun, without `restart`.
        ScheduleError
            If the schedule cannot be followed, or ends before that step.
        """
        if step == self.begun:
            return self.given
        if restart is None:
            self.require_left(step)
        elif step >= self._left:
            self._start_over(restart)
        self._close_pulled()
        self.check = self.slots.check if self.copies else None
        self.begun = -1  # should an action fail, the next request starts over
        self.until = step
        if not self._perform(pulls=True):
            raise ScheduleError(f"the schedule ended without Reverse({step})")
        self.given = open_adjoint(self, step, self.tapes.pop(step, None))
        self.begun = step
        return self.given

    @property
    def _left(self) -> int:
        """The steps below are those whose adjoints have not begun."""
        return self.end if self.begun is None else self.begun

    def require_left(self, step: int) -> None:
        """Raise MultistageError unless the adjoint of a step can still be asked for."""
        if step != self.begun and not 0 <= step < self._left:
            raise MultistageError(
                f"reverse_until({step}), but only the adjoints of steps 0 to {self._left - 1} are "
                "left; ask for steps in descending order, or start again with forward()"
            )

    def _start_over(self, restart: Callable[[], Schedule]) -> None:
        """Stand where the forward sweep ended, by running forward again."""
        self.begun = -1
        self.held.clear()
        self.tapes.clear()
        self.lost.clear()
        self.given = self.opened = self.aside = None
        self.schedule = restart()
        self.live = self.slots.load(self.origin, None)
        self.at, self.end, self.used = 0, 0, 0.0
        self.is_forward = True
        self.forward()
        self.take_live()
        self.begun = None

    def let_go(self) -> None:
        """Forget all states, tapes and adjoints: tracebacks may refer to an aborted sweep."""
        self.held.clear()
        self.tapes.clear()
        self.hand.clear()
        self.live = self.adjoint = self.given = self.opened = self.aside = None
        self.at = -1

    def _perform(self, pulls: bool) -> bool:
        """Perform actions up to `EndForward` or what is asked for; False if there are no more."""
        self.begin_window()
        if self.ledger is not None:
            self.peak = max(self.peak, self.ledger.counts.peak_slots)
        try:
            return perform(self, pulls)
        finally:
            if self.ledger is not None:
                counts = self.ledger.counts
                counts.peak_slots = max(counts.peak_slots, self.peak)
            self.flush()

    def _close_pulled(self) -> None:
        """Release the tape that was given to the caller."""
        if self.begun is not None and self.begun >= 0:
            given, self.given = self.given, None
            close_adjoint(self, given, None)
            self.end, self.begun = self.begun, None
            if self.ledger is not None:
                self.ledger.counts.reverse_steps += 1

    def begin_window(self) -> None:
        """Count steps and their times from now on."""
        self.window = self.last = now = self.clock()
        self.due = now + _WINDOW_S
        self.forward_steps = self.reverse_steps = 0
        self.forward_s = self.reverse_s = 0.0

    def flush(self) -> None:
        """Record the steps run since the last time."""
        if self.ledger is not None:
            self.ledger.record(self)
        self.window = self.last
        self.due = self.last + _WINDOW_S
        self.forward_steps = self.reverse_steps = 0
        self.forward_s = self.reverse_s = 0.0


def not_held(tape: object, states: tuple[object, object], step: int) -> Kept:
    """Wrap the only tape of a chain, which is in the operators' own arrays."""
    return Kept(tape, ())
