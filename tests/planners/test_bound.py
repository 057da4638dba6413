"""The bounds stay below every schedule, and say what they say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.compiled import compiler
from oracles.steps_exact import exact_makespan

from benchmarks._priced_bound import Prices, priced_bound
from multistage import native
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.planners.bound import lower_bound
from multistage.planners.single.revolve import revolve
from multistage.planners.single.segments import store_all
from multistage.planners.streaming.streaming import streaming


def test_with_room_for_all_the_bound_is_plain_work() -> None:
    costs = Costs(1.0, 2.0)
    assert lower_bound(costs, 99, 100) == 300.0
    assert store_all(costs, 99, 100).makespan_s == 300.0
    taped = Costs(1.0, 2.0, tape_step_s=1.5)
    assert lower_bound(taped, 99, 100) == store_all(taped, 99, 100).makespan_s == 350.0


@pytest.mark.parametrize("tape_bytes", [1, 25, 60, 100, 250])
@pytest.mark.parametrize("tape_step_s", [None, 1.5])
def test_tapes_of_any_size_stay_above_the_bound(tape_bytes: int, tape_step_s) -> None:
    tier = Tier(write_s=4.0, read_s=4.0)
    costs = Costs(1.0, 2.0, tape_step_s, state_bytes=100, tape_bytes=tape_bytes, tiers=(tier,))
    for n in (1, 2, 4, 9, 40):
        for slots in (1, 2, 3, 11, 40):
            if 1 + slots / costs.tape_slots >= n:
                makespan_s = store_all(costs, slots, n).makespan_s
                assert lower_bound(costs, slots, n) <= makespan_s + 1e-9
                assert priced_bound(costs, slots, n) <= makespan_s + 1e-9


def test_states_that_fit_nowhere_are_recomputed() -> None:
    # 100 steps, 9 slots and the working tape: 89 states are missing.
    assert lower_bound(Costs(1.0, 2.0), 9, 100) == 300.0 + 89
    # Every fourth of 99 states can be written: 24 more are not missing.
    costs = Costs(1.0, 2.0, tiers=(Tier(write_s=4.0, read_s=1.0),))
    assert lower_bound(costs, 9, 100) == 300.0 + 89 - 24
    # The tier holds ten.
    few = Costs(1.0, 2.0, tiers=(Tier(write_s=4.0, read_s=1.0, capacity_states=10),))
    assert lower_bound(few, 9, 100) == 300.0 + 89 - 10


@pytest.mark.skipif(compiler() is None, reason="no C compiler")
@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(1, 8),
    slots=st.integers(1, 4),
    turn=st.integers(1, 3),
    write=st.integers(1, 9),
    read=st.integers(1, 9),
)
def test_bounds_below_the_optimum_below_the_planners(n, slots, turn, write, read) -> None:
    tier = Tier(write_s=float(write), read_s=float(read))
    costs = Costs(1.0, float(turn), tiers=(tier,))
    exact = exact_makespan(costs, slots, n)
    assert lower_bound(costs, slots, n) <= priced_bound(costs, slots, n) <= exact + 1e-9
    assert exact <= streaming(costs, slots, n).makespan_s + 1e-9
    assert exact <= revolve(costs, slots, n).makespan_s + 1e-9


@pytest.mark.skipif(native.LIBRARY is None, reason="the C core was not built")
@pytest.mark.parametrize("at", [(0.0, 0.0, 0.0), (0.3, 0.05, 0.1), (0.1, 0.2, 0.02)])
@pytest.mark.parametrize(("n", "slots"), [(2, 1), (5, 1), (9, 2), (14, 3)])
def test_the_kernel_equals_its_twin(n: int, slots: int, at) -> None:
    import numpy as np

    first, second, reading = at
    prices = Prices(1.0, 2.0, *at, 4 * first, 3 * first, 4 * second, 3 * reading)
    work = np.empty(int(native.LIBRARY.ms_priced_work_len(n, slots)))
    kernel = native.LIBRARY.ms_priced(n, slots, np.array(prices).ctypes.data, work.ctypes.data)
    assert kernel == pytest.approx(priced_twin(n, slots, prices))


NONE, BEGUN, THROUGH = range(3)  # reads that outlast a segment


def priced_twin(n: int, slots: int, p: Prices) -> float:
    """The program as its formulas say it, with memory; `free` as the kernel counts it."""
    from functools import cache
    from math import inf

    def second(mode: int, free: int) -> float:
        price = 1 - p.second * (free > 0) - p.reading * (mode == THROUGH)
        if mode == BEGUN and free > 0:
            return min(price, second(THROUGH, free - 1))
        return price

    def step(mode: int, free: int, later: int) -> float:
        if later:
            return p.step * second(mode, free)
        return p.step * (1 - p.first * (free > 0 or mode == THROUGH))

    @cache
    def right(length: int, mode: int, free: int, later: int) -> float:
        if length == 1:
            return (p.turn + (0.0 if later else p.step)) * second(mode, free)
        kept = (0.0 if later else p.keep_1) + cost("held", length, mode, free - 1, later)
        written = (p.write_2 if later else p.write_1) + cost("away", length, mode, free, later)
        return min(kept, written)

    def left(kind: str, length: int, mode: int, free: int) -> float:
        """The lower part: the first state is kept, leaves its slot, or is read."""
        if free < 0:
            return inf
        away = cost("away", length, mode, free if kind == "away" else free + 1, 1)
        if kind == "away":
            return p.read + min(away, cost("both", length, mode, free - 1, 1))
        evict = p.write_2 if kind == "held" else 0.0
        return min(cost(kind, length, mode, free, 1), evict + away)

    @cache
    def cost(kind: str, length: int, mode: int, free: int, later: int) -> float:
        if not (kind == "away") <= free <= slots:
            return inf
        if length == 1:
            return p.turn * second(mode, free + (kind != "away"))
        above = BEGUN if kind == "away" else NONE

        def least(ahead: int, steps: int, lower: int, lower_free: int) -> float:
            return min(
                m * step(steps, free, later)
                + right(length - m, ahead, free, later)
                + left(kind, m, lower, lower_free)
                for m in range(1, length)
            )

        if mode == THROUGH:
            return least(THROUGH, THROUGH, THROUGH, free)
        none = least(above, NONE, NONE, free)
        if mode == NONE:
            return none
        return min(
            none,
            least(above, NONE, BEGUN, free),
            least(BEGUN, NONE, THROUGH, free - 1) if free else inf,
            cost(kind, length, THROUGH, free - 1, later),
        )

    return right(n, NONE, slots, 0)
