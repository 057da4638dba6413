"""The exact optimum of a short heterogeneous chain, by Dijkstra over what is held.

The oracle of `planners.chain.heterogeneous`.  It also searches schedules that are not
persistent: those that drop a checkpoint or a tape before its use.  States of the search:
the live state, the saved states, the tapes held, the adjoint.  Exponential in the number
of stages; meant for up to about eight.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from typing import TypeAlias

from multistage.errors import ArgumentError
from multistage.model.stages import StageCosts
from multistage.planners.chain.sizes import Sizes

# live (-1: none), saved and tapes as sets of bits, the next adjoint step + 1
_Held: TypeAlias = tuple[int, int, int, int]
MAX_STAGES = 10


def exact_chain_makespan(
    costs: StageCosts, memory_bytes: int, *, persistent: bool = True, pinned: bool = True
) -> float:
    """Return the least seconds of any schedule within a memory limit, infinite if none fits.

    Parameters
    ----------
    persistent : bool
        Keep every saved state and every tape until its adjoint step.
    pinned : bool
        A tape holds its input, as autograd's does.  Without, and where
        persistence is not asked for, the input may be dropped and made again.

    Raises
    ------
    ArgumentError
        For more than 10 stages.

    Examples
    --------
    >>> from multistage.model.stages import Stage
    >>> costs = StageCosts.uniform(3, Stage("layer", 1.0, 2.0, 10, 30), 10)
    >>> exact_chain_makespan(costs, 120), exact_chain_makespan(costs, 70)
    (9.0, 12.0)
    """
    if len(costs.stages) > MAX_STAGES:
        raise ArgumentError(f"the exact search takes at most {MAX_STAGES} stages")
    search = _Search(Sizes.of(costs), memory_bytes, persistent, pinned)
    start: _Held = (0, 0, 0, len(search.sizes))
    best = {start: 0.0}
    heap = [(0.0, start)]
    while heap:
        seconds, held = heapq.heappop(heap)
        if held[3] == 0:
            return seconds
        if seconds > best[held]:
            continue
        for more, after in search.moves(held):
            if seconds + more < best.get(after, math.inf):
                best[after] = seconds + more
                heapq.heappush(heap, (seconds + more, after))
    return math.inf


class _Search:
    def __init__(self, sizes: Sizes, limit: int, persistent: bool, pinned: bool) -> None:
        self.sizes, self.limit = sizes, limit
        self.persistent = persistent
        self.pinned = pinned or persistent

    def resident(self, live: int, saved: int, tapes: int, adjoint: int) -> int:
        sizes = self.sizes
        states = saved | 1 | (1 << live if live >= 0 else 0)
        if self.pinned:
            states |= tapes
        total = int(sizes.gradient[adjoint])
        for i in range(len(sizes)):
            if tapes >> i & 1:
                total += int(sizes.tape[i])
            if states >> i & 1 and (i == 0 or not tapes >> (i - 1) & 1):
                total += int(sizes.state[i])
        return total

    def moves(self, held: _Held) -> Iterator[tuple[float, _Held]]:
        live, saved, tapes, adjoint = held
        sizes = self.sizes
        at_hand = saved | 1 | tapes << 1
        for j in range(adjoint):
            if at_hand >> j & 1 and j != live:
                yield 0.0, (j, saved, tapes, adjoint)
        if not self.persistent:
            for j in range(1, adjoint + 1):
                if saved >> j & 1:
                    yield 0.0, (live, saved & ~(1 << j), tapes, adjoint)
                if tapes >> (j - 1) & 1:
                    yield 0.0, (live, saved, tapes & ~(1 << (j - 1)), adjoint)
        if 0 <= live < adjoint:
            yield from self._forward(held)
        last = adjoint - 1
        input_held = self.pinned or at_hand >> last & 1 or live == last
        if tapes >> last & 1 and input_held:
            # What is live beyond the adjoint is used up.
            left = live if live < adjoint else -1
            need = self.resident(left, saved, tapes, adjoint)
            need += int(sizes.gradient[last]) + int(sizes.reverse[last])
            if need <= self.limit:
                kept = saved & ~(1 << last)
                left = left if left != last else -1
                yield float(sizes.reverse_s[last]), (left, kept, tapes & ~(1 << last), last)

    def _forward(self, held: _Held) -> Iterator[tuple[float, _Held]]:
        live, saved, tapes, adjoint = held
        sizes, seconds = self.sizes, float(self.sizes.forward_s[live])
        now = self.resident(live, saved, tapes, adjoint)
        if live + 1 < len(sizes) and live + 1 < adjoint:
            for keep in (0, 1 << live):
                before = self.resident(live, saved | keep, tapes, adjoint)
                if before + int(sizes.state[live + 1]) + int(sizes.advance[live]) <= self.limit:
                    yield seconds, (live + 1, saved | keep, tapes, adjoint)
        need = now + int(sizes.tape[live]) + int(sizes.taping[live])
        if not tapes >> live & 1 and need <= self.limit:
            kept = saved if self.pinned else saved | 1 << live
            if adjoint == live + 1:
                seconds -= float(sizes.spared_s[live])
            yield seconds, (live + 1, kept, tapes | 1 << live, adjoint)
