"""Chains too long for one table: planned in pieces, or refused with figures."""

import random

import pytest

from multistage import native
from multistage.errors import ArgumentError, BudgetError
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.planners.chain import heterogeneous, pieces
from multistage.planners.chain.at_once import most_stages, plan_at_once, table_bytes
from multistage.planners.chain.heterogeneous import memory_curve, plan_chain, smallest_memory
from multistage.planners.chain.joint_bound import joint_lower_bound
from multistage.planners.chain.memory import use_of
from tests.chain_schedules import no_tier_s, offload_s

core = pytest.mark.skipif(native.LIBRARY is None, reason="no C core")


def chain(stages, seed=1):
    rng = random.Random(seed)
    made = []
    for i in range(stages):
        output, forward_s = rng.randint(1, 100), rng.uniform(0.1, 3)
        tape = output + rng.randint(0, 400)
        made.append(Stage(f"s{i}", forward_s, 2 * forward_s, output, tape, output))
    return StageCosts(tuple(made), 10)


@pytest.fixture
def few_at_once(monkeypatch):
    """Chains of more than 40 stages are long, and divided into 30 or 10 blocks."""
    for module in (heterogeneous, pieces):
        monkeypatch.setattr(module, "most_stages", lambda _resolution=0: 40)
    monkeypatch.setattr(heterogeneous, "BLOCKS", (30, 10))
    monkeypatch.setattr(pieces, "BLOCKS", (30, 10))
    monkeypatch.setattr(pieces, "_PIECE", 20)
    monkeypatch.setattr(pieces, "MOST_AT_ONCE", 40)


@pytest.mark.long(but=("0.3-None", "0.6-write=200B/s,capacity=900B"))
@core
@pytest.mark.parametrize(
    "tiers", [None, "write=200B/s,latency=100ms", "write=200B/s,capacity=900B"]
)
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
def test_long_chains_are_planned_in_pieces(few_at_once, share, tiers):
    costs = chain(90)
    plan = plan_chain(costs, share, tiers=tiers)
    assert plan.planner == "pieces" and plan.peak_bytes <= plan.memory_bytes
    whole = plan_at_once(costs, plan.memory_bytes, "optimal", plan.tier)
    assert plan.makespan_s <= 1.15 * whole.makespan_s
    if tiers is None:
        assert plan.makespan_s >= whole.makespan_s * (1 - 1e-12)
    else:
        assert plan.makespan_s <= no_tier_s(plan)
        assert offload_s(plan) is None  # not known


@core
def test_the_tier_is_used_in_blocks(few_at_once):
    plan = plan_chain(chain(90), 0.3, tiers="write=2kB/s")
    assert plan.writes and plan.makespan_s < 0.9 * no_tier_s(plan)


@core
def test_the_least_memory_of_a_long_chain_works(few_at_once):
    costs = chain(60)
    least = smallest_memory(costs)
    for planner in ("optimal", "revolve"):
        assert plan_chain(costs, least, planner).peak_bytes <= least
    with pytest.raises(BudgetError, match="60 steps are planned in pieces"):
        plan_chain(costs, least - 1)


@core
def test_the_curve_of_a_long_chain_is_of_its_blocks(few_at_once):
    costs = chain(60)
    curve = memory_curve(costs)
    for memory, seconds in curve[:: len(curve) // 4 + 1]:
        assert plan_chain(costs, max(memory, smallest_memory(costs))).makespan_s <= 1.1 * seconds
    assert curve[-1][1] == pytest.approx(use_of(plan_chain(costs).actions, costs).makespan_s)


def test_the_memory_of_a_table_is_known_before_it_is_made():
    assert (
        table_bytes(most_stages(), 500) < 1.3 * 2**30 < 1.1 * table_bytes(most_stages() + 60, 500)
    )
    with pytest.raises(ArgumentError, match=r"takes a table of .* for 90 stages.*leave resolution"):
        plan_chain(chain(90), 0.3, resolution=1 << 20)
    with pytest.raises(ArgumentError, match="leave resolution out"):
        memory_curve(chain(90), resolution=1 << 20)


def test_the_bound_of_a_long_chain_is_the_time_of_plain_training():
    costs = chain(1600)
    plan = plan_chain(costs, None, "store-all")
    bound = joint_lower_bound(costs, plan.peak_bytes // 2, Tier.of_rates(1.0, 1.0))
    assert bound == pytest.approx(plan.makespan_s)


@core
@pytest.mark.long
def test_five_thousand_stages_are_planned():
    costs = chain(5000)
    plan = plan_chain(costs, 0.3)
    assert plan.makespan_s < 1.22 * plan.plain_s and plan.peak_bytes <= plan.memory_bytes
