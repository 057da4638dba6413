"""The search over short chains with a tier: as fast as the exact optimum, legal, within limits."""

import random

import pytest
from chain_judge import Judge
from oracles.compiled import compiler
from oracles.joint_exact import exact_joint_makespan
from oracles.tiny import tiny_chain

from multistage.actions import EndForward, Load, Put, Tape
from multistage.model.tier import Tier
from multistage.planners.chain.heterogeneous import plan_chain, smallest_memory
from multistage.planners.chain.plan import ChainPlan
from multistage.planners.chain.short import MAX_STAGES, search_short
from multistage.planners.chain.sizes import Sizes


def setting(seed):
    costs, rates = tiny_chain(seed)
    least, plain = smallest_memory(costs), plan_chain(costs).plain_bytes
    return costs, rates, random.Random(seed).randint(least, max(least, plain - 1))


# Without the search they take 25 and 22 s.
@pytest.mark.parametrize(("seed", "seconds"), [(82, 23.0), (485, 20.0)])
def test_plans_that_the_joint_planner_does_not_know(seed, seconds):
    costs, rates, memory = setting(seed)
    plan = plan_chain(costs, memory, tiers=rates)
    assert plan.makespan_s == seconds
    assert plan.peak_bytes <= memory
    for slower in ((1.0, 1.0), (3.0, 1.0), (1.0, 3.0), (0.5, 0.5)):
        assert Judge(costs, rates, slower).run(plan.actions).peak <= memory
    assert ChainPlan.from_dict(plan.to_dict()) == plan


def test_the_forward_sweep_loads_nothing_and_what_is_taped_after_it_stays():
    costs, rates, memory = setting(188)
    found = search_short(Sizes.of(costs), memory - costs.input_bytes, rates, 30.0)
    turn = found.index(EndForward())
    assert not any(isinstance(action, Load) for action in found[:turn])
    late = {action.step for action in found[turn:] if isinstance(action, Tape)}
    assert late
    assert not any(isinstance(a, Put) and a.tape and a.step in late for a in found[turn:])


@pytest.mark.skipif(compiler() is None, reason="no C compiler")
def test_short_chains_have_the_optimum():
    compared = 0
    for seed in range(100):
        costs, rates, memory = setting(seed)
        if len(costs.stages) > MAX_STAGES:
            continue
        plan = plan_chain(costs, memory, tiers=rates)
        optimum = exact_joint_makespan(costs, memory, rates, round(plan.makespan_s))
        assert plan.makespan_s == optimum, seed
        compared += 1
    assert compared > 40


def test_only_faster_schedules_are_found():
    costs, rates, memory = setting(485)
    room = memory - costs.input_bytes
    assert search_short(Sizes.of(costs), room, rates, 20.0) is None
    assert search_short(Sizes.of(costs), room, rates, 20.5) is not None
    assert search_short(Sizes.of(costs), room, rates, 20.5, most=5) is None


def test_states_alone_where_tapes_do_not_travel():
    costs, rates, memory = setting(485)
    states = Tier.of_rates(rates.write_bytes_per_s, rates.read_bytes_per_s, tapes=False)
    found = search_short(Sizes.of(costs), memory - costs.input_bytes, states, 22.5)
    assert found is not None
    assert not any(getattr(action, "tape", False) for action in found)
