"""The dual of a chain with a slow tier: a lower bound for any prices, see `joint_bound`."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass
from functools import cached_property
from typing import TypeAlias

import numpy as np

from ... import native
from ...model.tier import Tier
from ...support.arrays import Flags, Integers, Reals
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

    def __init__(
        self,
        true: Sizes,
        room: int,
        rates: Tier,
        slots: int,
        threads: int,
    ) -> None:
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
