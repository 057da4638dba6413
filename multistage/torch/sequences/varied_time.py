"""Steps that differ, as a chain of chunks of unequal cost.

Unlike equal chunks (`through_time`), whose states are their own tapes, these have tapes
that are held: the graphs of their steps.  Which chunks' are kept from the forward sweep
on is the plan's choice, as in a chain of stages.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ...errors import BudgetError, StateError
from ...model.stages import StageCosts
from ..tensors.graphs import Walked, leaves_below, uses
from ..tensors.meter import Meter
from ..tensors.states import (
    Bytes,
    Kind,
    Line,
    Part,
    Shape,
    TensorLayout,
    TensorSlots,
    TensorState,
    kind_of_part,
    said,
)
from .cell_rules import refuse_written
from .cells import Cells, VariedFacts, run_varied
from .chunk_graph import ChunkGraph, Gradients, Ys
from .collector import Collector
from .inputs import Inputs
from .sums import Sums
from .surroundings import Surroundings
from .through_time import ThroughTime, results_in


class Graph:
    """The tape of a chunk: its graph, which goes when the chunk is reversed."""

    __slots__ = ("chosen", "entry", "held")

    def __init__(
        self, again: ChunkGraph, walked: Walked, chosen: Sequence[int], entry: Sums
    ) -> None:
        # The entry is made now: by the thread of the graph, wherever backward is called from.
        self.chosen, self.entry = chosen, entry
        self.held: list[Any] = [walked.sort(), again]  # the graph first, then its nodes


class VariedThroughTime(ThroughTime):
    """A `Chain` whose step k runs the time steps from one cut to the next.

    Parameters
    ----------
    cells, facts, inputs, collector, around
        See `ThroughTime`.
    cuts : sequence of int
        The first time step of each chunk, and behind the last the number of all.
    device : torch.device
    costs : StageCosts, optional
        Of the chunks, where they were given: states must not take more.

    Attributes
    ----------
    weighs : bool
        Whether graphs must not take more than `costs` say, either.  To see what they take
        every operation is looked at, so that a kind of sequence is weighed once.
    """

    state_is_tape = False

    def __init__(
        self,
        cells: Cells,
        facts: VariedFacts,
        inputs: Inputs,
        collector: Collector,
        around: Surroundings,
        cuts: Sequence[int],
        device: torch.device,
        costs: StageCosts | None = None,
    ) -> None:
        longest = max((b - a for a, b in itertools.pairwise(cuts)), default=1)
        super().__init__(cells, facts, inputs, collector, around, longest, device)
        self.cells, self.varied, self.cuts, self._costs = cells, facts, list(cuts), costs
        self.weighs = False
        self.done: Callable[[], None] = lambda: None  # once a backward has ended

    @property
    def n_steps(self) -> int:
        """Chunks of the sequence."""
        return len(self.cuts) - 1

    def _steps(self, k: int) -> tuple[int, int]:
        return self.cuts[k], self.cuts[k + 1]

    def _spec(self, k: int) -> pytree.TreeSpec:
        return self.varied.state(self.cuts[k]).spec

    def _wants(self, k: int) -> tuple[bool, ...]:
        return self.varied.state(self.cuts[k]).wants

    def _last_wants(self) -> tuple[bool, ...]:
        return self._wants(self.n_steps)

    def _run_steps(
        self,
        state: object,
        steps: tuple[int, int],
        x: Callable[..., object],
        take: Callable[[tuple[int, list[Tensor]]], None],
    ) -> list[Tensor]:
        return run_varied(self.cells, self.varied, state, steps, x, take)

    def _require_like(self, k: int, given: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        """Nothing: each step's state is compared with those of its kind."""

    def _note(self, k: int, given: Sequence[Tensor], leaves: Sequence[Tensor], ys: Ys) -> None:
        super()._note(k, given, leaves, ys)
        if self._costs is None:
            return
        nbytes, t = sum(leaf.nbytes for leaf in leaves), self.cuts[k + 1] - 1
        most = self._costs.stages[k].output_bytes
        if nbytes > most:
            raise BudgetError(
                f"state {t + 1}, which step {t} returned, takes {nbytes} bytes, its costs say "
                f"output_bytes={most}; {_REMEDY}"
            )

    def tape(self, state: TensorState, step: int) -> tuple[TensorState, object]:
        """Run a chunk with a graph; return the state after it and the graph.

        Raises
        ------
        BudgetError
            If the graph takes more than given costs say.
        """
        if not self.weighs or self._costs is None:
            return self._taped(state, step)
        with Meter(self.device) as meter:
            meter.ignore([*state.tensors, *self.facts.parameters, *self.inputs.held()])
            found = self._taped(state, step)
            nbytes = meter.live_bytes()
        most = self._costs.stages[step].tape_bytes
        if nbytes > most:
            first, last = self._steps(step)
            where = f"step {first}" if last == first + 1 else f"steps {first} to {last - 1}"
            raise BudgetError(
                f"the graph of {where} takes {nbytes} bytes, the state after it included, the "
                f"costs say tape_bytes={most}; {_REMEDY}"
            )
        return found

    def _taped(self, state: TensorState, step: int) -> tuple[TensorState, object]:
        new = step >= self.front
        if not new:
            with torch.enable_grad():
                again = self._again(state, step)
                graph = self._graph(again, step)
            rest = self.around.now()
        else:
            self.front = step + 1
            with torch.enable_grad():
                again = self._first_graph(state, step)
                graph = self._graph(again, step)
            rest = self.around.after(*self._steps(step))
        after = TensorState([*(t.detach() for t in again.leaves), *rest])
        return after, graph

    def run_alone(self, state: TensorState) -> list[Tensor]:
        """Run the first chunk with nothing beside it; return the state after it."""
        given = self._given(state, 0, graph=self.facts.graded)
        user = pytree.tree_unflatten(given, self._spec(0))
        return self._run_steps(user, self._steps(0), self.inputs.at, lambda found: None)

    def _graph(self, again: ChunkGraph, k: int) -> Graph:
        parameters, walked = self.facts.parameters, Walked()
        own = {id(t) for t in [*again.given, *(x for _, x in again.xs)]}
        roots = [t for t in again.leaves if t.requires_grad]
        roots += [y for _, of_step in again.ys for y in of_step if y.requires_grad]
        for _ in leaves_below(roots, own, parameters, again.begun, self.cell.name, walked):
            pass  # refused when the chunk is reversed, if anybody else holds them
        if self.allowance is not None:
            self.allowance.hold(self._steps(k), len(walked.found), roots, again.begun)
        chosen = [i for i, p in enumerate(parameters) if uses(walked.used, p)]
        return Graph(again, walked, chosen, Sums([parameters[i] for i in chosen]))

    def _first_graph(self, before: TensorState, k: int) -> ChunkGraph:
        """Run a chunk for the first time, with a graph."""
        first, last = self._steps(k)
        ys: Ys = []
        versions: list[int] = []

        def take(found: tuple[int, list[Tensor]]) -> None:
            ys.append(found)
            versions.extend([y._version for y in found[1]])
            self.collector.add(*found)

        given, leaves, xs, begun = self._with_graph(before, k, take)
        self._hand_first_hooks_down(k, given)
        self._note(k, given, leaves, ys)
        if versions != [y._version for _, of_step in ys for y in of_step]:
            refuse_written(self.cell.name, (first, last))
        self.require_checksums()
        if self.checksums is not None:
            self.checksums.note(k, results_in(leaves, ys))
        before.checked()
        self.around.refuse_graphs(first, last)
        self._check_wants(k, leaves, ys)
        return ChunkGraph(given, leaves, xs, ys, begun)

    def verify(self) -> None:
        """Raise StateError if a chunk gave other results when it was run again."""
        super().verify()
        self.done()

    def reverse(self, tape: object, adjoint: Gradients, step: int) -> Gradients:
        """Return the gradients of the state before a chunk."""
        assert isinstance(tape, Graph)
        with torch.enable_grad():
            found = self._back(tape.held, adjoint, step, tape.chosen, tape.entry)
        if self.allowance is not None:
            self.allowance.release(self.cuts[step])
        return found


_REMEDY = "give the sizes as they are, or no costs to have them measured"


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
