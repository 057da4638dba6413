"""Plans of `unroll`: measured once for a kind of steps, made again where memory has changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ...backends.base import Store
from ...errors import ArgumentError, BudgetError, StoreError
from ...model.budget import Budget
from ...model.stages import Stage, StageCosts
from ...model.tier import Tier
from ..environment.places import described
from ..measurement.checking import Checked
from ..tensors.meter import free_bytes
from ..tensors.states import TensorLayout, kind_of
from ..tiers.paging import PAGE_BYTES
from .arguments import Settings
from .costs import Cost, Sampled, Steps, measured, node_bytes, peak_of, sample_chunks, tier_of
from .facts import Facts, StepKind
from .remembered import KNOWN, Known, identity
from .search import Equal, Unequal, choose
from .survey import Survey
from .through_time import Computation
from .unroll_plan import UnrollPlan


def planned(
    given: Computation,
    survey: Survey,
    leaves: Sequence[Tensor],
    layout: TensorLayout,
    store: Store | None,
    check: Callable[[UnrollPlan, Steps | None], Checked],
) -> Known:
    """Return the plan for a sequence, checked when it is made for kinds of steps.

    Steps of a kind are measured and checked once, equal ones for sequences of about any
    length: the same module type and parameters, or the same code, and a graph of about the
    same weight.  Part of the weight is what a step takes at most: it is run to see where the
    cell, or what it refers to, is new.  Where no limit is given, a plan is made again from those
    measurements when it no longer fits what is free, or more than twice as much is.

    Raises
    ------
    ArgumentError, BudgetError
        If there is none.
    StateError
        Of the check.
    """
    n, settings = given.inputs.steps, given.settings
    if settings.planner == "stream" and store is None:
        raise ArgumentError("planner 'stream' needs a tier, as in tiers=['file:///scratch']")
    KNOWN.renew(settings.tiers)
    if settings.costs is None:
        each = tuple([_weighed(given, kind, survey) for kind in given.facts.kinds])
        given = replace(given, facts=replace(given.facts, kinds=each))
    facts = given.facts
    kinds = (
        tuple([_key(given, kind, survey) for kind in facts.kinds]),
        tuple([kind.parameters for kind in facts.kinds]),
        tuple([kind_of(p) for p in facts.parameters]),
        settings,
        # Steps of a kind may be of several sizes, if costs are given.
        None if settings.costs is None else given.inputs.form(),
    )
    order = (n, bytes(facts.steps))
    key, weight = (settings.tiers, kinds, order), facts.kinds[-1].weight
    known = KNOWN.get(Known, key)
    free = free_bytes(given.device) if settings.memory is None else None
    # Nothing but the check compares what a fused cell does in chunks and at once.
    fused = [described(each.scope.look().held) for each in given.cells.each if given.cells.fused]
    if known is not None and known.holds(weight, free):
        again = kinds, known.plan.plan is not None, *fused
        if not (fused and KNOWN.differ(given.cells.callables, again)):
            return known
    budget = settings.memory or Budget(bytes=free)
    found, costs, steps, fresh = _ways_of(given, survey, leaves, layout, store, kinds, budget)
    memory = budget.bytes_of(lambda: found.keep_bytes)
    plan = choose(found, memory)
    again, run = (kinds, plan.plan is not None, *fused), partial(check, plan, steps)
    checked = None if fresh else KNOWN.get(Checked, again)
    if fused:
        checked = KNOWN.of_cells(given.cells.callables, again, run, anew=fresh)
    elif checked is None:
        checked = KNOWN.put(again, run())
    counted = () if facts.equal else _counted(costs, facts)
    by_values = settings.costs is not None or any(cost.by_values for cost in costs)
    plan = replace(plan, kinds=counted, checked=checked, by_values=by_values)
    return KNOWN.put(key, Known(plan, weight))


def _ways_of(
    given: Computation,
    survey: Survey,
    leaves: Sequence[Tensor],
    layout: TensorLayout,
    store: Store | None,
    kinds: object,
    budget: Budget,
) -> tuple[Equal | Unequal, list[Cost], Steps | None, bool]:
    """Return the ways to run a sequence, what they were found by, and whether that is new."""
    facts, settings, steps = given.facts, given.settings, None
    costs: list[Cost] = []
    if not facts.equal:
        if settings.costs is None:
            steps, costs = _steps_of(given, survey, leaves)
        else:
            steps = _steps_by(settings.costs, facts, given.inputs.steps)
        return Unequal(given, steps, store), costs, steps, False
    costs, fresh = _samples(given, leaves, kinds, budget)
    found = Equal(given, costs, layout, store)
    if store is not None:
        state = [*(t.detach() for t in leaves), *given.around.now()]
        rates = settings.tiers, given.device, "states", layout.nbytes
        found.tier = KNOWN.got(Tier, rates, lambda: tier_of(store, layout, state))
        if settings.offloads and costs[-1].saved is not None:
            found.page = _page_tier(store, given.device, settings)
    return found, costs, None, fresh


def _counted(costs: Sequence[Cost], facts: Facts) -> tuple[tuple[Stage, int], ...]:
    """Return what a step of each measured kind costs, by its name, and how many there are."""
    counts = Counter(facts.steps)
    return tuple(
        (replace(cost.stage, name=kind.name), counts[number])
        for number, (cost, kind) in enumerate(zip(costs, facts.kinds, strict=False))
    )


def _weighed(given: Computation, kind: StepKind, survey: Survey) -> StepKind:
    """Return a kind whose weight tells what a step takes at most, with a graph and back, too."""
    cell, inputs = given.cells.each[kind.cell], given.cells.callables[-1]
    what = _key(given, kind, survey), described(cell.scope.look().held)
    most = KNOWN.of_cells(
        [cell.given, inputs],
        what,
        lambda: peak_of(given, kind, survey.state_before(kind)),
        anew=False,
    )
    return replace(kind, weight=(*kind.weight, most))


def _key(given: Computation, kind: StepKind, survey: Survey) -> object:
    """Return what a step's costs depend on; of equal steps, which share them, about its weight."""
    facts, weight = given.facts, kind.weight
    return (
        identity(given.cells.each[kind.cell]),
        facts.states[kind.before],
        facts.states[kind.after],
        survey.x_kind(kind.first),
        kind.x_kinds,
        kind.ys,
        kind.differentiable,
        tuple([number.bit_length() for number in weight]) if facts.equal else weight,
        facts.draws,
        facts.graded,
        tuple(module._buffers[key].shape for module, key in facts.buffers),  # type: ignore[union-attr]
        given.around.settings,
    )


# ------------------------------------------------------------------ equal steps


def _samples(
    given: Computation, leaves: Sequence[Tensor], kinds: object, budget: Budget
) -> tuple[list[Cost], bool]:
    """Return what chunks of equal steps cost, and whether it is new."""
    n, weight, settings = given.inputs.steps, given.facts.kinds[-1].weight, given.settings
    known = KNOWN.get(Sampled, kinds)
    fresh = known is None or not known.serves(weight, n, settings.chunk)
    if known is None or fresh:
        most = 1 << 62 if budget.bytes is None else budget.bytes
        found = sample_chunks(
            given, leaves, chunk=settings.chunk, most_bytes=most, tapes=settings.offloads
        )
        known = KNOWN.put(kinds, Sampled(found, weight, n))
    return [each for each in known.samples if each.chunk <= n], fresh


def _page_tier(store: Store, device: torch.device, settings: Settings) -> Tier | None:
    """Return a tier as pages of tapes see it; None if it has room for none."""
    blank = torch.empty(PAGE_BYTES, dtype=torch.uint8, device=device)
    layout, key = TensorLayout([blank], ["a page"]), (settings.tiers, device, "page")
    try:
        return KNOWN.got(Tier, key, lambda: tier_of(store, layout, [blank]))
    except (BudgetError, StoreError) as error:  # room for states, but for no page of tapes
        if settings.planner == "offload":
            raise type(error)(
                f"planner='offload' writes tapes in pages of {PAGE_BYTES} bytes, the states of its "
                f"tier: {error}"
            ) from error
        return None


# ------------------------------------------------------------ steps that differ


def _steps_of(
    given: Computation, survey: Survey, leaves: Sequence[Tensor]
) -> tuple[Steps, list[Cost]]:
    """Return what the steps of a sequence cost, measured by kind, and by kind."""
    facts, found = given.facts, list[Cost]()
    for kind in facts.kinds:
        key = _key(given, kind, survey)
        cost = KNOWN.get(Cost, key)
        if cost is None:
            cost = KNOWN.put(
                key, measured(given, kind, survey.state_before(kind), (kind.first, kind.first + 1))
            )
        found.append(replace(cost, parameters=kind.parameters))
    nodes = sum(facts.kinds[number].weight[0] for number in facts.steps)
    taken = node_bytes(nodes, given.device)
    for number, (cost, kind) in enumerate(zip(found, facts.kinds, strict=True)):
        more = taken * kind.weight[0] // max(1, nodes)
        stage = replace(cost.stage, tape_bytes=cost.stage.tape_bytes + more)
        found[number] = replace(cost, stage=stage, graph_bytes=cost.graph_bytes + more)
    steps = Steps(
        [found[number] for number in facts.steps],
        sum(t.nbytes for t in [*leaves, *given.around.now()]),
        sum(t.nbytes for t in leaves if t.requires_grad),
        [p.nbytes for p in facts.parameters],
        facts.graded,
        min(cost.overhead_s for cost in found),
    )
    return steps, found


def _steps_by(costs: StageCosts, facts: Facts, count: int) -> Steps:
    """Return given costs of the time steps.

    Raises
    ------
    ArgumentError
        If they are for another number of steps.
    """
    if len(costs.stages) != count:
        raise ArgumentError(
            f"costs have {len(costs.stages)} stages, but the sequence has {count} steps; give one "
            "Stage for each time step"
        )
    each = [Cost(stage, stage.tape_bytes) for stage in costs.stages]
    return Steps(each, costs.input_bytes, costs.input_gradient_bytes, graded=facts.graded)
