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

from collections.abc import Generator, Iterator
from functools import partial

import numpy as np

from ...actions import (
    Action,
    Advance,
    Answer,
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
from ..base import Plan, require_steps
from ..predict import Counts, counted_plan, transfer_s
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
    return _Recursion(in_tier, trajectory, slots, n_steps).schedule()


class _Recursion:
    """One schedule being made: the stack of checkpoints."""

    def __init__(
        self, in_tier: tuple[bool, ...], trajectory: Trajectory, slots: int, n_steps: int
    ) -> None:
        self.in_tier = in_tier
        self.trajectory = trajectory
        self.slots = slots
        self.end = n_steps
        self.stack: list[tuple[int, bool]] = []  # step, whether in the tier
        self.fast = 0  # of them in fast slots
        self.failed = False

    def schedule(self) -> Schedule:
        live, ended = 0, False
        while True:
            while self.end - live > 1:
                if (not self.stack or self.stack[-1][0] != live) and self._free() > 0:
                    yield from self._keep(live)
                    continue  # look again: a failed write leaves other slots
                length, kept = self.end - live, bool(self.stack) and self.stack[-1][0] == live
                free = self._free() + 1
                step = first_advance(length, free, self.trajectory) if kept else length - 1
                yield Advance(live, live + step)
                live += step
            if not ended:
                yield Tape(live)
                yield EndForward()
                ended = True
            yield Reverse(live)
            self.end = live
            if live == 0:
                return
            live = yield from self._back()

    def _free(self) -> int:
        """Slots that are left; those of a tier that failed are not."""
        if not self.failed:
            return len(self.in_tier) - len(self.stack)
        if len(self.stack) == self.fast:  # nothing will come from the tier any more
            return self.slots - self.fast
        return self.in_tier.count(False) - self.fast

    def _keep(self, step: int) -> Schedule:
        if self.failed or not self.in_tier[len(self.stack)]:
            yield Save(step)
            self.fast += 1
            self.stack.append((step, False))
            return
        if (yield from waited(Put(step))):
            self.stack.append((step, True))
        else:
            self.failed = True

    def _back(self) -> Generator[Action, Answer, int]:
        """Make the highest checkpoint at hand the live state; forget it at its last use."""
        while self.stack:
            step, in_tier = self.stack[-1]
            last = step == self.end - 1
            if in_tier and not (yield from waited(Get(step))):
                self.failed = True
                self.stack.pop()
                continue
            yield Load(step)
            if in_tier or last:
                yield Free(step)
            if last:
                self.stack.pop()
                self.fast -= not in_tier
                if in_tier:
                    yield Drop(step)
            return step
        yield Load(0)
        return 0


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


def stumm_walther(costs: Costs, slots: int, n_steps: int | None) -> Plan:
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
    n = require_steps(n_steps, "stumm-walther")
    tier = costs.tier
    if tier is None:
        return plain_revolve("stumm-walther", costs, slots, n, "There is no slow tier")
    if n == 1 or tier.capacity_states == 0:
        return plain_revolve("stumm-walther", costs, slots, n, "No state goes to the tier")
    if n * len(TRAJECTORIES) * _CANDIDATES > _MOST_WORK:
        raise ArgumentError(
            f"n_steps={n} is more than planner 'stumm-walther' can count the accesses of, "
            f"{_MOST_WORK // (len(TRAJECTORIES) * _CANDIDATES)}; use planner 'periodic-disk'"
        )
    write_s, read_s = transfer_s(tier)
    capacity = n if tier.capacity_states is None else tier.capacity_states
    best: tuple[float, Trajectory, Flags, Integers, Integers] | None = None
    for total in _splits(slots, capacity, n):
        for trajectory in TRAJECTORIES:
            writes, reads = accesses(n, total, trajectory)
            priced = writes * write_s + reads * read_s
            for fast, top_fast in ((min(slots, total), True), (slots - 1, False)):
                in_tier = _allocated(priced, fast, top_fast)
                if in_tier is None or in_tier.sum() > capacity:
                    continue
                seconds = nu(n, total) * costs.forward_step_s + float(priced[in_tier].sum())
                if best is None or seconds < best[0]:
                    best = seconds, trajectory, in_tier, writes, reads
    assert best is not None
    _, trajectory, in_tier, writes, reads = best
    fast_below: Integers = np.cumsum(~in_tier) - ~in_tier
    slow = int(in_tier.sum())
    counts = Counts(
        forward_steps=1 + nu(n, len(in_tier)),
        writes=[int(writes[in_tier].sum())],
        reads=[int(reads[in_tier].sum())],
        peak_slots=int(fast_below[writes > 0].max()) + 1,
    )
    return counted_plan(
        "stumm-walther",
        costs,
        slots,
        n,
        partial(stumm_walther_schedule, tuple(in_tier.tolist()), trajectory, slots, n),
        counts,
        note=f"Revolve over {len(in_tier)} slots, the {slow} least used ones in {tier.name}.",
        parameters={"slow slots": slow, "trajectory": trajectory},
    )
