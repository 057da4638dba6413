"""The exact optimum of tiny chains with a tier: against another search, the planner, the bound."""

import math
import random

import pytest

from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.planners.chain.heterogeneous import plan_chain, smallest_memory
from multistage.planners.chain.joint_bound import joint_lower_bound
from oracles.chain_exact import exact_chain_makespan
from oracles.compiled import compiler
from oracles.joint_exact import exact_joint_makespan
from oracles.tiny import tiny_chain

pytestmark = pytest.mark.skipif(compiler() is None, reason="no C compiler")
NEVER = Tier.of_rates(math.inf, math.inf, latency_s=60.0)


def within(costs, seed):
    least, plain = smallest_memory(costs), plan_chain(costs).plain_bytes
    return random.Random(seed).randint(least, max(least, plain - 1))


@pytest.mark.long(but="[0-9]")
@pytest.mark.parametrize("seed", range(30))
def test_a_tier_that_takes_forever_leaves_the_optimum_without_one(seed):
    costs, _ = tiny_chain(seed, 5)
    memory = within(costs, seed)
    other = exact_chain_makespan(costs, memory, persistent=False)
    assert exact_joint_makespan(costs, memory, NEVER, 60) == other


@pytest.mark.long(but=("[0-9]", "1[0-9]"))
@pytest.mark.parametrize("seed", range(30))
def test_bound_optimum_and_plan_are_in_order(seed):
    costs, rates = tiny_chain(seed, 5)
    memory = within(costs, seed)
    plan = plan_chain(costs, memory, tiers=rates)
    optimum = exact_joint_makespan(costs, memory, rates, round(plan.makespan_s) + 1)
    assert joint_lower_bound(costs, memory, rates) <= optimum <= plan.makespan_s + 1e-9
    assert plan.makespan_s <= 1.13 * optimum


def test_short_chains_nearly_always_have_the_optimum():
    slower, compared = {}, 0
    for seed in range(100):
        costs, rates = tiny_chain(seed)
        if len(costs.stages) > 4:
            continue
        memory = within(costs, seed)
        plan = plan_chain(costs, memory, tiers=rates)
        optimum = exact_joint_makespan(costs, memory, rates, round(plan.makespan_s))
        compared += 1
        if plan.makespan_s != optimum:
            slower[seed] = (plan.makespan_s, optimum)
    # The optimum keeps a state again that it dropped before its use: it is not persistent.
    assert slower == {82: (25.0, 23)}
    assert compared > 40


def test_the_exact_makespan_with_and_without_a_tier():
    # Within 9 bytes, three tapes of 3 and two gradients of 1 do not fit.  Tape 0 is written
    # while stage 1 runs, gone while stage 2 runs, and read while its adjoint and that of 1 do.
    costs = StageCosts.uniform(3, Stage("a", 3.0, 3.0, 1, 3))
    found = [
        exact_joint_makespan(costs, memory, rates, 60)
        for memory in (6, 8, 9, 11)
        for rates in (Tier.of_rates(1.0, 1.0), NEVER)
    ]
    assert found == [25, 27, 21, 24, 18, 21, 18, 18]
