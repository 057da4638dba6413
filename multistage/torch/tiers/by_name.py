"""Slow tiers for tensors, by name."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...backends.base import Store
from ...backends.cascade import CascadeStore
from ...backends.memory import MemoryStore
from ...backends.urls import TierName, open_store, told
from ...errors import ArgumentError
from ...support.units import parse_bytes
from .pinned import PinnedCascade, PinnedStore

# Pinned memory between a CUDA device and a tier that knows host memory only.
_BETWEEN_BYTES = 256 << 20


def open_tiers(
    tiers: Sequence[TierName], device: torch.device, *, varied: bool = False
) -> Store | None:
    """Return the store that some tiers make for states on a device, None for no tier.

    Parameters
    ----------
    tiers : sequence of str or Store
        `"pinned:8GiB"` (or `"pinned:"`, unbounded), what
        `multistage.backends.urls.open_store` takes, or the first and one of the
        second, the fastest first; also in one string, as in
        `"pinned:8GiB > file:///scratch?capacity=1TiB > s3://bucket/run"`.
    varied : bool
        Whether states on the host differ in size: they lie in plain memory then, as close as
        they fit, where else pinned memory has a slot for each.

    Raises
    ------
    ArgumentError
        For an unknown tier, or tiers that do not go together.

    Examples
    --------
    >>> open_tiers(["pinned:1GiB", "memory:"], torch.device("cpu")).name
    'pinned>memory'
    """
    found = list(tiers)
    if not found:
        return None
    if isinstance(found[0], str) and found[0].partition(":")[0] == "pinned":
        # Not a level as the others: it knows tensors, and moves what is below.
        found[:1] = [name.strip() for name in found[0].split(">", 1)]
    capacity: int | None = None
    first = found[0]
    pinned = isinstance(first, str) and first.partition(":")[0] == "pinned"
    if pinned:
        size = str(found.pop(0)).partition(":")[2].strip("/")
        capacity = parse_bytes(size, "capacity") if size else None
    if len(found) > 1:
        names = ", ".join(told(str(tier)) for tier in tiers)
        raise ArgumentError(
            f"tiers {names} do not go together; give one, or pinned: and one below it"
        )
    below = open_store(found[0]) if found else None
    if pinned and varied and below is None:
        return MemoryStore(capacity)
    if pinned and varied and below is not None and below.exact and capacity is not None:
        return CascadeStore(MemoryStore(capacity), below)
    if not (pinned or device.type == "cuda"):
        return below
    upper = PinnedStore(capacity if pinned else _BETWEEN_BYTES, device)
    return upper.as_store() if below is None else PinnedCascade(upper, below)
