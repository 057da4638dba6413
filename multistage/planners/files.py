"""Lists of actions as JSON files hold them: one list an action, such as `["Put", 3, 0, true]`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields
from pathlib import Path
from typing import Any

from ..actions import (
    Action,
    Advance,
    Await,
    Drop,
    EndForward,
    Evict,
    Free,
    Get,
    Load,
    Offer,
    Put,
    Reverse,
    Save,
    Tape,
)
from ..errors import ArgumentError
from ..support.values import shown

_KINDS: dict[str, type[Action]] = {
    kind.__name__: kind
    for kind in (
        *(Advance, Tape, Reverse, Save, Load, Free, Offer, Put, Get, Await, Evict, Drop),
        EndForward,
    )
}
_MOST = 1 << 40


def actions_to_lists(actions: Iterable[Action]) -> list[list[str | int | bool]]:
    """Return actions as lists: the name and the values of each.

    Examples
    --------
    >>> actions_to_lists([Advance(0, 3), Put(3, tape=True)])
    [['Advance', 0, 3], ['Put', 3, 0, True]]
    """
    return [[type(action).__name__, *astuple(action)] for action in actions]


def actions_from_lists(data: object) -> tuple[Action, ...]:
    """Return the actions that `actions_to_lists` wrote; whether they are legal is not looked at.

    Raises
    ------
    ArgumentError
        Naming the first that is no action.
    """
    if not isinstance(data, list):
        raise ArgumentError(f"actions={shown(data)} must be a list of actions")
    return tuple(_action(k, entry) for k, entry in enumerate(data))


def read_json(path: str | Path) -> object:
    """Return what a plan's JSON file holds.  Raises ArgumentError if it cannot be read."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ArgumentError(f"the plan {str(path)!r} cannot be read: {error}") from error


def _action(index: int, entry: Any) -> Action:
    where = f"actions[{index}]"
    name = entry[0] if isinstance(entry, list) and entry else None
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ArgumentError(f"{where}={shown(entry)} must be a list such as ['Tape', 3]")
    values: Sequence[Any] = entry[1:]
    named = fields(kind)
    least = sum(field.name not in ("tier", "tape") for field in named)
    if not least <= len(values) <= len(named):
        names = ", ".join(field.name for field in named)
        raise ArgumentError(f"{where}={shown(entry)} must have the values ({names})")
    for field, value in zip(named, values, strict=False):
        if field.name == "tape":
            if not isinstance(value, bool):
                raise ArgumentError(f"{where}: tape={shown(value)} must be true or false")
        elif isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
            raise ArgumentError(f"{where}: {field.name}={shown(value)} must be a number from 0 on")
    return kind(*values)
