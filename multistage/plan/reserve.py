"""When to give up a slot for the next read inside an interval that wants every slot.

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
O(l^2) for one f; lengths above `EXACT_LENGTH` follow Revolve's own advance.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from .. import native
from ..costs import Costs
from ..layout import Array
from .binomial import first_advance, nu

EXACT_LENGTH = 512


@dataclass(slots=True)
class Reservation:
    """Where each interval gives up a slot for the next read.

    Parameters
    ----------
    costs : Costs
        T_A, T_B and the first tier's T_R.
    """

    costs: Costs
    _tables: dict[int, tuple[Array, Array]] = field(default_factory=dict, repr=False)
    _kernels: Array | None = field(default=None, repr=False)

    def kernel_tables(self) -> Array:
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
        return int(self._table(free, length)[1][length])

    def seconds(self, length: int, free: int) -> float:
        """Return V(length): seconds until the interval and the next read are done."""
        tier = self.costs.tier
        read_s = tier.read_s if tier else 0.0
        if length > EXACT_LENGTH:
            return self.reverse_s(length, free)
        if free < 1:
            return self.reverse_s(length, free) + read_s
        return float(self._table(free, length)[0][length])

    def reverse_s(self, length: int, free: int) -> float:
        """Return D(length, free): an undisturbed reversal, its first state held beside `free`."""
        return length * self.costs.turn_s + nu(length, free + 1) * self.costs.forward_step_s

    def _table(self, free: int, length: int) -> tuple[Array, Array]:
        have = self._tables.get(free)
        if have is not None and len(have[0]) > length:
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
        self._tables[free] = value, choice
        return value, choice
