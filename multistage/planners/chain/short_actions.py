"""The actions of a path of the search over short chains."""

from __future__ import annotations

from ...actions import (
    Action,
    Advance,
    Await,
    Drop,
    EndForward,
    Evict,
    Free,
    Get,
    Load,
    Put,
    Reverse,
    Save,
    Tape,
)
from .short_held import Held, Move, Thing


class _Writer:
    """Writes down the actions of a path of the search."""

    def __init__(self, n: int) -> None:
        self.n, self.actions, self.live, self.ended = n, list[Action](), 0, False
        self.tokens = 0
        self.own: dict[Thing, int] = {}  # tokens of writes not awaited
        self.tier: set[Thing] = set()
        self.read: int | None = None

    def _load(self, state: int) -> None:
        if self.live != state:
            self.actions.append(Load(state))
            self.live = state

    def _token(self) -> int:
        self.tokens += 1
        return self.tokens - 1

    def _leave(self, state: int) -> None:
        """Let the live state be another than this."""
        if self.live == state:
            self._load(0)

    def _drop_state(self, state: int) -> None:
        self._leave(state)
        own = self.own.pop((False, state), None)
        self.actions.append(Free(state) if own is None else Evict(state))

    def write(self, move: Move, held: Held, after: Held) -> None:
        """Write down a move from what is held to what is held then."""
        what, i, tape = move
        gone = held.states & ~after.states
        match what:
            case "run":
                self._load(i)
                self.actions += [Advance(i, i + 1), Save(i + 1)]
                self.live = i + 1
            case "tape":
                self._load(i)
                self.actions.append(Tape(i))
                self.live = i + 1
                if i == self.n - 1 and not self.ended:
                    self.actions.append(EndForward())
                    self.ended = True
            case "reverse":
                self._reverse(i)
            case "put":
                self.actions.append(Put(i, tape=tape))
                self.own[tape, i] = self._token()
                self.tier.add((tape, i))
            case "get":
                self.actions.append(Get(i, tape=tape))
                self.read = self._token()
            case "keep" | "evict" if tape:
                if what == "keep":
                    self._save_from(i)
                else:
                    self._leave(i + 1)
                self.actions.append(Evict(i, tape=True))
                del self.own[True, i]
        if held.reading is not None and after.reading is None:
            assert self.read is not None
            self.actions.append(Await(self.read))
        for state in range(self.n):
            if gone >> state & 1:
                self._drop_state(state)
        self._drop_copies(after)

    def _save_from(self, i: int) -> None:
        """Save the state in the tape of stage i: in the forward sweep, where it was made."""
        if self.ended:
            self._load(i + 1)
            self.actions.append(Save(i + 1))
            return
        self.actions.insert(self.actions.index(Tape(i)) + 1, Save(i + 1))

    def _reverse(self, i: int) -> None:
        if (own := self.own.pop((True, i), None)) is not None:
            self.actions.append(Await(own))
        self.actions.append(Reverse(i))
        if self.live == i + 1:
            self.live = -1

    def _drop_copies(self, after: Held) -> None:
        """Drop from the tier what nothing will need."""
        for tape, i in sorted(self.tier):
            far = after.far_tapes if tape else after.far_states
            if far >> i & 1 or (tape, i) in (after.writing, after.reading):
                continue
            if (own := self.own.pop((tape, i), None)) is not None:
                self.actions.append(Await(own))
            self.actions.append(Drop(i, tape=tape))
            self.tier.remove((tape, i))


def actions_of_path(
    n: int, start: Held, goal: Held, came: dict[Held, tuple[Held, Move]]
) -> list[Action]:
    """Return the actions of a path that a search over n stages took."""
    path: list[tuple[Held, Move, Held]] = []
    at = goal
    while at != start:
        before, move = came[at]
        path.append((before, move, at))
        at = before
    writer = _Writer(n)
    for before, move, after in reversed(path):
        writer.write(move, before, after)
    return writer.actions
