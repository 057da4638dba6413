"""What chunks of a cell cost, and the plan for a sequence of them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ...backends.base import Store
from ...measurement.driver import action_seconds, with_driver
from ...measurement.store import probe_store
from ...model.costs import Costs
from ...model.tier import Tier
from ..measurement.clocks import seconds_of
from ..measurement.saved import Saved
from ..tensors.meter import Meter
from ..tensors.states import TensorLayout, TensorState
from .cell import Facts
from .collector import Collector
from .inputs import InputGradients, Inputs
from .through_time import ThroughTime

_PROBE_S = 1.0
_LONGEST_S = 0.05  # a chunk of this length hides every overhead
# Three at least: what comes once, or twice from two steps on (gradients of parameters that are
# added up), would be taken to come with every step.
_LEAST = 3
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


def sample_chunks(
    chain: ThroughTime,
    state: Sequence[Tensor],
    *,
    chunk: int | None,
    most_bytes: int,
    tapes: bool,
) -> list[Sample]:
    """Measure chunks of 1, 2, 4, ... steps until they are long enough, or large.

    Parameters
    ----------
    chain : ThroughTime
        Of the whole sequence.
    state : sequence of Tensor
        The leaves of the first state.
    chunk : int, optional
        The only size wanted; 1 is measured besides.
    most_bytes : int
        Larger chunks are of no use.
    tapes : bool
        Whether it matters what the graphs save.
    """
    inputs = chain.inputs
    found: list[Sample] = []
    began = time.perf_counter()
    sizes = [1 << k for k in range(20)] if chunk is None else [1, min(chunk, inputs.steps)]
    with chain.around.measuring():
        for size in sizes:
            if size > inputs.steps or (found and size == found[-1].chunk):
                break
            found.append(_sample(chain, state, size, tapes))
            late = time.perf_counter() - began > _PROBE_S
            large = 2 * found[-1].peak_bytes > most_bytes
            slow = found[-1].forward_s > _LONGEST_S
            if chunk is None and (slow or (len(found) >= _LEAST and (late or large))):
                break
    return found


def _sample(whole: ThroughTime, state: Sequence[Tensor], chunk: int, tapes: bool) -> Sample:
    cell, facts, inputs, device = whole.cell, whole.facts, whole.inputs, whole.device
    few = Inputs(inputs.given, chunk)
    few.known_as(facts.parameters)
    collector = Collector(facts, chunk, "stack", cell.fused)
    chain = ThroughTime(cell, facts, few, collector, whole.around, chunk, device)
    chain.check = whole.check
    chain.sums = [None] * len(facts.parameters)
    chain.of_inputs = InputGradients(few)
    first = chain.first(state)
    forwards, turns, peak, by_values = [], [], 0, False
    saved: tuple[int, ...] | None = None
    with chain.around.settled(keep=False):
        # The first turn is for what comes once, as workspaces of libraries; it is not measured.
        for number in range(5):
            chain.front = 0
            collector.clear()
            forwards.append(seconds_of(lambda: chain.advance(first, 0, 1), device))
            adjoint, chain.output_gradients = _ones(facts, state, collector)
            if number == 0:
                chain.reverse(first, adjoint, 0)
            elif number == 1:
                with Meter(device) as meter:
                    meter.ignore([*first.tensors, *facts.parameters])
                    lying = [inputs.given, chain.of_inputs.whole]
                    meter.ignore(t for t in lying if isinstance(t, Tensor))
                    # Counted from here on, as they are freed on the way, and not part of a limit.
                    chain.renew_sums()
                    sums = meter.live_bytes()
                    meter.reset_peak()
                    chain.reverse(first, adjoint, 0)
                    peak, by_values = meter.peak_bytes - sums, meter.sizes_vary
            elif number == 2:
                saved = _saved(chain, first, adjoint, facts) if tapes else None
            else:
                chain.sums = [None] * len(facts.parameters)
                turns.append(seconds_of(lambda: chain.reverse(first, adjoint, 0), device))  # noqa: B023
    forward_s, turn_s = max(min(forwards[1:]), 1e-9), max(min(turns), 1e-9)
    return Sample(chunk, forward_s, turn_s, peak, saved, by_values)


def _saved(
    chain: ThroughTime, first: TensorState, adjoint: tuple[Tensor | None, ...], facts: Facts
) -> tuple[int, ...] | None:
    """Return the sizes of the storages that a chunk's graph saves; None if it allows no hooks."""
    held = [*first.tensors, *facts.parameters, chain.inputs.given]
    known = {t.untyped_storage()._cdata for t in held if isinstance(t, Tensor)}
    sizes: dict[int, int] = {}

    def note(tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            sizes[storage._cdata] = storage.nbytes()

    try:
        with Saved(note):
            chain.reverse(first, adjoint, 0)
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):  # as `torch.func` has it
            raise
        return None
    return tuple(sizes.values())


def _ones(
    facts: Facts, state: Sequence[Tensor], collector: Collector
) -> tuple[tuple[Tensor | None, ...], list[Tensor | None]]:
    """Return gradients of a chunk's results, to try with."""
    adjoint = tuple(
        torch.ones_like(t) if wanted else None
        for t, wanted in zip(state, facts.wants[-1], strict=True)
    )
    outputs = [None if value is None else torch.ones_like(value) for value in collector.values()]
    return adjoint, outputs


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
