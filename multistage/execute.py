"""Run any schedule in real time: on a user's chain, with stores as slow tiers.

The computing thread is the caller's.  It waits for a store only in `Await`
and `Put`; what it waits is recorded as a stall.  Everything else a store does
happens on threads of the store.

What a fault does (a fault never changes the adjoint):

==============================  ==============================================
a store refuses an `Offer`      the schedule goes on without that checkpoint
a store refuses a `Put`         as a write that fails; warned
a write fails                   `Await` answers False; warned
a read fails                    `Await` answers False; warned
a schedule loads a lost state   it is computed again from the nearest earlier
                                state at hand; state 0 always is
an operator raises, Ctrl-C      the schedule is closed, slots are given back,
                                the exception goes on to the caller
==============================  ==============================================

Memory does not grow with the number of steps: the timeline merges spans, and
all else is per slot or per stored checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from . import switching
from .actions import (
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
from .backends.base import CheckpointLost, Store
from .backends.lifetimes import Birth
from .backends.streamed import require_distinct
from .chain import Chain
from .errors import (
    BudgetError,
    CheckpointWarning,
    MultistageError,
    ScheduleError,
    StateError,
    StoreError,
)
from .interrupts import Shield
from .metered import LargerThanPlanned
from .rules import Rules
from .slots import (
    ArrayStates,
    InPlace,
    Kept,
    Slots,
    StateLayout,
    States,
    apart_from,
    no_adjoint,
    overwritten,
)
from .steps import StepSet
from .tapes import WEIGHED, own_bytes
from .timeline import Timeline
from .varied import Layouts

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")

# A wait shorter than this is the price of the call, not a stall.
_STALL_S = 20e-6
# Steps run again at most, to find the one whose state was the first of another layout.
_RUN_AGAIN = 4096
# Compute spans are recorded at most this often: a record takes 4 microseconds.
_WINDOW_S = 1e-3


@dataclass(slots=True)
class Counts:
    """What a run did, exactly.

    Attributes
    ----------
    forward_steps : int
        Steps run by `Advance`, `Tape` and recoveries.
    reverse_steps : int
    forward_s, reverse_s : float
        Seconds in those steps.
    stall_s : float
        Seconds the computing thread waited for stores.
    peak_slots : float
        Most fast slots taken at once, staging and landing included.
    writes, reads : int
        Transfers accepted.
    refused : int
        Offers that were not taken.
    lost : int
        Checkpoints that were written or read in vain.
    recovered_steps : int
        Steps run again because a checkpoint was lost.
    elapsed_s : float
        Seconds inside `forward` and `reverse`.
    """

    forward_steps: int = 0
    reverse_steps: int = 0
    forward_s: float = 0.0
    reverse_s: float = 0.0
    stall_s: float = 0.0
    peak_slots: float = 0.0
    writes: int = 0
    reads: int = 0
    refused: int = 0
    lost: int = 0
    recovered_steps: int = 0
    elapsed_s: float = 0.0


@dataclass(slots=True)
class _Transfer:
    step: int
    tier: int
    is_write: bool
    staged: Kept | None = None  # keeps the arrays of a state that no slot holds
    took: bool = False  # whether a staging slot is counted for it
    failed: bool = False


@dataclass(slots=True, weakref_slot=True)
class _Run(Generic[State, Adjoint]):
    """What one sweep holds."""

    schedule: Schedule
    layout: StateLayout
    slots: Slots
    origin: Kept
    live: Any
    at: int = 0  # index of the live state, -1 when it is used up
    stores: tuple[Store, ...] = ()
    end: int = 0  # the next adjoint step is end - 1
    held: dict[int, Kept | None] = field(default_factory=dict)  # None: landing
    lost: set[int] = field(default_factory=set)  # read in vain: a Free may still come
    tapes: dict[int, Any] = field(default_factory=dict)
    tokens: dict[int, _Transfer] = field(default_factory=dict)
    next_token: int = 0
    stored: list[StepSet] = field(default_factory=list)
    packings: dict[tuple[int, int], Any] = field(default_factory=dict)
    used: float = 0.0


# The sweep under way in each store, by the store's identity: a sweep keeps its
# stores alive, and its entry is gone when it is.
_sweeps: weakref.WeakValueDictionary[int, _Run[Any, Any]] = weakref.WeakValueDictionary()
# Re-entrant: a garbage collection may end another sweep while it is held.
_sweeps_lock = threading.RLock()


def _begin_anew() -> None:
    """In a forked child, where nobody may be left to release the lock."""
    global _sweeps_lock
    _sweeps_lock = threading.RLock()


os.register_at_fork(after_in_child=_begin_anew)


@dataclass(frozen=True, slots=True)
class Resumed:
    """What an earlier process left of the same computation.

    Attributes
    ----------
    stored : tuple of int
        Checkpoints in the first tier.
    last : list of arrays or None
        The last state; None if the forward sweep is not over.
    end : int or None
        With `last`: where the adjoint stands; the schedule begins with `EndForward`.
    """

    stored: tuple[int, ...]
    last: list[Any] | None = None
    end: int | None = None

    def tell(self, rules: Rules) -> None:
        """Let the rules begin where the run does."""
        for step in self.stored:
            rules.stored[step, 0] = None
        rules.tier_used[0] = rules.tier_peak[0] = len(self.stored)
        if self.end is not None:
            rules.n_steps = rules.live = self.end


class Executor(Generic[State, Adjoint]):
    """Runs schedules, one sweep after the other.

    Parameters
    ----------
    chain : Chain
    stores : sequence of Store
        The slow tiers, opened; addressed by the actions' tier index.
    tape_slots : float
        Slots one tape beyond the first takes.
    slots : float
        Fast slots of the budget: a schedule that takes more is stopped.
    heavier : callable, optional
        `heavier(step, nbytes)`, called for a tape that is larger than
        `tape_slots`; it may raise.  The tapes are taken to be so large from
        then on.
    rules : callable, optional
        Makes the legality machine that judges every action before it is
        performed; for schedules that were not made by a planner of this package.
    clock : callable
        Seconds; `time.perf_counter` and whatever the stores stamp with.
    progress : callable, optional
        `progress(forward_steps, reverse_steps)`, called now and then.
    states : States, optional
        What states are made of, if not of NumPy arrays.

    Notes
    -----
    `forward`, then `reverse`, from one thread; both again for the next sweep.
    After an exception the sweep is gone and `forward` starts a new one.

    Examples
    --------
    >>> import numpy as np
    >>> from multistage.chain import FunctionChain
    >>> from multistage.plan.revolve import revolve_schedule
    >>> chain = FunctionChain(lambda x, i: x * x, lambda x, a, i: 2 * x * a)
    >>> executor = Executor(chain, ())
    >>> float(executor.forward(revolve_schedule(1, 3), np.array(2.0)))
    256.0
    >>> float(executor.reverse(np.array(1.0)))
    1024.0
    """

    def __init__(
        self,
        chain: Chain[State, Adjoint],
        stores: Sequence[Store],
        *,
        tape_slots: float = 1.0,
        slots: float = math.inf,
        heavier: Callable[[int, int], None] | None = None,
        rules: Callable[[], Rules] | None = None,
        clock: Callable[[], float] = time.perf_counter,
        progress: Callable[[int, int], None] | None = None,
        states: States | None = None,
    ) -> None:
        self._states: States = ArrayStates(chain.in_place) if states is None else states
        self._chain = chain
        self._stores = tuple(stores)
        require_distinct(self._stores, "the stores of an executor")
        self.tape_slots = tape_slots
        self._limit = slots + 1e-9
        self._heavier = heavier
        self._make_rules = rules
        self._rules: Rules | None = None
        self._clock = clock
        self._progress = progress
        self._run: _Run[State, Adjoint] | None = None
        self._slots: Slots | None = None
        self._layout: StateLayout | None = None
        self._begin = 0.0
        self._watched = False
        self._birth = Birth.here()  # of the sweep
        self._shield = Shield()
        self.timeline = Timeline()
        self.counts = Counts()

    @property
    def stores(self) -> tuple[Store, ...]:
        """The slow tiers."""
        return self._stores

    # ------------------------------------------------------------------ sweeps

    def forward(
        self,
        schedule: Schedule | Iterable[Action],
        state: State,
        resumed: Resumed | None = None,
        *,
        watched: bool = False,
        judged: bool = True,
    ) -> State:
        """Run the schedule up to its `EndForward`; return the last state.

        Parameters
        ----------
        schedule : generator or iterable of actions
        state : pytree of arrays
            State 0.
        resumed : Resumed, optional
            What is there already.
        watched : bool
            Whether the schedule looks at `live` after an `Advance`, as one of
            an unknown number of steps does.
        judged : bool
            Whether the legality machine, if there is one, judges this schedule.

        Raises
        ------
        StateError
            If `state` is no pytree of plain arrays, or a later state differs
            from it in structure, shape or dtype.
        StoreError
            If another sweep is under way in a store.
        ScheduleError
            If the schedule cannot be followed.
        """
        self.abort()
        self._birth = Birth.here()
        layout = self._states.layout(state)
        if self._layout is None or self._slots is None or not layout.same_as(self._layout):
            self._layout = layout
            self._slots = self._states.slots(layout)
        if not hasattr(schedule, "send"):
            schedule = (action for action in schedule)
        slots = self._slots
        origin = slots.keep(state, 0)
        self._run = _Run(
            schedule=schedule,  # type: ignore[arg-type]
            layout=self._layout,
            stores=self._stores,
            slots=slots,
            origin=origin,
            # A functional step may put other arrays into its containers: not into the caller's.
            live=state if slots.shared or self._chain.in_place else slots.load(origin, state),
            stored=[StepSet() for _ in self._stores],
        )
        try:
            self._occupy(self._run)
        except BaseException:
            self._run.stored = []  # nothing of ours is in them
            self.abort()
            raise
        if resumed is not None:
            self._take_up(self._run, resumed, state)
        self._rules, self._watched = None, watched
        if self._make_rules is not None and judged:
            self._rules = self._make_rules()
            if resumed is not None:
                resumed.tell(self._rules)
            self._run.schedule = _judged(self._run.schedule, self._rules)
        self.timeline, self.counts = Timeline(), Counts()
        self._begin = self._clock()
        self._guarded(None, forward=True)
        run = self._run
        assert run is not None
        return run.live  # type: ignore[no-any-return]

    def _occupy(self, run: _Run[State, Adjoint]) -> None:
        """Take the stores for this sweep; they are free when `run` is gone.

        `open` keeps a second run out of a store.  This keeps a second sweep out
        of one that its user opened himself, whatever class it is of.
        """
        with _sweeps_lock:
            for store in self._stores:
                other = _sweeps.get(id(store))
                if other is not None and other is not run:
                    raise StoreError(
                        f"tier {store.name!r} holds the checkpoints of another sweep; end that one "
                        "first with reverse() or abort(), or give each executor stores of its own"
                    )
            for store in self._stores:
                _sweeps[id(store)] = run

    def _leave(self, run: _Run[State, Adjoint]) -> None:
        with _sweeps_lock:
            for store in self._stores:
                if _sweeps.get(id(store)) is run:
                    del _sweeps[id(store)]

    @staticmethod
    def _take_up(run: _Run[State, Adjoint], resumed: Resumed, state: State) -> None:
        for step in resumed.stored:
            run.stored[0].add(step)
        if resumed.last is not None and resumed.end is not None:
            # The live state is the last one, whatever the adjoint has come to:
            # the caller wants to see it, the schedule has no use for it.
            run.live = run.slots.load(run.slots.adopt(resumed.last, -1), state)
            run.at = resumed.end

    def reverse(self, adjoint: Adjoint) -> Adjoint:
        """Run the rest of the schedule; return the adjoint of state 0.

        Raises
        ------
        MultistageError
            If no forward sweep stands ready.
        """
        if self._run is None:
            raise MultistageError("reverse() needs a forward() before it, once per sweep")
        adjoint = self._run.slots.adopt_adjoint(adjoint, self._run.live)
        result = self._guarded(adjoint, forward=False)
        left = self._run.end
        self.abort()
        if self._rules is not None:
            self._rules.finish()
        if left != 0:
            raise ScheduleError(f"the schedule ended with the adjoint at {left}, not 0")
        return result  # type: ignore[no-any-return]

    @property
    def live(self) -> State:
        """The live state, for the schedule of a `watched` forward sweep to look at."""
        assert self._run is not None
        return self._run.live  # type: ignore[no-any-return]

    def abort(self) -> None:
        """Forget the sweep under way: close its schedule, give all slots back."""
        run, self._run = self._run, None
        if run is None:
            if self._slots is not None:  # Ctrl-C came when they held state 0, but no run them
                self._slots.release_all()
            return
        try:
            run.schedule.close()
        finally:
            try:
                if not self._birth.foreign:  # in a forked child it is the parent's sweep
                    self._settle(run)
            finally:
                self._leave(run)
                run.slots.release_all()

    def _settle(self, run: _Run[State, Adjoint]) -> None:
        """Wait for the writes under way: only then may their arrays be given back.

        Reads are left to the stores, whose memory they go to.  `get` may need
        other processes, and after an error those are elsewhere.
        """
        for transfer in run.tokens.values():
            if transfer.is_write and not transfer.failed:
                self._stores[transfer.tier].wait_written(transfer.step)
        for tier, steps in enumerate(run.stored):
            for step in steps:
                self._stores[tier].drop(step)

    def _guarded(self, adjoint: Any, *, forward: bool) -> Any:
        began = self._clock()
        try:
            if self._stores:
                switching.shorten(self)
            try:
                with Shield() as self._shield:
                    return self._drive(adjoint, forward)
            finally:
                self.counts.elapsed_s += self._clock() - began
        except BaseException as error:
            try:
                told = self._first_to_differ(error) if forward else error
                if forward and self._chain.in_place and _sizes_differ(error):
                    told = self._given_back(told)
            finally:
                self.abort()
            if told is error:
                told = overwritten(error)
            try:
                if told is not error:
                    raise told from error
                raise
            finally:
                # Its traceback refers to this frame: the two would keep the sweep's tapes alive.
                del told
        finally:
            switching.restore(self)

    def _given_back(self, error: BaseException) -> BaseException:
        """Put state 0 back where the caller of an in-place chain has it: he may begin anew.

        Where it does not go back the error returned tells so, and that he may not.
        """
        run = self._run
        if run is None or not isinstance(run.slots, InPlace):
            return error
        with contextlib.suppress(Exception):  # what it was told first is worth more
            if run.slots.given_back(run.live, run.origin):
                return error
        return StateError(
            f"{str(error).split(';')[0]}; state 0 cannot be put back to measure such steps: in "
            "place, give a dict or list of arrays that are not kept from being overwritten"
        )

    def _first_to_differ(self, error: BaseException) -> BaseException:
        """Return the error that names the step whose state was the first of another layout.

        A functional chain's states are looked at where they are kept, perhaps many steps after
        the one that returned the first such state; a few steps are run again to find it.
        """
        run, chain = self._run, self._chain
        if not isinstance(error, StateError) or error.state is None or run is None:
            return error
        if chain.in_place:
            return error  # looked at after every advance, and overwritten since
        held = [step for step, kept in run.held.items() if kept is not None and step < error.state]
        start = max(held, default=0)
        kept = run.held[start] if held else run.origin
        if kept is None or error.state - start > _RUN_AGAIN:
            return error
        step = start
        found: StateError | None = error
        if error.state - start > 1:
            try:
                found, live = None, run.slots.load(kept, run.live)
                for step in range(start, error.state):
                    live = chain.advance(live, step, step + 1)
                    run.layout.arrays(live, step + 1)
            except StateError as differs:
                found = differs if differs.state == step + 1 else None
            except Exception:
                pass  # what was wrong is known, if not where
        if found is None or found.varies != error.varies:
            return error  # the first that differs may be such as a survey takes
        told = StateError(f"step {step} returned a state unlike the first: {found}")
        told.state, told.varies = error.state, error.varies
        return told

    def _drive(self, adjoint: Any, forward: bool) -> Any:
        """Perform actions until EndForward or the end; return the adjoint.

        The loop every step passes through: the frequent actions are performed
        here, on local names and with one look at the clock per step.  `at` is
        the index of the live state, `end` that of the adjoint.
        """
        run = self._run
        assert run is not None
        chain, clock, counts = self._chain, self._clock, self.counts
        advance, reverse, state_is_tape = chain.advance, chain.reverse, chain.state_is_tape
        one_tape = not state_is_tape and getattr(chain, "one_tape", False)
        slots, held, tapes = run.slots, run.held, run.tapes
        keep, load, release, trim = slots.keep, slots.load, slots.release, slots.trim
        used_up = getattr(slots, "used_up", None)  # where states are of any size
        copies, watched = chain.in_place, forward and self._watched
        shared, apart = slots.shared, slots.apart
        # What a functional step returns is looked at once here, then where it is kept.
        check = slots.check if copies or forward else None
        hold = _not_held if one_tape else slots.keep_tape
        wanted = adjoint is not None  # None is the adjoint of operators that keep it themselves
        send, answer = run.schedule.send, None
        live, at, end, tape_slots = run.live, run.at, run.end, self.tape_slots
        # Whatever refers to a state or a tape that is done with keeps memory that
        # nobody counts: `live` alone refers to the live state from here on.
        run.live = None
        hand: list[Any] = []
        forward_steps = reverse_steps = 0
        forward_s = reverse_s = 0.0
        used, peak, window_s = run.used, counts.peak_slots, _WINDOW_S
        limit = self._limit
        window = last = clock()
        try:
            while True:
                try:
                    action: Any = send(answer)  # narrowed by `kind`: isinstance costs more
                except StopIteration:
                    if forward:
                        raise ScheduleError("the schedule ended without EndForward") from None
                    break
                answer = None
                kind = type(action)
                if kind is Reverse:
                    step = action.step
                    if step != end - 1:
                        raise _illegal(action, f"the next adjoint step is {end - 1}")
                    if tapes and step in tapes:
                        if used_up is not None and not 0 <= at <= step:
                            live, at = used_up(live), -1
                        tape = tapes.pop(step)
                        if not state_is_tape:
                            release(tape)  # first: an adjoint step may overwrite its tape
                            given = tape.state
                            del tape
                            adjoint = reverse(given, adjoint, step)
                            if adjoint is not None:  # the next tape may be in the same arrays
                                adjoint = apart_from(adjoint, given)
                            del given
                        elif not copies:
                            given = load(tape, live)
                            adjoint = apart(reverse(given, adjoint, step), given)
                            release(tape)
                            del tape, given
                        else:
                            # The tape goes through the live arrays, whose state
                            # the schedule may still want: put that aside.
                            aside = None
                            if 0 <= at < step:
                                if used + 1 > peak:
                                    peak = used + 1
                                    if peak > limit:
                                        raise self._over(action, peak)
                                aside = keep(live, at)
                            live = load(tape, live)
                            release(tape)
                            del tape
                            adjoint = reverse(live, adjoint, step)
                            if aside is None:
                                at = -1
                            else:
                                adjoint = apart(adjoint, live)
                                live = load(aside, live)
                                release(aside)
                            del aside
                        if tapes:
                            used -= tape_slots
                    elif at != step:
                        raise _illegal(action, f"neither its tape nor its state, live is {at}")
                    elif state_is_tape:
                        adjoint = reverse(live, adjoint, step)
                        at = -1
                    elif not tapes:
                        made = chain.tape(live, step)[1]
                        adjoint = apart_from(reverse(made, adjoint, step), made)
                        del made
                        at = -1
                    else:  # its tape stands beside them until it is used
                        trim()
                        made = chain.tape(live, step)[1]
                        if len(tapes) + 1 in WEIGHED:
                            more = self._weigh(step, made, tapes, tape_slots)
                            tape_slots += more
                            used += more * (len(tapes) - 1)
                        if used + tape_slots > peak:
                            peak = used + tape_slots
                            if peak > limit:
                                raise self._over(action, peak)
                        adjoint = apart_from(reverse(made, adjoint, step), made)
                        del made
                        at = -1
                    if at < 0 and (copies or state_is_tape):
                        adjoint = apart(adjoint, live)
                    if adjoint is None and wanted:
                        raise no_adjoint(step)
                    end = step
                    now = clock()
                    reverse_s += now - last
                    last = now
                    reverse_steps += 1
                elif kind is Advance:
                    start, stop = action.start, action.stop
                    if start != at:
                        raise _illegal(action, f"the live state is {at}")
                    if one_tape and tapes:
                        raise _only_latest(action, tapes)
                    if copies or stop - start == 1:  # what steps overwrite may be given back
                        live = advance(live, start, stop)
                    else:  # not even we refer to the first state while others are made
                        hand.append(live)
                        live = None
                        live = advance(hand.pop(), start, stop)
                    if watched:
                        run.live = live
                    at = stop
                    if check is not None:
                        check(live, at)
                        if not copies:
                            check = None
                    now = clock()
                    forward_s += now - last
                    last = now
                    forward_steps += stop - start
                elif kind is Load:
                    if one_tape and tapes:
                        raise _only_latest(action, tapes)
                    at = action.step
                    kept: Kept | None = held.get(at)
                    if kept is None:
                        run.used = used
                        kept = self._find(at, live)
                        used = run.used
                    live = kept.state if shared else load(kept, live)
                    kept = None
                    continue
                elif kind is Save:
                    step = action.step
                    if step != at:
                        raise _illegal(action, f"the live state is {at}")
                    used += 1
                    if used > peak:
                        peak = used
                        if peak > limit:
                            raise self._over(action, peak)
                    held[step] = keep(live, step)
                    continue
                elif kind is Free:
                    if action.step not in held:
                        if action.step not in run.lost:
                            raise _illegal(action, "no slot holds it")
                        # Its slot went with the checkpoint: the schedule did not look.
                        run.lost.remove(action.step)
                        continue
                    kept = held.pop(action.step)
                    if kept is not None:
                        release(kept)
                        kept = None
                    used -= 1
                    continue
                elif kind is Tape:
                    step = action.step
                    if step != at:
                        raise _illegal(action, f"the live state is {at}")
                    if tapes:
                        if one_tape:
                            raise _only_latest(action, tapes)
                        if not state_is_tape:
                            trim()
                        used += tape_slots
                        if used > peak:
                            peak = used
                            if peak > limit:
                                raise self._over(action, peak)
                    if state_is_tape:
                        tapes[step] = keep(live, step)
                        live = advance(live, step, step + 1)
                    else:
                        before = live
                        live, tape = chain.tape(live, step)
                        if len(tapes) + 1 in WEIGHED:
                            more = self._weigh(step, tape, tapes, tape_slots)
                            if more:
                                tape_slots += more
                                used += more * len(tapes)
                                peak = max(peak, used)
                                if peak > limit:
                                    raise self._over(action, peak)
                        tapes[step] = hold(tape, (before, live), step)
                        before = tape = None  # or they would be references that nobody counts
                    at = step + 1
                    if copies or not state_is_tape:  # a tape may hold on to it
                        slots.check(live, at)
                    now = clock()
                    forward_s += now - last
                    last = now
                    forward_steps += 1
                elif kind is EndForward:
                    if not forward:
                        raise _illegal(action, "the forward sweep is over")
                    run.layout.arrays(live, at)
                    end = at
                    self.timeline.end_forward_s = clock() - self._begin
                    break
                else:
                    run.live, run.at, run.used = live, at, used
                    answer = self._transfer(action)
                    used, last, run.live = run.used, clock(), None
                if last - window > window_s:
                    run.used = used
                    self._record(window, last, forward_steps, forward_s, reverse_steps, reverse_s)
                    window, forward_steps, reverse_steps = last, 0, 0
                    forward_s = reverse_s = 0.0
        finally:
            run.live, run.at, run.end, run.used = live, at, end, used
            counts.peak_slots = max(counts.peak_slots, peak)
            self._record(window, last, forward_steps, forward_s, reverse_steps, reverse_s)
        return adjoint

    def _record(
        self,
        start: float,
        stop: float,
        forward_steps: int,
        forward_s: float,
        reverse_steps: int,
        reverse_s: float,
    ) -> None:
        """Enter a window of computing into the timeline, and what the stores did meanwhile."""
        run, counts, begin = self._run, self.counts, self._begin
        assert run is not None
        counts.forward_steps += forward_steps
        counts.reverse_steps += reverse_steps
        counts.forward_s += forward_s
        counts.reverse_s += reverse_s
        # Within the window the two kinds alternate: draw one after the other.
        at = max(start, stop - forward_s - reverse_s) - begin
        if forward_steps:
            self.timeline.add(
                "compute", "forward", at, at + forward_s, first=run.at, count=forward_steps
            )
        if reverse_steps:
            at += forward_s
            self.timeline.add(
                "compute", "reverse", at, at + reverse_s, first=run.end, count=reverse_steps
            )
        now = stop - begin
        layout = run.layout
        if isinstance(layout, Layouts):
            self.timeline.sample("fast", now, layout.held_bytes)
        else:
            self.timeline.sample("fast", now, run.used * layout.nbytes)
        self._drain()
        for store in self._stores:
            self.timeline.sample(store.name, now, store.stats.stored_bytes)
        if self._progress is not None:
            self._progress(counts.forward_steps, counts.reverse_steps)

    def _drain(self) -> None:
        """Move the stores' finished transfers into the timeline."""
        begin = self._begin
        for store in self._stores:
            records = store.transfers
            while records:
                kind, key, start_s, stop_s, nbytes = records.popleft()
                self.timeline.add(
                    kind, kind, start_s - begin, stop_s - begin, first=key, nbytes=nbytes
                )

    def _weigh(self, step: int, tape: Any, tapes: dict[int, Any], tape_slots: float) -> float:
        """Return how many slots more than assumed a tape takes beside those held."""
        run = self._run
        assert run is not None
        nbytes = own_bytes(tape, next(reversed(tapes.values())).state)
        more = nbytes / run.layout.nbytes - tape_slots
        if more <= 1e-9:
            return 0.0
        if self._heavier is not None:
            self._heavier(step, nbytes)
        self.tape_slots = tape_slots + more
        return more

    def _over(self, action: Action, slots: float) -> BudgetError:
        return BudgetError(
            f"{action} takes {slots:.4g} fast slots of the {self._limit:.4g} in the budget, a tape "
            f"being {self.tape_slots:.4g} of them; raise the budget, or plan with the tapes as "
            "they are: give their bytes as tape_bytes, or call forward() again if measured"
        )

    # --------------------------------------------------------------- transfers

    def _transfer(self, action: Action) -> Answer:
        """Perform an action that concerns a store; return its answer."""
        run = self._run
        assert run is not None
        if not isinstance(action, Await) and getattr(action, "tier", 0) >= len(self._stores):
            raise _illegal(action, f"there are {len(self._stores)} tiers")
        if getattr(action, "tape", False):
            raise _illegal(action, "tapes stay in fast memory here")
        if isinstance(action, Evict):
            return self._evict(action)
        if isinstance(action, Await):
            if action.token not in run.tokens:
                raise _illegal(action, "no such transfer is under way")
            return self._await(run.tokens.pop(action.token))
        shield = self._shield  # Ctrl-C waits: a transfer half queued would be waited for in vain
        shield.up = True
        try:
            return self._queue(action)
        finally:
            shield.up = False
            shield.let_go()

    def _evict(self, action: Evict) -> bool:
        """Wait for the write of a held checkpoint, then give its slot back."""
        run = self._run
        assert run is not None
        step, tier = action.step, action.tier
        writes = [
            token
            for token, each in run.tokens.items()
            if each.is_write and (each.step, each.tier) == (step, tier)
        ]
        if not writes or run.held.get(step) is None:
            raise _illegal(action, "no slot holds it, or no write of it is under way")
        written = self._await(run.tokens.pop(writes[0]))
        kept = run.held.pop(step)
        assert kept is not None
        run.slots.release(kept)
        run.used -= 1
        return written

    def _queue(self, action: Action) -> Answer:
        run, counts = self._run, self.counts
        assert run is not None
        if isinstance(action, (Offer, Put)):
            return self._write(action)
        if isinstance(action, Get):
            self._stores[action.tier].prefetch(action.step)
            run.held[action.step] = None
            run.used += 1
            counts.peak_slots = max(counts.peak_slots, run.used)
            counts.reads += 1
            return self._token(_Transfer(action.step, action.tier, is_write=False))
        assert isinstance(action, Drop)
        self._forget(action.step, action.tier)
        return None

    def _token(self, transfer: _Transfer) -> int:
        run = self._run
        assert run is not None
        token, run.next_token = run.next_token, run.next_token + 1
        run.tokens[token] = transfer
        return token

    def _write(self, action: Offer | Put) -> Answer:
        run, counts = self._run, self.counts
        assert run is not None
        step, tier, store = action.step, action.tier, self._stores[action.tier]
        kept, staged = run.held.get(step), None
        if kept is None:
            if step != run.at:
                raise _illegal(action, f"state {step} is neither held nor live")
            kept = staged = run.slots.keep(run.live, step)
        flat, packing = run.layout.pack(kept.arrays)
        is_put = isinstance(action, Put)
        before = self._clock()
        accepted = store.put(step, flat, block=is_put)
        if is_put:
            self._stalled(before)
        if not accepted:
            if staged is not None:
                run.slots.release(staged)
            counts.refused += 1
            if not is_put:
                return None
            self._warn(f"tier {store.name!r} has no room for checkpoint {step}")
            if staged is not None:
                run.used += 1  # as the schedule believes, until its Await
            return self._token(
                _Transfer(step, tier, is_write=True, failed=True, took=staged is not None)
            )
        counts.writes += 1
        run.stored[tier].add(step)
        if packing is not None:
            run.packings[step, tier] = packing
        if staged is not None:
            run.used += 1
            counts.peak_slots = max(counts.peak_slots, run.used)
        return self._token(
            _Transfer(step, tier, is_write=True, staged=staged, took=staged is not None)
        )

    def _await(self, transfer: _Transfer) -> bool:
        run = self._run
        assert run is not None
        step, tier, store = transfer.step, transfer.tier, self._stores[transfer.tier]
        before = self._clock()
        if transfer.is_write:
            written = not transfer.failed and store.wait_written(step)
            self._stalled(before)
            if transfer.staged is not None:
                run.slots.release(transfer.staged)
            if transfer.took:
                run.used -= 1
            if not written and not transfer.failed:
                self._lose(step, tier, "could not be written")
            return written
        arrays = self._read(step, tier)
        self._stalled(before)
        if arrays is None:
            del run.held[step]
            run.lost.add(step)
            run.used -= 1
            return False
        run.held[step] = run.slots.adopt(arrays, step)
        return True

    def _read(self, step: int, tier: int) -> list[Any] | None:
        """Return the arrays of a checkpoint, or None if it is lost."""
        run = self._run
        assert run is not None
        try:
            arrays = self._stores[tier].get(step)
        except CheckpointLost as error:
            self._lose(step, tier, str(error))
            return None
        return run.layout.unpack(arrays, run.packings.get((step, tier)))

    def _find(self, step: int, live: Any) -> Kept:
        """Return state `step`, which no slot holds: state 0, or a lost checkpoint made again.

        The nearest earlier state that can be had is run forward.  States that
        are being read are left alone: their schedule waits for them itself.
        """
        run, chain = self._run, self._chain
        assert run is not None
        if step == 0:
            return run.origin  # never put into a slot: a Free would give it away
        best, kept = 0, run.origin
        for start, other in run.held.items():
            if other is not None and best < start < step:
                best, kept = start, other
        landing = {start for start, other in run.held.items() if other is None}
        for tier, steps in enumerate(run.stored):
            for start in steps.descending(step):
                if start <= best:
                    break
                if start in landing:
                    continue
                arrays = self._read(start, tier)
                if arrays is not None:
                    best, kept = start, run.slots.adopt(arrays, start)
                    break
        if best < step:
            live = chain.advance(run.slots.load(kept, live), best, step)
            self.counts.recovered_steps += step - best
            kept = run.slots.keep(live, step)
        if step not in run.held:
            run.used += 1
            self.counts.peak_slots = max(self.counts.peak_slots, run.used)
        run.held[step] = kept
        return kept

    def _lose(self, step: int, tier: int, reason: str) -> None:
        self.counts.lost += 1
        self._forget(step, tier)
        self._warn(f"checkpoint {step} of tier {self._stores[tier].name!r} is lost: {reason}")

    def _forget(self, step: int, tier: int) -> None:
        run = self._run
        assert run is not None
        if step in run.stored[tier]:
            run.stored[tier].discard(step)
            self._stores[tier].drop(step)
        run.packings.pop((step, tier), None)

    def _stalled(self, since: float) -> None:
        now = self._clock()
        if now - since > _STALL_S:
            self.counts.stall_s += now - since
            self.timeline.add("compute", "stall", since - self._begin, now - self._begin)

    @staticmethod
    def _warn(what: str) -> None:
        warnings.warn(f"{what}; the steps after it will be computed again", CheckpointWarning, 3)


def _judged(schedule: Schedule, rules: Rules) -> Schedule:
    """Pass a schedule on, every action judged before it is performed."""
    answer: Answer = None
    try:
        while True:
            try:
                action = schedule.send(answer)
            except StopIteration:
                return
            kind = type(action)
            if kind is Offer or kind is Await or kind is Evict:
                assert isinstance(action, Offer | Await | Evict)
                rules.expect(action)
                answer = yield action
                rules.apply(action, answer)
            else:
                # Tokens are counted here as there: that of a Put or Get is known.
                rules.apply(action, rules.next_token if kind is Put or kind is Get else None)
                answer = yield action
    finally:
        schedule.close()


def _sizes_differ(error: BaseException) -> bool:
    """Whether a sweep ended since its states are of other sizes than was planned for."""
    return (isinstance(error, StateError) and error.varies) or isinstance(error, LargerThanPlanned)


def _only_latest(action: Action, tapes: Iterable[int]) -> ScheduleError:
    (step,) = tapes
    return _illegal(
        action,
        f"the chain has only its latest tape (one_tape), and that of step {step} is wanted still",
    )


def _not_held(tape: Any, states: tuple[Any, Any], step: int) -> Kept:
    """Wrap the only tape of a chain, which is in the operators' own arrays."""
    return Kept(tape, ())


def _illegal(action: Action, seen: str) -> ScheduleError:
    return ScheduleError(f"{action}, but {seen}")
