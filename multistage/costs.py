"""What the planners know: costs in seconds and bytes, tiers, and the memory budget.

Symbols of the papers: T_A is `forward_step_s`, T_W and T_R are a tier's
`write_s` and `read_s`, rho is `write_s / forward_step_s`, and T_B is
`turn_s`, one whole adjoint step from its state, taping included.
"""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from .errors import ArgumentError, BudgetError
from .values import LEAST_STEP_S, MOST, seconds, shown, whole

# As `tape_bytes`: more than any budget holds, so that no planner keeps a second tape.
NOT_KEPT = 1 << 62

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


def parse_bytes(text: str | int) -> int:
    """Return a byte count from an int or a string such as `"512 MiB"`.

    Decimal units (kB, MB, GB, TB) are powers of ten; KiB, MiB, GiB, TiB and
    bare K, M, G, T are powers of two.

    Raises
    ------
    ArgumentError
        If the text is no size or is negative.

    Examples
    --------
    >>> parse_bytes("512 MiB")
    536870912
    """
    if not isinstance(text, str):
        if isinstance(text, bool) or not hasattr(text, "__index__"):
            raise ArgumentError(
                f"size {shown(text)} must be a whole number of bytes, or a string such as "
                "'512 MiB' or '32 slots'"
            )
        return whole(text, "size")
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", text)
    unit = _UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        # What stands before an "@" is a secret perhaps: memory:PASSWORD@host.
        said = re.sub(r"(?s).*(@|%40)", r"***\1", text)
        raise ArgumentError(
            f"size {shown(said)} is no byte count; write a number and a unit such as '512 MiB' "
            "or '2GB'"
        )
    count = float(match[1]) * unit
    if count > MOST:
        raise ArgumentError(f"size {shown(text)} must be at most 2^62 bytes")
    return int(count)


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


@dataclass(frozen=True, slots=True)
class Tier:
    """What one state costs on a slow tier.

    Attributes
    ----------
    name : str
        As shown in tables, for example `"file"`.
    write_s, read_s : float
        Seconds to move one state there and back while compute runs.
    write_overhead_s, read_overhead_s : float
        Seconds the computing thread itself loses per state written or read
        (copies, queueing, interference).
    capacity_states : int or None
        States it can hold; None if unbounded.
    queue_depth : int
        Writes that may be under way or waiting before an `Offer` is refused (q).
    """

    name: str = "slow"
    write_s: float = 0.0
    read_s: float = 0.0
    write_overhead_s: float = 0.0
    read_overhead_s: float = 0.0
    capacity_states: int | None = None
    queue_depth: int = 2

    def __post_init__(self) -> None:
        if not isinstance(self.name, str):
            raise ArgumentError(f"name={shown(self.name)} of a tier must be a string")
        of = f" of tier {shown(self.name)}"
        for name in ("write_s", "read_s", "write_overhead_s", "read_overhead_s"):
            object.__setattr__(self, name, seconds(getattr(self, name), name + of))
        object.__setattr__(self, "queue_depth", whole(self.queue_depth, "queue_depth" + of, 1))
        if self.capacity_states is not None:
            capacity = whole(self.capacity_states, "capacity_states" + of)
            object.__setattr__(self, "capacity_states", capacity)


@dataclass(frozen=True, slots=True)
class Costs:
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
        The slow tiers, fastest first.
    action_s : float
        Seconds the driver itself takes per action of a schedule.

    Examples
    --------
    >>> costs = Costs(1e-3, 2e-3, tiers=(Tier("file", write_s=8e-3, read_s=8e-3),))
    >>> costs.turn_s, costs.rho
    (0.002, 8.0)
    """

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
        object.__setattr__(self, "tiers", tiers)

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

    def without_tiers(self) -> Costs:
        """Return the same costs with no slow tier."""
        return replace(self, tiers=())

    def to_json(self) -> str:
        """Return the costs as JSON text, read back by `from_json`."""
        data = asdict(self)
        data["format"] = "multistage-costs-1"
        return json.dumps(data, indent=2)

    @classmethod
    def from_json(cls, text: str) -> Costs:
        """Return the costs held in JSON text written by `to_json`.

        Raises
        ------
        ArgumentError
            If the text is no such JSON or its values are out of range.
        """
        try:
            data: Any = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise ArgumentError(f"no costs file: {error}") from error
        if not isinstance(data, dict) or data.pop("format", None) != "multistage-costs-1":
            raise ArgumentError('no costs file: "format" must be "multistage-costs-1"')
        return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> Costs:
        """Return the costs whose attributes `data` has, tiers as dicts.  Raises ArgumentError."""
        try:
            data = dict(data)
            tiers = tuple(Tier(**tier) for tier in data.pop("tiers", ()))
            return cls(tiers=tiers, **data)
        except (TypeError, ValueError) as error:
            if isinstance(error, ArgumentError):
                raise
            raise ArgumentError(f"no costs file: {error}") from error

    def save(self, path: str | Path) -> None:
        """Write the costs to a JSON file."""
        Path(path).write_text(self.to_json() + "\n")

    @classmethod
    def load(cls, path: str | Path) -> Costs:
        """Return the costs held in a JSON file.

        Raises
        ------
        ArgumentError
            If it is no such file, as for `from_json`.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ArgumentError(f"no costs file: {path} is not text") from error
        return cls.from_json(text)


@dataclass(frozen=True, slots=True)
class Budget:
    """Fast memory for checkpoints: bytes or slots, exactly one of them.

    The live state, the adjoint, one working tape and state 0 (the caller's, or a
    copy where steps could overwrite it) belong to the computation and are not
    counted; staging and landing slots are.  A budget in bytes
    also pays for the I/O buffers of the tiers; one in slots does not.

    Attributes
    ----------
    bytes : int or None
        Bytes, for example from `parse_bytes("512 MiB")`.
    slots : int or None
        States.
    """

    bytes: int | None = None
    slots: int | None = None

    def __post_init__(self) -> None:
        if (self.bytes is None) == (self.slots is None):
            raise ArgumentError(
                f"give a budget as bytes or as slots, not bytes={shown(self.bytes)}, "
                f"slots={shown(self.slots)}"
            )
        name = "bytes" if self.slots is None else "slots"
        object.__setattr__(self, name, whole(getattr(self, name), f"budget: {name}"))

    @classmethod
    def parse(cls, text: str | int | Budget) -> Budget:
        """Return a budget from bytes (int), a size string, `"32 slots"` or a Budget.

        Examples
        --------
        >>> Budget.parse("32 slots")
        Budget(bytes=None, slots=32)
        """
        if isinstance(text, Budget):
            return text
        if isinstance(text, str) and (match := re.fullmatch(r"\s*(.*?)\s*slots?\s*", text)):
            if not re.fullmatch(r"[0-9]{1,19}", match[1]):
                raise ArgumentError(
                    f"budget {shown(text)}: slots must be a whole number >= 1, as in '32 slots', "
                    f"at most {MOST}"
                )
            return cls(slots=int(match[1]))
        return cls(bytes=parse_bytes(text))

    def slots_for(self, state_bytes: int, buffer_bytes: int = 0) -> int:
        """Return how many states of `state_bytes` fit beside `buffer_bytes` of I/O buffers.

        Raises
        ------
        BudgetError
            When not even one state fits.
        """
        remedy = "raise the budget"
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
