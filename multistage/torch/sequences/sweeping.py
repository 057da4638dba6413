"""One sequence as one operation of autograd's graph."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...backends.base import Store
from ...backends.lifetimes import Birth, Ending, end
from ...errors import MultistageError
from ...execute.executor import Executor
from ...execute.late import Late
from ...planners.chain.plan import ChainPlan
from ...planners.uniform import UniformPlan
from ...schedule.rules import Rules, check
from ...states.layout import Layout
from ...states.slots import States
from ...support.interrupts import Shield
from ...support.progress import Bars
from ..tensors.states import TensorState
from .inputs import InputGradients
from .results import Unrolled, results_of
from .through_time import ThroughTime
from .unroll_plan import UnrollPlan

LayoutT = TypeVar("LayoutT")

_log = logging.getLogger(__name__)


def through(
    run: Sweep, chosen: UnrollPlan, spec: pytree.TreeSpec, wanted: Sequence[Tensor]
) -> Unrolled[object, object]:
    """Run a sequence by its schedule."""
    try:
        found = _ThroughAutograd.apply(run, *wanted)
    except BaseException:
        run.close()  # now: a traceback may keep it for long
        raise
    values = [None if n is None else found[n] for n in run.places]
    loss, reduced = results_of(run.chain.facts, values[spec.num_leaves :])
    last = pytree.tree_unflatten(values[: spec.num_leaves], spec)
    return Unrolled(last, loss, reduced, chosen)


class Sweep:
    """One sequence, forward and backward; lives as long as the graph it is part of.

    Parameters
    ----------
    chain : ThroughTime
    first : TensorState
        State 0.
    plan : UnrollPlan
    store : Store or None
        The slow tier, closed.
    record : Layout or None
        What it is opened for.
    states : States
        What the chain's states are made of.
    bars : Bars
    late : Late, optional
        What is asked where the tier is late.
    was_late : callable, optional
        Called without arguments after a sweep that went on without its tier.
    """

    def __init__(
        self,
        chain: ThroughTime,
        first: TensorState,
        plan: UnrollPlan,
        store: Store | None,
        record: Layout | None,
        states: States[TensorState, Tensor, LayoutT],
        bars: Bars,
        late: Late | None = None,
        was_late: Callable[[], None] | None = None,
    ) -> None:
        self.chain = chain
        self._late, self._was_late = late, was_late
        self._bars = bars
        self._first = first
        self._plan = plan
        self._ready = False
        self.places: list[int | None] = []  # in the results, of the state's leaves and y's
        schedule, chained = plan.plan, plan.chain
        assert schedule is not None
        self._executor: Executor[TensorState, Any] = Executor(
            bars.watch(chain, schedule.costs.forward_step_s),
            () if store is None else (store,),
            # In slots where chunks are alike, byte by byte where they are not.
            slots=schedule.slots if chained is None else math.inf,
            rules=None if chained is None else partial(rules_of, chained, schedule),
            states=states,
            progress=bars.update if bars.shown else None,
        )
        with Shield(up=True):  # what is open is also noted to be closed
            if store is not None:
                assert record is not None
                store.open(record)
            self._end = Ending(self, partial(_end, self._executor, store, Birth.here()))

    def close(self) -> None:
        """Forget the sweep; close the tier and give it back."""
        self._end()

    def forward(self) -> TensorState:
        """Run all steps; return the last state."""
        assert self._plan.plan is not None
        around = self.chain.around
        with contextlib.closing(self._bars) as bars, around.turn(), around.settled(keep=True):
            bars.start(self._plan.plan.n_steps)
            last = self._run_forward()
        self._ready = True
        return last

    def _run_forward(self) -> TensorState:
        assert self._plan.plan is not None
        late, schedule = self._late, self._plan.plan.schedule()
        last = self._executor.forward(schedule, self._first, late=late)
        self._note_late()
        return last

    def _note_late(self) -> None:
        """Log that a sweep went on without its tier; the next one is planned for that."""
        if self._late is not None and self._late.why and self._was_late is not None:
            _log.info("%s", self._late.why)
            self._was_late()

    def backward(
        self, adjoint: tuple[Tensor | None, ...], outputs: Sequence[Tensor | None]
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of state 0; those of inputs and parameters lie in the chain."""
        chain = self.chain
        chain.output_gradients = outputs
        chain.sums = [None] * len(chain.facts.parameters)
        chain.of_inputs = InputGradients(chain.inputs)
        with chain.around.turn(), chain.replaying():
            if not self._ready:  # a second backward: stand where the forward sweep ended
                self._run_forward()
            self._ready = False
            assert self._plan.plan is not None
            with contextlib.closing(self._bars) as bars:
                bars.back(self._plan.plan.n_steps)
                gradients: tuple[Tensor | None, ...] = self._executor.reverse(adjoint)
            self._note_late()
            chain.verify()
            return gradients


def rules_of(plan: ChainPlan, schedule: UniformPlan) -> Rules:
    """Return the machine that judges the chunks' actions, byte by byte.

    A state that the plan takes from within a tape is saved beside it, by reference: it
    counts twice here, and the limit is raised where that alone would exceed it.
    """
    costs, n = plan.costs, len(plan.costs.stages)
    counted = check(schedule.schedule(), n, costs=costs).peak_bytes
    limit = plan.memory_bytes
    assert counted is not None
    return Rules.in_bytes(costs, n, None if limit is None else max(limit, counted), recovers=True)


def _end(executor: Executor[TensorState, Any], store: Store | None, birth: Birth) -> None:
    def close() -> None:
        executor.abort()
        if store is not None:
            store.close()

    end(close, birth)


class _ThroughAutograd(torch.autograd.Function):
    """The sequence as one operation of autograd's graph."""

    @staticmethod
    def forward(ctx: Any, run: Sweep, *wanted: Tensor) -> tuple[Tensor | None, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        chain = run.chain
        chain.hooks.state_0 = wanted[: chain.first_spec().num_leaves]
        last = run.forward().tensors[: chain.last_spec().num_leaves]
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
        count, places = chain.last_spec().num_leaves, ctx.run.places
        # A result that stands at several places has one gradient, that of its first.
        each = [
            None if n is None or n in places[:i] else gradients[n] for i, n in enumerate(places)
        ]
        of_state = ctx.run.backward(tuple(each[:count]), each[count:])
        assert chain.of_inputs is not None
        of_inputs, sums = chain.of_inputs.values(), chain.sums
        chain.of_inputs, chain.sums = None, []
        return (None, *of_state, *of_inputs, *sums)
