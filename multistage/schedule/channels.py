"""A slow tier in virtual time: its two channels, and how transfer times scatter."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ..actions import Get, Offer, Put
from ..errors import ArgumentError
from ..model.tier import Tier
from ..support.values import number, shown
from .machine_state import ByteAccounting


@dataclass(frozen=True, slots=True)
class Jitter:
    """A distribution of transfer times, as factors of the mean cost.

    Attributes
    ----------
    sigma : float
        Standard deviation of the logarithm; the factor's mean is 1.
    spike_probability, spike_factor : float
        That share of transfers takes that many times longer.

    Examples
    --------
    >>> Jitter.parse("spikes:0.05,10")
    Jitter(sigma=0.0, spike_probability=0.05, spike_factor=10.0)
    """

    sigma: float = 0.0
    spike_probability: float = 0.0
    spike_factor: float = 1.0

    def __post_init__(self) -> None:
        for name in ("sigma", "spike_probability", "spike_factor"):
            object.__setattr__(self, name, number(getattr(self, name), name))
        if not (
            0 <= self.sigma < 10
            and 0 <= self.spike_probability <= 1
            and 0 < self.spike_factor < math.inf
        ):
            raise ArgumentError(
                f"sigma={self.sigma} must lie in [0, 10), spike_probability="
                f"{self.spike_probability} in [0, 1], spike_factor={self.spike_factor} above 0"
            )

    @classmethod
    def parse(cls, text: str) -> Jitter:
        """Return the jitter written as `lognormal:SIGMA` or `spikes:PROBABILITY,FACTOR`."""
        kind, _, numbers = str(text).partition(":")
        try:
            values = [float(number) for number in numbers.split(",")]
        except ValueError:
            values = []
        if kind == "lognormal" and len(values) == 1:
            return cls(sigma=values[0])
        if kind == "spikes" and len(values) == 2:
            return cls(spike_probability=values[0], spike_factor=values[1])
        raise ArgumentError(
            f"jitter {shown(text)} must be 'lognormal:SIGMA' or 'spikes:PROBABILITY,FACTOR'"
        )

    def sampler(self, seed: int) -> Callable[[], float]:
        """Return a function that draws factors, the same ones for the same seed."""
        source = random.Random(seed)

        def draw() -> float:
            factor = source.lognormvariate(-(self.sigma**2) / 2, self.sigma) if self.sigma else 1.0
            if self.spike_probability and source.random() < self.spike_probability:
                factor *= self.spike_factor
            return factor

        return draw


class Channels:
    """The write and read channel of one tier, and what waits for them.

    States are known by their step, tapes by ~step.
    """

    __slots__ = (
        "capacity",
        "depth",
        "factor",
        "one_channel",
        "read_free",
        "read_overhead_s",
        "read_s",
        "stored",
        "tape_slots",
        "tier",
        "waiting",
        "write_free",
        "write_overhead_s",
        "write_s",
    )

    def __init__(
        self,
        tier: Tier,
        factor: Callable[[Literal["w", "r"]], float],
        tape_slots: float = 1.0,
        *,
        by_bytes: bool = False,
    ) -> None:
        self.tier = tier
        self.factor = factor
        self.tape_slots = tape_slots
        self.write_free = 0.0
        self.read_free = 0.0
        self.waiting: deque[float] = deque()
        self.stored: dict[int, float] = {}
        self.one_channel = tier.shared
        self.capacity = self.depth = math.inf
        self.write_s = self.read_s = 0.0
        self.write_overhead_s, self.read_overhead_s = tier.write_overhead_s, tier.read_overhead_s
        if not by_bytes:
            self.depth = tier.queue_depth
            self.write_s, self.read_s = tier.write_s, tier.read_s
            if tier.capacity_states is not None:
                self.capacity = tier.capacity_states

    def other(
        self, action: Offer | Put | Get, memory: ByteAccounting | None
    ) -> tuple[int, int, float, float]:
        """Return what travels, if not the state of a uniform step.

        As its item, its bytes, and the seconds in which it is written and read.
        """
        item = ~action.step if action.tape else action.step
        if memory is None:
            return item, 0, self.write_s * self.tape_slots, self.read_s * self.tape_slots
        nbytes = memory.bytes_of(item)
        return item, nbytes, self.tier.writing_s(nbytes), self.tier.reading_s(nbytes)

    def has_room(self, now: float) -> bool:
        """Return whether a write that begins now is accepted."""
        waiting = self.waiting
        while waiting and waiting[0] <= now:
            waiting.popleft()
        return len(waiting) < self.depth and len(self.stored) < self.capacity

    def write(self, item: int, now: float, seconds: float) -> tuple[float, float]:
        """Queue a write; return when it starts and when it stops."""
        start = max(now, self.write_free)
        self.write_free = stop = start + seconds * self.factor("w")
        if self.one_channel:
            self.read_free = stop
        self.waiting.append(stop)
        self.stored[item] = stop
        return start, stop

    def read(self, item: int, now: float, seconds: float) -> tuple[float, float]:
        """Queue a read; return when it starts and when it stops."""
        start = max(now, self.read_free, self.stored[item])
        self.read_free = stop = start + seconds * self.factor("r")
        if self.one_channel:
            self.write_free = stop
        return start, stop


def factors(jitter: Jitter | None, seed: int) -> Callable[[Literal["w", "r"]], float]:
    """Return the function that draws the factor of the next write, or of the next read.

    Raises
    ------
    ArgumentError
        If `jitter` is neither a Jitter nor None.
    """
    if not isinstance(jitter, Jitter | None):
        raise ArgumentError(f"jitter={shown(jitter)} must be a Jitter, or None for none")
    if jitter is None:
        return lambda _direction: 1.0
    # One stream per direction: reads of one schedule must not shift the
    # writes of another, or comparisons under one seed would be unfair.
    samplers = {"w": jitter.sampler(2 * seed), "r": jitter.sampler(2 * seed + 1)}
    return lambda direction: samplers[direction]()
