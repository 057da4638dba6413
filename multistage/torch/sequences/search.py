"""The plan of a sequence: the fastest of all planners and ways to cut the steps that fit.

Equal steps are cut into chunks of one size, planned in closed forms for any number of them;
steps that differ into chunks that are planned as a chain.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...actions import Evict, Reverse, Tape
from ...backends.base import Store
from ...errors import ArgumentError, BudgetError, StoreError
from ...measurement.driver import action_seconds
from ...model.budget import Budget
from ...model.costs import Costs
from ...model.stages import StageCosts
from ...model.tier import Tier
from ...planners import Plan, plan
from ...planners.base import BUFFERS
from ...planners.chain.heterogeneous import plan_chain
from ...planners.chain.joint_core import require_core
from ...planners.chain.pieces import MOST_AT_ONCE, plan_within
from ...planners.streaming.interval import shortest_interval
from ...reversing.streamed import (
    bounded,
    largest_of,
    measured_rates,
    probe_bytes,
    require_room,
)
from ...support.units import format_bytes
from ..tensors.states import TensorLayout
from ..tiers.paging import PAGE_BYTES
from .costs import LEAST, Cost, Steps, beyond_free, node_bytes
from .remembered import KNOWN
from .through_time import Computation
from .unroll_plan import UnrollPlan

TRAVELS_BYTES = 256 << 10  # tapes' tensors of at least this travel
_AS_GOOD = 1.02  # plans within this factor tie
# How many chunks are tried; more only where these do not fit.
_COUNTS = (1, 2, 4, 8, 16, 32, 64, 96, 128, 192)
_MORE_COUNTS = (400, 1000, 3000, 10_000, 100_000)
_STREAMED = 96  # chunks at most that a tier is planned for, unless more are asked for
# Parts of the limit at which a plan is sought that writes, where none of it pays.
_LESS = (1.0, 0.8, 0.65, 0.5, 0.4, 0.3, 0.2, 0.1)


@dataclass(frozen=True, slots=True)
class Found:
    """A plan that fits: of plain autograd, or with a schedule of chunks."""

    seconds: float
    peak_bytes: int
    planner: str
    chunk: int = 1
    plan: Plan | None = None
    cuts: tuple[int, ...] = ()


def choose(ways: Equal | Unequal, memory: int) -> UnrollPlan:
    """Return the fastest plan that fits, of all planners and ways to cut the steps.

    Raises
    ------
    ArgumentError
        For planner "offload", if tapes cannot travel.
    BudgetError
        If none fits; the message names the smallest limit that works, as far as is known.
    """
    planner, n_steps = ways.given.settings.planner, ways.given.inputs.steps
    keep = ways.keep_bytes
    if planner == "keep" and keep > memory:
        raise BudgetError(
            f"plain autograd takes {keep} bytes ({format_bytes(keep)}) for {n_steps} steps, "
            f"more than the limit of {memory}; use planner='auto'"
        )
    if planner in ("auto", "keep") and keep <= memory:  # nothing is faster
        found = [Found(ways.keep_s, keep, "keep")]
    else:
        found = ways.found(memory)
    if not found:
        raise _nothing_fits(planner, n_steps, memory, ways.smallest())
    found.sort(key=lambda entry: entry.seconds)
    # Of those as good, the one that takes the least memory.
    as_good = [entry for entry in found if entry.seconds <= _AS_GOOD * found[0].seconds]
    best = min(as_good, key=lambda entry: entry.peak_bytes)
    return UnrollPlan(
        planner=best.planner,
        n_steps=n_steps,
        chunk=best.chunk,
        memory_bytes=memory,
        peak_bytes=best.peak_bytes,
        makespan_s=best.seconds,
        keep_bytes=keep,
        plan=best.plan,
        alternatives=tuple((e.planner, e.chunk, e.seconds, e.peak_bytes) for e in found),
        cuts=best.cuts,
    )


def _nothing_fits(planner: str, n_steps: int, memory: int, least: int | None) -> BudgetError:
    """Return the error that says why there is no plan."""
    if least is None or memory >= least:
        return BudgetError(
            f"planner {planner!r} has no state to write: n_steps={n_steps} is one chunk, or the "
            "tier holds no state; give a smaller chunk or a larger tier, or use 'auto'"
        )
    return BudgetError.below(
        f"memory={memory} bytes < {least} bytes ({format_bytes(least)}), the smallest "
        "limit that works here; raise the limit, or give a smaller chunk",
        least,
    )


@dataclass(slots=True)
class Equal:
    """Plans of equal steps: for each size of chunk one by closed forms."""

    given: Computation
    samples: Sequence[Cost]  # of chunks of several sizes
    layout: TensorLayout
    store: Store | None
    tier: Tier | None = None  # as states see it
    page: Tier | None = None  # as pages of tapes see it; None where they do not travel
    _least: list[int] = field(default_factory=list)

    @property
    def keep_bytes(self) -> int:
        """What plain autograd takes."""
        steps, last = self.given.inputs.steps, self.samples[-1]
        nodes = self._nodes(steps)
        if len(self.samples) == 1:
            return steps * last.peak_bytes // last.chunk + nodes
        before = self.samples[-2]
        slope = max(0.0, last.peak_bytes - before.peak_bytes) / (last.chunk - before.chunk)
        return int(last.peak_bytes + slope * (steps - last.chunk)) + nodes

    @property
    def keep_s(self) -> float:
        """Seconds of plain autograd, by the fastest sample.

        No schedule of the same turns is faster, whatever the clock's noise.
        """
        return (
            min(sample.turn_s / sample.chunk for sample in self.samples) * self.given.inputs.steps
        )

    def found(self, memory: int) -> list[Found]:
        """Return the plans that fit, but for that of plain autograd.

        Raises
        ------
        ArgumentError
            For planner "offload" without a tier that tapes may travel to.
        """
        settings, n, found = self.given.settings, self.given.inputs.steps, list[Found]()
        planner, chunk = settings.planner, settings.chunk
        if planner == "offload" and self.page is None:
            raise ArgumentError(
                "planner 'offload' needs a tier, as in tiers=['file:///scratch'], and a cell that "
                "allows hooks on saved tensors (torch.func does not)"
            )
        if self.page is not None:
            offloaded = self._offloaded(self.page)
            self._least.append(offloaded.peak_bytes)
            if offloaded.peak_bytes <= memory:
                found.append(offloaded)
        for sample in self.samples:
            if chunk is not None and sample.chunk != min(chunk, n):
                continue
            if planner in ("auto", "recompute"):
                found += self._scheduled(sample, memory, "recompute", ())
            tier = self.tier  # one chunk leaves no state to write to it
            if planner in ("auto", "stream") and tier is not None and sample.chunk < n:
                found += self._scheduled(sample, memory, "stream", (tier,))
        return found

    def _offloaded(self, page: Tier) -> Found:
        """Return what is predicted where tapes travel.

        The seconds are by the last sample, the bytes by one that is measured under any limit: a
        limit that an error names would not work if another sample decided it then.
        """
        last, sample, n = self.samples[-1], self.samples[:LEAST][-1], self.given.inputs.steps
        assert last.saved is not None and sample.saved is not None
        pages = sum(-(-size // PAGE_BYTES) for size in last.saved if size >= TRAVELS_BYTES)
        # A third of a turn is forward, and hides the writes; the rest hides the reads.
        forward_s, backward_s = last.turn_s / 3, 2 * last.turn_s / 3
        seconds = max(forward_s, pages * page.write_s) + max(backward_s, pages * page.read_s)
        seconds += pages * (page.write_overhead_s + page.read_overhead_s)
        staying = sum(size for size in sample.saved if size < TRAVELS_BYTES)
        # On the way, or fetched ahead.
        moving = 9 * max((size for size in sample.saved if size >= TRAVELS_BYTES), default=0)
        peak = int(staying * n / sample.chunk) + moving
        peak += sample.peak_bytes // sample.chunk + self._nodes(n)
        return Found(seconds * n / last.chunk, peak, "offload")

    def _scheduled(
        self, sample: Cost, memory: int, name: str, tiers: tuple[Tier, ...]
    ) -> list[Found]:
        """Return the plan for chunks of one size, if it fits, and writes with a tier."""
        size = self.layout.nbytes
        # The live state and its adjoint, beside one chunk's graph.
        buffers = (
            self.store.buffer_bytes(self.layout.record) if self.store is not None and tiers else 0
        )
        fixed = sample.peak_bytes + self._nodes(sample.chunk) + 2 * size + buffers
        self._least.append(fixed + size)
        slots = (memory - fixed) // size
        if slots < 1:
            return []
        costs = Costs(
            forward_step_s=sample.forward_s,
            reverse_step_s=sample.turn_s,
            state_bytes=size,
            tiers=tiers,
            action_s=action_seconds(),
        )
        count = -(-self.given.inputs.steps // sample.chunk)
        chosen = _scheduled(costs, slots, count, self.given.settings.planner)
        if tiers and not chosen.writes:
            return []
        peak = fixed + int(chosen.peak_slots * size)
        beside = {"the live state, its adjoint and a chunk's graph": fixed - buffers}
        chosen = chosen.within(memory, {BUFFERS: buffers, **beside})
        return [Found(chosen.makespan_s, peak, name, sample.chunk, chosen)]

    def _nodes(self, steps: int) -> int:
        """Return what the nodes of the graph of some steps take that counts."""
        facts = self.given.facts
        each = node_bytes(facts.kinds[-1].weight[0] / facts.looked_at, self.given.device)
        return beyond_free(steps * each)

    def smallest(self) -> int | None:
        """Return the smallest limit that works, None if none is known."""
        return min(self._least, default=None)


def _scheduled(costs: Costs, slots: int, n: int, planner: str) -> Plan:
    """Return the best schedule; with planner "stream" one that writes, if any can."""
    best = plan(costs, Budget(slots=slots), n)
    if planner != "stream" or best.writes:
        return best
    # Where nothing pays, ranked planners fall back to running again: asked for by name, the
    # tier is used all the same.
    writing = [candidate for candidate in best.candidates if candidate.writes]
    if not writing:
        forced = shortest_interval(costs, slots, n)
        writing = [best if forced is None else forced]
    return min(writing, key=lambda candidate: candidate.makespan_s)


class Unequal:
    """Plans of steps that differ: the best cuts, and a plan of the chunks as a chain."""

    def __init__(self, given: Computation, steps: Steps, store: Store | None) -> None:
        self.given, self._settings = given, given.settings
        self._steps, self._store = steps, store
        self._chunk, self._memory = given.settings.chunk, 0
        self.keep_bytes = plan_chain(steps.plain(), None, "store-all").peak_bytes
        self.keep_s = steps.seconds
        # The caller holds the last state from the end of the forward sweep on.
        self._held = steps.last_bytes
        # Limits that plans would need, and the cuts of those with a tier.
        self._least: list[tuple[int, tuple[int, ...]]] = []

    def _cuts(self, counts: Iterable[int]) -> Iterator[tuple[int, ...]]:
        """Yield ways to cut the steps, each once."""
        if self._chunk is not None:
            n = len(self._steps)
            yield (*range(0, n, self._chunk), n)
            return
        seen = set()
        for count in counts:
            cuts = tuple(self._steps.cuts(min(count, len(self._steps))))
            if cuts not in seen:
                seen.add(cuts)
                yield cuts

    def found(self, memory: int) -> list[Found]:
        """Return the plans that fit, but for that of plain autograd.

        Raises
        ------
        ArgumentError
            For planner "offload".
        """
        planner, self._memory = self._settings.planner, memory
        if planner == "offload":
            raise ArgumentError(
                "planner 'offload' takes steps that are alike; where they differ states travel, by "
                "'stream'"
            )
        recomputed = self._recomputed()
        if planner == "recompute" or self._store is None:
            return recomputed
        require_core()
        return ([] if planner == "stream" else recomputed) + self._streamed_by(recomputed)

    def _recomputed(self) -> list[Found]:
        """Return plans without a tier, the best way to cut first."""
        found: list[Found] = []
        for counts in (_COUNTS, *((count,) for count in _MORE_COUNTS)):
            for cuts in self._cuts(counts):
                limit = max(1, self._memory - self._held)
                try:
                    with _beside(self._held):
                        plan = plan_within(self._steps.chained(cuts), limit)
                except BudgetError as error:
                    self._fell_short(error)
                else:
                    found.append(self._entry(plan, "recompute", cuts, 0))
            if found or self._chunk is not None or counts[-1] >= len(self._steps):
                break
        return sorted(found, key=lambda entry: entry.seconds)

    def _fell_short(self, error: BudgetError, cuts: tuple[int, ...] = ()) -> None:
        if error.least_bytes is not None:
            heapq.heappush(self._least, (error.least_bytes, cuts))

    def _entry(self, plan: Plan, planner: str, cuts: tuple[int, ...], buffers: int) -> Found:
        peak = plan.peak_bytes + self._held + buffers
        reserved = {BUFFERS: buffers, "the last state, which the caller holds": self._held}
        plan = plan.within(self._memory, reserved)
        longest = max(b - a for a, b in itertools.pairwise(cuts))
        return Found(plan.makespan_s, peak, planner, longest, plan, cuts)

    def _streamed_by(self, recomputed: Sequence[Found]) -> list[Found]:
        """Return plans that write states to a tier."""
        by_name = self._settings.planner == "stream"
        if by_name:
            self._least.clear()  # the limits of plans without a tier, which are not asked for
        found = []
        for cuts in self._streamed_cuts(recomputed):
            try:
                if (entry := self._streamed(cuts, self._memory)) is not None:
                    found.append(entry)
            except BudgetError as error:
                self._fell_short(error, cuts)
            except StoreError:
                if by_name:
                    raise
        if not found and by_name and recomputed:
            return self._streamed_by(())
        return found

    def _streamed(self, cuts: tuple[int, ...], memory: int) -> Found | None:
        """Return a plan by some cuts that writes to a tier, None if the best one does not.

        Raises
        ------
        BudgetError, StoreError
            If there is none within `memory`, or the tier lacks room.
        """
        assert self._store is not None
        by_name, costs = self._settings.planner == "stream", self._steps.chained(cuts)
        store, nbytes = self._store, probe_bytes(costs)
        buffers = store.buffer_bytes(largest_of(costs))
        room = memory - self._held - buffers
        require_room(store, costs)
        key = self._settings.tiers, self.given.device, nbytes
        rates = KNOWN.got(Tier, key, lambda: measured_rates(store, nbytes))
        rates = bounded(rates, store, costs)
        with _beside(self._held + buffers):
            plan = _streaming(costs, room, rates, by_name=by_name)
            if _pins(plan):
                plan = _streaming(_with_inputs(costs), room, rates, by_name=by_name)
        return self._entry(plan, "stream", cuts, buffers) if plan.writes else None

    def _streamed_cuts(self, recomputed: Sequence[Found]) -> Iterator[tuple[int, ...]]:
        if self._chunk is not None or not recomputed:
            counts: Iterable[int] = [c for c in _COUNTS if 1 < c <= _STREAMED]
        else:
            best = min(_STREAMED, len(recomputed[0].cuts) - 1)
            counts = sorted({max(2, best // 2), max(2, best), min(_STREAMED, max(4, 2 * best))})
        for cuts in self._cuts(counts):
            if 2 < len(cuts) <= MOST_AT_ONCE + 1:
                yield cuts

    def smallest(self) -> int | None:
        """Return the smallest limit that works, None if none is known.

        With a tier a plan made at the limit that another one lacked may fail in its own way:
        a state that leaves while a graph holds it counts twice, and there may be nothing to
        write.  So it is made before the limit is named.
        """
        while self._least:
            least, cuts = heapq.heappop(self._least)
            if not cuts:
                return least
            try:
                if self._streamed(cuts, least) is not None:
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


def _streaming(costs: StageCosts, room: int, rates: Tier, *, by_name: bool) -> Plan:
    """Return a plan with a tier; by name one that writes, if there is one.  Raises BudgetError."""
    plan = plan_chain(costs, max(1, room), tiers=rates, progress=False)
    if by_name and not plan.writes:
        plan = _made_to_write(plan, room, rates) or plan
    return plan


def _pins(plan: Plan) -> bool:
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


def _made_to_write(kept: Plan, room: int, rates: Tier) -> Plan | None:
    """Return a plan that writes though it does not pay, None if there is none."""
    free = replace(
        rates, write_s=0.0, read_s=0.0, write_bytes_per_s=math.inf, read_bytes_per_s=math.inf
    )
    for part in _LESS:
        limit = max(1, int(part * min(room, kept.peak_bytes)))
        with contextlib.suppress(BudgetError):
            plan = plan_chain(kept.stage_costs, limit, tiers=free, progress=False)
            if plan.writes:
                plan = replace(plan, tiers=(rates,), memory_bytes=room)
                use = plan.simulate()
                return replace(plan, makespan_s=use.makespan_s, stall_s=use.stall_s)
    return None
