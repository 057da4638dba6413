"""The ladder of memory limits that tables are solved for, so that more memory is never slower."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ... import native
from ...support.progress import counting
from .bound import SLOTS as BOUND_SLOTS
from .bound import ChainBound
from .sizes import Sizes
from .table import FLOAT_ERROR, Table
from .traces import Trace, judge

# Schedules of more slots than the limit has may fit: sizes were rounded up too.
MORE = 1.15
# Ratio of neighbouring rungs of the ladder of limits.
_RUNG = 1.3
# Of a rung's slots, if sizes are rounded less by it.
_FINER = 1.15


class Ladder:
    """The rungs of limits that tables are solved for.

    Rung k stands for `whole / 1.3^k` bytes, which are cut into about `slots`.  Its
    schedules are those of its table whose true peak is at most 1.15 times
    that; so a rung's schedules do not depend on the limit asked for.
    """

    def __init__(self, true: Sizes, whole: int, slots: int, tapes: bool, threads: int) -> None:
        self.true, self.whole, self.slots = true, max(1, whole), slots
        self.tapes, self.threads = tapes, threads
        self._first: Table | None = None

    def first(self, limit: int) -> tuple[Table, float]:
        """Return the table of the highest rung for a limit, and the bytes of its slots."""
        top = self._top(limit)
        self._first = self._table(top, lambda: None)
        return self._first, self._unit(top)

    def _top(self, limit: int) -> float:
        rung = max(0, math.floor(math.log(self.whole / max(1, limit)) / math.log(_RUNG)))
        return float(self.whole / _RUNG**rung)

    def best(self, limit: int, least: Trace, progress: bool | None = False) -> Trace:
        """Return the fastest schedule with a true peak of at most `limit` bytes.

        `least` is one that fits.  The chain's input is not counted.
        """
        best = least
        best_s, least_peak = judge(self.true, least)
        top = self._top(limit)
        more = int(self.slots * MORE * _FINER)
        rungs = 1 + max(0, int(math.log(max(1.0, top * MORE / max(1, least_peak)), _RUNG)))
        calls = Table.calls_of(BOUND_SLOTS) + rungs * Table.calls_of(more)  # at most
        with counting("solving", calls, progress) as tick:
            return self._best(limit, (best, best_s, least_peak), top, lambda: tick(""))

    def _best(
        self, limit: int, least: tuple[Trace, float, int], top: float, tick: Callable[[], object]
    ) -> Trace:
        best, best_s, least_peak = least
        bound = None  # which spares solving rungs, if there is the C core
        if native.LIBRARY is not None:
            bound = ChainBound(
                self.true, max(1, limit), tapes=self.tapes, threads=self.threads, tick=tick
            )
        margin_s = FLOAT_ERROR * float(self.true.forward_s.sum())
        while top * MORE >= max(1, least_peak):
            cap = min(limit, math.floor(top * MORE))
            if bound is not None and bound.seconds(cap) - margin_s >= best_s:
                break  # and so it is for all rungs below
            table = self._first or self._table(top, tick)
            self._first = None
            seconds, memory = table.fastest(self.true, cap)
            if seconds < best_s:
                trace = table.trace(memory)
                assert trace is not None
                best, best_s = trace, seconds
            del table  # before the next is made
            top /= _RUNG
        return best

    def _unit(self, top: float) -> float:
        """Return the bytes of a slot of a rung.

        Another than `top / slots`, by half at most, only if it rounds tapes by less
        than half as much: where stages are equal.
        """
        sizes = self.true.tape.astype(float)
        units = top / self.slots * np.append(1.0, np.geomspace(1 / _FINER, 1.5, 48))
        off = [float(np.abs(np.rint(sizes / unit) * unit - sizes).sum()) for unit in units]
        at = int(np.argmin(off))
        return float(units[at] if off[at] < off[0] / 2 else units[0])

    def _table(self, top: float, tick: Callable[[], object]) -> Table:
        unit = self._unit(top)
        sizes = self.true.in_slots(unit)
        slots = int(top * MORE / unit)
        return Table(sizes, slots, tapes=self.tapes, threads=self.threads, tick=tick)
