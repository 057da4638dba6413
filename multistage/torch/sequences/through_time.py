"""Cells run over a sequence, as a chain of chunks of time steps whose states are tensors.

Accumulation order.  Gradients of parameters are added up in the order of plain
autograd (`tensors/sums.py`).  The same holds of a state that is an output too: the output's
gradient comes before those from the steps after.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...errors import ArgumentError, BudgetError, StateError
from ..environment.turns import TURN, unseen
from ..measurement.checking import complain
from ..measurement.exploring import without_hooks
from ..tensors.checksums import Checksums
from ..tensors.graphs import Walked, graph_begins, held_elsewhere, leaves_below, statistics_in, uses
from ..tensors.meter import Meter
from ..tensors.states import TensorState, TensorStates
from ..tensors.sums import Sums, differentiate
from .allowances import Allowance
from .arguments import Settings
from .boundaries import Boundaries
from .cells import Cells
from .facts import Facts, Ys, run_steps
from .hooks import HandedDown, refuse_hooks_on_inputs
from .inputs import InputGradients, Inputs, Taken
from .remembered import Known
from .results import Collector, Outputs
from .samples import Samples, Watch
from .surroundings import Surroundings

Gradients: TypeAlias = tuple[Tensor | None, ...]
_REMEDY = "give the sizes as they are, or no costs to have them measured"


@dataclass(frozen=True, slots=True)
class Computation:
    """Steps of a sequence, what is around them, and what becomes of their outputs."""

    cells: Cells
    facts: Facts
    inputs: Inputs
    around: Surroundings
    device: torch.device  # where the states lie
    settings: Settings
    outputs: Outputs
    steps: tuple[int, int]  # those that are run

    def states(self, leaves: Sequence[Tensor]) -> TensorStates:
        """Return what states are made of, of which one has these leaves; names for messages."""
        names = [f"leaf {k} of the state" for k in range(len(leaves))]
        return TensorStates([*names, *self.around.names()], varied=not self.facts.equal)


@dataclass(slots=True)
class Chunk:
    """A chunk that was run."""

    given: list[Tensor]  # the state before it
    begun: int  # sequence number of autograd's first node in it; 0 without a graph
    repeated: bool  # whether it was run before
    collector: Collector | None  # of the outputs of a first run
    watch: Watch | None = None  # of what it has written to
    leaves: list[Tensor] = field(default_factory=list)  # of the state after it
    xs: Taken = field(default_factory=list)  # leaves that stand for inputs
    ys: Ys = field(default_factory=list)
    _versions: list[int] = field(default_factory=list)

    @property
    def results(self) -> list[Tensor]:
        """All that its steps have returned: the last state and each output."""
        return [*self.leaves, *(y for _, of_step in self.ys for y in of_step)]

    def take(self, found: tuple[int, list[Tensor]]) -> None:
        """Take t and the leaves of y of a step."""
        self.ys.append(found)
        for y in found[1]:
            self._versions.append(y._version)
        if self.collector is not None:
            self.collector.add(*found)

    def refuse_written(self, name: str, steps: tuple[int, int]) -> None:
        """Raise StateError if an output was written to after it was returned."""
        if self._versions != [y._version for _, of_step in self.ys for y in of_step]:
            raise StateError(
                f"{name} writes to an output of steps {steps[0]} to {steps[1] - 1} after it was "
                "returned; it must return tensors that it leaves alone: a copy"
            )


class Graph:
    """The tape of a chunk: its graph, which goes when the chunk is reversed."""

    __slots__ = ("chosen", "entry", "held", "unknown", "walked")
    chosen: list[int]  # the parameters that the graph uses
    entry: Sums  # of those, made after the graph: by its thread, wherever backward is called from

    def __init__(self, chunk: Chunk) -> None:
        # Its nodes, then the chunk: a list lets its last item go first.
        self.held: list[Any] = [chunk]
        self.walked: Walked | None = None  # whose nodes they are; None if reversed at once
        self.unknown: list[Tensor] = []  # leaves that are neither its own nor parameters


class ThroughTime:
    """A `Chain` whose step k runs the time steps from one cut to the next.

    Its states are the leaves of the cell's state, the states of the random
    generators if a cell draws, and the buffers it changes: whatever a later
    run needs to do the same again.  Where chunks are equal a state is its own tape; else
    tapes are held, the graphs of chunks, and which ones from the forward sweep on is the
    plan's choice, as in a chain of stages.

    Chunk k ends where chunk k + 1 begins, and the last at the last cut or the last step.  By a
    plan that is `known` from given costs, states must not take more than these say; nor must
    graphs: to see what they take every operation is looked at, so that a kind of sequence is
    weighed once.
    """

    in_place = False
    one_tape = False

    def __init__(self, given: Computation, cuts: Sequence[int], known: Known | None = None) -> None:
        self.cells, self.facts, self.inputs = given.cells, given.facts, given.inputs
        self.around, self.device = given.around, given.device
        self.check, facts = given.settings.check, given.facts
        self.collector = Collector(facts, given.steps, given.outputs, given.cells.fused)
        self.cuts, self._known = cuts, known
        self.state_is_tape = facts.equal
        self.front = 0  # chunks whose outputs were collected
        # Of the first run; None once a warning was given.
        self.checksums = None if self.check == "off" else Checksums(self.n_steps, self.device)
        self.sums: list[Tensor | None] = []
        self.of_inputs: InputGradients | None = None  # while a backward runs
        ends = () if given.cells.fused else facts.parameters
        self.boundaries = Boundaries(facts.differentiable, facts.parameters, ends)
        self.allowance: Allowance | None = None  # for graphs that are larger than planned for
        self.output_gradients: Sequence[Tensor | None] = ()
        self.samples: Samples | None = None  # none while it is measured
        self.hooks = HandedDown()

    @property
    def n_steps(self) -> int:
        """Chunks of the sequence."""
        return len(self.cuts) - 1

    # ------------------------------------------------------------------ states

    def first(self, leaves: Sequence[Tensor]) -> TensorState:
        """Return state 0, with what is in the generators and buffers now."""
        self.boundaries.begin(leaves)
        return TensorState([*(t.detach() for t in leaves), *self.around.now()])

    def renew_sums(self) -> None:
        """Put copies in place of the sums so far, one by one, for whoever counts memory."""
        for i, total in enumerate(self.sums):
            if total is not None:
                self.sums[i] = total.clone()
            del total

    # ------------------------------------------------------------------- steps

    def _steps(self, k: int) -> tuple[int, int]:
        return self.cuts[k], self._stop_of(k)

    def _stop_of(self, k: int) -> int:
        return min(self.cuts[k + 1], self.inputs.steps)

    def spec(self, k: int) -> pytree.TreeSpec:
        """Return the structure of the state before a chunk, or the last."""
        return self.facts.state(self.cuts[k]).spec

    def _wants(self, k: int) -> tuple[bool, ...]:
        """Return which leaves of the state before a chunk take part in the gradient."""
        return self.facts.state(self.cuts[k]).wants

    def advance(self, state: TensorState, start: int, stop: int) -> TensorState:
        """Return the state after these chunks, without a graph."""
        for k in range(start, stop):
            graph = self.facts.graded or (self.samples is not None and self.samples.graphed(k))
            # Of the chunks that are looked at, the graph is dropped.
            with torch.set_grad_enabled(graph), unseen() if graph else contextlib.nullcontext():
                chunk = self._run(state, k, graph=graph, taped=False)
                state.checked()
                rest = self._rest(chunk, k)
                state = TensorState([*(t.detach() for t in chunk.leaves), *rest])
            del chunk  # and its graph, before the next one is made
        return state

    def run_alone(self, state: TensorState) -> list[Tensor]:
        """Run the first chunk with nothing beside it; return the state after it."""
        given = self._given(state, 0, graph=self.facts.graded)
        return self._steps_run(Chunk(given, 0, True, None), 0, lambda found: None, taped=False)

    def _steps_run(
        self, chunk: Chunk, k: int, take: Callable[[tuple[int, list[Tensor]]], None], *, taped: bool
    ) -> list[Tensor]:
        """Run the steps of a chunk; `taped`, it gets what stands for inputs that want gradients."""
        inputs, steps, xs = self.inputs, self._steps(k), chunk.xs if taped else None

        def x(t: int) -> object:
            return inputs.many(t, steps[1], xs) if self.cells.fused else inputs.at(t, xs)

        seen = x if chunk.watch is None else chunk.watch.unseen(x)
        state = pytree.tree_unflatten(list(chunk.given), self.spec(k))
        return run_steps(self.cells, self.facts, state, steps, seen, take)

    def _run(self, before: TensorState, k: int, *, graph: bool, taped: bool) -> Chunk:
        """Run a chunk, `taped` to be differentiated; check that it did as it must.

        Raises
        ------
        StateError
            If it wrote to its state or an output, or did otherwise than in its first run.
        """
        new, steps, watch = k >= self.front, self._steps(k), None
        self.front = max(self.front, k + 1)
        again = taped and not new
        if again and self.samples is not None and self.samples.watched(k):
            watch = Watch([*before.tensors, *self.inputs.everything()])
        given = self._given(before, k, graph=graph)
        if watch is not None:
            watch.knows(self.around.tensors())
        begun = graph_begins() if taped else 0
        chunk = Chunk(given, begun, not new, self.collector if new else None, watch)
        with contextlib.nullcontext() if watch is None else watch, self._refusing_writes(steps):
            take = chunk.ys.append if again else chunk.take
            chunk.leaves = self._steps_run(chunk, k, take, taped=taped)
        if not again:  # whose hooks are handed down when it is reversed
            self._hand_first_hooks_down(k, given)
        elif self.checksums is not None and self.checksums.differs(k, chunk.results):
            self._refuse_other(k)
        self._note(k, chunk)
        if not again:
            chunk.refuse_written(self.cells.name, steps)
        if new and self.checksums is not None:
            self.checksums.note(k, chunk.results)
        if taped:
            before.checked()
            self.around.refuse_graphs(*steps)
            self._check_wants(k, chunk)
        return chunk

    @contextlib.contextmanager
    def _refusing_writes(self, steps: tuple[int, int]) -> Iterator[None]:
        """Raise StateError where a cell writes to its state, a leaf where a chunk begins."""
        try:
            yield
        except RuntimeError as error:
            if "a leaf Variable that requires grad is being used in an in-place" not in str(error):
                raise
            raise StateError(
                f"{self.cells.name} writes to the state it is given, or to a parameter, by an "
                f"inplace operation at steps {steps[0]} to {steps[1] - 1}; it must return new "
                "tensors"
            ) from error

    def _rest(self, chunk: Chunk, k: int) -> list[Tensor]:
        """Return the generators' states and buffers after a chunk; look at what it changed."""
        return self.around.now() if chunk.repeated else self.around.after(*self._steps(k))

    def _note(self, k: int, chunk: Chunk) -> None:
        """Note which tensors around a chunk are one; compare the state with given costs."""
        TURN.moved()
        outputs, steps = () if self.cells.fused else chunk.ys, self._steps(k)
        if self.samples is not None and self.collector.steps > 1:  # else all may yet be kept
            self.boundaries.refuse_losses(
                self.cells.name, chunk.leaves, chunk.ys, self.facts.summed
            )
        if not self.boundaries.note(k, chunk.given, chunk.leaves, outputs, steps):
            raise StateError(
                f"{self.cells.name} returned other tensors twice after step {steps[1] - 1} "
                "when it was run again than at first; it must do the same every time"
            )
        if self._known is None:
            return
        nbytes, t = sum(leaf.nbytes for leaf in chunk.leaves), self.cuts[k + 1] - 1
        most = self._known.stages[k].output_bytes
        if nbytes > most:
            raise BudgetError(
                f"state {t + 1}, which step {t} returned, takes {nbytes} bytes, its costs say "
                f"output_bytes={most}; {_REMEDY}"
            )

    def _given(self, state: TensorState, k: int, *, graph: bool) -> list[Tensor]:
        """Return the state before a chunk for the cell to run on, in the surroundings of then."""
        tensors = state.checked()
        count = self.spec(k).num_leaves
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
        """Return the results of the sequence, flags and places; see `Collector.results`."""
        n = self.n_steps
        return self.collector.results(last, self.boundaries[n - 1].pattern, self._wants(n))

    def tape(self, state: TensorState, step: int) -> tuple[TensorState, object]:
        """Run a chunk with a graph; return the state after it and the graph.

        Raises
        ------
        BudgetError
            If the graph takes more than given costs say.
        """
        if self._known is None or self._known.weighed:
            return self._taped(state, step)
        with Meter(self.device) as meter:
            meter.ignore([*state.tensors, *self.facts.parameters, *self.inputs.held()])
            found = self._taped(state, step)
            nbytes = meter.live_bytes()
        most = self._known.stages[step].tape_bytes
        if nbytes > most:
            first, last = self._steps(step)
            where = f"step {first}" if last == first + 1 else f"steps {first} to {last - 1}"
            raise BudgetError(
                f"the graph of {where} takes {nbytes} bytes, the state after it included, the "
                f"costs say tape_bytes={most}; {_REMEDY}"
            )
        return found

    def _taped(self, state: TensorState, step: int) -> tuple[TensorState, object]:
        with torch.enable_grad():
            chunk = self._run(state, step, graph=True, taped=True)
            graph = Graph(chunk)
            roots = [t for t in chunk.leaves if t.requires_grad]
            roots += [y for _, of_step in chunk.ys for y in of_step if y.requires_grad]
            graph.held.insert(0, self._walk(graph, chunk, step, roots).sort())
            del roots
        rest = self._rest(chunk, step)
        return TensorState([*(t.detach() for t in chunk.leaves), *rest]), graph

    def _walk(self, graph: Graph, chunk: Chunk, k: int, roots: Sequence[Tensor]) -> Walked:
        """Look at the graph of a chunk, below some of its results."""
        parameters = self.facts.parameters
        own = {id(t) for t in [*chunk.given, *(x for _, x in chunk.xs)]}
        graph.walked = walked = Walked()
        graph.unknown += leaves_below(roots, own, parameters, chunk.begun, self.cells.name, walked)
        if chunk.repeated:
            self.around.refuse_statistics(statistics_in(walked.found), *self._steps(k))
        if self.allowance is not None and not graph.unknown:
            self.allowance.hold(self._steps(k), len(walked.found), roots, chunk.begun)
        graph.chosen = [i for i, p in enumerate(parameters) if uses(walked.used, p)]
        graph.entry = Sums([parameters[i] for i in graph.chosen])
        return walked

    def reverse(self, tape: object, adjoint: Gradients, step: int) -> Gradients:
        """Return the gradients of the state before a chunk, from its graph or from that state."""
        with torch.enable_grad():
            if isinstance(tape, TensorState):
                tape = Graph(self._run(tape, step, graph=True, taped=True))
            assert isinstance(tape, Graph)
            found = self._back(tape, adjoint, step)
        if self.allowance is not None:
            self.allowance.release(self.cuts[step])
        return found

    def _back(self, graph: Graph, adjoint: Gradients, k: int) -> Gradients:
        """Return the gradients of the state before a chunk; its graph goes."""
        again = graph.held.pop()  # nothing else may hold it
        given, xs, watch, sums = again.given, again.xs, again.watch, self.sums
        self._hand_hooks_down(k, again)
        roots: list[tuple[Tensor, Tensor | None]]
        roots = list(zip(again.leaves, adjoint, strict=True)) + self._of_outputs(k, again)
        roots = [(t, g) for t, g in roots if g is not None and t.requires_grad]
        if not roots:
            return (None,) * len(given)
        walked = graph.walked or self._walk(graph, again, k, [t for t, _ in roots])
        wanted = [t for i, t in enumerate(given) if t.requires_grad and self._is_own(k, i)]
        chosen = graph.chosen
        if any(sums[i] is not None for i in chosen):
            so_far = [sums[i] for i in chosen]
            for i in chosen:
                sums[i] = None
            roots += graph.entry.roots(so_far)
        parameters = self.facts.parameters
        targets = [*wanted, *[x for _, x in xs], *[parameters[i] for i in chosen]]
        measured = self.samples is None  # a plan that keeps all may follow
        alike = contextlib.nullcontext() if measured else self.around.no_draws(*self._steps(k))
        part = without_hooks(parameters, roots)
        with part as roots, alike, self._refusing_late_writes(k):
            found = gradients_of(self.cells.name, roots, targets)
        for (place, _), gradient in zip(xs, found[len(wanted) :], strict=False):
            if gradient is not None and self.of_inputs is not None:
                self.of_inputs.put(place, gradient)
        for i, total in zip(chosen, found[len(wanted) + len(xs) :], strict=True):
            sums[i] = total
        of_state = iter(found[: len(wanted)])
        result = tuple(
            next(of_state) if t.requires_grad and self._is_own(k, i) else None
            for i, t in enumerate(given)
        )
        del again, given, xs, roots, wanted, targets
        walked.release()
        if graph.unknown:
            self._refuse_unknown(k, graph.unknown)
        if watch is not None:
            watch.refuse_written(self.cells.name, self._steps(k))
        return result

    @contextlib.contextmanager
    def _refusing_late_writes(self, k: int) -> Iterator[None]:
        """Raise StateError where a graph that was held has saved what was written to since."""
        try:
            yield
        except RuntimeError as error:
            if "modified by an inplace operation" not in str(error):
                raise
            (first, last), late = self._steps(k), self.around.late_buffers()
            why = "inputs, parameters, buffers or outputs were, by an inplace operation"
            if late:
                why = (
                    f"results depend on {', '.join(late[:4])}, which changes at later steps and "
                    "not in the first; change it from the first step on, or return it in the state"
                )
            raise StateError(
                f"{self.cells.name} computed at steps {first} to {last - 1} with tensors that were "
                f"written to since: {why}"
            ) from error

    def _refuse_unknown(self, k: int, leaves: list[Tensor]) -> None:
        """Raise ArgumentError if there are leaves left; the cell's own went with the graph."""
        first, last = self._steps(k)
        for leaf in held_elsewhere(leaves, collect=True):
            raise ArgumentError(
                f"{self.cells.name} uses a tensor of shape {tuple(leaf.shape)} that wants a "
                f"gradient at steps {first} to {last - 1}, but did not at the first; give it in "
                "parameters=[...]"
            )

    def _hand_first_hooks_down(self, k: int, given: Sequence[Tensor]) -> None:
        if not k:
            own = [i for i in range(len(given)) if self._is_own(0, i)]
            self.hooks.first(given, own, self.cells.name)

    def _hand_hooks_down(self, k: int, again: Chunk) -> None:
        """Set hooks on the tensors whose whole gradients they are to see."""
        given, name = again.given, self.cells.name
        self._hand_first_hooks_down(k, given)
        self.hooks.enter(k, again.leaves)
        self.hooks.leave(k, given, [i for i in range(len(given)) if self._is_own(k, i)], name)
        if not isinstance(self.inputs.given, Tensor):  # whose steps are views, used once each
            refuse_hooks_on_inputs(name, [x for _, x in again.xs])

    def verify(self) -> None:
        """Raise StateError if a chunk gave other results on a device when it was run again."""
        k = None if self.checksums is None else self.checksums.bad()
        if k is not None:
            self._refuse_other(k)
        if self._known is not None:
            self._known.weighed = True

    def _refuse_other(self, k: int) -> None:
        """Raise StateError, or warn: a chunk gave other numbers in a second run."""
        self.checksums = None  # one warning is enough
        first, last = self._steps(k)
        late = self.around.late_buffers()  # that it changed, and the first step did not
        what = (
            f"{self.cells.name} returned other numbers at steps {first} to {last - 1} when they "
            "were run again than at first: "
        )
        complain(
            self.check,
            f"{what}results depend on {', '.join(late[:4])}, which changes at later "
            "steps and not in the first, so that it is no part of the state; change it from the "
            "first step on, or return it in the state"
            if late
            else f"{what}it must depend on its state, inputs, parameters and "
            "buffers alone; return what it remembers in the state, and choose deterministic "
            "operators (torch.use_deterministic_algorithms); other threads must not draw from the "
            "generators that it draws from, but from ones of their own",
        )

    def _is_own(self, k: int, i: int) -> bool:
        """Whether leaf i of the state before a chunk is neither an earlier leaf nor a parameter."""
        before = self.boundaries[k - 1]
        return before.pattern[i] == i and before.known[i] < 0

    def _of_outputs(self, k: int, again: Chunk) -> list[tuple[Tensor, Tensor | None]]:
        """Return the outputs that enter a chunk's graph, with their gradients."""
        last = k == self.n_steps - 1
        found = self.boundaries.outputs_of(k, again.given, again.ys, self._stop_of, last)
        gradients = self.output_gradients
        return [(y, self.collector.gradient(j, t, y, gradients[j])) for j, t, y in found]

    def _check_wants(self, k: int, chunk: Chunk) -> None:
        """Raise StateError if a result takes part in the gradient that was not known to."""
        name, stop = self.cells.name, self._stop_of(k)
        for i, (leaf, known) in enumerate(zip(chunk.leaves, self._wants(k + 1), strict=True)):
            if leaf.requires_grad and not known:
                raise StateError(
                    f"leaf {i} of the state of {name} takes part in the gradient after step "
                    f"{stop - 1}, and did not after the first; let that leaf of "
                    "state 0 require a gradient"
                )
        for t, of_step in chunk.ys:
            for j, leaf in enumerate(of_step):
                if leaf.requires_grad and not self.facts.differentiable[j]:
                    raise StateError(
                        f"leaf {j} of y of {name} takes part in the gradient at step {t}, and did "
                        "not at the first; let it have a graph there too, as by adding 0 * h.sum()"
                    )


def gradients_of(
    name: str, roots: Sequence[tuple[Tensor, Tensor | None]], targets: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Return the gradients of targets by roots and theirs; `name` is the cell's.

    Raises
    ------
    StateError
        If the graph holds a reentrant checkpoint, or a gradient is sparse.
    """
    try:
        found = differentiate([t for t, _ in roots], [g for _, g in roots], targets)
    except RuntimeError as error:
        if "use_reentrant=True" not in str(error):
            raise
        raise StateError(
            f"{name} uses reentrant checkpoint, whose gradients autograd computes only "
            "together with .grad; give torch.utils.checkpoint use_reentrant=False"
        ) from error
    for target, gradient in zip(targets, found, strict=True):
        if gradient is not None and gradient.layout is not torch.strided:
            raise StateError(
                f"{name} has a sparse gradient (of a parameter of shape "
                f"{tuple(target.shape)}), and chunks' gradients are added up densely; use "
                "nn.Embedding(sparse=False)"
            )
    return found
