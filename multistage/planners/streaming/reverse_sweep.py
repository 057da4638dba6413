"""The reverse sweep of the streaming schedule, from one state at hand down to the next."""

from __future__ import annotations

from ...actions import Advance, Await, Drop, Free, Load, Reverse, Save, Schedule
from .sweep_memory import SweepMemory
from .sweep_segments import revolve, segment


def reverse_sweep(memory: SweepMemory, end: int) -> Schedule:
    """Reverse all steps before `end`, and give back what is left.

    Where every checkpoint is lost the rest is reversed from the caller's state 0.
    """
    yield from _down(memory, end)
    yield from memory.clear_all()


def _down(memory: SweepMemory, end: int) -> Schedule:
    held, pending, readable = memory.held, memory.pending, memory.readable
    slots = memory.sweep.slots
    while end > 0:
        while memory.leftover and memory.leftover[0][1] - end >= memory.sweep.drain_steps:
            yield from memory.clear_leftover()
        top = held[-1] if held else -1
        coming = pending[0][0] if pending else (readable[-1] if readable else -1)
        anchor = max(top, coming)
        if anchor < 0:  # every checkpoint is lost: Revolve from the caller's state 0
            yield Load(0)
            yield from revolve(memory, 0, end, memory.reclaimable())
            return
        if coming > top:
            if not pending:
                yield from memory.room()
                if not readable or readable[-1] != anchor:
                    continue  # its write was awaited to make room, and was lost
                yield from memory.prefetch()
            if (yield Await(pending.popleft()[1])) is False:
                memory.used -= 1
                memory.stored.discard(anchor)
                continue
            while memory.writing and memory.writing[0][1] <= anchor:
                yield from memory.settle()  # done: the read came behind them
        yield Load(anchor)
        if coming > top and (part := _again(memory, end - anchor)):
            yield from _upper_part(memory, anchor, anchor + part, end)
            end = anchor + part
            continue
        if end - anchor > 1:
            yield from segment(memory, anchor, end)
        else:
            while readable and memory.used < slots and len(pending) < memory.depth:
                yield from memory.prefetch()
            yield Reverse(anchor)
        memory.depth = memory.sweep.depth
        if coming > top:
            yield Free(anchor)
            memory.used -= 1
            if anchor in memory.stored:
                memory.stored.discard(anchor)
                yield Drop(anchor)
        else:
            held.pop()
            yield from memory.release(anchor, end)
        end = anchor


def _again(memory: SweepMemory, length: int) -> int:
    """Return after how many steps the anchor, just read, leaves its slot; 0 to keep it."""
    reservation = memory.sweep.reservation
    if reservation is None or memory.pending or memory.held:
        return 0
    return reservation.again(length, memory.reclaimable())


def _upper_part(memory: SweepMemory, anchor: int, start: int, end: int) -> Schedule:
    """Reverse start..end-1 with the slot of the live anchor too, and have it read again.

    Intervals that are divided so want every slot: until this one is
    reversed, however short its last parts, only the next state is read.
    """
    memory.depth = 1
    yield Free(anchor)
    memory.used -= 1
    memory.readable.append(anchor)
    yield Advance(anchor, start)
    yield from memory.room()
    yield Save(start)
    memory.used += 1
    yield from segment(memory, start, end)
    yield Free(start)
    memory.used -= 1
