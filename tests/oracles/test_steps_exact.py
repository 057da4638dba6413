"""The exact search: hand-made optima, its limits."""

from __future__ import annotations

import pytest

from multistage.errors import ArgumentError
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.planners.single.binomial import nu
from oracles.compiled import compiler
from oracles.steps_exact import exact_makespan, whole_times

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")


def costs(turn: float, write: float, read: float) -> Costs:
    return Costs(1.0, turn, tiers=(Tier(write_s=write, read_s=read),))


def test_without_a_tier_revolve_is_the_optimum() -> None:
    for n in range(1, 9):
        for slots in (1, 2, 3):
            assert exact_makespan(Costs(1.0, 2.0), slots, n) == nu(n, slots) + 1 + 2 * n


def test_a_fast_tier_makes_recomputation_needless() -> None:
    assert exact_makespan(costs(2.0, 1.0, 1.0), 3, 8) == 8 * 3


def test_units_may_be_fractions() -> None:
    assert exact_makespan(Costs(0.5, 1.0), 2, 6) == exact_makespan(Costs(1.0, 2.0), 2, 6) / 2
    times, unit_s = whole_times(costs(1.5, 2.0, 0.5))
    assert unit_s == 0.5
    assert tuple(times) == (2, 3, 4, 1)


@pytest.mark.parametrize(
    ("wrong", "slots", "n"),
    [
        (Costs(1.0, 2.0), 2, 13),
        (Costs(1.0, 2.0), 2, 0),
        (Costs(1.0, 2.0), 0, 5),
        (Costs(1.0, 2.0, tape_step_s=1.0), 2, 5),
        (costs(2.0, 1000.0, 1.0), 2, 5),
        (costs(2.0, 0.0, 1.0), 2, 5),
    ],
)
def test_bad_input(wrong: Costs, slots: int, n: int) -> None:
    with pytest.raises(ArgumentError):
        exact_makespan(wrong, slots, n)


def test_too_small_a_limit_raises_an_error() -> None:
    with pytest.raises(ArgumentError, match="limit=1 states"):
        exact_makespan(costs(2.0, 3.0, 7.0), 4, 12, limit=1)
