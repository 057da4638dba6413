"""The lower bound of chains without a tier, and what it spares the search."""

import itertools
import random

import pytest
from oracles.chain_exact import exact_chain_makespan

from multistage import native
from multistage.model.stages import Stage, StageCosts
from multistage.planners.chain import at_once
from multistage.planners.chain.at_once import ChainBound
from multistage.planners.chain.heterogeneous import plan_chain, smallest_memory
from multistage.planners.chain.sizes import Sizes
from multistage.planners.chain.table import Table

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="no C core")


def chain(length, seed):
    draw = random.Random(seed)
    stages = []
    for k in range(length):
        output, forward_s = draw.randint(1, 3), float(draw.randint(1, 3))
        tape, spared_s = output + draw.randint(0, 4), draw.choice([0.0, 0.0, 1.0])
        over = [draw.randint(0, 1) for _ in range(3)]
        stages.append(Stage(f"{k}", forward_s, 2.0, output, tape, output, *over, spared_s=spared_s))
    return StageCosts(tuple(stages), 2, 2)


@pytest.mark.parametrize("seed", range(4))
def test_no_schedule_is_below_the_bound_at_any_memory(seed):
    costs = chain(4, seed)
    plain, least = plan_chain(costs).plain_bytes, smallest_memory(costs)
    bound = ChainBound(Sizes.of(costs), plain - costs.input_bytes)
    found = [bound.seconds(memory - costs.input_bytes) for memory in range(least, plain + 1)]
    assert all(later <= sooner + 1e-9 for sooner, later in itertools.pairwise(found))
    for memory in (least, (least + plain) // 2, plain):
        assert found[memory - least] <= exact_chain_makespan(costs, memory) + 1e-9
    assert found[-1] > 0.99 * plan_chain(costs).plain_s


@pytest.mark.parametrize("seed", range(4))
def test_the_bound_of_revolve_is_below_its_plans(seed):
    costs = chain(9, seed)
    memory = smallest_memory(costs, "revolve") + 3
    plan = plan_chain(costs, memory, "revolve")
    bound = ChainBound(Sizes.of(costs), memory - costs.input_bytes, tapes=False)
    assert 0.8 * plan.makespan_s < bound.seconds(memory - costs.input_bytes) <= plan.makespan_s


def test_few_tables_are_solved_where_stages_are_as_many_as_slots(monkeypatch):
    solved = []

    class Counted(Table):
        def __init__(self, *given, **named):
            solved.append(given)
            super().__init__(*given, **named)

    monkeypatch.setattr(at_once, "Table", Counted)
    costs = StageCosts.uniform(150, Stage("layer", 1.0, 2.0, 10, 30), 10)
    plan = plan_chain(costs, 0.8, resolution=150)
    assert 1 <= len(solved) <= 3
    # Running the first 31 stages again, from one state, takes 1.069 of plain training;
    # that states are smaller than half a slot must not make one be kept for each stage.
    assert plan.makespan_s < 1.08 * plan.plain_s
