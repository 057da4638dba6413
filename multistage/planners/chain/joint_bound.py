"""A lower bound of chains with a slow tier: the certificate of the joint planner.

No nested schedule of a chain of unequal stages within a memory limit, with
asynchronous writes and reads of states and tapes, is faster.  The makespan is
split where the adjoint of the last stage starts, T = T1 + T2, and

* T1 is no less than all stages' forward seconds, and than the writes done in it;
* T2 is no less than the adjoints and what is recomputed, than the writes in it,
  and than the reads in it;
* at the turn no more is resident than memory holds beside that adjoint.

Prices on both channels and on memory at the turn make one sum of it, the
Lagrangian dual, which `native/joint_bound.c` minimizes over all nested
schedules: those that reverse the stages behind a checkpoint before those in
front of it, with RR-9302's table for what is recomputed.  Any prices give a
bound; a pattern search finds good ones, on a coarser chain if stages are many.
Sizes are rounded down to slots.

Where a tape does not fit beside the stage behind it, its transfers are waited for
(`_Waits`).  What is left out only lowers the bound: the room that landing and
staging take elsewhere, the state behind a tape in the tier, the tier's capacity.

Complexity: O(L^3 S / 6) once for the table of L stages and S slots, O(L^2 S)
for each of a counted number of prices.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cached_property
from typing import TypeAlias, TypeVar

import numpy as np

from ... import native
from ...model.stages import StageCosts
from ...model.tier import Tier
from ...support.arrays import Flags, Integers, Reals
from .joint_core import require_core
from .sizes import Sizes
from .table import PLANE, Table

# Of the write channel before the turn, after it, the read channel, memory at the turn.
Prices: TypeAlias = tuple[float, float, float, float]
# The table adds float32.
_FLOAT32 = 2.0**-24


@dataclass(frozen=True, slots=True)
class _Waits:
    """Seconds that nothing runs in, if a stage's tape goes to the tier, as memory is short.

    Of a nested schedule, what follows a tape in the first sweep is the next stage, and
    what precedes its adjoint is that of the next stage.  Where the tape does not fit
    beside that, the whole write is waited for, or the whole read.

    Attributes
    ----------
    taped_s : array
        Of writes, if the next stage is taped.
    passed_s : array
        Of writes, if the next stage is run forward.
    read_s : array
    """

    taped_s: Reals
    passed_s: Reals
    read_s: Reals

    @classmethod
    def of(cls, true: Sizes, room: int, rates: Tier) -> _Waits:
        """Return the waits of a chain without its loss."""
        tape = true.tape[:-1]
        spare = room - tape
        taping = true.tape[1:] + true.taping[1:]
        passing = true.state[2:] + true.advance[1:]
        gradients = true.gradient[2:] + true.gradient[1:-1]
        write_s = rates.write_s + tape / rates.write_bytes_per_s
        read_s = rates.read_s + tape / rates.read_bytes_per_s

        def where(short: Flags, seconds: Reals) -> Reals:
            return np.append(np.where(short, seconds, 0.0), 0.0)

        return cls(
            where(taping > spare, write_s),
            where(passing > spare, write_s),
            where(true.tape[1:] + gradients + true.reverse[1:] > spare, read_s),
        )


class Dual:
    """The dual of one chain, at any prices."""

    def __init__(self, true: Sizes, room: int, rates: Tier, slots: int, threads: int) -> None:
        self.true, self.room, self.rates, self.slots = true, room, rates, slots
        self.unit = room / slots
        self.threads = threads
        self.sizes = sizes = _in_slots(true, room, slots)
        self.total = float(true.forward_s.sum()) or 1.0
        self.before = np.concatenate(([0.0], np.cumsum(true.forward_s)))
        reversing = sizes.tape + sizes.gradient[1:] + sizes.gradient[:-1] + sizes.reverse
        self.taping = np.maximum(sizes.tape + sizes.taping, reversing)
        self.passing = _passing(sizes)
        self.waits = _Waits.of(true, room, rates)
        self._area = np.empty(native.library().ms_joint_dual_len(len(sizes), slots))

    def allows(self, prices: Prices) -> bool:
        """Whether the prices leave none below 0."""
        before, _, _, _ = prices
        return before <= 1 and self._of_channels(prices) <= 1

    def _of_channels(self, prices: Prices) -> float:
        _, write, read, _ = prices
        return max(write, read) if self.rates.shared else write + read

    def at(self, prices: Prices) -> float:
        """Return the dual's value in seconds, less what rounding may add; a bound."""
        before, after, read, turn = prices
        rates, true, n = self.rates, self.true, len(self.true)
        writing, reading = 1 / rates.write_bytes_per_s, 1 / rates.read_bytes_per_s
        work = 1 - self._of_channels(prices)
        # A byte at the turn costs `turn` of the seconds of its transfer.
        held = turn * max(writing, reading)

        def moves(nbytes: Integers) -> tuple[Reals, Reals, Reals, Reals, Reals]:
            write_s = rates.write_s + nbytes * writing
            early_s = before * write_s + (1 - before) * rates.write_overhead_s
            after_s = after * write_s + work * rates.write_overhead_s
            read_s = read * (rates.read_s + nbytes * reading) + work * rates.read_overhead_s
            fast = held * nbytes
            late = np.minimum(early_s, after_s) + fast + read_s
            first = np.minimum(early_s + np.minimum(read_s, fast), late)
            return fast, first, late, read_s, after_s + read_s

        fast_state, move_state, late_state, again_state, again = moves(true.state[:n])
        fast_tape, move_tape, _, _, again_tape = moves(true.tape)
        if not rates.tapes:
            move_tape = again_tape = np.full(n, math.inf)
        waits = self.waits
        move_tape = move_tape + work * waits.read_s
        again_tape = again_tape + work * (waits.read_s + np.minimum(waits.taped_s, waits.passed_s))
        least = self.least(
            work,
            self._planes(work, again, again_tape),
            (
                fast_state,
                fast_tape,
                move_state,
                move_tape,
                late_state,
                again_state,
                (1 - before) * waits.taped_s,
                (1 - before) * waits.passed_s,
            ),
        )
        if math.isinf(least):
            return least
        value = (1 - before) * float(true.forward_s.sum()) + work * float(true.reverse_s.sum())
        last = true.tape[-1] + true.gradient[-1] + true.gradient[-2] + true.reverse[-1]
        resident = self.room - int(last)
        return value + least - held * resident - self.rounding(work, least)

    def _planes(self, work: float, again_state: Reals, again_tape: Reals) -> Reals:
        """Return the table of what is recomputed, moves at their prices."""
        if not again_state.any() and not again_tape.any():
            # Everything may be moved for nothing: no table is needed.
            return np.float32(work) * self._free
        table = Table(
            self.sizes,
            self.slots,
            threads=self.threads,
            work=work,
            moves=(again_state, again_tape),
        )
        return table.planes()

    @cached_property
    def _free(self) -> Reals:
        leaf = (-self.true.spared_s / self.total).astype(np.float32)
        rows = np.concatenate([leaf[s:] for s in range(len(leaf))])
        return np.broadcast_to(rows[:, None], (-(-(self.slots + 1) // PLANE), len(rows), PLANE))

    def rounding(self, work: float, least: float) -> float:
        """Return how much too large a value may be."""
        # A sum of the table has at most 6 roundings a level and n levels.
        return 6 * len(self.true) * _FLOAT32 * (least + 2 * work * float(self.true.spared_s.sum()))

    def least(
        self, work: float, planes: Reals, prices: tuple[Reals, ...], slots: int | None = None
    ) -> float:
        """Return the least priced seconds within so many slots, all of them unless given."""
        slots = self.slots if slots is None else slots
        sizes = self.sizes
        arrays = (sizes.state, sizes.tape, self.taping, self.passing, planes, self.before)
        call = native.JointDual(
            len(sizes),
            slots,
            *(array.ctypes.data for array in arrays),
            self.total,
            work,
            *(array.ctypes.data for array in prices),
        )
        return float(native.library().ms_joint_dual(ctypes.byref(call), self._area.ctypes.data))


def _in_slots(true: Sizes, room: int, slots: int) -> Sizes:
    """Return the sizes in slots, rounded down exactly: what fits in bytes fits in slots."""

    def down(values: Integers) -> Integers:
        return np.array([min(int(x) * slots // room, slots + 1) for x in values], np.int64)

    state, tape, taping = down(true.state), down(true.tape), down(true.taping)
    # A stage that is passed may be taped instead, which may take less at once.
    advance = np.minimum(down(true.advance), tape + taping - state[1:])
    return Sizes(
        state,
        down(true.gradient),
        tape,
        advance,
        taping,
        down(true.reverse),
        true.forward_s,
        true.reverse_s,
        true.spared_s,
    )


def _passing(sizes: Sizes) -> Reals:
    """Return the slots that running s..k-1 forward takes, state s not counted, by s and k."""
    n = len(sizes)
    through = sizes.state[:n] + sizes.state[1:] + sizes.advance
    rows = []
    for s in range(n):
        run = np.concatenate(([0], through[s:-1]))
        run[1:2] -= sizes.state[s]
        rows.append(np.maximum.accumulate(run))
    return np.concatenate(rows)


Values = TypeVar("Values", Integers, Reals)

SLOTS = 300
# Of longer chains the bound is the time of plain training: tables would take gigabytes.
_MOST_STAGES = 1500
# Prices are looked for on a chain of at most so many stages, with few slots first.
_COARSE, _FEW, _MOST = 64, 31, 120
Direction: TypeAlias = tuple[int, int, int, int]
_STARTS: tuple[Prices, ...] = (
    (0.1, 0.1, 0.1, 0.0),
    (0.3, 0.3, 0.3, 0.0),
    (0.6, 0.3, 0.3, 0.0),
    (0.1, 0.02, 0.3, 0.1),
    (0.9, 0.05, 0.5, 0.5),
    (0.5, 0.02, 0.05, 0.4),
    (0.3, 0.05, 0.6, 0.2),
    (0.05, 0.05, 0.05, 0.05),
    (0.1, 0.0, 0.0, 0.1),
    (0.3, 0.0, 0.0, 0.3),
    (0.6, 0.0, 0.0, 0.6),
    (0.05, 0.0, 0.0, 0.05),
    (0.03, 0.0, 0.0, 0.03),
    (1.0, 0.0, 0.3, 1.0),
)
# So many of the first leave the prices after the turn alone.
_FIRST_SWEEP = 6
_DIRECTIONS: tuple[Direction, ...] = (
    (1, 0, 0, 1),
    (-1, 0, 0, -1),
    (1, 0, 0, 0),
    (-1, 0, 0, 0),
    (0, 0, 0, 1),
    (0, 0, 0, -1),
    (0, 1, 0, 0),
    (0, -1, 0, 0),
    (0, 0, 1, 0),
    (0, 0, -1, 0),
    (1, 1, 0, 0),
    (-1, -1, 0, 0),
    (1, 0, 1, 1),
    (-1, 0, -1, -1),
    (0, 1, -1, 0),
    (0, -1, 1, 0),
    (0, 1, 0, -1),
    (0, -1, 0, 1),
)
# On a channel that both directions share, the dearer price counts.
_SHARED: tuple[Direction, ...] = ((0, 1, 1, 0), (0, -1, -1, 0))
_LAST_STEP = 0.0005
# A sum of doubles may be off in its last digits.
_DOUBLE = 1e-12


def joint_lower_bound(
    costs: StageCosts,
    memory_bytes: int | None,
    rates: Tier,
    *,
    slots: int = SLOTS,
    threads: int = 1,
) -> float:
    """Return seconds that no nested schedule within the memory and with the tier undercuts.

    Infinite if no schedule fits; of more than 1500 stages the time of plain training.
    A schedule is judged as `simulate` and
    `planners.chain.memory.use_of` do it: `spared_s` of a stage is saved where its
    tape is made right before its adjoint.

    Parameters
    ----------
    costs : StageCosts
    memory_bytes : int or None
        With the chain's input; None for no limit.
    rates : Tier
        A shared channel and `tapes=False` are heeded, capacity is not.
    slots : int
        Of memory, at least 1; more make the bound tighter.
    threads : int

    Raises
    ------
    ArgumentError
        Without the C core.

    Notes
    -----
    Deterministic: evaluations are counted.  0.5 s for 339 stages.

    Examples
    --------
    >>> from multistage.model.stages import Stage
    >>> costs = StageCosts.uniform(12, Stage("layer", 1.0, 2.0, 10, 30), 10)
    >>> fast, slow = Tier.of_rates(60, 60), Tier.of_rates(1, 1)
    >>> [round(joint_lower_bound(costs, 200, rates), 2) for rates in (fast, slow)]
    [36.0, 42.26]
    """
    require_core()
    true = without_loss(Sizes.of(costs))
    plain_s = float(true.forward_s.sum() + true.reverse_s.sum())
    if memory_bytes is None or len(true) > _MOST_STAGES:
        return plain_s * (1 - _DOUBLE)
    room = memory_bytes - costs.input_bytes
    if room < 1:
        return 0.0 if room == 0 else math.inf

    best, starts = -math.inf, _STARTS
    for sizes, cells, evaluations, step, directions in _stages(true, min(slots, room)):
        dual = Dual(sizes, room, rates, cells, threads)
        if rates.shared and len(directions) > _FIRST_SWEEP:
            directions += _SHARED
        value, prices = _search(dual, starts, directions, step, evaluations)
        if math.isfinite(value):
            starts = (prices,)
        if sizes is true:
            best = max(best, value)
    return max(best, plain_s) * (1 - _DOUBLE)


def _stages(
    true: Sizes, slots: int
) -> Iterator[tuple[Sizes, int, int, float, tuple[Direction, ...]]]:
    """Yield what to look for prices on, coarse first: chain, slots, evaluations, step, directions.

    The more a table costs the fewer are solved; the first sweep alone, whose
    transfers after the turn cost nothing, needs none.
    """
    few, merged = min(_FEW, slots), _merged(true, _COARSE)

    def solved(sizes: Sizes, cells: int, work: float) -> int:
        return min(_MOST, max(2, int(work / (len(sizes) ** 3 * (cells + 1)))))

    if merged is not true:
        yield merged, few, solved(merged, few, 3e8), 0.16, _DIRECTIONS
    else:
        yield true, few, solved(true, few, 2e8), 0.16, _DIRECTIONS
    yield true, few, 60, 0.08, _DIRECTIONS[:_FIRST_SWEEP]
    if len(true) <= 2 * _COARSE:
        yield true, min(4 * few, slots), solved(true, 4 * few, 1.2e9), 0.04, _DIRECTIONS
    else:
        yield true, few, solved(true, few, 6e8), 0.04, _DIRECTIONS
        slots = min(slots, 3 * few)
    yield true, slots, solved(true, slots, 1.2e9), 0.01, _DIRECTIONS


def _search(
    dual: Dual,
    starts: tuple[Prices, ...],
    directions: tuple[Direction, ...],
    step: float,
    evaluations: int,
) -> tuple[float, Prices]:
    """Return the largest value of a pattern search, and its prices."""
    best, at, left = -math.inf, starts[0], evaluations
    for prices in starts:
        value, left = dual.at(prices), left - 1
        if value > best:
            best, at = value, prices
    while step > _LAST_STEP and math.isfinite(best):
        moved = False
        for direction in directions:
            while left > 0:
                prices = _moved(at, direction, step)
                if prices == at or not dual.allows(prices):
                    break
                left -= 1
                value = dual.at(prices)
                if value <= best * (1 + 1e-9):
                    break
                best, at, moved = value, prices, True
        if left <= 0:
            break
        if not moved:
            step /= 2
    return best, at


def _moved(at: Prices, direction: Direction, step: float) -> Prices:
    a, b, c, d = (max(0.0, x + step * y) for x, y in zip(at, direction, strict=True))
    return a, b, c, d


def without_loss(whole: Sizes) -> Sizes:
    """Return the chain without its loss, which takes neither time nor memory.

    So the turn is where the adjoint of the last stage starts, which is taped in the
    first sweep: making its tape later takes no less memory and more time.
    """
    return Sizes(*(getattr(whole, field.name)[:-1] for field in fields(whole)))


def _merged(true: Sizes, most: int) -> Sizes:
    """Return the chain with neighbouring stages merged into at most `most`."""
    stages = len(true)
    if stages <= most:
        return true
    starts = np.arange(0, stages, -(-stages // most))
    ends = np.append(starts[1:], stages)
    states = np.append(0, ends)

    def merged(values: Values, reduce: np.ufunc) -> Values:
        found: Values = reduce.reduceat(values, starts)
        return found

    return Sizes(
        true.state[states],
        true.gradient[states],
        merged(true.tape, np.add),
        merged(true.advance, np.maximum),
        merged(true.taping, np.maximum),
        merged(true.reverse, np.maximum),
        merged(true.forward_s, np.add),
        merged(true.reverse_s, np.add),
        true.spared_s[ends - 1],
    )
