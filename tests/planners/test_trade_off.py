"""Plans for many numbers of slots."""

from __future__ import annotations

import pytest

from multistage.errors import ArgumentError
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.planners import PLANNERS, RANKED
from multistage.planners.ranking import trade_off

COSTS = Costs(1e-3, 2e-3, tiers=(Tier("file", 4e-3, 4e-3),))


def test_plans_are_those_of_the_planners() -> None:
    curves = trade_off(COSTS, 100, also=17)
    assert list(curves) == list(RANKED)
    for name, plans in curves.items():
        slots = [plan.slots for plan in plans]
        assert slots == sorted(set(slots))
        for made in plans:
            assert made.makespan_s == PLANNERS[name](COSTS, made.slots, 100).makespan_s
    assert {1, 17, 99} <= {plan.slots for plan in curves["revolve"]}
    assert [plan.slots for plan in curves["store-all"]] == [99]
    assert 10 <= len(curves["revolve"]) <= 13


def test_one_step() -> None:
    assert [plan.slots for plan in trade_off(COSTS, 1, ["revolve"])["revolve"]] == [1]


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match=r"planners \['fast'\] are not known"):
        trade_off(COSTS, 9, ["fast"])
    with pytest.raises(ArgumentError, match=r"slots=0 must be at least 1"):
        trade_off(COSTS, 9, slots=[0, 3])
    with pytest.raises(ArgumentError, match="n_steps=0"):
        trade_off(COSTS, 0)
