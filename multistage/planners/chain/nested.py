"""Chains of too many stages for one table: a table of some of their runs, or of blocks of stages.

Runs
    Where slots are no larger than states, a table of all memory and, if need be, of less of it:
    see `planners.chain.coarse`.
Blocks
    Of other chains at most 128, which begin before small states where possible.  For each
    the table of RR-9302 gives a *front*: its fastest schedules by peak memory, each alone.
    A block longer than that is itself divided.
Between blocks
    Theorem 1 of RR-9302 again, over blocks in place of stages.  A block is reversed by the
    fastest schedule that fits beside what is kept, or it keeps in the first sweep what one
    of a few of those schedules keeps, and is reversed by the rest of it.  Where its input
    does not fit beside a stage, its stages are reversed one by one from an earlier block's.
Memory
    In bytes.  Times are held for some hundred memories, close together near the limit and
    near the least, and interpolated between them: a tape of a million states does not make
    a state count as nothing, as it does where memory is divided evenly.  A schedule is read
    off with exact bytes, so that it fits.

Known gap: states inside of a block are kept only while it is reversed, or as one of its
schedules keeps them.  Complexity for B blocks and M memories: O(B^3 M / 6) beside the tables.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ... import native
from ...actions import Action
from ...support.arrays import Integers, Reals
from .coarse import most_runs
from .equal import inside_equal
from .memory import actions_of
from .sizes import Sizes, need_to_pass, need_to_tape
from .table import MORE, Table, Trace, judge, smallest

# Of blocks: of the chain, of a long block, and stages that one table is solved for.
_BLOCKS, _BLOCKS_WITHIN, _STAGES = 128, 32, 128
# Of a block's tables: slots, the ratio of their ranges, slots of a middling state in the last.
_SLOTS, _RANGE, _FINEST = 100, 8, 4
_WAYS = 8  # schedules of a block by which it may keep things in the first sweep
# Memories near an end: steps of an eighth of a middling state, then at equal ratios.
_STEPS, _RATIOS = 16, 130
# Of a table of some runs: the most stages, slots and values; then stages times slots, and the
# longest of the short runs, in 16 stages.
_FEW, _FEWEST, _MOST, _VALUES, _WORK, _LONGEST = 1000, 100, 400, 60_000_000, 400_000, 4
# Seconds of what does not fit, and those that only an interpolation with them gives.
_NEVER, _INFEASIBLE = 1e250, 1e200
# Equal stages of which one table is made, its sums for each way to begin and end, and its slots
# for a state.
_EQUAL, _SUMS, _PARTS = 2000, 300_000_000, 4
_BELOW_ONE = 1 - 2.0**-40


class _Front(Protocol):
    """The fastest schedules of some stages, by peak bytes ascending and seconds falling."""

    peaks: Integers
    seconds: Reals

    def trace(self, memory: int) -> Trace:
        """Return the fastest schedule within so many bytes, at least the least peak."""
        ...


class _Solved:
    """The front of a few stages, by tables for narrower and narrower ranges of memory.

    The first covers all memory.  Where states are small beside its slots, others cover less,
    around the least memory, and hold the rest back for what stages take while they run.
    """

    def __init__(self, true: Sizes, tapes: bool) -> None:
        self._true, self._tapes = true, tapes
        least, self._least = smallest(true, tapes=tapes)
        most = max(least, _most(true, tapes)) if len(true) > 1 else least
        self._rungs = list(_ranges(true, least, most))
        peaks, seconds = [np.array([least])], [np.array([judge(true, self._least)[0]])]
        origins = [np.array([[-1, 0]])]
        for number in range(len(self._rungs)):
            there_s, there = self._table(number).curve(true)
            at = np.flatnonzero(np.isfinite(there_s))
            peaks.append(there[at])
            seconds.append(there_s[at])
            origins.append(np.stack([np.full(len(at), number), at], axis=1))
        every, every_s = np.concatenate(peaks), np.concatenate(seconds)
        order = np.lexsort((every_s, every))
        best_s = np.minimum.accumulate(every_s[order])
        chosen = order[np.append(True, best_s[1:] < best_s[:-1])]
        self.peaks, self.seconds = every[chosen], every_s[chosen]
        self._origins = np.concatenate(origins)[chosen]

    def trace(self, memory: int) -> Trace:
        at = int(np.searchsorted(self.peaks, memory, side="right")) - 1
        number, slots = (int(x) for x in self._origins[at])
        if number < 0:
            return self._least
        trace = self._table(number).trace(slots)
        assert trace is not None
        return trace

    def _table(self, number: int) -> Table:
        unit, reserve = self._rungs[number]
        sizes = self._true.beside(reserve).in_slots(unit)
        return Table(sizes, int(_SLOTS * MORE), tapes=self._tapes)


def _ranges(true: Sizes, least: int, most: int) -> Iterator[tuple[float, int]]:
    """Yield the bytes of a slot and those held back, of each table of a front."""
    covered = most
    while covered > 0 and most > least:
        yield covered / _SLOTS, max(0, min(most, least + covered // 2) - covered)
        if covered * _FINEST <= _SLOTS * middling(true):
            return
        covered //= _RANGE


def _most(true: Sizes, tapes: bool) -> int:
    """Return bytes in which all tapes or all states fit beside any stage."""
    own = true.gradient[1:] + np.maximum(
        np.maximum(true.taping, true.gradient[:-1] + true.reverse), true.state[1:] + true.advance
    )
    held = int(true.tape.sum()) if tapes else int(true.state[1:].sum() + true.tape.max())
    return held + int(true.state.max()) + int(own.max())


def middling(true: Sizes) -> int:
    """Return the middle one of the states that take memory, at least 1."""
    states = true.state[true.state > 0]
    return max(1, int(np.median(states))) if len(states) else 1


@dataclass(frozen=True, slots=True)
class _Ways:
    """What a block may keep in the first sweep: a row for each of some of its schedules."""

    traces: list[Trace]
    held: Integers
    peaks: Integers
    seconds: Reals

    @classmethod
    def of(cls, front: _Front, true: Sizes) -> _Ways:
        """Return some schedules of a front with what each holds when the block is left."""
        count = len(front.peaks)
        at = np.unique(np.linspace(0, count - 1, min(_WAYS, count)).round().astype(int))
        traces = [front.trace(int(front.peaks[i])) for i in at]
        held = [_left_by(trace, true) for trace in traces]
        seconds = front.seconds[at] + true.spared_s[-1]  # the last tape is kept, too
        return cls(traces, np.array(held, np.int64), front.peaks[at], seconds)

    def split(self, row: int, start: int, stop: int, end: int) -> tuple[Trace, Trace]:
        """Return what comes before and after stages stop..end, the block's first being `start`."""
        trace = [(start + s, start + t, start + k) for s, t, k in self.traces[row]]
        turn = 1 + next(i for i, (s, _, _) in enumerate(trace) if s == stop - 1)
        return [(s, end, k) for s, _, k in trace[:turn]], trace[turn:]


def _left_by(trace: Trace, true: Sizes) -> int:
    """Return the bytes of the states and tapes that a schedule keeps up to its last stage."""
    held = 0
    for s, t, k in trace:
        held += int(true.tape[s]) if k == s or s == t else int(true.state[k])
        if s == t:
            break
    return held


@dataclass(frozen=True, slots=True)
class _Each:
    """The stages of a block reversed one by one, each from a state before the block.

    Attributes
    ----------
    peak : int
        Bytes, of the stages with their inputs.
    gradient : int
        Of the largest behind a stage.
    stages : int
    own_s : float
        Seconds, the runs from that state to the block not counted.
    """

    peak: int
    gradient: int
    stages: int
    own_s: float

    @classmethod
    def of(cls, true: Sizes, start: int, stop: int) -> _Each:
        part = true.part(start, stop)
        peak = max(int(part.state[j]) + need_to_tape(part, j, j) for j in range(len(part)))
        runs_s = np.cumsum(part.forward_s)
        own_s = float((runs_s + part.reverse_s - part.spared_s).sum())
        return cls(peak, int(part.gradient[1:].max()), len(part), own_s)

    def seconds(self, before_s: float) -> float:
        """Return the seconds where the block is so many away from the state."""
        return self.own_s + self.stages * before_s


def plan_nested(true: Sizes, limit: int, *, tapes: bool) -> list[Action] | None:
    """Return the actions of the fastest schedule found, None if none.

    Of equal stages that of a table by their number, of others that of a table of some runs, or
    of blocks (see `Nested`) where states are parts of its slots.
    """
    if not true.is_countable():
        return None
    found = [_by_length(true, limit, tapes), _by_runs(true, limit, tapes)]
    if found[1] is None:
        blocks = Nested(true, limit, tapes=tapes)
        found.append(blocks.trace(limit) if blocks.fits else None)
    traces = [trace for trace in found if trace is not None]
    if not traces:
        return None
    best = min(traces, key=lambda trace: judge(true, trace)[0])
    return list(actions_of(best))


def _by_length(true: Sizes, limit: int, tapes: bool) -> Trace | None:
    """Return the fastest schedule of equal stages; None of others, of too many, if none fits.

    Slots are of what is kept, beside what any stage takes while it runs: parts of a state, or
    of a common divisor of states and tapes, where they are not too many.
    """
    n = len(true)
    # The last is the loss.  The table's twin without the C core takes minutes.
    few = n - 1 <= _EQUAL and native.available()
    if not few or not inside_equal(true, true.spared_s, None):
        return None
    state, tape = int(true.state[1]), int(true.tape[0])
    runs = need_to_pass(true, 0, n - 1), need_to_tape(true, 0, n - 1), need_to_tape(true, 1, 1)
    reserve = max(0, min(limit, max(runs)) - state - tape)  # the loss takes less
    size, room = max(1, math.gcd(state, tape) if tapes else state), max(1, limit - reserve)
    most = max(1, _SUMS // n**2)
    parts = min(_PARTS, most * size // room)
    unit = size / parts if parts else room / most
    slots = math.ceil(MORE * room / unit) + _PARTS
    table = Table(true.beside(reserve).in_slots(unit), slots, tapes=tapes)
    seconds, memory = table.fastest(true, limit)  # none fits where states are parts of a slot
    return table.trace(memory) if seconds < math.inf else None


def _by_runs(true: Sizes, limit: int, tapes: bool) -> Trace | None:
    """Return the fastest schedule of tables of some runs, see `planners.chain.coarse`.

    None of more stages, where a state of middling size is a part of a slot, and without the C core.
    """
    if len(true) - 1 > _FEW or not native.available():
        return None
    size, covered = middling(true), min(limit, _most(true, tapes))
    most = min(_MOST, _VALUES // (len(true) * most_runs(len(true))))
    least = max(int(true.state[j]) + need_to_tape(true, j, j) for j in range(len(true)))
    common = _common(true)
    best, best_s, unit = None, math.inf, math.inf
    # The first covers all memory; one whose slots are states is followed by one of less.
    while 2 * unit > size and covered > 0:
        parts = min(max(_PARTS - 1, _FEWEST * size // covered), most * size // covered)
        if not parts and covered > most * common:
            break
        unit = common if covered <= most * common else size / parts
        reserve = max(0, min(limit, least + covered // 2) - covered)
        slots = math.ceil(MORE * covered / unit)
        short = max(1, min(_LONGEST, _WORK // (len(true) * slots)))
        table = Table(true.beside(reserve).in_slots(unit), slots, tapes=tapes, short=short)
        seconds, memory = table.fastest(true, limit)
        if seconds < best_s:
            best, best_s = table.trace(memory), seconds
        del table
        if unit == common:
            break
        covered //= _RANGE
    return best


def _common(true: Sizes) -> int:
    """Return the greatest common divisor of what takes memory."""
    kept = (true.state, true.gradient, true.tape, true.advance, true.taping, true.reverse)
    return max(1, int(np.gcd.reduce(np.concatenate(kept))))


class Nested:
    """The fastest schedules found of a chain in blocks, for memories up to a limit.

    Parameters
    ----------
    true : Sizes
        In bytes, countable.
    limit : int
        Bytes, the chain's input not counted.
    tapes : bool
        Whether tapes may be kept; see `Table`.

    Attributes
    ----------
    fits : bool
        Whether a schedule fits the limit, as one does if each stage fits alone.
    """

    def __init__(
        self, true: Sizes, limit: int, *, tapes: bool = True, blocks: int = _BLOCKS
    ) -> None:
        self._true = true
        self._limit = limit = min(limit, _most(true, tapes))
        self._starts = starts = _starts(true, limit, blocks)
        parts = [true.part(a, b) for a, b in itertools.pairwise(starts)]
        self._fronts = [_front(part, limit, tapes) for part in parts]
        self._grid = _memories(true, limit, [int(front.peaks[0]) for front in self._fronts])
        self._before = np.concatenate(([0.0], np.cumsum(true.forward_s)))[starts]
        self._passing = _passing(true, starts)
        self._each = [_Each.of(true, a, b) for a, b in itertools.pairwise(starts)]
        pairs = zip(self._fronts[:-1], parts, strict=False) if tapes else ()
        self._ways = [_Ways.of(front, part) for front, part in pairs]
        self._values = np.full((len(parts), len(parts), len(self._grid)), _NEVER)
        self._sums = np.empty(self._values.shape[1:])
        self._solve()
        del self._sums
        seconds = np.minimum.accumulate(self._values[0, -1])
        feasible = seconds < _INFEASIBLE
        self.peaks, self.seconds = self._grid[feasible], seconds[feasible]
        self.fits = bool(feasible[-1])

    # ----------------------------------------------------------------------- solution

    def _solve(self) -> None:
        values, grid, starts = self._values, self._grid, self._starts
        count = len(self._fronts)
        beside = [self._at(grid - int(self._true.state[start])) for start in starts[:-1]]
        kept = [self._at(grid - ways.held[:, None]) for ways in self._ways]
        right = np.empty((count, len(grid)))
        for b in range(count):
            for a in range(b, -1, -1):
                best = self._alone(a) if a == b else self._together(a, b, right, kept)
                values[a, b] = best
                right[a] = _between(best, beside[a]) + self._before[a]

    def _alone(self, a: int) -> Reals:
        front = self._fronts[a]
        at = np.searchsorted(front.peaks, self._grid, side="right") - 1
        return np.where(at < 0, _NEVER, front.seconds[at])

    def _together(
        self, a: int, b: int, right: Reals, kept: list[tuple[Integers, Integers, Reals]]
    ) -> Reals:
        values, grid = self._values, self._grid
        sums = np.add(values[a, a:b], right[a + 1 : b + 1], out=self._sums[: b - a])
        best: Reals = sums.min(axis=0) - self._before[a]
        best[grid < self._need_to_pass(a, b)] = _NEVER
        if self._ways:
            ways = self._ways[a]
            others = _between(values[a + 1, b], kept[a]) + ways.seconds[:, None]
            others[grid < self._needs_to_keep(a, b)[:, None]] = _NEVER
            best = np.minimum(best, others.min(axis=0))
        each_s = values[a, b - 1] + self._each[b].seconds(self._before[b] - self._before[a])
        each_s[grid < self._need_of_each(a, b)] = _NEVER
        best = np.minimum(best, each_s)
        best[best > _INFEASIBLE] = _NEVER
        return best

    def _at(self, memory: Integers) -> tuple[Integers, Integers, Reals]:
        """Return between which of the grid's memories some lie, and how far from the lower."""
        grid = self._grid
        memory = np.maximum(memory, grid[0])
        low = np.searchsorted(grid, memory, side="right") - 1
        high = np.minimum(low + 1, len(grid) - 1)
        share = (memory - grid[low]) / np.maximum(1, grid[high] - grid[low])
        return low, high, np.minimum(share, _BELOW_ONE)

    def _gradient(self, block: int) -> int:
        """Return the bytes of the gradient behind a block."""
        return int(self._true.gradient[self._starts[block + 1]])

    def _need_to_pass(self, a: int, b: int) -> int:
        first, whole = self._passing
        return self._gradient(b) + max(int(first[a]), int(whole[a + 1 : b].max(initial=0)))

    def _need_of_each(self, a: int, b: int) -> int:
        first, whole = self._passing
        passing = max(int(first[a]), int(whole[a + 1 : b + 1].max()))
        return max(self._each[b].peak, self._each[b].gradient + passing)

    def _needs_to_keep(self, a: int, b: int) -> Integers:
        return self._ways[a].peaks + max(0, self._gradient(b) - self._gradient(a))

    # ----------------------------------------------------------------------- schedule

    def trace(self, memory: int) -> Trace:
        """Return the fastest schedule found within so many bytes."""
        found: Trace = []
        left: list[tuple[int, int, int] | Trace] = [(0, len(self._fronts) - 1, memory)]
        starts = self._starts
        while left:
            at = left.pop()
            if isinstance(at, list):
                found += at
                continue
            a, b, room = at
            if a == b:
                first = starts[a]
                own = self._fronts[a].trace(room)
                found += [(first + s, first + t, first + k) for s, t, k in own]
                continue
            k, row = self._choice(a, b, room)
            if k < 0:
                for j in reversed(range(starts[b], starts[b + 1])):
                    found += [(starts[a], j, j), (j, j, j)]
                left.append((a, b - 1, room))
                continue
            if row is None:
                found.append((starts[a], starts[b + 1] - 1, starts[k]))
                left.append((a, k - 1, room))
                left.append((k, b, room - int(self._true.state[starts[k]])))
                continue
            ways = self._ways[a]
            sweep, rest = ways.split(row, starts[a], starts[a + 1], starts[b + 1] - 1)
            found += sweep
            left += [rest, (a + 1, b, room - int(ways.held[row]))]
        return found

    def _choice(self, a: int, b: int, room: int) -> tuple[int, int | None]:
        """Return the next block whose input is kept, and by which schedule block a keeps things.

        Negative for stages one by one; None for no schedule.
        """
        values, blocks = self._values, np.arange(a + 1, b + 1)
        low, high, share = self._at(np.array([room]))
        left = _lines(values[a, a:b, low[0]], values[a, a:b, high[0]], share)
        low, high, share = self._at(room - self._true.state[np.array(self._starts)[blocks]])
        right = _lines(values[blocks, b, low], values[blocks, b, high], share)
        checkpoint_s = left + right + self._before[blocks] - self._before[a]
        k = int(checkpoint_s.argmin())
        best_s = float(checkpoint_s[k]) if room >= self._need_to_pass(a, b) else _NEVER
        row = None
        if self._ways:
            ways = self._ways[a]
            kept_s = _between(values[a + 1, b], self._at(room - ways.held)) + ways.seconds
            kept_s[room < self._needs_to_keep(a, b)] = _NEVER
            at = int(kept_s.argmin())
            if kept_s[at] <= best_s:
                best_s, row = float(kept_s[at]), at
        if room >= self._need_of_each(a, b):
            before_s = float(_between(values[a, b - 1], self._at(np.array([room])))[0])
            each_s = before_s + self._each[b].seconds(self._before[b] - self._before[a])
            if each_s < best_s:
                return -1, None
        assert best_s < _INFEASIBLE
        return a + 1 + k, row


def _front(true: Sizes, limit: int, tapes: bool) -> _Front:
    if len(true) <= _STAGES:
        return _Solved(true, tapes)
    return Nested(true, limit, tapes=tapes, blocks=_BLOCKS_WITHIN)


def _lines(low: Reals, high: Reals, share: Reals) -> Reals:
    return low * (1 - share) + high * share


def _between(values: Reals, at: tuple[Integers, Integers, Reals]) -> Reals:
    low, high, share = at
    return _lines(values[low], values[high], share)


def _starts(true: Sizes, limit: int, count: int) -> list[int]:
    """Return where each block begins and the last ends.

    Stages beside which least fits are blocks of their own, if others have far more room.
    The stages of other blocks and their seconds count alike; states near the equal shares
    that are small are where they begin.
    """
    n = len(true)
    if n <= count:
        return list(range(n + 1))
    beside = limit - true.state[:-1] - true.tape - true.gradient[1:]
    beside -= np.maximum(true.taping, true.gradient[:-1] + true.reverse)
    tight = np.argsort(beside, kind="stable")[: count // 4]
    tight = tight[beside[tight] < np.median(beside) / 4]
    starts = {0, n, *tight.tolist(), *(tight + 1).tolist()}
    total = float(true.forward_s.sum())
    ends = np.cumsum(1 / n + (true.forward_s / total if total > 0 else 1 / n)) / 2
    count -= len(starts) - 2
    after = 0
    for number in range(1, count):
        low, high = (int(np.searchsorted(ends, (number + x) / count)) for x in (-0.25, 0.25))
        first, last = max(after, low) + 1, min(n - 1, high + 1)
        if first <= last:
            after = first + int(true.state[first : last + 1].argmin())
            starts.add(after)
    return sorted(starts)


def _memories(true: Sizes, limit: int, least: list[int]) -> Integers:
    """Return the memories that times are held for, ascending, after one that nothing fits in."""
    lowest, step = min(least), max(1, min(middling(true) // 8, limit // 64))
    near = step * np.arange(_STEPS)
    beyond = np.geomspace(_STEPS * step, max(_STEPS * step, limit - lowest) + 1, _RATIOS)
    off = np.concatenate((near, beyond.astype(np.int64)))
    every = np.concatenate((lowest + off, limit - off, np.array(least)))
    return np.unique(np.append(every[(every >= lowest) & (every <= limit)], -1))


def _passing(true: Sizes, starts: list[int]) -> tuple[Integers, Integers]:
    """Return the bytes that running each block forward takes, without and with its input."""
    through = true.state[:-1] + true.state[1:] + true.advance
    whole = np.maximum.reduceat(through, starts[:-1])
    without = through.copy()
    without[starts[:-1]] -= true.state[starts[:-1]]
    return np.maximum.reduceat(without, starts[:-1]), whole
