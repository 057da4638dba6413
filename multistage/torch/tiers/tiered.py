"""The slow tier of a chain: opened once, measured, and measured again as it is used."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ...backends.base import Store
from ...backends.urls import TierName
from ...errors import ArgumentError
from ...measurement.seen import FirstRates
from ...measurement.store import of_levels
from ...model.tier import Tier
from ...states.layout import Layout
from .lane import Carried, ChainTier, TierLane
from .paging import DEPTH, page_for
from .pinned import open_tiers

_PROBE_S = 0.3  # about as long as the tier is measured
_PROBE_BYTES = 32 << 20  # most that are sent at a time
_RECORDS = 8  # that are sent at a time
_WIDE_BYTES = 16 << 20  # read and written by computing, more than most caches hold
# A tier that is not used is looked at again after so many times what looking takes.
_AGAIN, _LOOK_S = 50, 1.0
_DRIFT = 1.25  # rates this much faster or slower than planned for are others


class Tiered:
    """The tier of one chain.

    Parameters
    ----------
    names : sequence of str or Store
        As given.

    Attributes
    ----------
    rates : Tier or None
        What plans are made for; None before the first.
    slowdown : float
        How much longer computing takes while something travels, less 1.
    clock : callable
        Seconds, for when the tier is looked at again that a plan does not use.
    """

    def __init__(self, names: Sequence[TierName]) -> None:
        self.names = tuple(names)
        self.rates: Tier | None = None
        self._first_rates = FirstRates()
        self.slowdown = 0.0
        self._tier: ChainTier | None = None
        self._buffer_bytes = 0
        self._since = Carried(), Carried()  # when the rates were compared last
        self._looks = 0
        self._next_look = 1
        self._slower = 1.0  # than planned, when a run left its plan
        self._plan_due_s = -math.inf
        self.clock: Callable[[], float] = time.monotonic
        self._due_s: float | None = None

    def tier(self, device: torch.device, limit_bytes: int | None) -> ChainTier:
        """Return the tier, for tensors of a device; it is made at the first call.

        Raises
        ------
        ArgumentError
            If it was made for another device.
        """
        if self._tier is None:
            store = open_tiers(self.names, device)
            assert store is not None
            store.queue_depth = max(store.queue_depth, DEPTH)
            on_host = device.type != "cuda"
            page_bytes, buffers = page_for(store, limit_bytes if on_host else None)
            self._buffer_bytes = buffers if on_host else 0
            self._tier = ChainTier(store, device, page_bytes)
        elif self._tier.device != device:
            raise ArgumentError(
                f"the tier {self._tier.store.name!r} was opened for tensors on "
                f"{self._tier.device}, and the chain is on {device} now; make the chain again"
            )
        return self._tier

    def buffer_bytes(self, device: torch.device, limit_bytes: int | None) -> int:
        """Return the bytes on the device's memory that transfers take on their way."""
        self.tier(device, limit_bytes)
        return self._buffer_bytes

    @property
    def stuck_bytes(self) -> int:
        """Bytes of fast memory that cancelled transfers of earlier runs hold."""
        return 0 if self._tier is None else self._tier.stuck_bytes

    def measured(self, device: torch.device, limit_bytes: int | None) -> Tier:
        """Return the rates of the tier; measures them, beside computing, if they are not known.

        Raises
        ------
        StoreError
            If the tier cannot be used.
        """
        if self.rates is None:
            tier = self.tier(device, limit_bytes)
            most = _PROBE_BYTES if limit_bytes is None else min(_PROBE_BYTES, limit_bytes // 2)
            self.rates, self.slowdown = _probed(tier, max(tier.page_bytes, most))
            self._look()
        return self.rates

    def _look(self) -> tuple[Carried, Carried]:
        """Return what was carried since the last look."""
        lane = None if self._tier is None else self._tier.opened
        if lane is None:
            self._since = Carried(), Carried()
            return Carried(), Carried()
        now = replace(lane.written), replace(lane.read)
        found = now[0].since(self._since[0]), now[1].since(self._since[1])
        self._since = now
        return found

    def was_late(self, slower: float) -> None:
        """Note that a run left its plan, the tier being so many times slower than planned."""
        self._slower, self._next_look = slower, self._looks + 1

    def forget(self) -> bool:
        """Measure the tier again when it is asked for next, if that is due.

        Of a tier that the plan does not use: looking takes a fiftieth of the time at most.
        """
        now_s = self.clock()
        if self._due_s is None:
            self._due_s = now_s + _AGAIN * _LOOK_S
        if now_s < self._due_s or (self._tier is not None and self._tier.is_closing):
            return False
        self.rates = None
        self._first_rates.forget()
        return True

    def looked(self, seconds: float) -> None:
        """Note how long it took to measure and to plan."""
        self._due_s = self.clock() + _AGAIN * max(_LOOK_S, seconds)

    def drifted(self) -> bool:
        """Note the rates seen since the last look; return whether they are others.

        Looks less and less often, as a plan may take longer to make than an iteration: after
        the first, making plans takes a fiftieth of the time at most.
        """
        self._looks += 1
        if self.rates is None or self._looks < self._next_look:
            return False
        if self.clock() < self._plan_due_s:
            return False
        self._next_look = self._looks + max(1, self._looks - 1)
        written, read = self._look()
        if self._looks == 2 and self._slower == 1.0:
            return False  # in the first iteration memory was touched for the first time
        busier = 1.0 if self._tier is None else self._tier.busier
        latency_s = self.rates.latency_s
        write = _seen(written, latency_s, busier, self.rates.write_bytes_per_s)
        fetch = _seen(read, latency_s, busier, self.rates.read_bytes_per_s)
        found = replace(
            self.rates,
            write_bytes_per_s=write or max(1e-3, self.rates.write_bytes_per_s / self._slower),
            read_bytes_per_s=fetch or max(1e-3, self.rates.read_bytes_per_s / self._slower),
        )
        self._slower = 1.0
        if self._tier is not None:
            self._first_rates.begin([self.rates])
            (found,) = self._first_rates.within_shares([found], [self._tier.store])
        pairs = (
            (found.write_bytes_per_s, self.rates.write_bytes_per_s),
            (found.read_bytes_per_s, self.rates.read_bytes_per_s),
        )
        if all(b / _DRIFT < a < b * _DRIFT for a, b in pairs):
            return False
        self.rates = found
        return True

    def planned(self, seconds: float) -> None:
        """Note how long it took to plan for the rates that were seen."""
        self._plan_due_s = self.clock() + _AGAIN * seconds

    def leave(self) -> None:
        """Close the tier, which is not used; do not wait long for one that does not answer."""
        if self._tier is not None:
            self._tier.leave()
        self._since = Carried(), Carried()

    def close(self) -> None:
        """Stop the tier's thread and give back what it holds.  May be called twice."""
        if self._tier is not None:
            self._tier.close()
        self._since = Carried(), Carried()

    def __reduce__(self) -> tuple[object, ...]:
        # A copy opens the tier again, which only a name can.
        for name in self.names:
            if not isinstance(name, str | os.PathLike):
                raise ArgumentError(
                    f"a chain whose tier is the store {getattr(name, 'name', name)!r} cannot be "
                    "copied or pickled: both would use it; give the tier by its name, as in "
                    "tiers='file:///scratch'"
                )
        return Tiered, (self.names,)


def _seen(
    carried: Carried, latency_s: float, busier: float, planned_bytes_per_s: float
) -> float | None:
    """Return the rate of what was carried, None if that is not known.

    Other work on the machine slows transfers and computing alike: what it may have cost does
    not make a tier slower than planned, nor does it make one faster than was seen.
    """
    seen = carried.bytes_per_s(latency_s)
    if seen is None:
        return None
    alone = carried.bytes_per_s(latency_s * busier)
    return max(seen, min(planned_bytes_per_s, math.inf if alone is None else alone * busier))


def _probed(tier: ChainTier, most_bytes: int) -> tuple[Tier, float]:
    """Measure a tier, with pages as chains send them, while this thread computes.

    Returns
    -------
    rates : Tier
    slowdown : float
        How much longer computing takes meanwhile, less 1.
    """
    lane = tier.open()
    store, page_bytes = tier.store, tier.page_bytes
    pages = store.capacity_states(Layout.up_to(page_bytes))
    # A record ends in a page that is not full.
    capacity = None if pages is None else max(0, pages - 1) * page_bytes
    if store.levels:
        tier.close()  # it refuses what its upper level has no room for
        levels = [_probed_alone(level, tier, most_bytes) for level in store.levels]
        (upper, upper_slowdown), (lower, lower_slowdown) = levels
        found = replace(of_levels(upper, lower), name=store.name, capacity_bytes=capacity)
        return found, max(upper_slowdown, lower_slowdown)
    if pages is not None:
        most_bytes = max(1, min(most_bytes, pages * page_bytes))
    count = max(1, min(_RECORDS, most_bytes // page_bytes))
    length = max(min(page_bytes, most_bytes), most_bytes // count // page_bytes * page_bytes)
    drawn = torch.Generator(tier.device).manual_seed(0)  # the caller's stay as they are
    records = [
        torch.randint(0, 256, (length,), dtype=torch.uint8, device=tier.device, generator=drawn)
        for _ in range(count)
    ]
    wide_bytes = min(_WIDE_BYTES, most_bytes // 4)
    alone, load = (_Load(tier.device, wide_bytes) for _ in range(2))
    began = time.perf_counter()
    rounds: list[tuple[Carried, Carried]] = []
    while len(rounds) < 2 or time.perf_counter() - began < _PROBE_S:
        alone.run_for(_PROBE_S / 12)  # in turn: the machine may be busy with other work
        rounds.append(_round(lane, records, load))
    # The first round is for memory that is touched for the first time.  The best one is hardly
    # in the way of other work: what that costs on average is no part of it.
    write, read = (max(each[way].bytes_per_s(0.0) or 0.0 for each in rounds[1:]) for way in (0, 1))
    share = max(part.share for part in store.parts())
    rates = Tier.of_rates(
        write_bytes_per_s=max(write / share, 1.0),
        read_bytes_per_s=max(read / share, 1.0),
        latency_s=_latency(lane, records[0][:1]),
        capacity_bytes=capacity,
        name=store.name,
    )
    return rates, min(1.0, max(0.0, load.round_s() / alone.round_s() - 1))


def _probed_alone(level: Store, whole: ChainTier, most_bytes: int) -> tuple[Tier, float]:
    """Measure a level of a cascade, which is closed meanwhile."""
    with contextlib.closing(ChainTier(level, whole.device, whole.page_bytes)) as tier:
        return _probed(tier, most_bytes)


class _Load:
    """Computing such as stages do, and the seconds each round of it took.

    Half of it is bound by the processor, half by memory, which transfers take from it.
    """

    def __init__(self, device: torch.device, nbytes: int) -> None:
        self._device = device
        drawn = torch.Generator(device).manual_seed(0)
        side = max(1, min(256, math.isqrt(nbytes // 24)))  # small where the limit is
        self._state = torch.rand(side, side, device=device, generator=drawn)
        self._wide = torch.rand(max(1, nbytes // 8), device=device, generator=drawn)
        self._made = torch.empty_like(self._wide)
        self._seconds: list[float] = []

    def run_while(self, busy: Callable[[], bool]) -> None:
        """Compute until something is done."""
        with torch.no_grad():
            while busy():
                began = time.perf_counter()
                self._state = torch.tanh(self._state @ self._state)
                torch.add(self._wide, 1.0, out=self._made)
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)
                self._seconds.append(time.perf_counter() - began)

    def run_for(self, seconds: float) -> None:
        """Compute for some seconds."""
        end = time.perf_counter() + seconds
        self.run_while(lambda: time.perf_counter() < end)

    def round_s(self) -> float:
        """Return the seconds of a round, where nothing else on the machine was in its way."""
        return sorted(self._seconds)[len(self._seconds) // 4] if self._seconds else 1.0


def _round(lane: TierLane, records: Sequence[Tensor], load: _Load) -> tuple[Carried, Carried]:
    """Write records and fetch them back; return what was carried."""
    before = replace(lane.written), replace(lane.read)
    sent = [lane.write([record]) for record in records]
    load.run_while(lambda: not sent[-1].done.is_set())
    found = [
        lane.fetch(each, [record])
        for each, record in zip(sent, records, strict=True)
        if lane.wait(each)
    ]
    if found:
        load.run_while(lambda: not found[-1].done.is_set())
    for each in found:
        lane.wait(each)
        lane.drop(each)
    return lane.written.since(before[0]), lane.read.since(before[1])


def _latency(lane: TierLane, line: Tensor) -> float:
    """Return the seconds that a record takes whose bytes take none."""
    seconds = []
    for _ in range(5):
        sent = lane.write([line])
        lane.wait(sent)
        lane.drop(sent)
        seconds.append(sent.seconds)
    return min(seconds)
