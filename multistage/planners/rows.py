"""The (min,+) kernel of the synchronous planners: one row of a dynamic program at a time.

With `below`, what the row's level saves nothing on, and `right`, the costs with
one slot less, a row is

    P(l) = min( below(l), min over 0 < j < l of  ahead(j) + P(j) + right(l-j) )
    O(l) = min( below(l), write + P(l) )

for l = 2, 3, ... in turn: l^2 / 2 sums.  P and O ascend, so that most blocks of
candidates are passed over by their ends alone once a good candidate is known;
the row without bound (`right` is its own O) looks at all of them, because it
also needs, among equals, the choice that takes the fewest slots.

The C kernel adds and compares what its plain twin here does.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .. import native
from ..errors import ArgumentError
from ..support.arrays import Integers, Reals

# Sums per second on one core: of a row without bound, of one that passes most
# of them over, and of the plain twin.
WHOLE_PER_S, PRUNED_PER_S, PLAIN_PER_S = 3e9, 1e10, 4e8
# What solving may take at most, and what it may take where a planner asks for it.
# The walk, the bound and a busy machine have their share of the second.
MOST_S, PLANNING_S = 60.0, 0.7
_MOST_BYTES = 4 << 30
# Sums per call of the kernel: a fraction of a second, so that Ctrl-C is heard.
_PER_CALL = 1e9
# Python's part of a row, for all of them and per length.
_PER_ROW_S, _PER_LENGTH_S = 25e-6, 1e-8


@dataclass(slots=True)
class Rows:
    """Arrays by length, 0..n (entry 0 unused), from which one row is filled.

    Attributes
    ----------
    ahead : array
        Seconds of j steps and one read.
    below : array
        O of the level below.
    write_s : float
    """

    ahead: Reals
    below: Reals
    write_s: float

    @property
    def n(self) -> int:
        """The longest length."""
        return len(self.below) - 1

    def blank(self) -> Reals:
        """Return a row or an `over` before it is filled: one step costs nothing."""
        return np.zeros(self.n + 1)

    def fill(
        self,
        first: int,
        right: Reals,
        row: Reals,
        over: Reals,
        depths: tuple[Integers, Integers] | None = None,
        *,
        native_kernel: bool | None = None,
    ) -> None:
        """Fill `row` and `over` for lengths `first`..n, all shorter ones being right.

        Parameters
        ----------
        right, over : array
            O with one slot less, and O of this row, both reversed: of length l
            at n - l.  The same array for the row without bound.
        row : array
            P by length.
        depths : pair of int32 arrays, optional
            For the row without bound: gets the slots that P and O take.

        Notes
        -----
        Releases the interpreter lock; Ctrl-C is answered within about a second.
        """
        n, left = self.n, self.ahead + row
        use_native = native.available() if native_kernel is None else native_kernel
        if not use_native:
            self._fill_plainly(first, right, left, row, over, depths)
            return
        library = native.library()
        blocks = np.empty(int(library.ms_hierarchy_blocks(n)))
        isa = int(library.ms_chain_isa())
        depth, over_depth = (a.ctypes.data for a in depths) if depths else (None, None)
        while first <= n:
            last = min(n, max(first, math.isqrt(first * first + int(2 * _PER_CALL))))
            library.ms_hierarchy_row(
                n,
                first,
                last,
                self.ahead.ctypes.data,
                self.write_s,
                self.below.ctypes.data,
                right.ctypes.data,
                left.ctypes.data,
                row.ctypes.data,
                over.ctypes.data,
                depth,
                over_depth,
                blocks.ctypes.data,
                isa,
            )
            first = last + 1

    def _fill_plainly(
        self,
        first: int,
        right: Reals,
        left: Reals,
        row: Reals,
        over: Reals,
        depths: tuple[Integers, Integers] | None,
    ) -> None:
        """Do what the C kernel does, sum by sum: its twin."""
        n, below = self.n, self.below
        for length in range(first, n + 1):
            sums = left[1:length] + right[n - length + 1 : n]
            split = sums.min()
            row[length] = value = min(below[length], split)
            left[length] = self.ahead[length] + value
            over[n - length] = min(below[length], self.write_s + value)
            if depths is None:
                continue
            depth, over_depth = depths
            if below[length] <= split:
                depth[length] = 1  # its own state, which may be released at once
            else:
                ties = np.flatnonzero(sums == split)
                depth[length] = np.maximum(over_depth[length - 1 - ties] + 1, depth[ties + 1]).min()
            goes_below = below[length] <= self.write_s + value
            over_depth[length] = 0 if goes_below else depth[length]


def affordable(
    n_steps: int,
    slots: int | None,
    sums: float,
    size: float,
    native_kernel: bool | None,
    otherwise: str,
    most_s: float = MOST_S,
) -> None:
    """Raise `ArgumentError` where so many sums and bytes are too much.

    `otherwise` ends the message: what to use instead.  Every slot is one row.  Without
    the C core the limit is `MOST_S` whatever `most_s` says.
    """
    plainly = native_kernel is False or native.LIBRARY is None
    seconds = sums / (PLAIN_PER_S if plainly else PRUNED_PER_S)
    seconds += (slots or 1) * (_PER_ROW_S + n_steps * _PER_LENGTH_S)
    most_s = MOST_S if plainly else most_s
    if seconds > most_s or size > _MOST_BYTES:
        what = "a level without bound" if slots is None else f"{slots} slots"
        raise ArgumentError(
            f"n_steps={n_steps} with {what} would take about {seconds:.2g} s and "
            f"{size / 2**30:.1f} GiB to solve, more than {most_s:g} s or "
            f"{_MOST_BYTES >> 30} GiB; plan for fewer steps or slots, or use {otherwise}"
        )
