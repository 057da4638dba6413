"""How much memory: the one reading of every `memory=`, of the command line's too."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from ..errors import ArgumentError, BudgetError
from ..support.units import format_bytes, parse_bytes
from ..support.values import MOST, number, shown, whole

_PERCENT = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*%\s*")
# A number with a point and no unit is never of bytes: 0.5, and 1.5, which is then refused.
_FRACTION = re.compile(r"\s*(\d*\.\d+|\d+\.)\s*")
_SLOTS = re.compile(r"\s*(.*?)\s*slots?\s*")


@dataclass(frozen=True, slots=True)
class Budget:
    """Fast memory: bytes, slots, or a fraction of what plain training takes; exactly one of them.

    Of equal steps, the live state, the adjoint, one working tape and state 0 (the caller's, or
    a copy where steps could overwrite it) belong to the computation and are not
    counted; staging and landing slots are.  A budget in bytes
    also pays for the I/O buffers of the tiers; one in slots does not.

    Attributes
    ----------
    bytes : int or None
        Bytes, for example from `parse_bytes("512 MiB")`.
    slots : int or None
        States, of equal steps.
    fraction : float or None
        Of the bytes that keeping every tape takes, above 0 and at most 1; of stages that differ.

    Raises
    ------
    ArgumentError
        For none of the three, or more than one, or a number out of range.

    Examples
    --------
    >>> Budget(bytes=4096).slots_for(state_bytes=1000)
    4
    """

    bytes: int | None = None
    slots: int | None = None
    fraction: float | None = None

    def __post_init__(self) -> None:
        if sum(value is not None for value in (self.bytes, self.slots, self.fraction)) != 1:
            more = "" if self.fraction is None else f", fraction={shown(self.fraction)}"
            raise ArgumentError(
                f"give a budget as bytes or as slots, not bytes={shown(self.bytes)}, "
                f"slots={shown(self.slots)}{more}"
            )
        if self.fraction is not None:
            object.__setattr__(self, "fraction", _fraction(self.fraction, "memory"))
            return
        name = "bytes" if self.slots is None else "slots"
        object.__setattr__(self, name, whole(getattr(self, name), f"memory: {name}"))

    @classmethod
    def parse(
        cls,
        given: str | float | Budget,
        name: str = "memory",
        *,
        of: Literal["steps", "stages"] = "steps",
    ) -> Budget:
        """Return the budget that a user gave.

        Parameters
        ----------
        given : int, str, float or Budget
            Bytes (an int) or `"512 MiB"`; of steps also `"32 slots"`; of stages also a part
            of what plain training takes: a float up to 1, `"0.5"` or `"50 %"`.
        name : str
            Of the argument, for messages.
        of : {"steps", "stages"}
            Whether the budget is of equal steps, or of stages that differ in size.

        Raises
        ------
        ArgumentError
            For anything else.

        Examples
        --------
        >>> Budget.parse("32 slots").slots, Budget.parse("1 KiB").bytes
        (32, 1024)
        >>> Budget.parse("50 %", of="stages").fraction
        0.5
        """
        if isinstance(given, float):
            if of == "steps":
                raise _no_fraction(given, name)
            return cls(fraction=_fraction(given, name))
        budget = given if isinstance(given, Budget) else cls._read(given, name)
        if budget.fraction is not None and of == "steps":
            raise _no_fraction(budget.fraction, name)
        if budget.slots is not None and of == "stages":
            raise _no_slots(budget.slots, name)
        return budget

    @classmethod
    def _read(cls, given: str | int, name: str) -> Budget:
        if isinstance(given, str):
            if match := _PERCENT.fullmatch(given):
                return cls(fraction=_fraction(float(match[1]) / 100, name))
            if match := _FRACTION.fullmatch(given):
                return cls(fraction=_fraction(float(match[1]), name))
            if match := _SLOTS.fullmatch(given):
                if not re.fullmatch(r"[0-9]{1,19}", match[1]):
                    raise ArgumentError(
                        f"{name} {shown(given)}: slots must be a whole number >= 1, as in "
                        f"'32 slots', at most {MOST}"
                    )
                return cls(slots=int(match[1]))
        return cls(bytes=parse_bytes(given, name))

    def slots_for(self, state_bytes: int, buffer_bytes: int = 0) -> int:
        """Return how many states of `state_bytes` fit beside `buffer_bytes` of I/O buffers.

        Raises
        ------
        BudgetError
            When not even one state fits.
        ArgumentError
            For a fraction: equal steps have no plain training to take it of.
        """
        remedy = "raise the budget"
        if self.fraction is not None:
            raise _no_fraction(self.fraction, "memory")
        if self.slots is not None:
            slots, have, need = self.slots, f"{self.slots} slots", "1 slot"
        else:
            assert self.bytes is not None
            slots = max(0, self.bytes - buffer_bytes) // state_bytes
            have = f"budget of {self.bytes} bytes ({format_bytes(self.bytes)})"
            need = f"{state_bytes + buffer_bytes} bytes needed for one state of {state_bytes} bytes"
            need += f" and {buffer_bytes} bytes of I/O buffers" if buffer_bytes else ""
            if state_bytes <= self.bytes:
                remedy = (
                    "the state alone would fit: make the buffers smaller, such as "
                    "file:///scratch?buffers=1MiB, raise the budget, or give it in slots, "
                    "which leaves the buffers out"
                )
        if slots < 1:
            raise BudgetError(f"{have} < {need}; {remedy}")
        return slots

    def bytes_of(self, plain_bytes: Callable[[], int]) -> int:
        """Return the limit in bytes; `plain_bytes` returns what plain training takes.

        Raises
        ------
        ArgumentError
            For slots, whose size is not known where stages differ.

        Examples
        --------
        >>> Budget(fraction=0.25).bytes_of(lambda: 4000)
        1000
        """
        if self.slots is not None:
            raise _no_slots(self.slots, "memory")
        if self.fraction is not None:
            return int(self.fraction * plain_bytes())
        assert self.bytes is not None
        return self.bytes


Memory: TypeAlias = "int | str | float | Budget"


def memory_bytes(
    memory: Memory | None, plain_bytes: Callable[[], int], name: str = "memory"
) -> int | None:
    """Return a limit that a user gave in bytes, None for none; see `Budget`.

    Examples
    --------
    >>> memory_bytes("1 KiB", lambda: 4096), memory_bytes(0.5, lambda: 4096)
    (1024, 2048)
    """
    if memory is None:
        return None
    return Budget.parse(memory, name, of="stages").bytes_of(plain_bytes)


def _no_fraction(fraction: float, name: str) -> ArgumentError:
    return ArgumentError(
        f"{name}={fraction:g} must be a whole number of bytes, a string such as '512 MiB', or "
        "'32 slots'; fractions are of what plain training takes, for stages that differ"
    )


def _no_slots(slots: int, name: str) -> ArgumentError:
    return ArgumentError(
        f"{name}='{slots} slots' is of steps of equal size; here give bytes, a string such as "
        "'4 GiB', or a fraction of plain training"
    )


def _fraction(value: object, name: str) -> float:
    found = number(value, name)
    if not 0 < found <= 1:
        raise ArgumentError(
            f"{name}={found:g} as a fraction of plain training must be above 0 and at most 1; "
            "bytes are an int or a string such as '4 GiB'"
        )
    return found
