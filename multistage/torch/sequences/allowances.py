"""Whether the steps of a sequence take the memory that was planned for.

Memory is planned from a few steps that are measured.  What an operator takes may depend
on values: a loop as long as an int in x_t, a mask, a `nonzero`.  The graph of every
chunk is therefore counted: its nodes always, and the bytes of their results where there
are more nodes than planned for, or where values are known to decide sizes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...errors import BudgetError
from ..environment.states import tensors_in
from ..measurement.saved import nodes_made
from ..tensors.graphs import graph_weight
from ..tensors.meter import Meter
from .facts import Facts
from .inputs import Inputs
from .unroll_plan import UnrollPlan

_UNSEEN = 4.0  # times its nodes' results, that a graph is taken to keep where none was measured
_ALIKE = 1.1  # times the nodes expected, below which a graph is taken to be as planned


@dataclass(slots=True)
class Allowance:
    """What the graphs of one sequence may take beside those that were planned for."""

    plan: UnrollPlan
    facts: Facts
    inputs: Inputs
    _over: dict[int, float] = field(default_factory=dict)  # by first step, of graphs held

    @property
    def by_values(self) -> bool:
        """Whether a step may take other bytes than were planned for, its nodes the same."""
        return self.plan.by_values or self.inputs.has_values

    def hold(self, steps: tuple[int, int], nodes: int, roots: Sequence[Tensor], begun: int) -> None:
        """Count the graph of some steps, which is held from now on.

        It has so many nodes, the first of them with the sequence number `begun`.  Raises
        BudgetError if the graphs that are held take the memory beyond the limit.
        """
        expected, nbytes, _ = self.facts.weight(*steps)
        if nodes <= expected and not self.by_values:
            return
        over = graph_weight(roots, begun)[1] - nbytes
        if over <= 0:
            return
        # What a graph keeps alive is more than the results of its nodes: masks, inputs.
        every = self.facts.weight(0, self.plan.n_steps)[1]
        more = self.plan.keep_bytes / every if every else _UNSEEN
        self._over[steps[0]] = over * max(1.0, more)
        self._require(steps, self.plan.peak_bytes + int(sum(self._over.values())))

    def _require(self, steps: tuple[int, int], nbytes: int) -> None:
        """Raise BudgetError if, with the graph of some steps, more is held than allowed."""
        if nbytes > self.plan.memory_bytes:
            first, last = steps
            where = f"step {first}" if last == first + 1 else f"steps {first} to {last - 1}"
            raise BudgetError(
                f"the graph of {where} takes more than was measured, or than costs= say: about "
                f"{nbytes} bytes in all, and memory={self.plan.memory_bytes}; if values decide "
                "what a step costs, give inputs as a list where ints or texts in x_t do (8 "
                "different ones at most are measured one by one), costs=StageCosts(...), or more "
                "memory"
            )

    @contextlib.contextmanager
    def holding_all(
        self, device: torch.device, state: Sequence[Tensor]
    ) -> Iterator[Callable[[object], None]]:
        """Count the graph of the whole sequence, which is run plainly inside, from state 0.

        Its nodes are not looked at from Python, which would keep an object alive for each:
        a long graph of such nodes overflows the stack when it is freed.  Where values decide
        what operators take, what they return is counted as it is made.

        Yields
        ------
        callable
            To be called with the outputs, which are not part of the limit.  It raises
            BudgetError if the graph takes more than the limit.
        """
        begun, steps = nodes_made(), (0, self.plan.n_steps)
        meter = Meter(device) if self.by_values else None
        if meter is not None:  # views of what was there before are no part of the graph
            meter.ignore([*state, *self.facts.parameters])
            meter.ignore([*self.inputs.held(), *self.inputs.everything()])

        def judge(outputs: object) -> None:
            ys = tensors_in(outputs)
            if meter is not None:
                self._require(steps, meter.bytes_but(ys))
                return
            # Outputs are added up or stacked; x_t is taken from a tensor of all.
            of_steps = len(ys) + (isinstance(self.inputs.given, Tensor))
            expected = self.facts.weight(*steps)[2] + of_steps * self.plan.n_steps
            made = nodes_made() - begun
            if made > _ALIKE * expected:  # a call of a fused module has a few nodes of its own
                self._require(steps, self.plan.peak_bytes * made // max(1, expected))

        with contextlib.nullcontext() if meter is None else meter:
            yield judge

    def release(self, first: int) -> None:
        """Count the graph that begins at a step no more."""
        self._over.pop(first, None)
