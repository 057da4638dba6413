"""A plan run in virtual time on a tier slower than planned, with the deadline rule or without."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from chain_judge import Judge

from multistage.actions import Action, EndForward, Evict, Put
from multistage.execute.detour import Deadlines
from multistage.planners.chain.heterogeneous import ChainPlan
from multistage.planners.chain.joint_rule import Accepts, DeadlineRule, Detour


def run_late(
    plan: ChainPlan,
    slower: float,
    *,
    rule: DeadlineRule | None,
    cancels: bool = True,
) -> tuple[Judge, Detour | None]:
    """Return the judge after the run, and the detour taken.

    The rule is asked where an eviction would wait and at the turn; it knows how slow the
    tier is once a write has ended.
    """
    judge, ended = Judge(plan.costs, plan.tier, (slower, slower)), 0
    for at, action in enumerate(plan.actions):
        if rule is not None and not judge.ended:
            evicts = isinstance(action, Evict)
            late = isinstance(action, EndForward) and slower > 1
            if evicts and judge.done[(action.step, action.tape), 0] > judge.now + 1e-12:
                late = True
            if late:
                known = slower if ended else math.inf
                detour = rule.at_deadline(at, known, cancels=cancels)
                if detour is not None:
                    return go_on(judge, detour), detour
            ended += evicts
        judge.apply(action)
        judge.at_peak()
    return judge, None


def go_on(judge: Judge, detour: Detour) -> Judge:
    """Return the judge after a detour."""
    for step in detour.save:
        assert judge.at_hand(step)
        judge.saved.add(step)
    for step in detour.discard:
        judge.tapes.remove(step)
        judge.pinned.discard(step)
    judge.at_peak()
    return judge.run(detour.actions)


class LateWrites:
    """The writes of a judge's run, as `Deadlines` asks for them: page by page, in virtual time.

    Parameters
    ----------
    judge : Judge
    slower : float
        Its tier is so many times slower than planned.
    computed_s : callable
        `computed_s(at)`: seconds of computing before an action of the plan.
    """

    def __init__(
        self, judge: Judge, slower: float, computed_s: Callable[[int], float], pages: int = 16
    ) -> None:
        self._judge, self._slower, self._pages = judge, slower, pages
        self._computed_s, self._put_s = computed_s, dict[int, float]()
        self.at = 0

    def put(self, step: int) -> None:
        """Note when a state is put."""
        self._put_s[step] = self._judge.now

    def _spans(self) -> Iterator[tuple[float, float]]:
        before = 0.0
        for step, put_s in self._put_s.items():
            ends = self._judge.done[(step, False), 0]
            yield max(put_s, before), ends
            before = ends

    def _took(self) -> tuple[float, float]:
        took_s = planned_s = 0.0
        for begins, ends in self._spans():
            if begins <= self._judge.now:
                page_s = (ends - begins) / self._pages
                done = min(self._pages, int((self._judge.now - begins) / page_s + 1e-9))
                took_s, planned_s = took_s + done * page_s, planned_s + done * page_s / self._slower
                if done < self._pages:
                    since_s = self._judge.now - begins - done * page_s
                    took_s += max(page_s / self._slower, since_s)
                    planned_s += page_s / self._slower
        return took_s, planned_s

    def written(self, step: int, tape: bool, timeout_s: float) -> bool:
        """Wait for a write, no longer than so many seconds."""
        ends = self._judge.done[(step, tape), 0]
        self._judge.now = max(self._judge.now, min(ends, self._judge.now + timeout_s))
        return ends <= self._judge.now + 1e-12

    def slower(self, tier: object) -> float:
        """Return the seconds that pages took over those planned."""
        took_s, planned_s = self._took()
        return max(1.0, took_s / planned_s) if planned_s else 1.0

    def seen_s(self) -> float:
        """Return the seconds of writing so far."""
        return self._took()[0]

    def computed_s(self) -> float:
        """Return the seconds of computing so far: as planned."""
        return self._computed_s(self.at)

    def under_way_bytes(self) -> int:
        """Return something."""
        return 1

    def cancel(self, timeout_s: float) -> bool:
        """Wait for the page in flight."""
        now = self._judge.now
        for begins, ends in self._spans():
            if begins <= now < ends:
                page_s = (ends - begins) / self._pages
                pages = int((now - begins) / page_s) + 1
                self._judge.now = min(ends, begins + pages * page_s)
        return True

    def resume(self) -> bool:
        """Nothing was given up for good."""
        return False


def run_asking(plan: ChainPlan, slower: float, accepts: Accepts) -> tuple[Judge, Action | None]:
    """Return the judge after a run that asks `Deadlines`, and where it left its plan."""
    assert plan.tier is not None
    judge = Judge(plan.costs, plan.tier, (slower, slower))
    asked = Deadlines(plan, ask_s=0.0, accepts=accepts)
    writes = LateWrites(judge, slower, asked._forward_s)
    for at, action in enumerate(plan.actions):
        detour, writes.at = None, at
        match action:
            case Put(step):
                detour = asked.at_put(at, writes)
                writes.put(step)
            case Evict(step, _, tape):
                detour = asked.at_eviction(at, step, tape, writes)
            case EndForward():
                detour = asked.at_turn(writes)
        if detour is not None:
            return go_on(judge, detour), action
        judge.apply(action)
        judge.at_peak()
    return judge, None
