"""A slow tier: how long a state or a tape of any size takes there and back, and what fits."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Any, Self

from ..errors import ArgumentError
from ..support.units import format_bytes, format_seconds, parse_bytes, parse_seconds
from ..support.values import number, seconds, shown, whole

_FORM = "'write=2GB/s,read=1GB/s,latency=1ms,capacity=10GiB,shared'"
_NAMES = ("write", "read", "latency", "capacity", "name")
_RATES = ("write_bytes_per_s", "read_bytes_per_s")
_TIMES = ("write_s", "read_s", "write_overhead_s", "read_overhead_s")


@dataclass(frozen=True, slots=True)
class Tier:
    """A slow tier: what a transfer takes, and what it can hold.

    A transfer of b bytes takes `write_s + b / write_bytes_per_s`, or the same of reading: a
    fixed time, and a time for each byte.  Where all states have one size, the fixed time alone
    says it all: `Tier("file", write_s=4e-3, read_s=4e-3)`; `Costs` folds rates into it.
    Each direction is a channel: first in, first out.

    Attributes
    ----------
    name : str
        As shown in tables, for example `"file"`.
    write_s, read_s : float
        Seconds of each transfer, whatever its size, while compute runs.
    write_overhead_s, read_overhead_s : float
        Seconds the computing thread itself loses per transfer (copies, queueing,
        interference).
    capacity_states : int or None
        States of one size it can hold; None if unbounded.
    queue_depth : int
        Writes that may be in flight or waiting before an `Offer` is refused (q), of steps
        that are alike.
    write_bytes_per_s, read_bytes_per_s : float
        Above 0; infinite if the size plays no part.
    capacity_bytes : int or None
        What it can hold; None if unbounded.
    shared : bool
        Whether both directions are one channel, as of a disk with one head.
    tapes : bool
        Whether tapes may travel too, or states alone.

    Raises
    ------
    ArgumentError
        For a rate that is not above 0, or another number out of range.

    Examples
    --------
    >>> tier = Tier.parse("write=2GB/s,read=1GB/s,latency=1ms")
    >>> tier.writing_s(2 * 10**9), tier.reading_s(0)
    (1.001, 0.001)
    >>> Tier("file", write_s=4e-3, read_s=4e-3).writing_s(10**6)
    0.004
    """

    name: str = "slow"
    write_s: float = 0.0
    read_s: float = 0.0
    write_overhead_s: float = 0.0
    read_overhead_s: float = 0.0
    capacity_states: int | None = None
    queue_depth: int = 2
    write_bytes_per_s: float = math.inf
    read_bytes_per_s: float = math.inf
    capacity_bytes: int | None = None
    shared: bool = False
    tapes: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise ArgumentError(f"name={shown(self.name)} of a tier must be a string, not empty")
        of = f" of tier {shown(self.name)}"
        for name in _TIMES:
            object.__setattr__(self, name, seconds(getattr(self, name), name + of))
        for name in _RATES:
            rate = number(getattr(self, name), name, "bytes per second")
            if not rate >= 1e-3:
                raise ArgumentError(f"{name}={rate} must be above 0, at least 0.001")
            object.__setattr__(self, name, rate)
        object.__setattr__(self, "queue_depth", whole(self.queue_depth, "queue_depth" + of, 1))
        for name in ("capacity_states", "capacity_bytes"):
            if (capacity := getattr(self, name)) is not None:
                object.__setattr__(self, name, whole(capacity, name + of))
        for name in ("shared", "tapes"):
            if not isinstance(getattr(self, name), bool):
                raise ArgumentError(f"{name}={shown(getattr(self, name))} must be True or False")

    @classmethod
    def of_rates(
        cls,
        write_bytes_per_s: float,
        read_bytes_per_s: float,
        latency_s: float = 0.0,
        capacity_bytes: int | None = None,
        shared: bool = False,
        tapes: bool = True,
        name: str = "slow",
    ) -> Self:
        """Return a tier by its rates, with the same latency both ways.

        Examples
        --------
        >>> Tier.of_rates(100.0, 50.0, latency_s=0.5).reading_s(100)
        2.5
        """
        return cls(
            name=name,
            write_s=latency_s,
            read_s=latency_s,
            write_bytes_per_s=write_bytes_per_s,
            read_bytes_per_s=read_bytes_per_s,
            capacity_bytes=capacity_bytes,
            shared=shared,
            tapes=tapes,
        )

    @classmethod
    def parse(cls, text: str | Self) -> Self:
        """Return the tier written as `write=2GB/s,read=1GB/s,latency=1ms,capacity=10GiB,shared`.

        `read` is as fast as `write` if it is left out; the others may be left out too.
        `states-only` says that tapes do not travel.

        Raises
        ------
        ArgumentError
            For another form, or numbers out of range.
        """
        if isinstance(text, cls):
            return text
        if not isinstance(text, str):
            raise ArgumentError(f"tier {shown(text)} must be a Tier or a text such as {_FORM}")
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
        return cls.of_rates(
            write_bytes_per_s=_rate(given["write"], "write"),
            read_bytes_per_s=_rate(given.get("read", given["write"]), "read"),
            latency_s=parse_seconds(given.get("latency", "0s"), "latency"),
            capacity_bytes=None if capacity is None else parse_bytes(capacity, "capacity"),
            shared=flags["shared"],
            tapes=not flags["states-only"],
            name=given.get("name", "slow"),
        )

    @property
    def latency_s(self) -> float:
        """The fixed seconds of a transfer, in the slower direction."""
        return max(self.write_s, self.read_s)

    def writing_s(self, nbytes: float) -> float:
        """Return the seconds in which so many bytes are written as one thing."""
        return self.write_s + nbytes / self.write_bytes_per_s

    def reading_s(self, nbytes: float) -> float:
        """Return the seconds in which so many bytes are read as one thing."""
        return self.read_s + nbytes / self.read_bytes_per_s

    def for_states(self, state_bytes: int) -> Tier:
        """Return the tier as steps that are alike see it: seconds and room for whole states.

        Examples
        --------
        >>> tier = Tier.of_rates(100.0, 50.0, latency_s=0.5, capacity_bytes=95).for_states(10)
        >>> tier.write_s, tier.read_s, tier.capacity_states
        (0.6, 0.7, 9)
        """
        rooms = [] if self.capacity_states is None else [self.capacity_states]
        if self.capacity_bytes is not None:
            rooms.append(self.capacity_bytes // max(1, state_bytes))
        return replace(
            self,
            write_s=self.writing_s(state_bytes),
            read_s=self.reading_s(state_bytes),
            write_bytes_per_s=math.inf,
            read_bytes_per_s=math.inf,
            capacity_states=min(rooms, default=None),
            capacity_bytes=None,
        )

    def in_bytes(self) -> Self:
        """Return the tier, for stages that differ in size.

        Raises
        ------
        ArgumentError
            If its capacity is in states.
        """
        if self.capacity_states is not None:
            raise ArgumentError(
                f"tier {shown(self.name)}: capacity_states={self.capacity_states} is of states of "
                "one size; give capacity_bytes where sizes differ"
            )
        return self

    def slower(self, factor: float) -> Tier:
        """Return the same tier, every transfer taking so many times as long.

        Raises
        ------
        ArgumentError
            For a factor that is no number above 0, or times beyond 10^12 seconds.

        Examples
        --------
        >>> Tier.of_rates(100.0, 50.0, latency_s=0.5).slower(2.0).reading_s(100)
        5.0
        """
        if not (factor := number(factor, "factor")) > 0:
            raise ArgumentError(f"factor={factor} must be above 0")
        return replace(
            self,
            write_s=self.write_s * factor,
            read_s=self.read_s * factor,
            write_bytes_per_s=max(1e-3, self.write_bytes_per_s / factor),
            read_bytes_per_s=max(1e-3, self.read_bytes_per_s / factor),
        )

    def to_dict(self) -> dict[str, object]:
        """Return the tier as plain data, for JSON; None is an infinite rate."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        return data | {name: None for name in _RATES if math.isinf(data[name])}

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the tier that `to_dict` described.  Raises ArgumentError."""
        values: Any = data
        try:
            values = dict(values)
            if "latency_s" in values:  # as files before version 0.1 have it
                values["write_s"] = values["read_s"] = values.pop("latency_s")
            values |= {name: math.inf for name in _RATES if values.get(name, 0) is None}
            return cls(**values)
        except (TypeError, ValueError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(f"no tier: {error}") from error

    def __str__(self) -> str:
        room = (
            "" if self.capacity_bytes is None else f", {format_bytes(self.capacity_bytes)} at most"
        )
        shared = ", one channel for both" if self.shared else ""
        write, read = (
            _speed(*way)
            for way in (
                (self.write_bytes_per_s, self.write_s),
                (self.read_bytes_per_s, self.read_s),
            )
        )
        return f"{self.name}: writes {write}, reads {read}{room}{shared}"


def _speed(bytes_per_s: float, fixed_s: float) -> str:
    if math.isinf(bytes_per_s):
        return f"a state in {format_seconds(fixed_s)}"
    after = f" after {format_seconds(fixed_s)}" if fixed_s else ""
    return f"{format_bytes(bytes_per_s)}/s{after}"


def _rate(text: str, name: str) -> float:
    return float(parse_bytes(re.sub(r"\s*/\s*s$", "", text), name))
