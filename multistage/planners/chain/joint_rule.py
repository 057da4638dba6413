"""What to do when a tier is slower than a plan has it: the deadline rule.

A plan evicts a thing when memory is short, and waits for its write.  A slow
tier makes all of them wait, and a plan that waits may take longer than one
that never used the tier.  The rule: the first eviction of the forward sweep
that would wait is the deadline, at the latest the end of the sweep.  From there
on nothing more is written.  What is held then, every tape made and not yet
evicted, is a superset of what most plans would hold; so the rest is planned
again, at the speed measured:

* what has been evicted is read back or made again, the oldest first to be read;
* tapes that are held stay, or are discarded, their stages made again later;
* the stages to come follow the optimum without the tier, or RR-9302 in the room left.

Some hundreds of such plans are judged in virtual time, the best are improved by
changing one stage at a time, or two, and waiting is chosen where it is faster.  On tiers
1.5, 3 and 10 times slower than planned the slowest run took 2.1 % more than the optimum
without the tier; memory holds at any speed.

Writes not begun are cancelled, and the one in flight where it can be; else what it reads
takes room until the end.  Every detour is judged by the legality machine, within the
plan's limit.  Known gaps: nothing is written after the deadline, though a tier 1.5 times
slower still helps (plan again between iterations, from what was measured); a tier whose
reads alone are late only waits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from ...actions import (
    EndForward,
    Evict,
    Put,
)
from ...errors import ArgumentError, BudgetError, ScheduleError
from ...model.tier import Tier
from ...support.values import number
from .heterogeneous import ChainPlan, plan_chain
from .joint_choice import Choice, fates_of
from .joint_core import Core, actions_of_laid
from .joint_detour import Detour as Detour
from .joint_detour import Held, first_to_wait, joined, judged, replayed, seconds_with
from .memory import use_of
from .sizes import Sizes
from .table import Table

Accepts: TypeAlias = Callable[[int, Detour, int], bool]

_SLOTS, _MORE = 400, 1.13
_LONG, _FEWER = 100, 150  # stages, and the slots of longer chains: tables grow as squares


def rates_when(tier: Tier, slower: float) -> Tier:
    """Return a tier so many times slower; one that moves nothing, if infinitely so."""
    return replace(tier.slower(min(slower, 1e6)), capacity_bytes=None)


class DeadlineRule:
    """The rule for one plan; made once, asked while it runs.

    Parameters
    ----------
    plan : ChainPlan
        With a tier and a limit.

    Raises
    ------
    ArgumentError
        For a plan without a tier.

    Notes
    -----
    Takes as long as one table of RR-9302 and a plan without the tier.
    """

    def __init__(self, plan: ChainPlan) -> None:
        if plan.tier is None or plan.memory_bytes is None:
            raise ArgumentError("the deadline rule goes with a plan that has a tier and a limit")
        self.plan, self.rates = plan, plan.tier
        self.true = true = Sizes.of(plan.costs)
        self.limit = plan.memory_bytes - plan.costs.input_bytes
        slots = _SLOTS if len(true) <= _LONG else _FEWER
        self.unit = max(1, self.limit) / slots
        self.table = Table(true.in_slots(self.unit), int(_MORE * slots))
        try:
            alone = plan_chain(plan.costs, plan.memory_bytes)
        except BudgetError:
            self.alone = None
        else:
            self.alone = fates_of(alone.actions, len(true))

    def at_deadline(
        self,
        at: int,
        slower: float = math.inf,
        *,
        cancels: bool = True,
        accepts: Accepts | None = None,
    ) -> Detour | None:
        """Return how to continue from `plan.actions[at]`, None to wait.

        Parameters
        ----------
        at : int
            An `Evict` of the forward sweep whose write is not done, a `Put` that would wait
            for others, or its `EndForward` where writes are late.
        slower : float
            Seconds that transfers took over those planned; infinite if none has ended:
            then nothing is read back either.
        cancels : bool
            Whether a write in flight can be cancelled, as between two pages; if not,
            what is being written takes its room to the end.
        accepts : callable, optional
            `accepts(at, detour, memory_bytes)`: whether a detour can be taken within a limit,
            asked of legal ones, the fastest first.

        Raises
        ------
        ArgumentError
            If `at` is neither, or `slower` is below 1.
        """
        plan, actions = self.plan, self.plan.actions
        if not 0 <= at < len(actions) or not isinstance(actions[at], Evict | Put | EndForward):
            raise ArgumentError(
                f"at={at} must be the index of an Evict, Put or EndForward of the plan"
            )
        if slower != math.inf and number(slower, "slower", "times as long") < 1:
            raise ArgumentError(f"slower={slower} must be at least 1")
        if EndForward() in actions[:at]:
            return None
        rates = rates_when(self.rates, slower)
        held = Held.by(actions[:at], plan.costs)
        limit = self.limit
        if not cancels and held.written:
            limit -= held.bytes_of(held.written[0], self.true)
        core = Core(self.true, self.table, self.unit, limit, rates)
        waiting_s = math.inf
        if slower < math.inf:
            waiting_s = use_of(actions, plan.costs, (rates,)).makespan_s
        found: list[Detour] = []
        for fates in Choice(self.plan.actions, self.alone, core, held).best():
            whole = actions_of_laid(core.lay_out(fates), self.table)
            detour = joined(whole, held, plan.costs)
            if detour is None:
                continue
            seconds = seconds_with(self.true, rates, actions[:at], detour.actions)
            if seconds < waiting_s:
                found.append(replace(detour, makespan_s=seconds, waiting_s=waiting_s))
        spare = plan.memory_bytes - (self.limit - limit)  # type: ignore[operator]
        for detour in sorted(found, key=lambda each: each.makespan_s):
            with contextlib.suppress(ScheduleError):
                judged(replayed(actions[:at], plan.costs), detour, spare)
                if accepts is None or accepts(at, detour, spare):
                    return detour
        return None

    def first_to_wait(self, slower: float) -> int:
        """Return the index of the first eviction that waits on a tier so many times slower.

        Of the `EndForward`, if none does.
        """
        return first_to_wait(self.true, rates_when(self.rates, slower), self.plan.actions)
