"""The exact optimum of a short reversal: the oracle of the planners and bounds.

A* search over every schedule of the simulator's model, in whole time units:
one computing thread, a write and a read channel, s fast slots.  Where the
bounds of `bound` may be loose and the planners may lose, this is the truth,
for n <= 12.

A state of the search says how many adjoint steps are left, which state is
live, what the computing thread and both channels do and how long still, and
which states are in the slots and in the tier (64 bits in all).  Saving a
state and starting a step or a transfer cost nothing; then time passes until
the next activity ends.  Starting only then loses nothing: whatever is begun
later could be begun at the last such moment.

The heuristic counts what the computing thread still has to do: the turns
left, and one forward step for each state below them that is neither live nor
in a slot, in the tier or in transfer.  Each of those needs a step of its own,
so the estimate is never too high (admissible) and the first goal reached is
optimal.

The optimum assumes what the planners assume: state 0 is a checkpoint like any
other, and a state is its own tape.  Known gap: real tapes are refused.
"""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Iterator
from fractions import Fraction
from math import lcm
from typing import NamedTuple

import numpy as np

from multistage.errors import ArgumentError
from multistage.model.costs import Costs

from .compiled import compiler, library

MAX_STEPS = 12
MAX_COMPUTE = 63
MAX_TRANSFER = 255


class Times(NamedTuple):
    """The four times in whole units; `write` 0 means that there is no slow tier."""

    forward: int
    turn: int
    write: int
    read: int


def exact_makespan(costs: Costs, slots: int, n_steps: int, *, limit: int = 20_000_000) -> float:
    """Return the least makespan of any schedule, in seconds.

    Parameters
    ----------
    costs : Costs
        With `tape_step_s` None.  Times must be whole multiples of one unit, a
        forward and an adjoint step together at most 63 of them, a transfer at
        most 255.  Only the first tier counts.
    slots : int
        Fast slots, at least 1.
    n_steps : int
        1 to 12.
    limit : int
        States of the search to keep at most, some 60 bytes each.

    Raises
    ------
    ArgumentError
        For arguments out of range, or when `limit` does not suffice.

    Examples
    --------
    >>> from multistage.model.tier import Tier
    >>> exact_makespan(Costs(1.0, 2.0, tiers=(Tier(write_s=2.0, read_s=1.0),)), 2, 6)
    19.0
    """
    if costs.tape_step_s is not None:
        raise ArgumentError("exact_makespan needs tape_step_s=None: a state that is its own tape")
    if not 1 <= n_steps <= MAX_STEPS:
        raise ArgumentError(f"n_steps={n_steps} must lie in 1..{MAX_STEPS} for an exact search")
    if slots < 1:
        raise ArgumentError(f"slots={slots} must be at least 1")
    times, unit_s = whole_times(costs)
    search = native_search if compiler() else _search
    found = search(times, min(slots, n_steps), n_steps, limit)
    if found is None:
        raise ArgumentError(f"the exact search needs more than limit={limit} states; raise it")
    return found * unit_s


def whole_times(costs: Costs) -> tuple[Times, float]:
    """Return the times in whole units and the unit in seconds.

    Raises
    ------
    ArgumentError
        If there is no such unit, or too many units are needed.
    """
    tier = costs.tier
    seconds = [costs.forward_step_s, costs.turn_s]
    if tier is not None and tier.capacity_states != 0:
        seconds += [tier.write_s, tier.read_s]
        if min(tier.write_s, tier.read_s) <= 0:
            raise ArgumentError("write_s and read_s must be above 0 for an exact search")
    ratios = [Fraction(s / costs.forward_step_s).limit_denominator(MAX_COMPUTE) for s in seconds]
    per_step = lcm(*(ratio.denominator for ratio in ratios))
    units = [int(ratio * per_step) for ratio in ratios] + [0] * (4 - len(seconds))
    unit_s = costs.forward_step_s / per_step
    times = Times(*units)
    whole = all(
        abs(k * unit_s - s) <= 1e-9 * max(s, unit_s) for k, s in zip(units, seconds, strict=False)
    )
    if (
        not whole
        or times.forward + times.turn > MAX_COMPUTE
        or max(times.write, times.read) > MAX_TRANSFER
    ):
        raise ArgumentError(
            f"times {seconds} must be whole multiples of one unit, steps at most {MAX_COMPUTE} "
            f"and transfers at most {MAX_TRANSFER} of it; round them"
        )
    return times, unit_s


def native_search(times: Times, slots: int, n_steps: int, limit: int) -> int | None:
    """Run the search in C with growing tables; None when `limit` states do not suffice."""
    search = library("steps_exact").exact_steps
    search.restype = ctypes.c_int64
    search.argtypes = [*[ctypes.c_int64] * 6, *[ctypes.c_void_p] * 2, ctypes.c_int64]
    search.argtypes += [ctypes.c_void_p, ctypes.c_int64]
    size = 1 << 16
    while True:
        keys = np.zeros(size, dtype=np.uint64)
        seconds = np.empty(size, dtype=np.int64)
        heap = np.empty(3 * size, dtype=np.int64)
        found = int(
            search(
                n_steps,
                slots,
                *times,
                keys.ctypes.data,
                seconds.ctypes.data,
                size,
                heap.ctypes.data,
                size,
            )
        )
        assert found >= -1, found
        if found >= 0:
            return found
        if size > limit:
            return None
        size *= 4


class _State(NamedTuple):
    left: int  # adjoint steps still to do
    live: int | None  # the live state; while a step runs, its result
    op: str  # "idle", "forward" or "turn"
    op_rest: int
    fast: frozenset[int]
    slow: frozenset[int]
    put: tuple[int, int] | None  # state under write, time left
    get: tuple[int, int] | None


def _search(times: Times, slots: int, n_steps: int, limit: int) -> int | None:
    """Search as `steps_exact.c` does, plainly: its twin."""
    start = _State(n_steps, 0, "idle", 0, frozenset(), frozenset(), None, None)
    best = {start: 0}
    heap = [(0, 0, 0, start)]
    count = 0
    while heap:
        _, negative, _, state = heapq.heappop(heap)
        if best[state] < -negative:
            continue
        if state.left == 0 and state.op == "idle":
            return -negative
        for cost, successor in _successors(state, times, slots, n_steps):
            total = cost - negative
            if total < best.get(successor, total + 1):
                if len(best) > limit:
                    return None
                best[successor] = total
                count += 1
                estimate = total + _still_to_compute(successor, times, n_steps)
                heapq.heappush(heap, (estimate, -total, count, successor))
    raise AssertionError("every reversal has a schedule")


def _still_to_compute(state: _State, times: Times, n_steps: int) -> int:
    at_hand = set(state.fast | state.slow)
    at_hand |= {transfer[0] for transfer in (state.put, state.get) if transfer}
    if state.live is not None:
        at_hand.add(state.live)
    left = state.left - (state.op == "turn")
    missing = sum(i not in at_hand for i in range(left))
    last = times.forward if left == n_steps else 0  # the first turn makes state n as well
    return state.op_rest + last + missing * times.forward + left * times.turn


def _successors(
    state: _State, times: Times, slots: int, n_steps: int
) -> Iterator[tuple[int, _State]]:
    pinned = {state.put[0]} if state.put else set()
    if len(state.fast) + (state.get is not None) < slots:
        rooms = [state.fast]
    else:
        rooms = [state.fast - {victim} for victim in state.fast - pinned]
    if state.op == "idle":
        if state.live is not None and state.live not in state.fast:
            for room in rooms:
                yield 0, state._replace(fast=room | {state.live})
        for i in state.fast | ({state.live} if state.live is not None else set()):
            if i == state.left - 1:
                seconds = times.turn + (times.forward if state.left == n_steps else 0)
                yield 0, state._replace(op="turn", live=None, op_rest=seconds)
            elif i < state.left:
                yield 0, state._replace(op="forward", live=i + 1, op_rest=times.forward)
    if times.write and state.put is None:
        for i in state.fast - state.slow:
            yield 0, state._replace(put=(i, times.write))
    if state.get is None:
        for i in state.slow - state.fast:
            for room in rooms:
                yield 0, state._replace(fast=room, get=(i, times.read))
    rests = [state.op_rest] if state.op != "idle" else []
    rests += [transfer[1] for transfer in (state.put, state.get) if transfer]
    if rests:
        yield min(rests), _after(state, min(rests))


def _after(state: _State, seconds: int) -> _State:
    left, fast, slow, put, get = state.left, state.fast, state.slow, state.put, state.get
    if put:
        put = (put[0], put[1] - seconds)
        if put[1] == 0:
            slow, fast = (slow | {put[0]}, fast) if put[0] < left else (slow, fast - {put[0]})
            put = None
    if get:
        get = (get[0], get[1] - seconds)
        if get[1] == 0:
            fast = fast | {get[0]} if get[0] < left else fast
            get = None
    op, rest = state.op, state.op_rest - seconds if state.op != "idle" else 0
    if rest == 0 and op != "idle":
        if op == "turn":
            # Nobody wants the states above any more; a write in flight keeps its slot.
            left -= 1
            slow = frozenset(i for i in slow if i < left)
            fast = frozenset(i for i in fast if i < left or (put and i == put[0]))
        op = "idle"
    return _State(left, state.live, op, rest, fast, slow, put, get)
