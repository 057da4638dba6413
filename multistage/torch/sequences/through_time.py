"""A cell run over a sequence, as a chain of chunks whose states are tensors.

Accumulation order.  Gradients of parameters are added up in the order of plain
autograd (`sums.py`).  The same holds of a state that is an output too: the output's
gradient comes before those from the steps after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...errors import StateError
from ..environment.turns import TURN
from ..measurement.checking import Check
from ..tensors.checksums import Checksums
from ..tensors.graphs import Walked, graph_begins, held_elsewhere, leaves_below, statistics_in
from ..tensors.states import TensorState
from .allowances import Allowance
from .boundaries import Boundaries
from .cell import Cell, Facts
from .cell_rules import (
    refuse_other_numbers,
    refuse_other_tensors,
    refuse_unknown,
    refuse_written,
    refusing_writes,
    require_known_wants,
    require_like,
)
from .chunk_graph import ChunkGraph, Gradients, Ys, gradients_of
from .collector import Collector
from .hooks import HandedDown, refuse_hooks_on_inputs
from .inputs import InputGradients, Inputs, Place
from .results import single_results
from .running_steps import run_steps, unseen, without_hooks
from .samples import Samples, Watch
from .sums import Sums
from .surroundings import Surroundings


class ThroughTime:
    """A `Chain` whose step k runs a chunk of time steps.

    Its states are the leaves of the cell's state, the states of the random
    generators if the cell draws, and the buffers it changes: whatever a later
    run needs to do the same again.

    Parameters
    ----------
    cell, facts, inputs, collector
    around : Surroundings
    chunk : int
        Time steps per step of the chain.
    device : torch.device
        Where the states lie.
    """

    in_place = False
    state_is_tape = True
    one_tape = False

    def __init__(
        self,
        cell: Cell,
        facts: Facts,
        inputs: Inputs,
        collector: Collector,
        around: Surroundings,
        chunk: int,
        device: torch.device,
    ) -> None:
        self.cell, self.facts, self.inputs, self.collector = cell, facts, inputs, collector
        self.chunk = chunk
        self.front = 0  # chunks whose outputs were collected
        self.checksums: Checksums | None = None  # of the first run
        self.sums: list[Tensor | None] = []
        self.of_inputs: InputGradients | None = None  # while a backward runs
        ends = () if cell.fused else facts.parameters
        self.boundaries = Boundaries(facts.differentiable, facts.parameters, ends)
        self.check: Check = "error"
        self.allowance: Allowance | None = None  # for graphs that are larger than planned for
        self.output_gradients: Sequence[Tensor | None] = ()
        self.samples: Samples | None = None  # none while it is measured
        self.hooks = HandedDown()
        self.around, self.device = around, device

    @property
    def n_steps(self) -> int:
        """Chunks of the sequence."""
        return -(-self.inputs.steps // self.chunk)

    # ------------------------------------------------------------------ states

    def names(self, state_names: Sequence[str]) -> list[str]:
        """Return names of a state's tensors, for messages."""
        return [*state_names, *self.around.names()]

    def first(self, leaves: Sequence[Tensor]) -> TensorState:
        """Return state 0, with what is in the generators and buffers now."""
        self.boundaries.begin(leaves)
        return TensorState([*(t.detach() for t in leaves), *self.around.now()])

    @contextlib.contextmanager
    def replaying(self) -> Iterator[None]:
        """Make everything what it was in the forward sweep; put the present back at the end.

        Raises
        ------
        StateError
            If a parameter or an input was changed since.
        """
        if self.inputs.changed():
            raise StateError("inputs was changed in place between forward and backward")
        with self.around.replaying():
            yield

    def renew_sums(self) -> None:
        """Put copies in place of the sums so far, one by one, for whoever counts memory."""
        for i, total in enumerate(self.sums):
            if total is not None:
                self.sums[i] = total.clone()
            del total

    # ------------------------------------------------------------------- steps

    def _steps(self, k: int) -> tuple[int, int]:
        return k * self.chunk, min((k + 1) * self.chunk, self.inputs.steps)

    def _stop_of(self, k: int) -> int:
        return self._steps(k)[1]

    def _spec(self, k: int) -> pytree.TreeSpec:
        """Return the structure of the state before a chunk."""
        return self.facts.spec

    def _wants(self, k: int) -> tuple[bool, ...]:
        """Return which leaves of the state before a chunk take part in the gradient."""
        return self.facts.wants_at(k)

    def first_spec(self) -> pytree.TreeSpec:
        """Return the structure of state 0."""
        return self._spec(0)

    def last_spec(self) -> pytree.TreeSpec:
        """Return the structure of the last state."""
        return self._spec(self.n_steps)

    def _last_wants(self) -> tuple[bool, ...]:
        return self.facts.wants[-1]

    def _note(self, k: int, given: Sequence[Tensor], leaves: Sequence[Tensor], ys: Ys) -> None:
        """Note which tensors around a chunk are one; compare the state with the one before."""
        TURN.moved()
        self._require_like(k, given, leaves)
        outputs = () if self.cell.fused else ys
        if not self.boundaries.note(k, given, leaves, outputs, self._steps(k)):
            refuse_other_tensors(self.cell.name, self._stop_of(k))

    def _require_like(self, k: int, given: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        """Raise StateError if a chunk returned a state of other shapes or dtypes than it got."""
        require_like(self.cell.name, given, leaves, self._steps(k))

    def advance(self, state: TensorState, start: int, stop: int) -> TensorState:
        """Return the state after these chunks, without a graph."""
        x = self.inputs.many if self.cell.fused else self.inputs.at
        self.require_checksums()
        for k in range(start, stop):
            graph = self.facts.graded or (self.samples is not None and self.samples.graphed(k))
            # Of the chunks that are looked at, the graph is dropped.
            with torch.set_grad_enabled(graph), unseen() if graph else contextlib.nullcontext():
                new = k >= self.front
                self.front = max(self.front, k + 1)
                given = self._given(state, k, graph=graph)
                first, last = self._steps(k)
                user = pytree.tree_unflatten(list(given), self._spec(k))
                ys: Ys = []
                versions: list[int] = []

                def take(found: tuple[int, list[Tensor]]) -> None:
                    ys.append(found)  # noqa: B023
                    versions.extend([y._version for y in found[1]])  # noqa: B023
                    if new:  # noqa: B023
                        self.collector.add(*found)

                with refusing_writes(self.cell.name, (first, last)):
                    leaves = self._run_steps(user, (first, last), x, take)
                self._hand_first_hooks_down(k, given)
                self._note(k, given, leaves, ys)
                if versions != [y._version for _, of_step in ys for y in of_step]:
                    refuse_written(self.cell.name, (first, last))
                if new and self.checksums is not None:
                    self.checksums.note(k, results_in(leaves, ys))
                state.checked()
                rest = self.around.after(first, last) if new else self.around.now()
                state = TensorState([*(t.detach() for t in leaves), *rest])
        return state

    def require_checksums(self) -> None:
        """Make room for the checksums of a first run, unless they are not wanted."""
        if self.checksums is None and self.check != "off":
            self.checksums = Checksums(self.n_steps, self.device)

    def _run_steps(
        self,
        state: Any,
        steps: tuple[int, int],
        x: Callable[..., Any],
        take: Callable[[tuple[int, list[Tensor]]], None],
    ) -> list[Tensor]:
        return run_steps(self.cell, self.facts, state, steps, x, take)

    def _given(self, state: TensorState, k: int, *, graph: bool) -> list[Tensor]:
        """Return the state before a chunk for the cell to run on, in the surroundings of then."""
        tensors = state.checked()
        count = self._spec(k).num_leaves
        self.around.reinstall(tensors[count:])
        before, wants = self.boundaries[k - 1], self._wants(k)
        pattern = before.pattern
        given: list[Tensor] = []
        for i, tensor in enumerate(tensors[:count]):
            if pattern[i] < i:
                given.append(given[pattern[i]])
            elif before.known[i] >= 0:
                given.append(self.facts.parameters[before.known[i]])
            else:
                given.append(tensor.detach().requires_grad_(graph and wants[i]))
        return given

    def results(self, last: Sequence[Tensor]) -> tuple[list[Tensor], list[bool], list[int | None]]:
        """Return the results of the sequence, flags and places; see `single_results`."""
        pattern = self.boundaries[self.n_steps - 1].pattern
        return single_results(
            last, pattern, self._last_wants(), self.collector, self.facts, fused=self.cell.fused
        )

    def tape(self, state: TensorState, step: int) -> tuple[TensorState, object]:
        """Raise: a state is its own tape."""
        raise AssertionError("a state is its own tape")

    def reverse(self, tape: object, adjoint: Gradients, step: int) -> Gradients:
        """Run a chunk again with a graph; return the gradients of the state before it."""
        assert isinstance(tape, TensorState)
        with torch.enable_grad():
            return self._reverse(tape, adjoint, step)

    def _reverse(self, before: TensorState, adjoint: Gradients, k: int) -> Gradients:
        return self._back([self._again(before, k)], adjoint, k)

    def _back(
        self,
        held: list[Any],
        adjoint: Gradients,
        k: int,
        chosen: Sequence[int] | None = None,
        entry: Sums | None = None,
    ) -> Gradients:
        """Return the gradients of the state before a chunk whose graph is there.

        Parameters
        ----------
        held : list whose last item is the ChunkGraph
            It is taken out: nobody else may hold the graph.
        adjoint : tuple of Tensor or None
        k : int
        chosen : sequence of int, optional
            The parameters that the graph uses; by default it may use all.
        entry : Sums, optional
            Of those parameters; by default it is made now.
        """
        facts = self.facts
        again = held.pop()
        given, xs, watch = again.given, again.xs, again.watch
        self._hand_hooks_down(k, again)
        roots: list[tuple[Tensor, Tensor | None]]
        roots = list(zip(again.leaves, adjoint, strict=True)) + self._of_outputs(k, again)
        roots = [(t, g) for t, g in roots if g is not None and t.requires_grad]
        if not roots:
            return (None,) * len(given)
        unknown: list[Tensor] = []
        own = {id(t) for t in [*given, *(x for _, x in xs)]}
        below = [t for t, _ in roots]
        walked = Walked()
        unknown += leaves_below(below, own, facts.parameters, again.begun, self.cell.name, walked)
        if again.repeated:
            self.around.refuse_statistics(statistics_in(walked.found), *self._steps(k))
        if chosen is None and self.allowance is not None and not unknown:
            self.allowance.hold(self._steps(k), len(walked.found), below, again.begun)
            self.allowance.release(self._steps(k)[0])  # the only one
        del below
        wanted = [t for i, t in enumerate(given) if t.requires_grad and self._is_own(k, i)]
        chosen = range(len(facts.parameters)) if chosen is None else chosen
        of_sums = tuple([facts.parameters[i] for i in chosen])
        if any(self.sums[i] is not None for i in chosen):
            entry = Sums(of_sums) if entry is None else entry
            sums = [self.sums[i] for i in chosen]
            for i in chosen:
                self.sums[i] = None
            roots += entry.roots(sums)
        targets = [*wanted, *(x for _, x in xs), *of_sums]
        with without_hooks(facts.parameters):
            found = gradients_of(self.cell.name, roots, targets)
        for (place, _), gradient in zip(xs, found[len(wanted) :], strict=False):
            if gradient is not None and self.of_inputs is not None:
                self.of_inputs.put(place, gradient)
        for i, total in zip(chosen, found[len(wanted) + len(xs) :], strict=True):
            self.sums[i] = total
        of_state = iter(found[: len(wanted)])
        result = tuple(
            next(of_state) if t.requires_grad and self._is_own(k, i) else None
            for i, t in enumerate(given)
        )
        del again, given, xs, roots, wanted, targets
        walked.release()
        if unknown:  # the cell's own leaves went with the graph
            refuse_unknown(self.cell.name, held_elsewhere(unknown, collect=True), self._steps(k))
        if watch is not None:
            watch.refuse_written(self.cell.name, self._steps(k))
        return result

    def _hand_first_hooks_down(self, k: int, given: Sequence[Tensor]) -> None:
        if not k:
            own = [i for i in range(len(given)) if self._is_own(0, i)]
            self.hooks.first(given, own, self.cell.name)

    def _hand_hooks_down(self, k: int, again: ChunkGraph) -> None:
        """Set hooks on the tensors whose whole gradients they are to see."""
        given, name = again.given, self.cell.name
        self._hand_first_hooks_down(k, given)
        self.hooks.enter(k, again.leaves)
        self.hooks.leave(k, given, [i for i in range(len(given)) if self._is_own(k, i)], name)
        if not isinstance(self.inputs.given, Tensor):  # whose steps are views, used once each
            refuse_hooks_on_inputs(name, [x for _, x in again.xs])

    def _again(self, before: TensorState, k: int) -> ChunkGraph:
        """Run a chunk again, with a graph; check that it did the same."""
        first, last = self._steps(k)
        ys: Ys = []
        watch = None
        if self.samples is not None and self.samples.watched(k):
            watch = Watch([*before.tensors, *self.inputs.everything()])
        given, leaves, xs, begun = self._with_graph(before, k, ys.append, watch)
        if self.checksums is not None and self.checksums.differs(k, results_in(leaves, ys)):
            self._refuse_other(k)
        self.around.refuse_graphs(first, last)
        self._check_wants(k, leaves, ys)
        self._note(k, given, leaves, ys)
        return ChunkGraph(given, leaves, xs, ys, begun, watch, repeated=True)

    def _with_graph(
        self,
        before: TensorState,
        k: int,
        take: Callable[[tuple[int, list[Tensor]]], None],
        watch: Watch | None = None,
    ) -> tuple[list[Tensor], list[Tensor], list[tuple[Place, Tensor]], int]:
        """Run a chunk with a graph; return the state before and after, inputs, where it began."""
        inputs, fused = self.inputs, self.cell.fused
        given = self._given(before, k, graph=True)
        xs: list[tuple[Place, Tensor]] = []
        x: Callable[..., object]
        x = (lambda t, end: inputs.many(t, end, xs)) if fused else lambda t: inputs.at(t, xs)
        if watch is not None:
            watch.knows(self.around.tensors())
            x = watch.unseen(x)
        begun = graph_begins()
        with contextlib.nullcontext() if watch is None else watch:
            state = pytree.tree_unflatten(given, self._spec(k))
            with refusing_writes(self.cell.name, self._steps(k)):
                leaves = self._run_steps(state, self._steps(k), x, take)
        return given, leaves, xs, begun

    def verify(self) -> None:
        """Raise StateError if a chunk gave other results on a device when it was run again."""
        k = None if self.checksums is None else self.checksums.bad()
        if k is not None:
            self._refuse_other(k)

    def _refuse_other(self, k: int) -> None:
        check, self.checksums = self.check, None  # one warning is enough
        refuse_other_numbers(check, self.cell.name, self._steps(k), self.around.late_buffers())

    def _is_own(self, k: int, i: int) -> bool:
        """Whether leaf i of the state before a chunk is neither an earlier leaf nor a parameter."""
        before = self.boundaries[k - 1]
        return before.pattern[i] == i and before.known[i] < 0

    def _of_outputs(self, k: int, again: ChunkGraph) -> list[tuple[Tensor, Tensor | None]]:
        """Return the outputs that enter a chunk's graph, with their gradients."""
        last = k == self.n_steps - 1
        found = self.boundaries.outputs_of(k, again.given, again.ys, self._stop_of, last)
        gradients = self.output_gradients
        return [(y, self.collector.gradient(j, t, y, gradients[j])) for j, t, y in found]

    def _check_wants(self, k: int, leaves: Sequence[Tensor], ys: Ys) -> None:
        """Raise StateError if a result takes part in the gradient that was not known to."""
        wants, stop = self._wants(k + 1), self._stop_of(k)
        require_known_wants(self.cell.name, self.facts, wants, leaves, ys, stop)


def results_in(leaves: Sequence[Tensor], ys: Ys) -> list[Tensor]:
    """Return all that the steps of a chunk have returned: the last state and each output."""
    return [*leaves, *(y for _, of_step in ys for y in of_step)]
