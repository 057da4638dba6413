"""The rest of a sweep of a chain that goes on without its tier: RR-9302 in the memory left.

What the tier has is taken to be lost.  From the states and tapes in fast memory the stages
are processed from the top down: those that have a tape by it, the others in segments from
the highest state below them, each by the optimum within the memory that is free then, which
one table of RR-9302 has for all segments (`planners.chain.table`).

What is held may be in the way.  So some choices are tried: the newest tapes stay, or the
oldest, and of the states that are held, in discarded tapes too, all, or none, or 1, 2, 4, ...
at equal distances.  Their times are looked up; there is no search.

Known gaps: segments are not optimized together, and nothing is read back that has not
arrived.  Complexity: the table once, and some hundred choices of O(k) look-ups for k things.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import chain

from ...actions import Action, Advance, Free, Load, Reverse
from ...model.stages import StageCosts
from ...schedule.machine import Rules
from .memory import actions_of
from .sizes import Sizes
from .table import Table

# The slots of a table: it grows with the square of the stages.
_SLOTS, _LONG, _FEWER = 400, 100, 150
_MOST_KEPT = 12  # choices of tapes to keep, of each kind
_TRIED = 4  # of the fastest choices
_SHRUNK = (1.0, 0.97, 0.92, 0.85, 0.7)  # of the memory of segments, as sizes in slots are rounded


@dataclass(frozen=True, slots=True)
class Rest:
    """How to go on.

    Attributes
    ----------
    saved, tapes : frozenset of int
        What to hold from now on, all else is given up; states may be in tapes until now.
    actions : tuple of Action
    seconds : float
        Predicted.
    """

    saved: frozenset[int]
    tapes: frozenset[int]
    actions: tuple[Action, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class _Part:
    """Stages start..stop-1, from the anchor: by their one tape if it is -1."""

    anchor: int
    start: int
    stop: int
    room: int  # in bytes, of the stages alone


class Rests:
    """The rests of the sweeps of one chain.

    Parameters
    ----------
    costs : StageCosts
    memory_bytes : int
        The chain's input included.
    inside : bool
        Whether a state can be taken out of a held tape that includes it.
    tapes : bool
        Whether tapes may be kept; False: only right before their adjoint.
    """

    def __init__(
        self, costs: StageCosts, memory_bytes: int, *, inside: bool, tapes: bool = True
    ) -> None:
        self._true = true = Sizes.of(costs)
        self._limit = memory_bytes - costs.input_bytes
        self._inside = inside
        slots = _SLOTS if len(true) <= _LONG else _FEWER
        self._unit = max(1, self._limit) / slots
        self._table = Table(true.in_slots(self._unit), slots, tapes=tapes)
        self._work_s = float(true.forward_s.sum())

    def fastest(self, at: Rules, stuck_bytes: int = 0) -> Iterator[Rest]:
        """Yield what may be done from somewhere on, the fastest first.

        Each is to be judged: sizes are rounded to slots, so that some may take too much memory.

        Parameters
        ----------
        at : Rules
            That counts bytes, where the sweep stands; nothing is on its way.
        stuck_bytes : int
            That are not free to the end.
        """
        limit = self._limit - stuck_bytes
        found: dict[tuple[frozenset[int], frozenset[int]], float] = {}
        for saved, tapes in self._choices(at):
            if (saved, tapes) not in found:
                found[saved, tapes] = self._seconds(at, saved, tapes, limit)
        for saved, tapes in sorted(found, key=lambda each: found[each])[:_TRIED]:
            seconds = found[saved, tapes]
            for share in _SHRUNK if seconds < math.inf else ():
                actions = self._actions(at, saved, tapes, limit, share)
                if actions is not None:
                    yield Rest(saved, tapes, tuple(actions), seconds)

    # ------------------------------------------------------------------------- choices

    def _choices(self, at: Rules) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
        """Yield states and tapes to hold."""
        tapes = sorted(at.tapes)
        stride = 1 + len(tapes) // _MOST_KEPT
        cuts = [*range(0, len(tapes), stride), len(tapes)]
        below = at.live if at.adjoint is None else at.adjoint
        assert below is not None
        for newest in chain((tapes[cut:] for cut in cuts), (tapes[:cut] for cut in cuts)):
            kept = self._serving(at, newest)
            free = {step for step in at.held if 0 < step < below}
            if self._inside:
                free |= {i + 1 for i in at.tapes.keys() - kept if i + 1 < below}
            needed = {i for i in kept if i - 1 not in kept and i in free}
            others = sorted(free - needed)
            for count in _counts(len(others)):
                stride_s = (len(others) + 1) / (count + 1)
                chosen = [others[int((k + 1) * stride_s) - 1] for k in range(count)]
                yield frozenset(needed.union(chosen)), frozenset(kept)

    def _serving(self, at: Rules, tapes: Iterable[int]) -> list[int]:
        """Return those of some tapes, ascending, whose inputs are in fast memory too."""
        assert at.memory is not None
        kept: list[int] = []
        for i in tapes:
            inside = i - 1 in at.tapes
            before = inside if self._inside else i - 1 in kept
            pinned = at.memory.starts.get(i) is not None and not inside  # for this tape alone
            if i == 0 or before or i in at.held or pinned:
                kept.append(i)
        return kept

    # --------------------------------------------------------------------------- parts

    def _parts(self, at: Rules, saved: Set[int], tapes: Set[int], limit: int) -> Iterator[_Part]:
        """Yield the parts of the rest, from the top down."""
        true, n = self._true, len(self._true)
        held = {step: 0 if step - 1 in tapes else int(true.state[step]) for step in saved}
        taped = {i: int(true.tape[i]) + self._pinned(i, saved, tapes) for i in tapes}
        room = limit - sum(held.values()) - sum(taped.values())
        end = n if at.adjoint is None else at.adjoint
        states, tops = sorted(held), sorted(taped)
        first = at.live if at.adjoint is None else None
        while end > 0:
            while states and states[-1] >= end:
                room += held[states.pop()]
            if tops and tops[-1] == end - 1:
                room += taped[tops.pop()]
                yield _Part(-1, end - 1, end, room)
                end -= 1
                continue
            anchor = states[-1] if states else 0
            if self._inside and tops:
                anchor = max(anchor, tops[-1] + 1)
            start = max(anchor, tops[-1] + 1 if tops else 0)
            if first is not None:
                anchor = start = first
                first = None
            is_held = start in held or start == 0 or (self._inside and start - 1 in taped)
            yield _Part(anchor, start, end, room - (0 if is_held else int(true.state[start])))
            end = start

    def _pinned(self, i: int, saved: Set[int], tapes: Set[int]) -> int:
        """Return the bytes of the input of a held tape that nothing else holds."""
        return 0 if i == 0 or i in saved or i - 1 in tapes else int(self._true.state[i])

    def _slots(self, part: _Part, share: float = 1.0) -> int:
        return min(self._table.slots, int(part.room * share / self._unit))

    def _seconds(self, at: Rules, saved: Set[int], tapes: Set[int], limit: int) -> float:
        forward_s, reverse_s = self._true.forward_s, self._true.reverse_s
        seconds = 0.0
        for part in self._parts(at, saved, tapes, limit):
            seconds += float(reverse_s[part.start : part.stop].sum())
            if part.anchor < 0:
                continue
            slots = self._slots(part)
            if slots < 0:
                return math.inf
            excess = float(self._table.values(part.start, part.stop - 1)[slots])
            seconds += float(forward_s[part.anchor : part.stop].sum()) + excess * self._work_s
        return seconds

    # ------------------------------------------------------------------------- actions

    def _actions(
        self, at: Rules, saved: Set[int], tapes: Set[int], limit: int, share: float
    ) -> list[Action] | None:
        """Return the actions of a choice, None if a segment does not fit."""
        actions: list[Action] = []
        held, live = set(saved), at.live
        ended = at.adjoint is not None
        for part in self._parts(at, saved, tapes, limit):
            for step in sorted(step for step in held if step >= part.stop):
                held.remove(step)
                actions.append(Free(step))
            if part.anchor < 0:
                actions.append(Reverse(part.start))
                continue
            if part.anchor != live or ended:
                actions.append(Load(part.anchor))
            if part.anchor < part.start:
                actions.append(Advance(part.anchor, part.start))
            slots = self._slots(part, share)
            trace = None
            if slots >= 0:
                trace = self._table.trace(slots, part.start, part.stop - 1)
            if trace is None:
                return None
            inside = {0, *(i + 1 for i in tapes)} if self._inside else {0}
            own = held & {part.start}
            actions += actions_of(trace, held=own, inside=inside, ended=ended)
            held -= own
            ended = True
        actions += (Free(step) for step in sorted(held))
        return actions


def _counts(most: int) -> Sequence[int]:
    """Return how many of some things may be kept: 0, 1, 2, 4, ... and all."""
    powers: Iterable[int] = (1 << k for k in range(most.bit_length()))
    return sorted({0, most, *(count for count in powers if count <= most)})
