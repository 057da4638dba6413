"""A sequence run from its beginning to its end: as it is written, or by a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...actions import Advance, EndForward, Load, Reverse, Schedule, Tape
from ...backends.base import Store
from ...errors import BudgetError
from ...execute.late import EqualSteps, Late, Stages
from ...model.stages import StageCosts
from ...model.tier import Tier
from ...planners.single.revolve import revolve_schedule
from ...reversing.streamed import largest_of
from ...schedule.rules import Rules
from ...schedule.simulation import simulate
from ...schedule.timeline import Timeline
from ...support.progress import Bars
from ..environment.randomness import cuda_or_cpu, refuse_hidden_draws
from ..measurement.checking import Checked, check_chain
from ..measurement.stand_ins import hooks_silent
from ..tensors.meter import Meter
from ..tensors.states import TensorLayout, TensorStates
from ..tiers.by_name import open_tiers
from .allowances import Allowance
from .arguments import Settings
from .cells import Cells
from .costs import Steps
from .facts import Facts, run_steps
from .hooks import looking
from .inputs import Inputs
from .planning import planned
from .remembered import KNOWN, identity
from .results import Collector, Outputs, Unrolled, results_of
from .samples import Samples
from .search import rates_key
from .surroundings import Computation, Surroundings
from .survey import Survey
from .sweeping import Course, Sweep, VariedTensors, through
from .through_time import ThroughTime
from .unroll_plan import UnrollPlan

_CHECKED = 12  # steps at most that a check runs from state 0
_SLOWER = 2.0  # times as slow as planned a late tier is taken to be, of which nothing was seen


def run_plainly(
    cells: Cells,
    facts: Facts,
    inputs: Inputs,
    outputs: Outputs,
    state: object,
    steps: tuple[int, int],
    chunk: int | None,
    *,
    graph: bool,
) -> Unrolled[object, object]:
    """Run steps as they are written, with or without a graph; `chunk` is for a fused cell."""
    collector = Collector(facts, steps, outputs, cells.fused, graph=graph)
    start, stop = steps
    size = stop - start if chunk is None or not cells.fused else chunk
    for begin in range(start, stop, size):
        end = min(begin + size, stop)
        x = partial(inputs.many, stop=end) if cells.fused else inputs.at
        leaves = run_steps(
            cells, facts, state, (begin, end), x, lambda found: collector.add(*found)
        )
        state = pytree.tree_unflatten(leaves, facts.state(end).spec)
    loss, reduced = results_of(facts, collector.values())
    return Unrolled(state, loss, reduced, None)


def run(
    survey: Survey,
    facts: Facts,
    state: object,
    outputs: Outputs,
    settings: Settings,
    travels: Callable[[Sequence[Tensor], torch.device], AbstractContextManager[object]],
) -> Unrolled[object, object]:
    """Run a sequence, by a plan where gradients are required.

    In `travels(stays, device)` tapes travel to the tiers, but for some tensors that stay.
    """
    cells, inputs, leaves = survey.cells, survey.inputs, pytree.tree_leaves(state)
    wanted = [*leaves, *inputs.tensors(), *facts.parameters]
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in wanted):
        survey.close()
        steps, chunk = (0, inputs.steps), settings.chunk
        return run_plainly(cells, facts, inputs, outputs, state, steps, chunk, graph=False)
    inputs.known_as(facts.parameters)
    if facts.equal and not cells.fused:
        inputs.expect(facts.kinds[-1].x_kinds, 1)
    involved = [*leaves, *inputs.held(), *facts.parameters]
    around = Surroundings(cells, facts, survey.generators, involved)
    around.compared = settings.check != "off"
    given = Computation(cells, facts, inputs, around, cuda_or_cpu(involved), settings.check)
    program = _Program(given, outputs, settings, (0, inputs.steps))
    # States of several sizes go by way of host memory.
    place = given.device if facts.equal else torch.device("cpu")
    store = open_tiers(settings.tiers, place, varied=not facts.equal)
    layout = TensorLayout([*leaves, *around.now()], program.names(leaves))

    def checked(plan: UnrollPlan, steps: Steps | None) -> Checked:
        return _checked(program, survey, state, plan, steps)

    with hooks_silent(cells.scope.modules, on_tensors=False), looking():
        chosen = planned(given, survey, leaves, layout, store, settings, checked)
    survey.close()  # its states are no part of the plan
    if chosen.plan is not None:
        refuse_hidden_draws(cells.scope.modules, cells.name)
        return program.scheduled(state, chosen, store, layout)
    with around.turn():
        return replace(_kept(program, state, chosen, travels), plan=chosen)


def _kept(
    program: _Program,
    state: object,
    chosen: UnrollPlan,
    travels: Callable[[Sequence[Tensor], torch.device], AbstractContextManager[object]],
) -> Unrolled[object, object]:
    """Run the steps plainly, their graphs counted.

    Raises
    ------
    BudgetError
        If the graphs take more than was planned for.
    """
    given, costs = program.given, program.settings.costs
    if chosen.planner == "offload":
        held = [*pytree.tree_leaves(state), given.inputs.given]
        with travels([t for t in held if isinstance(t, Tensor)], given.device):
            return program.plainly(state)
    if costs is not None:
        return _weighed(program, state, chosen, costs)
    with Allowance(chosen, given.facts, given.inputs).holding_all(given.device) as judge:
        found = program.plainly(state)
        judge((found.loss, found.outputs))
    return found


def _weighed(
    program: _Program, state: object, chosen: UnrollPlan, costs: StageCosts
) -> Unrolled[object, object]:
    """Run the steps plainly; given costs are weighed the first time."""
    key = program.weighed_as(costs, program.steps)
    if KNOWN.weighed.get(key) is not None:
        return program.plainly(state)
    with Meter(program.given.device) as meter:
        meter.ignore([*pytree.tree_leaves(state), *program.given.facts.parameters])
        found = program.plainly(state)
        beside = sum(t.nbytes for t in pytree.tree_leaves(found.outputs) if isinstance(t, Tensor))
        nbytes = meter.live_bytes() - beside  # what is stacked is not part of the limit
    if nbytes > chosen.keep_bytes:
        raise BudgetError(
            f"the graphs of all steps take {nbytes} bytes, their costs say {chosen.keep_bytes}; "
            "give the sizes as they are, or no costs to have them measured"
        )
    KNOWN.weighed.put(key, True)
    return found


@dataclass(frozen=True, slots=True)
class _Program:
    """Steps of a sequence, and what becomes of their outputs.

    Attributes
    ----------
    given : Computation
    outputs : {"stack", "sum", "last"}, callable or None
    settings : Settings
    steps : (int, int)
        Those that are run.
    """

    given: Computation
    outputs: Outputs
    settings: Settings
    steps: tuple[int, int]

    def names(self, leaves: Sequence[Tensor]) -> list[str]:
        """Return names of the tensors of a state, for messages."""
        return [*(f"leaf {k} of the state" for k in range(len(leaves))), *self.given.around.names()]

    def weighed_as(self, costs: StageCosts, cuts: Sequence[int]) -> object:
        """Return what distinguishes sequences whose graphs are compared once with given costs."""
        cells, facts = self.given.cells, self.given.facts
        kinds = tuple([(kind.cell, kind.before, kind.after, kind.weight) for kind in facts.kinds])
        each = tuple([identity(one) for one in cells.each])
        states = tuple([(kind.leaves, kind.wants) for kind in facts.states])
        numbers = cells.numbers(), tuple(facts.steps)
        return costs, tuple(cuts), each, numbers, kinds, states, self.given.inputs.form()

    def plainly(self, state: object, chunk: int | None = None) -> Unrolled[object, object]:
        """Run the steps as they are written, with a graph."""
        given, size = self.given, self.settings.chunk if chunk is None else chunk
        return run_plainly(
            given.cells,
            given.facts,
            given.inputs,
            self.outputs,
            state,
            self.steps,
            size,
            graph=True,
        )

    def chain(self, cuts: Sequence[int], costs: StageCosts | None = None) -> ThroughTime:
        """Return the chain of the chunks between some cuts."""
        given = self.given
        collector = Collector(given.facts, self.steps, self.outputs, given.cells.fused)
        chain = ThroughTime(
            given.cells,
            given.facts,
            given.inputs,
            collector,
            given.around,
            cuts,
            given.device,
            costs,
        )
        chain.check = self.settings.check
        return chain

    def run(
        self, state: object, chain: ThroughTime, course: Course, bars: Bars
    ) -> Unrolled[object, object]:
        """Run a chain of the steps by a schedule."""
        leaves = pytree.tree_leaves(state)
        run = Sweep(chain, chain.first(leaves), course, bars)
        wanted = [*leaves, *self.given.inputs.tensors(), *self.given.facts.parameters]
        return Unrolled(*through(run, wanted), None)

    def scheduled(
        self, state: object, chosen: UnrollPlan, store: Store | None, layout: TensorLayout
    ) -> Unrolled[object, object]:
        """Run the steps by a plan."""
        given, settings, plan = self.given, self.settings, chosen.plan
        assert plan is not None
        names = self.names(pytree.tree_leaves(state))
        # Of equal chunks the last may be shorter: a range takes no memory.
        cuts = chosen.cuts or range(0, given.inputs.steps + chosen.chunk, chosen.chunk)
        judged = chosen.chain if settings.costs is not None else None
        chain = self.chain(cuts, None if judged is None else judged.costs)
        if settings.costs is None:
            chain.allowance = Allowance(chosen, given.facts, given.inputs)
        elif KNOWN.weighed.get(key := self.weighed_as(settings.costs, cuts)) is None:
            chain.weighs, chain.done = True, lambda: _hold(key)
        chain.samples = KNOWN.looks(given.cells, chain.n_steps)
        if not plan.writes:
            store = None
        if chosen.chain is None:
            course = _equal_course(chosen, settings, names, store, layout, given.device)
        else:
            course = _course(chosen, settings, names, store)
        found = self.run(state, chain, course, Bars(settings.progress))
        return replace(found, plan=chosen)


def _hold(key: object) -> None:
    KNOWN.weighed.put(key, True)


def _equal_course(
    chosen: UnrollPlan,
    settings: Settings,
    names: Sequence[str],
    store: Store | None,
    layout: TensorLayout,
    device: torch.device,
) -> Course:
    """Return how equal chunks are run: in slots, and on without a tier that is late."""
    plan = chosen.plan
    assert plan is not None
    late = was_late = None
    if store is not None:
        late = Late(EqualSteps(plan.n_steps, plan.slots, plan.tiers, True))
        key, (tier,) = (settings.tiers, device, layout.nbytes), plan.tiers

        def was_late(timeline: Timeline) -> None:
            KNOWN.was_late(settings.tiers, chosen, key, _slowed(tier, timeline))

    return Course(
        plan.schedule,
        TensorStates(names),
        plan.costs.forward_step_s,
        slots=plan.slots,
        store=store,
        record=layout.record,
        late=late,
        was_late=was_late,
    )


def _slowed(tier: Tier, timeline: Timeline) -> Tier:
    """Return a tier as slow as a sweep that went on without it has seen it."""
    write_s, read_s = (
        timeline.totals_s[kind] / timeline.counts[kind] if timeline.counts[kind] else 0.0
        for kind in ("write", "read")
    )
    if write_s <= tier.write_s and read_s <= tier.read_s:
        return tier.slower(_SLOWER)
    return replace(tier, write_s=max(tier.write_s, write_s), read_s=max(tier.read_s, read_s))


def _course(
    chosen: UnrollPlan, settings: Settings, names: Sequence[str], store: Store | None
) -> Course:
    """Return how chunks that differ are run, each action judged byte by byte.

    The limit is the user's; what the caller holds and the buffers of the tier are beside it.
    """
    plan, chain = chosen.plan, chosen.chain
    assert plan is not None and chain is not None
    costs, reserved = chain.costs, chain.costs.stages[-1].output_bytes
    layout = largest_of(costs)
    reserved += 0 if store is None else store.buffer_bytes(layout)
    rules = partial(_rules_of, costs, chosen.memory_bytes - reserved)
    schedule: Callable[[], Schedule] = plan.schedule
    states, step_s = VariedTensors(names), plan.costs.forward_step_s
    if store is None:
        return Course(schedule, states, step_s, rules=rules)
    course = Stages(chain, inside=False)
    store.queue_depth = max(store.queue_depth, plan.writes)
    key = rates_key(settings, costs)
    rates = KNOWN.tiers.get(key) or chain.tier
    assert rates is not None

    def was_late(_: Timeline) -> None:
        # Of what was planned, not of what is known by now: a second backward tells it again.
        KNOWN.was_late(settings.tiers, chosen, key, course.slowed(rates))

    return Course(
        schedule,
        states,
        step_s,
        rules=rules,
        store=store,
        record=layout,
        late=Late(course),
        was_late=was_late,
    )


def _rules_of(costs: StageCosts, limit: int) -> Rules:
    """Return the machine that judges the chunks' actions within a limit."""
    return Rules.in_bytes(costs, limit, recovers=True)


# ---------------------------------------------------------------------- checking


def _checked(
    program: _Program, survey: Survey, state: object, chosen: UnrollPlan, steps: Steps | None
) -> Checked:
    """Run some steps plainly, and by a schedule that runs them again; compare.

    The first steps of the sequence: as many as one chunk has, where it has three, so that
    their graph fits the limit; then, where steps differ, a step of each kind that is not
    among them.
    """
    settings, facts = program.settings, program.given.facts
    if settings.check == "off":
        return Checked("off")
    if any(each.enabled for each in program.given.around.settings.autocast):
        return Checked("not checked; under autocast gradients are added in another precision")
    survey.close()  # states are found again one by one, or too many would be held
    outputs = None if callable(program.outputs) else program.outputs
    first = min(program.steps[1], max(3, min(chosen.chunk, _CHECKED)))
    while steps is not None and first > 1 and _peak_bytes(first, steps) > chosen.memory_bytes:
        first -= 1
    windows: list[tuple[int, int, Any]] = [(0, first, state)]
    if not facts.equal:
        windows += [(k.first, k.first + 1, k) for k in facts.kinds if k.first >= first]
    seconds, outcomes = 0.0, []
    for start, stop, given in windows:
        if start:
            leaves = survey.state_before(given)
            given = pytree.tree_unflatten(leaves, facts.states[given.before].spec)
        part = replace(program, steps=(start, stop), outputs=outputs)
        found = _checked_part(part, given, chosen)
        seconds += found.seconds
        outcomes.append(found.outcome)
        del given
    different = [outcome for outcome in outcomes if outcome != outcomes[0]]
    return Checked("; ".join([outcomes[0], *dict.fromkeys(different)]), seconds)


def _checked_part(part: _Program, state: object, chosen: UnrollPlan) -> Checked:
    """Compare a run of some steps in three chunks at most with a plain one."""
    given, cuts = part.given, _thirds(*part.steps)
    cells, facts, size = given.cells, given.facts, cuts[1] - cuts[0]

    def results(found: Unrolled[object, object]) -> object:
        return found.state, found.loss, found.outputs

    def plainly(state: object) -> object:
        return results(part.plainly(state, size))

    def scheduled(state: object) -> object:
        leaves, chain = pytree.tree_leaves(state), part.chain(cuts)
        chain.samples = Samples.every(chain.n_steps, watch=not cells.is_compiled())
        names = part.names(leaves)
        if facts.equal:
            course = Course(partial(revolve_schedule, 1, chain.n_steps), TensorStates(names))
        else:
            actions = partial(_again, chain.n_steps)
            course = Course(actions, VariedTensors(names))
        return results(part.run(state, chain, course, Bars(False)))

    compared = partial(
        check_chain,
        name=cells.name,
        stages=[one.given for one in dict.fromkeys(map(cells.at, range(*part.steps)))],
        room_bytes=chosen.memory_bytes / 2,
        writes=False,
        check=part.settings.check,
        targets=[*given.inputs.tensors(), *facts.parameters],
    )
    # Where nothing is run again: measuring ran the cell, which must have left no trace.
    found = compared(plainly, plainly if chosen.plan is None else scheduled, state)
    if not cells.fused or chosen.plan is None or found.outcome != "equal":
        return found
    if any(facts.draws):
        return replace(found, outcome="equal, called chunk by chunk, which draws other numbers")
    other = "equal, called chunk by chunk; agrees to rounding with one call over all steps"
    name = f"one call of {cells.name} for all steps"
    every = part.steps[1]
    both = compared(
        lambda state: results(part.plainly(state, every)), plainly, state, name=name, rounded=other
    )
    return Checked(both.outcome, found.seconds + both.seconds)


def _thirds(start: int, stop: int) -> tuple[int, ...]:
    """Return the cuts of three chunks at most."""
    return (*range(start, stop, -(-(stop - start) // 3)), stop)


def _peak_bytes(count: int, steps: Steps) -> int:
    """Return what the first steps take at most, plainly and by the schedule of the check."""
    plain, costs = steps.chained((0, count)), steps.chained(_thirds(0, count))
    schedules = (_again(1), plain), (_again(len(costs.stages)), costs)
    return max(simulate(a, None, each, checked=False).peak_bytes for a, each in schedules)


def _again(n: int) -> Schedule:
    """Yield a schedule of n chunks: the last is taped at once, the others run again.

    One chunk alone is run again too.
    """
    yield Advance(0, max(1, n - 1))
    if n > 1:
        yield Tape(n - 1)
    yield EndForward()
    for k in reversed(range(n)):
        if k < n - 1 or n == 1:
            yield Load(0)
            if k:
                yield Advance(0, k)
        yield Reverse(k)
