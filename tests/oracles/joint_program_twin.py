"""The plain twin of `native/joint_program.c`: slower, with the same plans."""

from __future__ import annotations

import math

import numpy as np

from multistage.model.tier import Tier
from multistage.planners.chain.joint_core import (
    APART,
    KEEPS_TAPE,
    MAY_STATE,
    MAY_TAPE,
    STARTS,
    STATE_AWAY,
    TAPE_AWAY,
    Program,
)
from multistage.planners.chain.sizes import Sizes
from multistage.planners.chain.table import Table
from multistage.support.arrays import Bytes, Integers, Reals

_MOST_ENDS = 120  # as in joint_program.h
_FLOAT = np.float32
_INFINITE = _FLOAT(np.inf)


def solve(
    true: Sizes,
    table: Table,
    unit_bytes: float,
    limit: int,
    rates: Tier,
    may: list[int],
    program: Program,
    shares: tuple[float, ...],
) -> list[Bytes]:
    """Return the plans that the program finds best for shares of the limit."""
    solved = _Solve(true, table, unit_bytes, limit, rates, may, program)
    for s in range(solved.n - 1, -1, -1):
        solved.gather(s)
        for f in range(3 if s else 1):
            for w in range(program.steps + 1):
                solved.row(f, s, w)
        if s:
            for w in range(program.steps + 1):
                solved.row_apart(s, w)
    plans = []
    for share in shares:
        m = min(solved.slots, int(share * float(limit) / (unit_bytes * program.stride)))
        if solved.least[0, 0, 0, m] < _INFINITE:
            plans.append(solved.read_off(m))
    return [plan for plan in plans if plan is not None]


class _Solve:
    def __init__(
        self,
        true: Sizes,
        table: Table,
        unit: float,
        limit: int,
        rates: Tier,
        may: list[int],
        p: Program,
    ) -> None:
        self.true, self.table, self.rates, self.may, self.p = true, table, rates, may, p
        self.n = n = len(true)
        self.slots = table.slots // p.stride
        slot = unit * p.stride
        self.state, self.grad = self._whole(true.state, slot), self._whole(true.gradient, slot)
        self.tape, self.taping = self._whole(true.tape, slot), self._whole(true.taping, slot)
        self.advance = self._whole(true.advance, slot)
        self.reverse = self._whole(true.reverse, slot)
        self.forward_s = _total(true.forward_s)
        mean = _total(true.tape.astype(float)) / n
        write_s = p.speed * (rates.write_s + mean / rates.write_bytes_per_s)
        fixed_s = p.speed * rates.write_s * (float(limit) / mean) if mean > 0 else 0.0
        all_s = p.speed * float(limit) / rates.write_bytes_per_s + fixed_s
        step_s = min(all_s, 1.2 * self.forward_s) / p.steps
        if p.fineness > 0 and write_s / p.fineness < step_s:
            step_s = write_s / p.fineness
        if not step_s > 1e-9 * self.forward_s:
            step_s = 1e-9 * self.forward_s
        self.step = step_s / self.forward_s
        held = step_s / write_s * mean / slot if write_s > 0 else 0.0
        self.bytes_per_step = min(held, 1e6)
        self._round_times()
        recent = max(4, n // 3)
        self.staged = [
            max((int(p.staging * self.tape[j]) for j in range(max(0, s - recent), s)), default=0)
            for s in range(n)
        ]
        shape = (n + 1, p.steps + 1, self.slots + 1)
        self.least = np.full((3, *shape), _INFINITE, _FLOAT)
        self.apart = np.full(shape, _INFINITE, _FLOAT)
        self.ends: list[int] = []
        self.excess: list[Reals] = []

    @staticmethod
    def _whole(values: Integers, slot: float) -> list[int]:
        return [int(x) for x in np.minimum(np.rint(values / slot), 1e6)]

    def _round_times(self) -> None:
        scale = self.p.speed / self.forward_s
        clock, sums = 0.0, [0.0, 0.0]
        self.clock: list[int] = []
        self.steps: tuple[list[int], list[int]] = [], []
        for i in range(self.n + 1):
            self.clock.append(int(clock / self.forward_s / self.step))
            if i == self.n:
                return
            clock += float(self.true.forward_s[i])
            for kind, sizes in enumerate((self.true.state, self.true.tape)):
                nbytes = float(sizes[i])
                took = scale * (self.rates.write_s + nbytes / self.rates.write_bytes_per_s)
                took /= self.step
                most = min(took, 1e6)
                if took > 1.5:
                    self.steps[kind].append(math.ceil(most - 0.2))
                else:
                    self.steps[kind].append(int(sums[kind] + took) - int(sums[kind]))
                sums[kind] += most

    def gather(self, s: int) -> None:
        """Take the ends of segments from s, and their excess, the last segment's at the end."""
        self.ends, e = [], s
        while e < self.n - 1:
            self.ends.append(e)
            e += max(1, (e - s) // 8 if self.n > _MOST_ENDS else 0)
        self.excess = [
            self.table.values(s, e)[:: self.p.stride][: self.slots + 1]
            for e in (*self.ends, self.n - 1)
        ]

    def _after(self, w: int, s: int, e: int) -> int:
        return max(0, w + self.clock[s] - self.clock[e])

    def _landing(self, f: int, s: int) -> int:
        return 0 if f == 0 else self.tape[s - 1] if f == 1 else self.state[s]

    def _input(self, f: int, s: int) -> int:
        return self.state[s] if f else 0

    def _backlog(self, w: int, s: int) -> int:
        return int(w * self.bytes_per_step) + (self.staged[s] if w else 0)

    def _to_tape(self, f: int, s: int) -> int:
        grad = self.grad
        own = max(grad[self.n] + self.taping[s], grad[s + 1] + grad[s] + self.reverse[s])
        return self.tape[s] + own + max(self._landing(f, s), self._input(f, s))

    def _price(self, nbytes: int) -> np.float32:
        rates = self.rates
        read_s = rates.read_s + float(nbytes) / rates.read_bytes_per_s
        overhead_s = rates.write_overhead_s + rates.read_overhead_s
        priced_s = self.p.read_price * self.p.speed * read_s + overhead_s
        return _FLOAT(priced_s / self.forward_s)

    def _share(self, s: int, e: int) -> np.float32:
        prefix = self.table.prefix
        return _FLOAT(prefix[e + 1] - prefix[s])

    def _needs(self, s: int) -> list[int]:
        """Return what s..e need to run, their input not counted, for each end."""
        found, run, reached = [], 0, s
        for e in self.ends:
            while reached <= e:
                before = 0 if reached == s else self.state[reached]
                need = before + self.state[reached + 1] + self.advance[reached]
                run = max(run, need + self.grad[self.n])
                reached += 1
            found.append(run)
        return found

    def row(self, f: int, s: int, w: int) -> None:
        """Solve least[f][s][w]."""
        n, p, out = self.n, self.p, self.least[f, s, w]

        def take(start: int, other: Reals, shift: int, add: np.float32) -> None:
            start = max(start, shift)
            if start <= self.slots:
                values = other[start - shift : self.slots + 1 - shift] + add
                np.minimum(out[start:], values, out=out[start:])

        held, lands = self._input(f, s), self._landing(f, s) + p.reserve
        rest = held + self._backlog(self._after(w, s, n - 1), n - 1)
        take(rest, self.excess[-1], rest, _FLOAT(0))
        for k, (e, run) in enumerate(zip(self.ends, self._needs(s), strict=True)):
            start = max(lands, run + held + self._backlog(w, s))
            if start <= self.slots:
                left = self.excess[k][start - lands : self.slots + 1 - lands]
                right = self.apart[e + 1, self._after(w, s, e + 1)][start:]
                np.minimum(out[start:], left + right + self._share(s, e), out=out[start:])
        if s < n - 1:
            start, then = self._to_tape(f, s) + self._backlog(w, s), self._after(w, s, s + 1)
            queued = then + self.steps[1][s]
            take(start, self.least[0, s + 1, then], self.tape[s], _FLOAT(0))
            if queued <= p.steps and self.may[s] & MAY_TAPE:
                price = self._price(int(self.true.tape[s]))
                take(start + p.reserve, self.least[1, s + 1, queued], 0, price)
                take(start + p.reserve, self.apart[s + 1, queued], 0, price)
        if w:
            take(0, self.least[f, s, w - 1], 0, _FLOAT(self.step))

    def row_apart(self, s: int, w: int) -> None:
        """Solve apart[s][w]."""
        out, kept = self.apart[s, w], self.state[s]
        if kept <= self.slots:
            out[kept:] = self.least[0, s, w][: self.slots + 1 - kept]
        queued = w + self.steps[0][s]
        if queued <= self.p.steps and self.may[s] & MAY_STATE:
            away = self.least[2, s, queued] + self._price(int(self.true.state[s]))
            np.minimum(out, away, out=out)

    # ---------------------------------------------------------------- reading off

    def read_off(self, memory: int) -> Bytes | None:
        """Return the fates of the best plan."""
        n, fates = self.n, np.zeros(self.n, np.uint8)
        s, m, w, f = 0, memory, 0, 0
        while s < n:
            fates[s] |= STARTS
            best = self.least[f, s, w, m]
            while w and self.least[f, s, w - 1, m] + _FLOAT(self.step) <= best:
                w -= 1
                best = self.least[f, s, w, m]
            self.gather(s)
            rest = self._input(f, s) + self._backlog(self._after(w, s, n - 1), n - 1)
            if m >= rest and self.excess[-1][m - rest] <= best:
                return fates
            place = self._go_tape(fates, s, m, w, f, best) if s < n - 1 else None
            place = place or self._go_segment(fates, s, m, w, f, best)
            if place is None:
                return None
            s, m, w, f = place
        return fates

    def _go_tape(
        self, fates: Bytes, s: int, m: int, w: int, f: int, best: np.float32
    ) -> tuple[int, int, int, int] | None:
        then, start = self._after(w, s, s + 1), self._to_tape(f, s) + self._backlog(w, s)
        queued, price = then + self.steps[1][s], self._price(int(self.true.tape[s]))
        left = m - self.tape[s]
        if m >= start and left >= 0 and self.least[0, s + 1, then, left] <= best:
            fates[s] |= KEEPS_TAPE
            return s + 1, left, then, 0
        if m < start + self.p.reserve or queued > self.p.steps or not self.may[s] & MAY_TAPE:
            return None
        inside = self.least[1, s + 1, queued, m] + price <= best
        if not inside and not self.apart[s + 1, queued, m] + price <= best:
            return None
        fates[s] |= KEEPS_TAPE | TAPE_AWAY
        if inside:
            return s + 1, m, queued, 1
        fates[s + 1] |= APART
        return self._go_apart(fates, s + 1, m, queued)

    def _go_apart(self, fates: Bytes, s: int, m: int, w: int) -> tuple[int, int, int, int]:
        queued, kept = w + self.steps[0][s], self.state[s]
        fates[s] |= STARTS
        away = _INFINITE
        if queued <= self.p.steps and self.may[s] & MAY_STATE:
            away = self.least[2, s, queued, m] + self._price(int(self.true.state[s]))
        if m >= kept and self.least[0, s, w, m - kept] <= away:
            return s, m - kept, w, 0
        fates[s] |= STATE_AWAY
        return s, m, queued, 2

    def _go_segment(
        self, fates: Bytes, s: int, m: int, w: int, f: int, best: np.float32
    ) -> tuple[int, int, int, int] | None:
        lands = self._landing(f, s) + self.p.reserve
        held = self._input(f, s) + self._backlog(w, s)
        for k, (e, run) in enumerate(zip(self.ends, self._needs(s), strict=True)):
            if m < max(lands, run + held):
                continue
            then = self._after(w, s, e + 1)
            here = self.excess[k][m - lands] + self.apart[e + 1, then, m] + self._share(s, e)
            if here <= best:
                return self._go_apart(fates, e + 1, m, then)
        return None


def _total(values: Reals) -> float:
    """Return the sum in the order of the C core; NumPy's differs in the last bits."""
    total = 0.0
    for value in values:
        total += float(value)
    return total
