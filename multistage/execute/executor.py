"""Run any schedule in real time: on a user's chain, with stores as slow tiers.

The computing thread is the caller's.  It waits for a store only in `Await`
and `Put`; what it waits is recorded as a stall.  Everything else a store does
happens on threads of the store.

What a fault does (a fault never changes the adjoint):

==============================  ==============================================
a store refuses an `Offer`      the schedule continues without that checkpoint
a store refuses a `Put`         as a write that fails; warned
a write fails                   `Await` answers False; warned
a read fails                    `Await` answers False; warned
a transfer is late              the rest is a schedule without the tiers; see `late`
a schedule loads a lost state   it is computed again from the nearest one at hand
an operator raises, Ctrl-C      all is given back, the exception reaches the caller
==============================  ==============================================

Memory does not grow with the number of steps: the timeline merges spans, and
all else is per slot or per stored checkpoint.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from ..actions import Action, Offer, Schedule
from ..backends.base import Store, require_distinct
from ..backends.lifetimes import Birth
from ..errors import ArgumentError, MultistageError, ScheduleError, StateError
from ..model.chain import Chain
from ..model.stages import StageCosts
from ..planners.base import played
from ..schedule.rules import Rules, each_judged
from ..schedule.timeline import Timeline
from ..states.in_place import ArrayStates, Copies
from ..states.layout import Array, Layout, Layouts
from ..states.slots import Slots, StateLayout, States, overwritten
from ..support import switching
from ..support.interrupts import Shield
from .late import Late
from .ledger import Counts, Ledger
from .metered import LargerThanPlanned
from .pushed import Pushed
from .sweep import Sweep, Wait
from .transfers import Transfers

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")
ArrayT = TypeVar("ArrayT")
LayoutT = TypeVar("LayoutT")

# Steps run again at most, to find the one whose state was the first of another layout.
_RUN_AGAIN = 4096


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
    n_steps : int or None
        With `last`: which state that is.
    layouts : mapping
        Where steps differ, of each of these states.
    """

    stored: tuple[int, ...]
    last: list[Array] | None = None
    end: int | None = None
    n_steps: int | None = None
    layouts: Mapping[int, Layout] = field(default_factory=dict)

    def take_up(self, sweep: Sweep, transfers: Transfers) -> None:
        """Let a sweep begin where the earlier process stopped."""
        for step in self.stored:
            transfers.stored[0].add(step)
        if self.last is not None and self.end is not None and self.n_steps is not None:
            # The live state is the last one, whatever the adjoint has come to:
            # the caller wants to see it, the schedule has no use for it.
            slots = sweep.slots
            kept = slots.adopt(self.last, self.n_steps)
            sweep.live = slots.load(kept, sweep.live)
            slots.release(kept)
            sweep.at = self.end

    def tell(self, rules: Rules) -> None:
        """Let the rules begin where the run does."""
        for step in self.stored:
            rules.stored[step, 0] = None
        rules.tier_used[0] = rules.tier_peak[0] = sum(map(rules.room_in_tier, self.stored))
        if self.end is not None:
            rules.n_steps = rules.live = self.end

    def peak_bytes(self, actions: Iterable[Action], costs: StageCosts) -> int:
        """Return the most fast memory that actions take from there on, where steps differ."""
        rules = Rules.in_bytes(costs, recovers=True)
        self.tell(rules)
        for action in actions:
            rules.apply(action, rules.usual_answer(action))
        assert rules.memory is not None
        return rules.memory.peak_bytes


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
    >>> from multistage.model.chain import FunctionChain
    >>> from multistage.planners.single.revolve import revolve_schedule
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
        states: States[State, ArrayT, LayoutT] | None = None,
    ) -> None:
        self._states: States[State, Any, Any] = (
            ArrayStates(chain.in_place) if states is None else states
        )
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
        self._sweep: Sweep | None = None
        self._pushed: Pushed[State, Adjoint] | None = None  # while the caller runs the steps
        self._transfers: Transfers | None = None
        self._slots: Slots[State, Any] | None = None
        self._layout: StateLayout[State, Any, Any] | None = None
        self._birth = Birth.here()  # of the sweep
        self.timeline = Timeline()
        self.counts = Counts()

    @property
    def stores(self) -> tuple[Store, ...]:
        """The slow tiers."""
        return self._stores

    def forward(
        self,
        schedule: Schedule | Iterable[Action],
        state: State,
        resumed: Resumed | None = None,
        *,
        judged: bool = True,
        late: Late | None = None,
    ) -> State:
        """Run the schedule up to its `EndForward`; return the last state.

        Parameters
        ----------
        schedule : generator or iterable of actions
        state : pytree of arrays
            State 0.
        resumed : Resumed, optional
            What is there already.
        judged : bool
            Whether the legality machine, if there is one, judges this schedule.
        late : Late, optional
            What is asked where transfers are late; without it the sweep waits.

        Raises
        ------
        StateError
            If `state` is no pytree of plain arrays, or a later state differs
            from it in structure, shape or dtype.
        ScheduleError
            If the schedule cannot be followed.
        """
        sweep = self._begin(schedule, state, resumed, judged=judged, late=late)
        made = None if resumed is None else resumed.n_steps  # the live state, whatever is next
        last: State = self._guarded(partial(self._looked_at, sweep, made), forward=True)
        return last

    def begin(
        self, schedule: Schedule | Iterable[Action], state: State, *, judged: bool = True
    ) -> None:
        """Begin a forward sweep whose steps the caller runs, who pushes each state.

        Parameters
        ----------
        schedule, state, judged
            As for `forward`.  Transfers that are late are waited for.

        Raises
        ------
        ArgumentError
            If the chain is in place, or makes tapes.
        StateError, StoreError, ScheduleError
            As `forward` does.

        Examples
        --------
        >>> import numpy as np
        >>> from multistage.model.chain import FunctionChain
        >>> from multistage.planners.single.revolve import revolve_schedule
        >>> chain = FunctionChain(lambda x, i: x * x, lambda x, a, i: 2 * x * a)
        >>> executor, x = Executor(chain, ()), np.array(2.0)
        >>> executor.begin(revolve_schedule(1, 3), x)
        >>> for i in range(3):
        ...     x = x * x
        ...     ended = executor.push(x)
        >>> ended, float(executor.reverse(np.array(1.0)))
        (True, 1024.0)
        """
        if self._chain.in_place or not self._chain.state_is_tape:
            raise ArgumentError(
                "states are pushed to functional chains whose states are their tapes; run the "
                "steps of others by forward()"
            )
        sweep = self._begin(schedule, state, None, judged=judged, late=None)
        self._pushed = pushed = Pushed(self._chain, state)
        sweep.schedule = pushed.paused(sweep.schedule)
        sweep.take(pushed)
        self._guarded(sweep.forward, forward=False)

    def push(self, state: State) -> bool:
        """Go on with a sweep that was begun, from the next state; whether it was the last.

        Parameters
        ----------
        state : State
            That after the steps so far, of which the caller has run one more than at the last
            call; he does not write to its arrays.

        Raises
        ------
        MultistageError
            If no sweep was begun, or its last state has been pushed.
        """
        sweep, pushed = self._ready("push()"), self._pushed
        if pushed is None:
            raise MultistageError("push() needs a begin() before it, and no forward()")
        pushed.take(state)
        self.counts.elapsed_s += self._clock() - sweep.last  # the caller's step
        ended: bool = self._guarded(partial(self._gone_on, sweep, pushed), forward=False)
        if ended:
            self._pushed = None
            sweep.take(self._chain)
        return ended

    def _gone_on(self, sweep: Sweep, pushed: Pushed[State, Adjoint]) -> bool:
        """Perform actions up to the caller's next step; whether there is none."""
        assert self._layout is not None
        self._layout.arrays(pushed.state, pushed.at)
        return sweep.forward()

    def _begin(
        self,
        schedule: Schedule | Iterable[Action],
        state: State,
        resumed: Resumed | None,
        *,
        judged: bool,
        late: Late | None,
    ) -> Sweep:
        """Begin a sweep: keep state 0, take the stores, judge the schedule if asked to."""
        self.abort()
        self._birth = Birth.here()
        sweep, transfers = self._begun(schedule, state)
        self._sweep = sweep
        try:
            self._transfers = transfers  # from here on what is in the stores is ours
            self._rules = self._make_rules() if self._make_rules and judged else None
            if resumed is not None:
                for step, known in resumed.layouts.items():
                    assert isinstance(self._layout, Layouts)
                    self._layout.know(step, known)
                resumed.take_up(sweep, transfers)
            if self._rules is not None:
                if resumed is not None:
                    resumed.tell(self._rules)
                sweep.schedule = each_judged(sweep.schedule, self._rules)
            if late is not None:
                late.begin(transfers)
                sweep.late = partial(_asked, late, self._rules, transfers)
            assert sweep.ledger is not None
            self.timeline, self.counts = sweep.ledger.timeline, sweep.counts
            sweep.ledger.begin_s = self._clock()
        except BaseException:
            self.abort()
            raise
        sweep.begin_window()
        return sweep

    def _looked_at(self, sweep: Sweep, made: int | None) -> object:
        """Run the forward sweep, unless its last state was `made`; return that, looked at."""
        assert self._layout is not None
        sweep.forward()
        self._layout.arrays(sweep.live, sweep.at if made is None else made)
        return sweep.live

    def _begun(
        self, schedule: Schedule | Iterable[Action], state: State
    ) -> tuple[Sweep, Transfers]:
        """Keep state 0; return a sweep from there.  Raises StateError."""
        layout = self._states.layout(state)
        if self._layout is None or self._slots is None or not layout.same_as(self._layout):
            self._layout, self._slots = layout, self._states.slots(layout)
        layout, slots = self._layout, self._slots
        origin = slots.keep(state, 0)
        ledger = Ledger(layout, self._stores, self._clock, self._progress)
        transfers = Transfers(self._stores, layout, ledger)
        sweep = Sweep(
            schedule if isinstance(schedule, Generator) else played(schedule),
            self._chain,
            slots,
            transfers,
            origin,
            # A functional step may put other arrays into its containers: not into the caller's.
            state if slots.shared or self._chain.in_place else slots.load(origin, state),
            ledger,
            limit=self._limit,
            tape_slots=self.tape_slots,
            # Only arrays of NumPy are found in a tape.
            slot_bytes=layout.nbytes if isinstance(self._states, ArrayStates) else 0,
            heavier=self._heavier,
        )
        return sweep, transfers

    def reverse(self, adjoint: Adjoint) -> Adjoint:
        """Run the rest of the schedule; return the adjoint of state 0.

        Raises
        ------
        MultistageError
            If no forward sweep stands ready.
        """
        sweep = self._ready("reverse()")
        adjoint = sweep.slots.adopt_adjoint(adjoint, sweep.live)
        result: Adjoint = self._guarded(partial(sweep.reverse, adjoint), forward=False)
        left = sweep.end
        self.abort()
        if self._rules is not None:
            self._rules.finish()
        if left != 0:
            raise ScheduleError(f"the schedule ended with the adjoint at {left}, not 0")
        return result

    def _ready(self, asked: str) -> Sweep:
        if self._sweep is None:
            raise MultistageError(f"{asked} needs a forward() before it, once per sweep")
        return self._sweep

    @property
    def stands(self) -> bool:
        """Whether a sweep is in progress."""
        return self._sweep is not None

    @property
    def live(self) -> State:
        """The live state, for the schedule of a forward sweep to look at."""
        assert self._sweep is not None
        live: State = self._sweep.live
        return live

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out of the times of a sweep what its schedule does in this block."""
        sweep, began = self._sweep, self._clock()
        assert sweep is not None and sweep.ledger is not None
        sweep.flush()
        try:
            yield
        finally:
            spent_s = self._clock() - began
            sweep.ledger.begin_s += spent_s
            self.counts.elapsed_s -= spent_s
            sweep.begin_window()

    def go_on(self, chain: Chain[State, Adjoint], tape_slots: float) -> None:
        """Run another chain, which does the same, after the forward sweep in progress.

        Each tape beyond the first takes `tape_slots` from now on.
        """
        sweep = self._sweep
        assert sweep is not None
        self._chain = chain
        sweep.take(chain)
        self.tape_slots = sweep.tape_slots = tape_slots
        if self._rules is not None:
            self._rules.tape_slots = tape_slots

    def let_go(self) -> None:
        """Forget the sweep in progress, and the copies whose memory the next would reuse."""
        self.abort()
        self._slots = self._layout = None

    def abort(self) -> None:
        """Forget the sweep in progress: close its schedule, give all slots back."""
        sweep, self._sweep, self._pushed = self._sweep, None, None
        transfers, self._transfers = self._transfers, None
        if sweep is None:
            if self._slots is not None:  # Ctrl-C came when they held state 0, but no sweep them
                self._slots.release_all()
            return
        try:
            sweep.schedule.close()
        finally:
            try:
                # In a forked child it is the parent's sweep.
                if transfers is not None and not self._birth.foreign:
                    transfers.settle()
            finally:
                sweep.slots.release_all()
                sweep.let_go()

    def _guarded(self, perform: Callable[[], Any], *, forward: bool) -> Any:
        """Perform a part of the sweep; after an error it is gone."""
        sweep, began = self._sweep, self._clock()
        assert sweep is not None and self._transfers is not None
        try:
            if self._stores:
                switching.shorten(self)
            try:
                with Shield() as self._transfers.shield:
                    return perform()
            finally:
                self.tape_slots = sweep.tape_slots
                self.counts.elapsed_s += self._clock() - began
        except BaseException as error:
            told = error
            try:
                if forward:
                    told = _first_to_differ(error, sweep, self._layout)
                    told = _given_back(told, sweep)
                if told is error:
                    told = overwritten(error, self._slots)  # before its arrays are given back
            finally:
                self.abort()
            try:
                if told is not error:
                    raise told from error
                raise
            finally:
                # Its traceback refers to this frame: the two would keep the sweep's tapes alive.
                del told, sweep, perform
        finally:
            switching.restore(self)


def without_frames(error: BaseException | None) -> None:
    """Forget the frames of an error that is dealt with, and of those behind it.

    They refer to states, and an error in a cycle with a frame stays until it is collected.
    """
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


def _given_back(error: BaseException, sweep: Sweep) -> BaseException:
    """Put state 0 back where the caller of an in-place chain has it, if states are unlike planned.

    The caller may start again then.  If it cannot be restored, the returned error says so.
    """
    differ = error.varies if isinstance(error, StateError) else isinstance(error, LargerThanPlanned)
    if not differ or not isinstance(sweep.slots, Copies):
        return error
    with contextlib.suppress(Exception):  # the first error matters more
        if sweep.slots.given_back(sweep.live, sweep.origin):
            return error
    return StateError(
        f"{str(error).split(';')[0]}; state 0 cannot be put back to measure such steps: in "
        "place, give a dict or list of arrays that are not kept from being overwritten"
    )


def _first_to_differ(
    error: BaseException, sweep: Sweep, layout: StateLayout[Any, Any, Any] | None
) -> BaseException:
    """Return the error that names the step whose state was the first of another layout.

    A functional chain's states are looked at where they are kept, perhaps many steps after
    the one that returned the first such state; a few steps are run again to find it.
    """
    if not isinstance(error, StateError) or error.state is None or layout is None:
        return error
    if sweep.in_place:
        return error  # looked at after every advance, and overwritten since
    held = [step for step, kept in sweep.held.items() if kept is not None and step < error.state]
    start = max(held, default=0)
    kept = sweep.held[start] if held else sweep.origin
    if kept is None or error.state - start > _RUN_AGAIN:
        return error
    step, found = start, str(error)
    if error.state - start > 1:
        found = ""
        try:
            live, sweep.live = sweep.slots.load(kept, sweep.live), None
            for step in range(start, error.state):
                live = sweep.chain.advance(live, step, step + 1)
                layout.arrays(live, step + 1)
        except StateError as differs:
            # The error itself would be in a cycle with this frame, and keep its states alive.
            # The first that differs may be such as a survey takes.
            if differs.state == step + 1 and differs.varies == error.varies:
                found = str(differs)
        except Exception:
            pass  # what was wrong is known, if not where
    if not found:
        return error
    told = StateError(f"step {step} returned a state unlike the first: {found}")
    told.state, told.varies = error.state, error.varies
    return told


def _asked(
    late: Late, rules: Rules | None, transfers: Transfers, sweep: Sweep, action: Wait | Offer
) -> Schedule | None:
    """Return the schedule to follow from here on, judged as the one before; None to stay."""
    actions = late(sweep, action)
    if actions is None:
        return None
    schedule = played(actions)
    if rules is None:
        return schedule
    rules.leave(sweep.held.keys(), sweep.tapes.keys(), transfers.stuck())
    return each_judged(schedule, rules)
