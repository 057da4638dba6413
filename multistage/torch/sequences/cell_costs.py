"""What chunks of a cell cost, and the plan for a sequence of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from tabulate import tabulate
from torch import Tensor

from ...backends.base import Store
from ...errors import ArgumentError, BudgetError
from ...measurement.probe import action_seconds, probe_store, with_driver
from ...model.budget import Budget
from ...model.costs import Costs
from ...model.stages import Stage
from ...model.tier import Tier
from ...planners import UniformPlan, plan
from ...planners.chain.plan import ChainPlan
from ...planners.pictures.plans import brief_parts, plan_parts
from ...planners.streaming.interval import shortest_interval
from ...support.units import format_bytes, format_seconds
from ...view import save_text
from ...view.page import Heading, Paragraph, Part, Table, document, fragment
from ..measurement.checking import Checked
from ..measurement.measure import seconds_of
from ..tensors.meter import Meter
from ..tensors.states import TensorLayout, TensorState
from .cell import Facts
from .collector import Collector
from .inputs import InputGradients, Inputs
from .through_time import ThroughTime

UnrollPlanner = Literal["auto", "keep", "recompute", "stream", "offload"]
UNROLL_PLANNERS: tuple[UnrollPlanner, ...] = ("auto", "keep", "recompute", "stream", "offload")
_PROBE_S = 1.0
_LONGEST_S = 0.05  # a chunk of this length hides every overhead
_SHOWN = 64  # chunks whose fates are printed one by one
_AS_GOOD = 1.02  # plans within this factor tie


@dataclass(frozen=True, slots=True)
class Sample:
    """What one chunk was seen to cost.

    Attributes
    ----------
    chunk : int
        Time steps.
    forward_s : float
        Seconds forward, keeping nothing.
    turn_s : float
        Seconds forward with a graph and back.
    peak_bytes : int
        Allocated at most during that, beyond the state before.
    saved : tuple of int or None
        Sizes of the storages its graph saves, parameters and the state not counted;
        None if that is not known, or hooks on saved tensors are not possible.
    """

    chunk: int
    forward_s: float
    turn_s: float
    peak_bytes: int
    saved: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class UnrollPlan:
    """How a sequence is run, and why.

    Attributes
    ----------
    planner : {"keep", "recompute", "stream", "offload"}
        Keep every tape (plain autograd); keep some states and run again from
        them; stream states to a slow tier besides; or stream tapes there, and
        run nothing again.
    n_steps, chunk : int
        Time steps, and how many make one step of the schedule (at most, where steps
        differ).
    memory_bytes : int
        The limit.
    peak_bytes : int
        Predicted: states, one chunk's graph, buffers of the tier.
    makespan_s : float
        Predicted, forward and backward.
    keep_bytes : int
        What plain autograd is predicted to take.
    plan : UniformPlan or None
        The schedule of chunks.
    alternatives : tuple of (planner, chunk, makespan_s, peak_bytes)
        All that fit, the fastest first.
    checked : Checked or None
        What the check found; see `unroll`.
    chain : ChainPlan or None
        Where steps differ: the plan of the chunks as a chain of stages, with the costs
        of each.
    cuts : tuple of int
        Where steps differ: the first time step of each chunk, and behind the last the
        number of all.
    kinds : tuple of (Stage, int)
        Where steps differ: what a step of each kind costs, and how many there are.
    """

    planner: str
    n_steps: int
    chunk: int
    memory_bytes: int
    peak_bytes: int
    makespan_s: float
    keep_bytes: int
    plan: UniformPlan | None
    alternatives: tuple[tuple[str, int, float, int], ...]
    checked: Checked | None = None
    chain: ChainPlan | None = None
    cuts: tuple[int, ...] = ()
    kinds: tuple[tuple[Stage, int], ...] = ()

    def summary(self) -> str:
        """Return the plan in one line."""
        what = f"{self.planner}, chunks of {self.chunk}" if self.plan else self.planner
        if self.chain is not None:
            what = f"{self.planner}, {len(self.cuts) - 1} chunks of up to {self.chunk}"
        return (
            f"plan {what}: {self.n_steps} steps within {format_bytes(self.memory_bytes)}: "
            f"{format_seconds(self.makespan_s)}, peak {format_bytes(self.peak_bytes)} "
            f"(plain autograd: {format_bytes(self.keep_bytes)})"
        )

    def __str__(self) -> str:
        rows = [
            {
                "": ">" if (name, chunk) == (self.planner, self.chunk) else "",
                "planner": name,
                "chunk": chunk,
                "predicted": format_seconds(seconds),
                "peak": format_bytes(peak),
            }
            for name, chunk, seconds, peak in self.alternatives
        ]
        lines = [self.summary(), "", tabulate(rows, headers="keys", stralign="right")]
        if self.keep_bytes > self.memory_bytes:
            lines += ["", "Not kept: plain autograd does not fit the limit."]
        if self.kinds:
            lines += ["", "Kinds of steps:", "", tabulate(self._kinds(), headers="keys")]
        if self.checked is not None:
            lines += ["", f"Checked against plain autograd: {self.checked}."]
        if self.chain is not None:
            short = len(self.chain.costs.stages) <= _SHOWN
            lines += ["", str(self.chain) if short else self.chain.summary()]
        elif self.plan is not None:
            lines += ["", str(self.plan)]
        return "\n".join(lines)

    def _kinds(self) -> list[dict[str, object]]:
        return [
            {
                "kind": stage.name,
                "steps": count,
                "forward": format_seconds(stage.forward_s),
                "backward": format_seconds(stage.backward_s),
                "state": format_bytes(stage.output_bytes),
                "graph": format_bytes(stage.tape_bytes),
            }
            for stage, count in self.kinds
        ]

    def _table(self) -> Table:
        rows = [
            (name, chunk, format_seconds(seconds), format_bytes(peak))
            for name, chunk, seconds, peak in self.alternatives
        ]
        chosen = [(name, chunk) for name, chunk, *_ in self.alternatives]
        marked = chosen.index((self.planner, self.chunk))
        return Table(("planner", "chunk", "predicted", "peak"), rows, marked=marked)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file: `.html`, one page that needs no network.

        Raises
        ------
        ArgumentError
            For another suffix.
        """
        parts: list[Part] = [Paragraph(self.summary()), Heading("What fits"), self._table()]
        if self.plan is not None:
            parts += [Heading("The schedule of chunks"), *plan_parts(self.plan)]
        title = f"Plan: a sequence of {self.n_steps} steps, {self.planner}"
        save_text(path, html=document(title, parts))

    def _repr_html_(self) -> str:
        schedule = [] if self.plan is None else brief_parts(self.plan)
        return fragment([Paragraph(self.summary()), self._table(), *schedule])


def sample_chunks(
    chain: ThroughTime,
    state: Sequence[Tensor],
    *,
    chunk: int | None,
    most_bytes: int,
    tapes: bool,
) -> list[Sample]:
    """Measure chunks of 1, 2, 4, ... steps until they are long enough, or large.

    Parameters
    ----------
    chain : ThroughTime
        Of the whole sequence.
    state : sequence of Tensor
        The leaves of the first state.
    chunk : int, optional
        The only size wanted; 1 is measured besides.
    most_bytes : int
        Larger chunks are of no use.
    tapes : bool
        Whether it matters what the graphs save.
    """
    inputs = chain.inputs
    found: list[Sample] = []
    began = time.perf_counter()
    sizes = [1 << k for k in range(20)] if chunk is None else [1, min(chunk, inputs.steps)]
    with chain.replaying():
        for size in sizes:
            if size > inputs.steps or (found and size == found[-1].chunk):
                break
            found.append(_sample(chain, state, size, tapes))
            # Three at least: what comes once, or twice from two steps on (gradients of
            # parameters that are added up), would be taken to come with every step.
            late = time.perf_counter() - began > _PROBE_S
            large = 2 * found[-1].peak_bytes > most_bytes
            slow = found[-1].forward_s > _LONGEST_S
            if chunk is None and (slow or (len(found) > 2 and (late or large))):
                break
    return found


def _sample(whole: ThroughTime, state: Sequence[Tensor], chunk: int, tapes: bool) -> Sample:
    cell, facts, inputs, device = whole.cell, whole.facts, whole.inputs, whole.device
    few = Inputs(inputs.given, chunk)
    few.known_as(facts.parameters)
    collector = Collector(facts, chunk, "stack", cell.fused)
    chain = ThroughTime(cell, facts, few, collector, whole.around, chunk, device)
    chain.check = whole.check
    chain.sums = [None] * len(facts.parameters)
    chain.of_inputs = InputGradients(few)
    first = chain.first(state)
    forwards, turns, peak = [], [], 0
    saved: tuple[int, ...] | None = None
    with chain.around.settled(keep=False):
        # The first turn is for what comes once, as workspaces of libraries; it is not measured.
        for number in range(5):
            chain.front = 0
            collector.clear()
            forwards.append(seconds_of(lambda: chain.advance(first, 0, 1), device))
            adjoint, chain.output_gradients = _ones(facts, state, collector)
            if number == 0:
                chain.reverse(first, adjoint, 0)
            elif number == 1:
                with Meter(device) as meter:
                    meter.ignore([*first.tensors, *facts.parameters])
                    lying = [inputs.given, chain.of_inputs.whole]
                    meter.ignore(t for t in lying if isinstance(t, Tensor))
                    chain.reverse(first, adjoint, 0)
                    peak = meter.peak_bytes
            elif number == 2:
                saved = _saved(chain, first, adjoint, facts) if tapes else None
            else:
                chain.sums = [None] * len(facts.parameters)
                turns.append(seconds_of(lambda: chain.reverse(first, adjoint, 0), device))  # noqa: B023
    return Sample(chunk, max(min(forwards[1:]), 1e-9), max(min(turns), 1e-9), peak, saved)


def _saved(
    chain: ThroughTime, first: TensorState, adjoint: tuple[Tensor | None, ...], facts: Facts
) -> tuple[int, ...] | None:
    """Return the sizes of the storages that a chunk's graph saves; None if it allows no hooks."""
    held = [*first.tensors, *facts.parameters, chain.inputs.given]
    known = {t.untyped_storage()._cdata for t in held if isinstance(t, Tensor)}
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            sizes[storage._cdata] = storage.nbytes()
        # Not itself: an output that its own node keeps is a cycle that nothing collects, and
        # backward does not come by the nodes below what the cell leaves unused.
        return tensor.detach()

    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            chain.reverse(first, adjoint, 0)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):  # as `torch.func` has it
            raise
        return None
    return tuple(sizes.values())


def _ones(
    facts: Facts, state: Sequence[Tensor], collector: Collector
) -> tuple[tuple[Tensor | None, ...], list[Tensor | None]]:
    """Return gradients of a chunk's results, to try with."""
    adjoint = tuple(
        torch.ones_like(t) if wanted else None
        for t, wanted in zip(state, facts.wants[-1], strict=True)
    )
    outputs = [None if value is None else torch.ones_like(value) for value in collector.values()]
    return adjoint, outputs


def keep_bytes(samples: Sequence[Sample], steps: int) -> int:
    """Return the bytes plain autograd takes for a sequence."""
    last = samples[-1]
    if len(samples) == 1:
        return steps * last.peak_bytes // last.chunk
    before = samples[-2]
    slope = max(0.0, last.peak_bytes - before.peak_bytes) / (last.chunk - before.chunk)
    return int(last.peak_bytes + slope * (steps - last.chunk))


def tier_of(store: Store, layout: TensorLayout, state: Sequence[Tensor]) -> Tier:
    """Measure a slow tier for states like one; the store is opened and closed."""
    lines, _ = layout.pack(state)
    tier = probe_store(store, layout.record, seconds=0.3, arrays=lines)
    on_device = [line for line in lines if isinstance(line, Tensor)]
    if on_device:  # `get` returns before the bytes are there
        tier = replace(tier, read_s=max(tier.read_s, _read_seconds(on_device)))
    costs = Costs(1.0, 1.0, state_bytes=layout.nbytes, tiers=(tier,), action_s=action_seconds())
    return with_driver(costs, layout.record).tiers[0]


def _read_seconds(lines: Sequence[Tensor]) -> float:
    """Return the seconds it takes to copy some tensors to their device from pinned memory."""
    pinned = [line.cpu().pin_memory() for line in lines]
    device = lines[0].device
    seconds = [
        seconds_of(lambda: [p.to(device, non_blocking=True) for p in pinned], device)
        for _ in range(5)
    ]
    return min(seconds)


def offloaded(
    sample: Sample, steps: int, least: int, page: Tier, page_bytes: int
) -> tuple[float, int]:
    """Return predicted seconds and peak bytes of a sequence whose tapes travel.

    Parameters
    ----------
    sample : Sample
    steps : int
    least : int
        Smaller tensors stay.
    page : Tier
        Seconds to write and read one page.
    page_bytes : int
    """
    chunks = steps / sample.chunk
    assert sample.saved is not None
    staying = sum(n for n in sample.saved if n < least)
    moving = [n for n in sample.saved if n >= least]
    pages = sum(-(-n // page_bytes) for n in moving)
    # A third of a turn is forward, and hides the writes; the rest hides the reads.
    forward_s, backward_s = sample.turn_s / 3, 2 * sample.turn_s / 3
    seconds = max(forward_s, pages * page.write_s) + max(backward_s, pages * page.read_s)
    seconds += pages * (page.write_overhead_s + page.read_overhead_s)
    on_the_way = 9 * max(moving, default=0)  # written, or fetched ahead
    return seconds * chunks, int(staying * chunks) + on_the_way + sample.peak_bytes // sample.chunk


def _scheduled(costs: Costs, slots: int, n: int, planner: UnrollPlanner) -> UniformPlan:
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


def choose(
    samples: Sequence[Sample],
    steps: int,
    memory: int,
    state_bytes: int,
    *,
    tier: Tier | None,
    buffer_bytes: int,
    planner: UnrollPlanner,
    chunk: int | None,
    offload: tuple[float, int] | None = None,
) -> UnrollPlan:
    """Return the fastest plan that fits, of all chunk sizes and planners.

    Raises
    ------
    BudgetError
        If none fits; the message names the smallest limit that works.
    """
    keep = keep_bytes(samples, steps)
    action_s = action_seconds()
    found: list[tuple[float, int, str, int, UniformPlan | None]] = []
    if planner in ("auto", "keep") and (keep <= memory or planner == "keep"):
        if keep > memory:
            raise BudgetError(
                f"plain autograd takes {keep} bytes ({format_bytes(keep)}) for {steps} steps, more "
                f"than the limit of {memory}; use planner='auto'"
            )
        # By the fastest: no schedule of the same turns is faster, whatever the clock's noise.
        turn_s = min(sample.turn_s / sample.chunk for sample in samples)
        found.append((turn_s * steps, keep, "keep", 1, None))
    least: list[int] = []
    if offload is not None and planner in ("auto", "offload"):
        least.append(offload[1])
        if offload[1] <= memory:
            found.append((*offload, "offload", 1, None))
    for sample in samples:
        if (chunk is not None and sample.chunk != min(chunk, steps)) or planner in (
            "keep",
            "offload",
        ):
            continue
        for name, tiers in (("recompute", ()), ("stream", () if tier is None else (tier,))):
            if planner not in ("auto", name) or (name == "stream" and tier is None):
                continue
            # The live state and its adjoint, beside one chunk's graph.
            fixed = sample.peak_bytes + 2 * state_bytes + (buffer_bytes if tiers else 0)
            slots = (memory - fixed) // state_bytes
            least.append(fixed + state_bytes)
            if slots < 1:
                continue
            costs = Costs(
                forward_step_s=sample.forward_s,
                reverse_step_s=sample.turn_s,
                state_bytes=state_bytes,
                tiers=tiers,
                action_s=action_s,
            )
            chosen = _scheduled(costs, slots, -(-steps // sample.chunk), planner)
            if name == "stream" and not chosen.writes:
                continue
            peak = fixed + int(chosen.peak_slots * state_bytes)
            found.append((chosen.makespan_s, peak, name, sample.chunk, chosen))
    if not found:
        if not least:
            raise ArgumentError(
                f"planner {planner!r} needs a tier, as in tiers=['file:///scratch'], and for "
                "'offload' a cell that allows hooks on saved tensors (torch.func does not)"
            )
        if memory >= min(least):
            raise BudgetError(
                f"planner {planner!r} has no state to write: n_steps={steps} is one chunk, or the "
                "tier holds no state; give a smaller chunk or a larger tier, or use 'auto'"
            )
        raise BudgetError(
            f"memory={memory} bytes < {min(least)} bytes ({format_bytes(min(least))}), the "
            "smallest limit that works here; raise the limit, or give a smaller chunk"
        )
    found.sort(key=lambda entry: entry[0])
    # Of those as good: plain autograd, else the one that takes the least memory.
    as_good = [entry for entry in found if entry[0] <= _AS_GOOD * found[0][0]]
    seconds, peak, name, size, chosen_plan = min(as_good, key=lambda e: (e[2] != "keep", e[1]))
    return UnrollPlan(
        planner=name,
        n_steps=steps,
        chunk=size,
        memory_bytes=memory,
        peak_bytes=peak,
        makespan_s=seconds,
        keep_bytes=keep,
        plan=chosen_plan,
        alternatives=tuple((e[2], e[3], e[0], e[1]) for e in found),
    )
