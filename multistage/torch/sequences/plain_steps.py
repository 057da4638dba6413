"""A sequence run as it is written, and the check of a schedule against it."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from torch.utils import _pytree as pytree

from ...model.costs import Costs
from ...planners import PLANNERS
from ...support.progress import Bars
from ..measurement.checking import Check, Checked, check_chain
from ..tensors.states import TensorStates
from .cell import Cell, Facts
from .collector import Collector, Outputs
from .inputs import Inputs
from .results import Unrolled as Unrolled
from .results import results_of
from .running_steps import run_steps
from .samples import Samples
from .sweeping import Sweep, through
from .through_time import ThroughTime
from .unroll_plan import UnrollPlan

_CHECKED = 12  # steps at most that a check runs


def checked_against_plain(
    chain: ThroughTime, state: object, outputs: Outputs, chosen: UnrollPlan, check: Check
) -> Checked:
    """Run the first steps plainly, and by a schedule that runs them again; compare.

    They are at most as many as one chunk has, so that their graph fits the limit, where a
    chunk has three.
    """
    if check == "off":
        return Checked("off")
    if any(each.enabled for each in chain.around.settings.autocast):
        return Checked("not checked; under autocast gradients are added in another precision")
    cell, facts = chain.cell, chain.facts
    count = min(chain.inputs.steps, max(3, min(chosen.chunk, _CHECKED)))
    size = -(-count // 3)
    few = Inputs(chain.inputs.given, count)
    few.known_as(facts.parameters)
    mode = None if callable(outputs) else outputs
    # Where nothing is run again: measuring ran the cell, which must have left no trace.
    turns = Costs(1.0, 1.0, 1) if chosen.plan is None else replace(chosen.plan.costs, tiers=())
    short = PLANNERS["revolve"](turns, 1, -(-count // size))
    plan = replace(chosen, n_steps=count, chunk=size, plan=short)

    def plainly(given: object) -> object:
        found = run_plainly(cell, facts, given, few, mode, size if cell.fused else None, graph=True)
        return found.state, found.loss, found.outputs

    def scheduled(given: object) -> object:
        leaves, spec = pytree.tree_flatten(given)
        collector = Collector(facts, count, mode, cell.fused)
        part = ThroughTime(cell, facts, few, collector, chain.around, size, chain.device)
        part.check = chain.check
        part.samples = Samples.every(part.n_steps, watch=not cell.is_compiled())
        names = part.names([f"leaf {k} of the state" for k in range(len(leaves))])
        first = part.first(leaves)
        run = Sweep(part, first, plan, None, None, TensorStates(names), Bars(False))
        found = through(run, plan, spec, [*leaves, *few.tensors(), *facts.parameters])
        return found.state, found.loss, found.outputs

    compared = partial(
        check_chain,
        name=cell.name,
        stages=[cell.given],
        room_bytes=chosen.memory_bytes / 2,
        writes=False,
        check=check,
        targets=[*few.tensors(), *facts.parameters],
    )
    found = compared(plainly, plainly if chosen.plan is None else scheduled, state)
    if not cell.fused or chosen.plan is None or found.outcome != "equal":
        return found
    if any(facts.draws):
        return replace(found, outcome="equal, called chunk by chunk, which draws other numbers")

    def whole(given: object) -> object:
        result = run_plainly(cell, facts, given, few, mode, None, graph=True)
        return result.state, result.loss, result.outputs

    other = "equal, called chunk by chunk; agrees to rounding with one call over all steps"
    name = f"one call of {cell.name} for all steps"
    both = compared(whole, plainly, state, name=name, rounded=other)
    return Checked(both.outcome, found.seconds + both.seconds)


def run_plainly(
    cell: Cell,
    facts: Facts,
    state: object,
    inputs: Inputs,
    mode: Outputs,
    chunk: int | None,
    *,
    graph: bool,
) -> Unrolled[object, object]:
    """Run the steps as they are written, with or without a graph."""
    collector = Collector(facts, inputs.steps, mode, cell.fused, graph=graph)
    x = inputs.many if cell.fused else inputs.at
    size = inputs.steps if chunk is None else chunk
    last = state
    for start in range(0, inputs.steps, size):
        steps = start, min(start + size, inputs.steps)
        leaves = run_steps(cell, facts, last, steps, x, lambda found: collector.add(*found))
        last = pytree.tree_unflatten(leaves, facts.spec)
    loss, outputs = results_of(facts, collector.values())
    return Unrolled(last, loss, outputs, None)
