"""What steps of each kind cost, measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...model.stages import Stage
from ..measurement.clocks import seconds_of
from ..tensors.meter import Meter
from ..tensors.states import Kind, TensorState
from .cells import Cells, StepKind, VariedFacts
from .chunk_graph import Gradients
from .collector import Collector
from .inputs import Inputs, Place
from .surroundings import Surroundings
from .varied_time import VariedThroughTime

_RUNS = 3  # timed, after one that is not
_LEAST_S = 1e-9


@dataclass(frozen=True, slots=True)
class KindCost:
    """What a step of one kind was seen to cost.

    Attributes
    ----------
    stage : Stage
        The gradients of the parameters that it uses are part of the backward's overhead.
    graph_bytes : int
        What the graph keeps alive that was not there before: less than the tape of the
        stage where the step hands most of its state on.
    y_bytes, x_gradient_bytes : int
    overhead_s : float
        Seconds of a chunk of one such step beside the step.
    by_values : bool
        Whether the values of tensors decide what operators take.
    """

    stage: Stage
    graph_bytes: int
    y_bytes: int
    x_gradient_bytes: int
    overhead_s: float
    by_values: bool


def measured_kind(
    cells: Cells,
    facts: VariedFacts,
    kind: StepKind,
    leaves: Sequence[Tensor],
    inputs: Inputs,
    around: Surroundings,
    device: torch.device,
) -> KindCost:
    """Run a step of one kind a few times; return what it costs.

    Parameters
    ----------
    cells, facts, kind, inputs, around
    leaves : sequence of Tensor
        Of a state before such a step.
    device : torch.device
    """
    trial = _Trial(cells, facts, kind, inputs, around, device)
    with around.measuring(), around.settled(keep=False):
        first = trial.chain.first(leaves)
        rest = sum(t.nbytes for t in first.tensors[len(leaves) :])
        took = trial.seconds(first)
        held = trial.bytes(first, leaves)
    before, after = facts.states[kind.before], facts.states[kind.after]
    state = max(sum(map(_nbytes, after.leaves)) + rest, held.out)
    tape_bytes = max(held.taped + rest, state)
    stage = Stage(
        name=kind.name,
        forward_s=max(_LEAST_S, min(took.alone_s, took.forward_s)),
        backward_s=max(_LEAST_S, took.backward_s),
        output_bytes=state,
        tape_bytes=tape_bytes,
        gradient_bytes=_wanted_bytes(after.leaves, after.wants),
        # Buffers are copied when they are put back, and again when they are put aside.
        forward_overhead_bytes=max(0, held.forward_peak - state) + 2 * rest,
        tape_overhead_bytes=max(0, held.taping_peak - tape_bytes) + 2 * rest,
        backward_overhead_bytes=max(
            0, held.back_peak - tape_bytes - _wanted_bytes(before.leaves, before.wants)
        ),
    )
    ys = sum(map(_nbytes, kind.ys))
    xs = sum(x.nbytes for x in _wanting(inputs, kind.first))
    return KindCost(stage, held.taped + rest, ys, xs, took.overhead_s, held.by_values)


@dataclass(frozen=True, slots=True)
class _Seconds:
    """Of a chunk of one step: forward, the step alone, forward with a graph, and back."""

    forward_s: float
    alone_s: float
    taping_s: float
    back_s: float

    @property
    def overhead_s(self) -> float:
        """What a chunk takes beside its step."""
        return max(0.0, self.forward_s - self.alone_s)

    @property
    def backward_s(self) -> float:
        """What reversing takes: also what taping takes longer than a run that keeps nothing."""
        return self.back_s + (max(0.0, self.taping_s - self.forward_s) - self.overhead_s)


@dataclass(frozen=True, slots=True)
class _Bytes:
    """Allocated by a chunk of one step, beyond what was there before.

    Attributes
    ----------
    out, taped : int
        What stays: after a run that keeps nothing, and with the graph.
    forward_peak, taping_peak, back_peak : int
    by_values : bool
    """

    out: int
    taped: int
    forward_peak: int
    taping_peak: int
    back_peak: int
    by_values: bool


class _Trial:
    """A chain of one step of a kind."""

    def __init__(
        self,
        cells: Cells,
        facts: VariedFacts,
        kind: StepKind,
        inputs: Inputs,
        around: Surroundings,
        device: torch.device,
    ) -> None:
        t = kind.first
        self._facts, self._inputs, self._device = facts, inputs, device
        self._collector = Collector(facts, 1, "last", False, order={t: 0})
        self.chain = VariedThroughTime(
            cells, facts, inputs, self._collector, around, (t, t + 1), device
        )
        self.chain.sums = [torch.zeros_like(p) for p in facts.parameters]
        after = facts.states[kind.after]
        self._adjoint: Gradients = tuple(
            torch.ones(size, dtype=dtype, device=place) if wanted else None
            for (size, dtype, place), wanted in zip(after.leaves, after.wants, strict=True)
        )

    def _begin(self) -> None:
        self.chain.front = 0
        self._collector.clear()

    def _alone(self, first: TensorState) -> None:
        with torch.set_grad_enabled(self._facts.graded):
            self.chain.run_alone(first)

    def seconds(self, first: TensorState) -> _Seconds:
        """Return what the step takes from a state on, the least of several runs."""
        chain, device, adjoint = self.chain, self._device, self._adjoint
        times: list[list[float]] = [[], [], [], []]
        held: list[object] = []
        for _ in range(_RUNS + 1):
            self._begin()
            times[0].append(seconds_of(lambda: chain.advance(first, 0, 1), device))
            times[1].append(seconds_of(lambda: self._alone(first), device))
            self._begin()
            times[2].append(seconds_of(lambda: held.append(chain.tape(first, 0)[1]), device))
            chain.output_gradients = _ones(self._collector)
            times[3].append(seconds_of(lambda: chain.reverse(held.pop(), adjoint, 0), device))
        return _Seconds(*(min(each[1:]) for each in times))

    def bytes(self, first: TensorState, leaves: Sequence[Tensor]) -> _Bytes:
        """Return what the step allocates from a state on; `seconds` was called before."""
        chain, facts, inputs = self.chain, self._facts, self._inputs
        held: list[object] = []
        self._begin()
        lying = [*first.tensors, *facts.parameters, *inputs.held(), *leaves, *inputs.tensors()]
        with Meter(self._device) as meter:
            meter.ignore(lying)
            result = chain.advance(first, 0, 1)
            forward_peak = meter.peak_bytes
            self._begin()
            out = meter.live_bytes()
            del result
            meter.reset_peak()
            held.append(chain.tape(first, 0)[1])
            self._begin()
            taping_peak, taped = meter.peak_bytes, meter.live_bytes()
            # Counted from here on, as they are freed on the way, and not part of a limit.
            before = meter.live_bytes()
            chain.renew_sums()
            sums = meter.live_bytes() - before
            meter.reset_peak()
            chain.reverse(held.pop(), self._adjoint, 0)
            back_peak = meter.peak_bytes - sums
        return _Bytes(out, taped, forward_peak, taping_peak, back_peak, meter.sizes_vary)


def _ones(collector: Collector) -> list[Tensor | None]:
    return [None if value is None else torch.ones_like(value) for value in collector.values()]


def _wanting(inputs: Inputs, t: int) -> list[Tensor]:
    taken: list[tuple[Place, Tensor]] = []
    if not inputs.made:
        inputs.at(t, taken)
    return [x for _, x in taken]


def _nbytes(kind: tuple[torch.Size, torch.dtype, torch.device]) -> int:
    size, dtype, _ = kind
    return size.numel() * dtype.itemsize


def _wanted_bytes(kinds: Sequence[Kind], wants: Sequence[bool]) -> int:
    return sum(_nbytes(kind) for kind, wanted in zip(kinds, wants, strict=True) if wanted)
