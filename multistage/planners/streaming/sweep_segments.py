"""An interval of steps reversed by Revolve, with reads of the states below it queued meanwhile."""

from __future__ import annotations

from collections.abc import Generator

from ...actions import (
    Action,
    Advance,
    Answer,
    EndForward,
    Free,
    Load,
    Reverse,
    Save,
    Schedule,
    Tape,
)
from ..single.binomial import reverse_actions
from .reserve import Reservation
from .sweep_memory import SweepMemory


def segment(memory: SweepMemory, start: int, end: int) -> Schedule:
    """Reverse start..end-1, state `start` live and loadable, queueing reads on the way."""
    sweep, need = memory.sweep, end - start - 1
    if memory.ended:
        while (
            memory.readable
            and sweep.slots - memory.used > need
            and len(memory.pending) < memory.depth
        ):
            yield from memory.prefetch()
    if not (memory.pending or memory.held) and memory.readable:
        if sweep.reservation is not None:
            end = yield from _down_the_spine(memory, start, end, sweep.reservation)
        if memory.ended and memory.reclaimable() > 0:
            yield from memory.room()
            if memory.readable and memory.readable[-1] in memory.parked:
                memory.hold(memory.readable[-1])
            elif memory.readable:  # unless the write just awaited was lost
                yield from memory.prefetch()
    yield from revolve(memory, start, end, memory.reclaimable())


def _down_the_spine(
    memory: SweepMemory, start: int, end: int, reservation: Reservation
) -> Generator[Action, Answer, int]:
    """Reverse the upper parts of the segment with every slot; return where to read ahead."""
    while advance := reservation.advance(end - start, memory.reclaimable()):
        middle = start + advance
        yield Advance(start, middle)
        yield from revolve(memory, middle, end, memory.reclaimable(), keep_first=False)
        yield Load(start)
        end = middle
    return end


def revolve(
    memory: SweepMemory, start: int, end: int, free: int, keep_first: bool = True
) -> Schedule:
    """Reverse start..end-1 by Revolve in `free` slots; `keep_first` as for `reverse_actions`."""
    for action in reverse_actions(start, end, free, keep_first=keep_first):
        kind = type(action)
        if kind is Save:
            yield from memory.room()
            memory.used += 1
        elif kind is Free:
            memory.used -= 1
        elif kind is Reverse and not memory.ended:
            assert isinstance(action, Reverse)
            yield from first_reverse(memory, action.step)
            continue
        yield action


def first_reverse(memory: SweepMemory, step: int) -> Schedule:
    """End the forward sweep with the last step, and reverse it."""
    yield Tape(step)
    yield EndForward()
    memory.ended = True
    yield Reverse(step)
