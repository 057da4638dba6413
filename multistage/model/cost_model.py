"""What costs of every kind have: files and JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, ClassVar, Self

from ..errors import ArgumentError


class CostModel:
    """What a computation costs, in seconds and bytes; a value that goes to JSON and back.

    `Costs` are those of steps that are alike: numbers.  `StageCosts` are those of stages that
    differ: a `Stage` each.  `StageCosts.of` makes stages of steps that are alike,
    `StageCosts.mean` numbers of stages.
    """

    __slots__ = ()

    FORMAT: ClassVar[str]
    WHAT: ClassVar[str]

    def to_dict(self) -> dict[str, object]:
        """Return the costs as plain data, with their format; read back by `from_dict`."""
        raise NotImplementedError

    @classmethod
    def from_dict(cls, data: object) -> Self:
        """Return the costs that `to_dict` described.

        Raises
        ------
        ArgumentError
            If `data` describes no such costs, or values are out of range.
        """
        if not isinstance(data, dict) or data.get("format", cls.FORMAT) != cls.FORMAT:
            raise ArgumentError(f"not the {cls.WHAT}: 'format' must be {cls.FORMAT!r}")
        try:
            return cls._read({name: value for name, value in data.items() if name != "format"})
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(f"not the {cls.WHAT}: {error}") from error

    @classmethod
    def _read(cls, data: dict[str, Any]) -> Self:
        raise NotImplementedError

    def to_json(self) -> str:
        """Return the costs as JSON text, read back by `from_json`."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Return the costs that `to_json` wrote.  Raises ArgumentError, as `from_dict` does."""
        try:
            data: Any = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"not the {cls.WHAT}: {error}") from error
        if not isinstance(data, dict) or "format" not in data:
            raise ArgumentError(f"not the {cls.WHAT}: 'format' must be {cls.FORMAT!r}")
        return cls.from_dict(data)

    def save(self, path: str | Path) -> None:
        """Write the costs to a JSON file, which `load` and the command line read."""
        Path(path).write_text(self.to_json() + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Return the costs that `save` wrote.

        Raises
        ------
        ArgumentError
            If the file cannot be read, or is none, as for `from_dict`.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ArgumentError(f"the costs {str(path)!r} cannot be read: {error}") from error
        return cls.from_json(text)
