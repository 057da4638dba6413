"""The tier of unequal steps: how fast it moves states, and how many it holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ..backends.arena import round_up
from ..backends.base import Store
from ..errors import StoreError
from ..measurement.store import probe_store
from ..model.stages import StageCosts
from ..model.tier import Tier
from ..schedule.timeline import Timeline
from ..states.layout import Layout

# A plan is made again when a tier turns out to be so many times faster or slower.
_FASTER = 1.5
_PROBE_S, _PROBE_BYTES = 0.3, 4 << 20


def largest_of(costs: StageCosts) -> Layout:
    """Return the layout of states of a chain, for a store."""
    return Layout.up_to(max(1, *(stage.output_bytes for stage in costs.stages)))


def probe_bytes(costs: StageCosts) -> int:
    """Return the size of the states that a store is measured with."""
    return min(largest_of(costs).nbytes, _PROBE_BYTES)


def measured_rates(store: Store, nbytes: int, at_once: int = 1, varied: bool = True) -> Tier:
    """Return how fast a store moves states of so many bytes; it is opened and closed.

    `at_once` processes measure theirs at the same time.  One that takes equal states alone is
    opened for such (`varied` False).
    """
    layout = Layout.up_to(nbytes)
    layout.varied = varied
    found = probe_store(store, layout, seconds=_PROBE_S, at_once=at_once)
    if not found.write_s or not found.read_s:
        raise StoreError(
            f"tier {store.name!r} took not one state of {nbytes} bytes; raise its capacity or "
            "leave it out"
        )
    return Tier.of_rates(
        nbytes / found.write_s, nbytes / found.read_s, name=store.name, tapes=False
    )


def _sizes(costs: StageCosts) -> list[int]:
    return [size for stage in costs.stages[:-1] if (size := stage.output_bytes)]


def require_room(store: Store, costs: StageCosts) -> None:
    """Raise StoreError if a store holds not even the smallest of the states."""
    least = min(_sizes(costs), default=0)
    if least and store.capacity_states(Layout.up_to(least)) == 0:
        raise StoreError(
            f"tier {store.name!r} has a capacity of {store.capacity_bytes} bytes, the smallest "
            f"state takes {round_up(least)} bytes of it; raise its capacity or leave it out"
        )


def bounded(rates: Tier, store: Store, costs: StageCosts) -> Tier:
    """Return the rates with the room of a store, in bytes of states, each of which takes pages."""
    size = min(_sizes(costs), key=lambda size: size / round_up(size), default=1)
    states = store.capacity_states(Layout.up_to(size))
    return rates if states is None else replace(rates, capacity_bytes=states * size)


def seen_rates(rates: Tier, timeline: Timeline) -> Tier:
    """Return the rates that a sweep has shown, if they are others than was thought."""
    found: dict[str, float] = {}
    kinds: tuple[tuple[Literal["write", "read"], str], ...] = (
        ("write", "write_bytes_per_s"),
        ("read", "read_bytes_per_s"),
    )
    for kind, name in kinds:
        seconds, moved = timeline.totals_s[kind], timeline.bytes[kind]
        before = getattr(rates, name)
        rate = moved / seconds if seconds and moved else before
        if not before / _FASTER <= rate <= before * _FASTER:
            found[name] = rate
    return replace(rates, **found) if found else rates  # type: ignore[arg-type]
