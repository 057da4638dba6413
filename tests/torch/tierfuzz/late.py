"""Plans whose tiers are said to be late."""

from __future__ import annotations

import random

from multistage.actions import Action
from multistage.execute.late import Stages
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.planners import Plan
from multistage.planners.chain.memory import use_of


def random_costs(rng: random.Random, n: int) -> StageCosts:
    """Return costs of n stages, of which the last is the loss's input."""
    stages = []
    for k in range(n):
        output = rng.randint(5, 40)
        seconds = rng.uniform(0.5, 3.0)
        tape = output + rng.choice([0, rng.randint(0, 40), rng.randint(0, 200)])
        stages.append(Stage(str(k), seconds, 2 * seconds, output, tape))
    return StageCosts(tuple(stages), 20, 20)


def as_planned(rng: random.Random, actions: list[Action], n: int) -> Plan:
    """Return any legal actions as a plan for random costs, within what they take."""
    costs = random_costs(rng, n)
    total = sum(stage.tape_bytes for stage in costs.stages)
    rate = total / (6 * n * rng.choice([0.3, 1.0, 3.0]))
    tier = Tier.of_rates(rate, rate)
    use = use_of(actions, costs, (tier,))
    limit = use.peak_bytes + rng.choice([0, 0, 50])
    return Plan.judged("optimal", costs, limit, actions, tier)


def course(plan: Plan) -> Stages:
    """Return what is asked where the tier of a plan is said to be late."""
    return Stages(plan, inside=True)
