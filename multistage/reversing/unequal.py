"""What a `Reversal` does where its steps differ in cost and its states in size.

With costs given the plan is made before the first step.  Without, the first sweep
surveys: it keeps states as they come, within the budget, and is reversed by what its
forward sweep has shown; the next one is planned.  A state or tape that takes more
than a plan counts on ends the sweep: given costs are wrong then, measured ones are
measured again.

Planned sweeps stream states to the first tier, whose rates are measured once;
tapes stay in fast memory.  A survey uses fast memory alone.

The folder of a durable run is a tier like others; beside the states that the plan writes
it has some more (`durable.adjoints.Passed`).  What a killed process left of a sweep is
planned by itself (`planners.chain.resumed`).

A budget pays for what is kept, here as for uniform steps.  Planners of chains count
all memory, so they are given the budget on top of the least in which the chain can be
reversed at all: state 0, and the largest step with its states, tape and gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, Generic, Self, TypeVar

from .. import native
from ..actions import Action, Put, Schedule
from ..backends.base import Store
from ..errors import ArgumentError, BudgetError, StateError
from ..execute.executor import Executor, Resumed
from ..execute.late import Late, Stages
from ..execute.ledger import Counts
from ..execute.metered import LargerThanPlanned, Metered, Seen, of_chain, require_state
from ..measurement.seen import FirstRates
from ..model.chain import Chain
from ..model.costs import Costs
from ..model.stages import StageCosts
from ..model.tier import Tier
from ..planners import Plan
from ..planners.base import BUFFERS, played
from ..planners.chain.joint_core import require_core
from ..planners.chain.memory import shifted
from ..planners.chain.pieces import (
    MOST_AT_ONCE,
    PersistentPlanner,
    chain_plan,
    survey,
    without_end,
)
from ..planners.chain.pieces import plan as reversed_by
from ..planners.chain.resumed import resumed_actions
from ..schedule.rules import Rules
from ..schedule.timeline import Timeline
from ..states.in_place import VariedStates
from ..states.layout import Layout, bytes_of
from ..states.slots import Weighed
from ..support.interrupts import Shield
from ..support.progress import Bars
from .arguments import WHOLE, Arguments, Unequals, one_tape
from .opened import OpenStores
from .streamed import (
    bounded,
    largest_of,
    measured_rates,
    probe_bytes,
    require_room,
    seen_rates,
)

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")

# What the plan counts and the limit does not pay for.
BESIDE = "the input and the largest step, beside the limit"
# A plan is made again when times that differ from its own are such a part of all.
_DRIFT = 0.3
# Uniform states are planned step by step where times differ so many times, and that is
# predicted to be so many times faster; steps shorter than this are not timed one by one.
_SPREAD, _WORTH, LEAST_TIMED_S = 2.0, 1.1, 2e-5


def agreeing(costs: StageCosts, chain: Chain[State, Adjoint], n_steps: int) -> StageCosts:
    """Return given costs of unequal steps as those of a chain.

    Raises
    ------
    ArgumentError
        If they are for another number of steps, or disagree on what a tape is.
    """
    if len(costs.stages) != n_steps:
        raise ArgumentError(
            f"costs have {len(costs.stages)} stages, but there are n_steps={n_steps}; "
            "give one Stage for each step"
        )
    if chain.state_is_tape:
        for i, stage in enumerate(costs.stages):
            if stage.tape_bytes != stage.output_bytes:
                raise ArgumentError(
                    f"costs say that the tape of step {i} has tape_bytes={stage.tape_bytes} and "
                    f"its output output_bytes={stage.output_bytes}, but this chain's state is its "
                    "own tape; give tape_bytes equal to output_bytes, or a chain that tapes"
                )
    return of_chain(costs, chain)


class Unequal(Generic[State, Adjoint]):
    """Costs, plan and executor of a reversal whose steps differ; made of what `Uniform` is.

    Attributes
    ----------
    costs : StageCosts or None
        As given or measured.
    plan : Plan or None
        Of the next sweep; None if it is to be surveyed.
    stale : bool
        Whether the plan is to be made again, by other costs.
    tier, late : Store and Late, or None
        The slow tier, if that sweep writes to it, and what is asked where it is late.

    Raises
    ------
    ArgumentError, BudgetError
        If given costs do not fit the chain or the budget; for a tier without the C core.

    Notes
    -----
    Where only the latest tape exists, states alone are kept, in fast memory and in the tier.
    """

    def __init__(self, given: Arguments[State, Adjoint], opened: OpenStores, bars: Bars) -> None:
        chain = given.chain
        own: Any = given.states
        self.states: Weighed[State, Any, Any] = (
            own if hasattr(own, "weigh") else VariedStates(chain.in_place)
        )
        self.resumed: Resumed | None = None
        self._durable = given.durable
        self.metered = Metered(chain, self.states.weigh)
        self.plan: Plan | None = None
        self.stale = False
        self.tier: Store | None = None
        self.late: Late | None = None
        self._opened, self._bars, self._checked = opened, bars, given.checked
        self._store: Store | None = given.first_store
        self._probed = given.probed[0] if given.probed else None
        self._agreement = given.agreement
        self._rates: Tier | None = None
        self._first_rates = FirstRates()
        self._streams = self._store is not None
        if self._durable is not None:  # which needs no plan that reads from its folder
            self._streams = native.LIBRARY is not None
        elif self._streams:
            require_core()
        self._chain, self._n_steps, self._budget = chain, given.n_steps, given.budget
        self.costs = given.costs if isinstance(given.costs, StageCosts) else None
        self._given = self.costs is not None
        if self.costs is not None:
            assert given.n_steps is not None
            self.costs = agreeing(self.costs, chain, given.n_steps)
            self._room(self.costs)
        self._surveyed: list[Action] = []  # what the last survey did
        self._planner: PersistentPlanner = "revolve" if one_tape(chain) else "optimal"

    def _room(self, costs: StageCosts) -> int:
        """Return the bytes for kept states and tapes.  Raises BudgetError."""
        largest = costs.largest_state_bytes
        store = self._store
        buffers = 0 if store is None else store.buffer_bytes(Layout.up_to(largest))
        slots = self._budget.slots_for(largest, buffers)
        return slots * largest if self._budget.bytes is None else self._budget.bytes - buffers

    def prospect(self) -> Plan | None:
        """Return the plan of the next sweep; None if it surveys."""
        return self.plan

    def in_hindsight(self, n_steps: int) -> Callable[[], Plan] | None:
        """Return None: what a survey would have come to is not known before its end."""
        return None

    def asked(self, *, online: bool) -> Late | None:
        """Return what the next sweep asks where transfers are late; None if it waits."""
        return None if online or self.resumed is not None else self.late

    def anew(self, error: Exception) -> Self | None:
        """Return what runs a sweep again that an error has ended; None to raise it."""
        if isinstance(error, StateError) or self._given or self.costs is None:
            return None
        self.forget()
        return self

    def next_steps(self) -> Self:
        """Return what plans the next sweep."""
        return self

    def prepare(
        self, state: State, executor: Executor[State, Adjoint] | None, *, sweeps: bool = False
    ) -> Executor[State, Adjoint]:
        """Weigh state 0; plan the next sweep if its costs are known; open its tier.

        As `Uniform.prepare` does, whatever `sweeps` says.  Raises BudgetError also for a state
        that is larger than the costs say.
        """
        durable = self._durable
        if executor is not None and durable is not None and durable.taken:
            executor.abort()  # before its store is closed, which the sweep would call
        if self.plan is None or self.stale or (durable is not None and durable.taken):
            # The tier is measured, and opened for states of other sizes.
            self._opened.close_stores()
        self._begin(state)
        tier = self.tier if self._durable is None else self._store
        stores: tuple[Store, ...] = () if tier is None else (tier,)
        if tier is not None:
            assert self.costs is not None
            self._opened.open(stores, largest_of(self.costs))  # a plan of ranks has other bytes
        if executor is None or executor.stores != stores:
            executor = Executor(
                self._bars.watch(self.metered, self._mean_step_s),
                stores,
                rules=self.rules,
                progress=self._bars.update if self._bars.shown else None,
                states=self.states,
            )
        return executor

    def _begin(self, state: State) -> None:
        """Weigh state 0; plan the next sweep if its costs are known."""
        layouts = self.states.layout(state)
        if self._durable is not None:
            self._opened.begin()
            with Shield(up=True):  # or the folder might stay locked
                self._durable.attach(layouts.first, self._n_steps, state)
        self.metered.seen = Seen()
        # Ranks look at sizes together, once all steps have run: none may stop alone.
        self.metered.costs = self.costs if self._agreement is None else None
        try:
            self.metered.begin(state)
        except LargerThanPlanned:
            if self._given:
                raise
            self.forget()  # another state 0 than before
            self.metered.begin(state)
        if (self.plan is None or self.stale) and self.costs is not None:
            self._make_plan(self.costs)

    def plan_by(self, costs: StageCosts) -> None:
        """Plan the next sweep by costs that were measured elsewhere."""
        self.costs = costs
        self._make_plan(costs)

    def require(self) -> None:
        """Raise LargerThanPlanned if a state or tape of the sweep was larger than its costs say."""
        if self.costs is not None:  # else it has surveyed
            self.metered.require(self.costs)

    def _given_costs(self, costs: StageCosts) -> Unequals:
        """Return costs with the room for what is kept, and the tier, measured if it was not."""
        room, store = self._room(costs), self._store
        if store is None or not self._streams:
            return costs, room, None
        require_room(store, costs)
        if self._rates is None:
            assert self._probed is not None
            self._rates = measured_rates(
                self._probed,
                probe_bytes(costs),
                1 if self._agreement is None else self._agreement.size,
                self._durable is None,
            )
            self._first_rates.begin([self._rates])
        return costs, room, bounded(self._rates, store, costs)

    def _known(self, costs: StageCosts, left: Resumed | None = None) -> tuple[Unequals, int]:
        """Return what this rank plans with, and the bytes that it has left.

        Raises LargerThanPlanned if a state on the disk is larger than its costs say.
        """
        for step, layout in () if left is None else left.layouts.items():
            require_state(costs, step, bytes_of(layout))
        own = self._given_costs(costs)
        return own, own[1]

    def _make_plan(self, costs: StageCosts) -> None:
        store, agreement = self._store, self._agreement
        if agreement is not None:

            def made(given: Unequals, slots: int | None) -> Plan:
                return chain_plan(given[0], given[1], self._planner, given[2], slots)

            self.plan = agreement.fitting(partial(self._known, costs), made)
        else:
            costs, room, rates = self._given_costs(costs)
            self.plan = chain_plan(costs, room, self._planner, rates)
            if (limit := self._budget.bytes) is not None:
                assert self.plan.memory_bytes is not None
                more = self.plan.memory_bytes - room
                self.plan = self.plan.within(limit, {BUFFERS: limit - room, BESIDE: -more})
        self.stale = False
        written = sum(isinstance(action, Put) for action in self.plan.actions)
        self.tier = self.late = None
        if written and store is not None:
            # All may be waiting: a plan counts on no write but that of what it evicts.
            store.queue_depth = max(store.queue_depth, written)
            self.tier = store
            # Of more steps the table of what is left is too large; ranks have clocks of their own.
            if len(costs.stages) <= MOST_AT_ONCE and agreement is None:
                tapes = self._planner == "optimal"
                self.late = Late(Stages(self.plan, inside=False, tapes=tapes))

    def forget(self) -> None:
        """Release a plan that does not hold; the next sweep is surveyed."""
        self.plan = self.costs = self.metered.costs = self.tier = self.late = None

    def schedule(
        self, is_last: Callable[[int], bool] | None, executor: Executor[State, Adjoint]
    ) -> Schedule:
        """Return the schedule of the next sweep; `is_last` as for `survey`."""
        if self._durable is not None:
            self.resumed = self._durable.begin(None)
            if self.resumed is not None:
                return played(self._rest(self.resumed))
        if self.plan is not None and is_last is None:
            return self.plan.schedule()
        if is_last is None:
            is_last = self._is_last
        self._surveyed.clear()
        return _recorded(self._survey(is_last), self._surveyed)

    def _survey(self, is_last: Callable[[int], bool]) -> Schedule:
        seen, planner, agreement = self.metered.seen, self._planner, self._agreement

        def mine(start: int, stop: int, kept: list[int]) -> tuple[Unequals, int]:
            room, sizes = self._room_now(len(seen.forward_s) - 1), seen.state_bytes
            # With state `start`, the input of what follows: its bytes count once.
            left = max(0, room - sum(sizes[step] for step in kept))
            return (seen.costs(stop, self._chain, start), room, None), left

        if agreement is None:

            def reversing(start: int, stop: int, kept: list[int]) -> Iterable[Action]:
                (costs, _, _), left = mine(start, stop, kept)
                return without_end(reversed_by(costs, left, planner, first=start))

            return survey(self._room_now, is_last, lambda i: seen.state_bytes[i], reversing)

        # Ranks keep the same states: each counts as its largest part of any rank's memory.
        def part(i: int) -> int:
            return agreement.largest(
                lambda: -(-WHOLE * seen.state_bytes[i] // max(1, self._room_now(i)))
            )

        def made(given: Unequals, slots: int | None) -> tuple[Action, ...]:
            return tuple(reversed_by(given[0], given[1], planner, slots=slots))

        def agreed(start: int, stop: int, kept: list[int]) -> Iterable[Action]:
            actions = agreement.fitting(partial(mine, start, stop, kept), made)
            return (shifted(action, start) for action in without_end(actions))

        return survey(lambda _: WHOLE, is_last, part, agreed)

    def _rest(self, left: Resumed) -> Iterable[Action]:
        """Return the actions that are left of a killed run."""
        assert self.costs is not None
        known, agreement = partial(self._known, self.costs, left), self._agreement

        def made(given: Unequals, slots: int | None = None) -> Iterator[Action]:
            costs, room, rates = given
            return resumed_actions(costs, room, self._planner, rates, left.stored, left.end, slots)

        if agreement is None:
            return made(known()[0])
        return agreement.fitting(known, lambda given, slots: tuple(made(given, slots)), left)

    def rules(self) -> Rules:
        """Return the machine that judges the actions of the plan, byte by byte."""
        plan = self.plan
        assert plan is not None
        rest = self._agreement is not None and self.resumed is not None  # which is looked at itself
        limit = None if rest else plan.memory_bytes
        return Rules.in_bytes(plan.stage_costs, limit, recovers=True)

    def judges(self, *, online: bool) -> bool:
        """Whether every action is judged before it is performed."""
        # A survey learns only as it goes what its steps take.
        return self._checked and self.plan is not None and not online

    def _is_last(self, i: int) -> bool:
        return i == self._n_steps

    def _room_now(self, i: int) -> int:
        """Return the room as far as states are known: up to state i, which must fit."""
        sizes = self.metered.seen.state_bytes[: i + 1]
        if self._budget.slots is not None:
            return self._budget.slots * max(1, *sizes)
        assert self._budget.bytes is not None
        if sizes[i] > self._budget.bytes:
            raise BudgetError(
                f"budget of {self._budget.bytes} bytes < {sizes[i]} bytes of state {i}; "
                "raise the budget"
            )
        return self._budget.bytes

    @property
    def _mean_step_s(self) -> float:
        """Seconds of a forward step, on average; a guess if they are not known."""
        if self.costs is None:
            return 1e-3
        total_s = sum(stage.forward_s for stage in self.costs.stages)
        return max(1e-6, total_s / len(self.costs.stages))

    def ended(self, n_steps: int, counts: Counts, timeline: Timeline) -> Callable[[], Plan]:
        """Learn from a sweep that has ended; return what describes it.

        Once that is asked, `counts` have the peak that sizes as seen come to.
        """
        plan = self.plan
        if self.resumed is not None and plan is not None:
            return lambda: plan  # what was left says little of the whole
        actions = tuple(self._surveyed) if plan is None else plan.actions
        left = 0
        if self.late is not None and self.late.why:
            assert isinstance(self.late.course, Stages)
            left = self.late.course.peak_bytes
        seen = self._learn(n_steps, timeline)

        def made() -> Plan:
            as_seen = Plan.judged(
                "survey", seen, None, actions, None if plan is None else plan.tier
            )
            found = plan or as_seen
            counts.peak_slots = (left or as_seen.peak_bytes) / found.costs.mean().state_bytes
            return found

        return made

    def _learn(self, n_steps: int, timeline: Timeline) -> StageCosts:
        """Return what the sweep that has ended has shown; plan the next one by it."""
        seen = self.metered.seen.costs(n_steps, self._chain)
        if self._agreement is not None:  # each rank has seen other times
            if self.costs is None and self._n_steps is not None:
                self.costs = seen
            return seen
        if self._rates is not None:
            rates = self._rates
            if self.tier is not None:
                seen_now = [seen_rates(rates, timeline)]
                (rates,) = self._first_rates.within_shares(seen_now, [self.tier])
            is_late = self.late is not None and bool(self.late.why)
            if is_late:
                assert self.late is not None and isinstance(self.late.course, Stages)
                rates = self.late.course.slowed(rates)
            used = self.tier is not None
            (rates,) = self._first_rates.after([rates], used=used, late=is_late)
            if rates != self._rates:
                self._rates, self.stale = rates, True
        if self._n_steps is not None:
            costs = seen if not self._given or self.costs is None else _timed(self.costs, seen)
            if self._differs(costs):
                self.costs, self.stale = costs, True
        return seen

    def _differs(self, seen: StageCosts) -> bool:
        if self.costs is None:
            return True
        pairs = list(zip(self.costs.stages, seen.stages, strict=True))
        total_s = sum(new.forward_s for _, new in pairs)
        off_s = sum(abs(new.forward_s - old.forward_s) for old, new in pairs)
        sizes = any(new.output_bytes != old.output_bytes for old, new in pairs)
        return sizes or off_s > _DRIFT * total_s


def _timed(given: StageCosts, seen: StageCosts) -> StageCosts:
    """Return the sizes that were given, to which steps are held, with the times that were seen."""
    stages = tuple(
        replace(one, forward_s=new.forward_s, backward_s=new.backward_s, spared_s=new.spared_s)
        for one, new in zip(given.stages, seen.stages, strict=True)
    )
    return replace(given, stages=stages)


def faster_plan(
    seen: Seen,
    uniform: Costs,
    given: Arguments[State, Adjoint],
    opened: OpenStores,
    bars: Bars,
) -> Unequal[State, Adjoint] | None:
    """Return what plans the next sweep by step times that were seen, if that is much faster.

    Parameters
    ----------
    seen : Seen
        Of a complete sweep of uniform steps, their times only.
    uniform : Costs
        What that sweep was planned with.
    given, opened, bars
        As for `Unequal`.

    Raises
    ------
    BudgetError
        If the budget holds no state beside the largest step.
    """
    chain, n_steps = given.chain, given.n_steps
    assert n_steps is not None
    if given.first_store is not None and native.LIBRARY is None:
        return None  # steps that differ have no tier then
    times = sorted(seen.forward_s)[:n_steps]
    # The spread but for a few outliers: one step may have met a garbage collection.
    tenth = n_steps // 10
    if len(times) < n_steps or times[-1 - tenth] < _SPREAD * times[tenth]:
        return None
    seen.state_bytes = [uniform.state_bytes] * (n_steps + 1)
    if not chain.state_is_tape and not one_tape(chain):
        seen.tape_bytes = [uniform.tape_bytes or uniform.state_bytes] * n_steps
    costs = seen.costs(n_steps, chain)
    taken_s = sum(
        count * stage.forward_s + stage.backward_s
        for count, stage in zip(seen.runs, costs.stages, strict=False)
    )
    made = Unequal(given, opened, bars)
    made.plan_by(costs)
    assert made.plan is not None
    return made if made.plan.makespan_s * _WORTH < taken_s else None


def _recorded(schedule: Schedule, into: list[Action]) -> Schedule:
    for action in schedule:
        into.append(action)
        yield action
