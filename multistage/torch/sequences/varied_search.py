"""The best cuts of steps that differ, within a limit."""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from ...actions import Evict, Put, Reverse, Tape
from ...backends.base import Store
from ...errors import BudgetError, StoreError
from ...model.stages import StageCosts
from ...model.tier import Tier
from ...planners.chain.heterogeneous import plan_chain
from ...planners.chain.pieces import MOST_AT_ONCE, plan_within
from ...planners.chain.plan import ChainPlan
from ...reversing.streamed import (
    MOST_STREAMED,
    bounded,
    largest_of,
    measured_rates,
    probe_bytes,
    require_room,
)
from ...support.units import format_bytes
from .chunks import Steps
from .planning import Memory, Settings
from .unroll_plan import UnrollPlanner

# How many chunks are tried; more only where these do not fit.
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192)
_MORE_COUNTS = (400, 1000, 3000, 10_000, 100_000)
_COARSE, _FINE = 100, 500  # slots of memory of the dynamic program
_STREAMED = 96  # chunks at most that a tier is planned for, unless more are asked for
# Parts of the limit at which a plan is sought that writes, where none of it pays.
_LESS = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.1)
_rates: Memory[Tier] = Memory()


@dataclass(frozen=True, slots=True)
class Found:
    """A plan that fits."""

    seconds: float
    peak_bytes: int
    planner: str
    cuts: tuple[int, ...]
    chain: ChainPlan | None = None

    @property
    def longest(self) -> int:
        """Steps of the longest chunk."""
        return max((b - a for a, b in itertools.pairwise(self.cuts)), default=1)


class Search:
    """Looks for the best cuts of the steps within a limit."""

    def __init__(self, steps: Steps, memory: int, chunk: int | None) -> None:
        self._steps, self._memory, self._chunk = steps, memory, chunk
        # The caller holds the last state from the end of the forward sweep on.
        self._held = steps.stages[-1].output_bytes
        # Limits that plans would need, and the cuts of those with a tier.
        self._least: list[tuple[int, tuple[int, ...]]] = []
        self._streams: Callable[[tuple[int, ...], int], Found | None] | None = None

    def _cuts(self, counts: Iterable[int]) -> Iterator[tuple[int, ...]]:
        """Yield ways to cut the steps, each once."""
        if self._chunk is not None:
            yield tuple(self._steps.equal_cuts(min(self._chunk, len(self._steps))))
            return
        seen = set()
        for count in counts:
            cuts = tuple(self._steps.cuts(min(count, len(self._steps))))
            if cuts not in seen:
                seen.add(cuts)
                yield cuts

    def recomputed(self) -> list[Found]:
        """Return plans without a tier, the best way to cut first."""
        found = self._tried(_COUNTS, _COARSE)
        if not found and self._chunk is None:
            for count in _MORE_COUNTS:
                found = self._tried((count,), _COARSE)
                if found or count >= len(self._steps):
                    break
            return found
        if not found or self._chunk is not None:
            return self._tried(_COUNTS, _FINE) or found
        # Once more with finer memory, near the best.
        best = min(found, key=lambda entry: entry.seconds)
        count = len(best.cuts) - 1
        near = {count, max(1, count * 3 // 4), count * 4 // 3}
        finer = self._tried(sorted(c for c in near if c <= MOST_AT_ONCE), _FINE)
        known = {entry.cuts for entry in finer}
        found = finer + [entry for entry in found if entry.cuts not in known]
        return sorted(found, key=lambda entry: entry.seconds)

    def _tried(self, counts: Iterable[int], slots: int) -> list[Found]:
        found = []
        for cuts in self._cuts(counts):
            costs = self._steps.chained(cuts)
            try:
                with _beside(self._held):
                    plan = plan_within(costs, max(1, self._memory - self._held), slots=slots)
            except BudgetError as error:
                self._fell_short(error)
                continue
            found.append(self._entry(plan, "recompute", cuts, 0))
        return found

    def _fell_short(self, error: BudgetError, cuts: tuple[int, ...] = ()) -> None:
        if error.least_bytes is not None:
            heapq.heappush(self._least, (error.least_bytes, cuts))

    def _entry(self, plan: ChainPlan, planner: str, cuts: tuple[int, ...], buffers: int) -> Found:
        peak = plan.peak_bytes + self._held + buffers
        return Found(plan.makespan_s, peak, planner, cuts, plan)

    def streamed(
        self,
        store: Store,
        settings: Settings,
        recomputed: Sequence[Found],
        *,
        by_name: bool,
    ) -> list[Found]:
        """Return plans that write states to a tier."""
        self._streams = partial(self._streamed, store, settings, by_name)
        if by_name:
            self._least.clear()  # the limits of plans without a tier, which are not asked for
        found = self._streamed_by(recomputed, by_name)
        if not found and by_name and recomputed:
            found = self._streamed_by((), by_name)
        return found

    def _streamed_by(self, recomputed: Sequence[Found], by_name: bool) -> list[Found]:
        assert self._streams is not None
        found = []
        for cuts in self._streamed_cuts(recomputed):
            try:
                if (entry := self._streams(cuts, self._memory)) is not None:
                    found.append(entry)
            except BudgetError as error:
                self._fell_short(error, cuts)
            except StoreError:
                if by_name:
                    raise
        return found

    def _streamed(
        self,
        store: Store,
        settings: Settings,
        by_name: bool,
        cuts: tuple[int, ...],
        memory: int,
    ) -> Found | None:
        """Return a plan by some cuts that writes to a tier, None if the best one does not.

        Raises
        ------
        BudgetError, StoreError
            If there is none within `memory`, or the tier lacks room.
        """
        costs = self._steps.chained(cuts)
        buffers = store.buffer_bytes(largest_of(costs))
        room = memory - self._held - buffers
        require_room(store, costs)
        nbytes = probe_bytes(costs)
        rates = _rates.got((settings.tiers, nbytes), lambda: measured_rates(store, nbytes))
        rates = bounded(rates, store, costs)
        with _beside(self._held + buffers):
            plan = _streaming(costs, room, rates, by_name=by_name)
            if _pins(plan):
                plan = _streaming(_with_inputs(costs), room, rates, by_name=by_name)
        return self._entry(plan, "stream", cuts, buffers) if _writes(plan) else None

    def _streamed_cuts(self, recomputed: Sequence[Found]) -> Iterator[tuple[int, ...]]:
        if self._chunk is not None or not recomputed:
            counts: Iterable[int] = [c for c in _COUNTS if 1 < c <= _STREAMED]
        else:
            best = min(_STREAMED, len(recomputed[0].cuts) - 1)
            counts = sorted({max(2, best // 2), max(2, best), min(_STREAMED, max(4, 2 * best))})
        for cuts in self._cuts(counts):
            if 2 < len(cuts) <= MOST_STREAMED + 1:
                yield cuts

    def too_small(self, planner: UnrollPlanner) -> BudgetError:
        """Return the error that says that nothing fits."""
        least = self._smallest()
        if least is None:
            return BudgetError(
                f"planner {planner!r} has no state to write: the steps make one chunk, or the "
                "tier holds no state; give a smaller chunk or a larger tier, or use 'auto'"
            )
        return BudgetError.below(
            f"memory={self._memory} bytes < {least} bytes ({format_bytes(least)}), the smallest "
            "limit that works here; raise the limit, or give a smaller chunk",
            least,
        )

    def _smallest(self) -> int | None:
        """Return the smallest limit that works, None if none is known.

        With a tier a plan made at the limit that another one lacked may fail in its own way:
        a state that leaves while a graph holds it counts twice, and there may be nothing to
        write.  So it is made before the limit is named.
        """
        while self._least:
            least, cuts = heapq.heappop(self._least)
            if not cuts:
                return least
            assert self._streams is not None
            try:
                if self._streams(cuts, least) is not None:
                    return least
            except BudgetError as error:
                if error.least_bytes is not None and error.least_bytes > least:
                    self._fell_short(error, cuts)
            except StoreError:
                pass
        return None


@contextlib.contextmanager
def _beside(nbytes: int) -> Iterator[None]:
    """Count bytes that are held beside a plan to the limit that its BudgetError names."""
    try:
        yield
    except BudgetError as error:
        if error.least_bytes is None:
            raise
        raise BudgetError.below(str(error), error.least_bytes + nbytes) from error


def seen_slower(settings: Settings, costs: StageCosts, slowed: Callable[[Tier], Tier]) -> None:
    """Take states to travel as `slowed` makes of their rates, in plans to come."""
    key = settings.tiers, probe_bytes(costs)
    rates = _rates.get(key)
    if rates is not None:
        _rates.put(key, slowed(rates))


def _streaming(costs: StageCosts, room: int, rates: Tier, *, by_name: bool) -> ChainPlan:
    """Return a plan with a tier; by name one that writes, if there is one.  Raises BudgetError."""
    plan = plan_chain(costs, max(1, room), tiers=rates, progress=False)
    if by_name and not _writes(plan):
        plan = _made_to_write(plan, room, rates) or plan
    return plan


def _pins(plan: ChainPlan) -> bool:
    """Whether a state leaves for the tier while the graph that starts from it is held.

    The graph refers to its input, so that the state's memory would not be free.
    """
    held: set[int] = set()
    for action in plan.actions:
        match action:
            case Tape(step):
                held.add(step)
            case Reverse(step):
                held.discard(step)
            case Evict(step, tape=False) if step in held:
                return True
    return False


def _with_inputs(costs: StageCosts) -> StageCosts:
    """Return costs where a graph holds its input too, which may count twice then."""
    stages = costs.stages
    found = [
        replace(stage, tape_bytes=stage.tape_bytes + (stages[k - 1].output_bytes if k else 0))
        for k, stage in enumerate(stages)
    ]
    return replace(costs, stages=tuple(found))


def _writes(plan: ChainPlan) -> bool:
    return any(isinstance(action, Put) for action in plan.actions)


def _made_to_write(kept: ChainPlan, room: int, rates: Tier) -> ChainPlan | None:
    """Return a plan that writes though it does not pay, None if there is none."""
    free = replace(
        rates, write_s=0.0, read_s=0.0, write_bytes_per_s=math.inf, read_bytes_per_s=math.inf
    )
    for part in _LESS:
        limit = max(1, int(part * min(room, kept.peak_bytes)))
        with contextlib.suppress(BudgetError):
            plan = plan_chain(kept.costs, limit, tiers=free, progress=False)
            if _writes(plan):
                plan = replace(plan, tier=rates, memory_bytes=room)
                use = plan.simulate()
                return replace(plan, makespan_s=use.makespan_s, stall_s=use.stall_s)
    return None
