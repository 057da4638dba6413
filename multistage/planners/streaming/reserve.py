"""When to give up a slot for the next read inside an interval that needs every slot.

An interval of l steps is reversed by Revolve with f free slots while the
read of the interval below (T_R seconds) should hide behind it.  Reading from
the start costs one of the f slots all along; reading at the end leaves the
computing thread waiting.  In between lies the switch: Revolve's recursion
works off the interval from its end, and only its lowest part, the spine, is
still to do when the others are done.  With D(l, f) the time of an undisturbed
reversal of l steps whose first state is held,

    V(l) = min( max(D(l, f-1), T_R),                        switch now
                min over m of m T_A + D'(l-m, f) + V(m) )    switch further down

where D' is the part above the first advance, m steps on, with its own save.

The first state of the interval, which is in the tier, holds a slot all along.
It may give it up instead, m steps on, for the part above, and be read again
behind that part as the next interval would be:

    W(l) = min( V(l),                                       keep the first state
                min over m of m T_A + V(l-m) + W(m) )       read it again

O(l^2) for one f.  Lengths above `EXACT_LENGTH` follow Revolve's own advance
and keep the first state.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ... import native
from ...model.costs import Costs
from ...support.arrays import Integers, Reals
from ..single.binomial import first_advance, nu

EXACT_LENGTH = 512
# What a second read takes besides: Free, Get, Await, Load, and Save and Free of the upper part.
AGAIN_ACTIONS = 6


class _Table(NamedTuple):
    """For one number of free slots and each length: V, its advance, and that of W."""

    value: Reals
    choice: Integers
    again: Integers


@dataclass(slots=True)
class Reservation:
    """Where each interval gives up a slot for the next read.

    Parameters
    ----------
    costs : Costs
        T_A, T_B and the first tier's T_R, with what a read costs the computing thread.
    """

    costs: Costs
    _tables: dict[int, _Table] = field(default_factory=dict, repr=False)
    _kernels: Integers | None = field(default=None, repr=False)

    def kernel_tables(self) -> Integers:
        """Return what the C core keeps of these tables from one call to the next."""
        if self._kernels is None:
            self._kernels = np.zeros(int(native.library().ms_sweep_tables_len()), np.int64)
        return self._kernels

    def advance(self, length: int, free: int) -> int:
        """Return the next advance of the spine, or 0 to give up the slot now."""
        if length <= 1 or free < 1:
            return 0
        if length > EXACT_LENGTH:
            return first_advance(length, free + 1)
        return int(self._table(free, length).choice[length])

    def again(self, length: int, free: int) -> int:
        """Return after how many steps the first state leaves its slot and is read again, or 0."""
        if not 2 < length <= EXACT_LENGTH or free < 1:
            return 0
        return int(self._table(free, length).again[length])

    def _table(self, free: int, length: int) -> _Table:
        have = self._tables.get(free)
        if have is not None and len(have.value) > length:
            return have
        size = min(EXACT_LENGTH, max(64, 2 * length)) + 1
        tier = self.costs.tier
        read_s = tier.read_s if tier else 0.0
        step_s, turn_s = self.costs.forward_step_s, self.costs.turn_s
        lengths = np.arange(size, dtype=float)
        own = np.array([nu(k, free) if free else k * (k - 1) / 2 for k in range(size)], dtype=float)
        one_less = lengths * turn_s + own * step_s  # D(l, f-1), and D'(l, f)
        value = np.zeros(size)
        choice = np.zeros(size, dtype=int)
        for k in range(1, size):
            value[k] = max(one_less[k], read_s)
            if k > 1:
                m = np.arange(1, k)
                deeper = m * step_s + one_less[k - m] + value[m]
                best = int(np.argmin(deeper))
                if deeper[best] < value[k] - 1e-12:
                    value[k], choice[k] = deeper[best], best + 1
        table = _Table(value, choice, self._read_again(value))
        self._tables[free] = table
        return table

    def _read_again(self, value: Reals) -> Integers:
        """Return the advance of W for each length, 0 where the first state keeps its slot."""
        tier, step_s = self.costs.tier, self.costs.forward_step_s
        least, again = value.copy(), np.zeros(len(value), dtype=int)
        extra_s = AGAIN_ACTIONS * self.costs.action_s + (tier.read_overhead_s if tier else 0.0)
        for k in range(3, len(value)):
            m = np.arange(1, k - 1)  # the upper part has two steps at least
            parts = m * step_s + value[k - m] + least[m]
            best = int(np.argmin(parts))
            if parts[best] + extra_s < value[k] - 1e-12:
                least[k], again[k] = parts[best] + extra_s, best + 1
        return again
