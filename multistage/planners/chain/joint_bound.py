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
(`joint_dual`).  What is left out only lowers the bound: the room that landing and
staging take elsewhere, the state behind a tape in the tier, the tier's capacity.

Complexity: O(L^3 S / 6) once for the table of L stages and S slots, O(L^2 S)
for each of a counted number of prices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import fields
from typing import TypeAlias, TypeVar

import numpy as np

from ...model.stages import StageCosts
from ...model.tier import Tier
from ...support.arrays import Integers, Reals
from .joint_core import require_core
from .joint_dual import Dual as Dual
from .joint_dual import Prices
from .sizes import Sizes

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
