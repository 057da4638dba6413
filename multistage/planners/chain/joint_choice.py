"""What to do with the stages that have run, where writes to the tier are late."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from ...actions import (
    Action,
    Advance,
    EndForward,
    Put,
    Save,
    Tape,
)
from ...support.arrays import Bytes
from .joint_core import APART, KEEPS_TAPE, RESERVE_AT, STARTS, STATE_AWAY, TAPE_AWAY, Core
from .joint_detour import Held

_SHARES = 5  # of what was evicted, as candidates for reading back
# Candidates of each share that are improved: of chains of no more stages, and of longer ones.
_IMPROVED = ((60, 6), (100, 3), (math.inf, 1))
_MOST_KEPT = 24  # choices of tapes to keep, of each kind


class Choice:
    """The plans that continue from what is held, and the best of them."""

    def __init__(
        self, actions: Sequence[Action], alone: Bytes | None, core: Core, held: Held
    ) -> None:
        self.core, self.held, self.n = core, held, core.n
        self.made = fates_of(actions, self.n)
        self.alone = alone
        self.away = set(held.away)

    def best(self) -> Iterator[Bytes]:
        """Yield the best plans found for some numbers of things read back."""
        improved = next(most for stages, most in _IMPROVED if self.n <= stages)
        counts = sorted({len(self.away) * k // _SHARES for k in range(_SHARES + 1)})
        for count in counts:
            judged: dict[float, Bytes] = {}  # of those as fast the first
            for tried in self._candidates(set(self.held.away[:count])):
                judged.setdefault(self.core.judge(tried), tried)
            judged.pop(math.inf, None)
            for seconds in sorted(judged)[:improved]:
                yield judged[seconds]
                yield self._improved(seconds, judged[seconds])

    def _improved(self, best: float, fates: Bytes) -> Bytes:
        """Return what changes of one stage, or of two that are near, make of a plan."""
        for apart in (0, 1, 2, 0):
            for stage in range(self.n - apart):
                for changes in self._changes(fates, stage, apart):
                    tried = fates.copy()
                    for i, fate in changes:
                        tried[i] = fate | (tried[i] & (3 << RESERVE_AT))
                    seconds = self.core.judge(tried)
                    if seconds < best:
                        best, fates = seconds, tried
        return fates

    def _changes(self, fates: Bytes, i: int, apart: int) -> Iterator[tuple[tuple[int, int], ...]]:
        mine = [(i, fate) for fate in self._others(i, int(fates[i]))]
        if not apart:
            return zip(mine)
        other = i + apart
        theirs = [(other, fate) for fate in self._others(other, int(fates[other]))]
        return itertools.product(mine, theirs)

    def _candidates(self, read: set[tuple[bool, int]]) -> Iterator[Bytes]:
        stop, alone = self.held.stage, self.alone
        tapes = sorted(self.held.tapes)
        stride = 1 + len(tapes) // _MOST_KEPT
        kept = [set(tapes[first:]) for first in range(0, len(tapes) + 1, stride)]
        kept += [set(tapes[:last]) for last in range(1, len(tapes), stride)]
        ends = [np.zeros(self.n - stop, np.uint8)]
        ends[0][:1] = STARTS
        if alone is not None:
            kept.append({i for i in tapes if alone[i] & KEEPS_TAPE})
            ends.append(alone[stop:])
        for keep, own_starts, end in itertools.product(kept, (False, True), ends):
            fates = np.concatenate((self._start(read, keep, own_starts), end))
            for reserve in range(3):
                yield fates | np.uint8(reserve << RESERVE_AT)

    def _start(self, read: set[tuple[bool, int]], keep: set[int], own_starts: bool) -> Bytes:
        """Return the fates of the stages that have run."""
        fates = np.zeros(self.held.stage, np.uint8)
        for i in range(self.held.stage):
            made = int(self.made[i])
            if (True, i) in read:
                fates[i] = KEEPS_TAPE | STARTS | TAPE_AWAY | (made & APART)
            elif i in keep and self._usable(i, read):
                fates[i] = KEEPS_TAPE | STARTS
            elif i in self.held.at_hand and (
                (self.alone is not None and self.alone[i] & STARTS)
                or (own_starts and made & STARTS and not made & KEEPS_TAPE)
            ):
                fates[i] = STARTS
            if (False, i) in read:
                fates[i] |= STATE_AWAY | STARTS
        fates[0] |= STARTS
        return fates

    def _usable(self, i: int, read: set[tuple[bool, int]]) -> bool:
        """Whether tape i is held and its input is, or comes back."""
        return i in self.held.tapes and (i in self.held.at_hand or (True, i - 1) in read)

    def _others(self, i: int, fate: int) -> Iterator[int]:
        """Yield other fates of a stage: of one that has run, what is still possible."""
        fate &= (1 << RESERVE_AT) - 1
        options = [STARTS, 0, KEEPS_TAPE | STARTS]
        if i < self.held.stage:
            options = [0] if i else []
            if i in self.held.at_hand:
                options.append(STARTS)
            if (False, i) in self.away:
                options.append(STARTS | STATE_AWAY)
            if i in self.held.tapes:
                options.append(KEEPS_TAPE | STARTS)
            if (True, i) in self.away:
                options.append(KEEPS_TAPE | STARTS | TAPE_AWAY)
        yield from (option for option in options if option != fate)


def fates_of(actions: Sequence[Action], n: int) -> Bytes:
    """Return the fates that the forward sweep of a schedule gives its stages."""
    fates = np.zeros(n, np.uint8)
    saved: set[int] = set()
    for action in actions:
        match action:
            case EndForward():
                break
            case Advance(start, _):
                fates[start] |= STARTS
            case Tape(step):
                fates[step] |= KEEPS_TAPE | STARTS
            case Save(step):
                fates[step] |= STARTS
                saved.add(step)
            case Put(step, _, tape):
                fates[step] |= TAPE_AWAY if tape else STATE_AWAY
    for step in saved:
        if step and fates[step - 1] & KEEPS_TAPE and fates[step - 1] & TAPE_AWAY:
            fates[step] |= APART
    return fates
