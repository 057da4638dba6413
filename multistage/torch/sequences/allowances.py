"""Whether the steps of a sequence take the memory that was planned for.

Memory is planned from a few steps that are measured.  What an operator takes may depend
on values: a loop as long as an int in x_t, a mask, a `nonzero`.  The graph of every
chunk is therefore counted: its nodes always, and the bytes of their results where there
are more nodes than planned for, or where values are known to decide sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ...errors import BudgetError
from ..measurement.exploring import tensors_of
from ..measurement.saved import nodes_made
from ..tensors.graphs import graph_weight
from .cell import Facts
from .cells import VariedFacts
from .inputs import Inputs
from .results import Unrolled
from .unroll_plan import UnrollPlan


def allowance(plan: UnrollPlan, facts: Facts, inputs: Inputs, *, looked_at: int = 1) -> Allowance:
    """Return what the graphs of a sequence may take.

    Parameters
    ----------
    plan : UnrollPlan
    facts : Facts
    inputs : Inputs
    looked_at : int
        How many steps the facts' weight is of, where steps are equal.
    """

    def weight(first: int, last: int) -> tuple[int, int]:
        if isinstance(facts, VariedFacts):
            of_steps = [facts.kind(t).weight for t in range(first, last)]
            return sum(nodes for nodes, _ in of_steps), sum(nbytes for _, nbytes in of_steps)
        count = -(-(last - first) // looked_at)
        return count * facts.weight[0], count * facts.weight[1]

    return Allowance(plan, inputs, weight)


@dataclass(slots=True)
class Allowance:
    """What the graphs of one sequence may take beside those that were planned for.

    Parameters
    ----------
    plan : UnrollPlan
    inputs : Inputs
    weight : callable
        `weight(first, last)` returns the nodes that were expected of the graph of steps
        `first` up to, without, `last`, and the bytes of their results.
    """

    plan: UnrollPlan
    inputs: Inputs
    weight: Callable[[int, int], tuple[int, int]]
    _over: dict[int, float] = field(default_factory=dict)  # by first step, of graphs held

    def hold(
        self,
        steps: tuple[int, int],
        nodes: int,
        roots: Sequence[Tensor],
        begun: int,
        besides: tuple[int, int] = (0, 0),
    ) -> None:
        """Count the graph of some steps, which is held from now on.

        Parameters
        ----------
        steps : (int, int)
            The first, and the one behind the last.
        nodes : int
            Of the graph.
        roots : sequence of Tensor
        begun : int
            Sequence number of the first node.
        besides : (int, int)
            Nodes of the graph and bytes of their results that are not those of the steps.

        Raises
        ------
        BudgetError
            If the graphs that are held take the memory beyond the limit.
        """
        expected, nbytes = map(sum, zip(self.weight(*steps), besides, strict=True))
        by_values = self.plan.by_values or self.inputs.has_values()
        if nodes <= expected and not by_values:
            return
        over = graph_weight(roots, begun)[1] - nbytes
        if over <= 0:
            return
        # What a graph keeps alive is more than the results of its nodes: masks, inputs.
        every = max(1, self.weight(0, self.plan.n_steps)[1])
        self._over[steps[0]] = over * max(1.0, self.plan.keep_bytes / every)
        found = self.plan.peak_bytes + int(sum(self._over.values()))
        if found > self.plan.memory_bytes:
            first, last = steps
            where = f"step {first}" if last == first + 1 else f"steps {first} to {last - 1}"
            raise BudgetError(
                f"the graph of {where} takes more than the steps that were measured: about "
                f"{found} bytes in all, and memory={self.plan.memory_bytes}; values decide what a "
                "step costs: give inputs as a list where ints or texts in x_t do (8 different "
                "ones at most are measured one by one), costs=StageCosts(...), or more memory"
            )

    def hold_all(self, found: Unrolled[object, object], begun: int) -> None:
        """Count the graph of the whole sequence, which was run plainly; see `hold`.

        Parameters
        ----------
        found : Unrolled
        begun : int
            Sequence number of autograd's nodes before.
        """
        count = self.plan.n_steps
        outputs = tensors_of((found.loss, found.outputs))
        # Outputs are added up or stacked; x_t is taken from a tensor of all.
        nbytes = sum(y.nbytes * (1 if y.dim() and len(y) == count else count) for y in outputs)
        nodes, given = len(outputs) * count, self.inputs.given
        if isinstance(given, Tensor) and given.requires_grad:
            nodes, nbytes = nodes + count, nbytes + given.nbytes
        roots = [*tensors_of(found.state), *outputs]
        self.hold((0, count), nodes_made() - begun, roots, begun, (nodes, nbytes))

    def release(self, first: int) -> None:
        """Count the graph that begins at a step no more."""
        self._over.pop(first, None)
