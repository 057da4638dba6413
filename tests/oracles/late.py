"""A plan run in virtual time on a tier slower than planned, with the deadline rule or without."""

from __future__ import annotations

import math
from collections.abc import Callable

from chain_judge import Judge

from multistage.actions import EndForward, Evict
from multistage.planners.chain.heterogeneous import ChainPlan
from multistage.planners.chain.joint_rule import Accepts, DeadlineRule, Detour


def run_late(
    plan: ChainPlan,
    slower: float,
    *,
    rule: DeadlineRule | None,
    cancels: bool = True,
    accepting: Callable[[int, int], Accepts] | None = None,
    pages: float = math.inf,
) -> tuple[Judge, Detour | None]:
    """Return the judge after the run, and the detour taken.

    The rule is asked where an eviction would wait and at the turn; it knows how slow the
    tier is once a write has ended.

    Parameters
    ----------
    accepting : callable, optional
        `accepting(at, live)`: which detours can be taken there.
    pages : float
        What is being written is cancelled after this part of it.
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
                accepts = accepting and accepting(at, judge.live)
                detour = rule.at_deadline(at, known, cancels=cancels, accepts=accepts)
                if detour is not None:
                    ends = [s for (_, channel), s in judge.done.items() if not channel]
                    left = min((s - judge.now for s in ends if s > judge.now), default=0.0)
                    judge.now += left / pages
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
