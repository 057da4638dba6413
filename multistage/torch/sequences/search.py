"""The plan of a sequence: the fastest of all planners and ways to cut the steps that fit.

Equal steps are cut into chunks of one size, planned in closed forms for any number of them;
steps that differ into chunks that are planned as a chain.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

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
from ...planners.chain.pieces import MOST_AT_ONCE, plan_within
from ...planners.streaming.interval import shortest_interval
from ...reversing.streamed import bounded, largest_of, measured_rates, probe_bytes, require_room
from ...support.units import format_bytes
from ..tensors.states import TensorLayout
from ..tiers.paging import PAGE_BYTES
from .costs import LEAST, SIZES, Cost, Steps, extended, node_bytes
from .remembered import KNOWN
from .through_time import Computation
from .unroll_plan import UnrollPlan

TRAVELS_BYTES = 256 << 10  # tapes' tensors of at least this travel
_AS_GOOD = 1.03  # plans within this factor tie: so well are seconds known
_ENOUGH = 64  # chunks beyond which no more are tried, unless nothing fits
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
    # Of those as good the one of the largest chunks, then the one that takes the least memory.
    as_good = [entry for entry in found if entry.seconds <= _AS_GOOD * found[0].seconds]
    best = min(as_good, key=lambda entry: (-entry.chunk, entry.peak_bytes))
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
    """Plans of equal steps: for each size of chunk by closed forms."""

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
        steps = self.given.inputs.steps
        return int(extended(self.samples, steps)) + self._nodes(steps)

    @property
    def keep_s(self) -> float:
        """Seconds of plain autograd, by the fastest sample.

        No schedule of the same turns is faster, whatever the clock's noise.
        """
        each = [sample.turn_s / sample.chunk for sample in self.samples]
        return min(each) * self.given.inputs.steps

    def found(self, memory: int) -> list[Found]:
        """Return the plans that fit, but for that of plain autograd.

        Raises
        ------
        ArgumentError
            For planner "offload" without a tier that tapes may travel to.
        """
        settings, n, found = self.given.settings, self.given.inputs.steps, list[Found]()
        planner, chunk = settings.planner, settings.chunk
        alike = len(self.samples) <= LEAST and n < 2 * sum(SIZES[:LEAST])
        # Under any limit they are measured.
        if planner == "auto" and (alike or chunk is not None):
            self._least.append(self.keep_bytes)
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
                found += self._scheduled(sample, memory)
            # One chunk leaves no state to write to a tier.
            if planner in ("auto", "stream") and self.tier is not None and sample.chunk < n:
                found += self._scheduled(sample, memory, self.tier)
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
        if self.given.outputs in ("stack", "sum"):  # held until the end; as a state they cannot go
            staying += sample.y_bytes * sample.chunk
        peak = int(staying * n / sample.chunk) + moving
        peak += self.samples[0].peak_bytes + self.layout.nbytes + self._nodes(n)  # a step, a state
        return Found(seconds * n / last.chunk, peak, "offload")

    def _scheduled(self, sample: Cost, memory: int, tier: Tier | None = None) -> list[Found]:
        """Return the plan for chunks of one size, if it fits, and writes with a tier."""
        size, buffers = self.layout.nbytes, 0
        if tier is not None:
            assert self.store is not None
            buffers = self.store.buffer_bytes(self.layout.record)
        # The live state and its adjoint, beside one chunk's graph.
        beside = sample.peak_bytes + self._nodes(sample.chunk) + 2 * size
        self._least.append(beside + buffers + size)
        costs = Costs(
            forward_step_s=sample.forward_s,
            reverse_step_s=sample.turn_s,
            state_bytes=size,
            tiers=() if tier is None else (tier,),
            action_s=action_seconds(),
        )
        found = self._within(memory, costs, sample.chunk, beside, buffers)
        if self.given.settings.planner == "auto" and tier is None:
            held = self._holding(sample, memory, costs)
            if held and not (found and found[0].seconds <= _AS_GOOD * held[0].seconds):
                return held
        return found

    def _holding(self, sample: Cost, memory: int, costs: Costs) -> list[Found]:
        """Return the plan that holds graphs of chunks too, if it fits."""
        stage, size = sample.stage, self.layout.nbytes
        held = stage.tape_bytes + max(
            stage.tape_overhead_bytes, stage.backward_overhead_bytes + stage.gradient_bytes
        )
        beside = max(held, sample.peak_bytes) + self._nodes(sample.chunk) + 2 * size
        count = -(-self.given.inputs.steps // sample.chunk)
        costs = replace(
            costs,
            tape_step_s=sample.forward_s,
            reverse_step_s=sample.turn_s - sample.forward_s,  # planners ask for their sum alone
            # Each with the state that it starts from.
            tape_bytes=sample.graph_bytes + self._nodes(self.given.inputs.steps) // count + size,
        )
        return self._within(memory, costs, sample.chunk, beside, 0)

    def _within(
        self, memory: int, costs: Costs, chunk: int, beside: int, buffers: int
    ) -> list[Found]:
        """Return the plan of chunks by some costs, if it fits, and writes with a tier."""
        fixed, tiered = beside + buffers, bool(costs.tiers)
        slots = (memory - fixed) // costs.state_bytes
        if slots < 1:
            return []
        count = -(-self.given.inputs.steps // chunk)
        best = plan(costs, Budget(slots=slots), count)
        if self.given.settings.planner == "stream" and not best.writes:
            # Where nothing pays, ranked planners fall back to running again: asked for by name,
            # the tier is used all the same.
            writing = [candidate for candidate in best.candidates if candidate.writes]
            writing = writing or [shortest_interval(costs, slots, count) or best]
            best = min(writing, key=lambda candidate: candidate.makespan_s)
        if tiered and not best.writes:
            return []
        peak = fixed + int(best.peak_slots * costs.state_bytes)
        reserved = {BUFFERS: buffers, "the live state, its adjoint and a chunk's graph": beside}
        best, name = best.within(memory, reserved), "stream" if tiered else "recompute"
        return [Found(best.makespan_s, peak, name, chunk, best)]

    def _nodes(self, steps: int) -> int:
        """Return what the nodes of the graph of some steps take that counts."""
        facts = self.given.facts
        return node_bytes(steps * facts.kinds[-1].weight[0] / facts.looked_at, self.given.device)

    def smallest(self) -> int | None:
        """Return the smallest limit that works, None if none is known."""
        return min(self._least, default=None)


class Unequal:
    """Plans of steps that differ: the best cuts, and a plan of the chunks as a chain."""

    def __init__(self, given: Computation, steps: Steps, store: Store | None) -> None:
        self.given, self._steps, self._store = given, steps, store
        plain = plan_chain(steps.plain(), None, "store-all")
        self.keep_bytes, self.keep_s = plain.peak_bytes, plain.makespan_s
        # Limits that plans would need.
        self._least: list[tuple[int, str, tuple[int, ...]]] = []

    def _cuts(self) -> Iterator[tuple[int, ...]]:
        """Yield ways to cut the steps, into ever more chunks."""
        n, chunk = len(self._steps), self.given.settings.chunk
        if chunk is not None:
            yield (*range(0, n, chunk), n)
            return
        cuts: tuple[int, ...] = ()
        for doublings in range((n - 1).bit_length() + 1):
            before, cuts = cuts, tuple(self._steps.cuts(min(1 << doublings, n)))
            if cuts != before:
                yield cuts

    def found(self, memory: int) -> list[Found]:
        """Return the plans that fit, but for that of plain autograd.

        Raises
        ------
        ArgumentError
            For planner "offload".
        """
        planner, found = self.given.settings.planner, list[Found]()
        if planner == "offload":
            raise ArgumentError(
                "planner 'offload' takes steps that are alike; where they differ states travel, by "
                "'stream'"
            )
        if planner == "auto":
            self._least.append((self.keep_bytes, "keep", ()))
        for cuts in self._cuts():
            if planner in ("auto", "recompute"):
                found += self._planned("recompute", cuts, memory)
            if planner in ("auto", "stream") and self._store is not None:
                found += self._planned("stream", cuts, memory)
            if found and len(cuts) > _ENOUGH:
                break
        return found

    def _planned(self, name: str, cuts: tuple[int, ...], memory: int) -> list[Found]:
        """Return the plan by some cuts if it fits; with a tier, if there is room and it writes."""
        costs, store = self._steps.chained(cuts), self._store if name == "stream" else None
        # The caller holds the last state from the end of the forward sweep on.
        last = self._steps.each[-1].stage
        reserved = {"the last state, which the caller holds": last.output_bytes}
        if store is not None:
            reserved[BUFFERS] = store.buffer_bytes(largest_of(costs))
        beside = sum(reserved.values())
        limit = max(1, memory - beside)
        try:
            plan = plan_within(costs, limit) if store is None else self._streaming(costs, limit)
        except BudgetError as error:
            if error.least_bytes is not None:
                self._least.append((error.least_bytes + beside, name, cuts))
            return []
        if plan is None:
            return []
        plan, peak = plan.within(memory, reserved), plan.peak_bytes + beside
        longest = max(b - a for a, b in itertools.pairwise(cuts))
        return [Found(plan.makespan_s, peak, name, longest, plan, cuts)]

    def _streaming(self, costs: StageCosts, limit: int) -> Plan | None:
        """Return a plan that writes states to the tier, None if the best does not.

        By name one that writes even if that does not pay.

        Raises
        ------
        BudgetError
            If there is none within the limit.
        StoreError
            By name, if the tier lacks room.
        """
        store, by_name = self._store, self.given.settings.planner == "stream"
        assert store is not None
        if not 1 < len(costs.stages) <= MOST_AT_ONCE:
            return None
        try:
            require_room(store, costs)
            nbytes = probe_bytes(costs)
            key = self.given.settings.tiers, self.given.device, "bytes", nbytes
            rates = KNOWN.got(Tier, key, lambda: measured_rates(store, nbytes))
        except StoreError:
            if by_name:
                raise
            return None
        rates, costs = bounded(rates, store, costs), _with_inputs(costs)
        plan = plan_chain(costs, limit, tiers=rates, progress=False)
        free = replace(
            rates, write_s=0.0, read_s=0.0, write_bytes_per_s=math.inf, read_bytes_per_s=math.inf
        )
        for part in _LESS if by_name and not plan.writes else ():
            less = max(1, int(part * min(limit, plan.peak_bytes)))
            with contextlib.suppress(BudgetError):
                tried = plan_chain(costs, less, tiers=free, progress=False)
                if tried.writes:
                    return Plan.judged("optimal", costs, limit, tried.actions, rates)
        return plan if plan.writes else None

    def smallest(self) -> int | None:
        """Return the smallest limit that works, None if none is known.

        With a tier there may be nothing to write at the limit that another one lacked: the plan
        is made before the limit is named.
        """
        for least, name, cuts in sorted(self._least):
            if name != "stream" or self._planned(name, cuts, least):
                return least
        return None


def _with_inputs(costs: StageCosts) -> StageCosts:
    """Return costs where a graph holds its input too.

    It refers to it: where a state leaves for the tier, its memory would not be free.
    """
    inputs = [0, *(stage.output_bytes for stage in costs.stages[:-1])]
    both = zip(costs.stages, inputs, strict=True)
    found = [replace(stage, tape_bytes=stage.tape_bytes + nbytes) for stage, nbytes in both]
    return replace(costs, stages=tuple(found))
