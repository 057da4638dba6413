"""The plan for a sequence of equal steps: the fastest of all that fit the limit."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from ...errors import ArgumentError, BudgetError
from ...measurement.driver import action_seconds
from ...model.budget import Budget
from ...model.costs import Costs
from ...model.tier import Tier
from ...planners import UniformPlan, plan
from ...planners.streaming.interval import shortest_interval
from ...support.units import format_bytes
from .cell_costs import Sample, keep_bytes
from .unroll_plan import UnrollPlan, UnrollPlanner

_AS_GOOD = 1.02  # plans within this factor tie
# Seconds, peak bytes, planner, chunk, schedule of the chunks.
_Fitting: TypeAlias = tuple[float, int, str, int, UniformPlan | None]


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
    found: list[_Fitting] = []
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
        if chunk is not None and sample.chunk != min(chunk, steps):
            continue
        for name, tiers in (("recompute", ()), ("stream", () if tier is None else (tier,))):
            if planner not in ("auto", name) or (name == "stream" and tier is None):
                continue
            if name == "stream" and sample.chunk >= steps:
                continue  # one chunk, which leaves no state to write
            # The live state and its adjoint, beside one chunk's graph.
            fixed = sample.held_bytes + 2 * state_bytes + (buffer_bytes if tiers else 0)
            slots = (memory - fixed) // state_bytes
            least.append(fixed + state_bytes)
            if slots < 1:
                continue
            costs = _costs(sample, state_bytes, tiers)
            chosen = _scheduled(costs, slots, -(-steps // sample.chunk), planner)
            if name == "stream" and not chosen.writes:
                continue
            peak = fixed + int(chosen.peak_slots * state_bytes)
            found.append((chosen.makespan_s, peak, name, sample.chunk, chosen))
    if not found:
        raise _nothing_fits(least, steps, memory, planner, tier)
    return _best(found, steps, memory, keep)


def _costs(sample: Sample, state_bytes: int, tiers: tuple[Tier, ...]) -> Costs:
    return Costs(
        forward_step_s=sample.forward_s,
        reverse_step_s=sample.turn_s,
        state_bytes=state_bytes,
        tiers=tiers,
        action_s=action_seconds(),
    )


def _best(found: list[_Fitting], steps: int, memory: int, keep: int) -> UnrollPlan:
    """Return the plan that is chosen: of those as good plain autograd, else the smallest."""
    found.sort(key=lambda entry: entry[0])
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


def _nothing_fits(
    least: Sequence[int], steps: int, memory: int, planner: UnrollPlanner, tier: Tier | None
) -> ArgumentError | BudgetError:
    """Return the error that says why there is no plan."""
    if not least and (planner == "offload" or tier is None):
        return ArgumentError(
            f"planner {planner!r} needs a tier, as in tiers=['file:///scratch'], and for "
            "'offload' a cell that allows hooks on saved tensors (torch.func does not)"
        )
    if not least or memory >= min(least):
        return BudgetError(
            f"planner {planner!r} has no state to write: n_steps={steps} is one chunk, or the "
            "tier holds no state; give a smaller chunk or a larger tier, or use 'auto'"
        )
    return BudgetError(
        f"memory={memory} bytes < {min(least)} bytes ({format_bytes(min(least))}), the "
        "smallest limit that works here; raise the limit, or give a smaller chunk"
    )


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
