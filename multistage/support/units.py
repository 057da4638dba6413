"""Sizes and times as texts: `"512 MiB"` to bytes, `"250us"` to seconds, and back."""

from __future__ import annotations

import math
import re

from ..errors import ArgumentError
from .values import MOST, shown, whole

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "k": 2**10,
    "m": 2**20,
    "g": 2**30,
    "t": 2**40,
}
_POWERS = {"ns": -9, "us": -6, "ms": -3, "s": 0}


def parse_bytes(text: str | int, name: str = "size") -> int:
    """Return a byte count from an int or a string such as `"512 MiB"`.

    Decimal units (kB, MB, GB, TB) are powers of ten; KiB, MiB, GiB, TiB and
    bare K, M, G, T are powers of two.

    Raises
    ------
    ArgumentError
        If the text is no size or is negative; `name` is the argument's, for the message.

    Examples
    --------
    >>> parse_bytes("512 MiB")
    536870912
    """
    if not isinstance(text, str):
        if isinstance(text, bool) or not hasattr(text, "__index__"):
            raise ArgumentError(
                f"{name}={shown(text)} must be a whole number of bytes, or a string such as "
                "'512 MiB' or '32 slots'"
            )
        return whole(text, name)
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        # What stands before an "@" is a secret perhaps: memory:PASSWORD@host.
        said = re.sub(r"(?s).*(@|%40)", r"***\1", text)
        raise ArgumentError(
            f"{name}={shown(said)} is no byte count; write a number and a unit such as '512 MiB' "
            "or '2GB'"
        )
    count = float(match[1]) * unit
    if count > MOST:
        raise ArgumentError(f"{name}={shown(text)} must be at most 2^62 bytes")
    return int(count)


def parse_seconds(text: str, name: str = "time") -> float:
    """Return seconds from a text such as `"0.002"`, `"2ms"`, `"250us"`, `"40ns"` or `"2s"`.

    Raises
    ------
    ArgumentError
        If the text is no time; `name` says in the message what it was to be.

    Examples
    --------
    >>> parse_seconds("250us")
    0.00025
    """
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][-+]?\d+)?)\s*(ns|us|ms|s)?\s*", text)
    try:
        if match:
            mantissa, _, exponent = match[1].lower().partition("e")
            # One conversion of decimal digits, so that 250us is 0.00025 to the last bit.
            return float(f"{mantissa}e{int(exponent or 0) + _POWERS[match[2] or 's']}")
    except ValueError:
        pass
    raise ArgumentError(f"{name} {shown(text)} is no number of seconds; write 250us, 1.5ms or 2s")


def format_bytes(count: float) -> str:
    """Return a byte count in the largest binary unit that keeps it above one.

    Examples
    --------
    >>> format_bytes(3 << 20)
    '3.00 MiB'
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} B" if unit == "B" else f"{count:.2f} {unit}"
        count /= 1024
    return f"{count:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """Return a time in the unit that suits its size.

    Examples
    --------
    >>> format_seconds(0.00042)
    '420 us'
    """
    if abs(seconds) < 1e-12:
        return "0 s"
    if math.isinf(seconds) or math.isnan(seconds):
        return f"{seconds:g} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"
