"""One sequence as one operation of autograd's graph."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...actions import Schedule
from ...backends.base import Store
from ...backends.lifetimes import Birth, Ending, end
from ...errors import MultistageError, StateError
from ...execute.executor import Executor
from ...execute.late import Late
from ...schedule.rules import Rules
from ...schedule.timeline import Timeline
from ...states.layout import Layout
from ...states.slots import States
from ...support.interrupts import Shield
from ...support.progress import Bars
from ..tensors.states import (
    Bytes,
    Kind,
    Line,
    Part,
    Shape,
    TensorLayout,
    TensorSlots,
    TensorState,
    TensorStates,
    kind_of_part,
    said,
)
from .inputs import InputGradients
from .results import results_of
from .through_time import ThroughTime

_log = logging.getLogger(__name__)


def through(run: Sweep, wanted: Sequence[Tensor]) -> tuple[object, Tensor | None, object]:
    """Run a sequence by its schedule; return the last state, the loss and the outputs."""
    try:
        found = _ThroughAutograd.apply(run, *wanted)
    except BaseException:
        run.close()  # now: a traceback may keep it for long
        raise
    spec = run.chain.last_spec()
    values = [None if n is None else found[n] for n in run.places]
    loss, reduced = results_of(run.chain.facts, values[spec.num_leaves :])
    return pytree.tree_unflatten(values[: spec.num_leaves], spec), loss, reduced


@dataclass(frozen=True, slots=True)
class Course:
    """How a chain of chunks is run.

    Attributes
    ----------
    schedule : callable
        Returns a fresh schedule.
    states : States
        What the chain's states are made of.
    step_s : float
        Predicted seconds of a chunk forward.
    slots : float
        For states that are alike.
    rules : callable, optional
        Makes the machine that judges each action, where states are not.
    store : Store, optional
        The slow tier, closed.
    record : Layout, optional
        What it is opened for.
    late : Late, optional
        What is asked where the tier is late.
    was_late : callable, optional
        Called with the timeline of a sweep that went on without its tier.
    """

    schedule: Callable[[], Schedule]
    states: TensorStates | VariedTensors
    step_s: float = 1e-6
    slots: float = math.inf
    rules: Callable[[], Rules] | None = None
    store: Store | None = None
    record: Layout | None = None
    late: Late | None = None
    was_late: Callable[[Timeline], None] | None = None


class Sweep:
    """One sequence, forward and backward; lives as long as the graph it is part of.

    Parameters
    ----------
    chain : ThroughTime
    first : TensorState
        State 0.
    course : Course
    bars : Bars
    """

    def __init__(self, chain: ThroughTime, first: TensorState, course: Course, bars: Bars) -> None:
        self.chain, self._first, self._course, self._bars = chain, first, course, bars
        self._ready = False
        self.places: list[int | None] = []  # in the results, of the state's leaves and y's
        store = course.store
        states: States[TensorState, Any, Any] = course.states
        self._executor: Executor[TensorState, Any] = Executor(
            bars.watch(chain, course.step_s),
            () if store is None else (store,),
            slots=course.slots,
            rules=course.rules,
            states=states,
            progress=bars.update if bars.shown else None,
        )
        with Shield(up=True):  # what is open is also noted to be closed
            if store is not None:
                assert course.record is not None
                store.open(course.record)
            self._end = Ending(self, partial(_end, self._executor, store, Birth.here()))

    def close(self) -> None:
        """Forget the sweep; close the tier and give it back."""
        self._end()

    def forward(self) -> TensorState:
        """Run all steps; return the last state."""
        around = self.chain.around
        with contextlib.closing(self._bars) as bars, around.turn(), around.settled(keep=True):
            bars.start(self.chain.n_steps)
            last = self._run_forward()
        self._ready = True
        return last

    def _run_forward(self) -> TensorState:
        course = self._course
        last = self._executor.forward(course.schedule(), self._first, late=course.late)
        self._note_late()
        return last

    def _note_late(self) -> None:
        """Log that a sweep went on without its tier; the next one is planned for that."""
        late, was_late = self._course.late, self._course.was_late
        if late is not None and late.why and was_late is not None:
            _log.info("%s", late.why)
            was_late(self._executor.timeline)

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
            with contextlib.closing(self._bars) as bars:
                bars.back(chain.n_steps)
                gradients: tuple[Tensor | None, ...] = self._executor.reverse(adjoint)
            self._note_late()
            chain.verify()
            return gradients


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


class TensorLayouts:
    """The layouts of the states of one sweep, learnt as they come.

    Parameters
    ----------
    first : TensorState
        State 0.
    names : sequence of str
        What the tensors are called in messages; others are numbered.

    Attributes
    ----------
    nbytes : int
        Of state 0.
    """

    def __init__(self, first: TensorState, names: Sequence[str]) -> None:
        self._names = names
        self._first = TensorLayout(first.tensors, _named(names, len(first.tensors)))
        self._at: dict[int, list[Kind]] = {}
        self.nbytes = self._first.nbytes

    def arrays(self, state: TensorState, where: int | str = "the state") -> list[Part]:
        """Return the tensors of a state.  Raises StateError if they are not those of before."""
        found = [kind_of_part(t) for t in state.parts]
        if isinstance(where, int):
            known = self._at.setdefault(where, found)
            if known != found:
                was, now = (", ".join(map(said, kinds)) for kinds in (known, found))
                raise StateError(
                    f"state {where} of the chunks was {was} when the steps before it first ran, "
                    f"and is {now} now; a step must do the same each time it is run"
                )
        return list(state.parts)

    def pack(self, tensors: Sequence[Part]) -> tuple[list[Bytes], list[Shape]]:
        """Return the bytes of each tensor in host memory, and what `unpack` needs."""
        lines, shapes = self._first.pack(tensors)
        return [x.cpu().numpy() if isinstance(x, Tensor) else x for x in lines], shapes

    def unpack(self, arrays: Sequence[Line], packing: Sequence[Shape]) -> list[Tensor]:
        """Return the tensors that `pack` was given."""
        return self._first.unpack(arrays, packing)

    def same_as(self, other: object) -> bool:
        """Whether both describe the same states: each sweep has its own."""
        return self is other


class VariedTensorSlots(TensorSlots):
    """Fast slots for states of any layout."""

    def used_up(self, live: object) -> None:
        """Return what is live in place of a state that no step starts from any more."""
        return


class VariedTensors:
    """States of tensors that differ from chunk to chunk, for an executor.

    Parameters
    ----------
    names : sequence of str
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def layout(self, state: TensorState) -> TensorLayouts:
        """Return the layouts of the tensors of a state."""
        return TensorLayouts(state, self._names)

    def slots(self, layout: TensorLayouts) -> VariedTensorSlots:
        """Return fast slots for states whose layouts differ."""
        return VariedTensorSlots(layout)


def _named(names: Sequence[str], count: int) -> list[str]:
    return [names[i] if i < len(names) else f"tensor {i}" for i in range(count)]
