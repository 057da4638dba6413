"""H-Revolve and Disk-Revolve: the optimum where transfers stop the computing.

Herrmann & Pallez 2020, ACM TOMS 46(2), doi:10.1145/3378672, for any number of
tiers with their own capacity, write and read costs; Aupy, Herrmann, Hovland &
Robert 2016, doi:10.1137/15M1019222, is the case of one tier without bound.

A state on its way to or from a tier takes a fast slot.  At every transfer of
these schedules all fast slots are free, so that none need be kept for it.

Optimal among the schedules that wait for each transfer where some order of the
tiers is that of both their write and their read costs; else the best of a few
orders.  With tiers that do overlap, `streaming` is faster.  About n^2 / 2 sums
per tier without bound and at most c n^2 / 2 with c states; a choice costs O(n)
again in the schedule.  Known gaps: `action_s` does not enter the choice, and
tapes are made right before their adjoint only.

The dynamic program
-------------------
Level 0 is the fast memory; level k holds c_k states, each written in w_k and
read in r_k seconds while nothing else happens.  In seconds beyond the turns,
P_k(l, m) is the cost of reversing l steps whose first state is live and held
in level k, with m slots of that level (its own among them) and all of the
levels below; O_k(l, m) is the same with the state not yet held:

    P_k(l, m) = min( O_{k-1}(l, c_{k-1}),
                     min over 0 < j < l of
                     j T_A + O_k(l-j, m-1) + r_k + P_k(j, m) )
    O_k(l, m) = min( O_{k-1}(l, c_{k-1}), w_k + P_k(l, m) )
    P_k(1, m) = O_k(1, m) = 0

A level 0 that costs nothing is binomial checkpointing: O_0(l, m) = nu(l, m) T_A.
For every other level

1. the row without bound, P_k(l, inf), needs itself alone: l^2 / 2 sums;
2. beside it goes the number of slots d(l) that it takes.  Where d(l) <= m, row
   m has the same value; where d <= c_k throughout, no other row is needed;
3. row m is filled from the first l with d(l) > m on.

Where no level is cheaper to write or to read than the one before it, as cheap
as the best of all synchronous schedules on every instance that a search
manages.  Not so in other orders: a checkpoint at level k lies before those at
the levels below, and with a costly level 0 over a free level 1 that is wrong.
Choices are found again while walking, O(l) each.  O(n) memory without bound,
else O(c_k n).

`Rows` is the (min,+) kernel, also of `mixed`: one row of a dynamic program at a time.  With
`below`, what the row's level saves nothing on, and `right`, the costs with one slot less, a
row is

    P(l) = min( below(l), min over 0 < j < l of  ahead(j) + P(j) + right(l-j) )
    O(l) = min( below(l), write + P(l) )

for l = 2, 3, ... in turn.  P and O ascend, so that most blocks of candidates are passed over
by their ends alone once a good candidate is known; the row without bound (`right` is its own
O) looks at all of them, because it also needs, among equals, the choice that takes the fewest
slots.  The C kernel adds and compares what its plain twin here does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np

from ... import native
from ...actions import Advance, Drop, Free, Get, Load, Put, Save, Schedule, Tape, drive, waited
from ...errors import ArgumentError
from ...model.costs import Costs
from ...model.tier import Tier
from ...support.arrays import Integers, Reals
from ..predict import Counts, Draft, counted, planner, transfer_s
from ..single.binomial import NuTable, forward_and_reverse, reverse_actions
from ..single.revolve import plain_revolve

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
PER_ROW_S, PER_LENGTH_S = 25e-6, 1e-8


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
    seconds += (slots or 1) * (PER_ROW_S + n_steps * PER_LENGTH_S)
    most_s = MOST_S if plainly else most_s
    if seconds > most_s or size > _MOST_BYTES:
        what = "a level without bound" if slots is None else f"{slots} slots"
        raise ArgumentError(
            f"n_steps={n_steps} with {what} would take about {seconds:.2g} s and "
            f"{size / 2**30:.1f} GiB to solve, more than {most_s:g} s or "
            f"{_MOST_BYTES >> 30} GiB; plan for fewer steps or slots, or use {otherwise}"
        )


_INSTEAD = "planner 'periodic-disk', whose cost does not grow so"


@dataclass(frozen=True, slots=True)
class Level:
    """One level of memory.

    Attributes
    ----------
    capacity : int or None
        States it holds; None if unbounded.
    write_s, read_s : float
        Seconds the computing thread spends per state.
    """

    capacity: int | None
    write_s: float = 0.0
    read_s: float = 0.0


@dataclass(slots=True)
class Table:
    """One solved level.

    Attributes
    ----------
    slots : int
        Slots that make a difference; 0 where the level is of no use.
    rows : list of array
        P for 1, 2, ..., `slots` slots; the one without bound where `depths` is set.
    depths : pair of array or None
        Slots taken by P and O without bound; they fit the level's capacity.
    """

    basis: Rows
    slots: int
    rows: list[Reals] = field(default_factory=list)
    depths: tuple[Integers, Integers] | None = None

    def row(self, slots: int) -> Reals:
        """Return P with that many slots, at least 1."""
        return self.rows[0] if self.depths else self.rows[slots - 1]

    def over(self, slots: int, stop: int) -> Reals:
        """Return O with that many slots for the lengths below `stop`."""
        below: Reals = self.basis.below[:stop]
        if slots < 1 and self.depths is None:
            return below
        over: Reals = np.minimum(below, self.basis.write_s + self.row(slots)[:stop])
        over[:2] = 0.0
        return over

    def pays(self, length: int, slots: int) -> bool:
        """Whether to write the first state of `length` steps to this level."""
        if not self.rows or (slots < 1 and self.depths is None):
            return False
        written_s = self.basis.write_s + self.row(slots)[length]
        return bool(written_s < self.basis.below[length])

    def split(self, length: int, slots: int) -> int:
        """Return j, where the first of `length` > 1 steps are split, or 0: go below instead."""
        own, above = self.row(slots), self.over(slots if self.depths else slots - 1, length)
        sums = (self.basis.ahead[1:length] + own[1:length]) + above[length - 1 : 0 : -1]
        least = sums.min()
        if self.basis.below[length] <= least:
            return 0
        if self.depths is None:
            return int(sums.argmin()) + 1
        # The choice that takes fewest slots: only so does the level's capacity suffice.
        depth, over_depth = self.depths
        ties = np.flatnonzero(sums == least)
        taken = np.maximum(over_depth[length - 1 - ties] + 1, depth[ties + 1])
        return int(ties[taken.argmin()]) + 1


@dataclass(slots=True)
class Hierarchy:
    """A solved hierarchy; see `solve`.

    Attributes
    ----------
    n_steps : int
    levels : tuple of Level
    tables : list of Table or None
        One per level; None for a level 0 that costs nothing.
    seconds : float
        Cost beyond the turns: forward steps, writes and reads.
    """

    n_steps: int
    levels: tuple[Level, ...]
    tables: list[Table | None]
    seconds: float

    def schedule(self, tiers: Sequence[int] | None = None) -> Schedule:
        """Yield the actions of the optimal schedule lazily, in O(slots + stored states) memory.

        Level 0 are the fast slots if it costs nothing; level k is tier `tiers[k-1]`, or k - 1.
        A checkpoint that is lost lets its interval merge with the one before, and its level is
        written to no more: a level that failed once may fail always, and every lost checkpoint
        costs its interval again.  Where all are lost, state 0 serves.
        """
        n, fast = self.n_steps, self.levels[0].capacity
        fast = n if fast is None else fast
        tiers = range(-1, len(self.levels) - 1) if tiers is None else (-1, *tiers)
        held: list[tuple[int, int, int]] = []  # step, level, slots of the level left to it
        failed: set[int] = set()
        live, end, landed = 0, n, False  # whether a slot still holds the live state from its read
        level, slots = self._top(len(self.tables) - 1)
        while True:
            level, slots = self._where(end - live, level, slots, failed)
            if landed and (level >= 0 or end - live == 1):
                yield Free(live)
                landed = False
            if level < 0:
                piece = reverse_actions(live, end, fast - landed, keep_first=landed)
                yield from (piece if end < n else forward_and_reverse(piece))
                if landed:
                    yield Free(live)
                landed, end = False, live
                if end == 0:
                    return
                while held and not landed:
                    live, level, slots = held[-1]
                    landed = yield from waited(Get(live, tiers[level]))
                    if not landed:
                        failed.add(level)
                        held.pop()
                yield Load(live if landed else 0)
                if not landed:
                    live = 0
                    level, slots = self._top(len(self.tables) - 1)
                    continue
            elif (yield from waited(Put(live, tiers[level]))):
                held.append((live, level, slots))
            else:
                failed.add(level)
                continue
            table = self.tables[level]
            assert table is not None
            advance = table.split(end - live, slots) if end - live > 1 else 0
            if advance:
                if landed:
                    yield Free(live)
                    landed = False
                yield Advance(live, live + advance)
                live += advance
                slots -= 1
            else:
                yield Drop(live, tiers[level])
                held.pop()
                level, slots = self._top(level - 1)

    def _top(self, level: int) -> tuple[int, int]:
        table = self.tables[level] if level >= 0 else None
        return level, table.slots if table else 0

    def _where(self, length: int, level: int, slots: int, failed: set[int]) -> tuple[int, int]:
        """Return the level to write the first of `length` steps to; -1 for none."""
        while level >= 0 and length > 1:
            table = self.tables[level]
            if table is not None and level not in failed and table.pays(length, slots):
                return level, slots
            level, slots = self._top(level - 1)
        return -1, 0


def solve(
    levels: tuple[Level, ...],
    n_steps: int,
    step_s: float,
    *,
    native_kernel: bool | None = None,
    most_s: float = MOST_S,
) -> Hierarchy:
    """Return the hierarchy solved for up to `n_steps` steps.

    Parameters
    ----------
    levels : tuple of Level
        Fastest first; the first one holds at least one state.
    n_steps : int
        At least 1.
    step_s : float
        Seconds of one forward step, above 0.
    native_kernel : bool, optional
        Whether to use the C kernel; where it was built, if None.
    most_s : float
        Seconds that a level may take, about; a minute without the C kernel.

    Raises
    ------
    ArgumentError
        For levels out of range, and where solving would take more than about
        `most_s` or 4 GiB.

    Examples
    --------
    >>> disk = Level(None, write_s=5.0, read_s=5.0)
    >>> solve((Level(3), disk), 100, step_s=1.0).seconds
    325.0
    >>> solve((Level(3),), 100, step_s=1.0).seconds
    490.0
    """
    if not levels or levels[0].capacity == 0:
        raise ArgumentError("a hierarchy needs a first level that holds at least one state")
    for k, level in enumerate(levels):
        costs = (level.write_s, level.read_s)
        if not all(0 <= seconds < math.inf for seconds in costs) or (level.capacity or 0) < 0:
            raise ArgumentError(f"level {k}: {level} must have finite costs >= 0 and a capacity")
    fast = levels[0]
    whole = n_steps**2 / 2 * (PRUNED_PER_S / WHOLE_PER_S) * max(1, len(levels) - 1)
    affordable(n_steps, None, whole, 5 * 8 * n_steps, native_kernel, _INSTEAD, most_s)
    tables: list[Table | None] = []
    below: Reals = np.full(n_steps + 1, math.inf)
    below[:2] = 0.0
    for k, level in enumerate(levels):
        if k == 0 and fast.write_s == fast.read_s == 0:
            slots = n_steps if fast.capacity is None else fast.capacity
            below = NuTable(min(slots, n_steps), n_steps)(np.arange(n_steps + 1)) * step_s
            tables.append(None)
            continue
        ahead = np.arange(n_steps + 1) * step_s + level.read_s
        basis = Rows(ahead, below, level.write_s)
        table, below = _solve_level(basis, level, native_kernel, most_s)
        tables.append(table)
    return Hierarchy(n_steps, levels, tables, float(below[n_steps]))


def solving_s(levels: tuple[Level, ...], n_steps: int) -> float:
    """Return the most seconds that `solve` takes with the C kernel, about."""
    sums = n_steps**2 / 2
    bounded = sum(min(level.capacity or 0, n_steps) for level in levels[1:])
    return sums * ((len(levels) - 1) / WHOLE_PER_S + bounded / PRUNED_PER_S)


def _solve_level(
    basis: Rows, level: Level, native_kernel: bool | None, most_s: float
) -> tuple[Table, Reals]:
    """Return the level's table and its O with all slots."""
    n, capacity = basis.n, level.capacity
    if capacity == 0 or n == 1:
        return Table(basis, 0), basis.below
    row, over = basis.blank(), basis.blank()
    depth, over_depth = np.zeros(n + 1, np.int32), np.zeros(n + 1, np.int32)
    depth[1] = 1
    basis.fill(2, over, row, over, (depth, over_depth), native_kernel=native_kernel)
    most = int(depth.max())
    if capacity is None or most <= capacity:
        return Table(basis, most, [row], (depth, over_depth)), _reversed(over)
    firsts = [int((depth > m).argmax()) for m in range(1, capacity + 1)]
    sums = sum((n * n - first * first) / 2 for first in firsts)
    affordable(n, capacity, sums, 8 * n * capacity, native_kernel, _INSTEAD, most_s)
    table = Table(basis, capacity)
    right = _reversed(basis.below)
    free = over
    for first in firsts:
        # Shorter lengths take no more slots than there are: as without bound.
        bounded, over = row.copy(), free.copy()
        basis.fill(first, right, bounded, over, native_kernel=native_kernel)
        table.rows.append(bounded)
        right = over
    return table, _reversed(right)


def _reversed(values: Reals) -> Reals:
    """Return values by length from values by n - length, or the other way round."""
    return np.ascontiguousarray(values[::-1])


def count_actions(schedule: Schedule, tiers: int) -> Counts:
    """Count what a schedule over some tiers does when nothing is lost, action by action."""
    counts, writes, reads, used = Counts(0), [0] * tiers, [0] * tiers, 0
    for action, send in drive(schedule):
        match action:
            case Advance(start, stop):
                counts.forward_steps += stop - start
            case Tape():
                counts.forward_steps += 1
            case Save():
                used += 1
            case Free():
                used -= 1
            case Put(_, tier):
                writes[tier] += 1
                counts.peak_slots = max(counts.peak_slots, used + 1)
                send(0)
            case Get(_, tier):
                reads[tier] += 1
                used += 1
                send(0)
        counts.peak_slots = max(counts.peak_slots, used)
    counts.writes, counts.reads = writes, reads
    return counts


def _orders(tiers: tuple[Tier, ...]) -> list[tuple[int, ...]]:
    """Return the orders of tiers worth solving: as given, and by what transfers cost."""
    keys: list[Callable[[int], float]] = [
        lambda k: k,
        lambda k: sum(transfer_s(tiers[k])),
        lambda k: transfer_s(tiers[k])[0],
        lambda k: transfer_s(tiers[k])[1],
    ]
    return list(dict.fromkeys(tuple(sorted(range(len(tiers)), key=key)) for key in keys))


def _levels(tiers: tuple[Tier, ...], order: tuple[int, ...], slots: int) -> tuple[Level, ...]:
    slow = (Level(tiers[k].capacity_states, *transfer_s(tiers[k])) for k in order)
    return (Level(slots), *slow)


def _over_tiers(
    costs: Costs, tiers: tuple[Tier, ...], slots: int, n_steps: int, note: str
) -> Draft:
    first, *others = _orders(tiers)
    # What another order would take longer for than a planner may is not worth it.
    each_s = solving_s(_levels(tiers, first, slots), n_steps)
    others = others[: int(PLANNING_S / max(each_s, 1e-9))]
    solved = [
        (
            solve(_levels(tiers, order, slots), n_steps, costs.forward_step_s, most_s=PLANNING_S),
            order,
        )
        for order in (first, *others)
    ]
    hierarchy, order = min(solved, key=lambda pair: pair[0].seconds)
    counts = count_actions(hierarchy.schedule(order), len(tiers))
    used = {
        f"writes to {tier.name}": count for tier, count in zip(tiers, counts.writes, strict=True)
    }
    return counted(
        costs,
        slots,
        n_steps,
        partial(hierarchy.schedule, order),
        counts,
        note,
        used,
    )


# What "auto" spends on it at most: seconds for the tables, steps for the walk.
_CHEAP_S, _CHEAP_STEPS = 0.1, 10_000


def worth_ranking(costs: Costs, slots: int, n_steps: int) -> bool:
    """Whether `h-revolve` over several tiers is solved in a fraction of a second."""
    if len(costs.tiers) < 2 or n_steps > _CHEAP_STEPS:
        return False
    orders = _orders(costs.tiers)
    share = PLAIN_PER_S / PRUNED_PER_S if native.LIBRARY is None else 1.0
    levels = _levels(costs.tiers, orders[0], slots)
    return len(orders) * solving_s(levels, n_steps) <= _CHEAP_S * share


@planner("h-revolve")
def h_revolve(costs: Costs, slots: int, n_steps: int) -> Draft:
    """Return the optimal plan that waits for every transfer, over all tiers of `costs`.

    Raises
    ------
    ArgumentError
        Where solving would take more than about a second.

    Examples
    --------
    >>> tiers = (Tier("host", 2.0, 2.0, capacity_states=4), Tier("file", 9.0, 9.0))
    >>> plan = h_revolve(Costs(1.0, 2.0, tiers=tiers), slots=3, n_steps=200)
    >>> plan.makespan_s, dict(plan.parameters)
    (1101.0, {'writes to host': 22, 'writes to file': 3})
    """
    if not costs.tiers:
        return plain_revolve(costs, slots, n_steps, "There is no slow tier")
    note = "Each state goes to the tier where it costs least; every transfer is waited for."
    return _over_tiers(costs, costs.tiers, slots, n_steps, note)


@planner("disk-revolve")
def disk_revolve(costs: Costs, slots: int, n_steps: int) -> Draft:
    """Return the optimal plan that waits for every transfer to and from the first tier.

    Disk-Revolve knows no bound of the disk; where the tier has one, this is
    H-Revolve over that tier.

    Raises
    ------
    ArgumentError
        Where solving would take more than about a second.

    Examples
    --------
    >>> costs = Costs(1.0, 2.0, tiers=(Tier("file", 5.0, 5.0),))
    >>> disk_revolve(costs, slots=3, n_steps=100).makespan_s
    526.0
    """
    if costs.tier is None:
        return plain_revolve(costs, slots, n_steps, "There is no slow tier")
    note = f"States go to {costs.tier.name} where that costs least; every transfer is waited for."
    return _over_tiers(costs, costs.tiers[:1], slots, n_steps, note)
