"""Stumm & Walther's split: Revolve over fast and slow slots, the least used ones slow.

Stumm & Walther 2009, "MultiStage approaches for optimal offline
checkpointing", SIAM J. Sci. Comput. 31(3) 1946-1967, doi:10.1137/080718036.
Revolve with all slots of both memories needs the fewest forward steps; its
checkpoints are a stack, and the positions whose writes and reads cost least
lie in the slow tier.  (Their "multistage" is this split; ours means tiers
that work while the computation proceeds.)

Revolve leaves a choice of advances, which decides how often each position is
used: the lowest, the middle, the highest and the published one are tried, and
slow slots from none up to as many as there are.

A transfer needs a fast slot to pass through.  One is free at every transfer if
the highest position is fast; else one of the fast slots is kept for it.  Both
are tried.

Optimal in forward steps for the slots it uses, not in time: `h-revolve` weighs
steps against transfers.  O(n) work and O(slots) memory for each of some
hundred candidates; only the first tier is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from ...actions import (
    Advance,
    Drop,
    EndForward,
    Free,
    Get,
    Load,
    Put,
    Reverse,
    Save,
    Schedule,
    Tape,
    waited,
)
from ...errors import ArgumentError
from ...model.costs import Costs
from ...support.arrays import Flags, Integers, Reals
from ..predict import Counts, Draft, counted, planner, transfer_s
from ..single.binomial import TRAJECTORIES, Trajectory, accesses, first_advance, nu
from ..single.revolve import plain_revolve

# Steps of all candidates together, about a second.
_MOST_WORK = 1 << 25
_CANDIDATES = 24


def stumm_walther_schedule(
    in_tier: tuple[bool, ...], trajectory: Trajectory, slots: int, n_steps: int
) -> Schedule:
    """Yield Revolve's schedule, stack position i in the tier where `in_tier[i]`.

    A checkpoint that is lost lets its interval merge with the one before; the
    tier is written to no more.
    """
    stack: list[tuple[int, bool]] = []  # step, whether in the tier
    fast, failed = 0, False  # those of them in fast slots
    live, end = 0, n_steps
    while True:
        while end - live > 1:
            if not failed:
                free = len(in_tier) - len(stack)
            elif len(stack) == fast:  # nothing will come from the tier any more
                free = slots - fast
            else:
                free = in_tier.count(False) - fast
            kept = bool(stack) and stack[-1][0] == live
            if kept or free <= 0:
                advance = end - live - 1
                if kept:
                    advance = first_advance(end - live, free + 1, trajectory)
                yield Advance(live, live + advance)
                live += advance
                continue
            slow = not failed and in_tier[len(stack)]
            if not slow:
                yield Save(live)
                fast += 1
            elif not (yield from waited(Put(live))):
                failed = True
                continue  # look again: a failed write leaves other slots
            stack.append((live, slow))
        if end == n_steps:
            yield Tape(live)
            yield EndForward()
        yield Reverse(live)
        end = live
        if live == 0:
            return
        # The highest checkpoint at hand becomes the live state; it is given up at its last use.
        while stack:
            live, slow = stack[-1]
            if not slow or (yield from waited(Get(live))):
                break
            failed = True
            stack.pop()
        else:
            yield Load(0)
            live = 0
            continue
        yield Load(live)
        is_last = live == end - 1
        if slow or is_last:
            yield Free(live)
        if is_last:
            stack.pop()
            fast -= not slow
            if slow:
                yield Drop(live)


def _splits(slots: int, capacity: int, n_steps: int) -> Iterator[int]:
    """Yield numbers of stack positions worth trying: fast ones alone up to all there are."""
    least, most = max(1, slots - 1), min(slots + capacity, n_steps - 1)
    totals = {min(slots, most), most, *range(least, min(least + 3, most) + 1)}
    if most > least:
        totals |= {int(k) for k in np.geomspace(least, most, _CANDIDATES)}
    yield from sorted(totals)


def _allocated(priced: Reals, fast: int, top_fast: bool) -> Flags | None:
    """Return which positions lie in the tier, the cheapest ones, or None if there is no such."""
    slow = len(priced) - fast
    if slow < 0:
        return None
    order = np.argsort(priced[: len(priced) - top_fast], kind="stable")
    if slow > len(order):
        return None
    in_tier = np.zeros(len(priced), bool)
    in_tier[order[:slow]] = True
    return in_tier


@planner("stumm-walther")
def stumm_walther(costs: Costs, slots: int, n_steps: int) -> Draft:
    """Return the plan of the split that costs least.

    Raises
    ------
    ArgumentError
        For more steps than about a second suffices for.

    Examples
    --------
    >>> from multistage.model.tier import Tier
    >>> costs = Costs(1.0, 2.0, tiers=(Tier("file", 5.0, 5.0, capacity_states=6),))
    >>> plan = stumm_walther(costs, slots=3, n_steps=100)
    >>> plan.parameters["slow slots"], plan.makespan_s
    (2, 587.0)
    """
    tier = costs.tier
    if tier is None:
        return plain_revolve(costs, slots, n_steps, "There is no slow tier")
    if n_steps == 1 or tier.capacity_states == 0:
        return plain_revolve(costs, slots, n_steps, "No state goes to the tier")
    if n_steps * len(TRAJECTORIES) * _CANDIDATES > _MOST_WORK:
        raise ArgumentError(
            f"n_steps={n_steps} is more than planner 'stumm-walther' can count the accesses of, "
            f"{_MOST_WORK // (len(TRAJECTORIES) * _CANDIDATES)}; use planner 'periodic-disk'"
        )
    write_s, read_s = transfer_s(tier)
    capacity = n_steps if tier.capacity_states is None else tier.capacity_states
    best: tuple[float, Trajectory, Flags, Integers, Integers] | None = None
    for total in _splits(slots, capacity, n_steps):
        for trajectory in TRAJECTORIES:
            writes, reads = accesses(n_steps, total, trajectory)
            priced = writes * write_s + reads * read_s
            for fast, top_fast in ((min(slots, total), True), (slots - 1, False)):
                in_tier = _allocated(priced, fast, top_fast)
                if in_tier is None or in_tier.sum() > capacity:
                    continue
                seconds = nu(n_steps, total) * costs.forward_step_s + float(priced[in_tier].sum())
                if best is None or seconds < best[0]:
                    best = seconds, trajectory, in_tier, writes, reads
    assert best is not None
    _, trajectory, in_tier, writes, reads = best
    fast_below: Integers = np.cumsum(~in_tier) - ~in_tier
    slow = int(in_tier.sum())
    counts = Counts(
        forward_steps=1 + nu(n_steps, len(in_tier)),
        writes=[int(writes[in_tier].sum())],
        reads=[int(reads[in_tier].sum())],
        peak_slots=int(fast_below[writes > 0].max()) + 1,
    )
    return counted(
        costs,
        slots,
        n_steps,
        partial(stumm_walther_schedule, tuple(in_tier.tolist()), trajectory, slots, n_steps),
        counts,
        f"Revolve over {len(in_tier)} slots, the {slow} least used ones in {tier.name}.",
        {"slow slots": slow, "trajectory": trajectory},
    )
