"""The rest of a sweep of equal steps that goes on without its tiers: Revolve in the slots left.

What the tiers have is taken to be lost.  From the states and tapes in fast memory the steps
are reversed from the top down: those that have a tape by it, the others in intervals from the
highest state below them, each by Revolve with the slots that are free then.  In the forward
sweep some of the states held are given up first, for room: all of them, or 1, 2, 4, ... at
equal distances stay, as few forward steps as `nu` counts.

Optimal where nothing but state 0 is held, and close to it as far as the states held are near
the places where Revolve would have them.  Complexity: O(1) work per action, and O(k^2 log k)
to choose among k states.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ...actions import Action, Advance, Free, Load, Reverse, Schedule
from .binomial import forward_and_reverse, nu, reverse_actions


@dataclass(frozen=True, slots=True)
class Rest:
    """What a sweep holds, and how many steps are left.

    Attributes
    ----------
    n_steps : int
    slots : float
        Those of the budget, without what a tier still holds on to.
    at : int
        The live state, -1 if there is none.
    end : int or None
        The next adjoint step is end - 1; None in the forward sweep.
    held, tapes : sequence of int
        In fast memory, ascending.
    tape_slots : float
        That a tape takes beside another one.
    state_is_tape : bool
        Whether a state is its own tape, which needs no room beside held tapes.

    Examples
    --------
    >>> list(Rest(4, 2, at=-1, end=3, held=[2]).schedule())[:4]
    [Load(step=2), Reverse(step=2), Free(step=2), Load(step=0)]
    """

    n_steps: int
    slots: float
    at: int
    end: int | None
    held: Sequence[int] = ()
    tapes: Sequence[int] = ()
    tape_slots: float = field(default=1.0, kw_only=True)
    state_is_tape: bool = field(default=False, kw_only=True)

    @property
    def fits(self) -> bool:
        """Whether the slots are enough."""
        if self.end is None and self.n_steps - self.at > 1:
            return self._kept()._free() >= (self.at > 0)
        return True

    def forward_steps(self) -> int:
        """Return about how many forward steps are left."""
        rest, steps = self, 0
        if self.end is None:
            rest = self._kept()
            steps, rest = rest._onward(), replace(rest, end=self.at)
        return steps + rest._again()

    def _onward(self) -> int:
        """Return the forward steps that the steps from the live state on take."""
        return nu(self.n_steps - self.at, max(1, self._free() + (self.at == 0)))

    def schedule(self) -> Schedule:
        """Yield the actions that are left; no tier is used."""
        rest, at = self, self.at
        if self.end is None:
            rest = self._kept()
            for step in sorted({*self.held} - {*rest.held}):
                yield Free(step)
            yield from forward_and_reverse(
                rest._reversed(at, at, self.n_steps, rest._free(), at == 0)
            )
            rest = replace(rest, end=self.at, at=-1)
        yield from rest._down()

    # ------------------------------------------------------------------ the forward sweep

    def _kept(self) -> Rest:
        """Return what is left with the states that are worth their slots."""
        held = [step for step in self.held if 0 < step < self.at]
        counts = sorted({0, len(held), *(1 << k for k in range(len(held).bit_length()))})
        best, fewest = self, math.inf
        for count in counts:
            stride = (len(held) + 1) / (count + 1)
            kept = [held[int((k + 1) * stride) - 1] for k in range(count)]
            rest = replace(self, held=kept)
            if rest._free() < 1 and count:
                continue
            steps = rest._onward() + replace(rest, end=self.at)._again()
            if steps < fewest:
                best, fewest = rest, steps
        return best

    # ------------------------------------------------------------------ the reverse sweep

    def _parts(self) -> Iterator[tuple[int, int, int, int]]:
        """Yield anchor, start, stop and free slots of each interval, from the top down.

        Steps with a tape are intervals of one step whose anchor is -1.
        """
        held, tapes, end = list(self.held), list(self.tapes), self.end
        assert end is not None
        while end > 0:
            while held and held[-1] >= end:
                held.pop()
            if tapes and tapes[-1] == end - 1:
                tapes.pop()
                yield -1, end - 1, end, 0
                end -= 1
                continue
            anchor = held[-1] if held else 0
            start = max(anchor, tapes[-1] + 1 if tapes else 0)
            yield anchor, start, end, replace(self, held=held, tapes=tapes)._free()
            end = start

    def _again(self) -> int:
        """Return about how many forward steps the rest of the reverse sweep takes."""
        steps = 0
        for anchor, start, stop, free in self._parts():
            count = stop - start
            if anchor >= 0 and not free and anchor < start:
                steps += count * (start - anchor) + nu(count, 1)
            elif anchor >= 0:
                steps += start - anchor + nu(count, free + (anchor == start))
        return steps

    def _down(self) -> Schedule:
        held, live = set(self.held), self.at
        for anchor, start, stop, free in self._parts():
            for step in sorted(step for step in held if step >= stop):
                held.remove(step)
                yield Free(step)
            if anchor < 0:
                yield Reverse(start)
                continue
            if anchor != live:
                yield Load(anchor)
            live = -1
            yield from self._reversed(anchor, start, stop, free, anchor == start)
        for step in sorted(held):
            yield Free(step)

    def _reversed(
        self, anchor: int, start: int, stop: int, free: int, kept: bool
    ) -> Iterator[Action]:
        """Yield the actions that reverse start..stop-1 from the live anchor."""
        if kept or free >= 1 or stop - start == 1:
            if start > anchor:
                yield Advance(anchor, start)
            yield from reverse_actions(start, stop, max(0, free), keep_first=kept)
            return
        for step in range(stop - 1, start - 1, -1):
            if step < stop - 1:
                yield Load(anchor)
            if step > anchor:
                yield Advance(anchor, step)
            yield Reverse(step)

    # ------------------------------------------------------------------------------ room

    def _free(self) -> int:
        """Return the slots that are free for states."""
        beside: Collection[int] = self.tapes
        used = len(self.held) + self.tape_slots * max(0, len(beside) - 1)
        if beside and (self.end is None or not self.state_is_tape):
            used += self.tape_slots  # of a tape that is made and used at once
        return max(0, math.floor(self.slots - used + 1e-9))
