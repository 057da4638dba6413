"""A lower bound of chains without a tier: where the search of schedules may stop.

The dual of `planners.chain.joint_bound` without transfers, with one price: of a byte kept when
the adjoint of the last stage starts.  What is kept then is so counted to the byte; what
is recomputed later comes from a table of few slots, sizes rounded down.  Rounding down
alone says little where stages are nearly as many as slots.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ...model.tier import Tier
from .joint_bound import Dual, without_loss
from .sizes import Sizes
from .table import Table

SLOTS = 100
# Of all forward seconds, for a limit's bytes; the bound is concave in it.
_PRICES = (0.0, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 3.0, 5.0)
_NO_TIER = Tier.of_rates(1.0, 1.0)


class ChainBound:
    """Seconds that no schedule without a tier undercuts, for any memory up to a limit.

    Parameters
    ----------
    whole : Sizes
        In bytes, the loss included.
    limit : int
        Bytes, at least 1, the chain's input not counted.
    tapes : bool
        Whether tapes may be kept; see `Table`.
    threads : int
    tick : callable, optional
        Called `Table.calls_of(SLOTS)` times by the C kernel.
    """

    def __init__(
        self,
        whole: Sizes,
        limit: int,
        *,
        tapes: bool = True,
        threads: int = 1,
        tick: Callable[[], object] | None = None,
    ) -> None:
        true = without_loss(whole)
        self._true, self._limit = true, limit
        self._dual = Dual(true, limit, _NO_TIER, min(SLOTS, limit), threads)
        table = Table(self._dual.sizes, self._dual.slots, tapes=tapes, threads=threads, tick=tick)
        self._planes = table.planes()
        n = len(true)
        self._state, self._tape = (x[:n].astype(float) for x in (true.state, true.tape))
        if not tapes:
            self._tape[:-1] = math.inf
        self._forward_s = float(true.forward_s.sum())
        self._plain_s = self._forward_s + float(true.reverse_s.sum())
        self._last = int(true.tape[-1] + true.gradient[-1] + true.gradient[-2] + true.reverse[-1])
        self._at = _PRICES.index(0.5)

    def seconds(self, memory: int) -> float:
        """Return the bound for `memory` bytes, at most the limit; infinite if nothing fits."""
        found = {self._at: self._value(self._at, memory)}
        if math.isinf(found[self._at]):
            return math.inf

        def value(at: int) -> float:
            if at not in found:
                found[at] = self._value(at, memory) if 0 <= at < len(_PRICES) else -math.inf
            return found[at]

        for step in (-1, 1):
            while value(self._at + step) > value(self._at):
                self._at += step
        return value(self._at)

    def _value(self, at: int, memory: int) -> float:
        price = _PRICES[at] * self._forward_s / self._limit
        slots = memory * self._dual.slots // self._limit
        never, free = np.full(len(self._true), math.inf), np.zeros(len(self._true))
        with np.errstate(invalid="ignore"):
            fast_tape = np.where(np.isinf(self._tape), math.inf, price * self._tape)
        prices = (price * self._state, fast_tape, never, never, never, never, free, free)
        least = self._dual.least(1.0, self._planes, prices, slots)
        if math.isinf(least):
            return least
        rounding = self._dual.rounding(1.0, least)
        return self._plain_s + least - price * (memory - self._last) - rounding
