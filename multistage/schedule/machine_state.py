"""What the machine that judges schedules knows: where states and tapes are, and the room taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, astuple, dataclass, field, fields, is_dataclass
from typing import NoReturn

from ..actions import Action, Drop, Evict, Get, Offer, Put
from ..errors import ScheduleError
from ..support.values import shown
from .accounting import ByteAccounting


@dataclass(slots=True)
class Transfer:
    """One accepted transfer whose `Await` or `Evict` is still to come."""

    item: int  # a state's step, or ~step of a tape
    tier: int
    is_write: bool
    staged: bool  # a write that took a staging slot of its own


@dataclass(slots=True)
class MachineState:
    """A schedule that is being judged, after some of its actions.

    The parameters are those of `Rules`.  A failed requirement raises `ScheduleError` and
    changes nothing.
    """

    n_steps: int | None
    slots: float
    tape_slots: float = 1.0
    tier_slots: Mapping[int, float] = field(default_factory=dict)
    _: KW_ONLY
    state_is_tape: bool = False
    in_place: bool = False
    one_tape: bool = False
    recovers: bool = False
    memory: ByteAccounting | None = None
    live: int | None = 0
    adjoint: int | None = None  # the next Reverse is of step adjoint - 1
    held: dict[int, int | None] = field(default_factory=dict)  # step -> token of a pending Get
    tapes: dict[int, int | None] = field(default_factory=dict)  # the same
    # From here on a state is known by its step, a tape by ~step.
    pins: dict[int, int] = field(default_factory=dict)  # item -> writes not awaited
    stored: dict[tuple[int, int], int | None] = field(default_factory=dict)
    tokens: dict[int, Transfer] = field(default_factory=dict)
    unread: set[int] = field(default_factory=set)  # steps that a Get was to bring and did not
    unwritten: set[tuple[int, int]] = field(default_factory=set)  # copies that tiers have lost
    next_token: int = 0
    staged: int = 0
    used: float = 0.0
    peak: float = 0.0
    tier_used: dict[int, float] = field(default_factory=dict)
    tier_peak: dict[int, float] = field(default_factory=dict)
    forward_steps: int = 0
    index: int = 0

    def fail(self, message: str) -> NoReturn:
        """Raise ScheduleError about the next action."""
        raise ScheduleError(message, self.index)

    # -------------------------------------------------------------- fast memory

    def room(self, more: float, what: Action | str) -> None:
        """Require so many slots more, for an action or what a message is to say of it."""
        if self.used + more > self.slots + 1e-9:
            if not isinstance(what, str):
                what = told(what)
            self.fail(
                f"{what} needs {more:g} fast slot(s), "
                f"but {self.used:g} of {self.slots:g} are taken; "
                "free one first or raise the budget"
            )

    def take(self, more: float) -> None:
        """Take slots."""
        self.used += more
        self.peak = max(self.peak, self.used)

    def borrow(self, more: float, what: str) -> None:
        """Take and give back room within one action."""
        self.room(more, what)
        self.peak = max(self.peak, self.used + more)

    def keep_latest(self, action: Action) -> None:
        """Require that no tape is held, where only the latest exists."""
        if self.tapes:
            step = next(iter(self.tapes))
            self.fail(
                f"{action} but the chain has only its latest tape, and that of step {step} "
                f"is still needed; Reverse({step}) first"
            )

    def readable(self, step: int, what: str) -> None:
        """Require that a slot holds a state, and that it has landed."""
        if step not in self.held:
            where = "no fast slot" if self.memory is None else "nothing in fast memory"
            self.fail(f"{what}({step}) but {where} holds checkpoint {step}")
        if self.held[step] is not None:
            self.fail(f"{what}({step}) before Await({self.held[step]}) of its Get")

    def unpin(self, item: int) -> None:
        """Count one write from a fast copy less."""
        self.pins[item] -= 1
        if not self.pins[item]:
            del self.pins[item]

    def end_tape(self, step: int) -> None:
        """Give a tape back."""
        del self.tapes[step]
        if self.tapes:
            self.used -= self.tape_slots

    # -------------------------------------------------------------------- tiers

    def tier_has_room(self, action: Offer | Put) -> bool:
        """Whether the action's tier has room for what it would write, known limits given."""
        limit = self.tier_slots.get(action.tier)
        if limit is None:
            return True
        more = self.room_in_tier(~action.step if action.tape else action.step)
        return self.tier_used.get(action.tier, 0) + more <= limit

    def room_in_tier(self, item: int) -> float:
        """Return what a state or tape takes of a tier: slots, or bytes."""
        if self.memory is not None:
            return self.memory.bytes_of(item)
        return self.tape_slots if item < 0 else 1

    def filling(self, used: float, limit: float, more: float) -> str:
        """Return what a tier holds, for messages."""
        if self.memory is None:
            return f"{used:g} of {limit:g} states"
        return f"{used:g} of {limit:g} bytes, and {more:g} more do not fit"

    def lose(self, item: int, tier: int) -> None:
        """Take a copy that a transfer has lost out of its tier."""
        if (item, tier) in self.stored:
            del self.stored[item, tier]
            self.tier_used[tier] -= self.room_in_tier(item)
            if self.recovers:
                self.unwritten.add((item, tier))


def item_said(item: int) -> str:
    """Return a state or tape as messages show it."""
    return f"tape {~item}" if item < 0 else f"checkpoint {item}"


def require_whole(action: Action, index: int | None) -> None:
    """Raise ScheduleError if an action names steps, tiers or tokens by other than ints.

    Asked only once something went wrong with it: most schedules have a million actions.
    """
    for each in fields(action) if is_dataclass(action) else ():
        value = getattr(action, each.name)
        if not hasattr(value, "__index__"):
            raise ScheduleError(f"{told(action)} but {each.name}={shown(value)} is no int", index)


def told(action: Action) -> str:
    """Return an action as messages show it: `Get(3, 0)`, `Get(3, 0, tape=True)`."""
    values = list(map(str, astuple(action)))
    if isinstance(action, Offer | Put | Get | Drop | Evict):
        values[-1:] = ["tape=True"] if action.tape else []
    return f"{type(action).__name__}({', '.join(values)})"
