"""What planners of steps that are alike know: costs in seconds and bytes.

Symbols of the papers: T_A is `forward_step_s`, T_W and T_R are a tier's
`write_s` and `read_s`, rho is `write_s / forward_step_s`, and T_B is
`turn_s`, one whole adjoint step from its state, taping included.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Self

from ..errors import ArgumentError
from ..support.units import format_seconds
from ..support.values import LEAST_STEP_S, seconds, shown, whole
from .tier import Tier


class CostModel:
    """What a computation costs, in seconds and bytes; a value that goes to JSON and back.

    `Costs` are those of steps that are alike: numbers.  `StageCosts` are those of stages that
    differ: a `Stage` each.
    """

    __slots__ = ()

    FORMAT: ClassVar[str]
    WHAT: ClassVar[str]
    UNIT: ClassVar[str]

    @property
    def largest_state_bytes(self) -> int:
        """The bytes of the largest state that may be kept: any but the last."""
        raise NotImplementedError

    def mean(self, tiers: tuple[Tier, ...] = ()) -> Costs:
        """Return the means over the steps, as costs of steps that are alike."""
        raise NotImplementedError

    def facts(self) -> list[str]:
        """Return the lines that say in numbers what a step takes; none where steps differ."""
        return []

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


# As `tape_bytes`: more than any budget holds, so that no planner keeps a second tape.
NOT_KEPT = 1 << 62


@dataclass(frozen=True, slots=True)
class Costs(CostModel):
    """Measured or assumed costs of one uniform computation and its tiers.

    Attributes
    ----------
    forward_step_s : float
        Seconds of one forward step that keeps nothing (T_A), above 0.
    reverse_step_s : float
        Seconds of one adjoint step given its tape.
    tape_step_s : float or None
        Seconds of one forward step that keeps its tape.  None means that a
        state is its own tape (an adjoint operator that starts from the state):
        taping then costs a plain forward step, and nothing when the live
        state need not move on.
    state_bytes, tape_bytes : int
        Size of one state and of one tape; `tape_bytes` 0 means `state_bytes`,
        `NOT_KEPT` that only the latest tape exists, in working memory.
    tiers : tuple of Tier
        The slow tiers, fastest first.  Since all states have one size, rates are folded into
        seconds per state and capacities into states, see `Tier.for_states`.
    action_s : float
        Seconds the driver itself takes per action of a schedule.

    Examples
    --------
    >>> costs = Costs(1e-3, 2e-3, tiers=(Tier("file", write_s=8e-3, read_s=8e-3),))
    >>> costs.turn_s, costs.rho
    (0.002, 8.0)
    """

    FORMAT: ClassVar[str] = "multistage-costs-1"
    WHAT: ClassVar[str] = "costs of steps"
    UNIT: ClassVar[str] = "steps"

    forward_step_s: float
    reverse_step_s: float
    tape_step_s: float | None = None
    state_bytes: int = 1
    tape_bytes: int = 0
    tiers: tuple[Tier, ...] = ()
    action_s: float = 0.0

    def __post_init__(self) -> None:
        for name in ("forward_step_s", "reverse_step_s", "tape_step_s", "action_s"):
            value = getattr(self, name)
            if value is not None or name != "tape_step_s":
                object.__setattr__(self, name, seconds(value, name))
        if self.forward_step_s < LEAST_STEP_S:
            raise ArgumentError(
                f"forward_step_s={self.forward_step_s:g} must be a number of seconds > 0, "
                f"at least {LEAST_STEP_S:g}"
            )
        object.__setattr__(self, "state_bytes", whole(self.state_bytes, "state_bytes", 1))
        object.__setattr__(self, "tape_bytes", whole(self.tape_bytes, "tape_bytes"))
        tiers = tuple(self.tiers) if isinstance(self.tiers, list | tuple) else (self.tiers,)
        if not all(isinstance(tier, Tier) for tier in tiers):
            raise ArgumentError(f"tiers={shown(self.tiers)} must be a tuple of Tier")
        folded = tuple(tier.for_states(self.state_bytes) for tier in tiers)
        object.__setattr__(self, "tiers", folded)

    @property
    def state_is_tape(self) -> bool:
        """Whether an adjoint step starts from the bare state."""
        return self.tape_step_s is None

    @property
    def one_tape(self) -> bool:
        """Whether only the latest tape exists, in working memory (`tape_bytes` is `NOT_KEPT`)."""
        return not self.state_is_tape and self.tape_bytes >= NOT_KEPT

    @property
    def taping_s(self) -> float:
        """Seconds of `Tape(i)`, a forward step that keeps its tape."""
        return self.forward_step_s if self.tape_step_s is None else self.tape_step_s

    @property
    def turn_s(self) -> float:
        """Seconds of `Reverse(i)` from the live state (T_B)."""
        return self.reverse_step_s + (self.tape_step_s or 0.0)

    @property
    def tape_slots(self) -> float:
        """Slots one tape beyond the first takes, in units of one state."""
        return (self.tape_bytes or self.state_bytes) / self.state_bytes

    @property
    def tier(self) -> Tier | None:
        """The first slow tier, or None."""
        return self.tiers[0] if self.tiers else None

    @property
    def rho(self) -> float:
        """Transfer time over step time on the first tier; infinite without one."""
        return self.tiers[0].write_s / self.forward_step_s if self.tiers else math.inf

    @property
    def largest_state_bytes(self) -> int:
        """The bytes of a state."""
        return self.state_bytes

    def mean(self, tiers: tuple[Tier, ...] = ()) -> Costs:
        """Return these costs: all steps are alike."""
        return self

    def facts(self) -> list[str]:
        """Return what a step takes, as text."""
        rho = f" (rho = {self.rho:.3g})" if self.tiers else ""
        step, turn = format_seconds(self.forward_step_s), format_seconds(self.turn_s)
        return [f"step {step}, adjoint step {turn}{rho}"]

    def without_tiers(self) -> Costs:
        """Return the same costs with no slow tier."""
        return replace(self, tiers=()) if self.tiers else self

    def to_dict(self) -> dict[str, object]:
        """Return the costs as plain data, with their format; read back by `from_dict`."""
        data = {field.name: getattr(self, field.name) for field in fields(self)}
        return data | {"tiers": [tier.to_dict() for tier in self.tiers], "format": self.FORMAT}

    @classmethod
    def _read(cls, data: dict[str, Any]) -> Self:
        tiers = tuple(Tier.from_dict(tier) for tier in data.pop("tiers", ()))
        return cls(tiers=tiers, **data)
