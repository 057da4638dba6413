"""Checks of arguments: numbers as Python's, and values as messages show them."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable
from pathlib import Path

from ..errors import ArgumentError

# The longest time a cost may be, 30 000 years, and the shortest step: beyond
# them sums and ratios leave the range of a double.
MOST_S, LEAST_STEP_S = 1e12, 1e-15
MOST = 1 << 62  # of bytes, slots and states


def seconds(value: object, name: str) -> float:
    """Return a number of seconds, NumPy's too, as a float.

    Raises
    ------
    ArgumentError
        Unless it is a number from 0 to 10^12.

    Examples
    --------
    >>> seconds(2, "read_s")
    2.0
    """
    found = number(value, name, "seconds")
    if not 0 <= found <= MOST_S:
        raise ArgumentError(f"{name}={found} must be a finite number of seconds >= 0, at most 1e12")
    return found


def number(value: object, name: str, unit: str = "") -> float:
    """Return a real number as a float.  Raises ArgumentError for anything else."""
    if not isinstance(value, str | bytes) and not _is_flag(value):
        try:
            return float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            pass
    of = f" of {unit}" if unit else ""
    raise ArgumentError(f"{name}={shown(value)} must be a finite number{of}")


def whole(value: object, name: str, least: int = 0, most: int = MOST) -> int:
    """Return a whole number, NumPy's too, as an int.

    Raises
    ------
    ArgumentError
        For anything else, such as 3.5 or True, and outside `least`..`most`.

    Examples
    --------
    >>> whole(3, "slots")
    3
    """
    found = whole_or_none(value)
    if found is None:
        raise ArgumentError(f"{name}={shown(value)} must be a whole number, at least {least}")
    if found < least:
        what = "not be negative" if least == 0 else f"be at least {least}"
        raise ArgumentError(f"{name}={shown(found)} must {what}")
    if found > most:
        raise ArgumentError(f"{name}={shown(found)} must be at most {most}")
    return found


def whole_or_none(value: object) -> int | None:
    """Return a whole number, NumPy's too, as an int; None for anything else, and for True.

    Examples
    --------
    >>> whole_or_none(3), whole_or_none(3.5), whole_or_none(True)
    (3, None, None)
    """
    try:
        return None if _is_flag(value) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def folder_path(value: object, name: str) -> Path:
    """Return the path of a folder, in which `~` is the user's own.

    Raises
    ------
    ArgumentError
        For what names none: an empty string, bytes, a null character.

    Examples
    --------
    >>> folder_path("/scratch", "durable").name
    'scratch'
    """
    path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
    if not isinstance(path, str) or not path or "\0" in path:
        raise ArgumentError(f"{name}={shown(value)} must be the name of a folder")
    return Path(os.path.expanduser(path))  # noqa: PTH111 - that of a user who is not known stays


def _is_flag(value: object) -> bool:
    """Whether a value is True or False, also as NumPy has them."""
    return isinstance(value, bool) or getattr(getattr(value, "dtype", None), "kind", "") == "b"


def several(value: object) -> bool:
    """Whether a value can be iterated over: NumPy's arrays without an axis cannot.

    Examples
    --------
    >>> several([1, 2]), several(3)
    (True, False)
    """
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) != 0


def shown(value: object) -> str:
    """Return a value as messages show it, shortened where it is long."""
    try:
        text = repr(value)
    except Exception:  # a number of thousands of digits, or a repr of the user's that raises
        text = f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= 80 else f"{text[:40]}... ({len(text)} characters)"
