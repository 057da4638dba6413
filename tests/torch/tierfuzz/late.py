"""Tiers that are late, without a clock: what a run is told of its writes is made up."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from unittest import mock

from multistage.actions import Action
from multistage.execute.detour import Deadlines
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.planners.chain.heterogeneous import ChainPlan, plan_chain
from multistage.planners.chain.memory import use_of
from multistage.torch.tiers.stowage import Stowage

NOW = {"ask_s": 0.0, "wait_s": 1e-3, "cancel_s": 60.0}  # questions cost nothing


def random_costs(rng: random.Random, n: int) -> StageCosts:
    """Return costs of n stages, of which the last is the loss's input."""
    stages = []
    for k in range(n):
        output = rng.randint(5, 40)
        seconds = rng.uniform(0.5, 3.0)
        tape = output + rng.choice([0, rng.randint(0, 40), rng.randint(0, 200)])
        stages.append(Stage(str(k), seconds, 2 * seconds, output, tape))
    return StageCosts(tuple(stages), 20, 20)


def as_planned(rng: random.Random, actions: list[Action], n: int) -> ChainPlan:
    """Return any legal actions as a plan for random costs, within what they take."""
    costs = random_costs(rng, n)
    total = sum(stage.tape_bytes for stage in costs.stages)
    rate = total / (6 * n * rng.choice([0.3, 1.0, 3.0]))
    tier = Tier.of_rates(rate, rate)
    use = use_of(actions, costs, (tier,))
    return replace(
        plan_chain(costs),
        tier=tier,
        actions=tuple(actions),
        memory_bytes=use.peak_bytes + rng.choice([0, 0, 50]),
        makespan_s=use.makespan_s,
        peak_bytes=use.peak_bytes,
    )


def by_chance(rng: random.Random, odds: float) -> Callable[[], bool]:
    return lambda: rng.random() < odds


@contextlib.contextmanager
def said_late(
    late: Callable[[], bool],
    slower: Callable[[], float],
    refuses: Callable[[], bool] = lambda: False,
) -> Iterator[None]:
    """Say of writes that they are late, how much slower than planned, and that they continue.

    Of one that is not said to be late the run waits for the end, as it does without a rule.
    """
    cancel = Stowage.cancel

    def is_written(stowage: Stowage, step: int, tape: bool, timeout_s: float) -> bool:
        return bool(timeout_s) or not late()

    def is_slower(stowage: Stowage, tier: Tier) -> float:
        return slower()

    def cancels(stowage: Stowage, timeout_s: float) -> bool:
        refused = refuses()
        return cancel(stowage, 0.0 if refused else timeout_s) and not refused

    with (
        mock.patch.object(Stowage, "written", is_written),
        mock.patch.object(Stowage, "slower", is_slower),
        mock.patch.object(Stowage, "computed_s", lambda _: 0.0),
        mock.patch.object(Stowage, "cancel", cancels),
    ):
        yield


def asking(plan: ChainPlan) -> Deadlines:
    """Return what asks the rule of a plan whenever a write is said to be late."""
    return Deadlines(plan, **NOW)
