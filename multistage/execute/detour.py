"""When a run leaves its plan: a write is late, and the deadline rule says how to continue.

An executor asks here before it waits for a write, and at the end of its forward sweep.
A question takes a part of a second, so it is put to the rule
(`planners.chain.joint_rule`) only where waiting is predicted to cost more than that; while
it is not, the executor waits, a little at a time.  Nothing here decides by a clock but how
long a wait lasts: how slow the tier is comes from the executor.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Protocol

from ..actions import Advance, EndForward, Tape
from ..model.tier import Tier
from ..planners.chain.heterogeneous import ChainPlan
from ..planners.chain.joint_rule import Accepts, DeadlineRule, Detour, rates_when
from ..planners.chain.memory import use_of

# What a question takes, for a chain of n stages: a table of RR-9302, and some hundred plans.
_PER_STAGE_S, _PER_PAIR_S = 3e-3, 2.5e-5
# Shares of a plan's makespan: what waiting must cost to ask, and one wait between questions.
_WORTH, _WAIT = 0.02, 0.01
_LEAST_S = 1e-3  # of one wait: a plan may take less than a millisecond
_GAIN = 0.97  # of the time with waiting, the most that a detour may take
_EARLIER = 0.99  # of the time with a later detour, the most that one may take at a put
_SLOWER = 1.2  # the tier must be so many times slower than when it was asked about last


class Writes(Protocol):
    """The writes of one run, as a detour needs them."""

    def written(self, step: int, tape: bool, timeout_s: float) -> bool:
        """Wait for a write, no longer than so many seconds; return whether it is done."""

    def slower(self, tier: Tier) -> float:
        """Return the seconds that writes took over those planned, at least 1."""

    def seen_s(self) -> float:
        """Return the seconds of writing that `slower` rests on."""

    def computed_s(self) -> float:
        """Return the seconds of the forward sweep so far that were no waiting."""

    def cancel(self, timeout_s: float) -> bool:
        """Cancel all writes; return whether the one in flight has ended within a time."""

    def under_way_bytes(self) -> int:
        """Return the bytes of the oldest write that is not done."""

    def resume(self) -> bool:
        """Queue the writes again that `cancel` has cancelled.

        False where that cannot be: all have ended then.
        """


class Deadlines:
    """Asks the deadline rule of one plan while it runs.

    Parameters
    ----------
    plan : ChainPlan
        With a tier and a limit.
    ask_s : float, optional
        Seconds that a question takes; as estimated if None.
    wait_s : float, optional
        How long one wait for a write lasts; a hundredth of the makespan, at least 1 ms, if None.
    cancel_s : float, optional
        How long a write that is cancelled may continue; as long as it takes if None.
    accepts : callable, optional
        As for `DeadlineRule.at_deadline`.

    Attributes
    ----------
    detour : Detour or None
        The last one taken.
    slower : float
        How many times slower than planned the tier was then.
    """

    def __init__(
        self,
        plan: ChainPlan,
        *,
        ask_s: float | None = None,
        wait_s: float | None = None,
        cancel_s: float | None = None,
        accepts: Accepts | None = None,
    ) -> None:
        n = len(plan.costs.stages)
        self.plan = plan
        self.detour: Detour | None = None
        self.slower = 1.0
        self._ask_s = _PER_STAGE_S * n + _PER_PAIR_S * n * n if ask_s is None else ask_s
        self._wait_s = max(_LEAST_S, _WAIT * plan.makespan_s) if wait_s is None else wait_s
        self._cancel_s, self._accepts = cancel_s, accepts
        self._rule: DeadlineRule | None = None
        # How slow the tier was when the rule was asked last, and when it was asked at a put.
        self._asked = self._asked_early = 0.0

    @property
    def given_up(self) -> int:
        """Tapes of the plan that the detour makes again."""
        if self.detour is None:
            return 0
        turn = self.plan.actions.index(EndForward())
        kept = {a.step for a in self.plan.actions[:turn] if isinstance(a, Tape)}
        turn = self.detour.actions.index(EndForward())
        again = {a.step for a in self.detour.actions[turn:] if isinstance(a, Tape)}
        return len(kept & again)

    def begin(self) -> None:
        """Forget what is known of the tier: a forward sweep begins."""
        self._asked = self._asked_early = 0.0

    def at_eviction(self, at: int, step: int, tape: bool, writes: Writes) -> Detour | None:
        """Wait until a write is done, as `at_wait` does; `at` is its `Evict`."""
        return self.at_wait(at, partial(writes.written, step, tape), writes)

    def at_wait(self, at: int, done: Callable[[float], bool], writes: Writes) -> Detour | None:
        """Wait for writes until the run can go on, None, or is so late that a detour is faster.

        Parameters
        ----------
        at : int
            Of the `Evict` or `Put` among the plan's actions.
        done : callable
            `done(timeout_s)` waits, no longer than so many seconds, and returns whether the
            action can be performed now.
        writes : Writes
            Those of the run.  Where a detour is returned they are cancelled.

        Notes
        -----
        Blocks; not forever, where the rule knows a detour.
        """
        wait_s = 0.0
        while not done(wait_s):
            detour = self._asked_at(at, writes)
            if detour is not None:
                return detour
            wait_s = self._wait_s
        return None

    def at_turn(self, writes: Writes) -> Detour | None:
        """Return the detour that is faster than the plan's reverse sweep, None if there is none."""
        at = self.plan.actions.index(EndForward())
        detour = self._asked_at(at, writes)
        self._rule = None  # its table takes memory
        return detour

    def _forward_s(self, at: int) -> float:
        """Return the seconds that computing takes before an action of the forward sweep."""
        stages, seconds = self.plan.costs.stages, 0.0
        for action in self.plan.actions[:at]:
            if isinstance(action, Advance):
                seconds += sum(stage.forward_s for stage in stages[action.start : action.stop])
            elif isinstance(action, Tape) and action.step < len(stages):
                seconds += stages[action.step].forward_s
        return seconds

    def at_put(self, at: int, writes: Writes) -> Detour | None:
        """Return a detour that is better taken now than where the run will first wait.

        Parameters
        ----------
        at : int
            Of the `Put` among the plan's actions.
        writes : Writes
            Those of the run.  Where a detour is returned they are cancelled.

        Notes
        -----
        The earlier a plan is left, the less it has given up of what the optimum without
        the tier would hold.
        """
        if writes.seen_s() < _WORTH * self.plan.makespan_s:
            return None
        slower, waiting_s = self._slower_at(at, writes)
        if slower < _SLOWER * max(1.0, self._asked_early) or not self._pays(waiting_s, 2):
            return None
        self._asked_early = slower
        rule = self._made_rule()
        now = rule.at_deadline(at, slower, accepts=self._accepts)
        waits = max(at, rule.first_to_wait(slower))
        later = rule.at_deadline(waits, slower, accepts=self._accepts)
        later_s = waiting_s if later is None else min(waiting_s, later.makespan_s)
        if now is None or now.makespan_s > _EARLIER * later_s:
            return None
        return self._left(at, now, slower, writes)

    def _slower_at(self, at: int, writes: Writes) -> tuple[float, float]:
        """Return how many times slower the tier is, and the makespan with waiting then."""
        plan, tier = self.plan, self.plan.tier
        assert tier is not None
        # Where computing takes longer too, as on a busy machine, the plan holds all the same.
        planned_s = self._forward_s(at)
        busier = writes.computed_s() / planned_s if planned_s else 1.0
        slower = max(1.0, writes.slower(tier) / max(1.0, busier))
        if slower < _SLOWER:
            return slower, plan.makespan_s
        rates = (rates_when(tier, slower),)
        return slower, use_of(plan.actions, plan.costs, rates).makespan_s

    def _pays(self, waiting_s: float, questions: int) -> bool:
        """Whether waiting costs more than to ask so many questions."""
        planned_s = self.plan.makespan_s
        return waiting_s - planned_s >= max(_WORTH * planned_s, questions * self._ask_s)

    def _made_rule(self) -> DeadlineRule:
        if self._rule is None:
            self._rule = DeadlineRule(self.plan)
        return self._rule

    def _asked_at(self, at: int, writes: Writes) -> Detour | None:
        slower, waiting_s = self._slower_at(at, writes)
        if slower < _SLOWER * max(1.0, self._asked) or not self._pays(waiting_s, 1):
            return None
        self._asked = slower
        detour = self._made_rule().at_deadline(at, slower, accepts=self._accepts)
        if detour is None or detour.makespan_s > _GAIN * waiting_s:
            return None
        return self._left(at, detour, slower, writes)

    def _left(self, at: int, detour: Detour, slower: float, writes: Writes) -> Detour | None:
        """Return a detour once all writes are cancelled, or another that does not need that."""
        tier = self.plan.tier
        assert tier is not None and self._rule is not None
        # The pages that the tier is writing: no more than one thing, at the speed seen.
        ends_s = 2 * slower * tier.writing_s(writes.under_way_bytes())
        if not writes.cancel(ends_s if self._cancel_s is None else self._cancel_s):
            # A tier that does not even stop may never answer: nothing is read back.
            other = self._rule.at_deadline(at, math.inf, cancels=False, accepts=self._accepts)
            if other is None and writes.resume():
                return None
            detour = other or detour
        self.detour, self.slower, self._rule = detour, slower, None
        return detour
