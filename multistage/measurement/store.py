"""Measure a store: states written and read back one after the other at full speed.

They are noise, or a real state where a store compresses.  Besides seconds per state, the time
inside the store's calls is measured, which the computing thread spends.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np

from ..backends.base import CheckpointLost, Store
from ..backends.urls import TierName, engines_of, open_store
from ..errors import StoreError
from ..model.tier import Tier
from ..states.layout import Layout
from ..support.interrupts import Opened
from ..support.progress import counting

State = TypeVar("State")
Adjoint = TypeVar("Adjoint")


_AHEAD = 4  # reads in flight
_LEAST = 4  # states that are moved in each direction, however long they take


def probe_store(
    store: Store,
    layout: Layout,
    *,
    seconds: float = 0.5,
    most: int = 100_000,
    arrays: Sequence[object] | None = None,
    sweep_s: float = math.inf,
    at_once: int = 1,
) -> Tier:
    """Measure one store for states of `layout`, by itself; it is opened and closed.

    Parameters
    ----------
    seconds : float
        About how long.
    most : int
        States written at most.
    arrays : sequence, optional
        What to write, of the kind that the store takes; by default noise in host memory.
    sweep_s : float
        Seconds of the forward sweep, which matter to a cascade alone: its
        levels are measured one by one, and a state is taken to cost what it
        costs below, but no more than its share of a sweep that fills the level
        above.  Either is what one level achieves by itself; both together do
        better, so a cascade is never promised more than it holds.
    at_once : int
        How many measure at this moment, who divide the bandwidth already: ranks of a program.

    Returns
    -------
    Tier
        Seconds per state, of the part that `store.share` leaves; the overheads are the seconds
        spent inside the calls.
    """
    if arrays is None:
        record = np.random.default_rng(0).integers(0, 256, layout.nbytes, np.uint8)
        arrays = layout.views(record)
    if store.levels:
        return _probe_levels(store, layout, seconds, most, arrays, sweep_s, at_once)
    with Opened(lambda: store.open(layout), store.close):
        count = max(1, min(most, 4096, int(256e6 / layout.nbytes) + 1))
        capacity = store.capacity_states(layout)
        if capacity is not None:
            count = max(1, min(count, capacity))
        write_s, put_s, written = _write(store, arrays, count, seconds / 2)
        read_s, got_s = _read(store, written, seconds / 2)
    tier = Tier(
        name=store.name,
        write_s=write_s,
        read_s=read_s,
        write_overhead_s=put_s,
        read_overhead_s=got_s,
        capacity_states=capacity,
        queue_depth=store.queue_depth,
    )
    return tier.slower(max(1.0, store.share / at_once))


def _probe_levels(
    store: Store,
    layout: Layout,
    seconds: float,
    most: int,
    arrays: Sequence[object],
    sweep_s: float,
    at_once: int,
) -> Tier:
    with Opened(lambda: store.open(layout), store.close):
        pass  # it refuses what its upper level has no room for, which a level by itself may take
    probe = partial(
        probe_store, layout=layout, seconds=seconds / 2, most=most, arrays=arrays, at_once=at_once
    )
    upper, lower = (probe(level, sweep_s=sweep_s) for level in store.levels)
    found = of_levels(upper, lower, sweep_s / max(1, upper.capacity_states or 0))
    return replace(
        found,
        name=store.name,
        capacity_states=store.capacity_states(layout),
        queue_depth=store.queue_depth,
    )


def of_levels(upper: Tier, lower: Tier, share_s: float = math.inf) -> Tier:
    """Return what two levels do together, each measured by itself: the slower each way.

    `share_s` bounds the seconds of a state below.  Name and capacity are those of the upper.

    Examples
    --------
    >>> upper, lower = Tier.of_rates(100.0, 50.0), Tier.of_rates(20.0, 70.0)
    >>> found = of_levels(upper, lower)
    >>> found.write_bytes_per_s, found.read_bytes_per_s
    (20.0, 50.0)
    """
    return replace(
        upper,
        write_s=max(upper.write_s, min(lower.write_s, share_s)),
        read_s=max(upper.read_s, min(lower.read_s, share_s)),
        write_bytes_per_s=min(upper.write_bytes_per_s, lower.write_bytes_per_s),
        read_bytes_per_s=min(upper.read_bytes_per_s, lower.read_bytes_per_s),
        read_overhead_s=max(upper.read_overhead_s, lower.read_overhead_s),
    )


def _write(
    store: Store, arrays: Sequence[Any], count: int, seconds: float
) -> tuple[float, float, int]:
    """Write at full speed; return seconds per state, seconds per call, states written."""
    began = time.perf_counter()
    least_call, written, waited = np.inf, 0, 0
    due = {_LEAST << k for k in range(10)}
    for key in range(count):
        before = time.perf_counter()
        if not store.put(key, arrays, block=True):
            break
        now = time.perf_counter()
        least_call = min(least_call, now - before)
        written += 1
        if written in due:  # or what a store has queued may take any time
            for each in range(waited, written):
                store.wait_written(each)
            now, waited = time.perf_counter(), written
        if now - began > seconds and written >= _LEAST:
            break
    for key in range(waited, written):
        store.wait_written(key)
    if not written:
        return 0.0, 0.0, 0
    return (time.perf_counter() - began) / written, float(least_call), written


def _read(store: Store, written: int, seconds: float) -> tuple[float, float]:
    """Read back in descending order at full speed; return seconds per state and per call."""
    began = time.perf_counter()
    calls, read = 0.0, 0
    for key in reversed(range(written)):
        before = time.perf_counter()
        if before - began > seconds and read >= _LEAST:
            break
        read += 1
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
    if not read:
        return 0.0, 0.0
    return (time.perf_counter() - began) / read, calls / read


@dataclass(frozen=True, slots=True)
class TierRow:
    """What one engine does with states of one size.

    Attributes
    ----------
    engine : str
    state_bytes : int
    write_bytes_per_s, read_bytes_per_s : float
    latency_s : float
        From a put to its bytes being read back, with nothing else running.
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
    with Opened(lambda: store.open(layout), store.close):
        best = np.inf
        for key in range(3):
            began = time.perf_counter()
            store.put(key, arrays, block=True)
            store.wait_written(key)
            store.get(key)
            best = min(best, time.perf_counter() - began)
    return float(best)
