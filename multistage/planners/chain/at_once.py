"""Chains of stages that are planned as a whole: by tables whose memory is known beforehand.

`planners.chain.heterogeneous` tells the algorithms, and plans longer chains in pieces.

Tables are solved for a fixed ladder of memory limits, so that more memory is never
slower; a lower bound says where the search may stop.  It is the dual of
`planners.chain.joint_bound` without transfers, with one price: of a byte kept when the
adjoint of the last stage starts.  What is kept then is so counted to the byte; what is
recomputed later comes from a table of few slots, sizes rounded down.  Rounding down alone
says little where stages are nearly as many as slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Literal

import numpy as np

from ... import native
from ...actions import Action
from ...model.stages import StageCosts
from ...model.tier import Tier
from ...support.progress import counting
from ..base import Plan, plain_use, store_all_schedule
from .joint import plan_joint, smallest_with_tier
from .joint_bound import Dual, without_loss
from .memory import actions_of, periodic, too_small, ways_of
from .nested import middling, plan_nested
from .sizes import Sizes
from .table import FLOAT_ERROR, MORE, Table, Trace, default_threads, judge, smallest

# What `plan_chain` offers; plans that `pieces` makes of chains too long for it or not known.
ChainPlanner = Literal["auto", "optimal", "revolve", "periodic", "store-all", "pieces", "survey"]
NO_TIER, OFFLOADING = "no tier", "every tape to the tier"  # of candidates
CHAIN_PLANNERS: tuple[ChainPlanner, ...] = ("auto", "optimal", "revolve", "periodic", "store-all")

_BOUND_SLOTS = 100
# Of all forward seconds, for a limit's bytes; the bound is concave in it.
_PRICES = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0)
_NO_TIER = Tier.of_rates(1.0, 1.0)


class ChainBound:
    """Seconds that no schedule without a tier undercuts, for any memory up to a limit.

    Parameters
    ----------
    whole : Sizes
        In bytes, the loss included.
    limit : int
        Bytes, at least 1, the chain's input not counted.
    tapes : bool
        Whether tapes may be kept; see `Table`.
    threads : int
    tick : callable, optional
        Called `Table.calls_of(_BOUND_SLOTS)` times by the C kernel.
    """

    def __init__(
        self,
        whole: Sizes,
        limit: int,
        *,
        tapes: bool = True,
        threads: int = 1,
        tick: Callable[[], object] | None = None,
    ) -> None:
        true = without_loss(whole)
        self._true, self._limit = true, limit
        self._dual = Dual(true, limit, _NO_TIER, min(_BOUND_SLOTS, limit), threads)
        table = Table(self._dual.sizes, self._dual.slots, tapes=tapes, threads=threads, tick=tick)
        self._planes = table.planes()
        n = len(true)
        self._state, self._tape = (x[:n].astype(float) for x in (true.state, true.tape))
        if not tapes:
            self._tape[:-1] = math.inf
        self._forward_s = float(true.forward_s.sum())
        self._plain_s = self._forward_s + float(true.reverse_s.sum())
        self._last = int(true.tape[-1] + true.gradient[-1] + true.gradient[-2] + true.reverse[-1])
        self._at = _PRICES.index(0.5)

    def seconds(self, memory: int) -> float:
        """Return the bound for `memory` bytes, at most the limit; infinite if nothing fits."""
        found = {self._at: self._value(self._at, memory)}
        if math.isinf(found[self._at]):
            return math.inf

        def value(at: int) -> float:
            if at not in found:
                found[at] = self._value(at, memory) if 0 <= at < len(_PRICES) else -math.inf
            return found[at]

        for step in (-1, 1):
            while value(self._at + step) > value(self._at):
                self._at += step
        return value(self._at)

    def _value(self, at: int, memory: int) -> float:
        price = _PRICES[at] * self._forward_s / self._limit
        slots = memory * self._dual.slots // self._limit
        never, free = np.full(len(self._true), math.inf), np.zeros(len(self._true))
        with np.errstate(invalid="ignore"):
            fast_tape = np.where(np.isinf(self._tape), math.inf, price * self._tape)
        prices = (price * self._state, fast_tape, never, never, never, never, free, free)
        least = self._dual.least(1.0, self._planes, prices, slots)
        if math.isinf(least):
            return least
        rounding = self._dual.rounding(1.0, least)
        return self._plain_s + least - price * (memory - self._last) - rounding


# Ratio of neighbouring rungs of the ladder of limits.
_RUNG = 1.3
# Of a rung's slots, if sizes are rounded less by it.
_FINER = 1.15


class Ladder:
    """The rungs of limits that tables are solved for.

    Rung k stands for `whole / 1.3^k` bytes, which are cut into about `slots`.  Its
    schedules are those of its table whose true peak is at most 1.15 times
    that; so a rung's schedules do not depend on the limit asked for.
    """

    def __init__(self, true: Sizes, whole: int, slots: int, tapes: bool, threads: int) -> None:
        self.true, self.whole, self.slots = true, max(1, whole), slots
        self.tapes, self.threads = tapes, threads
        self._first: Table | None = None

    def first(self, limit: int) -> tuple[Table, float]:
        """Return the table of the highest rung for a limit, and the bytes of its slots."""
        top = self._top(limit)
        self._first = self._table(top, lambda: None)
        return self._first, self._unit(top)

    def _top(self, limit: int) -> float:
        rung = max(0, math.floor(math.log(self.whole / max(1, limit)) / math.log(_RUNG)))
        return float(self.whole / _RUNG**rung)

    def best(self, limit: int, least: Trace, progress: bool | None = False) -> Trace:
        """Return the fastest schedule with a true peak of at most `limit` bytes.

        `least` is one that fits.  The chain's input is not counted.
        """
        best = least
        best_s, least_peak = judge(self.true, least)
        top = self._top(limit)
        more = int(self.slots * MORE * _FINER)
        rungs = 1 + max(0, int(math.log(max(1.0, top * MORE / max(1, least_peak)), _RUNG)))
        calls = Table.calls_of(_BOUND_SLOTS) + rungs * Table.calls_of(more)  # at most
        with counting("solving", calls, progress) as tick:
            return self._best(limit, (best, best_s, least_peak), top, lambda: tick(""))

    def _best(
        self, limit: int, least: tuple[Trace, float, int], top: float, tick: Callable[[], object]
    ) -> Trace:
        best, best_s, least_peak = least
        bound = None  # which spares solving rungs, if there is the C core
        if native.LIBRARY is not None:
            bound = ChainBound(
                self.true.lightest(),
                max(1, limit),
                tapes=self.tapes,
                threads=self.threads,
                tick=tick,
            )
        margin_s = FLOAT_ERROR * float(self.true.forward_s.sum())
        while top * MORE >= max(1, least_peak):
            cap = min(limit, math.floor(top * MORE))
            if bound is not None and bound.seconds(cap) - margin_s >= best_s:
                break  # and so it is for all rungs below
            table = self._first or self._table(top, tick)
            self._first = None
            seconds, memory = table.fastest(self.true, cap)
            if seconds < best_s:
                trace = table.trace(memory)
                assert trace is not None
                best, best_s = trace, seconds
            del table  # before the next is made
            top /= _RUNG
        return best

    def _unit(self, top: float) -> float:
        """Return the bytes of a slot of a rung.

        Another than `top / slots`, by half at most, only if it rounds tapes by less
        than half as much: where stages are equal.
        """
        sizes = self.true.tape.astype(float)
        units = top / self.slots * np.append(1.0, np.geomspace(1 / _FINER, 1.5, 48))
        off = [float(np.abs(np.rint(sizes / unit) * unit - sizes).sum()) for unit in units]
        at = int(np.argmin(off))
        return float(units[at] if off[at] < off[0] / 2 else units[0])

    def _table(self, top: float, tick: Callable[[], object]) -> Table:
        unit = self._unit(top)
        sizes = self.true.in_slots(unit)
        slots = int(top * MORE / unit)
        return Table(sizes, slots, tapes=self.tapes, threads=self.threads, tick=tick)


SLOTS = 500
# Of a table: one of some 1000 stages and `SLOTS` slots, which takes some 10 s to solve.
_TABLE_BYTES = 5 << 28


def table_bytes(stages: int, resolution: int) -> int:
    """Return about the bytes of a chain's table."""
    return (stages + 1) * (stages + 2) // 2 * int(4 * MORE * resolution)


def most_stages(resolution: int = SLOTS) -> int:
    """Return the stages of the longest chain that is planned as a whole.

    Examples
    --------
    >>> most_stages()
    1078
    """
    return max(1, int(math.sqrt(2 * _TABLE_BYTES / (4 * MORE * resolution))) - 2)


def plan_at_once(
    costs: StageCosts,
    limit: int | None,
    planner: ChainPlanner = "optimal",
    rates: Tier | None = None,
    *,
    segments: int | None = None,
    resolution: int = SLOTS,
    threads: int | None = None,
    progress: bool | None = False,
) -> Plan:
    """Return the plan of a chain within a limit in bytes; see `plan_chain`."""
    costs, given = costs.whole, costs
    plain = plain_use(costs)
    fits = limit is None or plain.peak_bytes <= limit

    def made(actions: Iterable[Action], tier: Tier | None = None) -> Plan:
        return Plan.judged(planner, costs, limit, actions, tier)

    if planner == "store-all" or (planner == "optimal" and fits):
        if not fits:
            raise too_small(planner, limit, plain.peak_bytes)
        best = made(store_all_schedule(len(costs.stages)))  # which no tier makes faster
        return best if rates is None else beside(best, rates, best)
    if planner == "periodic":
        return made(periodic(costs, limit, segments))
    tapes = planner == "optimal"
    true = Sizes.of(costs)
    if tapes and rates is None:
        true = true.with_ways(given)
    least, trace = smallest(true, tapes=tapes)
    if rates is not None:
        true = Sizes.beside_a_tier(costs)
    fewest = least if rates is None else min(least, smallest_with_tier(true, rates))
    if limit is not None and limit < fewest + costs.input_bytes:
        raise too_small(planner, limit, fewest + costs.input_bytes)
    # Revolve has all its states and one tape at most.
    whole = plain.peak_bytes if tapes else _all_states(true)
    within = (whole if limit is None else min(limit, whole)) - costs.input_bytes
    ladder = Ladder(true, whole, resolution, tapes, threads or default_threads())
    # Before the ladder, which frees the first rung's table.
    away = () if rates is None else plan_joint(true, *ladder.first(within), within, rates)
    rivals: list[Plan | None] = [None]  # without the tier, joint, every tape to the tier
    if within >= least:
        trace = ladder.best(within, trace, progress)
        rivals[0] = Plan.judged(planner, given.by(ways_of(trace)), limit, actions_of(trace))
        if finer := _finer(true, within, resolution, tapes):
            rivals[0] = fastest([rivals[0], made(finer)])
    rivals += [None if actions is None else made(actions, rates) for actions in away]
    best = fastest(rivals)  # every state in the tier fits, where nothing else does
    if rates is None:
        return best
    without, _, offloading = rivals
    return beside(best, rates, without, offloading)


def _finer(true: Sizes, within: int, resolution: int, tapes: bool) -> list[Action] | None:
    """Return another plan if states are less than a slot, as they count as nothing there."""
    coarse = resolution * middling(true) < within
    return plan_nested(true, within, tapes=tapes) if coarse else None


def fastest(plans: Iterable[Plan | None]) -> Plan:
    """Return the fastest plan, of those as fast the first."""
    return min((plan for plan in plans if plan is not None), key=lambda plan: plan.makespan_s)


def least_memory(costs: StageCosts, planner: ChainPlanner = "optimal") -> int:
    """Return the smallest limit, in bytes, within which the chain can be reversed."""
    least, _ = smallest(Sizes.of(costs), tapes=planner == "optimal")
    return least + costs.input_bytes


def beside(best: Plan, rates: Tier, without: Plan | None, offloading: Plan | None = None) -> Plan:
    """Return a plan with a tier beside those without it and with every tape sent there."""
    best, rivals = replace(best, tiers=(rates,)), {NO_TIER: without, OFFLOADING: offloading}
    candidates = [
        replace(plan, planner=name, tiers=(rates,))
        for name, plan in rivals.items()
        if plan is not None
    ]
    return replace(best, candidates=(best, *candidates))


def _all_states(true: Sizes) -> int:
    """Return what Revolve takes with every state in memory, or more."""
    one = max(
        int(true.tape[i] + true.gradient[i] + true.gradient[i + 1])
        + max(int(true.advance[i]), int(true.taping[i]), int(true.reverse[i]))
        for i in range(len(true))
    )
    return one + sum(int(x) for x in true.state)
