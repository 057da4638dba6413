"""Chains with a slow tier: what stays in fast memory, what travels, what is recomputed.

Plan
    The forward sweep is cut into nodes: a stage that keeps its tape, or a
    segment, of which the state before its first stage is kept.  Whatever is
    kept stays in fast memory or is a *thing of the tier*: written as soon as it
    is made, evicted when memory is short, read back before its use.  A segment
    is reversed by the schedule of `planners.chain.heterogeneous` (RR-9302) for the most
    slots whose true peak fits into the room left.
Memory
    Things are numbered as they are made and evicted in that order, so those
    evicted are always a prefix; what is never evicted is never written.  Thing
    i is read from the first operation on from which it fits for good: with
    P[i] the bytes of the things before it and K(q) the things that operation q
    and those after it still need, i may be resident at q iff
    need(q) + P[K(q)] - limit <= P[i].  Times play no part, so memory holds at
    any speed of the tier; only waiting changes.
Search
    A dynamic program with the backlog of writes as a dimension (native/joint_program.c) is
    solved for a fixed list of its parameters.  Each of its plans is judged in
    virtual time, to the byte and second; the best are improved by random moves.
    For short chains more of them are, and then crossed: for every pair of the best,
    plans are tried that begin as one and continue as the other.
    All is counted, nothing timed, and the seed is fixed: plans are reproducible.
    Sending every tape away, and every state, are always tried.

Known gaps: recomputation writes nothing to the tier; the next segment does not
run forward while a read is awaited; schedules are persistent.  No optimality is
claimed; `planners.chain.joint_bound` bounds the gap.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from ...actions import Action
from ...model.tier import Tier
from ...support.arrays import Bytes, Integers
from .joint_core import (
    APART,
    KEEPS_TAPE,
    MAY_STATE,
    MAY_TAPE,
    RESERVE_AT,
    STARTS,
    STATE_AWAY,
    TAPE_AWAY,
    Core,
    Program,
    actions_of_laid,
)
from .sizes import MOST_BYTES, Sizes, need_to_tape
from .table import Table

# Of chains of more stages: fewer programs, and fewer moves.
_LONG = 150
# Memories of the table in a slot of the programs, in turn: where all sizes are equal, one
# of them may round them badly.  Where things are many, and so not much larger than a slot,
# a program keeps those that were rounded down: it needs all memories of the table.
_STRIDES, _STRIDES_LONG = (1, 2, 3), (1,)
_PROGRAMS_LONG = 3
# Plans that are improved, and by how many random moves each: so many a stage, and at most.
_IMPROVED, IMPROVED_LONG = 4, 2
_MOVES_A_STAGE, _MOVES, MOVES_LONG = 100, 5000, 2000
# Of chains of no more stages the best plan of each program is improved too, and that of the
# first programs for a tier that is faster or slower: searches that begin far apart find what
# more moves on the best plans do not.
_SHORT, _MOVES_OF_EACH = 40, 50
_SPEEDS, _AT_SPEEDS = (1.15, 0.85), 4
# Then so many of the best are crossed in so many rounds; each round improves its best few.
_CROSSED, _ROUNDS, _IMPROVED_A_ROUND = 24, 8, 4
# Parts of a tier's capacity, for plans of a larger limit.
_OF_CAPACITY = (0.0, 0.15, 0.3, 0.5, 0.75, 1.0)
# Of long chains, parts in which things are chosen that all fit into the tier.
_PARTS = (1.0, 0.75, 0.5)
# Of the backlog, fewer where the program's values would be too many.
_STEPS, _FEWEST_STEPS, _VALUES = 48, 16, 27_000_000
_POOL = 6
SEED = 3
# The programs' parameters: price of reading, staging, fineness, and the reserve: none, a
# middling state, the largest state, a middling tape.  Chosen one after the other, each as
# the best beside those before it, from 68 for 40 chains, memories and tiers.
GRID = (
    (0.03, 1.5, 5.0, 0),
    (0.0, 0.0, 8.0, 3),
    (0.0, 1.0, 3.3, 0),
    (0.03, 0.0, 5.0, 0),
    (0.0, 0.0, 5.0, 2),
    (0.03, 0.5, 8.0, 0),
    (0.0, 1.5, 0.0, 0),
    (0.03, 0.5, 8.0, 3),
)
# Of the limit: what the programs' plans were made for.
_SHARES = (1.05, 1.02, 0.99, 0.96, 0.92, 0.86, 0.8, 0.74, 0.68)


@dataclass(slots=True)
class Pool:
    """The best plans found, the fastest first; no two as fast."""

    judge: Callable[[Bytes], float]
    most: int = _POOL
    found: list[tuple[float, Bytes]] = field(default_factory=list)

    def offer(self, fates: Bytes) -> None:
        """Judge a plan with few and with more things of the tier beside its segments."""
        for reserve in range(3):
            tried = (fates & ~np.uint8(3 << RESERVE_AT)) | np.uint8(reserve << RESERVE_AT)
            self.keep(self.judge(tried), tried)

    @property
    def worst(self) -> float:
        """The seconds that a plan must take less than to be kept."""
        return math.inf if len(self.found) < self.most else self.found[-1][0]

    def keep(self, seconds: float, fates: Bytes) -> None:
        """Keep a plan if it is among the best."""
        if math.isinf(seconds) or any(seconds == known for known, _ in self.found):
            return
        self.found.append((seconds, fates))
        self.found.sort(key=lambda pair: pair[0])
        del self.found[self.most :]


def plan_joint(
    true: Sizes, table: Table, unit_bytes: float, limit: int, rates: Tier
) -> tuple[list[Action] | None, list[Action] | None]:
    """Return the fastest plan found within `limit` bytes, and the one that sends every tape.

    None of them where it does not fit.

    Parameters
    ----------
    true : Sizes
        In bytes.
    table : Table
        Of the chain, in slots of `unit_bytes`, for the limit at least.
    limit : int
        Bytes, the chain's input not counted.
    """
    if not is_plannable(true):
        return None, None
    core = Core(true, table, unit_bytes, limit, rates)
    pool = search(core, true, limit, unit_bytes, rates)
    offload = Pool(core.judge)
    offload.offer(next(extremes(true)))

    def fastest(plans: Pool) -> list[Action] | None:
        if not plans.found:
            return None
        laid = core.lay_out(plans.found[0][1])
        # What takes states alone serves operators whose tapes nobody looks into.
        return actions_of_laid(laid, table, inside=rates.tapes)

    return fastest(pool), fastest(offload)


def is_plannable(true: Sizes) -> bool:
    """Whether sums of the sizes fit the core's integers, and stages take time."""
    return true.is_countable() and float(true.forward_s.sum()) > 0


def smallest_with_tier(true: Sizes, rates: Tier) -> int:
    """Return the smallest limit, in bytes, within which every state or every tape travels.

    The chain's input not counted; 2^62 where they do not fit into the tier.
    """
    capacity = MOST_BYTES if rates.capacity_bytes is None else rates.capacity_bytes
    n, last_gradient = len(true), int(true.gradient[-1])
    states = [0, *(int(size) for size in true.state[1:])]
    tapes = [int(size) for size in true.tape]
    least = 2 * MOST_BYTES
    if not is_plannable(true):
        return least
    if sum(states) <= capacity:
        run = max(
            last_gradient + states[s] + states[s + 1] + int(true.advance[s]) for s in range(n - 1)
        )
        least = max(run, *(states[s] + need_to_tape(true, s, s) for s in range(n)))
    if rates.tapes and sum(tapes) <= capacity:
        inside = [0, *tapes]  # of a stage: the tape that holds its input
        run = max(last_gradient + inside[s] + tapes[s] + int(true.taping[s]) for s in range(n - 1))
        least = min(least, max(run, *(inside[s] + need_to_tape(true, s, s) for s in range(n))))
    return least


def search(core: Core, true: Sizes, limit: int, unit_bytes: float, rates: Tier) -> Pool:
    """Return the best plans found, limit and tier being those of the core.

    Parameters
    ----------
    limit : int
        Bytes, the chain's input not counted.
    unit_bytes : float
        Of a slot of the core's table.
    """
    n = len(true)
    long = n > _LONG
    strides = _STRIDES_LONG if long else _STRIDES
    grid = GRID[:_PROGRAMS_LONG] if long else GRID
    moves = MOVES_LONG if long else min(_MOVES, _MOVES_A_STAGE * n)
    pool = Pool(core.judge)
    for fates in extremes(true):
        pool.offer(fates)
    solved = list(programs(true, limit, unit_bytes, strides, grid))
    starts: list[tuple[float, Bytes]] = []
    for program in solved:
        starts += _begun(core, core.program(program, _SHARES), pool)
    late, aside = [], Pool(core.judge)
    table, capacity = core.table, rates.capacity_bytes
    if capacity is not None and not table.is_whole:
        for part, program in itertools.product(_PARTS, solved):
            among = spread(true, capacity, part, tapes=rates.tapes)
            _begun(core, core.program(program, _SHARES, among), pool)
    if capacity is not None and table.band >= n and (n <= _SHORT or not pool.found):
        for fates in of_more_memory(table, true, limit, capacity):
            late += _begun(core, [fates], aside)
    if not pool.found:
        pool = aside
    best = pool.found[: IMPROVED_LONG if long else _IMPROVED]
    for rank, (seconds, fates) in enumerate(best):
        better, found = core.improve(fates, seconds, moves, SEED + rank)
        pool.keep(found, better)
    if n > _SHORT:
        return pool
    for speed, program in itertools.product(_SPEEDS, solved[:_AT_SPEEDS]):
        starts += _begun(core, core.program(replace(program, speed=speed), _SHARES), pool)
    more = Pool(core.judge, _CROSSED, pool.found.copy())
    for rank, (seconds, fates) in enumerate(starts + late, len(best)):
        better, found = core.improve(fates, seconds, _MOVES_OF_EACH * n, SEED + rank)
        more.keep(found, better)
    cross(core, more, _MOVES_OF_EACH * n)
    return more


def _begun(core: Core, plans: Iterable[Bytes], pool: Pool) -> list[tuple[float, Bytes]]:
    """Offer plans to a pool; return the best of them, if one fits."""
    own = Pool(core.judge)
    for fates in plans:
        own.offer(fates)
    for seconds, fates in own.found:
        pool.keep(seconds, fates)
    return own.found[:1]


def cross(core: Core, pool: Pool, moves: int) -> None:
    """Improve plans by those that begin as one of them and continue as another.

    Stages far apart hardly affect each other, so plans of searches with different starts
    are often best in different parts of the chain.
    """
    crossed: set[tuple[bytes, bytes]] = set()
    for number in range(_ROUNDS):
        before = pool.found.copy()
        for (_, first), (_, rest) in itertools.permutations(before, 2):
            pair = first.tobytes(), rest.tobytes()
            if pair in crossed:
                continue
            crossed.add(pair)
            for seconds, fates in core.cross(first, rest, pool.worst):
                pool.keep(seconds, fates)
        best = pool.found[:_IMPROVED_A_ROUND]
        for rank, (seconds, fates) in enumerate(best, 1 + number * _IMPROVED_A_ROUND):
            better, found = core.improve(fates, seconds, moves, SEED + rank)
            pool.keep(found, better)


def of_more_memory(table: Table, true: Sizes, limit: int, capacity: int) -> Iterator[Bytes]:
    """Yield plans without a tier, of limits that are larger by parts of its capacity.

    Whatever they keep may go to the tier, which takes what exceeds the true limit.  The
    programs do not know the capacity: if it is small, none of their plans may fit.
    """
    n = len(true)
    for share in _OF_CAPACITY:
        seconds, memory = table.fastest(true, limit + int(share * min(capacity, limit)))
        trace = table.trace(memory) if seconds < math.inf else None
        if trace is None:
            continue
        chosen = {(s, t): k for s, t, k in trace}
        fates, s = np.zeros(n, np.uint8), 0
        while s < n:
            k = chosen[s, n - 1]
            fates[s] = STARTS | STATE_AWAY
            if k == s < n - 1:
                fates[s] |= KEEPS_TAPE | TAPE_AWAY
            s = max(k, s + 1)
        yield fates


def spread(true: Sizes, capacity: int, part: float, *, tapes: bool) -> Bytes:
    """Return things that all fit into a tier, as bits of what may travel.

    Of the first `part` of the stages, at about equal distances in time, small ones if possible.
    """
    stop = max(2, round(part * len(true)))
    sizes = (true.tape if tapes else true.state)[:stop]
    ends = np.cumsum(true.forward_s[:stop])

    def chosen(count: int) -> Integers:
        places = np.minimum(count * ends / (ends[-1] or 1.0), count - 1).astype(np.int64)
        order = np.lexsort((sizes, places))
        return order[np.unique(places[order], return_index=True)[1]]

    fewest, most = 0, stop
    while fewest < most:
        count = (fewest + most + 1) // 2
        if int(sizes[chosen(count)].sum()) <= capacity:
            fewest = count
        else:
            most = count - 1
    among = np.zeros(len(true), np.uint8)
    if fewest:
        among[chosen(fewest)] = MAY_TAPE if tapes else MAY_STATE
    return among


def extremes(true: Sizes) -> Iterator[Bytes]:
    """Yield the plans that send every tape or every state to the tier."""
    n = len(true)
    yield np.full(n, KEEPS_TAPE | STARTS | TAPE_AWAY, np.uint8)
    yield np.full(n, STARTS | STATE_AWAY, np.uint8)
    yield np.full(n, KEEPS_TAPE | STARTS | TAPE_AWAY | STATE_AWAY | APART, np.uint8)


def programs(
    true: Sizes,
    limit: int,
    unit_bytes: float,
    strides: tuple[int, ...],
    grid: tuple[tuple[float, ...], ...],
) -> Iterator[Program]:
    """Yield the programs to solve, each once."""
    n = len(true)
    steps = min(_STEPS, max(_FEWEST_STEPS, int(_VALUES * unit_bytes / (n * max(1, limit)))))
    states, tapes = np.sort(true.state[1:]), np.sort(true.tape)
    kept = [0, int(states[n // 2]), int(states[-1]), int(tapes[n // 2])]
    seen = set()
    for (price, staging, fineness, reserve), stride in zip(
        grid, itertools.cycle(strides), strict=False
    ):
        slot_bytes = unit_bytes * stride
        program = Program(
            read_price=price,
            staging=staging,
            fineness=fineness,
            speed=1.0,
            reserve=min(int(limit / slot_bytes) // 2, math.ceil(kept[int(reserve)] / slot_bytes)),
            steps=steps,
            stride=stride,
        )
        if program not in seen:
            seen.add(program)
            yield program
