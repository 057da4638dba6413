"""Plans of sequences whose steps differ: measured once for each kind of step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...backends.base import Store
from ...errors import ArgumentError, BudgetError
from ...model.budget import Budget
from ...model.stages import StageCosts
from ...planners.chain.heterogeneous import plan_chain
from ...planners.chain.joint_core import require_core
from ...reversing.described import described
from ...support.units import format_bytes
from ..measurement.checking import Checked
from .cell_costs import beyond_free, node_bytes
from .cells import Cells, StepKind, VariedFacts
from .chunks import Steps
from .kind_costs import KindCost, measured_kind
from .kinds import Survey
from .planning import Memory, Settings, free_bytes, identity
from .surroundings import Surroundings
from .unroll_plan import UnrollPlan
from .varied_search import Found, Search

_AS_GOOD = 1.02  # plans within this factor tie

_measured: Memory[KindCost] = Memory(1024)


@dataclass(slots=True)
class _Known:
    """A plan, and whether it holds: its tier may have been slower than planned."""

    plan: UnrollPlan
    holds: bool = True


_plans: Memory[_Known] = Memory(512)
_checked: Memory[Checked] = Memory()  # by the kinds of steps, and whether steps run again


def steps_of(
    cells: Cells,
    facts: VariedFacts,
    survey: Survey,
    around: Surroundings,
    device: torch.device,
    leaves: Sequence[Tensor],
) -> tuple[Steps, list[KindCost]]:
    """Return what the steps of a sequence cost, measured by kind, and by kind."""
    inputs, found = survey.inputs, []
    for kind in facts.kinds:
        key = _key(cells, facts, kind, survey, around)
        cost = _measured.get(key)
        if cost is None:
            before = survey.state_before(kind)
            cost = measured_kind(cells, facts, kind, before, inputs, around, device)
            _measured.put(key, cost)
        found.append(cost)
    nodes = sum(facts.kinds[number].weight[0] for number in facts.steps)
    taken = beyond_free(node_bytes(nodes, device))
    if taken:
        found = [
            _with_nodes(cost, taken * kind.weight[0] // nodes)
            for cost, kind in zip(found, facts.kinds, strict=True)
        ]
    each = [found[number] for number in facts.steps]
    overhead_s = min(cost.overhead_s for cost in found)
    rest = sum(t.nbytes for t in around.now())
    steps = Steps(
        [cost.stage for cost in each],
        [cost.graph_bytes for cost in each],
        [cost.y_bytes for cost in each],
        [cost.x_gradient_bytes for cost in each],
        sum(t.nbytes for t in leaves) + rest,
        sum(t.nbytes for t in leaves if t.requires_grad),
        [facts.kinds[number].parameters for number in facts.steps],
        [p.nbytes for p in facts.parameters],
        facts.graded,
        overhead_s,
    )
    return steps, found


def _with_nodes(cost: KindCost, nbytes: int) -> KindCost:
    stage = replace(cost.stage, tape_bytes=cost.stage.tape_bytes + nbytes)
    return replace(cost, stage=stage, graph_bytes=cost.graph_bytes + nbytes)


def steps_by_costs(costs: StageCosts, facts: VariedFacts) -> Steps:
    """Return given costs of the time steps.

    Raises
    ------
    ArgumentError
        If they are for another number of steps.
    """
    count = len(facts.steps)
    if len(costs.stages) != count:
        raise ArgumentError(
            f"costs have {len(costs.stages)} stages, but the sequence has {count} steps; give one "
            "Stage for each time step"
        )
    nothing = [0] * count
    return Steps(
        costs.stages,
        [stage.tape_bytes for stage in costs.stages],
        nothing,
        nothing,
        costs.input_bytes,
        costs.input_gradient_bytes,
        graded=facts.graded,
    )


def planned_varied(
    cells: Cells,
    facts: VariedFacts,
    survey: Survey,
    around: Surroundings,
    device: torch.device,
    leaves: Sequence[Tensor],
    store: Store | None,
    settings: Settings,
    check: Callable[[UnrollPlan, Steps], Checked],
) -> UnrollPlan:
    """Return the plan for a sequence whose steps differ, checked when it is made.

    Raises
    ------
    ArgumentError, BudgetError
        If there is none.
    StateError
        Of the check.
    """
    kinds: list[KindCost] = []
    if settings.costs is None:
        steps, kinds = steps_of(cells, facts, survey, around, device, leaves)
    else:
        steps = steps_by_costs(settings.costs, facts)
    kinds_key = (
        tuple(_key(cells, facts, kind, survey, around) for kind in facts.kinds),
        tuple(kind.parameters for kind in facts.kinds),
        tuple(p.nbytes for p in facts.parameters),
        settings,
        steps.input_bytes,
    )
    numbers = facts.steps.tobytes() if hasattr(facts.steps, "tobytes") else tuple(facts.steps)
    key = kinds_key, numbers
    known = _plans.get(key)
    # Without a limit: what is free now.
    free = free_bytes(device) if settings.memory is None else None
    if known is not None and known.holds and (free is None or known.plan.peak_bytes <= free):
        return known.plan
    given = settings.memory or Budget(bytes=free)
    plain = plan_chain(steps.plain(), None, "store-all")
    memory = given.bytes_of(lambda: plain.peak_bytes)
    plan = choose_varied(steps, memory, plain.peak_bytes, store, settings)
    counts = [0] * len(kinds)
    for number in facts.steps if kinds else ():
        counts[number] += 1
    again = kinds_key, plan.plan is not None
    checked = _checked.get(again)
    if checked is None:
        checked = _checked.put(again, check(plan, steps))
    plan = replace(
        plan,
        kinds=tuple(
            (replace(cost.stage, name=kind.name), count)
            for cost, kind, count in zip(kinds, facts.kinds, counts, strict=bool(kinds))
        ),
        checked=checked,
        by_values=any(cost.by_values for cost in kinds),
    )
    return _plans.put(key, _Known(plan)).plan


def plan_again(plan: UnrollPlan) -> None:
    """Have a plan made again when it is next asked for; it is not checked again."""
    for known in _plans.values():
        if known.plan is plan:
            known.holds = False


def _key(
    cells: Cells, facts: VariedFacts, kind: StepKind, survey: Survey, around: Surroundings
) -> object:
    """Return what a step's costs depend on."""
    before, after = facts.states[kind.before], facts.states[kind.after]
    return (
        identity(cells.each[kind.cell]),
        before,
        after,
        survey.x_kind_of(kind),
        kind.ys,
        kind.differentiable,
        kind.weight,
        facts.draws,
        facts.graded,
        tuple(module._buffers[key].shape for module, key in facts.buffers),  # type: ignore[union-attr]
        around.settings,
    )


def choose_varied(
    steps: Steps, memory: int, keep_bytes: int, store: Store | None, settings: Settings
) -> UnrollPlan:
    """Return the fastest plan that fits, of all planners and ways to cut the steps.

    Raises
    ------
    BudgetError
        If none fits; the message names the smallest limit that works, as far as is known.
    """
    planner, n = settings.planner, len(steps)
    if planner == "offload":
        raise ArgumentError(
            "planner 'offload' takes steps that are alike; where they differ states travel, by "
            "'stream'"
        )
    found: list[Found] = []
    if planner in ("auto", "keep") and (keep_bytes <= memory or planner == "keep"):
        if keep_bytes > memory:
            raise BudgetError(
                f"plain autograd takes {keep_bytes} bytes ({format_bytes(keep_bytes)}) for {n} "
                f"steps, more than the limit of {memory}; use planner='auto'"
            )
        seconds = sum(stage.forward_s + stage.backward_s for stage in steps.stages)
        found.append(Found(seconds, keep_bytes, "keep", (0, n)))
    search = Search(steps, memory, settings.chunk)
    recomputed = search.recomputed() if planner in ("auto", "recompute", "stream") else []
    if planner != "stream":
        found += recomputed
    if planner in ("auto", "stream"):
        if store is None and planner == "stream":
            raise ArgumentError("planner 'stream' needs a tier, as in tiers=['file:///scratch']")
        if store is not None and not any(entry.planner == "keep" for entry in found):
            require_core()
            found += search.streamed(store, settings, recomputed, by_name=planner == "stream")
    if not found:
        raise search.too_small(planner)
    found.sort(key=lambda entry: entry.seconds)
    # Of those as good: plain autograd, else the one that takes the least memory.
    as_good = [entry for entry in found if entry.seconds <= _AS_GOOD * found[0].seconds]
    best = min(as_good, key=lambda e: (e.planner != "keep", e.peak_bytes))
    chain = best.chain
    return UnrollPlan(
        planner=best.planner,
        n_steps=n,
        chunk=1 if chain is None else best.longest,
        memory_bytes=memory,
        peak_bytes=best.peak_bytes,
        makespan_s=best.seconds,
        keep_bytes=keep_bytes,
        plan=None if chain is None else described(chain),
        alternatives=tuple(
            (e.planner, 1 if e.chain is None else e.longest, e.seconds, e.peak_bytes) for e in found
        ),
        chain=chain,
        cuts=best.cuts if chain is not None else (),
    )
