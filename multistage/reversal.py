"""The front door: run a computation forward, then its adjoint, within a budget.

A `Reversal` measures (probe), plans, executes and reports.  What it measured
first is corrected by what it sees: every sweep updates the costs, and the
next one is planned anew when the ratio of transfer to step time, or of
adjoint to forward step, has drifted.
"""

from __future__ import annotations

import contextlib
import copy
import math
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cache, partial
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, SupportsIndex, TypeVar

from .actions import Schedule
from .backends.base import Store, StoreStats
from .backends.lifetimes import Birth, end, forked
from .backends.streamed import StreamedStore, require_distinct
from .backends.urls import Tiers, open_store, tier_names
from .durable.run import DurableRun, OrderedStates
from .errors import ArgumentError, BudgetError, StateError, StoreError
from .execute.executor import Counts, Executor, Resumed
from .execute.metered import LargerThanPlanned, Metered
from .measurement.compression import choose_compression
from .measurement.given import agreeing, one_tape, planned, planner_of
from .measurement.probe import compressions, measure
from .model.budget import Budget
from .model.chain import Chain, FunctionChain
from .model.costs import Costs
from .model.stages import StageCosts
from .planners import PLANNERS, Planner, UniformPlan, online_schedule, plan
from .planners.chain.heterogeneous import ChainPlan
from .planners.chain.pieces import MOST_AT_ONCE
from .planners.streaming.resumed import durable_online_schedule, durable_plan, resumed_schedule
from .planners.uniform import require_steps, sealing
from .report import Report, TierUse, seen_costs
from .schedule.rules import Rules
from .states.arrays import ArrayStates
from .states.slots import States
from .support.free_memory import default_budget_bytes
from .support.interrupts import Shield
from .support.progress import Bars
from .support.values import shown
from .unequal import LEAST_TIMED_S, Unequal, faster_plan

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")

# A plan is made again when a ratio it rests on has changed by this factor.
_DRIFT = 1.3
_UNKNOWN_STEPS = 10_000  # what a sweep of unknown length is measured for


def _give_back(opened: list[Store], durable: DurableRun | None, *, remove: bool = False) -> None:
    """Close what a run has opened, and its durable folder."""
    with Shield(up=True):
        try:
            with ExitStack() as every:  # though one of them fails
                for _ in opened:
                    every.callback(_close_last, opened)
        finally:
            if durable is not None:
                durable.close(remove=remove)


def _close_last(opened: list[Store]) -> None:
    try:
        opened[-1].close()
    except Exception:
        opened.pop()  # trying again would not help; after Ctrl-C it does
        raise
    opened.pop()


class Reversal(Generic[State, Adjoint]):
    """A computation of `n_steps` steps and its adjoint, within a memory budget.

    Parameters
    ----------
    chain : Chain, or callable `step(state, i) -> state`
        The computation.  A plain function is step i, leaving its argument
        alone; states are arrays or nested tuples, lists, dicts of arrays.
    adjoint_step : callable, optional
        With a plain function: `adjoint_step(state, adjoint, i) -> adjoint`,
        or `adjoint_step(tape, adjoint, i)` if `tape_step` is given.
    n_steps : int or None
        Number of steps; None if `forward(until=...)` finds the end.
    tape_step : callable, optional
        `tape_step(state, i) -> (state, tape)`.
    budget : Budget, int or str, optional
        Fast memory for checkpoints: bytes, `"512 MiB"` or `"32 slots"`.
        Default: a quarter of the memory that is free.
    tier : str, Path, Store or a sequence of them, optional
        Slow tiers, fastest first: `"file:///scratch"`, `"memory:"`,
        `"s3://bucket/run"` or a store; a cascade of two,
        `"file:///scratch?capacity=10GiB > s3://bucket/run"`, is one tier.
        Without one, the best schedule for the budget alone.  All planners but
        the hierarchical ones use the first tier only.
    planner : str, UniformPlan or callable
        A key of `PLANNERS`, or `"auto"` for the fastest prediction; a plan made
        before; or a planner of your own, `(costs, slots, n_steps) -> UniformPlan`.
    costs : Costs or StageCosts, optional
        Assumed costs; measured with a few steps at the first `forward` if not
        given (`step` is then called some extra times, `adjoint_step` never).
        StageCosts are those of steps that differ, one Stage each; without them
        states whose sizes differ are found in the first sweep, which measures them
        for the next.  See `docs/howto/unequal.md`.
    checked : bool
        Judge every action of the schedule before it is performed, also if it
        comes from a planner of this package; others' are always judged.  Of steps
        that differ those of a plan, byte by byte, not of a sweep that measures.
    progress : bool or None
        Show progress bars; None: on a terminal or in a notebook, unless the
        environment's `MULTISTAGE_PROGRESS` says otherwise.
    states : States, optional
        How states are described and kept, if they are no pytrees of arrays.
    durable : str or Path, optional
        A folder that keeps states and the progress of the reverse sweep, in
        place of a tier: after a kill the same call goes on where it was, with
        `until` too.  See `docs/howto/durable.md`.
    durable_every_s : float
        Seconds between two adjoints written to it, at least.
    durable_label : str
        Tells runs apart that begin with the same state: a run is resumed only
        under its own label.

    Attributes
    ----------
    plan : UniformPlan or None
        The plan of the last sweep.
    costs : Costs or None
        What the next sweep is planned with, if its steps are uniform.
    stage_costs : StageCosts or None
        The same of steps that differ.
    chain_plan : ChainPlan or None
        Where steps differ, what `plan` describes by its means over the steps.

    Raises
    ------
    ArgumentError, BudgetError, StoreError
        Before any step runs: rule, values, remedy.

    Notes
    -----
    Used from one thread.  As a context manager it stops its threads and
    removes its files at the end of the block; otherwise call `close`.  One that
    is dropped without it does so when the interpreter collects it.

    A store belongs to one run from its first `forward` to `close`; a second run
    in it is refused (StoreError).  In a forked child a run with a tier is
    refused too; call `close` there, which leaves the parent's run alone, and
    begin anew.

    Examples
    --------
    >>> import numpy as np
    >>> with Reversal(lambda x, i: x * x, lambda x, a, i: 2 * x * a, 3, budget="2 slots") as run:
    ...     last = run.forward(np.array(2.0))
    ...     gradient = run.reverse(np.array(1.0))
    >>> float(last), float(gradient)
    (256.0, 1024.0)
    """

    def __init__(
        self,
        chain: Chain[State, Adjoint] | Callable[[State, int], State],
        adjoint_step: Callable[..., Adjoint] | None = None,
        n_steps: int | None = None,
        *,
        tape_step: Callable[[State, int], tuple[State, object]] | None = None,
        budget: Budget | int | str | None = None,
        tier: Tiers | None = None,
        planner: str | UniformPlan | Planner = "auto",
        costs: Costs | StageCosts | None = None,
        checked: bool = False,
        progress: bool | None = None,
        states: States | None = None,
        durable: str | os.PathLike[str] | DurableRun | None = None,
        durable_every_s: float = 60.0,
        durable_label: str = "",
    ) -> None:
        if callable(chain):
            if adjoint_step is None:
                raise ArgumentError("a plain step function needs an adjoint_step beside it")
            chain = FunctionChain(chain, adjoint_step, tape_step)
        elif adjoint_step is not None or tape_step is not None:
            raise ArgumentError("adjoint_step and tape_step go with a plain step, not with a Chain")
        if costs is not None and not isinstance(costs, Costs | StageCosts):
            raise ArgumentError(
                f"costs={shown(costs)} must be Costs, from measure() or made by hand, or "
                "StageCosts of steps that differ"
            )
        if durable is not None and not isinstance(durable, str | os.PathLike | DurableRun):
            raise ArgumentError(f"durable={durable!r} must be the name of a folder")
        if isinstance(planner, UniformPlan):
            n_steps = planner.n_steps if n_steps is None else n_steps
            budget = Budget(slots=planner.slots) if budget is None else budget
            costs = planner.costs if costs is None else costs
        stages: StageCosts | None = None
        if isinstance(costs, StageCosts):
            _stages_alone(planner, durable, states)
            n_steps = len(costs.stages) if n_steps is None else n_steps
            stages, costs = costs, None
        if n_steps is not None:
            n_steps = require_steps(n_steps, planner if isinstance(planner, str) else "given")
        # Steps that turn out to differ are planned for, unless the user has said otherwise.
        self._may_differ = durable is None and states is None and costs is None
        self._may_differ = self._may_differ and planner == "auto"
        self._durable: DurableRun | None = None
        if durable is not None:
            if isinstance(durable, DurableRun):  # of a rank, whose store answers for all ranks
                self._durable = durable
            else:
                _durable_alone(tier, states)
                self._durable = DurableRun(durable, durable_every_s, durable_label)
                tier = self._durable.store
            chain, states = self._durable.chain(chain), OrderedStates(chain.in_place)
        self._resumed: Resumed | None = None
        self._planner = planner_of(planner, n_steps)
        self._chain: Chain[State, Adjoint] = chain
        if states is not None and not all(
            callable(getattr(states, name, None)) for name in ("layout", "slots")
        ):
            raise ArgumentError(
                f"states={shown(states)} must describe states, with methods layout() and slots(); "
                "leave it out for trees of arrays, or write '3 slots' as the budget"
            )
        self._states: States = ArrayStates(chain.in_place) if states is None else states
        self._n_steps = n_steps
        self._budget = Budget.parse(default_budget_bytes() if budget is None else budget)
        if self._budget.slots is not None:
            self._budget.slots_for(1)
        self._stores = _stores(tier)
        with Shield(up=True):
            for store in self._stores:
                if isinstance(store, StreamedStore):
                    store.check()
        self._given = costs is not None
        if costs is not None:
            costs = agreeing(costs, chain)
        self._checked = checked
        self._bars = Bars(progress)
        self._layout: Any = None
        self._executor: Executor[State, Adjoint] | None = None
        self._timed: Metered[State, Adjoint] | None = None  # the first sweep, step by step
        self._looked = False  # at what it has shown
        self._opened: list[Store] = []  # those of the stores that are ours now
        self._birth = Birth.here()  # of what was opened
        self._dropped: weakref.finalize[..., Reversal[State, Adjoint]] | None = None
        self._ready = False
        self._stale = False  # the plan rests on costs that were seen to be others
        self._before: list[StoreStats] = []  # what the stores had counted before the sweep
        self._slots = 0
        self._length = 0  # steps of the forward sweep, once it is over
        self._report: Report | None = None
        self._partial: Callable[[], Report] | None = None  # of a sweep that was stopped
        self._stopped = ""  # what stopped the last sweep, and where
        if costs is not None and not self._stores:
            costs = costs.without_tiers()  # measured with a tier that is not here now
        self.costs: Costs | None = costs
        self._unequal: Unequal[State, Adjoint] | None = None
        if stages is not None:
            self._unequal = Unequal(chain, n_steps, self._budget, stages, self._first_store())
        self._drawn: UniformPlan | Callable[[], UniformPlan] | None = None

    @property
    def plan(self) -> UniformPlan | None:
        """The plan of the last sweep; of one of unknown length it is made when asked for."""
        if self._drawn is not None and not isinstance(self._drawn, UniformPlan):
            self._drawn = self._drawn()
        return self._drawn

    @plan.setter
    def plan(self, plan: UniformPlan | None) -> None:
        self._drawn = plan

    @property
    def chain_plan(self) -> ChainPlan | None:
        """The plan of the last sweep or, where it surveyed, of the next, once that is planned."""
        return None if self._unequal is None else self._unequal.plan

    @property
    def stage_costs(self) -> StageCosts | None:
        """The costs of steps that differ, given or measured."""
        return None if self._unequal is None else self._unequal.costs

    # -------------------------------------------------------------------- life

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        # The gradient of a durable run may not have been saved yet.
        self._end(keep=kind is not None)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse: a copy would share stores, slots and the sweep under way.

        Raises
        ------
        ArgumentError
            Whether it is copied or pickled.
        """
        raise ArgumentError(
            "a Reversal holds threads, files and a sweep, and cannot be copied or pickled; "
            "make another with the same arguments"
        )

    def close(self) -> None:
        """Forget a sweep under way, stop threads, remove files.  May be called twice.

        The folder of a durable run is removed if the run is complete.
        """
        self._end(keep=False)

    def _end(self, *, keep: bool) -> None:
        self._ready = False
        self._bars.close()
        try:
            if self._executor is not None:
                self._executor.abort()
        finally:  # though a second Ctrl-C ends the wait for writes
            complete = self._durable is not None and self._durable.complete
            _give_back(self._opened, self._durable, remove=complete and not keep)

    def _let_go(self) -> None:
        """Forget a sweep under way and stop its threads; a durable folder stays open."""
        self._ready = False
        if self._executor is not None:
            self._executor.abort()
        _give_back(self._opened, None)
        if self._dropped is not None:  # or the end of this object would close the folder
            self._dropped.detach()

    def _require_own(self) -> None:
        """Raise StoreError in a forked child, if the stores were opened by its parent."""
        attached = self._durable is not None and self._durable.attached
        if (self._opened or attached) and self._birth.foreign:
            raise forked("a Reversal with a tier")

    # ------------------------------------------------------------------ sweeps

    def forward(self, state: State, until: Callable[[State, int], bool] | None = None) -> State:
        """Run the forward sweep from `state`; return the last state.

        Parameters
        ----------
        state : pytree of arrays
            State 0.  A functional chain leaves it alone, and it must not be
            written to before `reverse` returns; an in-place chain overwrites it.
        until : callable, optional
            For an unknown number of steps: `until(state, i)` tells whether
            state i, i = 1, 2, ..., is the last.  A durable run that is resumed
            does not ask it again of the states that it finds.

        Raises
        ------
        StateError
            If a leaf is no plain array, or a state changes its structure,
            shape or dtype.
        BudgetError
            If the budget holds not even one state.
        StoreError
            If the tier cannot be used or holds another run, in a forked child,
            or if the durable folder is refused: in use, not yours alone, of
            another run or format version.
        """
        if (until is None) == (self._n_steps is None):
            raise ArgumentError(
                "give either n_steps to the Reversal or until= to forward(), not "
                + ("both" if until is not None else "neither")
            )
        self._require_own()
        try:
            return self._forward(state, until)
        except (StateError, LargerThanPlanned) as error:
            if not self._measures_anew(error):
                raise
        return self._forward(state, until)

    def _measures_anew(self, error: Exception) -> bool:
        """Whether a sweep that other sizes than planned have ended is to be run again."""
        if isinstance(error, StateError):
            if not (self._may_differ and error.varies and self._unequal is None):
                return False
            self._unequal = Unequal(
                self._chain, self._n_steps, self._budget, None, self._first_store()
            )
            self.plan = self._executor = self._layout = self.costs = None
            return True
        if self._unequal is None or self._unequal.refuses_larger:
            return False
        self._unequal.forget()
        return True

    def _forward(self, state: State, until: Callable[[State, int], bool] | None) -> State:
        self._ready = False
        where = "before its first step, while costs were measured and planned"
        counts = None if self._executor is None else self._executor.counts
        try:
            if self._unequal is None:
                slots = self._prepare(state)
                if until is None and (self.plan is None or self._stale):
                    self._plan(slots)
                executor = self._ready_executor(slots)
                counts = executor.counts
                if self._durable is not None:
                    assert self.costs is not None
                    self._resumed = self._durable.begin(self.costs)
                schedule = self._schedule(until)
            else:
                executor = self._ready_unequal(state)
                counts = executor.counts
                schedule = self._unequal.schedule(self._is_last(until))
            self._before = [replace(store.stats) for store in self._stores]
            self._bars.start(self._n_steps)
            where = "in the forward sweep"
            last = executor.forward(schedule, state, self._resumed, judged=self._judges(until))
            if self._durable is not None:
                self._durable.ended(last, self._length)
        except BaseException as error:
            try:
                self._note_stop(error, where, counts)
            finally:
                self._end(keep=True)
            raise
        self._ready = True
        self._bars.turn(self._length)
        return last

    def prepare(self, state: State) -> UniformPlan:
        """Measure, plan and open the tier, as the first `forward` would; return the plan.

        Raises
        ------
        StateError, BudgetError, StoreError
            As `forward` does.
        """
        self._require_own()
        try:
            if self._unequal is not None:
                self._ready_unequal(state)
                if self.plan is None:
                    raise ArgumentError(
                        "steps differ, and what they cost shows in a first sweep: forward(), then "
                        "reverse(); or give costs=StageCosts(...)"
                    )
                return self.plan
            slots = self._prepare(state)
            self._ready_executor(slots)
            if self.plan is None or self._stale:
                return self._plan(slots)
            return self.plan
        except BaseException:
            self._end(keep=True)
            raise

    def reverse(self, adjoint: Adjoint) -> Adjoint:
        """Run the reverse sweep from the adjoint of the last state; return that of state 0.

        Raises
        ------
        ArgumentError
            If no forward sweep stands ready: each serves one reverse sweep.
            Durable: if the adjoint is no pytree of arrays, or another than
            the run began with; `reverse` may be called again then.
        StateError
            Durable: if an adjoint step changes the adjoint's layout.
        StoreError
            In a forked child; durable: if the adjoint on the disk became
            unreadable since `forward`.
        """
        if not self._ready or self._executor is None:
            raise ArgumentError("reverse() needs a forward() before it, one for each reverse()")
        self._require_own()
        if self._durable is not None:
            try:
                adjoint = self._durable.start(adjoint)
            except StoreError:  # the next forward() looks again what there is
                self._end(keep=True)
                raise
        self._ready = False
        executor = self._executor
        try:
            result = executor.reverse(adjoint)
            if self._durable is not None:
                self._durable.finish(result)
        except BaseException as error:
            try:
                self._note_stop(error, "in the reverse sweep", None)
            finally:
                self._end(keep=True)
            if isinstance(error, StateError) and self._measures_anew(error):
                raise StateError(
                    f"{str(error).split(';')[0]}; first seen in the reverse sweep: call forward() "
                    "again, which measures steps that differ, or give costs=StageCosts(...)"
                ) from error
            raise
        self._bars.close()
        self._note_end(executor)
        return result

    def _note_end(self, executor: Executor[State, Adjoint]) -> None:
        """Remember what complete sweeps did, for `report`, and learn from it.

        The gradient is known by now: nothing here takes long enough for a
        Ctrl-C to lose it, so what a sweep of unknown length would have been
        predicted to take is computed only when somebody asks.
        """
        timeline, counts = executor.timeline, executor.counts
        if self._unequal is not None:
            self._drawn = self._unequal.ended(self._length, counts, timeline)
        elif self._n_steps is None:
            self._drawn = self._in_hindsight(self._length)
        drawn = self._drawn
        uses = tuple(map(TierUse.of, self._stores, self._before))

        def made() -> Report:
            plan = drawn if isinstance(drawn, UniformPlan) or drawn is None else drawn()
            assert plan is not None
            return Report.of(plan, timeline, counts, uses)

        self._report, self._partial, self._stopped = None, made, ""
        if self._resumed is None and self._unequal is None:
            assert self.costs is not None
            assumed = drawn.costs if isinstance(drawn, UniformPlan) else self.costs
            self._learn(seen_costs(assumed, timeline, counts))
            self._look_at_times()

    def report(self) -> Report:
        """Return what the last sweeps did beside what was predicted.

        After Ctrl-C or an error in one of them the report says how far they
        came (`ended`).

        Raises
        ------
        ArgumentError
            Before the first sweeps have ended, or if the last ones were
            stopped before their first step.
        """
        if self._partial is not None:
            self._report, self._partial = self._partial(), None
        if self._stopped:
            raise ArgumentError(f"report() has no step to tell of: the run was {self._stopped}")
        if self._report is None:
            raise ArgumentError("report() needs a complete sweep: forward(), then reverse()")
        return self._report

    def _note_stop(self, error: BaseException, where: str, before: Counts | None) -> None:
        """Remember how far a sweep came that `error` ends, for `report`.

        `before` are the counts of the sweep before it: the executor's still,
        if this one did not begin.
        """
        how = "interrupted" if isinstance(error, KeyboardInterrupt) else "stopped by "
        how += "" if how == "interrupted" else type(error).__name__
        self._report = self._partial = None
        executor, self._stopped = self._executor, f"{how} {where}"
        if self._unequal is not None and self._unequal.plan is None:
            return  # a survey: what it would have come to is not known
        if executor is None or executor.counts is before or not executor.counts.elapsed_s:
            return
        timeline, counts, self._stopped = executor.timeline, executor.counts, ""
        uses = tuple(map(TierUse.of, self._stores, self._before))
        n = self._n_steps or (self._length if "reverse" in where else None)
        steps = counts.forward_steps if n is None else min(counts.forward_steps, n)
        of = "" if n is None else f" of {n}"
        ended = f"{how} {where}: {steps}{of} steps run forward, {counts.reverse_steps} reversed"

        def made() -> Report:
            plan = self.plan if self._n_steps else self._in_hindsight(n or max(1, steps))()
            assert plan is not None
            return Report.of(plan, timeline, counts, uses, ended)

        self._partial = made

    def _in_hindsight(self, n_steps: int) -> Callable[[], UniformPlan]:
        """Return what plans a sweep whose number of steps only showed itself, once."""
        assert self.costs is not None
        return cache(partial(PLANNERS["online"], self.costs, self._slots, n_steps))

    # ---------------------------------------------------------------- planning

    def _prepare(self, state: State) -> int:
        """See that layout, slots and costs are those of `state`; return the slots."""
        layout: Any = self._states.layout(state)
        buffers = sum(store.buffer_bytes(layout) for store in self._stores)
        self._slots = slots = self._budget.slots_for(layout.nbytes, buffers)
        if self._layout is None or not layout.same_as(self._layout):
            if self._executor is not None:
                self._executor.abort()  # a sweep under way still holds the caller's arrays
            self._layout, self.plan, self._executor = layout, None, None
            _give_back(self._opened, None)
            if not self._given:
                self.costs = None
        probed = self._stores
        if self._durable is not None:
            probed = (self._attach(self._durable, layout, state),)
        if self.costs is None:
            most = self._n_steps or _UNKNOWN_STEPS
            costs = measure(
                self._chain, state, most, probed, states=self._states, progress=self._bars.shown
            )
            if any(each.scheme == "auto" for tier in self._stores for each in compressions(tier)):
                costs = choose_compression(
                    self._chain, state, most, costs, self._stores, self._states, self._predicted
                )
            self.costs = costs
        return slots

    def _attach(self, durable: DurableRun, layout: Any, state: State) -> Store:
        """Open the durable folder, take its costs; return the store to measure with."""
        if durable.taken:
            _give_back(self._opened, None)
        self._birth = Birth.here()
        with Shield(up=True):  # or the folder might stay locked
            durable.attach(layout, self._n_steps, state)
        if durable.costs is not None and not self._given:
            self.costs, durable.costs = durable.costs, None
            self.plan = None
        return durable.probe

    def _predicted(self, costs: Costs) -> float:
        """Return the makespan that is planned for some costs."""
        n = self._n_steps or _UNKNOWN_STEPS
        if isinstance(self._planner, str):
            budget = Budget(slots=self._slots)
            return plan(costs, budget, n, self._planner, progress=False).makespan_s
        return planned(self._planner, costs, self._slots, n).makespan_s

    def _plan(self, slots: int) -> UniformPlan:
        assert self.costs is not None
        n, self._stale = self._n_steps or 1, False
        if isinstance(self._planner, str):
            if self._durable is not None and self._planner == "auto":
                self.plan = sealing(durable_plan)(self.costs, slots, n)
            else:
                shown = self._bars.shown
                self.plan = plan(self.costs, Budget(slots=slots), n, self._planner, progress=shown)
        else:
            self.plan = planned(self._planner, self.costs, slots, n)
        return self.plan

    def _is_last(self, until: Callable[[State, int], bool] | None) -> Callable[[int], bool] | None:
        """Return what tells a schedule whether state i is the last, for `until`."""
        self._length = self._n_steps or 0
        if until is None:
            return None
        # Not `self`, which would then not go before its sweep does.
        executor, run = self._executor, weakref.ref(self)

        def is_last(i: int) -> bool:
            assert executor is not None
            if until(executor.live, i):
                if (found := run()) is not None:
                    found._length = i
                return True
            return False

        return is_last

    def _schedule(self, until: Callable[[State, int], bool] | None) -> Schedule:
        assert self.costs is not None
        is_last = self._is_last(until)
        if self._resumed is not None:
            assert self._durable is not None
            self._length = n = self._durable.length or 0
            stored, end = self._resumed.stored, self._resumed.end
            return resumed_schedule(
                self.costs, self._slots, n or None, stored, end, is_last if not n else None
            )
        if until is None:
            assert self.plan is not None
            return self.plan.schedule()
        make = online_schedule if self._durable is None else durable_online_schedule
        assert is_last is not None
        return make(self.costs, self._slots, is_last)

    def _judges(self, until: object) -> bool:
        """Whether every action is judged before it is performed."""
        if self._unequal is not None:  # a survey learns only as it goes what its steps take
            return self._checked and self._unequal.plan is not None and until is None
        return self._checked or not self._is_ours(until)

    def _is_ours(self, until: object) -> bool:
        """Whether the schedule that `_schedule` returns comes from a planner of this package."""
        if until is not None or self._resumed is not None:
            return True
        assert self.plan is not None
        return self.plan.sealed

    def _first_store(self) -> Store | None:
        return self._stores[0] if self._stores else None

    def _open(self, stores: Sequence[Store], layout: Any) -> None:
        """Open stores, unless they are open already; they are ours until `close`."""
        if self._opened:
            return
        self._birth = Birth.here()
        if self._dropped is not None:
            self._dropped.detach()
        # It must not refer to the executor: a step is often a method of the
        # object that has this Reversal, which would then live for ever.
        give_back = partial(_give_back, self._opened, self._durable)
        self._dropped = weakref.finalize(self, end, give_back, self._birth)
        self._dropped.atexit = False  # media have finalizers of their own
        with Shield(up=True):
            for store in stores:
                store.open(layout)
                self._opened.append(store)  # after an error these are closed again

    def _ready_unequal(self, state: State) -> Executor[State, Adjoint]:
        """Plan a sweep whose steps differ; return its executor."""
        unequal = self._unequal
        assert unequal is not None
        if (
            unequal.plan is None or unequal.stale
        ):  # the tier is measured, and opened for states of other sizes
            _give_back(self._opened, None)
        unequal.prepare(state)
        tier = unequal.tier
        stores: tuple[Store, ...] = () if tier is None else (tier,)
        if tier is not None:
            self._open(stores, tier.page_layout)
        if self._executor is None or self._executor.stores != stores:
            self._executor = Executor(
                self._bars.watch(unequal.metered, unequal.mean_step_s),
                stores,
                rules=unequal.rules,
                progress=self._bars.update if self._bars.shown else None,
                states=unequal.states,
            )
        self.plan = unequal.described()
        return self._executor

    def _ready_executor(self, slots: int) -> Executor[State, Adjoint]:
        assert self.costs is not None and self._layout is not None
        self._open(self._stores, self._layout)
        executor, weight = self._executor, self.costs.tape_slots
        if executor is not None and not self._given and executor.tape_slots != weight:
            executor.abort()
            self._executor = None
        if self._executor is None:
            run = weakref.ref(self)  # or a Reversal that is dropped would not end at once

            def heavier(step: int, nbytes: int) -> None:
                alive = run()
                assert alive is not None
                alive._heavier(step, nbytes)

            rules = partial(
                Rules,
                self._n_steps,
                slots,
                self.costs.tape_slots,
                state_is_tape=self._chain.state_is_tape,
                in_place=self._chain.in_place,
                one_tape=one_tape(self._chain),
                recovers=True,
            )
            if self._times_steps():
                self._timed = Metered(self._chain, None)
            chain = self._chain if self._timed is None else self._timed
            self._executor = Executor(
                self._bars.watch(chain, self.costs.forward_step_s),
                self._stores,
                tape_slots=self.costs.tape_slots,
                slots=slots,
                heavier=heavier,
                rules=rules,
                progress=self._bars.update if self._bars.shown else None,
                states=self._states,
            )
        return self._executor

    def _times_steps(self) -> bool:
        """Whether the first sweep shows what each step takes, for the plan of the next."""
        n, costs = self._n_steps, self.costs
        assert costs is not None
        return (
            self._may_differ
            and not self._stores
            and not self._looked
            and n is not None
            and 2 < n <= MOST_AT_ONCE
            and costs.forward_step_s >= LEAST_TIMED_S
        )

    def _look_at_times(self) -> None:
        """Plan the next sweep step by step if the first has shown that it pays."""
        timed, self._timed = self._timed, None
        if timed is None:
            return
        self._executor, self._looked = None, True  # the next one needs no timing
        assert self.costs is not None and self._n_steps is not None
        with contextlib.suppress(BudgetError):  # what is kept beside the largest step was enough
            self._unequal = faster_plan(
                timed.seen, self._chain, self._n_steps, self.costs, self._budget
            )

    def _heavier(self, step: int, nbytes: int) -> None:
        """Correct measured costs by the tape of `step`, which is larger than they say."""
        assert self.costs is not None and self._layout is not None
        if self._given:
            return  # the executor goes on with the tapes as they are
        self.costs = replace(
            self.costs, tape_bytes=math.ceil(nbytes * self.costs.state_bytes / self._layout.nbytes)
        )
        self._stale = True

    def _learn(self, seen: Costs) -> None:
        """Correct the costs by what the sweep has shown; drop a plan that rests on others."""
        assert self.costs is not None
        if self._given:
            return
        if drifted(self.costs, seen):
            self.costs = replace(seen, tape_bytes=self.costs.tape_bytes)
            self._stale = True


def _durable_alone(tier: object, states: object) -> None:
    """Raise ArgumentError for what does not go with `durable`."""
    if tier is not None:
        raise ArgumentError("durable= is the tier itself; leave tier= out")
    if states is not None:
        raise ArgumentError("durable= takes states that are pytrees of NumPy arrays, not states=")


def _stages_alone(planner: object, durable: object, states: object) -> None:
    """Raise ArgumentError for what does not go with costs of steps that differ."""
    if planner != "auto":
        raise ArgumentError(
            f"planner={shown(planner)} plans uniform steps; with costs=StageCosts(...) leave it out"
        )
    if durable is not None or states is not None:
        which = "durable" if durable is not None else "states"
        raise ArgumentError(
            f"costs=StageCosts(...) does not go with {which}=, which takes uniform steps only; "
            "give Costs there"
        )


def _stores(tier: Tiers | None) -> tuple[Store, ...]:
    found = tuple(open_store(each) for each in tier_names(tier))
    require_distinct(found, "the tiers")
    return found


def drifted(assumed: Costs, seen: Costs) -> bool:
    """Whether a ratio that plans rest on has changed by more than a factor of 1.3."""
    ratios = [(assumed.turn_s / assumed.forward_step_s, seen.turn_s / seen.forward_step_s)]
    if assumed.tier is not None and seen.tier is not None:
        ratios.append((assumed.rho, seen.rho))
        ratios.append(
            (
                assumed.tier.read_s / assumed.forward_step_s,
                seen.tier.read_s / seen.forward_step_s,
            )
        )
    return any(not a / _DRIFT <= b <= a * _DRIFT for a, b in ratios)


def reverse(
    step: Callable[[State, int], State],
    adjoint_step: Callable[..., Adjoint],
    state: State,
    adjoint: Adjoint | Callable[[State], Adjoint],
    n_steps: int,
    *,
    tape_step: Callable[[State, int], tuple[State, object]] | None = None,
    budget: Budget | int | str | None = None,
    tier: Tiers | None = None,
    planner: str | UniformPlan | Planner = "auto",
    costs: Costs | StageCosts | None = None,
    progress: bool | None = None,
    durable: str | os.PathLike[str] | None = None,
    durable_every_s: float = 60.0,
    durable_label: str = "",
) -> Result[State, Adjoint]:
    """Run `n_steps` steps from `state` and their adjoint, in one call.

    Parameters
    ----------
    step, adjoint_step, state, n_steps, tape_step, budget, tier, planner
        As for `Reversal` and its `forward`.
    adjoint : pytree of arrays, or callable
        Adjoint of the last state, or a function of the last state that returns it.
    costs, progress, durable, durable_every_s, durable_label
        As for `Reversal`.

    Returns
    -------
    Result
        `adjoint` of state 0, `last_state`, `report`.

    Raises
    ------
    ArgumentError, BudgetError, StoreError, StateError
        As `Reversal` does.

    Examples
    --------
    >>> import numpy as np
    >>> result = reverse(
    ...     lambda x, i: np.sin(x), lambda x, a, i: np.cos(x) * a,
    ...     state=np.array(1.0), adjoint=lambda last: 2 * last, n_steps=100, budget="5 slots",
    ... )
    >>> round(float(result.adjoint), 12)
    0.001249042311
    """
    with Reversal(
        step,
        adjoint_step,
        n_steps,
        tape_step=tape_step,
        budget=budget,
        tier=tier,
        planner=planner,
        costs=costs,
        progress=progress,
        durable=durable,
        durable_every_s=durable_every_s,
        durable_label=durable_label,
    ) as run:
        last = run.forward(state)
        start: Any = adjoint(last) if callable(adjoint) else adjoint
        # The reverse sweep runs steps again, perhaps in the very buffer that holds `last`.
        kept = copy.deepcopy(last)
        return Result(run.reverse(start), kept, run.report())


@dataclass(frozen=True, slots=True)
class Result(Generic[State, Adjoint]):
    """What `reverse` returns.

    Attributes
    ----------
    adjoint : pytree of arrays
        Adjoint of state 0.
    last_state : pytree of arrays
        A copy, made before the reverse sweep.
    report : Report
    """

    adjoint: Adjoint
    last_state: State
    report: Report
