"""Whether compression pays: measured on the run's own states, decided by what is predicted.

Compression makes transfers shorter and takes a core meanwhile, perhaps from the
computation.  So each choice is measured by what it moves per second and by what
steps of the chain lose beside it, and the plans for both are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal, TypeVar

from ..backends.base import Store
from ..backends.compressed import compressions
from ..model.chain import Chain
from ..model.costs import Costs
from ..model.tier import Tier
from ..states.layout import Array, Layout
from ..states.slots import States
from ..support.interrupts import Opened
from ..support.units import format_seconds
from .chain import sample, starting
from .store import probe_store

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")

_CHOICES: tuple[Literal["none", "blosc"], ...] = ("none", "blosc")  # of equals the first
_SECONDS = 0.3  # for each measurement
_SAMPLE_STEPS = 64  # how far on the state lies that is compressed


def choose_compression(
    chain: Chain[State, Adjoint],
    state: State,
    n_steps: int,
    costs: Costs,
    stores: Sequence[Store],
    states: States[State, Array, Layout],
    predict: Callable[[Costs], float],
) -> Costs:
    """Settle what the stores with `compress=auto` do; return the costs with their tiers.

    Parameters
    ----------
    chain, state, n_steps, states
        As for `measure`.
    costs : Costs
        Measured; its tiers are those of `stores`.
    stores : sequence of Store
        Closed; opened and closed again.
    predict : callable
        The makespan, in seconds, that is planned for some costs.
    """
    layout = states.layout(state)
    steps, sweep_s = min(n_steps, _SAMPLE_STEPS), n_steps * costs.forward_step_s
    slots = states.slots(layout)
    with starting(chain, state, slots) as start:
        arrays = sample(chain, start(), slots, layout, steps)
        for number, store in enumerate(stores):
            base = costs.tiers[number]

            def measured(store: Store = store, base: Tier = base) -> Tier:
                tier = probe_store(
                    store,
                    layout,
                    seconds=_SECONDS,
                    most=n_steps,
                    arrays=arrays,
                    sweep_s=sweep_s,
                )
                lost_s = _lost_per_write(chain, start, steps, store, layout, arrays)
                return replace(
                    tier,
                    write_overhead_s=base.write_overhead_s + lost_s,
                    read_overhead_s=base.read_overhead_s,
                )

            for each in compressions(store):
                if each.scheme != "auto":
                    continue
                found: dict[Literal["none", "blosc"], tuple[float, Costs]] = {}
                for choice in _CHOICES:
                    each.choose(choice)
                    tiers = list(costs.tiers)
                    tiers[number] = measured()
                    variant = replace(costs, tiers=tuple(tiers))
                    found[choice] = predict(variant), variant
                best = min(_CHOICES, key=lambda choice: found[choice][0])
                each.choose(best, _why(found["none"], found["blosc"], number))
                costs = found[best][1]
    return costs


def _why(plain: tuple[float, Costs], packed: tuple[float, Costs], number: int) -> str:
    """Return both predictions and what they rest on."""
    (plain_s, without), (packed_s, with_it) = plain, packed
    one, other = without.tiers[number], with_it.tiers[number]
    return (
        f"compress=auto: {format_seconds(packed_s)} predicted with blosc, "
        f"{format_seconds(plain_s)} without; a write takes {format_seconds(other.write_s)} "
        f"against {format_seconds(one.write_s)}, and costs the steps beside it "
        f"{format_seconds(other.write_overhead_s)} against {format_seconds(one.write_overhead_s)}"
    )


def _lost_per_write(
    chain: Chain[State, Adjoint],
    start: Callable[[], State],
    steps: int,
    store: Store,
    layout: Layout,
    arrays: Sequence[Array],
) -> float:
    """Return the seconds that steps beside a busy store lose per state written.

    Sweeps with the store at work and at rest take turns, so that what else the
    machine does falls on both.
    """
    spent = {True: 0.0, False: 0.0}
    taken = {True: 0, False: 0}
    key = 0
    with Opened(lambda: store.open(layout), store.close):
        began = time.perf_counter()
        while time.perf_counter() - began < _SECONDS or not taken[False]:
            for busy in (True, False):
                at, first = start(), key
                for i in range(steps):
                    if busy and store.put(key, arrays):
                        key += 1
                    before = time.perf_counter()
                    at = chain.advance(at, i, i + 1)
                    spent[busy] += time.perf_counter() - before
                    taken[busy] += 1
                    if time.perf_counter() - began > 2 * _SECONDS:
                        break
                for written in range(first, key):
                    store.wait_written(written)
                    store.drop(written)
    if not key:
        return 0.0
    lost_s = spent[True] - spent[False] / taken[False] * taken[True]
    return max(0.0, lost_s) / key
