"""The bounds stay below every schedule, and say what they say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multistage import native
from multistage.costs import Costs
from multistage.plan.bound import lower_bound, priced_bound
from multistage.plan.exact import exact_makespan
from multistage.plan.revolve import revolve
from multistage.plan.store_all import store_all
from multistage.plan.streaming import streaming
from multistage.tier import Tier


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


def test_what_fits_nowhere_is_computed_again() -> None:
    # 100 steps, 9 slots and the working tape: 89 states are missing.
    assert lower_bound(Costs(1.0, 2.0), 9, 100) == 300.0 + 89
    # Every fourth of 99 states can be written: 24 more are not missing.
    costs = Costs(1.0, 2.0, tiers=(Tier(write_s=4.0, read_s=1.0),))
    assert lower_bound(costs, 9, 100) == 300.0 + 89 - 24
    # The tier holds ten.
    few = Costs(1.0, 2.0, tiers=(Tier(write_s=4.0, read_s=1.0, capacity_states=10),))
    assert lower_bound(few, 9, 100) == 300.0 + 89 - 10


def test_slow_reads_raise_the_bound() -> None:
    fast = Costs(1.0, 1.0, tiers=(Tier(write_s=1.0, read_s=1.0),))
    slow = Costs(1.0, 1.0, tiers=(Tier(write_s=1.0, read_s=5.0),))
    assert lower_bound(slow, 5, 200) > lower_bound(fast, 5, 200)


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
def test_prices_tighten_where_the_tier_is_slow() -> None:
    costs = Costs(1.0, 1.0, tiers=(Tier(write_s=20.0, read_s=20.0),))
    assert priced_bound(costs, 3, 200) > 1.1 * lower_bound(costs, 3, 200)
    assert priced_bound(costs, 3, 200) <= streaming(costs, 3, 200).makespan_s
    # Slots at the turn have a price: without one the priced bound was the closed form here.
    costs = Costs(1.0, 1.0, tiers=(Tier(write_s=50.0, read_s=50.0),))
    assert priced_bound(costs, 10, 200) > 1.05 * lower_bound(costs, 10, 200)


@pytest.mark.skipif(native.LIBRARY is None, reason="the C core was not built")
@pytest.mark.parametrize("prices", [(0.0, 0.0, 0.0), (0.3, 0.05, 0.1), (0.1, 0.2, 0.02)])
@pytest.mark.parametrize(("n", "slots"), [(2, 1), (5, 1), (9, 2), (14, 3)])
def test_the_kernel_equals_its_twin(n: int, slots: int, prices) -> None:
    import numpy as np

    first, second, read = prices
    arguments = (1 - first, 4 * first, 3 * first, 1 - second - read, 4 * second, 3 * read)
    assert native.LIBRARY is not None
    work = np.empty(int(native.LIBRARY.ms_priced_work_len(n, slots)))
    kernel = native.LIBRARY.ms_priced(n, slots, *arguments, work.ctypes.data)
    assert kernel == pytest.approx(priced_twin(n, slots, *arguments))


def priced_twin(n, slots, forward_1, write_1, keep_1, forward_2, write_2, read) -> float:
    """The programme as its formulas say it, with memory."""
    from functools import cache
    from math import inf

    forward, write, keep = (forward_1, forward_2), (write_1, write_2), (keep_1, 0.0)

    @cache
    def right(length: int, free: int, later: int) -> float:
        if length == 1:
            return 0.0
        kept = keep[later] + fast(length, free - 1, later) if free else inf
        return min(kept, write[later] + slow(length, free, later))

    @cache
    def fast(length: int, free: int, later: int) -> float:
        if length == 1:
            return 0.0
        return min(
            m * forward[later] + right(length - m, free, later) + fast(m, free, 1)
            for m in range(1, length)
        )

    @cache
    def back(length: int, free: int) -> float:
        if length == 1:
            return read
        kept = fast(length, free - 1, 1) if free else inf
        return read + min(slow(length, free, 1), kept)

    @cache
    def slow(length: int, free: int, later: int) -> float:
        if length == 1:
            return 0.0
        return min(
            m * forward[later] + right(length - m, free, later) + back(m, free)
            for m in range(1, length)
        )

    return min(keep_1 + fast(n, slots - 1, 0) if slots else inf, write_1 + slow(n, slots, 0))
