"""A sequence run from its beginning to its end: as it is written, or by a plan.

By a plan it is one operation of autograd's graph.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...actions import Advance, EndForward, Load, Reverse, Schedule, Tape
from ...backends.base import Store
from ...backends.lifetimes import Ending
from ...errors import MultistageError, StateError
from ...execute.executor import Executor
from ...execute.late import EqualSteps, Late, Stages
from ...model.costs import Costs
from ...reversing.streamed import largest_of, probe_bytes
from ...schedule.rules import Rules
from ...schedule.simulation import simulate
from ...states.layout import Layout
from ...support.interrupts import Shield
from ...support.progress import Bars
from ..environment.randomness import cuda_or_cpu, refuse_hidden_draws
from ..environment.turns import looking
from ..measurement.checking import Checked, check_chain
from ..measurement.exploring import hooks_silent, let_see_wholes
from ..offload import offload
from ..tensors.states import TensorLayout, TensorState
from ..tiers.pinned import open_tiers
from .allowances import Allowance
from .arguments import Settings
from .costs import Steps
from .facts import Facts, run_steps
from .inputs import InputGradients
from .planning import planned
from .remembered import KNOWN, Known
from .results import Collector, Outputs, Unrolled, results_of
from .samples import Samples
from .search import TRAVELS_BYTES
from .surroundings import Surroundings
from .survey import Survey
from .through_time import Computation, Gradients, ThroughTime
from .unroll_plan import UnrollPlan

_log = logging.getLogger(__name__)
_CHECKED = 12  # steps at most that a check runs from state 0
_SLOWER = 1.2  # times as slow as planned, at least, a tier is that was late


def plainly(
    given: Computation, state: object, chunk: int | None = None, *, graph: bool = True
) -> Unrolled[object, object]:
    """Run steps as they are written, with or without a graph; a fused cell in chunks."""
    cells, facts, inputs = given.cells, given.facts, given.inputs
    collector = Collector(facts, given.steps, given.outputs, cells.fused, graph=graph)
    (start, stop), size = given.steps, given.settings.chunk if chunk is None else chunk
    if size is None or not cells.fused:
        size = stop - start
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
    survey: Survey, facts: Facts, state: object, outputs: Outputs, settings: Settings
) -> Unrolled[object, object]:
    """Run a sequence, by a plan where gradients are required."""
    cells, inputs, leaves = survey.cells, survey.inputs, pytree.tree_leaves(state)
    wanted = [*leaves, *inputs.tensors(), *facts.parameters]
    involved = [*leaves, *inputs.held(), *facts.parameters]
    around = Surroundings(cells, facts, survey.generators, involved)
    around.compared = settings.check != "off"
    device, steps = cuda_or_cpu(involved), (0, inputs.steps)
    given = Computation(cells, facts, inputs, around, device, settings, outputs, steps)
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in wanted):
        survey.close()
        return plainly(given, state, graph=False)
    inputs.known_as(facts.parameters)
    if facts.equal and not cells.fused:
        inputs.expect(facts.kinds[-1].x_kinds)
    # States of several sizes go by way of host memory.
    place = device if facts.equal else torch.device("cpu")
    store = open_tiers(settings.tiers, place)
    layout = given.states(leaves).layout(TensorState([*leaves, *around.now()]))

    def checked(plan: UnrollPlan, steps: Steps | None) -> Checked:
        return _checked(given, survey, state, plan, steps)

    with hooks_silent(cells.scope.modules), looking():
        known = planned(given, survey, leaves, layout, store, checked)
    survey.close()  # its states are no part of the plan
    if known.plan.plan is not None:
        refuse_hidden_draws(cells.scope.modules, cells.name)
        found = _scheduled(given, state, known, store, layout)
    else:
        with around.turn():
            found = _kept(given, state, known)
    return replace(found, plan=known.plan)


def _kept(given: Computation, state: object, known: Known) -> Unrolled[object, object]:
    """Run the steps plainly, their graphs counted: by given costs the first time alone.

    Raises
    ------
    BudgetError
        If the graphs take more than the limit.
    """
    chosen, leaves = known.plan, pytree.tree_leaves(state)
    if chosen.planner == "offload":
        stays = [t for t in [*leaves, given.inputs.given] if isinstance(t, Tensor)]
        tiers, device = given.settings.tiers, given.device
        with offload(tiers, min_bytes=TRAVELS_BYTES, stays=stays, device=device):
            return plainly(given, state)
    if known.weighed:
        return plainly(given, state)
    allowance = Allowance(chosen, given.facts, given.inputs)
    with allowance.holding_all(given.device, leaves) as judge:
        found = plainly(given, state)
        judge((found.loss, found.outputs))
    known.weighed = given.settings.costs is not None
    return found


def _scheduled(
    given: Computation, state: object, known: Known, store: Store | None, layout: TensorLayout
) -> Unrolled[object, object]:
    chosen, settings = known.plan, given.settings
    plan, leaves = chosen.plan, pytree.tree_leaves(state)
    assert plan is not None
    # Of equal chunks the last may be shorter: a range takes no memory.
    cuts = chosen.cuts or range(0, given.inputs.steps + chosen.chunk, chosen.chunk)
    chain = ThroughTime(given, cuts, None if settings.costs is None else known)
    if settings.costs is None:
        chain.allowance = Allowance(chosen, given.facts, given.inputs)
    chain.samples = KNOWN.looks(given.cells, chain.n_steps)
    bars, store = Bars(settings.progress), store if plan.writes else None
    record, slots, tape_slots, rules = layout.record, math.inf, 1.0, None
    if isinstance(plan.costs, Costs):
        slots, tape_slots = plan.slots, plan.costs.tape_slots
        chain.state_is_tape = plan.costs.state_is_tape
    else:
        # Each action is judged byte by byte.  The limit is the user's; what the caller holds and
        # the buffers of the tier are beside it.
        costs = plan.stage_costs
        record, reserved = largest_of(costs), costs.stages[-1].output_bytes
        if store is not None:
            reserved += store.buffer_bytes(record)
            store.queue_depth = max(store.queue_depth, plan.writes)
        rules = partial(Rules.in_bytes, costs, chosen.memory_bytes - reserved, recovers=True)
    executor = Executor[TensorState, Gradients](
        bars.watch(chain, max(1e-9, plan.makespan_s / (3 * plan.n_steps))),
        () if store is None else (store,),
        slots=slots,
        tape_slots=tape_slots,
        rules=rules,
        states=given.states(leaves),
        progress=bars.update if bars.shown else None,
    )
    late = None if store is None else _late(given, chosen, layout)
    return Sweep(chain, leaves, plan.schedule, executor, bars, record, late).run()


def _late(
    given: Computation, chosen: UnrollPlan, layout: TensorLayout
) -> tuple[Late, Callable[[], None]]:
    """Return what is asked where the tier is late, and what has it known to the next plans."""
    plan, equal, tiers = chosen.plan, given.facts.equal, given.settings.tiers
    assert plan is not None
    moved = ("states", layout.nbytes) if equal else ("bytes", probe_bytes(plan.stage_costs))
    key = tiers, given.device, *moved
    stages = None if equal else Stages(plan, inside=False)
    late = Late(stages or EqualSteps(plan.n_steps, plan.slots, plan.tiers, True))

    def tell() -> None:
        # Of what was planned, not of what is known by now: a second backward tells it again.
        (planned,) = plan.tiers
        if stages is None:
            (slowed,) = late.slowed((planned.slower(_SLOWER),))
        else:
            slowed = stages.slowed(planned)
        KNOWN.was_late(tiers, chosen, key, slowed)

    return late, tell


# ---------------------------------------------------------- one operation of autograd


class Sweep:
    """One sequence, forward and backward; lives as long as the graph it is part of.

    It starts from the leaves of state 0; `schedule` returns a fresh schedule.  The executor's
    store, the slow tier, is closed, and opened for `record`.  `late` is what is asked where the
    tier is late, and what is called when a sweep went on without it.
    """

    def __init__(
        self,
        chain: ThroughTime,
        leaves: Sequence[Tensor],
        schedule: Callable[[], Schedule],
        executor: Executor[TensorState, Gradients],
        bars: Bars,
        record: Layout | None = None,
        late: tuple[Late, Callable[[], None]] | None = None,
    ) -> None:
        self.chain, self._leaves, self._first = chain, leaves, chain.first(leaves)
        self._schedule, self._executor, self._bars = schedule, executor, bars
        self._late = late
        self._ready = False
        self.places: list[int | None] = []  # in the results, of the state's leaves and y's
        with Shield(up=True):  # what is open is also noted to be closed
            for store in executor.stores:
                assert record is not None
                store.open(record)
            self._end = Ending(self, partial(_end, executor))

    def run(self) -> Unrolled[object, object]:
        """Run the sequence forward; return its results, part of autograd's graph."""
        chain, leaves = self.chain, self._leaves
        del self._leaves  # the graph refers to us
        wanted = [*leaves, *chain.inputs.tensors(), *chain.facts.parameters]
        try:
            found = _ThroughAutograd.apply(self, *wanted)
        except BaseException:
            self._end()  # now: a traceback may keep it for long
            raise
        spec = chain.spec(chain.n_steps)
        values = [None if n is None else found[n] for n in self.places]
        loss, reduced = results_of(chain.facts, values[spec.num_leaves :])
        state = pytree.tree_unflatten(values[: spec.num_leaves], spec)
        return Unrolled(state, loss, reduced, None)

    def forward(self) -> TensorState:
        """Run all steps; return the last state."""
        around = self.chain.around
        with contextlib.closing(self._bars) as bars, around.turn(), around.settled(keep=True):
            bars.start(self.chain.n_steps)
            last = self._run_forward()
        self._ready = True
        return last

    def _run_forward(self) -> TensorState:
        late = None if self._late is None else self._late[0]
        last = self._executor.forward(self._schedule(), self._first, late=late)
        self._note_late()
        return last

    def _note_late(self) -> None:
        """Log that a sweep went on without its tier; the next one is planned for that."""
        if self._late is not None and self._late[0].why:
            late, tell = self._late
            _log.info("%s", late.why)
            tell()

    def backward(
        self, adjoint: tuple[Tensor | None, ...], outputs: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of state 0; those of inputs and parameters lie in the chain."""
        chain = self.chain
        chain.output_gradients = outputs
        chain.sums = [None] * len(chain.facts.parameters)
        chain.of_inputs = InputGradients(chain.inputs)
        with chain.around.turn(), chain.around.replaying():
            if chain.inputs.changed():
                raise StateError("inputs was changed in place between forward and backward")
            if not self._ready:  # a second backward: stand where the forward sweep ended
                self._run_forward()
            self._ready = False
            with contextlib.closing(self._bars) as bars:
                bars.back(chain.n_steps)
                gradients: tuple[Tensor | None, ...] = self._executor.reverse(adjoint)
            self._note_late()
            chain.verify()
            return gradients


def _end(executor: Executor[TensorState, Gradients]) -> None:
    executor.abort()
    for store in executor.stores:
        store.close()


class _ThroughAutograd(torch.autograd.Function):
    """The sequence as one operation of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, run: Sweep, *wanted: Tensor) -> tuple[Tensor | None, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        chain = run.chain
        chain.hooks.state_0 = wanted[: chain.spec(0).num_leaves]
        last = run.forward().tensors[: chain.spec(chain.n_steps).num_leaves]
        results, flags, run.places = chain.results(last)
        chain.collector.clear()  # a result that leads to its graph must not be part of it
        ctx.mark_non_differentiable(
            *(t for t, flag in zip(results, flags, strict=True) if t is not None and not flag)
        )
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise MultistageError(
                "double backward (create_graph=True) through unroll is not supported; give it "
                "memory enough to keep every tape, or planner='keep'"
            )
        chain = ctx.run.chain
        count, places = chain.spec(chain.n_steps).num_leaves, ctx.run.places
        # A result that stands at several places has one gradient, that of its first.
        each = [
            None if n is None or n in places[:i] else gradients[n] for i, n in enumerate(places)
        ]
        of_state = ctx.run.backward(tuple(each[:count]), each[count:])
        assert chain.of_inputs is not None
        # Plain autograd would not call the hooks of those that get no gradient.
        let_see_wholes([*chain.hooks.state_0, *chain.inputs.tensors(), *chain.facts.parameters])
        of_inputs, sums = chain.of_inputs.values(), chain.sums
        chain.of_inputs, chain.sums = None, []
        return (None, *of_state, *of_inputs, *sums)


# ---------------------------------------------------------------------- checking


def _checked(
    given: Computation, survey: Survey, state: object, chosen: UnrollPlan, steps: Steps | None
) -> Checked:
    """Run some steps plainly, and by a schedule that runs them again; compare.

    The first steps of the sequence: as many as one chunk has, where it has three, so that
    their graph fits the limit; then, where steps differ, a step of each kind that is not
    among them.
    """
    facts = given.facts
    if given.settings.check == "off":
        return Checked("off")
    if any(each.enabled for each in given.around.settings.autocast):
        return Checked("not checked; under autocast gradients are added in another precision")
    survey.close()  # states are found again one by one, or too many would be held
    outputs = None if callable(given.outputs) else given.outputs
    first = min(given.steps[1], max(3, min(chosen.chunk, _CHECKED)))
    while steps is not None and first > 1 and _peak_bytes(first, steps) > chosen.memory_bytes:
        first -= 1
    windows: list[tuple[int, int, Any]] = [(0, first, state)]
    if not facts.equal:
        windows += [(k.first, k.first + 1, k) for k in facts.kinds if k.first >= first]
    seconds, outcomes = 0.0, []
    for start, stop, begin in windows:
        if start:
            leaves = survey.state_before(begin)
            begin = pytree.tree_unflatten(leaves, facts.states[begin.before].spec)
        part = replace(given, steps=(start, stop), outputs=outputs)
        found = _checked_part(part, begin, chosen)
        seconds += found.seconds
        outcomes.append(found.outcome)
        del begin
    different = [outcome for outcome in outcomes if outcome != outcomes[0]]
    return Checked("; ".join([outcomes[0], *dict.fromkeys(different)]), seconds)


def _checked_part(part: Computation, state: object, chosen: UnrollPlan) -> Checked:
    """Compare a run of some steps in three chunks at most with a plain one."""
    cuts = _thirds(*part.steps)
    cells, facts, size = part.cells, part.facts, cuts[1] - cuts[0]

    def results(found: Unrolled[object, object]) -> object:
        return found.state, found.loss, found.outputs

    def plain(state: object) -> object:
        return results(plainly(part, state, size))

    def scheduled(state: object) -> object:
        chain, leaves = ThroughTime(part, cuts), pytree.tree_leaves(state)
        n = chain.n_steps
        chain.samples = Samples(None, n, watch=not cells.is_compiled())
        executor = Executor[TensorState, Gradients](chain, (), states=part.states(leaves))
        return results(Sweep(chain, leaves, partial(_again, n), executor, Bars(False)).run())

    compared = partial(
        check_chain,
        name=cells.name,
        stages=[one.given for one in dict.fromkeys(map(cells.at, range(*part.steps)))],
        room_bytes=chosen.memory_bytes / 2,
        writes=False,
        check=part.settings.check,
        targets=[*part.inputs.tensors(), *facts.parameters],
    )
    # Where nothing is run again: measuring ran the cell, which must have left no trace.
    found = compared(plain, plain if chosen.plan is None else scheduled, state)
    if not cells.fused or chosen.plan is None or found.outcome != "equal":
        return found
    if any(facts.draws):
        return replace(found, outcome="equal, called chunk by chunk, which draws other numbers")
    other = "equal, called chunk by chunk; agrees to rounding with one call over all steps"
    name = f"one call of {cells.name} for all steps"
    every = part.steps[1]
    both = compared(
        lambda state: results(plainly(part, state, every)), plain, state, name=name, rounded=other
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
