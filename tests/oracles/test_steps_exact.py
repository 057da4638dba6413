"""The exact search: hand-made optima, its limits."""

from __future__ import annotations

import pytest

from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.planners.single.binomial import nu
from oracles.compiled import compiler
from oracles.steps_exact import exact_makespan

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")


def costs(turn: float, write: float, read: float) -> Costs:
    return Costs(1.0, turn, tiers=(Tier(write_s=write, read_s=read),))


def test_without_a_tier_revolve_is_the_optimum() -> None:
    for n in range(1, 9):
        for slots in (1, 2, 3):
            assert exact_makespan(Costs(1.0, 2.0), slots, n) == nu(n, slots) + 1 + 2 * n


def test_a_fast_tier_makes_recomputation_needless() -> None:
    assert exact_makespan(costs(2.0, 1.0, 1.0), 3, 8) == 8 * 3
