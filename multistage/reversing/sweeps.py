"""The sweeps of a `Reversal`, one after the other: prepared, run forward and back, reported."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Generic, TypeVar, cast

from ..errors import ArgumentError, StateError, StoreError
from ..execute.executor import Executor, without_frames
from ..execute.ledger import Counts
from ..execute.metered import LargerThanPlanned
from ..model.chain import Chain
from ..model.costs import Costs
from ..model.functionals import own_adjoints, times
from ..model.stages import StageCosts
from ..planners import Plan
from ..report import Report, TierUse
from ..support.progress import Bars
from .arguments import Arguments
from .opened import OpenStores
from .unequal import Unequal
from .uniform import Uniform

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")

Drawn = Callable[[], Plan]  # a plan, made when it is asked for


THEY_DIFFER = (
    "steps differ, and what they cost shows in a first sweep: forward(), then reverse(); or give "
    "costs=StageCosts(...)"
)
_PREPARED = "; prepare(), with a state of another layout, has ended the sweep: call forward() again"
_USED = "; use() has ended the sweep: call forward() again"


class _Stopped(Exception):
    """Carries a StopIteration of `until` out of a schedule, which would end by it."""

    def __init__(self, error: StopIteration) -> None:
        super().__init__(error)
        self.error = error


class Sweeps(Generic[State, Adjoint]):
    """Runs sweeps with one set of arguments; `Reversal` documents what its methods do.

    Parameters
    ----------
    given : Arguments
    progress : bool or None
        Show progress bars; see `Reversal`.

    Attributes
    ----------
    given : Arguments
    steps : Uniform or Unequal
        What plans the next sweep.
    executor : Executor or None
        What runs it; None before the first.
    bars : Bars
    length : int
        Steps of the last forward sweep; 0 while their number is unknown.
    """

    def __init__(self, given: Arguments[State, Adjoint], progress: bool | None) -> None:
        self.given, self._durable = given, given.durable
        self.bars = Bars(progress)
        self._opened = OpenStores(given.durable)
        self.length = 0
        self._drawn: Drawn | None = None
        self._ready, self._ended = False, ""
        self._before = [replace(store.stats) for store in given.stores]  # counted before the sweep
        self._report: Callable[[], Report] | None = None
        self._stopped = ""  # what stopped the last sweep before its first step, and where
        self.executor: Executor[State, Adjoint] | None = None
        self.steps: Uniform[State, Adjoint] | Unequal[State, Adjoint]
        self.steps = (Unequal if given.steps_differ else Uniform)(given, self._opened, self.bars)

    @property
    def plan(self) -> Plan | None:
        """The plan of the last sweep; of one of unknown length it is made when asked for."""
        return None if self._drawn is None else self._drawn()

    @property
    def costs(self) -> Costs | StageCosts | None:
        """The costs for planning the next sweep, given or measured."""
        return times(self.steps.costs, self.given.operators.functionals, back=True)

    def end(self, *, keep: bool) -> None:
        """Forget a sweep in progress, stop threads, remove files.

        Parameters
        ----------
        keep : bool
            Keep the folder of a durable run, even of a complete one.
        """
        self._ready = False
        self.bars.close()
        try:
            self._abort()
        finally:  # though a second Ctrl-C ends the wait for writes
            self._opened.close(keep=keep)

    def let_go(self) -> None:
        """Forget a sweep in progress and stop its threads; a durable folder stays open."""
        self._ready = False
        self.bars.close()
        self._abort()
        self._opened.let_go()

    def use(self, chain: Chain[State, Adjoint] | None) -> None:
        """Run other operators in the sweeps to come; with None, forget those of the last shot."""
        self._opened.require_own()
        self.given.operators.current = chain
        self._ready, self._ended = False, _USED
        self.bars.close()
        if self.executor is not None:
            self.executor.abort()

    def _abort(self) -> None:
        if self.executor is not None:
            self.executor.let_go()

    def prepare(self, state: State) -> Plan:
        """Measure, plan and open the tier, as the first `forward` would; return the plan."""
        self._opened.require_own()
        try:
            steps = self.steps
            self.executor = steps.prepare(state, self.executor)
            if self._ready and not self.executor.stands:
                self._ready, self._ended = False, _PREPARED
            self._drawn = None
            plan = steps.prospect()
            if plan is None:
                raise ArgumentError(THEY_DIFFER)
            self._draw(plan)
            return plan
        except BaseException as error:
            self.end(keep=True)
            if isinstance(error, StateError) and self.steps.anew(error) is not None:
                raise ArgumentError(THEY_DIFFER) from error
            raise

    def forward(self, state: State, until: Callable[[State, int], bool] | None = None) -> State:
        """Run the forward sweep; return the last state."""
        if (until is None) == (self.given.n_steps is None):
            raise ArgumentError(
                "give either n_steps to the Reversal or until= to forward(), not "
                + ("both" if until is not None else "neither")
            )
        self._opened.require_own()
        try:
            return self._forward(state, until)
        except _Stopped as carried:
            raise carried.error from None
        except (StateError, LargerThanPlanned) as error:
            if not self._measures_anew(error):
                raise
            without_frames(error)
        try:
            return self._forward(state, until)
        except _Stopped as carried:
            raise carried.error from None

    def _measures_anew(self, error: Exception) -> bool:
        """Whether a sweep that other sizes than planned have ended is to be run again."""
        steps = self.steps.anew(error)
        if steps is None:
            return False
        if steps is not self.steps:
            self.steps, self.executor, self._drawn = steps, None, None
        return True

    def begin(self, state: State, until: Callable[[State, int], bool] | None = None) -> None:
        """Begin a forward sweep whose steps the caller runs, who pushes each state.

        Costs are given, and nothing is durable; for the rest see `forward` and `Executor.begin`.
        """
        assert self.steps.costs is not None and self._durable is None
        self._opened.require_own()
        self._forward(state, until, pushes=True)

    def push(self, state: State) -> bool:
        """Go on with a sweep that was begun, from the next state; return whether it is the last."""
        executor = self.executor
        assert executor is not None
        self._opened.require_own()
        try:
            if executor.push(state):
                self._turn(state)
            return self._ready
        except BaseException as error:
            try:
                self._note_stop(error, "in the forward sweep", None)
            finally:
                self.end(keep=True)
            raise

    def _forward(
        self,
        state: State,
        until: Callable[[State, int], bool] | None,
        *,
        pushes: bool = False,
    ) -> State:
        self._ready = False
        where = "before its first step, while costs were measured and planned"
        steps, online = self.steps, until is not None
        before = None if self.executor is None else self.executor.counts
        try:
            self.executor = executor = steps.prepare(state, self.executor, sweeps=True)
            before = executor.counts
            self._draw(steps.plan)
            is_last = self._is_last(until, executor)
            schedule = steps.schedule(is_last, executor)
            if steps.resumed is not None:
                assert self._durable is not None
                self.length = self._durable.length or 0
            self._before = [replace(store.stats) for store in self.given.stores]
            self.bars.start(self.given.n_steps)
            if self.given.watched is not None:
                self.given.watched.begin()
            where = "in the forward sweep"
            judged = steps.judges(online=online)
            if pushes:
                executor.begin(schedule, state, judged=judged)
                return state
            late = steps.asked(online=online)
            last = executor.forward(schedule, state, steps.resumed, judged=judged, late=late)
            self._turn(last)
        except BaseException as error:
            try:
                self._note_stop(error, where, before)
            finally:
                self.end(keep=True)
            raise
        return last

    def _turn(self, last: State) -> None:
        """Stand ready for the reverse sweep."""
        self._draw(self.steps.plan)  # which the first steps may have shown
        if self._durable is not None:
            self._durable.ended(last, self.length)
        self._ready, self._ended = True, ""
        self.bars.turn(self.length)

    def reverse(self, adjoint: Adjoint) -> Adjoint:
        """Run the reverse sweep; return the adjoint of state 0."""
        if not self._ready or self.executor is None:
            raise ArgumentError(
                f"reverse() needs a forward() before it, one for each reverse(){self._ended}"
            )
        self._opened.require_own()
        if self.given.operators.functionals is not None:
            adjoint = cast(Adjoint, own_adjoints(adjoint, self.given.operators.functionals))
        if self._durable is not None:
            try:
                adjoint = self._durable.start(adjoint)
            except StoreError:  # the next forward() looks again what there is
                self.end(keep=True)
                raise
        self._ready = False
        executor = self.executor
        try:
            hand = [adjoint]
            del adjoint  # or those of several functionals would be held beside what they become
            result = executor.reverse(hand.pop())
            if self._durable is not None:
                self._durable.finish(result)
        except BaseException as error:
            try:
                self._note_stop(error, "in the reverse sweep", None)
            finally:
                self.end(keep=True)
            if isinstance(error, StateError) and self._measures_anew(error):
                raise StateError(
                    f"{str(error).split(';')[0]}; first seen in the reverse sweep: call forward() "
                    "again, which measures steps that differ, or give costs=StageCosts(...)"
                ) from error
            raise
        self.bars.close()
        self._drawn = cache(self.steps.ended(self.length, executor.counts, executor.timeline))
        self._remember(self._drawn, executor)
        steps = self.steps.next_steps()
        if steps is not self.steps:
            self.steps, self.executor = steps, None
        return result

    def _is_last(
        self, until: Callable[[State, int], bool] | None, executor: Executor[State, Adjoint]
    ) -> Callable[[int], bool] | None:
        """Return a function that says whether state i is the last, for `until`."""
        self.length = self.given.n_steps or 0
        if until is None:
            return None
        running = weakref.ref(self)  # a run that is dropped ends at once

        def is_last(i: int) -> bool:
            try:
                found = until(executor.live, i)
            except StopIteration as error:
                raise _Stopped(error) from None
            if found and (run := running()) is not None:
                run.length = i
            return bool(found)

        return is_last

    # ----------------------------------------------------------------- reporting

    def _draw(self, plan: Plan | None) -> None:
        self._drawn = None if plan is None else lambda: plan

    def report(self) -> Report:
        """Return what the last sweeps did beside what was predicted.

        Raises
        ------
        ArgumentError
            If there is nothing to report.
        """
        if self._stopped:
            raise ArgumentError(f"report() has no step to report: the run was {self._stopped}")
        if self._report is None:
            raise ArgumentError("report() needs a complete sweep: forward(), then reverse()")
        return self._report()

    def _note_stop(self, error: BaseException, where: str, before: Counts | None) -> None:
        """Remember how far a sweep came that `error` ends, for `report`.

        `before` are the counts of the sweep before it: the executor's still,
        if this one did not begin.
        """
        steps, executor, n = self.steps, self.executor, self.given.n_steps
        how = f"stopped by {type(error).__name__}"
        if isinstance(error, KeyboardInterrupt):
            how = "interrupted"
        counts = None if executor is None else executor.counts
        drawn: Drawn | None = None
        if executor is not None and counts is not before and counts is not None:
            if n is None and "reverse" in where:
                n = self.length
            run = counts.forward_steps if n is None else min(counts.forward_steps, n)
            if self.given.n_steps is None:
                drawn = steps.in_hindsight(n or max(1, run))
            elif (plan := steps.plan) is not None:
                drawn = self._drawn or (lambda: plan)
        # What a survey would have come to is not known.
        if executor is None or counts is None or drawn is None or not counts.elapsed_s:
            self._report, self._stopped = None, f"{how} {where}"
            return
        of = "" if n is None else f" of {n}"
        told = f"{run}{of} steps run forward, {counts.reverse_steps} reversed"
        self._remember(drawn, executor, f"{how} {where}: {told}")

    def _remember(self, drawn: Drawn, executor: Executor[State, Adjoint], ended: str = "") -> None:
        """Remember sweeps; `ended` says how far those came that were stopped."""
        timeline, counts = executor.timeline, executor.counts
        uses = tuple(map(TierUse.of, self.given.stores, self._before))
        self._report = cache(lambda: Report.of(drawn(), timeline, counts, uses, ended))
        self._stopped = ""
