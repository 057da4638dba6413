"""The dynamic programs over a heterogeneous chain: for the least time, and for the least memory.

Beaumont et al. 2019 (RR-9302), theorem 1 with its errata (see
`planners.chain.heterogeneous`): for every pair of stages (s, t) and every memory m, in
slots, the least forward work done again; or, with the peak in place of the time, the
smallest memory in bytes.  C kernels solve them; their Python twins, for machines without
a compiler, do the same float32 additions in the same order and are their oracles.

Complexity: O(L^3 S / 6) additions and O(L^2 S / 2) floats for L stages, S slots;
O(L^2 S) additions where stages are equal.  O(L^3 / 6) for the smallest memory.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np

from ... import native
from ...support.arrays import Integers, Reals
from .coarse import Runs
from .equal import EqualRows, equal_rows, inside_equal
from .sizes import MAX_SLOTS, Sizes, chain_in_core, in_core, need_to_pass, need_to_tape, way_of

# (s, t, choice): stage s keeps its tape where choice == s (always where s == t), and by
# another way w where choice == t + w (see `way_of`),
# else state `choice` is the next one kept and s..choice-1 run forward.
Trace: TypeAlias = list[tuple[int, int, int]]
Instructions: TypeAlias = Literal["auto", "baseline", "avx2", "avx512"]


def judge(true: Sizes, trace: Trace) -> tuple[float, int]:
    """Return seconds and peak bytes of a trace, the chain's input not counted.

    The twin of the C kernel's; `planners.chain.memory` is the independent judge.
    """
    held, peak, seconds = 0, 0, 0.0
    waiting: list[int] = []
    for s, t, k in trace:
        way = way_of(s, t, k)
        if way is not None:
            peak = max(peak, held + need_to_tape(true, s, t, way))
            seconds += float(true.forward_s[s]) + float(true.reverse_s[s])
            if way:
                seconds += float(true.ways[way - 1].again_s[s])
            if s == t:
                seconds -= float(true.spared_s[s])
                held = waiting.pop() if waiting else 0
            else:
                held += _tape_of(true, way, s)
            continue
        for j in range(s, k):
            before = 0 if j == s else int(true.state[j])
            need = int(true.gradient[t + 1]) + before
            need += int(true.state[j + 1]) + int(true.advance[j])
            peak = max(peak, held + need)
            seconds += float(true.forward_s[j])
        waiting.append(held)
        held += int(true.state[k])
    return seconds, min(peak, int(np.iinfo(np.int64).max))


def _tape_of(sizes: Sizes, way: int, s: int) -> int:
    return int((sizes.ways[way - 1] if way else sizes).tape[s])


# Schedules of more slots than the limit has may fit: sizes were rounded up too.
MORE = 1.15
INFEASIBLE = -2
PLANE = 16
_TILE = 16
# Candidates per call of the kernel: a fraction of a second, so that Ctrl-C is heard.
_PER_CALL = 4e9
_NEVER = 1e30
# Checkpoints whose excess is within this share of the least are taken for equally good.
_TIE = np.float32(1e-6)
# Rounding errors of float32 sums over a chain, as a share of its forward work.
FLOAT_ERROR = 1e-5


class Table:
    """The solved program for memories 0..slots.

    Parameters
    ----------
    sizes : Sizes
        In slots.
    slots : int
    tapes : bool
        Whether tapes may be kept; False: only right before their adjoint, as
        Revolve has it.
    threads : int
    instructions : {"auto", "baseline", "avx2", "avx512"}
        The kernel's instruction set; the table does not depend on it.
    native_kernel : bool, optional
        Whether to use the C kernel; where it was built, if None.
    tick : callable, optional
        Called `calls_of(slots)` times while the C kernel solves.
    work : float
        What a second of work done again costs.
    moves : pair of arrays, optional
        What it costs, in seconds, to have a state or a tape out of memory while the
        stages behind it are processed; one entry per stage.  For bounds: the choices
        of such a table are not asked for.
    by_length : bool
        Whether a chain of equal stages is solved by their number alone (see `equal`).
    band : int, optional
        Solve only runs of at most so many stages, for the joint planner; with the C kernel.
    short : int, optional
        Solve only some runs, see `planners.chain.coarse`; with the C kernel.

    Notes
    -----
    Releases the interpreter lock; Ctrl-C is answered within about a second.
    """

    def __init__(
        self,
        sizes: Sizes,
        slots: int,
        *,
        tapes: bool = True,
        threads: int = 1,
        instructions: Instructions = "auto",
        native_kernel: bool | None = None,
        tick: Callable[[], object] | None = None,
        work: float = 1.0,
        moves: tuple[Reals, Reals] | None = None,
        by_length: bool = True,
        band: int | None = None,
        short: int | None = None,
    ) -> None:
        self.sizes, self.slots, self.tapes = sizes, slots, tapes
        self.band = len(sizes) if band is None else band
        forward_s = sizes.forward_s
        total = float(forward_s.sum())
        share = work * forward_s / total if total > 0 else np.zeros_like(forward_s)
        self.prefix = np.concatenate(([0.0], np.cumsum(share))).astype(np.float32)
        self._leaf = leaf = np.zeros(len(sizes), np.float32)
        if total > 0:
            leaf -= (work * sizes.spared_s / total).astype(np.float32)
        self._again = np.zeros((1 + len(sizes.ways), len(sizes)), np.float32)
        for row, kept in zip(self._again[1:], sizes.ways, strict=True):
            row[:] = np.minimum(work * kept.again_s / (total or 1.0), _NEVER)
        self._moves = None
        if moves is not None:
            # What costs more than float32 holds is never chosen.
            state, tape = (np.minimum(x / (total or 1.0), _NEVER) for x in moves)
            self._moves = state.astype(np.float32), tape.astype(np.float32)
        use_native = native.available() if native_kernel is None else native_kernel
        self._native = use_native
        self._rows: EqualRows | None = None
        self._runs = None if short is None else Runs.of(sizes, short)
        if band is not None and band < len(sizes):
            self._solve_band(band, work, threads, instructions)
            return
        rows = None
        alike = by_length and short is None and not sizes.ways
        if alike and inside_equal(sizes, leaf, self._moves):
            memories = PLANE * self.calls_of(slots) if use_native else slots + 1
            rows = equal_rows(sizes, memories, tapes, self.prefix, leaf, self._moves)
        if use_native:
            self._solve(threads, instructions, tick, rows)
        elif rows is not None:
            self._values = rows.pairs()
        else:
            self._values = _solved_plainly(
                sizes, slots, tapes, self.prefix, leaf, self._moves, self._again
            )

    # ------------------------------------------------------------- C kernel

    @staticmethod
    def calls_of(slots: int) -> int:
        """Return how often a table of so many slots ticks."""
        return -(-(slots + 1) // PLANE)

    def _solve(
        self,
        threads: int,
        instructions: str,
        tick: Callable[[], object] | None,
        rows: EqualRows | None,
    ) -> None:
        library = native.library()
        n = len(self.sizes)
        self._rows = rows
        cells = n * (n + 1) // 2 if rows is None else 3 * n - 3
        if self._runs is not None:
            cells = int(self._runs.begins[-1])
        planes = -(-(self.slots + 1) // PLANE)
        best = library.ms_chain_isa()
        isa = min(best, {"baseline": 1, "avx2": 2, "avx512": 3}.get(instructions, best))
        self._chain = chain_in_core(
            self.sizes,
            self.prefix,
            self.tapes,
            self._leaf,
            self._moves,
            self._again,
            equal=rows is not None,
            runs=None if self._runs is None else self._runs.arrays,
        )
        self._none = np.empty(cells, np.int32)
        library.ms_chain_none(ctypes.byref(self._chain), self._none.ctypes.data, MAX_SLOTS)
        if rows is not None:
            self._table = rows.cells(PLANE)
            for _ in range(planes):
                if tick is not None:
                    tick()
            return
        self._table = np.empty((planes, cells, PLANE), np.float32)
        tiles = -(-n // _TILE)
        for plane in range(planes):
            first = 0
            while first < tiles:
                last, candidates = first, 0.0
                while last < tiles:
                    candidates += (tiles - last) * (last + 1) * float(_TILE) ** 4
                    if candidates > _PER_CALL and last > first:
                        break
                    last += 1
                failed = library.ms_chain_solve(
                    ctypes.byref(self._chain),
                    self._none.ctypes.data,
                    self._table.ctypes.data,
                    plane,
                    first,
                    last - 1,
                    isa,
                    threads if n > 4 * _TILE else 1,
                )
                if failed:
                    raise MemoryError("no memory for the scratch of the chain solver")
                first = last
            if tick is not None:
                tick()

    def _solve_band(self, band: int, work: float, threads: int, instructions: Instructions) -> None:
        """Take the rows of short runs over from tables of twice as many stages each."""
        n, planes = len(self.sizes), self.calls_of(self.slots)
        seconds, total = self.sizes.forward_s, float(self.sizes.forward_s.sum()) or 1.0
        self._table = np.full((planes, n, band, PLANE), np.inf, np.float32)
        self._none = np.full((n, band), MAX_SLOTS, np.int32)
        for first in range(0, n, band):
            stop = min(n, first + 2 * band)
            part = Table(
                self.sizes.part(first, stop),
                self.slots,
                tapes=self.tapes,
                threads=threads,
                instructions=instructions,
                native_kernel=True,
                work=work * float(seconds[first:stop].sum()) / total,
            )
            for s in range(first, min(n, first + band)):
                count = min(band, stop - s)
                cells = part._cells(s - first, count)
                self._table[:, s, :count] = part._table[:, cells]
                self._none[s, :count] = part._none[cells]
        self._chain = chain_in_core(
            self.sizes, self.prefix, self.tapes, self._leaf, self._moves, self._again, band
        )

    def solved(self) -> tuple[native.Struct, Integers, Reals]:
        """Return the chain in slots, the needs to pass and the values, as the C core has them."""
        assert self._native
        return self._chain, self._none, self._table

    def _cells(self, s: int, count: int) -> Integers:
        """Return where a plane has stages s..s, s..s + 1, ...: `cell_of` of `native/chain.h`."""
        n, t = len(self.sizes), np.arange(s, s + count)
        if self._rows is None:
            return s * n - s * (s - 1) // 2 + t - s
        return np.where(t < n - 1, n, 2 * n - 2) + t - s if s else t

    @property
    def is_whole(self) -> bool:
        """Whether all runs are in the table."""
        return self.band >= len(self.sizes) and self._runs is None

    @property
    def nbytes(self) -> int:
        """Bytes of the table."""
        if self._native:
            return self._table.nbytes
        return sum(values.nbytes for values in self._values.values())

    # ------------------------------------------------------------- answers

    def values(self, s: int, t: int) -> Reals:
        """Return the excess of stages s..t for memories 0..slots, float32, as shares."""
        if not self._native:
            return self._values[s, t]
        if self._rows is not None:
            return self._rows.of(s, t)[: self.slots + 1]
        n = len(self.sizes)
        at = s * n - s * (s - 1) // 2 + t - s if self._runs is None else self._runs.cell(s, t)
        return self._table[:, at, :].reshape(-1)[: self.slots + 1]

    def planes(self) -> Reals:
        """Return the values in planes of 16 memories, pairs by s and t."""
        if self._native:
            return self._table if self._rows is None else self._rows.planes(PLANE)
        n = len(self.sizes)
        pairs = np.stack([self._values[s, t] for s in range(n) for t in range(s, n)])
        room = np.pad(pairs, ((0, 0), (0, -(self.slots + 1) % PLANE)), constant_values=np.inf)
        return np.ascontiguousarray(room.reshape(len(pairs), -1, PLANE).transpose(1, 0, 2))

    def least_seconds(self, memory: int) -> float:
        """Return the makespan of the whole chain within `memory` slots, infinite if none fits."""
        sizes = self.sizes
        excess = float(self.values(0, len(sizes) - 1)[min(memory, self.slots)])
        if math.isinf(excess):
            return math.inf
        return float(sizes.forward_s.sum() * (1 + excess) + sizes.reverse_s.sum())

    def trace(self, memory: int, first: int = 0, last: int | None = None) -> Trace | None:
        """Return the choices of the best schedule within `memory` slots, None if none fits.

        Of stages first..last, all of them unless given.
        """
        n = len(self.sizes)
        last = n - 1 if last is None else last
        if not self._native:
            return self._python_trace(memory, first, last)
        out = np.empty(6 * n, np.int64)
        stack = np.empty(3 * (n + 2), np.int64)
        made = native.library().ms_chain_trace(
            ctypes.byref(self._chain),
            self._none.ctypes.data,
            self._table.ctypes.data,
            first,
            last,
            memory,
            out.ctypes.data,
            stack.ctypes.data,
        )
        if made == INFEASIBLE:
            return None
        return [(int(s), int(t), int(k)) for s, t, k in out[: 3 * made].reshape(-1, 3)]

    def curve(self, true: Sizes, first: int = 0, last: int | None = None) -> tuple[Reals, Reals]:
        """Return seconds and true peak bytes of the schedules of memories first..last.

        `true` are the sizes in bytes; `last` is the most slots unless given.
        Infeasible memories have infinite seconds; peaks are cut off at 2^63 - 1.
        """
        last = self.slots if last is None else last
        count = last - first + 1
        seconds, peaks = np.full(count, np.inf), np.full(count, np.iinfo(np.int64).max)
        if not self._native:
            for memory in range(first, last + 1):
                trace = self._python_trace(memory, 0, len(self.sizes) - 1)
                if trace is not None:
                    seconds[memory - first], peaks[memory - first] = judge(true, trace)
            return seconds, peaks
        n = len(self.sizes)
        trace_room = np.empty(6 * n + 6, np.int64)
        stack = np.empty(4 * n + 8, np.complex128)  # of 16 bytes, and aligned to them
        chain = in_core(true)
        reverse_s = np.concatenate(
            [true.reverse_s, *(true.reverse_s + w.again_s for w in true.ways)]
        )
        native.library().ms_chain_curve(
            ctypes.byref(self._chain),
            ctypes.byref(chain),
            true.forward_s.ctypes.data,
            reverse_s.ctypes.data,
            true.spared_s.ctypes.data,
            self._none.ctypes.data,
            self._table.ctypes.data,
            first,
            last,
            trace_room.ctypes.data,
            stack.ctypes.data,
            seconds.ctypes.data,
            peaks.ctypes.data,
        )
        return seconds, peaks

    def fastest(self, true: Sizes, limit: int) -> tuple[float, int]:
        """Return seconds and memory of the fastest schedule with a true peak of at most `limit`.

        The least such memory; infinite seconds if none fits.  As less memory is predicted
        to take longer, memories are judged downwards until the prediction, rounding errors
        aside, is beyond what was found.
        """
        found, memory = math.inf, 0
        error_s = FLOAT_ERROR * float(true.forward_s.sum())
        for last in range(self.slots, -1, -PLANE):
            if self.least_seconds(last) - error_s > found:
                break
            first = max(0, last - PLANE + 1)
            seconds, peaks = self.curve(true, first, last)
            seconds[peaks > limit] = math.inf
            at = int(seconds.argmin())
            if seconds[at] <= found and seconds[at] < math.inf:
                found, memory = float(seconds[at]), first + at
        return found, memory

    def _python_trace(self, memory: int, first: int, last: int) -> Trace | None:
        trace: Trace = []
        stack = [(first, last, memory)]
        while stack:
            s, t, m = stack.pop()
            k = self.choice(s, t, m)
            if k == INFEASIBLE:
                return None
            trace.append((s, t, k))
            if s == t:
                continue
            if (way := way_of(s, t, k)) is not None:
                stack.append((s + 1, t, m - _tape_of(self.sizes, way, s)))
            else:
                stack.append((s, k - 1, m))
                stack.append((k, t, m - int(self.sizes.state[k])))
        return trace

    def choice(self, s: int, t: int, m: int) -> int:
        """Return s for a tape, t + w for one kept by way w, k for a checkpoint, or INFEASIBLE."""
        sizes, prefix = self.sizes, self.prefix
        if s == t:
            return s if m >= need_to_tape(sizes, s, s) else INFEASIBLE
        taped = best = np.float32(np.inf)
        found, kept = INFEASIBLE, s
        for way in range(len(self._again)) if self.tapes else ():
            tape = _tape_of(sizes, way, s)
            if m >= max(need_to_tape(sizes, s, t, way), tape):
                here = self.values(s + 1, t)[m - tape] + self._again[way, s]
                if here < taped:
                    taped, kept = here, t + way if way else s
        for k in range(s + 1, t + 1) if m >= need_to_pass(sizes, s, t) else ():
            rest = m - int(sizes.state[k])
            if rest < 0:
                continue
            right = self.values(k, t)[rest] + prefix[k]
            here = self.values(s, k - 1)[m] + right - prefix[s]
            # Of equally good ones the farthest keeps the fewest states; see chain.h.
            if here < np.inf and here <= best + _TIE * abs(best):
                found = k
            best = min(best, here)
        return kept if taped < np.inf and taped <= best else found


def default_threads() -> int:
    """Return the threads a large chain is solved with: the cores at hand, at most 8."""
    return max(1, min(8, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 2))


def _solved_plainly(
    sizes: Sizes,
    slots: int,
    tapes: bool,
    prefix: Reals,
    leaf: Reals,
    moves: tuple[Reals, Reals] | None,
    again: Reals,
) -> dict[tuple[int, int], Reals]:
    """Return the excess of each pair of stages for memories 0..slots, as `Table` has it."""
    n, memories = len(sizes), np.arange(slots + 1)
    excess: dict[tuple[int, int], Reals] = {}

    def shifted(s: int, t: int, by: int) -> Reals:
        out = np.full(slots + 1, np.inf, np.float32)
        if by <= slots:
            out[by:] = excess[s, t][: slots + 1 - by]
        return out

    for s in range(n - 1, -1, -1):
        for t in range(s, n):
            fits = memories >= need_to_tape(sizes, s, t)
            if s == t:
                excess[s, t] = np.where(fits, leaf[s], np.float32(np.inf))
                continue
            best = np.full(slots + 1, np.inf, np.float32)
            for k in range(s + 1, t + 1):
                right = shifted(k, t, int(sizes.state[k])) + prefix[k]
                if moves is not None:
                    right = np.minimum(right, excess[k, t] + (prefix[k] + moves[0][k]))
                best = np.minimum(best, excess[s, k - 1] + right)
            passes = memories >= need_to_pass(sizes, s, t)
            best = np.where(passes, best - prefix[s], np.float32(np.inf))
            for way in range(len(again)) if tapes else ():
                taped = shifted(s + 1, t, _tape_of(sizes, way, s)) + again[way, s]
                if moves is not None:
                    taped = np.minimum(taped, excess[s + 1, t] + moves[1][s])
                fits = memories >= need_to_tape(sizes, s, t, way)
                best = np.minimum(best, np.where(fits, taped, np.float32(np.inf)))
            excess[s, t] = best.astype(np.float32)
    return excess


def smallest(
    true: Sizes, *, tapes: bool = True, native_kernel: bool | None = None
) -> tuple[int, Trace]:
    """Return the smallest peak of any persistent schedule in bytes, and one with it.

    Exact, in O(L^3 / 6): theorem 1 with the peak in place of the time.  The
    chain's input is not counted.
    """
    n = len(true)
    use_native = native.available() if native_kernel is None else native_kernel
    choice: Callable[[int, int], int]
    if use_native:
        cells = n * (n + 1) // 2
        peaks, choices = np.empty(cells, np.int64), np.empty(cells, np.int32)
        prefix = np.zeros(n + 1, np.float32)
        chain = chain_in_core(true, prefix, tapes, np.zeros(n, np.float32))
        rows = max(1, int(3e8 / max(1, n * n)))
        for last in range(n - 1, -1, -rows):
            native.library().ms_chain_smallest(
                ctypes.byref(chain),
                max(0, last - rows + 1),
                last,
                peaks.ctypes.data,
                choices.ctypes.data,
            )

        def choice(s: int, t: int) -> int:
            return int(choices[s * n - s * (s - 1) // 2 + t - s])

        peak = int(peaks[n - 1])
    else:
        found = _smallest_twin(true, tapes)

        def choice(s: int, t: int) -> int:
            return found[s, t][1]

        peak = found[0, n - 1][0]
    trace: Trace = []
    stack = [(0, n - 1)]
    while stack:
        s, t = stack.pop()
        k = choice(s, t)
        trace.append((s, t, k))
        if s == t:
            continue
        if k == s:
            stack.append((s + 1, t))
        else:
            stack.append((s, k - 1))
            stack.append((k, t))
    return peak, trace


def _smallest_twin(true: Sizes, tapes: bool) -> dict[tuple[int, int], tuple[int, int]]:
    n = len(true)
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for s in range(n - 1, -1, -1):
        for t in range(s, n):
            tape_peak = need_to_tape(true, s, t)
            if s == t:
                found[s, t] = tape_peak, s
                continue
            options = []
            if tapes:
                options.append((max(tape_peak, int(true.tape[s]) + found[s + 1, t][0]), s))
            none = need_to_pass(true, s, t)
            for k in range(s + 1, t + 1):
                right = int(true.state[k]) + found[k, t][0]
                options.append((max(none, right, found[s, k - 1][0]), k))
            found[s, t] = min(options, key=lambda option: option[0])
    return found
