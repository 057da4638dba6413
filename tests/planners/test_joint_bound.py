"""The lower bound of chains with a slow tier."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from oracles.chain_exact import exact_chain_makespan

from multistage import native
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.planners.chain.heterogeneous import plan_chain, smallest_memory
from multistage.planners.chain.joint_bound import Dual, joint_lower_bound, without_loss
from multistage.planners.chain.sizes import Sizes
from multistage.planners.chain.table import Table

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="no C core")
SLOW = Tier.of_rates(1e-3, 1e-3)


def chain(length, seed, spared=False, megabytes=1):
    draw = random.Random(seed)
    stages = []
    for k in range(length):
        output = megabytes * draw.randint(1, 3)
        forward_s = float(draw.randint(1, 3))
        stages.append(
            Stage(
                f"s{k}",
                forward_s,
                float(draw.randint(1, 4)),
                output,
                output + megabytes * draw.randint(0, 4),
                forward_overhead_bytes=draw.randint(0, 1) * megabytes,
                tape_overhead_bytes=draw.randint(0, 1) * megabytes,
                backward_overhead_bytes=draw.randint(0, 2) * megabytes,
                spared_s=draw.choice([0.0, 0.5, 1.0]) * forward_s if spared else 0.0,
            )
        )
    return StageCosts(tuple(stages), megabytes * draw.randint(0, 2), draw.randint(0, 2))


def rates_of(seed):
    draw = random.Random(seed)
    speeds = [draw.choice([0.3, 0.5, 1.0, 2.0]) for _ in range(2)]
    return Tier.of_rates(*speeds, latency_s=draw.choice([0.0, 1.0]), shared=draw.random() < 0.3)


@pytest.mark.parametrize("seed", range(16))
def test_no_schedule_without_a_tier_is_below_the_bound(seed):
    costs = chain(5, seed, spared=bool(seed % 2))
    if seed % 4 > 1:
        costs = replace(
            costs,
            stages=[replace(s, spared_bytes=1, saves_input=seed % 8 < 4) for s in costs.stages],
        )
    least = smallest_memory(costs)
    memory = random.Random(seed).randint(least, least + 8)
    bound = joint_lower_bound(costs, memory, rates_of(seed))
    assert bound <= plan_chain(costs, memory).makespan_s
    if seed % 2 == 0:
        assert bound <= exact_chain_makespan(costs, memory)


@pytest.mark.parametrize("seed", range(8))
def test_a_tier_too_slow_leaves_the_optimum_without_one(seed):
    costs = chain(8, seed)
    memory = smallest_memory(costs) + 4
    optimum = plan_chain(costs, memory).makespan_s
    assert 0.85 * optimum < joint_lower_bound(costs, memory, SLOW) <= optimum


def test_a_tier_that_takes_no_time_makes_plain_training_the_bound():
    costs = chain(20, 1)
    memory = smallest_memory(costs)
    plain_s = plan_chain(costs).makespan_s
    assert joint_lower_bound(costs, memory, Tier.of_rates(1e12, 1e12)) == pytest.approx(plain_s)
    assert joint_lower_bound(costs, None, SLOW) == pytest.approx(plain_s)


def test_a_faster_tier_lowers_the_bound_and_states_alone_raise_it():
    costs = chain(10, 2, megabytes=10**6)
    memory = int(0.3 * plan_chain(costs).plain_bytes)
    speeds = (2e5, 5e5, 1e6, 4e6)
    bounds = [joint_lower_bound(costs, memory, Tier.of_rates(v, v)) for v in speeds]
    assert bounds == sorted(bounds, reverse=True)
    assert bounds[0] > 1.1 * bounds[-1]
    half = joint_lower_bound(costs, memory, Tier.of_rates(4e5, 4e5))
    assert half <= joint_lower_bound(costs, memory, Tier.of_rates(4e5, 4e5, shared=True))
    assert half <= joint_lower_bound(costs, memory, Tier.of_rates(4e5, 4e5, tapes=False))
    assert half <= joint_lower_bound(costs, memory, Tier.of_rates(4e5, 4e5, latency_s=2.0))


def test_a_limit_that_no_schedule_fits_has_no_finite_bound():
    costs = StageCosts((Stage("a", 1.0, 1.0, 10, 30), Stage("b", 1.0, 1.0, 10, 30)), 5, 0)
    assert math.isinf(joint_lower_bound(costs, 40, Tier.of_rates(1.0, 1.0)))
    assert math.isinf(joint_lower_bound(costs, 4, Tier.of_rates(1.0, 1.0)))
    assert joint_lower_bound(costs, 60, Tier.of_rates(1.0, 1.0)) < math.inf


@pytest.mark.parametrize(
    ("room", "tapes", "values"),
    [
        (30_000, True, (104.9281768810828, 87.84962997166681, -27.14288064411708)),
        (30_000, False, (109.71385171743704, 87.84962997166681, -27.14288064411708)),
        (14_000, True, (112.21386884060014, 102.79193335100314, -1.6460769085661247)),
        (14_000, False, (124.64233794183409, 103.58795877982318, -1.6460769085661247)),
    ],
)
def test_the_dual_is_what_a_plain_twin_of_the_kernel_found(room, tapes, values):
    true = without_loss(Sizes.of(chain(23, 4, spared=True, megabytes=1000)))
    rates = Tier.of_rates(700.0, 900.0, latency_s=0.1, tapes=tapes)
    dual = Dual(true, room, rates, 45, 1)
    prices = ((0.2, 0.0, 0.0, 0.2), (0.3, 0.1, 0.2, 0.25), (1.0, 0.5, 0.5, 1))
    assert tuple(map(dual.at, prices)) == pytest.approx(values, rel=1e-12)


@pytest.mark.parametrize("instructions", ["baseline", "avx2", "avx512"])
def test_a_table_with_moves_equals_its_twin(instructions):
    sizes = without_loss(Sizes.of(chain(37, 6, spared=True)))
    draw = np.random.default_rng(6)
    moves = draw.uniform(0, 3, 37), draw.uniform(0, 5, 37)
    tables = [
        Table(sizes, 40, work=0.7, moves=moves, native_kernel=kernel, instructions=instructions)
        for kernel in (True, False)
    ]
    for s in range(37):
        for t in range(s, 37):
            assert np.array_equal(tables[0].values(s, t), tables[1].values(s, t))
    assert not np.array_equal(tables[0].values(0, 30), Table(sizes, 40, work=0.7).values(0, 30))


@pytest.mark.parametrize("seed", range(6))
def test_plans_of_longer_chains_are_a_little_above_the_bound(seed):
    costs = chain(24, seed, spared=True, megabytes=10**6)
    tapes = sum(stage.tape_bytes for stage in costs.stages)
    rate = tapes / (random.Random(seed).choice([2.0, 4.0]) * plan_chain(costs).plain_s)
    rates = Tier.of_rates(rate, rate, 0.01)
    plan = plan_chain(costs, 0.4, tiers=rates)
    bound = joint_lower_bound(costs, plan.memory_bytes, rates)
    assert bound <= plan.makespan_s <= 1.04 * bound


def test_a_transfer_is_waited_for_where_two_tapes_do_not_fit():
    costs = StageCosts.uniform(20, Stage("layer", 1.0, 2.0, 10, 40), 10)
    plain_s = plan_chain(costs).makespan_s
    # Beside each other: two tapes, the gradients of two states.  Either way a stage with
    # its tape in the tier costs 0.4 s of waiting, one run again costs a second.
    rates = Tier.of_rates(200.0, 200.0)
    assert joint_lower_bound(costs, 120, rates) == pytest.approx(plain_s)
    short = joint_lower_bound(costs, 80, rates)
    assert short > 1.1 * plain_s
    assert short <= plan_chain(costs, 80, tiers=rates).makespan_s


def test_a_long_chain_is_planned_as_close_to_the_bound_as_a_short_one():
    if not native.available():
        pytest.skip("no C core")
    draw = random.Random(3)
    stages = []
    for k in range(160):
        forward_s, tape = draw.lognormvariate(0, 0.7), int(1e6 * draw.lognormvariate(0, 0.8))
        stages.append(Stage(f"{k}", forward_s, forward_s, tape // 4, tape))
    costs = StageCosts(tuple(stages), 10**6)
    plain = plan_chain(costs)
    rate = sum(stage.tape_bytes for stage in stages) / (2 * plain.plain_s)
    plan = plan_chain(costs, 0.5, tiers=Tier.of_rates(rate, rate), resolution=100)
    bound = joint_lower_bound(costs, plan.memory_bytes, Tier.of_rates(rate, rate))
    assert plan.makespan_s <= 1.02 * bound
