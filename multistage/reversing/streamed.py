"""The tier of unequal steps: how fast it moves pages, and how many states it holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from ..backends.paged import PagedStore
from ..errors import StoreError
from ..measurement.store import probe_store
from ..model.stages import StageCosts
from ..model.tier import Tier
from ..schedule.timeline import Timeline

# A plan is made again when a tier turns out to be so many times faster or slower.
_FASTER = 1.5
_PROBE_S = 0.3
# Steps that are planned jointly with a tier, in a second or two; more are not streamed.
MOST_STREAMED = 340


def measured_rates(paged: PagedStore) -> Tier:
    """Return how fast a store moves pages; it is opened and closed."""
    page, found = paged.page_bytes, probe_store(paged.store, paged.page_layout, seconds=_PROBE_S)
    if not found.write_s or not found.read_s:
        raise StoreError(
            f"tier {paged.name!r} took not one page of {page} bytes; raise its capacity or leave "
            "it out"
        )
    return Tier.of_rates(page / found.write_s, page / found.read_s, name=paged.name, tapes=False)


def require_room(paged: PagedStore, costs: StageCosts) -> None:
    """Raise StoreError if a store holds not even the smallest of the states."""
    pages = paged.store.capacity_states(paged.page_layout)
    sizes = [size for stage in costs.stages[:-1] if (size := stage.output_bytes)]
    if pages is not None and sizes and pages < paged.pages_of(min(sizes)):
        raise StoreError(
            f"tier {paged.name!r} has a capacity of {pages} pages of {paged.page_bytes} bytes, the "
            f"smallest state takes {min(sizes)} bytes; raise its capacity or leave it out"
        )


def bounded(rates: Tier, paged: PagedStore, costs: StageCosts) -> Tier:
    """Return the rates with the room of a store, counted in bytes of states, not of pages."""
    pages = paged.store.capacity_states(paged.page_layout)
    if pages is None:
        return rates
    sizes = [size for stage in costs.stages[:-1] if (size := stage.output_bytes)]
    share = min((size / (paged.pages_of(size) * paged.page_bytes) for size in sizes), default=1.0)
    capacity = int(pages * paged.page_bytes * share)
    return replace(rates, capacity_bytes=capacity)


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
