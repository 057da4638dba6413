"""Measure a chain and its stores: real steps and real transfers, short ones.

What is measured, each as the median of repeats, since a plan should predict
what usually happens:

* T_A: some steps of the chain, from a copy of its state;
* where tapes are real, a step that keeps its tape, and the bytes of one;
* T_B, and T_A again: short reversals as they will be run, only if an adjoint
  is given, because an adjoint operator may add to gradients of its own, and a
  probe must not;
* T_W, T_R: states written and read back one after the other at full speed,
  noise, or a real state where a store compresses;
* what a transfer costs the computing thread: the time inside the store's calls,
  and what the driver does around them.
"""

from __future__ import annotations

import contextlib
import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from ..actions import Answer, Schedule
from ..backends.base import CheckpointLost, Store
from ..backends.compressed import compressions
from ..backends.memory import MemoryStore
from ..backends.urls import TierName, engines_of, open_store
from ..errors import StateError, StoreError
from ..execute.executor import Executor
from ..model.chain import Chain, FunctionChain
from ..model.costs import NOT_KEPT, Costs
from ..model.tier import Tier
from ..planners.single.revolve import revolve_schedule
from ..planners.streaming.sweep import Sweep
from ..states.arrays import ArrayStates
from ..states.in_place import InPlace
from ..states.layout import Array, Layout
from ..states.slots import Kept, Slots, States, overwritten
from ..states.tapes import own_bytes
from ..support.progress import counting

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")

# How much longer an adjoint step is taken to be than a forward step until it
# was measured: two products with the Jacobian's pieces for one.
_GUESSED_RATIO = 2.0
_AHEAD = 4  # reads under way
_LEAST_S = 5e-3  # shortest time worth measuring


def measure(
    chain: Chain[State, Adjoint],
    state: State,
    n_steps: int,
    store: Store | Sequence[Store] | None = None,
    *,
    adjoint: Adjoint | None = None,
    seconds: float = 1.0,
    states: States | None = None,
    agree: Callable[[float], float] | None = None,
    progress: bool | None = None,
) -> Costs:
    """Measure the costs of a chain and its stores.

    Parameters
    ----------
    chain : Chain
        Its steps 0, 1, ... are run from copies of `state`.
    state : pytree of arrays
        State 0; left unchanged.
    n_steps : int
        At most so many steps and transfers are tried.
    store : Store or sequence of Store, optional
        Closed; opened and closed again.
    adjoint : pytree of arrays, optional
        If given, adjoint steps are run on copies of it.  Without it an
        adjoint step is taken to cost twice a forward step.
    seconds : float
        Rough limit of the time spent.
    states : States, optional
        How states are described and kept, if they are no pytrees of arrays.
    agree : callable, optional
        Turns a time measured here into that of all processes whose steps
        communicate; how many steps are run is decided by it alone.
    progress : bool or None
        Show a bar; None: where somebody watches.

    Raises
    ------
    StateError, StoreError
        If the state or the store cannot be used.

    Examples
    --------
    >>> import numpy as np
    >>> chain = FunctionChain(lambda x, i: np.sin(x), lambda x, a, i: np.cos(x) * a)
    >>> costs = measure(chain, np.zeros(1000), n_steps=100, seconds=0.05)
    >>> costs.state_bytes, costs.forward_step_s > 0
    (8000, True)
    """
    states = ArrayStates(chain.in_place) if states is None else states
    stores = () if store is None else tuple(store) if isinstance(store, Sequence) else (store,)
    parts = 2 + (not chain.state_is_tape) + len(stores)
    with counting("measuring", parts, progress) as tick:
        return _measure(chain, state, n_steps, stores, adjoint, seconds, states, agree, tick)


def _measure(
    chain: Chain[State, Adjoint],
    state: State,
    n_steps: int,
    stores: Sequence[Store],
    adjoint: Adjoint | None,
    seconds: float,
    states: States,
    agree: Callable[[float], float] | None,
    tick: Callable[[str], None],
) -> Costs:
    layout: Any = states.layout(state)
    share = seconds / (2 + len(stores))
    arrays: list[Array] | None = None
    slots = states.slots(layout)
    with starting(chain, state, slots) as start:

        def steps(at: State, count: int) -> None:
            chain.advance(at, 0, count)

        forward_s, count = _per_item(start, steps, n_steps, share, agree)
        tick("forward steps")
        if any(map(compressions, stores)):
            arrays = sample(chain, start(), slots, layout, count)
        tape_s: float | None = None
        tape_bytes = 0
        if not chain.state_is_tape:

            def tapes(at: State, count: int) -> None:
                for i in range(count):
                    at, _ = chain.tape(at, i)

            tape_s, _ = _per_item(start, tapes, n_steps, share / 2, agree)
            if getattr(chain, "one_tape", False):
                tape_bytes = NOT_KEPT
            else:
                tape_bytes = _tape_bytes(chain, start(), n_steps, slots)
            tick("tapes")
        if adjoint is None:
            reverse_s = _GUESSED_RATIO * forward_s
        else:
            executor: Executor[State, Adjoint] = Executor(chain, (), states=states)
            forward_s, reverse_s = _short_run(executor, start, adjoint, n_steps, share, agree)
            reverse_s = max(0.0, reverse_s - (tape_s or 0.0))
    tick("adjoint steps")

    def probed(each: Store) -> Tier:
        tier = probe_store(
            each,
            layout,
            seconds=share,
            most=n_steps,
            arrays=arrays,
            sweep_s=n_steps * forward_s,
        )
        tick(f"tier {each.name}")
        return tier

    costs = Costs(
        forward_step_s=forward_s,
        reverse_step_s=reverse_s,
        tape_step_s=tape_s,
        state_bytes=layout.nbytes,
        tape_bytes=tape_bytes,
        tiers=tuple(map(probed, stores)),
        action_s=action_seconds(),
    )
    return with_driver(costs, layout) if stores else costs


@contextlib.contextmanager
def starting(
    chain: Chain[State, Adjoint], state: State, slots: Slots
) -> Iterator[Callable[[], State]]:
    """Give a function that returns state 0 again and again; leave `state` as it was."""
    kept = slots.keep(state, 0)
    try:
        yield lambda: slots.load(kept, state)
    except ValueError as error:
        if (told := overwritten(error)) is not error:
            raise told from error
        raise
    finally:
        if chain.in_place:
            _restore(kept, state, slots)
        slots.release_all()


def _restore(kept: Kept, state: Any, slots: Slots) -> None:
    try:
        slots.load(kept, state)
    except StateError as error:  # steps have put arrays of other shapes into it
        if not error.varies or not isinstance(slots, InPlace):
            raise
        if not slots.given_back(state, kept):
            error.varies = False
            raise


def sample(
    chain: Chain[State, Adjoint], state: State, slots: Slots, layout: Any, steps: int
) -> list[Array]:
    """Return the arrays of the state some steps on, for a store that compresses.

    Noise is larger when compressed, and a first state of zeros is nothing.
    """
    kept = slots.keep(chain.advance(state, 0, steps), steps)  # slots know where the arrays are
    try:
        arrays, _ = layout.pack(kept.arrays)
        return [np.array(array) for array in arrays]
    finally:
        slots.release(kept)


def action_seconds() -> float:
    """Return the seconds the driver takes per action, measured on steps that do nothing."""
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


def probe_store(
    store: Store,
    layout: Layout,
    *,
    seconds: float = 0.5,
    most: int = 100_000,
    arrays: Sequence[Any] | None = None,
    sweep_s: float = math.inf,
) -> Tier:
    """Measure one store for states of `layout`, by itself; it is opened and closed.

    Parameters
    ----------
    seconds : float
        About how long.
    most : int
        States written at most.
    arrays : sequence, optional
        What to write; by default noise in host memory.
    sweep_s : float
        Seconds of the forward sweep, which matter to a cascade alone: its
        levels are measured one by one, and a state is taken to cost what it
        costs below, but no more than its share of a sweep that fills the level
        above.  Either is what one level achieves by itself; both together do
        better, so a cascade is never promised more than it holds.

    Returns
    -------
    Tier
        Seconds per state; the overheads are the seconds spent inside the calls.
    """
    if arrays is None:
        record = np.random.default_rng(0).integers(0, 256, layout.nbytes, np.uint8)
        arrays = layout.views(record)
    if store.levels:
        return _probe_levels(store, layout, seconds, most, arrays, sweep_s)
    store.open(layout)
    try:
        count = max(1, min(most, 4096, int(256e6 / layout.nbytes) + 1))
        capacity = store.capacity_states(layout)
        if capacity is not None:
            count = max(1, min(count, capacity))
        write_s, put_s, written = _write(store, arrays, count, seconds / 2)
        read_s, got_s = _read(store, written)
    finally:
        store.close()
    return Tier(
        name=store.name,
        write_s=write_s,
        read_s=read_s,
        write_overhead_s=put_s,
        read_overhead_s=got_s,
        capacity_states=capacity,
        queue_depth=store.queue_depth,
    )


def _probe_levels(
    store: Store,
    layout: Layout,
    seconds: float,
    most: int,
    arrays: Sequence[Any],
    sweep_s: float,
) -> Tier:
    upper, lower = (
        probe_store(level, layout, seconds=seconds / 2, most=most, arrays=arrays, sweep_s=sweep_s)
        for level in store.levels
    )
    share_s = sweep_s / max(1, upper.capacity_states or 0)
    return Tier(
        name=store.name,
        write_s=max(upper.write_s, min(lower.write_s, share_s)),
        read_s=max(upper.read_s, min(lower.read_s, share_s)),
        write_overhead_s=upper.write_overhead_s,
        read_overhead_s=max(upper.read_overhead_s, lower.read_overhead_s),
        capacity_states=store.capacity_states(layout),
        queue_depth=store.queue_depth,
    )


def _short_run(
    executor: Executor[State, Adjoint],
    start: Callable[[], State],
    adjoint: Adjoint,
    most: int,
    seconds: float,
    agree: Callable[[float], float] | None,
) -> tuple[float, float]:
    """Return seconds per forward and per adjoint step, in short reversals as they will be run."""
    forward: list[float] = []
    turns: list[float] = []
    count, spent = min(most, 16), 0.0
    while spent < seconds and len(turns) < 15:
        first, carried = start(), copy.deepcopy(adjoint)
        executor.forward(revolve_schedule(max(4, count // 4), count), first)
        executor.reverse(carried)
        counts = executor.counts
        elapsed_s = counts.elapsed_s if agree is None else agree(counts.elapsed_s)
        spent += elapsed_s
        if elapsed_s < min(20 * _LEAST_S, seconds / 4) and count < most:
            count = min(most, 2 * count)
            continue
        forward.append(counts.forward_s / counts.forward_steps)
        turns.append(counts.reverse_s / counts.reverse_steps)
    if not turns:
        forward.append(counts.forward_s / counts.forward_steps)
        turns.append(counts.reverse_s / counts.reverse_steps)
    return _settled(forward), _settled(turns)


def _settled(samples: Sequence[float]) -> float:
    """Return the median of the later samples: memory touched for the first time is slow."""
    return float(np.median(samples[len(samples) // 3 :]))


def _per_item(
    start: Callable[[], State],
    run: Callable[[State, int], None],
    most: int,
    seconds: float,
    agree: Callable[[float], float] | None = None,
) -> tuple[float, int]:
    """Return the typical seconds per item of `run(start(), count)`, and the count it took.

    `start` is not timed: copying a large state takes longer than a step.
    """
    count, spent = 1, 0.0
    samples: list[float] = []
    while True:
        copying = time.perf_counter()
        at = start()
        began = time.perf_counter()
        run(at, count)
        ended = time.perf_counter()
        took, passed = ended - began, ended - copying
        if agree is not None:
            took, passed = agree(took), agree(passed)
        spent += passed
        if took < min(_LEAST_S, seconds / 8) and count < most:
            count = min(most, 2 * count)
            continue
        samples.append(took / count)
        if spent > seconds or len(samples) >= 25:
            return max(_settled(samples), 1e-9), count


def _tape_bytes(chain: Chain[State, Adjoint], state: State, n_steps: int, slots: Slots) -> int:
    """Return the bytes that one more tape holds; 0 if no array is found in it."""
    tape: Any = None
    for i in range(min(2, n_steps)):
        last, given = tape, state
        state, tape = chain.tape(state, i)
        tape = slots.keep_tape(tape, (given, state), i).state
    return own_bytes(tape, last)


def _write(
    store: Store, arrays: Sequence[Array], count: int, seconds: float
) -> tuple[float, float, int]:
    """Write at full speed; return seconds per state, seconds per call, states written."""
    began = time.perf_counter()
    least_call, written = np.inf, 0
    for key in range(count):
        before = time.perf_counter()
        if not store.put(key, arrays, block=True):
            break
        now = time.perf_counter()
        least_call = min(least_call, now - before)
        written += 1
        if now - began > seconds and written >= 4:
            break
    for key in range(written):
        store.wait_written(key)
    if not written:
        return 0.0, 0.0, 0
    return (time.perf_counter() - began) / written, float(least_call), written


def _read(store: Store, written: int) -> tuple[float, float]:
    """Read back in descending order at full speed; return seconds per state and per call."""
    began = time.perf_counter()
    calls = 0.0
    for key in reversed(range(written)):
        before = time.perf_counter()
        for ahead in range(key, max(-1, key - _AHEAD), -1):
            store.prefetch(ahead)
        calls += time.perf_counter() - before
        try:
            store.get(key)
        except CheckpointLost:
            continue
        before = time.perf_counter()
        store.drop(key)
        calls += time.perf_counter() - before
    if not written:
        return 0.0, 0.0
    return (time.perf_counter() - began) / written, calls / written


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
    store.open(Layout.of(tiny))
    try:
        executor: Executor[Any, Any] = Executor(chain, (store,))
        for _ in range(5):
            actions = _Counted(sweep.schedule(steps))
            began = time.perf_counter()
            executor.forward(actions.counted(), tiny)
            turned, forward_actions = time.perf_counter(), actions.count
            executor.reverse(tiny)
            ended, counts = time.perf_counter(), executor.counts
            actions_s = forward_actions * costs.action_s
            writes.append((turned - began - actions_s) / counts.writes)
            actions_s = (actions.count - forward_actions) * costs.action_s
            reads.append((ended - turned - actions_s) / counts.reads)
    finally:
        store.close()
    write_s, read_s = max(0.0, _settled(writes)), max(0.0, _settled(reads))
    tiers = tuple(
        replace(
            tier,
            write_overhead_s=tier.write_overhead_s + write_s,
            read_overhead_s=tier.read_overhead_s + read_s,
        )
        for tier in costs.tiers
    )
    return replace(costs, tiers=tiers)


class _Counted:
    """Counts the actions of a schedule on their way through."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.count = 0

    def counted(self) -> Schedule:
        """Yield the schedule's actions."""
        answer: Answer = None
        with contextlib.suppress(StopIteration):
            while True:
                action = self._schedule.send(answer)
                self.count += 1
                answer = yield action


@dataclass(frozen=True, slots=True)
class TierRow:
    """What one engine does with states of one size.

    Attributes
    ----------
    engine : str
    state_bytes : int
    write_bytes_per_s, read_bytes_per_s : float
    latency_s : float
        From a put to its bytes being read back, nothing else going on.
    put_s, get_s : float
        Seconds the computing thread spends per state written and read.
    """

    engine: str
    state_bytes: int
    write_bytes_per_s: float
    read_bytes_per_s: float
    latency_s: float
    put_s: float
    get_s: float


def probe_tier(
    tier: TierName,
    sizes: Sequence[int] = (64 << 10, 1 << 20, 16 << 20),
    *,
    seconds: float = 0.5,
    progress: bool | None = None,
) -> list[TierRow]:
    """Measure what a tier can do for each state size; a folder with each engine.

    Parameters
    ----------
    tier : str, Path or Store
        As `open_store` takes it.
    sizes : sequence of int
        Bytes of a state.
    seconds : float
        About how long for each row.
    progress : bool or None
        Show a bar; None: on a terminal or in a notebook.

    Raises
    ------
    ArgumentError, StoreError
        If the tier is not known or cannot be used, or holds not one such state.
    """
    rows = []
    tried = [(kind, size) for kind in engines_of(tier) for size in sizes]
    with counting("probing", len(tried), progress) as tick:
        for kind, size in tried:
            store, layout = open_store(kind), Layout.of(np.zeros(size, np.uint8))
            name = store.engine or store.name
            measured = probe_store(store, layout, seconds=seconds)
            if not measured.write_s:
                raise StoreError(
                    f"tier {store.name!r} took not one state of {size} bytes; raise its capacity "
                    "or probe smaller states"
                )
            rows.append(
                TierRow(
                    name,
                    size,
                    size / measured.write_s,
                    size / measured.read_s,
                    _latency(store, layout),
                    measured.write_overhead_s,
                    measured.read_overhead_s,
                )
            )
            tick(name)
    return rows


def _latency(store: Store, layout: Layout) -> float:
    arrays = layout.views(np.zeros(layout.nbytes, np.uint8))
    store.open(layout)
    try:
        best = np.inf
        for key in range(3):
            began = time.perf_counter()
            store.put(key, arrays, block=True)
            store.wait_written(key)
            store.get(key)
            best = min(best, time.perf_counter() - began)
    finally:
        store.close()
    return float(best)
