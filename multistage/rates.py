"""What a slow tier does to things of any size: bytes per second, latency, room.

The `Tier` of uniform steps has the seconds of one state; `TierRates.tier` makes it.
"""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any, Self

from .costs import Tier
from .errors import ArgumentError
from .units import format_bytes, format_seconds, parse_bytes, parse_seconds
from .values import number, seconds, shown, whole

_FORM = "'write=2GB/s,read=1GB/s,latency=1ms,capacity=10GiB,shared'"
_NAMES = ("write", "read", "latency", "capacity", "name")


@dataclass(frozen=True, slots=True)
class TierRates:
    """A slow tier: how fast states and tapes of any size travel there and back.

    A transfer of b bytes takes `latency_s + b / write_bytes_per_s`, or the same with
    the reading rate.  Each direction is a channel: first in, first out.

    Attributes
    ----------
    write_bytes_per_s, read_bytes_per_s : float
        While compute runs; above 0, infinity allowed.
    latency_s : float
        Seconds each transfer takes besides.
    capacity_bytes : int or None
        What it can hold; None if unbounded.
    shared : bool
        Whether both directions are one channel, as of a disk with one head.
    tapes : bool
        Whether tapes may travel too, or states alone.
    name : str
        As shown in tables.

    Raises
    ------
    ArgumentError
        For a rate that is not above 0, or another number out of range.

    Examples
    --------
    >>> rates = TierRates.parse("write=2GB/s,read=1GB/s,latency=1ms")
    >>> rates.write_s(2 * 10**9), rates.read_s(0)
    (1.001, 0.001)
    """

    write_bytes_per_s: float
    read_bytes_per_s: float
    latency_s: float = 0.0
    capacity_bytes: int | None = None
    shared: bool = False
    tapes: bool = True
    name: str = "slow"

    def __post_init__(self) -> None:
        for name in ("write_bytes_per_s", "read_bytes_per_s"):
            rate = number(getattr(self, name), name, "bytes per second")
            if not rate >= 1e-3:
                raise ArgumentError(f"{name}={rate} must be above 0, at least 0.001")
            object.__setattr__(self, name, rate)
        object.__setattr__(self, "latency_s", seconds(self.latency_s, "latency_s"))
        if self.capacity_bytes is not None:
            capacity = whole(self.capacity_bytes, "capacity_bytes")
            object.__setattr__(self, "capacity_bytes", capacity)
        for name in ("shared", "tapes"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name}={shown(getattr(self, name))} must be True or False")
        if not isinstance(self.name, str):
            raise ArgumentError(f"name={shown(self.name)} of a tier must be a string")

    @classmethod
    def parse(cls, text: str | Self) -> Self:
        """Return the rates written as `write=2GB/s,read=1GB/s,latency=1ms,capacity=10GiB,shared`.

        `read` is as fast as `write` if it is left out; the others may be left out too.

        Raises
        ------
        ArgumentError
            For another form, or numbers out of range.
        """
        if isinstance(text, cls):
            return text
        if not isinstance(text, str):
            raise ArgumentError(f"tier {shown(text)} must be TierRates or a text such as {_FORM}")
        given: dict[str, str] = {}
        flags = {"shared": False, "states-only": False}
        for part in text.split(","):
            name, equals, value = (word.strip() for word in part.partition("="))
            if not equals and name in flags:
                flags[name] = True
            elif equals and name in _NAMES and name not in given:
                given[name] = value
            else:
                raise ArgumentError(
                    f"tier {shown(text)}: {shown(part)} is not understood; write it as {_FORM}"
                )
        if "write" not in given:
            raise ArgumentError(f"tier {shown(text)} lacks its rate of writing; as in {_FORM}")
        capacity = given.get("capacity")
        return cls(
            write_bytes_per_s=_rate(given["write"]),
            read_bytes_per_s=_rate(given.get("read", given["write"])),
            latency_s=parse_seconds(given.get("latency", "0s"), "latency"),
            capacity_bytes=None if capacity is None else parse_bytes(capacity),
            shared=flags["shared"],
            tapes=not flags["states-only"],
            name=given.get("name", "slow"),
        )

    def write_s(self, nbytes: float) -> float:
        """Return the seconds in which so many bytes are written as one thing."""
        return self.latency_s + nbytes / self.write_bytes_per_s

    def read_s(self, nbytes: float) -> float:
        """Return the seconds in which so many bytes are read as one thing."""
        return self.latency_s + nbytes / self.read_bytes_per_s

    def tier(self, state_bytes: int) -> Tier:
        """Return the tier as uniform steps see it, whose states have so many bytes."""
        capacity = self.capacity_bytes
        return Tier(
            name=self.name,
            write_s=self.write_s(state_bytes),
            read_s=self.read_s(state_bytes),
            capacity_states=None if capacity is None else capacity // max(1, state_bytes),
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the rates as plain data, for JSON."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Return the rates that `to_dict` described.  Raises ArgumentError."""
        try:
            return cls(**data)
        except TypeError as error:
            raise ArgumentError(f"no rates of a tier: {error}") from error

    def __str__(self) -> str:
        latency = f", latency {format_seconds(self.latency_s)}" if self.latency_s else ""
        room = (
            "" if self.capacity_bytes is None else f", {format_bytes(self.capacity_bytes)} at most"
        )
        shared = ", one channel for both" if self.shared else ""
        return (
            f"{self.name}: writes {format_bytes(self.write_bytes_per_s)}/s, reads "
            f"{format_bytes(self.read_bytes_per_s)}/s{latency}{room}{shared}"
        )


def _rate(text: str) -> float:
    return float(parse_bytes(re.sub(r"\s*/\s*s$", "", text)))
