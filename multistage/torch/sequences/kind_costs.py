"""What steps of each kind cost, measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...model.stages import Stage
from ..measurement.clocks import seconds_of
from ..tensors.meter import Meter
from .cells import Cells, StepKind, VariedFacts
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
    t = kind.first
    collector = Collector(facts, 1, "last", False, order={t: 0})
    chain = VariedThroughTime(cells, facts, inputs, collector, around, (t, t + 1), device)
    parameters = facts.parameters
    chain.sums = [torch.zeros_like(p) for p in parameters]
    after = facts.states[kind.after]
    adjoint = tuple(
        torch.ones(size, dtype=dtype, device=place) if wanted else None
        for (size, dtype, place), wanted in zip(after.leaves, after.wants, strict=True)
    )
    with chain.replaying(), around.settled(keep=False):
        first = chain.first(leaves)
        rest = sum(t.nbytes for t in first.tensors[len(leaves) :])

        def began() -> None:
            chain.front = 0
            collector.clear()

        def alone() -> None:
            with torch.set_grad_enabled(facts.graded):
                chain.run_alone(first)

        times: list[list[float]] = [[], [], [], []]
        held: list[object] = []
        for _ in range(_RUNS + 1):
            began()
            times[0].append(seconds_of(lambda: chain.advance(first, 0, 1), device))
            times[1].append(seconds_of(alone, device))
            began()
            times[2].append(seconds_of(lambda: held.append(chain.tape(first, 0)[1]), device))
            chain.output_gradients = _ones(collector)
            times[3].append(seconds_of(lambda: chain.reverse(held.pop(), adjoint, 0), device))
        forward_s, alone_s, taping_s, back_s = (min(each[1:]) for each in times)
        began()
        lying = [*first.tensors, *parameters, *inputs.held(), *leaves, *inputs.tensors()]
        with Meter(device) as meter:
            meter.ignore(lying)
            result = chain.advance(first, 0, 1)
            forward_peak = meter.peak_bytes
            began()
            out = meter.live_bytes()
            del result
            meter.reset_peak()
            held.append(chain.tape(first, 0)[1])
            began()
            taping_peak, taped = meter.peak_bytes, meter.live_bytes()
            # Counted from here on, as they are freed on the way, and not part of a limit.
            before = meter.live_bytes()
            chain.renew_sums()
            sums = meter.live_bytes() - before
            meter.reset_peak()
            chain.reverse(held.pop(), adjoint, 0)
            back_peak = meter.peak_bytes - sums
    state_before = facts.states[kind.before]
    gradient = sum(_nbytes(k) for k, w in zip(after.leaves, after.wants, strict=True) if w)
    given = sum(
        _nbytes(k) for k, w in zip(state_before.leaves, state_before.wants, strict=True) if w
    )
    state = max(sum(map(_nbytes, after.leaves)) + rest, out)
    tape_bytes = max(taped + rest, state)
    overhead_s = max(0.0, forward_s - alone_s)
    alone_s = min(alone_s, forward_s)
    # What taping takes longer than a run that keeps nothing is paid whenever it is reversed.
    back_s += max(0.0, taping_s - forward_s) - overhead_s
    xs = sum(x.nbytes for x in _wanting(inputs, t))
    stage = Stage(
        name=kind.name,
        forward_s=max(_LEAST_S, alone_s),
        backward_s=max(_LEAST_S, back_s),
        output_bytes=state,
        tape_bytes=tape_bytes,
        gradient_bytes=gradient,
        # Buffers are copied when they are put back, and again when they are put aside.
        forward_overhead_bytes=max(0, forward_peak - state) + 2 * rest,
        tape_overhead_bytes=max(0, taping_peak - tape_bytes) + 2 * rest,
        backward_overhead_bytes=max(0, back_peak - tape_bytes - given),
    )
    ys = sum(map(_nbytes, kind.ys))
    return KindCost(stage, taped + rest, ys, xs, overhead_s, meter.sizes_vary)


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
