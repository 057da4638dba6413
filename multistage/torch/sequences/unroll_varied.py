"""`unroll` where steps differ in cost, and states in size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...actions import Action, Advance, EndForward, Load, Reverse, Tape
from ...backends.base import Store
from ...errors import BudgetError
from ...execute.late import Late, Stages
from ...model.budget import Budget
from ...model.stages import Stage, StageCosts
from ...planners.chain.heterogeneous import plan_chain
from ...planners.chain.memory import performed
from ...reversing.described import described
from ...reversing.streamed import largest_of
from ...schedule.simulation import simulate
from ...support.progress import Bars
from ..environment.captured import generators_of
from ..environment.hidden_draws import refuse_hidden_draws
from ..environment.randomness import cuda_or_cpu
from ..environment.states import tensors_in
from ..measurement.checking import Check, Checked, check_chain
from ..measurement.stand_ins import hooks_silent
from ..tensors.meter import Meter
from ..tiers.by_name import open_tiers
from .allowances import allowance
from .cells import Cells, VariedFacts, run_varied
from .chunks import Steps
from .collector import Collector, Outputs
from .inputs import Inputs
from .kinds import Survey
from .planning import Memory, Settings, identity, samples_of
from .results import Unrolled, results_of
from .running_steps import looking
from .samples import Samples
from .surroundings import Surroundings
from .sweeping import Sweep, rules_of, through
from .unroll_plan import UnrollPlan
from .varied_planning import plan_again, planned_varied
from .varied_search import seen_slower
from .varied_time import VariedTensors, VariedThroughTime

_weighed: Memory[bool] = Memory()  # sequences whose graphs were seen to hold to given costs
_CHECKED = 12  # steps at most that a check runs from state 0
_SHARE = 8  # of the limit, what states held while kinds are found may take


def unroll_varied(
    cells: Cells,
    state: object,
    inputs: Inputs,
    settings: Settings,
    outputs: Outputs,
    parameters: Sequence[Tensor] | None,
    random: bool | None,
) -> Unrolled[object, object]:
    """Run a sequence of steps that differ; the arguments are those of `unroll`."""
    leaves = pytree.tree_leaves(state)
    inputs.shared_with(leaves)
    generators = generators_of([cells.scope], [*tensors_in(state), *inputs.held()])
    with looking():
        survey = Survey(
            cells,
            state,
            inputs,
            generators,
            parameters,
            settings.check,
            exact=settings.costs is None,
            room_bytes=_room_bytes(settings.memory),
        )
        facts = survey.facts(random)
    program = _Program(cells, facts, inputs, outputs)
    wanted = [*leaves, *inputs.tensors(), *facts.parameters]
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in wanted):
        survey.close()
        return program.plainly(state, graph=False)
    inputs.known_as(facts.parameters)
    involved = [*leaves, *inputs.held(), *facts.parameters]
    device, around = cuda_or_cpu(involved), Surroundings(cells, facts, generators, involved)
    around.compared = settings.check != "off"
    # States of any size go by way of host memory.
    store = open_tiers(settings.tiers, torch.device("cpu"), varied=True)

    def checked(plan: UnrollPlan, steps: Steps) -> Checked:
        return _checked(program, survey, state, around, device, plan, steps, settings.check)

    with hooks_silent(cells.scope.modules, on_tensors=False), looking():
        chosen = planned_varied(
            cells, facts, survey, around, device, leaves, store, settings, checked
        )
    survey.close()  # its states are no part of the plan
    if chosen.plan is None:
        with around.turn():
            if settings.costs is not None:
                found = _kept(program, state, chosen, settings.costs, device)
            else:
                with allowance(chosen, facts, inputs).holding_all(device) as judge:
                    found = program.plainly(state, graph=True)
                    judge((found.loss, found.outputs))
        return replace(found, plan=chosen)
    refuse_hidden_draws(cells.scope.modules, cells.name)
    return program.scheduled(state, chosen, around, device, settings, store)


def _kept(
    program: _Program,
    state: object,
    chosen: UnrollPlan,
    costs: StageCosts,
    device: torch.device,
) -> Unrolled[object, object]:
    """Run the steps plainly; given costs are weighed the first time.

    Raises
    ------
    BudgetError
        If the graphs take more than given costs say.
    """
    key = program.weighed_as(costs, (0, program.inputs.steps))
    if _weighed.get(key) is not None:
        return program.plainly(state, graph=True)
    with Meter(device) as meter:
        meter.ignore([*pytree.tree_leaves(state), *program.facts.parameters])
        found = program.plainly(state, graph=True)
        beside = sum(t.nbytes for t in pytree.tree_leaves(found.outputs) if isinstance(t, Tensor))
        nbytes = meter.live_bytes() - beside  # what is stacked is not part of the limit
    if nbytes > chosen.keep_bytes:
        raise BudgetError(
            f"the graphs of all steps take {nbytes} bytes, their costs say {chosen.keep_bytes}; "
            "give the sizes as they are, or no costs to have them measured"
        )
    _weighed.put(key, True)
    return found


def _room_bytes(memory: Budget | None) -> int:
    """Return what states may take that are held while kinds are found."""
    return 0 if memory is None or memory.bytes is None else memory.bytes // _SHARE


@dataclass(frozen=True, slots=True)
class _Program:
    """Steps of a sequence, and what becomes of their outputs.

    Attributes
    ----------
    window : (int, int) or None
        The steps that are run; None for all.
    """

    cells: Cells
    facts: VariedFacts
    inputs: Inputs
    outputs: Outputs
    window: tuple[int, int] | None = None

    @property
    def steps(self) -> tuple[int, int]:
        """The steps that are run."""
        return (0, self.inputs.steps) if self.window is None else self.window

    def weighed_as(self, costs: StageCosts, cuts: tuple[int, ...]) -> object:
        """Return what distinguishes sequences whose graphs are compared once with given costs."""
        kinds = tuple(
            [(kind.cell, kind.before, kind.after, kind.weight) for kind in self.facts.kinds]
        )
        cells = tuple([identity(each) for each in self.cells.each])
        states = tuple([(kind.leaves, kind.wants) for kind in self.facts.states])
        numbers = tuple(self.cells.at), tuple(self.facts.steps)
        return costs, cuts, cells, numbers, kinds, states, self.inputs.form()

    def collector(self, *, graph: bool) -> Collector:
        """Return what takes their outputs."""
        speaking = [t for t in range(*self.steps) if self.facts.kind(t).y_spec is not None]
        order = {t: place for place, t in enumerate(speaking)}
        return Collector(self.facts, len(speaking), self.outputs, False, graph=graph, order=order)

    def plainly(self, state: object, *, graph: bool) -> Unrolled[object, object]:
        """Run the steps as they are written, with or without a graph."""
        collector = self.collector(graph=graph)
        leaves = run_varied(
            self.cells,
            self.facts,
            state,
            self.steps,
            self.inputs.at,
            lambda found: collector.add(*found),
        )
        last = pytree.tree_unflatten(leaves, self.facts.state(self.steps[1]).spec)
        loss, reduced = results_of(self.facts, collector.values())
        return Unrolled(last, loss, reduced, None)

    def scheduled(
        self,
        state: object,
        chosen: UnrollPlan,
        around: Surroundings,
        device: torch.device,
        settings: Settings | None = None,
        store: Store | None = None,
    ) -> Unrolled[object, object]:
        """Run the steps by a plan."""
        leaves = pytree.tree_leaves(state)
        assert chosen.chain is not None
        costs = chosen.chain.costs
        given = settings is not None and settings.costs is not None
        chain = VariedThroughTime(
            self.cells,
            self.facts,
            self.inputs,
            self.collector(graph=False),
            around,
            chosen.cuts,
            device,
            costs if given else None,
        )
        key = self.weighed_as(costs, chosen.cuts) if given else None
        if key is not None and _weighed.get(key) is None:
            chain.weighs, chain.done = True, partial(_held_to, key)
        if settings is not None and not given:
            chain.allowance = allowance(chosen, self.facts, self.inputs)
        chain.check = "error" if settings is None else settings.check
        if settings is None:  # of the check
            chain.samples = Samples.every(chain.n_steps, watch=not self.cells.is_compiled())
        else:
            chain.samples = samples_of(self.cells, chain.n_steps)
        names = chain.names([f"leaf {k} of the state" for k in range(len(leaves))])
        bars = Bars(False if settings is None else settings.progress)
        assert chosen.plan is not None
        layout = was_late = None
        late: Late | None = None
        if store is not None and settings is not None and chosen.plan.writes:
            layout = largest_of(costs)
            store.queue_depth = max(store.queue_depth, chosen.plan.writes)
            if chosen.chain.tier is not None and chosen.chain.memory_bytes is not None:
                rules = partial(rules_of, chosen.chain, chosen.plan)
                actions = partial(performed, n_steps=chosen.plan.n_steps)
                course = Stages(chosen.chain, rules, actions, inside=False)
                late = Late(course)
                was_late = partial(_plan_for_slower, chosen, settings, costs, course)
        run = Sweep(
            chain,
            chain.first(leaves),
            chosen,
            None if layout is None else store,
            layout,
            VariedTensors(names),
            bars,
            late,
            was_late,
        )
        wanted = [*leaves, *self.inputs.tensors(), *self.facts.parameters]
        return through(run, chosen, chain.last_spec(), wanted)


def _plan_for_slower(
    chosen: UnrollPlan, settings: Settings, costs: StageCosts, course: Stages
) -> None:
    """Plan the next sequence for a tier as slow as it was when this one went on without it."""
    # Of what was planned, not of what is known by now: a second backward tells it again.
    seen_slower(settings, costs, course.slowed)
    plan_again(chosen)


def _held_to(key: object) -> None:
    _weighed.put(key, True)


def _checked(
    program: _Program,
    survey: Survey,
    state: object,
    around: Surroundings,
    device: torch.device,
    chosen: UnrollPlan,
    steps: Steps,
    check: Check,
) -> Checked:
    """Run some steps plainly, and by a schedule that runs them again; compare.

    The first steps of the sequence, as many as fit the limit, then a step of each kind
    that is not among them.
    """
    if check == "off":
        return Checked("off")
    if any(each.enabled for each in around.settings.autocast):
        return Checked("not checked; under autocast gradients are added in another precision")
    survey.close()  # states are found again one by one, or too many would be held
    facts, outputs = program.facts, program.outputs
    first = min(program.inputs.steps, max(3, min(chosen.chunk, _CHECKED)))
    while first > 1 and _peak_bytes(first, steps) > chosen.memory_bytes:
        first -= 1
    windows: list[tuple[int, int, Any]] = [(0, first, state)]
    windows += [(k.first, k.first + 1, k) for k in facts.kinds if k.first >= first]
    seconds, outcomes = 0.0, []
    for start, stop, given in windows:
        part = replace(
            program, window=(start, stop), outputs=None if callable(outputs) else outputs
        )
        if start:
            leaves = survey.state_before(given)
            given = pytree.tree_unflatten(leaves, facts.states[given.before].spec)
        found = _checked_window(part, given, around, device, chosen, check)
        seconds += found.seconds
        outcomes.append(found.outcome)
        del given
    different = [outcome for outcome in outcomes if outcome != outcomes[0]]
    return Checked("; ".join([outcomes[0], *dict.fromkeys(different)]), seconds)


def _checked_window(
    part: _Program,
    state: object,
    around: Surroundings,
    device: torch.device,
    chosen: UnrollPlan,
    check: Check,
) -> Checked:
    plan = _run_again(part.steps, chosen)

    def plainly(given: object) -> object:
        found = part.plainly(given, graph=True)
        return found.state, found.loss, found.outputs

    def scheduled(given: object) -> object:
        found = part.scheduled(given, plan, around, device)
        return found.state, found.loss, found.outputs

    cells = {part.facts.kind(t).cell for t in range(*part.steps)}
    return check_chain(
        plainly,
        plainly if chosen.plan is None else scheduled,
        state,
        name=part.cells.name,
        stages=[part.cells.each[number].given for number in sorted(cells)],
        room_bytes=chosen.memory_bytes / 2,
        writes=False,
        check=check,
        targets=[*part.inputs.tensors(), *part.facts.parameters],
    )


def _thirds(start: int, stop: int) -> tuple[int, ...]:
    """Return the cuts of three chunks at most."""
    return (*range(start, stop, -(-(stop - start) // 3)), stop)


def _peak_bytes(count: int, steps: Steps) -> int:
    """Return what the first steps take at most, plainly and by the schedule of the check."""
    plain, costs = steps.chained((0, count)), steps.chained(_thirds(0, count))
    schedules = (_actions_again(1), plain), (_actions_again(len(costs.stages)), costs)
    return max(simulate(a, None, each, checked=False).peak_bytes for a, each in schedules)


def _run_again(steps: tuple[int, int], chosen: UnrollPlan) -> UnrollPlan:
    """Return a plan of three chunks at most, see `_actions_again`."""
    cuts = _thirds(*steps)
    costs = StageCosts.uniform(len(cuts) - 1, Stage("chunk", 1e-6, 1e-6, 0, 0))
    actions = tuple(_actions_again(len(costs.stages)))
    chain = replace(plan_chain(costs, None, "store-all"), actions=actions)
    longest = max(b - a for a, b in itertools.pairwise(cuts))
    return replace(chosen, chunk=longest, cuts=cuts, chain=chain, plan=described(chain))


def _actions_again(n: int) -> list[Action]:
    """Return a schedule of n chunks: the last is taped at once, the others run again.

    One chunk alone is run again too.
    """
    actions: list[Action] = [Advance(0, max(1, n - 1))]
    if n > 1:
        actions.append(Tape(n - 1))
    actions += [Tape(n), EndForward(), Reverse(n)]
    for k in reversed(range(n)):
        if k < n - 1 or n == 1:
            actions.append(Load(0))
            actions += [Advance(0, k)] if k else []
            actions.append(Tape(k))
        actions.append(Reverse(k))
    return actions
