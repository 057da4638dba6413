"""Measure a chain and its stores: real steps and real transfers, short ones.

Each quantity is the median of repeats, since a plan should predict what usually happens:

* T_A: some steps of the chain, from a copy of its state;
* where tapes are real, a step that keeps its tape, and the bytes of one;
* T_B, and T_A again: short reversals as they will be run, only if an adjoint
  is given, because an adjoint operator may add to gradients of its own, and a
  probe must not;
* T_W, T_R of each store (`store.py`), and what the driver adds to them (`driver.py`).
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from ..backends.base import Store
from ..backends.compressed import compressions
from ..errors import StateError
from ..execute.executor import Executor
from ..model.chain import Chain
from ..model.costs import NOT_KEPT, Costs
from ..planners.single.revolve import revolve_schedule
from ..states.in_place import ArrayStates, InPlace
from ..states.layout import Array, Layout
from ..states.sharing import own_bytes
from ..states.slots import Kept, Slots, States, told_of
from ..support.progress import counting
from .driver import action_seconds, settled, with_driver
from .store import probe_store

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")


# How much longer an adjoint step is taken to be than a forward step until it
# was measured: two products with the Jacobian's pieces for one.
GUESSED_RATIO = 2.0
_LEAST_S = 5e-3  # shortest time worth measuring


def measure(
    chain: Chain[State, Adjoint],
    state: State,
    n_steps: int,
    store: Store | Sequence[Store] | None = None,
    *,
    adjoint: Adjoint | None = None,
    seconds: float = 1.0,
    states: States[State, Array, Layout] | None = None,
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
        Show a bar; None: on a terminal or in a notebook.

    Raises
    ------
    StateError, StoreError
        If the state or the store cannot be used.

    Examples
    --------
    >>> import numpy as np
    >>> from multistage.model.chain import FunctionChain
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
    states: States[State, Array, Layout],
    agree: Callable[[float], float] | None,
    tick: Callable[[str], None],
) -> Costs:
    layout = states.layout(state)
    share = seconds / (2 + len(stores))
    arrays: list[Array] | None = None
    slots = states.slots(layout)
    with starting(chain, state, slots) as start:

        def steps(at: State, count: int) -> None:
            chain.advance(at, 0, count)

        forward_s, count = _per_item(start, steps, n_steps, share, agree)
        tick("forward steps")
        if any(map(compressions, stores)):
            arrays = sample(chain.advance(start(), 0, count), count, slots, layout)
        tape_s: float | None = None
        tape_bytes = 0
        if not chain.state_is_tape:
            tape_s, tape_bytes = _measure_tapes(chain, start, n_steps, share / 2, slots, agree)
            tick("tapes")
        if adjoint is None:
            reverse_s = GUESSED_RATIO * forward_s
        else:
            executor: Executor[State, Adjoint] = Executor(chain, (), states=states)
            forward_s, reverse_s = _short_run(executor, start, adjoint, n_steps, share, agree)
            reverse_s = max(0.0, reverse_s - (tape_s or 0.0))
    tick("adjoint steps")

    costs = Costs(
        forward_step_s=forward_s,
        reverse_step_s=reverse_s,
        tape_step_s=tape_s,
        state_bytes=layout.nbytes,
        tape_bytes=tape_bytes,
        action_s=action_seconds(),
    )
    return with_tiers(costs, stores, layout, share, n_steps, arrays=arrays, tick=tick)


def with_tiers(
    costs: Costs,
    stores: Sequence[Store],
    layout: Layout,
    seconds: float,
    most: int,
    *,
    arrays: Sequence[Array] | None = None,
    at_once: int = 1,
    tick: Callable[[str], object] | None = None,
) -> Costs:
    """Return costs with those of stores, measured one after the other as `probe_store` does.

    `seconds` are for each; `tick` is told of each that is done.
    """
    tiers = []
    for store in stores:
        tier = probe_store(
            store,
            layout,
            seconds=seconds,
            most=most,
            arrays=arrays,
            sweep_s=most * costs.forward_step_s,
            at_once=at_once,
        )
        tiers.append(tier)
        if tick is not None:
            tick(f"tier {store.name}")
    return with_driver(replace(costs, tiers=tuple(tiers)), layout) if tiers else costs


@contextlib.contextmanager
def starting(
    chain: Chain[State, Adjoint], state: State, slots: Slots[State, Array]
) -> Iterator[Callable[[], State]]:
    """Give a function that returns state 0 again and again; leave `state` as it was."""
    kept = slots.keep(state, 0)
    try:
        with told_of(slots):
            yield lambda: slots.load(kept, state)
    finally:
        if chain.in_place:
            _restore(kept, state, slots)
        slots.release_all()


def _restore(kept: Kept, state: State, slots: Slots[State, Array]) -> None:
    try:
        slots.load(kept, state)
    except StateError as error:  # steps have put arrays of other shapes into it
        if not error.varies or not isinstance(slots, InPlace):
            raise
        if not slots.given_back(state, kept):
            error.varies = False
            raise


def sample(state: State, step: int, slots: Slots[State, Array], layout: Layout) -> list[Array]:
    """Return the arrays of a state, for a store that compresses.

    Of one some steps on: noise is larger when compressed, and a first state of zeros is nothing.
    """
    kept = slots.keep(state, step)  # slots know where the arrays are
    try:
        held: Sequence[Any] = kept.arrays
        arrays, _ = layout.pack(held)
        return [np.array(array) for array in arrays]
    finally:
        slots.release(kept)


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
    return settled(forward), settled(turns)


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
            return max(settled(samples), 1e-9), count


def _measure_tapes(
    chain: Chain[State, Adjoint],
    start: Callable[[], State],
    n_steps: int,
    seconds: float,
    slots: Slots[State, Array],
    agree: Callable[[float], float] | None,
) -> tuple[float, int]:
    """Return the seconds of a step that keeps its tape, and the bytes of a tape."""

    def tapes(at: State, count: int) -> None:
        for i in range(count):
            at = chain.tape(at, i)[0]  # a name for the tape would keep it beside the next

    tape_s, _ = _per_item(start, tapes, n_steps, seconds, agree)
    if getattr(chain, "one_tape", False):
        return tape_s, NOT_KEPT
    return tape_s, _tape_bytes(chain, start(), n_steps, slots)


def _tape_bytes(
    chain: Chain[State, Adjoint], state: State, n_steps: int, slots: Slots[State, Array]
) -> int:
    """Return the bytes that one more tape holds; 0 if no array is found in it."""
    tape: object = None
    for i in range(min(2, n_steps)):
        last, given = tape, state
        state, tape = chain.tape(state, i)
        tape = slots.keep_tape(tape, (given, state), i).state
    return own_bytes(tape, last)
