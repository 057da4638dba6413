"""What the loop that performs actions asks of others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol, TypeVar

from ..actions import Answer, Await, Drop, Evict, Get, Offer, Put
from ..states.slots import Kept

if TYPE_CHECKING:
    from .sweep import Sweep


State = TypeVar("State")
Adjoint = TypeVar("Adjoint")


class Operators(Protocol[State, Adjoint]):
    """What the loop asks of a chain; `multistage.Chain` is one."""

    @property
    def in_place(self) -> bool: ...

    @property
    def state_is_tape(self) -> bool: ...

    def advance(self, state: State, start: int, stop: int) -> State:
        """Run steps start..stop-1."""
        ...

    def tape(self, state: State, step: int) -> tuple[State, object]:
        """Run one step; return the state after it and its tape."""
        ...

    def reverse(self, tape: object, adjoint: Adjoint, step: int) -> Adjoint:
        """Return the adjoint of the state before a step; not called where adjoints are pulled."""
        ...


class Elsewhere(Protocol):
    """What is not in fast memory: slow tiers, and what they have lost.

    Each method performs one action for a sweep, whose `held`, `tapes`, `lost` and `used`
    it keeps up to date.
    """

    def write(self, sweep: Sweep, action: Offer | Put) -> Answer: ...

    def read(self, sweep: Sweep, action: Get) -> Answer: ...

    def wait(self, sweep: Sweep, action: Await) -> Answer: ...

    def evict(self, sweep: Sweep, action: Evict) -> Answer: ...

    def drop(self, sweep: Sweep, action: Drop) -> Answer: ...

    def find(self, sweep: Sweep, step: int) -> Kept:
        """Return a state that no slot holds: state 0, or one computed again."""
        ...

    def find_tape(self, sweep: Sweep, step: int) -> object:
        """Return a tape, in place of one that was lost."""
        ...
