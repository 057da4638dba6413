"""Binomial checkpointing: the counts and the schedule that Revolve is made of.

Griewank & Walther, Algorithm 799: Revolve, ACM TOMS 26 (2000) 19-45,
doi:10.1145/347837.347846.  With s slots (the one under the first state
included) and at most r runs of any step, beta(s, r) = C(s+r, s) steps can be
reversed.  Reversing l steps takes at least

    nu(l, s) = r l - beta(s+1, r-1),   r minimal with l <= beta(s, r),

forward steps, the first sweep included, the one taped step before each
adjoint step not counted.  Optimal for uniform steps and free saves; `nu` and
the schedule need O(s) memory and O(1) work per action.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from itertools import chain
from math import comb
from typing import Literal, assert_never

import numpy as np

from ... import native
from ...actions import Action, Advance, EndForward, Free, Load, Reverse, Save, Schedule, Tape
from ...support.arrays import Integers, Reals

Trajectory = Literal["low", "middle", "high", "published"]
TRAJECTORIES: tuple[Trajectory, ...] = ("low", "middle", "high", "published")

# With more slots than these the repetitions are few.
_FEW = 8

# Patterns of segments up to this length are cached: the streaming planner
# reverses thousands of short intervals of few different lengths.
_CACHED_LENGTH = 128


def beta(s: int, r: int) -> int:
    """Return C(s+r, s): the steps that s slots reverse with r repetitions; 0 if s or r < 0.

    Examples
    --------
    >>> beta(3, 2)
    10
    """
    return comb(s + r, s) if s >= 0 and r >= 0 else 0


def repetitions(length: int, slots: int) -> int:
    """Return the smallest r with `length` <= beta(slots, r)."""
    if length <= 1:
        return 0
    if slots == 1:
        return length - 1
    r, count = 0, 1
    if slots <= _FEW:  # r may be large: bisect
        high = 1
        while comb(slots + high, slots) < length:
            high *= 2
        return bisect_left(range(high + 1), length, key=lambda r: comb(slots + r, slots))
    while count < length:
        r += 1
        count = count * (slots + r) // r
    return r


def nu(length: int, slots: int) -> int:
    """Return the fewest forward steps that reverse `length` steps with `slots` slots.

    The first sweep to state length-1 is included, taped steps are not.

    Examples
    --------
    >>> 1000 + nu(1000, 10)
    4636
    """
    if length <= 1:
        return 0
    r = repetitions(length, slots)
    return r * length - beta(slots + 1, r - 1)


class NuTable:
    """nu(length, slots) for arrays of lengths up to n, in doubles.

    Examples
    --------
    >>> NuTable(2, 5)(np.arange(6)).tolist()
    [0.0, 0.0, 1.0, 2.0, 4.0, 6.0]
    """

    def __init__(self, slots: int, n_steps: int) -> None:
        ends, shifts, shift = [1], [0.0], 1  # beta(slots, r), and beta(slots + 1, r - 1)
        while slots > 1 and ends[-1] < n_steps:
            r = len(ends)
            ends.append(ends[-1] * (slots + r) // r)
            shifts.append(float(shift))
            shift = shift * (slots + 1 + r) // r
        self.slots = slots
        self.ends = np.array([min(end, n_steps) for end in ends], dtype=float)
        self.shifts = np.array(shifts)

    def __call__(self, lengths: Reals | Integers) -> Reals:
        """Return the forward steps of Revolve for chains of these lengths."""
        if self.slots == 1:
            return lengths * (lengths - 1.0) / 2
        r = np.searchsorted(self.ends, lengths)
        counts: Reals = r * lengths.astype(float) - self.shifts[r]
        return counts


def first_advance(length: int, slots: int, trajectory: Trajectory = "middle") -> int:
    """Return how far an optimal reversal advances before its next save.

    All optimal advances lie between a lowest and a highest; "published" is the
    one of the paper's p. 34.  They differ in how often each slot is used.
    """
    if slots <= 1:
        return length - 1
    r = repetitions(length, slots)
    low = max(1, beta(slots, r - 2), length - beta(slots - 1, r))
    high = min(length - 1, beta(slots, r - 1), length - beta(slots - 1, r - 1))
    match trajectory:
        case "middle":
            advance = (low + high) // 2
        case "low":
            advance = low
        case "high":
            advance = high
        case "published":
            upper = beta(slots - 1, r - 1) + beta(slots - 2, r - 1)
            advance = min(max(beta(slots, r - 2), length - upper), beta(slots, r - 1), high)
        case _:
            assert_never(trajectory)
    return max(low, advance)


def accesses(n_steps: int, slots: int, trajectory: Trajectory) -> tuple[Integers, Integers]:
    """Return how often each slot, from the bottom of the stack, is written and read.

    `slots` lies in 1..max(1, n_steps - 1); O(1) work per action of the schedule.
    """
    writes, reads = np.zeros(slots, np.int64), np.zeros(slots, np.int64)
    if native.available():
        library = native.library()
        stack = np.empty(int(library.ms_revolve_stack_len(slots)), np.int64)
        at = TRAJECTORIES.index(trajectory)
        arrays = (array.ctypes.data for array in (writes, reads, stack))
        library.ms_revolve_accesses(n_steps, slots, at, *arrays)
        return writes, reads
    held: list[int] = []
    live, end = 0, n_steps
    while True:
        while end - live > 1:
            if (not held or held[-1] != live) and len(held) < slots:
                writes[len(held)] += 1
                held.append(live)
            free = slots - len(held) + 1
            known = held[-1] == live
            live += first_advance(end - live, free, trajectory) if known else end - live - 1
        end = live
        if end == 0:
            return writes, reads
        live = held[-1]
        reads[len(held) - 1] += 1
        if live == end - 1:
            held.pop()


def reverse_codes(
    start: int, stop: int, slots: int, keep_first: bool
) -> Iterator[tuple[int, int, int]]:
    """Yield Revolve's actions as (code, a, b): the plain twin of the C kernel."""
    slots += keep_first
    stack = [start] if keep_first else []
    live, end = start, stop
    while True:
        while end - live > 1:
            if (not stack or stack[-1] != live) and len(stack) < slots:
                stack.append(live)
                yield 2, live, 0
            free = slots - len(stack) + 1
            advance = first_advance(end - live, free) if stack[-1] == live else end - live - 1
            yield 0, live, live + advance
            live += advance
        yield 1, live, 0
        end = live
        if end == start:
            return
        live = stack[-1]
        yield 3, live, 0
        if live == end - 1 and not (keep_first and len(stack) == 1):
            stack.pop()
            yield 4, live, 0


@lru_cache(maxsize=4096)
def _pattern(length: int, slots: int, keep_first: bool) -> tuple[int, ...]:
    return tuple(chain.from_iterable(reverse_codes(0, length, slots, keep_first)))


def reverse_actions(
    start: int, stop: int, slots: int, *, keep_first: bool = False
) -> Iterable[Action]:
    """Return the actions that reverse steps start..stop-1 from live state `start`.

    Parameters
    ----------
    slots : int
        Free fast slots it may take, all given back at the end.  0 is enough
        for one step, or with `keep_first`.
    keep_first : bool
        Checkpoint `start` is held already (not counted in `slots`) and stays.
    """
    length = stop - start
    slots = min(slots, length)
    if length <= _CACHED_LENGTH:
        return _actions(_pattern(length, slots, keep_first), start)
    if native.available():
        batches = native.revolve_codes(start, stop, slots, keep_first)
        return chain.from_iterable(map(_actions, batches))
    return chain.from_iterable(map(_actions, reverse_codes(start, stop, slots, keep_first)))


def _actions(codes: Iterable[int], offset: int = 0) -> list[Action]:
    """Make actions of flat (code, a, b) triples."""
    flat = iter(codes)
    triples = zip(flat, flat, flat, strict=True)
    if offset:
        return [
            _OF_ONE_STEP[code](a + offset) if code else Advance(a + offset, b + offset)
            for code, a, b in triples
        ]
    return [_OF_ONE_STEP[code](a) if code else Advance(a, b) for code, a, b in triples]


_OF_ONE_STEP: tuple[Callable[[int], Action], ...] = (Reverse, Reverse, Save, Load, Free)


def forward_and_reverse(actions: Iterable[Action]) -> Schedule:
    """Turn the reversal of steps up to n into a schedule with its two phases.

    The first adjoint step is preceded by its taped forward step, so that
    state n exists at `EndForward`.
    """
    actions = iter(actions)
    for action in actions:
        if type(action) is Reverse:
            yield Tape(action.step)
            yield EndForward()
            yield action
            break
        yield action
    yield from actions
