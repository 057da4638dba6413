"""Revolve's counts and schedules against brute force, pyrevolve's core and the C kernel."""

from __future__ import annotations

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multistage import native
from multistage.planners.single.binomial import (
    beta,
    forward_and_reverse,
    nu,
    reverse_actions,
    reverse_codes,
)
from multistage.schedule.rules import check


@cache
def brute_force(length: int, slots: int) -> int:
    """Fewest forward steps over every choice of the first advance."""
    if length == 1:
        return 0
    if slots == 1:
        return length * (length - 1) // 2
    return min(
        m + brute_force(length - m, slots - 1) + brute_force(m, slots) for m in range(1, length)
    )


def test_counts_are_optimal() -> None:
    for slots in range(1, 9):
        for n in range(1, 41):
            assert nu(n, slots) == brute_force(n, slots), (n, slots)


def test_known_counts() -> None:
    """Compare n + nu(n, s) with the literature's tables."""
    assert 1_000 + nu(1_000, 10) == 4_636
    assert 10_000 + nu(10_000, 10) == 67_624
    assert 100_000 + nu(100_000, 10) == 932_040
    assert 100_000 + nu(100_000, 100) == 394_747
    assert beta(3, 2) == 10
    assert beta(3, -1) == 0


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 3_000), slots=st.integers(1, 40))
def test_long_schedules_are_legal_and_optimal(n: int, slots: int) -> None:
    if slots == 1:
        n = min(n, 200)
    used = check(forward_and_reverse(reverse_actions(0, n, slots)), n, slots)
    assert used.forward_steps == nu(n, slots) + 1
    assert used.peak_slots <= slots


@pytest.mark.skipif(native.LIBRARY is None, reason="the C core was not built")
@settings(max_examples=200, deadline=None)
@given(
    start=st.integers(0, 1_000), n=st.integers(1, 600), slots=st.integers(0, 30), keep=st.booleans()
)
def test_the_kernel_equals_its_twin(start: int, n: int, slots: int, keep: bool) -> None:
    if slots + keep == 0:
        slots = 1
    if slots + keep == 1:
        n = min(n, 60)
    batches = list(native.revolve_codes(start, start + n, slots, keep))
    twin = reverse_codes(start, start + n, slots, keep)
    assert [number for batch in batches for number in batch] == [
        number for code in twin for number in code
    ]
