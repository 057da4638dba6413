"""What the driver costs: per action, and around the calls of a store."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ..actions import Answer, Schedule
from ..backends.memory import MemoryStore
from ..execute.executor import Executor
from ..model.chain import FunctionChain
from ..model.costs import Costs
from ..planners.single.revolve import revolve_schedule
from ..planners.streaming.sweep import Sweep
from ..states.layout import Array, Layout
from ..support.interrupts import Opened

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")


def settled(samples: Sequence[float]) -> float:
    """Return the median of the later samples: memory touched for the first time is slow."""
    return float(np.median(samples[len(samples) // 3 :]))


@functools.cache
def action_seconds() -> float:
    """Return the seconds the driver takes per action, measured once on steps that do nothing."""
    chain: FunctionChain[Array, Array] = FunctionChain(lambda x, i: x, lambda x, a, i: a)
    executor: Executor[Array, Array] = Executor(chain, ())
    nothing, n = np.zeros(1), 500
    best = np.inf
    for _ in range(3):
        began = time.perf_counter()
        executor.forward(revolve_schedule(20, n), nothing)
        executor.reverse(nothing)
        best = min(best, time.perf_counter() - began)
    return float(best) / (4.5 * n)


def with_driver(costs: Costs, layout: Layout) -> Costs:
    """Return costs whose tier's overheads count what the driver does around the store's calls.

    Measured on steps that do nothing and tiny states of the same tree, kept in
    a store's buffers: differences of long computations would drown a few
    microseconds in their noise.
    """
    tiny = layout.state([np.zeros(1) for _ in layout.leaves])
    chain: FunctionChain[Any, Any] = FunctionChain(lambda x, i: x, lambda x, a, i: a)
    steps = 300
    sweep = Sweep(8, 1.0, steps - 1)
    writes: list[float] = []
    reads: list[float] = []
    store = MemoryStore()
    with Opened(lambda: store.open(Layout.of(tiny)), store.close):
        executor: Executor[Any, Any] = Executor(chain, (store,))
        for _ in range(5):
            actions = [0]  # forward, then in reverse
            began = time.perf_counter()
            executor.forward(_counted(sweep.schedule(steps), actions), tiny)
            turned = time.perf_counter()
            actions.append(0)
            executor.reverse(tiny)
            ended, counts = time.perf_counter(), executor.counts
            forward_s, reverse_s = (count * costs.action_s for count in actions)
            writes.append((turned - began - forward_s) / counts.writes)
            reads.append((ended - turned - reverse_s) / counts.reads)
    write_s, read_s = max(0.0, settled(writes)), max(0.0, settled(reads))
    tiers = tuple(
        replace(
            tier,
            write_overhead_s=tier.write_overhead_s + write_s,
            read_overhead_s=tier.read_overhead_s + read_s,
        )
        for tier in costs.tiers
    )
    return replace(costs, tiers=tiers)


def _counted(schedule: Schedule, counts: list[int]) -> Schedule:
    """Yield a schedule's actions, counted in the last of some numbers."""
    answer: Answer = None
    with contextlib.suppress(StopIteration):
        while True:
            action = schedule.send(answer)
            counts[-1] += 1
            answer = yield action
