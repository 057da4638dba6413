"""Chains with a slow tier that have too many stages for one table.

Some runs
    The table of RR-9302 is solved for all short runs of stages and few long ones, see
    `planners.chain.coarse`; of more stages for runs of at most so many, a *band*, so that
    its size grows with their number.  The search of `planners.chain.joint` is the same.
Groups
    Where stages are many and states small beside the memory, equal numbers of stages are
    first grouped into the stages of a shorter chain, whose "tape" is what one group keeps:
    all tapes of its stages or, where tapes do not travel, all states.  The best plans of
    that chain are taken over by the stages themselves and improved there.

Known gaps: no segment is longer than a band; plans of many stages are improved little.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...actions import Action
from ...model.stages import Stage, StageCosts
from ...model.tier import Tier
from ...support.arrays import Bytes
from .coarse import most_runs
from .joint import IMPROVED_LONG, MOVES_LONG, SEED, Pool, extremes, is_plannable, search
from .joint_core import (
    APART,
    KEEPS_TAPE,
    RESERVE_AT,
    STARTS,
    STATE_AWAY,
    TAPE_AWAY,
    Core,
    actions_of_laid,
)
from .sizes import Sizes
from .table import MORE, Table, default_threads

# Of a table: values, and of the longest and shortest band.
_VALUES, _BAND, _SHORTEST = 100_000_000, 256, 64
# Of a table of runs: stages times slots, and the longest of the short runs, in 16 stages.
_WORK, _LONGEST = 400_000, 4
# Slots of memory: so many for a state of mean size, if they are not too many.  Those of a table
# of runs are as many as there may be: a plan for the least memory has to fit.
_A_STATE, _FEWEST, _MOST = 3, 150, 500


def plan_grouped(
    costs: StageCosts, limit: int, rates: Tier, *, tapes: bool = True
) -> list[Action] | None:
    """Return the actions of the fastest plan found within `limit` bytes; None if none fits.

    Without `tapes` none is kept but right before its adjoint; `rates` take none then.
    """
    true, room = Sizes.beside_a_tier(costs), limit - costs.input_bytes
    if not is_plannable(true) or room < 1:
        return None
    size, slots = _grouping(true, room)
    if size == 1:
        core = _core(true, slots, room, room, rates, tapes)
        pool = search(core, true, room, room / slots, rates)
    else:
        chain, starts = in_groups(costs, -(-len(costs.stages) // size), states=not rates.tapes)
        core, pool = _refined(chain, starts, true, slots, room, rates, tapes)
    if not pool.found:
        return None
    laid = core.lay_out(pool.found[0][1])
    return actions_of_laid(laid, core.table, inside=rates.tapes)


def _grouping(true: Sizes, room: int) -> tuple[int, int]:
    """Return how many stages form a group, and the slots that memory is divided in."""
    mean = max(1.0, float(true.state[1:-1].mean()))
    for size in itertools.count(1):
        stages = -(-len(true) // size)
        wanted = _A_STATE * room / mean / size
        slots = round(min(_MOST, max(_FEWEST, _slots_of_runs(stages), wanted)))
        if stages <= _SHORTEST or (
            wanted <= _A_STATE * _MOST and stages * _SHORTEST * slots <= _VALUES
        ):
            return size, slots
    raise AssertionError  # there is always a size


def _slots_of_runs(stages: int) -> int:
    """Return the most slots of a table of some runs; 0 where a band is solved in its place."""
    slots = int(_VALUES / (MORE * stages * most_runs(stages)))
    return slots if stages > _BAND and slots >= _FEWEST else 0


def _core(
    true: Sizes, slots: int, room: int, covered: float, rates: Tier, tapes: bool = True
) -> Core:
    """Return what judges plans of a chain, by a table of `slots` for `covered` bytes."""
    unit = covered / slots
    sizes, more, n = true.in_slots(unit), math.ceil(MORE * slots), len(true)
    if slots <= _slots_of_runs(n):
        short = max(1, min(_LONGEST, _WORK // (n * more)))
        return Core(true, Table(sizes, more, tapes=tapes, short=short), unit, room, rates)
    band = max(2, min(_BAND, _VALUES // (n * slots)))
    table = Table(sizes, more, tapes=tapes, threads=default_threads(), band=band)
    return Core(true, table, unit, room, rates)


def _refined(
    chain: StageCosts,
    starts: Sequence[int],
    true: Sizes,
    slots: int,
    room: int,
    rates: Tier,
    tapes: bool,
) -> tuple[Core, Pool]:
    """Return the best plans of a chain by those of its groups, and what judges them."""
    coarse = Sizes.of(chain)
    core = _core(coarse, slots, room, room, replace(rates, tapes=True))
    found = search(core, coarse, room, room / slots, replace(rates, tapes=True)).found
    del core  # and its table, before the next is made
    band = int(math.sqrt(_VALUES / len(true)))
    covered = min(room, band * float(true.tape.mean()))
    fine = _core(true, band, room, max(1.0, covered), rates, tapes)
    pool = Pool(fine.judge)
    for fates in extremes(true):
        pool.offer(fates)
    for _, fates in found:
        pool.offer(of_stages(fates, starts, tapes=rates.tapes))
    for rank, (seconds, fates) in enumerate(pool.found[:IMPROVED_LONG]):
        better, found_s = fine.improve(fates, seconds, MOVES_LONG, SEED + rank)
        pool.keep(found_s, better)
    return fine, pool


def of_stages(fates: Bytes, starts: Sequence[int], *, tapes: bool) -> Bytes:
    """Return a plan of groups as one of stages.

    Parameters
    ----------
    starts : sequence of int
        Where each group begins and the last ends.
    tapes : bool
        Whether a group keeps the tapes of its stages, or their states.
    """
    made = np.zeros(starts[-1] + 1, np.uint8)
    each = STARTS | STATE_AWAY | APART | 3 << RESERVE_AT
    for fate, start, stop in zip(fates.tolist(), starts, starts[1:], strict=False):
        made[start] |= fate & each
        if not fate & KEEPS_TAPE:
            continue
        if tapes:
            made[start:stop] |= KEEPS_TAPE | STARTS | (fate & TAPE_AWAY)
            continue
        stop = min(stop + 1, starts[-1])  # the state after the group is one of its own
        made[start + 1 : stop] |= STARTS | (STATE_AWAY if fate & TAPE_AWAY else 0)
    return made


def in_groups(
    costs: StageCosts, count: int, *, states: bool = False
) -> tuple[StageCosts, list[int]]:
    """Return a chain of so many groups of stages, and where each begins and the last ends.

    A group keeps all its tapes or, with `states`, all its states.
    """
    n = len(costs.stages)
    starts = [k * n // count for k in range(count)] + [n]
    groups = [_group(costs.stages[a:b], states) for a, b in itertools.pairwise(starts)]
    return StageCosts(tuple(groups), costs.input_bytes, costs.input_gradient_bytes), starts


def _group(stages: Sequence[Stage], states: bool) -> Stage:
    """Return some stages as one whose tape is all of theirs, or all their states."""
    output, last = stages[-1].output_bytes, stages[-1]
    gradient = max(stage.gradient_bytes for stage in stages)
    passing = max(
        (before.output_bytes + after.output_bytes + after.forward_overhead_bytes)
        for before, after in zip((stages[0], *stages), stages, strict=False)
    )
    made = Stage(
        name=stages[0].name,
        forward_s=sum(stage.forward_s for stage in stages),
        backward_s=sum(stage.backward_s for stage in stages),
        output_bytes=output,
        tape_bytes=sum(stage.tape_bytes for stage in stages),
        gradient_bytes=last.gradient_bytes,
        forward_overhead_bytes=max(0, passing - output),
        tape_overhead_bytes=max(stage.tape_overhead_bytes for stage in stages),
        backward_overhead_bytes=2 * gradient
        + max(stage.backward_overhead_bytes for stage in stages),
        spared_s=last.spared_s,
    )
    if not states:
        return made
    taped = max(
        stage.tape_bytes
        - stage.output_bytes
        + max(stage.tape_overhead_bytes, stage.backward_overhead_bytes + 2 * gradient)
        for stage in stages
    )
    return replace(
        made,
        backward_s=made.backward_s + sum(each.forward_s - each.spared_s for each in stages),
        tape_bytes=sum(stage.output_bytes for stage in stages),
        tape_overhead_bytes=max(stage.forward_overhead_bytes for stage in stages),
        backward_overhead_bytes=taped,
        spared_s=last.forward_s,
    )
