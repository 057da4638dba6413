"""Whether compression pays: measured on the run's own states, decided by what is predicted.

Compression makes transfers shorter and takes a core meanwhile, perhaps from the
computation.  So each choice is measured by what it moves per second and by what
computing loses beside it, and the plans for both are compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from ..backends.base import Store
from ..backends.compressed import compressions
from ..model.costs import Costs
from ..model.tier import Tier
from ..states.layout import Array, Layout
from ..support.interrupts import Opened
from ..support.units import format_seconds
from .store import probe_store

_CHOICES: tuple[Literal["none", "blosc"], ...] = ("none", "blosc")  # of equals the first
_SECONDS = 0.3  # for each measurement
_NUMBERS = 1 << 17  # multiplied in 50 to 100 us
_TURN = 64  # multiplications with the store at work, and at rest


def choose_compression(
    costs: Costs,
    stores: Sequence[Store],
    layout: Layout,
    arrays: Sequence[Array],
    n_steps: int,
    predict: Callable[[Costs], float],
    at_once: int = 1,
) -> Costs:
    """Settle what the stores with `compress=auto` do; return the costs with their tiers.

    Parameters
    ----------
    costs : Costs
        Measured; its tiers are those of `stores`.
    stores : sequence of Store
        Closed; opened and closed again.
    layout, arrays
        Of a state some steps on.
    n_steps : int
    predict : callable
        The makespan, in seconds, that is planned for some costs.
    at_once : int
        As `probe_store` takes it.
    """
    sweep_s = n_steps * costs.forward_step_s
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
                at_once=at_once,
            )
            lost_s = _lost_per_write(store, layout, arrays)
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


def _lost_per_write(store: Store, layout: Layout, arrays: Sequence[Array]) -> float:
    """Return the seconds that computing beside a busy store loses per state written.

    What is computed is arithmetic of no use, since steps may not be run that no schedule asks
    for.  With the store at work and at rest it takes turns, so that what else the machine does
    falls on both.
    """
    spent = {True: 0.0, False: 0.0}
    taken = {True: 0, False: 0}
    key = 0
    numbers, result = np.ones(_NUMBERS), np.empty(_NUMBERS)
    with Opened(lambda: store.open(layout), store.close):
        began = time.perf_counter()
        while time.perf_counter() - began < _SECONDS or not taken[False]:
            for busy in (True, False):
                first = key
                for _ in range(_TURN):
                    if busy and store.put(key, arrays):
                        key += 1
                    before = time.perf_counter()
                    np.multiply(numbers, numbers, out=result)
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
