"""What steps and chunks of steps cost, measured: seconds, and bytes of each kind.

Equal steps are measured in chunks of 1, 2, 4, 6, 8, 12, ... steps, since a chunk that is run at
once may cost less than its steps, one by one.  Of steps that differ one of each kind is measured,
and chunks are the stages of a chain, since each has overheads.  The costs of a chunk follow from
those of its steps, on the safe side: while it runs forward it holds the outputs that its steps
have returned, and while it is reversed the gradients of its inputs; what its tape gives back on
the way is not counted off.
"""

from __future__ import annotations

import itertools
import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ...backends.base import Store
from ...measurement.driver import action_seconds, with_driver
from ...measurement.store import probe_store
from ...model.costs import Costs
from ...model.stages import Stage, StageCosts
from ...model.tier import Tier
from ..measurement.clocks import seconds_of
from ..measurement.saved import Saved
from ..tensors.meter import Meter
from ..tensors.states import Kind, TensorLayout
from .facts import StepKind
from .inputs import InputGradients, Taken
from .through_time import Computation, Gradients, ThroughTime

_LOOK_BACK = 0.7  # of a full chunk: from here on it may end, where the state is smallest


@dataclass(frozen=True, slots=True)
class Cost:
    """What a step of one kind, or a chunk of equal steps, costs.

    The tape of the stage is the graph, the state after the step and y included; the gradients
    of the parameters that it uses are part of the backward's overhead.  `saved` are the sizes
    of the storages that the graph saves, parameters and the state not counted; None if that is
    not known, or hooks on saved tensors are not possible.
    """

    stage: Stage
    graph_bytes: int  # not there before: less than the tape where most of the state is handed on
    y_bytes: int = 0
    x_gradient_bytes: int = 0
    overhead_s: float = 0.0  # of a chunk beside its steps
    by_values: bool = False  # whether the values of tensors decide what operators take
    parameters: tuple[int, ...] = ()  # those that it uses
    chunk: int = 1  # time steps
    peak_bytes: int = 0  # with a graph and back from the state before, beyond it
    saved: tuple[int, ...] | None = None

    @property
    def forward_s(self) -> float:
        """Seconds forward in a chunk that keeps nothing."""
        return self.stage.forward_s + self.overhead_s

    @property
    def turn_s(self) -> float:
        """Seconds forward with a graph and back."""
        return self.forward_s + self.stage.backward_s + self.overhead_s


@dataclass(frozen=True, slots=True)
class Steps:
    """What the time steps of a sequence cost."""

    each: Sequence[Cost]
    input_bytes: int  # of state 0
    input_gradient_bytes: int
    parameter_bytes: Sequence[int] = ()  # a chunk adds up gradients of those that its steps use
    graded: bool = False  # whether a run that keeps nothing has graphs, too
    overhead_s: float = 0.0  # of a chunk beside its steps, each time it is run or reversed

    def __len__(self) -> int:
        return len(self.each)

    def plain(self) -> StageCosts:
        """Return the costs of all steps as one stage without overhead: of plain autograd."""
        whole = self._chunk(0, len(self), 0.0)
        return StageCosts((whole,), self.input_bytes, self.input_gradient_bytes)

    def chained(self, cuts: Sequence[int]) -> StageCosts:
        """Return the costs of the chain of the chunks between some cuts."""
        known: dict[tuple[object, ...], Stage] = {}  # chunks of equal steps are equal
        found = []
        for start, stop in itertools.pairwise(cuts):
            key = tuple(map(id, self.each[start:stop]))
            stage = known.get(key)
            if stage is None:
                stage = known[key] = self._chunk(start, stop, self.overhead_s)
            found.append(stage)
        return StageCosts(tuple(found), self.input_bytes, self.input_gradient_bytes)

    def cuts(self, count: int) -> list[int]:
        """Return the cuts of about so many chunks, of about equal tapes and with small states.

        Examples
        --------
        >>> small, large = (Stage("", 1.0, 2.0, size, 100) for size in (10, 50))
        >>> steps = Steps([Cost(s, 100) for s in [large, large, small] * 3], 10, 10)
        >>> steps.cuts(3)
        [0, 3, 6, 9]
        """
        ends = [0, *itertools.accumulate(cost.graph_bytes + 1 for cost in self.each)]
        n, most, cuts = len(self), ends[-1] / max(1, count), [0]
        while cuts[-1] < n:
            begun, least = ends[cuts[-1]], cuts[-1] + 1
            last = max(least, bisect_right(ends, begun + most * (1 + 1e-9)) - 1)
            first = last if last == n else bisect_left(ends, begun + _LOOK_BACK * most, least, last)
            # Of states that are as small the last.
            cuts.append(min(range(last, first - 1, -1), key=self._state_bytes))
        return cuts

    def _state_bytes(self, t: int) -> int:
        return self.each[t - 1].stage.output_bytes

    def _chunk(self, start: int, stop: int, overhead_s: float) -> Stage:
        costs = self.each[start:stop]
        stages = [cost.stage for cost in costs]
        last = stages[-1]
        tape = max(last.output_bytes, sum(cost.graph_bytes for cost in costs))
        taping = max(stage.tape_overhead_bytes for stage in stages)
        # The input of the chunk, and the gradients of its output and input are counted elsewhere.
        inputs = [0, *(stage.output_bytes for stage in stages)]
        ys = itertools.accumulate(cost.y_bytes for cost in costs)
        forward = tape + taping
        if not self.graded:
            forward = max(
                before + stage.output_bytes + stage.forward_overhead_bytes + y
                for before, stage, y in zip(inputs, stages, ys, strict=False)
            )
        sizes, every = self.parameter_bytes, {i for cost in costs for i in cost.parameters}
        others = {
            numbers: sum(sizes[i] for i in every.difference(numbers))
            for numbers in {cost.parameters for cost in costs}
        }
        gradients = [0, *(stage.gradient_bytes for stage in stages[:-1]), 0]
        back = max(
            cost.stage.backward_overhead_bytes + above + below + others[cost.parameters]
            for cost, below, above in zip(costs, gradients, gradients[1:], strict=False)
        )
        xs = sum(cost.x_gradient_bytes for cost in costs)
        return Stage(
            name=last.name if stop == start + 1 else f"{stop - start} steps",
            forward_s=sum(stage.forward_s for stage in stages) + overhead_s,
            backward_s=sum(stage.backward_s for stage in stages) + 2 * overhead_s,
            output_bytes=last.output_bytes,
            tape_bytes=tape,
            gradient_bytes=last.gradient_bytes,
            forward_overhead_bytes=max(0, forward - last.output_bytes),
            tape_overhead_bytes=taping,
            backward_overhead_bytes=back + xs,
        )


_PROBE_S = 1.0
SIZES = (1, 2, *(n << k for k in range(1, 20) for n in (2, 3)))  # of chunks that are measured
_LONGEST_S = 0.05  # a chunk of this length hides every overhead
# Three at least: what comes once, or twice from two steps on (gradients of parameters that are
# added up), would be taken to come with every step.
LEAST = 3
_RUNS = 3  # timed of a step of a kind, after one that is not
_LEAST_S = 1e-9
# A node of autograd's, with the objects of the tensors that it saves: 870 to 1050 bytes by
# glibc's count (mallinfo2) over steps of tanh, GRUCell and LSTMCell.
_NODE_BYTES = 1024
_NODES_FREE = 4 << 20  # bytes of nodes that are held at once, which are not counted


@dataclass(frozen=True, slots=True)
class Sampled:
    """What chunks of a kind of cell were seen to cost, for sequences of any length."""

    samples: Sequence[Cost]
    weight: tuple[int, ...]  # of the cell that was measured
    steps: int  # of the sequence it was measured in

    def serves(self, weight: tuple[int, ...], steps: int, chunk: int | None) -> bool:
        """Whether it holds of a cell of some weight, and for sequences of some length.

        In sequences more than twice as long larger chunks may pay than were measured; in short
        ones fewer were than tell how the bytes grow.
        """
        if any(now > then for now, then in zip(weight, self.weight, strict=True)):
            return False
        if chunk is not None and min(chunk, steps) not in [each.chunk for each in self.samples]:
            return False
        return min(steps, SIZES[LEAST - 1]) <= self.steps and steps <= 2 * self.steps


def sample_chunks(
    given: Computation, state: Sequence[Tensor], *, chunk: int | None, most_bytes: int, tapes: bool
) -> list[Cost]:
    """Measure chunks of 1, 2, 4, 6, 8, 12, ... equal steps until they are long enough, or large.

    Of all sizes but the last no more than half as many steps as the sequence has.
    With `chunk` that size and 1, 2, 3 alone, which tell how the bytes grow.  Chunks of more
    than `most_bytes` are of no use; `tapes` says whether it matters what the graphs save.
    """
    steps, kind, found = given.inputs.steps, given.facts.kinds[-1], list[Cost]()
    began = time.perf_counter()
    sizes: Sequence[int] = SIZES
    if chunk is not None or steps < SIZES[LEAST - 1]:
        sizes = sorted({min(size, steps) for size in (1, 2, 3, chunk or 1)})
    for size in sizes:
        if size > steps:
            break
        if chunk is None and len(found) >= LEAST:
            enough = 2 * sum(cost.chunk for cost in found) > steps
            enough |= time.perf_counter() - began > _PROBE_S
            if enough or extended(found, size) > most_bytes:
                break
        found.append(measured(given, kind, state, (0, size), tapes=tapes))
        if chunk is None and found[-1].forward_s > _LONGEST_S:
            break
    return found


def extended(samples: Sequence[Cost], chunk: int) -> float:
    """Return the bytes of a larger chunk: they grow by the same with each step."""
    (x0, y0), (x1, y1) = [(0, 0), *((each.chunk, each.peak_bytes) for each in samples)][-2:]
    return y1 + max(0.0, (y1 - y0) / (x1 - x0)) * (chunk - x1)


def measured(
    given: Computation,
    kind: StepKind,
    leaves: Sequence[Tensor],
    steps: tuple[int, int],
    *,
    tapes: bool = False,
) -> Cost:
    """Run a step of one kind, or a chunk of equal steps, a few times; return what it costs.

    It starts from the leaves of a state before such steps; `tapes` as in `sample_chunks`.
    """
    facts = given.facts
    with given.around.measuring(), given.around.settled(keep=False):
        trial = _Trial(given, steps, leaves)
        rest = sum(t.nbytes for t in trial.first.tensors[len(leaves) :])
        forward_s, alone_s, taping_s, back_s = trial.seconds()
        out, taped, forward_peak, taping_peak, back_peak, by_values = trial.bytes()
        peak_bytes = trial.peak_bytes()
        saved = trial.saved() if tapes else None
    overhead_s = max(0.0, forward_s - alone_s)  # of a chunk beside its step
    # With what taping takes longer than a run that keeps nothing.
    backward_s = back_s + max(0.0, taping_s - forward_s) - overhead_s
    before, after = facts.states[kind.before], facts.states[kind.after]
    wanting: Taken = []
    if not given.inputs.made:
        given.inputs.at(steps[0], wanting)
    state = max(sum(map(_nbytes, after.leaves)) + rest, out)
    tape_bytes = max(taped + rest, state)
    back_bytes = back_peak - tape_bytes - _wanted_bytes(before.leaves, before.wants)
    stage = Stage(
        name=kind.name,
        forward_s=max(_LEAST_S, min(alone_s, forward_s)),
        backward_s=max(_LEAST_S, backward_s),
        output_bytes=state,
        tape_bytes=tape_bytes,
        gradient_bytes=_wanted_bytes(after.leaves, after.wants),
        # Buffers are copied when they are put back, and again when they are put aside.
        forward_overhead_bytes=max(0, forward_peak - state) + 2 * rest,
        tape_overhead_bytes=max(0, taping_peak - tape_bytes) + 2 * rest,
        backward_overhead_bytes=max(0, back_bytes),
    )
    return Cost(
        stage,
        taped + rest,
        y_bytes=sum(map(_nbytes, kind.ys)),
        x_gradient_bytes=sum(x.nbytes for _, x in wanting),
        overhead_s=overhead_s,
        by_values=by_values,
        parameters=kind.parameters,
        chunk=steps[1] - steps[0],
        peak_bytes=peak_bytes,
        saved=saved,
    )


def peak_of(given: Computation, kind: StepKind, leaves: Sequence[Tensor]) -> int:
    """Run a step of a kind, with a graph and back; return the most bytes that it allocates."""
    start = 0 if given.facts.equal else kind.first
    with given.around.measuring(), given.around.settled(keep=False):
        trial = _Trial(given, (start, start + 1), leaves)
        trial.chain.advance(trial.first, 0, 1)
        trial.take_gradients()
        return trial.peak_bytes()


class _Trial:
    """A chain of one chunk of steps, run for its costs, from the leaves of a state before them."""

    def __init__(
        self, given: Computation, steps: tuple[int, int], leaves: Sequence[Tensor]
    ) -> None:
        facts, last = given.facts, given.facts.kinds[-1]
        if facts.equal:  # of the kind of most steps: state 0 need not take part in the gradient
            states = facts.states[last.before], *facts.states[1:]
            facts = replace(facts, states=states, steps=(len(facts.kinds) - 1,))
            given = replace(given, facts=facts)
        self._given, self._leaves = given, leaves
        outputs: Literal["stack", "last"] = "stack" if facts.equal else "last"
        self.chain = ThroughTime(replace(given, steps=steps, outputs=outputs), steps)
        self.chain.sums = [None] * len(facts.parameters)
        if facts.equal:
            self.chain.of_inputs = InputGradients(given.inputs)
        self.first = self.chain.first(leaves)
        after = facts.state(steps[1])
        self._adjoint: Gradients = tuple(
            torch.ones(size, dtype=dtype, device=place) if wanted else None
            for (size, dtype, place), wanted in zip(after.leaves, after.wants, strict=True)
        )

    def _begin(self) -> None:
        self.chain.front = 0
        self.chain.collector.clear()

    def take_gradients(self) -> None:
        """Let gradients of the outputs be ones."""
        values = self.chain.collector.values()
        self.chain.output_gradients = [v if v is None else torch.ones_like(v) for v in values]

    def seconds(self) -> tuple[float, float, float, float]:
        """Return what the steps take, the least of several runs.

        Forward in a chunk that keeps nothing, alone, forward with a graph, and back.
        """
        chain, device, first = self.chain, self._given.device, self.first
        times: list[list[float]] = [[], [], [], []]
        held: list[object] = []

        def alone() -> None:
            with torch.set_grad_enabled(self._given.facts.graded):
                chain.run_alone(first)

        for _ in range(_RUNS + 1):
            self._begin()
            times[0].append(seconds_of(lambda: chain.advance(first, 0, 1), device))
            self.take_gradients()
            times[1].append(seconds_of(alone, device))
            times[2].append(seconds_of(lambda: held.append(chain.tape(first, 0)[1]), device))
            back = seconds_of(lambda: chain.reverse(held.pop(), self._adjoint, 0), device)
            times[3].append(back)
        forward_s, alone_s, taping_s, back_s = (min(each[1:]) for each in times)
        return forward_s, alone_s, taping_s, back_s

    def bytes(self) -> tuple[int, int, int, int, int, bool]:
        """Return what the steps allocate beyond what was there; `seconds` was called before.

        What stays after a run that keeps nothing, and with the graph; the peaks of both, and
        of the way back; whether the values of tensors decide what operators take.
        """
        chain, first = self.chain, self.first
        held: list[object] = []
        self._begin()
        with self.metered() as meter:
            result = chain.advance(first, 0, 1)
            forward_peak = meter.peak_bytes
            chain.collector.clear()
            out = meter.live_bytes()
            del result
            meter.reset_peak()
            held.append(chain.tape(first, 0)[1])
            taping_peak, taped = meter.peak_bytes, meter.live_bytes()
            sums = self.renewed_sums(meter)
            chain.reverse(held.pop(), self._adjoint, 0)
            back_peak = meter.peak_bytes - sums
        return out, taped, forward_peak, taping_peak, back_peak, meter.sizes_vary

    def peak_bytes(self) -> int:
        """Return the most that the steps allocate, run with a graph and back from their state."""
        with self.metered() as meter:
            sums = self.renewed_sums(meter)
            self.chain.reverse(self.first, self._adjoint, 0)
            return meter.peak_bytes - sums

    def metered(self) -> Meter:
        """Return what counts bytes beside those that lie there before a step."""
        given, meter = self._given, Meter(self._given.device)
        lying = [*self.first.tensors, *self._leaves, *given.facts.parameters]
        lying += [*given.inputs.held(), *given.inputs.everything()]
        whole = None if self.chain.of_inputs is None else self.chain.of_inputs.whole
        meter.ignore(lying if whole is None else [*lying, whole])
        return meter

    def renewed_sums(self, meter: Meter) -> int:
        """Return the bytes of gradients so far, which are counted from here on.

        They are freed on the way, and not part of a limit.
        """
        before = meter.live_bytes()
        self.chain.renew_sums()
        sums = meter.live_bytes() - before
        meter.reset_peak()
        return sums

    def saved(self) -> tuple[int, ...] | None:
        """Return the sizes of the storages that the graph saves; None if it allows no hooks."""
        given = self._given
        held = [*self.first.tensors, *given.facts.parameters, given.inputs.given]
        known = {t.untyped_storage()._cdata for t in held if isinstance(t, Tensor)}
        sizes: dict[int, tuple[int, StorageWeakRef]] = {}  # or addresses might be used again

        def note(tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                sizes[storage._cdata] = storage.nbytes(), StorageWeakRef(storage)

        try:
            with Saved(note):
                self.chain.reverse(self.first, self._adjoint, 0)
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):  # as `torch.func` has it
                raise
            return None
        return tuple([nbytes for nbytes, _ in sizes.values()])


def _nbytes(kind: tuple[torch.Size, torch.dtype, torch.device]) -> int:
    size, dtype, _ = kind
    return size.numel() * dtype.itemsize


def _wanted_bytes(kinds: Sequence[Kind], wants: Sequence[bool]) -> int:
    return sum(_nbytes(kind) for kind, wanted in zip(kinds, wants, strict=True) if wanted)


def node_bytes(nodes: float, device: torch.device) -> int:
    """Return what nodes that are held at once take beside their tensors, beyond the first 4 MiB.

    It is 0 where the limit is on a device.
    """
    return max(0, int(nodes * _NODE_BYTES) - _NODES_FREE) if device.type == "cpu" else 0


def tier_of(store: Store, layout: TensorLayout, state: Sequence[Tensor]) -> Tier:
    """Measure a slow tier for states like one; the store is opened and closed."""
    lines, _ = layout.pack(state)
    tier = probe_store(store, layout.record, seconds=0.3, arrays=lines)
    on_device = [line for line in lines if isinstance(line, Tensor)]
    if on_device:  # `get` returns before the bytes are there
        tier = replace(tier, read_s=max(tier.read_s, _read_seconds(on_device)))
    costs = Costs(1.0, 1.0, state_bytes=layout.nbytes, tiers=(tier,), action_s=action_seconds())
    return with_driver(costs, layout.record).tiers[0]


def _read_seconds(lines: Sequence[Tensor]) -> float:
    """Return the seconds it takes to copy some tensors to their device from pinned memory."""
    pinned = [line.cpu().pin_memory() for line in lines]
    device = lines[0].device
    seconds = [
        seconds_of(lambda: [p.to(device, non_blocking=True) for p in pinned], device)
        for _ in range(5)
    ]
    return min(seconds)
