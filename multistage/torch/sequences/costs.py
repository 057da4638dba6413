"""What steps and chunks of steps cost, measured: seconds, and bytes of each kind.

Equal steps are measured in chunks of 1, 2, 4, ... steps, since a chunk that is run at once may
cost less than its steps, one by one.  Of steps that differ one of each kind is measured, and
chunks are the stages of a chain: a chunk is run forward, taped and reversed as a whole, since
each has overheads, and since planners of chains take some hundred stages.  Its costs follow from
those of its steps, on the safe side: while it runs forward it holds the outputs that its steps
have returned, and while it is reversed the gradients of its inputs; what its tape gives back on
the way is not counted off.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ...backends.base import Store
from ...measurement.driver import action_seconds, with_driver
from ...measurement.store import probe_store
from ...model.costs import Costs
from ...model.stages import Stage, StageCosts
from ...model.tier import Tier
from ..measurement.measure import seconds_of
from ..measurement.saved import Saved
from ..tensors.meter import Meter
from ..tensors.states import Kind, TensorLayout
from .facts import StepKind
from .inputs import InputGradients, Inputs, Place
from .through_time import Computation, Gradients, ThroughTime

_LOOK_BACK = 0.7  # of a full chunk: from here on it may end, where the state is smallest


@dataclass(frozen=True, slots=True)
class KindCost:
    """What a step of one kind costs.

    Attributes
    ----------
    stage : Stage
        The tape is the graph, the state after the step and y included; the gradients of the
        parameters that it uses are part of the backward's overhead.
    graph_bytes : int
        What the graph keeps alive that was not there before: less than the tape of the
        stage where the step hands most of its state on.
    y_bytes, x_gradient_bytes : int
    overhead_s : float
        Seconds of a chunk of one such step beside the step.
    by_values : bool
        Whether the values of tensors decide what operators take.
    parameters : tuple of int
        Those that it uses.
    """

    stage: Stage
    graph_bytes: int
    y_bytes: int = 0
    x_gradient_bytes: int = 0
    overhead_s: float = 0.0
    by_values: bool = False
    parameters: tuple[int, ...] = ()

    def larger(self, nbytes: int) -> KindCost:
        """Return the costs with a graph of more bytes."""
        stage = replace(self.stage, tape_bytes=self.stage.tape_bytes + nbytes)
        return replace(self, stage=stage, graph_bytes=self.graph_bytes + nbytes)


@dataclass(frozen=True, slots=True)
class Steps:
    """What the time steps of a sequence cost.

    Attributes
    ----------
    each : sequence of KindCost
        By step.
    input_bytes, input_gradient_bytes : int
        Of state 0.
    parameter_bytes : sequence of int
        Of each parameter: a chunk adds up the gradients of those that its steps use.
    graded : bool
        Whether a run that keeps nothing has graphs, too.
    overhead_s : float
        Seconds of a chunk beside its steps, each time it is run or reversed.
    """

    each: Sequence[KindCost]
    input_bytes: int
    input_gradient_bytes: int
    parameter_bytes: Sequence[int] = ()
    graded: bool = False
    overhead_s: float = 0.0

    def __len__(self) -> int:
        return len(self.each)

    @property
    def last_bytes(self) -> int:
        """Of the last state."""
        return self.each[-1].stage.output_bytes

    @property
    def seconds(self) -> float:
        """Of all steps, forward and backward once."""
        return sum(cost.stage.forward_s + cost.stage.backward_s for cost in self.each)

    def plain(self) -> StageCosts:
        """Return the costs of all steps as one stage without overhead: of plain autograd."""
        whole = self._chunk(0, len(self), 0.0)
        return StageCosts((whole,), self.input_bytes, self.input_gradient_bytes)

    def chained(self, cuts: Sequence[int]) -> StageCosts:
        """Return the costs of the chain of the chunks between some cuts."""
        pairs = itertools.pairwise(cuts)
        known: dict[tuple[object, ...], Stage] = {}  # chunks of equal steps are equal
        found = []
        for start, stop in pairs:
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
        >>> steps = Steps([KindCost(s, 100) for s in [large, large, small] * 3], 10, 10)
        >>> steps.cuts(3)
        [0, 3, 6, 9]
        """
        n = len(self)
        weights = [cost.graph_bytes + 1 for cost in self.each]  # never all 0
        most = sum(weights) / max(1, count)
        cuts, taken, best = [0], 0, -1
        for t, cost in enumerate(self.each):
            taken += weights[t]
            if taken > most * (1 + 1e-9) and t > cuts[-1]:
                cut = best if best > cuts[-1] else t
                cuts.append(cut)
                taken = sum(weights[cut : t + 1])
                best = -1
            if taken >= _LOOK_BACK * most and t + 1 < n:
                size = cost.stage.output_bytes
                if best <= cuts[-1] or size <= self.each[best - 1].stage.output_bytes:
                    best = t + 1
        return [*cuts, n]

    def _chunk(self, start: int, stop: int, overhead_s: float) -> Stage:
        costs = self.each[start:stop]
        stages = [cost.stage for cost in costs]
        last = stages[-1]
        tape = max(last.output_bytes, sum(cost.graph_bytes for cost in costs))
        taping = max(stage.tape_overhead_bytes for stage in stages)
        if self.graded:
            forward = tape + taping
        else:
            before, ys, forward = 0, 0, 0  # the input of the chunk is counted elsewhere
            for cost in costs:
                stage, ys = cost.stage, ys + cost.y_bytes
                here = before + stage.output_bytes + stage.forward_overhead_bytes + ys
                forward, before = max(forward, here), stage.output_bytes
        back, above = 0, 0  # the gradients of the chunk's output and input are counted elsewhere
        sizes = self.parameter_bytes
        used = {cost.parameters for cost in costs}
        own = {numbers: sum(sizes[i] for i in numbers) for numbers in used}
        every = sum(sizes[i] for i in set().union(*used))
        for number, stage in reversed(list(enumerate(stages))):
            below = stages[number - 1].gradient_bytes if number else 0
            others = every - own[costs[number].parameters]
            back = max(back, stage.backward_overhead_bytes + above + below + others)
            above = below
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
_LONGEST_S = 0.05  # a chunk of this length hides every overhead
# Three at least: what comes once, or twice from two steps on (gradients of parameters that are
# added up), would be taken to come with every step.
_LEAST = 3
_RUNS = 3  # timed of a step of a kind, after one that is not
_LEAST_S = 1e-9
# A node of autograd's, with the objects of the tensors that it saves: 870 to 1050 bytes by
# glibc's count (mallinfo2) over steps of tanh, GRUCell and LSTMCell.
_NODE_BYTES = 1024
_NODES_FREE = 4 << 20  # bytes of nodes that are held at once, which are not counted


@dataclass(frozen=True, slots=True)
class Sample:
    """What one chunk was seen to cost.

    Attributes
    ----------
    chunk : int
        Time steps.
    forward_s : float
        Seconds forward, keeping nothing.
    turn_s : float
        Seconds forward with a graph and back.
    peak_bytes : int
        Allocated at most during that, beyond the state before.
    saved : tuple of int or None
        Sizes of the storages its graph saves, parameters and the state not counted;
        None if that is not known, or hooks on saved tensors are not possible.
    by_values : bool
        Whether the values of tensors decide what operators take.
    node_bytes : int
        Of the nodes of one time step's graph.
    """

    chunk: int
    forward_s: float
    turn_s: float
    peak_bytes: int
    saved: tuple[int, ...] | None = None
    by_values: bool = False
    node_bytes: int = 0

    @property
    def held_bytes(self) -> int:
        """The peak, and the nodes of the graph beyond those that no limit counts."""
        return self.peak_bytes + beyond_free(self.chunk * self.node_bytes)


@dataclass(frozen=True, slots=True)
class Sampled:
    """What chunks of a kind of cell were seen to cost, for sequences of any length.

    Attributes
    ----------
    samples : sequence of Sample
    weight : (int, int, int)
        Of the cell that was measured.
    steps : int
        Of the sequence it was measured in.
    """

    samples: Sequence[Sample]
    weight: tuple[int, int, int]
    steps: int

    def serves(self, weight: tuple[int, int, int], steps: int, chunk: int | None) -> bool:
        """Whether it holds of a cell of some weight, and for sequences of some length.

        In sequences more than twice as long larger chunks may pay than were measured.
        """
        if any(now > then for now, then in zip(weight, self.weight, strict=True)):
            return False
        if chunk is not None and min(chunk, steps) not in [each.chunk for each in self.samples]:
            return False
        return steps <= 2 * self.steps


def sample_chunks(
    given: Computation, state: Sequence[Tensor], *, chunk: int | None, most_bytes: int, tapes: bool
) -> list[Sample]:
    """Measure chunks of 1, 2, 4, ... equal steps until they are long enough, or large.

    Parameters
    ----------
    given : Computation
    state : sequence of Tensor
        The leaves of the first state.
    chunk : int, optional
        The only size wanted; 1 is measured besides.
    most_bytes : int
        Larger chunks are of no use.
    tapes : bool
        Whether it matters what the graphs save.
    """
    steps, found = given.inputs.steps, list[Sample]()
    began = time.perf_counter()
    sizes = [1 << k for k in range(20)] if chunk is None else [1, min(chunk, steps)]
    with given.around.measuring():
        for size in sizes:
            if size > steps or (found and size == found[-1].chunk):
                break
            found.append(_sample(given, state, size, tapes))
            late = time.perf_counter() - began > _PROBE_S
            large = 2 * found[-1].peak_bytes > most_bytes
            slow = found[-1].forward_s > _LONGEST_S
            if chunk is None and (slow or (len(found) >= _LEAST and (late or large))):
                break
    return found


def _sample(given: Computation, state: Sequence[Tensor], chunk: int, tapes: bool) -> Sample:
    trial = _Trial(given, 0, chunk, state)
    with given.around.settled(keep=False):
        # The first turn is for what comes once, as workspaces of libraries; it is not measured.
        forwards, turns = [trial.forward()], []
        trial.turn()
        forwards.append(trial.forward())
        with trial.metered() as meter:
            sums = trial.renewed_sums(meter)
            trial.turn()
            peak, by_values = meter.peak_bytes - sums, meter.sizes_vary
        forwards.append(trial.forward())
        saved = trial.saved() if tapes else None
        for _ in range(2):
            trial.chain.sums = [None] * len(given.facts.parameters)
            forwards.append(trial.forward())
            turns.append(seconds_of(trial.turn, given.device))
    forward_s, turn_s = max(min(forwards[1:]), _LEAST_S), max(min(turns), _LEAST_S)
    return Sample(chunk, forward_s, turn_s, peak, saved, by_values)


def measured_kind(given: Computation, kind: StepKind, leaves: Sequence[Tensor]) -> KindCost:
    """Run a step of one kind a few times; return what it costs.

    Parameters
    ----------
    given : Computation
    kind : StepKind
    leaves : sequence of Tensor
        Of a state before such a step.
    """
    facts, t = given.facts, kind.first
    with given.around.measuring(), given.around.settled(keep=False):
        trial = _Trial(given, t, t + 1, leaves)
        rest = sum(t.nbytes for t in trial.first.tensors[len(leaves) :])
        forward_s, alone_s, taping_s, back_s = trial.seconds()
        out, taped, forward_peak, taping_peak, back_peak, by_values = trial.bytes()
    overhead_s = max(0.0, forward_s - alone_s)  # of a chunk beside its step
    # With what taping takes longer than a run that keeps nothing.
    backward_s = back_s + max(0.0, taping_s - forward_s) - overhead_s
    before, after = facts.states[kind.before], facts.states[kind.after]
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
    ys = sum(map(_nbytes, kind.ys))
    xs = sum(x.nbytes for x in _wanting(given.inputs, kind.first))
    return KindCost(stage, taped + rest, ys, xs, overhead_s, by_values, kind.parameters)


class _Trial:
    """A chain of one chunk of steps, run for its costs.

    Parameters
    ----------
    given : Computation
    start, stop : int
        The steps.
    leaves : sequence of Tensor
        Of a state before them.
    """

    def __init__(self, given: Computation, start: int, stop: int, leaves: Sequence[Tensor]) -> None:
        facts = given.facts
        self._given, self._leaves = given, leaves
        outputs: Literal["stack", "last"] = "stack" if facts.equal else "last"
        part = replace(given, steps=(start, stop), outputs=outputs)
        self.chain = ThroughTime(part, (start, stop))
        self.chain.sums = [None] * len(facts.parameters)
        if facts.equal:
            self.chain.of_inputs = InputGradients(given.inputs)
        self.first = self.chain.first(leaves)
        after = facts.state(stop)
        self._adjoint: Gradients = tuple(
            torch.ones(size, dtype=dtype, device=place) if wanted else None
            for (size, dtype, place), wanted in zip(after.leaves, after.wants, strict=True)
        )

    def _begin(self) -> None:
        self.chain.front = 0
        self.chain.collector.clear()

    def forward(self) -> float:
        """Run the steps, keeping nothing; return seconds."""
        self._begin()
        seconds = seconds_of(lambda: self.chain.advance(self.first, 0, 1), self._given.device)
        self.chain.output_gradients = self._ones()
        return seconds

    def turn(self) -> None:
        """Run the steps with a graph and back, from the state alone; after `forward`."""
        self.chain.reverse(self.first, self._adjoint, 0)

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
            times[0].append(self.forward())
            times[1].append(seconds_of(alone, device))
            self._begin()
            times[2].append(seconds_of(lambda: held.append(chain.tape(first, 0)[1]), device))
            chain.output_gradients = self._ones()
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
            self._begin()
            out = meter.live_bytes()
            del result
            meter.reset_peak()
            held.append(chain.tape(first, 0)[1])
            self._begin()
            taping_peak, taped = meter.peak_bytes, meter.live_bytes()
            sums = self.renewed_sums(meter)
            chain.reverse(held.pop(), self._adjoint, 0)
            back_peak = meter.peak_bytes - sums
        return out, taped, forward_peak, taping_peak, back_peak, meter.sizes_vary

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
        sizes: dict[int, int] = {}

        def note(tensor: Tensor) -> None:
            storage = tensor.untyped_storage()
            if storage._cdata not in known:
                sizes[storage._cdata] = storage.nbytes()

        try:
            with Saved(note):
                self.turn()
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error):  # as `torch.func` has it
                raise
            return None
        return tuple(sizes.values())

    def _ones(self) -> list[Tensor | None]:
        values = self.chain.collector.values()
        return [None if value is None else torch.ones_like(value) for value in values]


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


def node_bytes(nodes: float, device: torch.device) -> int:
    """Return what nodes of a graph take beside their tensors; 0 where the limit is on a device."""
    return int(nodes * _NODE_BYTES) if device.type == "cpu" else 0


def beyond_free(nbytes: int) -> int:
    """Return what nodes that are held at once take beyond 4 MiB, which no limit counts."""
    return max(0, nbytes - _NODES_FREE)


def keep_bytes(samples: Sequence[Sample], steps: int) -> int:
    """Return the bytes plain autograd takes for a sequence."""
    last = samples[-1]
    nodes = beyond_free(steps * last.node_bytes)
    if len(samples) == 1:
        return steps * last.peak_bytes // last.chunk + nodes
    before = samples[-2]
    slope = max(0.0, last.peak_bytes - before.peak_bytes) / (last.chunk - before.chunk)
    return int(last.peak_bytes + slope * (steps - last.chunk)) + nodes


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


def offloaded(
    samples: Sequence[Sample], steps: int, least: int, page: Tier, page_bytes: int
) -> tuple[float, int]:
    """Return predicted seconds and peak bytes of a sequence whose tapes travel.

    Parameters
    ----------
    samples : sequence of Sample
        The seconds are by the last, the bytes by one that is measured under any limit: a
        limit that an error names would not work if another sample decided it then.
    steps : int
    least : int
        Smaller tensors stay.
    page : Tier
        Seconds to write and read one page.
    page_bytes : int
    """
    seconds = _offloaded_seconds(samples[-1], least, page, page_bytes)
    sample = samples[:_LEAST][-1]
    assert sample.saved is not None
    staying = sum(n for n in sample.saved if n < least)
    on_the_way = 9 * max((n for n in sample.saved if n >= least), default=0)  # or fetched ahead
    peak = int(staying * steps / sample.chunk) + on_the_way + sample.peak_bytes // sample.chunk
    return seconds * steps / samples[-1].chunk, peak + beyond_free(steps * sample.node_bytes)


def _offloaded_seconds(sample: Sample, least: int, page: Tier, page_bytes: int) -> float:
    """Return predicted seconds of one chunk whose tapes travel."""
    assert sample.saved is not None
    pages = sum(-(-n // page_bytes) for n in sample.saved if n >= least)
    # A third of a turn is forward, and hides the writes; the rest hides the reads.
    forward_s, backward_s = sample.turn_s / 3, 2 * sample.turn_s / 3
    seconds = max(forward_s, pages * page.write_s) + max(backward_s, pages * page.read_s)
    return seconds + pages * (page.write_overhead_s + page.read_overhead_s)
