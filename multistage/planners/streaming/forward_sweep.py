"""The forward sweeps of the streaming schedule: the ring, and offers before a tail."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator

from ...actions import Action, Advance, Answer, EndForward, Free, Save, Schedule
from .sweep_memory import SweepMemory
from .sweep_segments import first_reverse, segment


def ring_forward(
    memory: SweepMemory,
    n: int | None,
    is_last: Callable[[int], bool] | None = None,
    start: int = 0,
    first: float = 0.0,
) -> Generator[Action, Answer, int]:
    """Run forward as a ring; return the step at which the reverse sweep starts.

    Parameters
    ----------
    memory : SweepMemory
    n : int or None
        Steps; None asks `is_last(i)` when state i is live whether it is the last.
    is_last : callable, optional
    start : int
        The live state.
    first : float
        The nominal position of the first offer.
    """
    sweep = memory.sweep
    extra, skip, spacing, slots = sweep.extra, sweep.skip, sweep.spacing, sweep.slots
    held, stored = memory.held, memory.stored
    i, at = yield from _offer_until(memory, min(sweep.keep_from, (n or 1) - 1), start, first)
    end_start = n if sweep.end_start is None else sweep.end_start
    while n is None or i < n - 1:
        if i == end_start:
            spacing = sweep.end_spacing
        while memory.used >= slots:
            # A written state goes first, the oldest.
            if memory.written:
                gone = memory.written.popleft()
                memory.readable.append(gone)
            elif memory.staged and not held:
                yield from memory.settle()
                continue
            else:
                gone = yield from memory.oldest_unwritten()
            held.remove(gone)
            memory.used -= 1
            yield Free(gone)
        yield Save(i)
        memory.used += 1
        held.append(i)
        if i >= int(at) or i in extra:
            if i not in skip:
                yield from memory.offer(i, held=True)
            if i in skip or i in stored:
                at = max(at + spacing, i + spacing - 1)
        yield Advance(i, i + 1)
        i += 1
        if is_last is not None and is_last(i):
            yield EndForward()
            memory.ended = True
            return i
    yield from first_reverse(memory, i)
    return i


def tail_forward(memory: SweepMemory, n: int, tail_start: int) -> Schedule:
    """Run forward to `tail_start`, and reverse the `n` - `tail_start` steps from there on."""
    yield from _offer_until(memory, tail_start)
    yield from _tail(memory, tail_start, n)
    # What the tail left no time to write stays in its slot.
    for _, step, _ in tuple(memory.writing):
        if step in memory.parked:
            memory.hold(step)
    memory.held.extend(memory.queued)
    memory.queued.clear()


def _offer_until(
    memory: SweepMemory, stop: int, start: int = 0, first: float = 0.0
) -> Generator[Action, Answer, tuple[int, float]]:
    """Advance from state `start` to `stop`, offering states from `first` on, keeping none.

    Returns `stop` and the next nominal position.
    """
    sweep = memory.sweep
    end_start = math.inf
    if sweep.backlog and sweep.end_start is not None:
        end_start = sweep.end_start
    extras = sorted(sweep.extra)
    live, at = start, first
    position = max(live, int(at))
    while position < stop:
        if position > live:
            yield Advance(live, position)
            live = position
        if position not in sweep.skip:
            yield from memory.send_queued()
            if not memory.queued:
                yield from memory.room()
                yield from memory.offer(position, held=False)
            if position not in memory.stored:
                yield from memory.queue(position)
        taken = position in memory.stored or position in sweep.skip or position in memory.queued
        if position >= int(at) and taken:
            before, at = at, max(at + sweep.spacing, position + sweep.spacing - 1)
            if at > end_start:
                spacing = sweep.end_spacing
                at = max(end_start, before + spacing, position + spacing - 1)
        while extras and extras[0] <= position:
            extras.pop(0)
        position = max(position + 1, min(int(at), extras[0] if extras else int(at)))
    if stop > live:
        yield Advance(live, stop)
    return max(stop, live), at


def _tail(memory: SweepMemory, start: int, n: int) -> Schedule:
    """Reverse the tail by Revolve; its first descent is the end of the forward sweep."""
    if start == n - 1:
        yield from first_reverse(memory, start)
        return
    yield from memory.room()
    yield Save(start)
    memory.used += 1
    yield from segment(memory, start, n)
    yield Free(start)
    memory.used -= 1
