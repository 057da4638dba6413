"""The costs, the plan and the executor of a `Reversal` whose steps are alike.

Times that were given or measured first are corrected by those that each sweep shows, and the
next sweep is planned again when they have drifted.
"""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Generic, TypeVar

from ..actions import Schedule
from ..backends.compressed import compressions
from ..durable.records import OrderedLayout
from ..durable.run import DurableRun
from ..errors import BudgetError, StateError
from ..execute.executor import Executor, Resumed
from ..execute.late import EqualSteps, Late
from ..execute.ledger import Counts
from ..execute.metered import Metered
from ..measurement.chain import GUESSED_RATIO, measure, sample, starting, with_tiers
from ..measurement.compression import choose_compression
from ..measurement.driver import action_seconds
from ..measurement.seen import FirstRates, drifted, seen_costs
from ..model.budget import Budget
from ..model.chain import Chain
from ..model.costs import NOT_KEPT, Costs
from ..model.functionals import times
from ..model.tier import Tier
from ..planners import PLANNERS, Plan, online_schedule, plan
from ..planners.base import BUFFERS
from ..planners.chain.pieces import MOST_AT_ONCE
from ..planners.predict import sealing
from ..planners.streaming.online import durable_online_schedule, durable_plan, resumed_schedule
from ..schedule.rules import Rules, each_judged
from ..schedule.timeline import Timeline
from ..states.layout import Layout
from ..support.interrupts import Shield
from ..support.progress import Bars
from .arguments import Arguments, one_tape, planned
from .first_sweep import GUESSED_STEP_S, FirstSteps, first_sweep
from .opened import OpenStores
from .unequal import LEAST_TIMED_S, Unequal, faster_plan

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")

_UNKNOWN_STEPS = 10_000  # a sweep of unknown length is measured for so many
_PROBE_S = 1.0  # for all tiers, less with few of them
_SAMPLE_STEPS = 64  # how far on the state lies that is compressed


class Uniform(Generic[State, Adjoint]):
    """Costs, plan and executor of a reversal whose steps are alike.

    Parameters
    ----------
    given : Arguments
    opened : OpenStores
    bars : Bars

    Attributes
    ----------
    costs : Costs or None
        As given, measured or corrected; the next sweep is planned with them.
    plan : Plan or None
        Of the next sweep; None if its length is unknown.
    resumed : Resumed or None
        What an earlier process left of the sweep in progress.
    """

    def __init__(self, given: Arguments[State, Adjoint], opened: OpenStores, bars: Bars) -> None:
        self._arguments, self._opened, self._bars = given, opened, bars
        self._given = given.costs if isinstance(given.costs, Costs) else None
        self.costs = self._given
        self.plan: Plan | None = None
        self.resumed: Resumed | None = None
        self._layout: Layout | None = None
        self._slots = self._buffers = 0
        self._stale = False  # the plan rests on costs that were seen to be others
        self._timed: Metered[State, Adjoint] | None = None  # the first sweep, step by step
        self._looked = False  # at the step times of the first sweep
        self._first: FirstSteps[State, Adjoint] | None = None  # whose costs are not known
        self._needs_executor = True
        self._late: Late | None = None  # of the last sweep
        self._first_rates = FirstRates()

    def prepare(
        self, state: State, executor: Executor[State, Adjoint] | None, *, sweeps: bool = False
    ) -> Executor[State, Adjoint]:
        """Measure what is not known, plan if the number of steps is known, open the tier.

        Parameters
        ----------
        state : pytree of arrays
            State 0.
        executor : Executor or None
            That of the sweep before.
        sweeps : bool
            Whether a sweep follows, whose first steps may show what a step takes.

        Returns
        -------
        Executor
            That one or, for other states or tapes, a new one; the old one is aborted then.

        Raises
        ------
        StateError, BudgetError, StoreError
            As `Reversal.forward` does.
        """
        layout = self._look_at(state, executor)
        if self._first is not None:  # an error came before they had shown what a step takes
            self._first = self.costs = None
        durable, agreement = self._arguments.durable, self._arguments.agreement
        if self.costs is None and sweeps and not (durable is not None and durable.begun):
            agree = None if agreement is None else agreement.most
            self._first = FirstSteps(self._metered(), agree)
            self.costs, self._needs_executor = self._guessed(layout), True
        elif self.costs is None:
            self.costs = self._measured(state)
        if self._first is None:
            self._plan_if_stale(self.costs)
        self._opened.open(self._arguments.stores, layout)
        if executor is None or self._needs_executor:
            executor = self._made_executor(self.costs)
        elif self._given is None and executor.tape_slots != self.costs.tape_slots:
            executor.abort()
            executor = self._made_executor(self.costs)
        self._needs_executor = False
        return executor

    def _plan_if_stale(self, costs: Costs) -> None:
        """Plan a sweep of known length, unless there is a plan by these costs."""
        n_steps, agreement = self._arguments.n_steps, self._arguments.agreement
        stale = self._stale or (self.plan is None and n_steps is not None)
        if agreement is not None and (stale := agreement.most(stale) > 0):
            # One rank alone may have corrected its own, by a larger tape.
            self.costs = costs = agreement.slowest(partial(replace, costs))
        self._stale = False
        if stale and n_steps is not None:
            make = partial(self._planned, costs, n_steps)
            self.plan = make() if agreement is None else agreement.same(make)

    # ----------------------------------------------------------------- measuring

    def _look_at(self, state: State, executor: Executor[State, Adjoint] | None) -> Layout:
        """Return the layout of a state, for which the budget must have room.

        A plan for other states is dropped; a durable folder is opened.
        """
        given = self._arguments
        layout = given.states.layout(state)
        self._buffers = sum(store.buffer_bytes(layout) for store in given.stores)
        self._slots = given.budget.slots_for(layout.nbytes, self._buffers)
        if self._layout is None or not layout.same_as(self._layout):
            if executor is not None:
                executor.abort()  # a sweep in progress still holds the caller's arrays
            self._layout, self.plan, self._needs_executor = layout, None, True
            self._first_rates.forget()
            self._opened.close_stores()
            self.costs = None if self._given is None else _of_states(self._given, layout)
        if given.durable is not None:
            if executor is not None and given.durable.taken:
                executor.abort()  # before its store is closed, which the sweep would call
            self._attach(given.durable, layout, state)
        return layout

    def _attach(self, durable: DurableRun, layout: Layout, state: State) -> None:
        """Open the durable folder, take its costs."""
        assert isinstance(layout, OrderedLayout)  # of its states
        if durable.taken:
            self._opened.close_stores()
        self._opened.begin()
        with Shield(up=True):  # or the folder might stay locked
            durable.attach(layout, self._arguments.n_steps, state)
        if durable.costs is not None and self._given is None:
            self.costs, durable.costs = durable.costs, None
            self.plan = None

    def _measured(self, state: State) -> Costs:
        """Return the costs of steps and tiers, measured on steps that are run for it."""
        given = self._arguments
        chain, states, most = given.chain, given.states, given.n_steps or _UNKNOWN_STEPS
        if given.watched is not None:
            given.watched.begin()  # it may know the states of a sweep from another state 0
        costs = measure(chain, state, most, given.probed, states=states, progress=self._bars.shown)
        costs = times(costs, given.operators.functionals)  # whose adjoint steps are not run
        if any(each.scheme == "auto" for tier in given.probed for each in compressions(tier)):
            layout, count = states.layout(state), min(most, _SAMPLE_STEPS)
            slots = states.slots(layout)
            with starting(chain, state, slots) as start:
                arrays = sample(chain.advance(start(), 0, count), count, slots, layout)
            costs = choose_compression(costs, given.probed, layout, arrays, most, self._predicted)
        return costs

    def _guessed(self, layout: Layout) -> Costs:
        """Return costs for the first steps, which show what they really are.

        What a planner that is named refuses, it refuses before a step.
        """
        given, step_s = self._arguments, GUESSED_STEP_S
        chain = given.chain
        costs = Costs(
            forward_step_s=step_s,
            reverse_step_s=GUESSED_RATIO * step_s * (given.operators.functionals or 1),
            tape_step_s=None if chain.state_is_tape else step_s,
            state_bytes=max(1, layout.nbytes),
            tape_bytes=NOT_KEPT if one_tape(chain) else 0,
            tiers=tuple(Tier(store.name, step_s, step_s) for store in given.stores),
        )
        named = isinstance(given.planner, str) and given.planner != "auto"
        if named and given.n_steps is not None and (chain.state_is_tape or one_tape(chain)):
            self._planned(costs, given.n_steps)
        return costs

    def _first_sweep(
        self, is_last: Callable[[int], bool] | None, executor: Executor[State, Adjoint]
    ) -> Schedule:
        """Return the schedule of a sweep whose own first steps are timed, then planned for."""
        assert self._first is not None
        running = weakref.ref(executor)  # which has this schedule

        def make(reached: int, is_last: Callable[[int], bool] | None) -> Schedule:
            executor = running()
            assert executor is not None
            with executor.paused():
                self._learn(executor, reached)
                return self._made_schedule(is_last)

        return first_sweep(self._first, self._slots, self._arguments.n_steps, is_last, make)

    def _learn(self, executor: Executor[State, Adjoint], reached: int) -> None:
        """Measure the tiers; take the costs of steps from those that were run."""
        given, first, layout = self._arguments, self._first, self._layout
        assert first is not None and layout is not None and self.costs is not None
        step_s, tape_s = first.typical_s
        if step_s < LEAST_TIMED_S:
            self._timed = None
        chain = self._timed or given.chain
        first.stop(chain)
        costs = replace(
            self.costs,
            forward_step_s=step_s,
            reverse_step_s=GUESSED_RATIO * step_s * (given.operators.functionals or 1),
            tape_step_s=None if given.chain.state_is_tape else tape_s,
            tape_bytes=first.tape_bytes,
            action_s=action_seconds(),
        )
        measured = partial(self._with_tiers, costs, executor.live, reached, layout)
        if given.durable is None:
            self._opened.close_stores()
        if given.agreement is None:
            self.costs = measured()
        else:
            given.agreement.most(0.0)  # all ranks measure at once, as they will use their tiers
            self.costs = given.agreement.slowest(measured)
        self._opened.open(given.stores, layout)
        self._first = None
        executor.go_on(self._bars.watch(chain, step_s), self.costs.tape_slots)

    def _with_tiers(self, costs: Costs, state: State, step: int, layout: Layout) -> Costs:
        """Return the costs with those of the tiers, measured by the live state."""
        given, arrays = self._arguments, None
        n = given.n_steps or _UNKNOWN_STEPS
        if any(map(compressions, given.probed)):
            arrays = sample(state, step, given.states.slots(layout), layout)
        at_once = 1 if given.agreement is None else given.agreement.size
        seconds, like = _PROBE_S / (2 + len(given.probed)), (given.probed, layout)
        costs = with_tiers(costs, *like, seconds, n, arrays=arrays, at_once=at_once)
        if arrays is None:
            return costs
        return choose_compression(costs, *like, arrays, n, self._predicted, at_once)

    def _made_schedule(self, is_last: Callable[[int], bool] | None) -> Schedule:
        """Return the schedule of a whole sweep, planned for what its first steps have shown."""
        given, costs, n = self._arguments, self.costs, self._arguments.n_steps
        assert costs is not None
        if given.durable is not None:
            given.durable.begin(costs)
        if is_last is not None:
            return self._online(is_last)
        assert n is not None
        plan = partial(self._planned, costs, n)
        self.plan = plan() if given.agreement is None else given.agreement.same(plan)
        self._stale = False
        if self.plan.sealed and not given.checked:
            return self.plan.schedule()
        return each_judged(self.plan.schedule(), self._rules())

    # ------------------------------------------------------------------ planning

    def _predicted(self, costs: Costs) -> float:
        """Return the makespan that is planned for some costs."""
        planner, n = self._arguments.planner, self._arguments.n_steps or _UNKNOWN_STEPS
        if isinstance(planner, str):
            return plan(costs, Budget(slots=self._slots), n, planner, progress=False).makespan_s
        return planned(planner, costs, self._slots, n).makespan_s

    def _planned(self, costs: Costs, n_steps: int) -> Plan:
        planner, slots = self._arguments.planner, self._slots
        if not isinstance(planner, str):
            return planned(planner, costs, slots, n_steps)
        if self._arguments.durable is not None and planner == "auto":
            made = sealing(durable_plan)(costs, slots, n_steps)
        else:
            made = plan(costs, Budget(slots=slots), n_steps, planner, progress=self._bars.shown)
        return made.within(self._arguments.budget.bytes, {BUFFERS: self._buffers})

    @property
    def guesses(self) -> bool:
        """Whether its costs are guesses, until the first steps have shown what they are."""
        return self._first is not None

    def prospect(self) -> Plan:
        """Return the plan of the next sweep, of one step if its length is unknown."""
        assert self.costs is not None
        return self.plan or self._planned(self.costs, 1)

    def in_hindsight(self, n_steps: int) -> Callable[[], Plan]:
        """Return a function that plans a sweep of unknown length by its length."""
        assert self.costs is not None
        plan = partial(PLANNERS["online"], self.costs, self._slots, n_steps)
        limit, reserved = self._arguments.budget.bytes, {BUFFERS: self._buffers}
        return lambda: plan().within(limit, reserved)

    def schedule(
        self, is_last: Callable[[int], bool] | None, executor: Executor[State, Adjoint]
    ) -> Schedule:
        """Return the schedule of the next sweep; where a durable run is resumed, of the rest.

        `is_last` says of an unknown number of steps whether state i is the last.  Raises
        StoreError if the durable folder cannot be written to.
        """
        costs, slots, durable = self.costs, self._slots, self._arguments.durable
        assert costs is not None
        if self._first is not None:
            self.resumed = None
            return self._first_sweep(is_last, executor)
        self.resumed = None if durable is None else durable.begin(costs)
        if self.resumed is not None:
            assert durable is not None
            n, left = durable.length, self.resumed
            return resumed_schedule(costs, slots, n, left.stored, left.end, None if n else is_last)
        if is_last is None:
            assert self.plan is not None
            return self.plan.schedule()
        return self._online(is_last)

    def _online(self, is_last: Callable[[int], bool]) -> Schedule:
        """Return the schedule of a sweep of unknown length."""
        assert self.costs is not None
        durable = self._arguments.durable is not None
        make = durable_online_schedule if durable else online_schedule
        return make(self.costs, self._slots, is_last)

    def judges(self, *, online: bool) -> bool:
        """Whether every action is judged before it is performed: strangers' always are."""
        if self._arguments.checked:
            return True
        if online or self.resumed is not None or self._first is not None:
            return False  # a plan that is made in the sweep is judged there
        assert self.plan is not None
        return not self.plan.sealed

    # ----------------------------------------------------------------- executing

    def asked(self, *, online: bool) -> Late | None:
        """Return what the next sweep asks where transfers are late; None if it waits."""
        given, costs = self._arguments, self.costs
        if not given.stores or costs is None or self.resumed is not None:
            return None
        tape = given.chain.state_is_tape
        self._late = Late(EqualSteps(given.n_steps, self._slots, costs.tiers, tape))
        return self._late

    def _made_executor(self, costs: Costs) -> Executor[State, Adjoint]:
        given = self._arguments
        chain: Chain[State, Adjoint] = self._first or self._metered(costs)
        return Executor(
            self._bars.watch(chain, costs.forward_step_s),
            given.stores,
            tape_slots=costs.tape_slots,
            slots=self._slots,
            heavier=self._correct_tapes,
            rules=self._rules,
            progress=self._bars.update if self._bars.shown else None,
            states=given.states,
        )

    def _metered(self, costs: Costs | None = None) -> Chain[State, Adjoint]:
        """Return the chain, its steps timed one by one where that may show a faster plan."""
        given = self._arguments
        self._timed = Metered(given.chain, None) if self._times_steps(costs) else None
        return self._timed or given.chain

    def _rules(self) -> Rules:
        given = self._arguments
        assert self.costs is not None
        return Rules(
            given.n_steps,
            self._slots,
            self.costs.tape_slots,
            state_is_tape=given.chain.state_is_tape,
            in_place=given.chain.in_place,
            one_tape=one_tape(given.chain),
            recovers=True,
        )

    # ------------------------------------------------------------------ learning

    def ended(self, n_steps: int, counts: Counts, timeline: Timeline) -> Callable[[], Plan]:
        """Learn from a sweep that has ended; return what makes its plan.

        The gradient is known by now: nothing here takes long enough for a Ctrl-C to lose it,
        so a sweep of unknown length is only planned when its report is asked for.
        """
        assert self.costs is not None
        plan, agreement = self.plan, self._arguments.agreement
        drawn = self.in_hindsight(n_steps) if plan is None else lambda: plan
        if self.resumed is None:
            self._first_rates.begin(self.costs.tiers)
            seen = seen_costs(self.costs, timeline, counts)
            tiers = self._first_rates.within_shares(seen.tiers, self._arguments.stores)
            if self._late is not None and self._late.why:
                tiers = self._late.slowed(tiers)
            used, late = counts.writes > 0, bool(counts.late)
            seen = replace(seen, tiers=self._first_rates.after(tiers, used=used, late=late))
            seen = seen if agreement is None else agreement.slowest(lambda: seen)
            if drifted(self.costs, seen):
                self.costs, self._stale = seen, True
        return drawn

    def _correct_tapes(self, step: int, nbytes: int) -> None:
        """Correct measured costs by the tape of a step, which is larger than they say."""
        if self._given is not None:
            return  # the executor continues with the tapes as they are
        assert self.costs is not None and self._layout is not None
        share = self.costs.state_bytes / self._layout.nbytes
        self.costs = replace(self.costs, tape_bytes=math.ceil(nbytes * share))
        self._stale = True

    def _times_steps(self, costs: Costs | None) -> bool:
        """Whether the first sweep shows what each step takes, for the plan of the next.

        Without costs it does until they are known.
        """
        given = self._arguments
        return (
            given.may_differ
            and not given.stores
            and not self._looked
            and given.n_steps is not None
            and 2 < given.n_steps <= MOST_AT_ONCE
            and (costs is None or costs.forward_step_s >= LEAST_TIMED_S)
        )

    def anew(self, error: Exception) -> Unequal[State, Adjoint] | None:
        """Return what runs a sweep again that an error has ended; None to raise it."""
        if not (isinstance(error, StateError) and error.varies and self._arguments.may_differ):
            return None
        return Unequal(self._arguments, self._opened, self._bars)

    def next_steps(self) -> Uniform[State, Adjoint] | Unequal[State, Adjoint]:
        """Return what plans the next sweep: step by step, if the first has shown that it pays."""
        timed, self._timed = self._timed, None
        if timed is None or self.resumed is not None:
            return self
        self._needs_executor = self._looked = True  # the next one needs no timing
        assert self.costs is not None
        found = None
        with contextlib.suppress(BudgetError):  # the room for the largest step was enough
            found = faster_plan(timed.seen, self.costs, self._arguments, self._opened, self._bars)
        return found or self


def _of_states(costs: Costs, layout: Layout) -> Costs:
    """Return given costs with the bytes of states as they are, tapes in proportion."""
    state_bytes, tape_bytes = max(1, layout.nbytes), costs.tape_bytes
    if state_bytes == costs.state_bytes:
        return costs
    if tape_bytes and not costs.one_tape:
        tape_bytes = max(1, tape_bytes * state_bytes // costs.state_bytes)
    return replace(costs, state_bytes=state_bytes, tape_bytes=tape_bytes)
