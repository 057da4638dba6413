"""What a search over short chains knows to be held where."""

from __future__ import annotations

from typing import NamedTuple

Thing = tuple[bool, int]  # whether it is a tape, and its step
Move = tuple[str, int, bool]


class Held(NamedTuple):
    """What is held where; sets have bit i for state i, or for the tape of stage i."""

    adjoint: int  # the next adjoint is of stage adjoint - 1
    states: int = 0
    tapes: int = 0
    pins: int = 0  # states outside of a tape that a tape starts from
    far_states: int = 0
    far_tapes: int = 0
    own_states: int = 0  # whose write is from the copy in fast memory, and not awaited
    own_tapes: int = 0
    late: int = 0  # tapes made after the turn: they and the states they start from stay
    front: int = 0  # the next stage of the forward sweep
    writing: Thing | None = None
    write_s: float = 0.0
    reading: Thing | None = None
    read_s: float = 0.0

    def at_hand(self, state: int) -> bool:
        """Whether a state is in fast memory, alone or inside of a tape."""
        return not state or bool((self.states | self.pins | self.tapes << 1) >> state & 1)

    def anywhere(self, state: int) -> bool:
        """Whether a state is in fast memory or in the tier."""
        far = self.far_states | self.far_tapes << 1
        return self.at_hand(state) or bool(far >> state & 1)


def with_thing(held: Held, thing: Thing, where: str) -> Held:
    """Return what is held with a thing more, of the sets that begin with `where`."""
    tape, i = thing
    if tape:
        name = f"{where}tapes"
    else:
        name = f"{where}states"
    return held._replace(**{name: getattr(held, name) | 1 << i})
