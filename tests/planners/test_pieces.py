"""Chains too long for one table: planned in pieces, or refused with figures."""

import random

import numpy as np
import pytest

from multistage import native
from multistage.actions import Advance, Load, Reverse, Tape
from multistage.errors import ArgumentError, BudgetError
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.planners import Plan
from multistage.planners.chain import grouped, heterogeneous, pieces
from multistage.planners.chain.at_once import most_stages, plan_at_once, table_bytes
from multistage.planners.chain.heterogeneous import memory_curve, plan_chain, smallest_memory
from multistage.planners.chain.joint_bound import joint_lower_bound
from multistage.planners.chain.memory import use_of
from multistage.planners.chain.sizes import Sizes
from multistage.planners.chain.table import Table
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
    """Chains of more than 40 stages are long."""
    monkeypatch.setattr(heterogeneous, "most_stages", lambda _resolution=0: 40)
    monkeypatch.setattr(heterogeneous, "_GROUPS", 30)
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
@pytest.mark.parametrize("planner", ["optimal", "revolve"])
def test_so_many_steps_are_planned_by_one_table_with_a_tier_or_without(planner):
    costs = chain(240)
    plan = pieces.chain_plan(costs, 300, planner)
    assert plan.planner == planner and plan.peak_bytes <= plan.memory_bytes
    assert plan.memory_bytes == pieces.least_beside(costs, planner) + 300


@core
def test_the_tier_is_used_where_stages_are_too_many(few_at_once):
    plan = plan_chain(chain(90), 0.3, tiers="write=2kB/s")
    assert plan.writes and plan.makespan_s < 0.9 * no_tier_s(plan)


def streamed(seed):
    """Return random steps, a limit and a tier that takes states alone."""
    rng = random.Random(seed)
    count, tapes = rng.randint(50, 90), rng.random() < 0.3
    sizes = [rng.randint(20, 200) for _ in range(count + 1)]
    stages = []
    for i, size in enumerate(sizes[1:]):
        seconds = rng.uniform(1, 10)
        tape, spared_s = (size + rng.randint(0, 300), 0.0) if tapes else (size, seconds)
        stages.append(Stage(f"{i}", seconds, 2 * seconds, size, tape, 0, spared_s=spared_s))
    costs = StageCosts(tuple(stages), sizes[0])
    memory = pieces.least_in_pieces(costs) + 200 * rng.choice([2, 3, 5, 8, 12, 20])
    rates = [20 / rng.choice([0.3, 0.7, 1, 1.5, 2.5, 4, 8]) for _ in range(2)]
    capacity = rng.choice([None, None, int(110 * count * rng.uniform(0.05, 0.5))])
    return costs, memory, Tier.of_rates(*rates, capacity_bytes=capacity, tapes=False)


@pytest.mark.long(but=("0-*", "1-*"))
@core
@pytest.mark.parametrize("ways", ["runs", "band", "groups"])
@pytest.mark.parametrize("seed", range(30))
def test_a_tier_is_planned_for_in_some_runs_and_groups_as_at_once(seed, ways, monkeypatch):
    """Few runs of more than 16 stages are solved, none of more than 24, or two by two first."""
    costs, memory, rates = streamed(seed)
    monkeypatch.setattr(grouped, "_BAND", 24)
    monkeypatch.setattr(grouped, "_SHORTEST", 24)
    monkeypatch.setattr(grouped, "_LONGEST", 1)
    if ways == "band":
        monkeypatch.setattr(grouped, "_slots_of_runs", lambda stages: 0)
    if ways == "groups":
        monkeypatch.setattr(grouped, "_grouping", lambda true, room: (2, 150))
    actions = grouped.plan_grouped(costs, memory, rates)
    plan = Plan.judged("pieces", costs, memory, actions, rates)
    whole = plan_at_once(costs, memory, "optimal", rates)
    assert plan.peak_bytes <= memory
    assert plan.makespan_s <= 1.03 * whole.makespan_s


@core
@pytest.mark.parametrize("seed", [1, 3, 8])
def test_least_memory_and_a_small_tier_are_planned_for_in_some_runs(seed, monkeypatch):
    """A segment of all stages is a start: there is no other plan that fits both."""
    costs, _, rates = streamed(seed)
    monkeypatch.setattr(grouped, "_BAND", 24)
    monkeypatch.setattr(grouped, "_LONGEST", 1)
    memory = pieces.least_in_pieces(costs)
    actions = grouped.plan_grouped(costs, memory, rates)
    plan = Plan.judged("pieces", costs, memory, actions, rates)
    whole = plan_at_once(costs, memory, "optimal", rates)
    assert plan.peak_bytes <= memory and plan.makespan_s <= 1.03 * whole.makespan_s


@pytest.mark.long(but=("0-*",))
@core
@pytest.mark.parametrize("ways", ["at once", "stages", "groups"])
@pytest.mark.parametrize("seed", range(10))
def test_plans_that_keep_no_tape_stream_states(seed, ways, monkeypatch):
    """With a tier that takes no time each step runs twice; no tier makes a plan slower."""
    costs, memory, rates = streamed(seed)
    monkeypatch.setattr(grouped, "_BAND", 24)
    monkeypatch.setattr(grouped, "_SHORTEST", 24)
    if ways == "groups":
        monkeypatch.setattr(grouped, "_grouping", lambda true, room: (2, 150))
    memory += pieces.least_in_pieces(costs)
    plain = plan_at_once(costs, memory, "revolve")
    for tier in (rates, Tier.of_rates(1e9, 1e9, tapes=False)):
        if ways == "at once":
            plan = plan_at_once(costs, memory, "revolve", tier)
        else:
            actions = grouped.plan_grouped(costs, memory, tier, tapes=False)
            plan = Plan.judged("pieces", costs, memory, actions, tier)
        assert plan.peak_bytes <= memory
        most = 1.0 if ways == "at once" else 1.03
        assert plan.makespan_s <= most * plain.makespan_s
        held = None
        for action in plan.actions:  # a tape is followed by its adjoint, before any other step
            if isinstance(action, Tape | Advance | Load | Reverse):
                assert held is None or action == Reverse(held)
                held = action.step if isinstance(action, Tape) else None
    forward_s = sum(stage.forward_s for stage in costs.stages)
    turns_s = sum(stage.forward_s + stage.backward_s - stage.spared_s for stage in costs.stages)
    assert plan.writes and plan.makespan_s <= 1.01 * (forward_s + turns_s)


def tight(seed):
    """Return unequal steps and a limit with hardly a state of room beside the largest."""
    rng, stages = random.Random(seed), []
    for i in range(150):
        output, seconds = rng.randint(0, 2000), rng.lognormvariate(0, 0.3)
        over = [rng.choice([0, 0, 1000]) for _ in range(3)]
        sizes = output, output + rng.randint(0, 4000), rng.choice([output, 0])
        stages.append(Stage(f"{i}", seconds, 2 * seconds, *sizes, *over))
    costs = StageCosts(tuple(stages), 1000)
    return costs, pieces.least_in_pieces(costs) + 150


@core
@pytest.mark.parametrize("seed", [1, 2, 4])
def test_little_memory_is_divided_in_slots_fine_enough(seed):
    (costs, memory), rates = tight(seed), Tier.of_rates(300, 600, tapes=False)
    actions = grouped.plan_grouped(costs, memory, rates)
    plan = Plan.judged("pieces", costs, memory, actions, rates)
    assert plan.makespan_s <= 1.01 * plan_at_once(costs, memory, "optimal", rates).makespan_s


@core
@pytest.mark.parametrize(
    ("costs", "length"),
    [(chain(70), 12), (StageCosts((Stage("a", 1.0, 2.0, 90, 200, 50),) * 170, 90), 60)],
    ids=["unequal", "equal"],
)
def test_the_table_of_a_band_is_that_of_all_runs_up_to_its_length(costs, length):
    sizes = Sizes.of(costs).in_slots(40.0)
    whole, band = Table(sizes, 60, by_length=False), Table(sizes, 60, band=length)
    _, none, table = whole.solved()
    _, none_there, there = band.solved()
    at = 0
    for s in range(len(sizes)):
        count = min(length, len(sizes) - s)
        np.testing.assert_allclose(there[:, s, :count], table[:, at : at + count], rtol=1e-4)
        assert np.array_equal(none_there[s, :count], none[at : at + count])
        for memory in (9, 30, 60):
            trace = band.trace(memory, s, s + count - 1)
            assert (trace is None) == (whole.trace(memory, s, s + count - 1) is None)
        at += len(sizes) - s


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
