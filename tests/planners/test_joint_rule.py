"""The deadline rule: a tier slower than planned, in virtual time."""

import math
import random
from functools import partial
from types import SimpleNamespace

import pytest
from chain_judge import Judge
from oracles.late import go_on, run_asking, run_late

from multistage import native
from multistage.actions import EndForward, Evict, Free, Load, Put, Reverse, Save, Tape
from multistage.errors import ArgumentError, BudgetError, ScheduleError
from multistage.execute.late import TakenWhenLate
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.planners.chain.heterogeneous import plan_chain, smallest_memory
from multistage.planners.chain.joint_detour import Detour, judged, replayed
from multistage.planners.chain.joint_rule import DeadlineRule
from multistage.planners.chain.performing import diverted
from multistage.schedule.rules import Rules

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="no C core")


def planned(seed, memory, rho, stages=24):
    draw = random.Random(seed)
    made = []
    for k in range(stages):
        output = draw.randint(10, 40)
        forward_s = draw.uniform(1, 3)
        tape = output + draw.randint(10, 160)
        over = (output // 7, output // 7, output // 3)
        made.append(Stage(str(k), forward_s, 2 * forward_s, output, tape, -1, *over, spared_s=0.1))
    costs = StageCosts(tuple(made), 20, 20)
    rate = sum(stage.tape_bytes for stage in made) / (rho * plan_chain(costs).plain_s)
    return plan_chain(costs, memory, tiers=Tier.of_rates(rate, rate, 0.01))


CASES = [(seed, memory, rho) for seed in (1, 2) for memory in (0.2, 0.4) for rho in (0.5, 2.0)]


@pytest.mark.parametrize(("seed", "memory", "rho"), CASES)
def test_a_late_tier_is_no_slower_than_none(seed, memory, rho):
    plan = planned(seed, memory, rho)
    assert plan.makespan_s < plan.no_tier_s
    rule = DeadlineRule(plan)
    detours = 0
    for slower in (1.5, 3.0, 10.0):
        judge, detour = run_late(plan, slower, rule=rule)
        assert judge.peak <= plan.memory_bytes
        assert judge.now <= 1.03 * plan.no_tier_s
        waiting = run_late(plan, slower, rule=None)[0].now
        if detour is not None:
            detours += 1
            assert judge.now == pytest.approx(detour.makespan_s) and judge.now < waiting
        if slower == 10:
            assert waiting > 1.5 * plan.no_tier_s
    assert detours > 0


def test_a_tier_as_fast_as_planned_needs_no_detour():
    plan = planned(3, 0.3, 1.0)
    judge, detour = run_late(plan, 1.0, rule=DeadlineRule(plan))
    assert detour is None or detour.makespan_s < plan.makespan_s
    assert judge.now <= plan.makespan_s * (1 + 1e-9)


def test_a_write_that_cannot_be_cancelled_takes_its_room():
    plan = planned(1, 0.4, 2.0)
    rule = DeadlineRule(plan)
    at = next(k for k, action in enumerate(plan.actions) if isinstance(action, Evict))
    writing = plan.costs.stages[plan.actions[at].step].tape_bytes
    free, bound = (rule.at_deadline(at, cancels=cancels) for cancels in (True, False))
    assert free.makespan_s <= bound.makespan_s and math.isinf(free.waiting_s)
    for detour, room in ((free, 0), (bound, writing)):
        limit = plan.memory_bytes - room
        judged(replayed(plan.actions[:at], plan.costs), detour, limit)
        assert not any(isinstance(action, Evict) for action in detour.actions)
    with pytest.raises(ScheduleError, match="but the limit is"):
        judged(replayed(plan.actions[:at], plan.costs), free, plan.memory_bytes - writing)


def random_plan(seed):
    """Return a plan of a chain with all sorts of sizes, times and tiers, or None."""
    draw = random.Random(seed)
    made = []
    for k in range(draw.randint(2, 12)):
        output = draw.choice([0, 10, draw.randint(5, 60), draw.randint(5, 40)])
        tape = output + draw.choice([0, draw.randint(0, 50), draw.randint(0, 200)])
        forward_s = draw.choice([0.0, 1.0, draw.uniform(0.1, 5)])
        gradient = draw.choice([-1, 0])
        over = [draw.randint(0, 20) for _ in range(3)]
        spared_s = draw.choice([0, forward_s / 3])
        backward_s = draw.choice([forward_s, 2.0])
        made.append(
            Stage(str(k), forward_s, backward_s, output, tape, gradient, *over, spared_s=spared_s)
        )
    costs = StageCosts(tuple(made), draw.choice([0, 30]), draw.choice([0, 20]))
    total = sum(stage.tape_bytes for stage in made) + 1
    rate = total / 10 ** draw.uniform(-1, 1) / (plan_chain(costs).plain_s + 0.1)
    tier = Tier.of_rates(
        max(0.01, rate),
        max(0.01, rate * draw.choice([1, 3, 0.3])),
        draw.choice([0, 0.3]),
        draw.choice([None, total // 2]),
        draw.random() < 0.2,
        draw.random() < 0.85,
    )
    try:
        return plan_chain(costs, draw.uniform(0.1, 0.95), tiers=tier)
    except BudgetError:
        return None


@pytest.mark.parametrize("seed", range(4))
def test_detours_of_random_plans_are_legal_and_within_the_limit(seed):
    draw, asked, taken = random.Random(seed), 0, 0
    while asked < 8:
        plan = random_plan(draw.random())
        if plan is None or not any(isinstance(action, Evict) for action in plan.actions):
            continue
        turn = plan.actions.index(EndForward())
        places = [k for k, a in enumerate(plan.actions[: turn + 1]) if isinstance(a, Evict)]
        at = draw.choice([*places, turn])
        slower, cancels = draw.choice([1.5, 3.0, 10.0, math.inf]), draw.random() < 0.7
        detour = DeadlineRule(plan).at_deadline(at, slower, cancels=cancels)
        asked += 1
        if detour is None:
            continue
        taken += 1
        judge = Judge(plan.costs, plan.tier, (min(slower, 1e6),) * 2)
        for action in plan.actions[:at]:
            judge.apply(action)
            judge.at_peak()
        go_on(judge, detour)
        assert judge.peak <= plan.memory_bytes
        if slower < math.inf:
            assert judge.now == pytest.approx(detour.makespan_s)
    assert taken > 2


def test_the_rule_is_asked_at_an_eviction_of_a_plan_with_a_tier():
    plan = planned(1, 0.2, 2.0)
    rule = DeadlineRule(plan)
    with pytest.raises(ArgumentError, match="must be the index of an Evict, Put or EndForward"):
        rule.at_deadline(0)
    at = next(k for k, action in enumerate(plan.actions) if isinstance(action, Evict))
    with pytest.raises(ArgumentError, match=r"slower=0\.5 must be at least 1"):
        rule.at_deadline(at, 0.5)
    with pytest.raises(ArgumentError, match="has a tier and a limit"):
        DeadlineRule(plan_chain(plan.costs, plan.memory_bytes))
    later = [
        k
        for k, action in enumerate(plan.actions)
        if isinstance(action, Evict) and EndForward() in plan.actions[:k]
    ]
    assert all(rule.at_deadline(k) is None for k in later)


# ------------------------------------------------------------ executors of a Reversal


def refined(seed, spared):
    """Return a plan of steps as of a mesh that is refined and coarsened; states travel."""
    draw = random.Random(seed)
    n = draw.choice([24, 32, 48])
    waves = [2 * math.pi * i / n * draw.choice([1, 1, 2]) for i in range(n)]
    stages = []
    for size in (math.exp(1.1 * math.sin(wave)) for wave in waves):
        took_s, nbytes = size * draw.uniform(0.5, 2), int(1000 * size)
        tape = nbytes if spared else 3 * nbytes
        stages.append(Stage("", took_s, 2 * size, nbytes, tape, 0, spared_s=took_s * spared))
    costs = StageCosts(tuple(stages), 1000)
    total = sum(stage.output_bytes for stage in costs.stages)
    memory = smallest_memory(costs) + int(draw.choice([0.08, 0.15, 0.25]) * total)
    rate = total / (plan_chain(costs).plain_s * draw.choice([0.3, 1.0]))
    return plan_chain(costs, memory, tiers=Tier.of_rates(rate, rate, tapes=False))


def accepting(plan):
    """Return what says which detours the executor of a `Reversal` can take."""
    n = len(plan.costs.stages)
    rules = partial(Rules.in_bytes, plan.costs, n, plan.memory_bytes, recovers=True)
    late = TakenWhenLate(plan, None, rules)
    late._at, late._transfers = 0, SimpleNamespace(stored=[()])  # all is to come
    return late._accepts


@pytest.mark.parametrize(("seed", "spared"), [(1, 1), (6, 1), (8, 0), (109, 0), (103, 0)])
def test_steps_on_a_late_tier_are_no_slower_than_on_none(seed, spared):
    plan = refined(seed, spared)
    assert plan.makespan_s < plan.no_tier_s
    for slower in (1.0, 3.0, 10.0):
        judge, where = run_asking(plan, slower, accepting(plan))
        assert judge.peak <= plan.memory_bytes
        assert judge.now <= 1.03 * plan.no_tier_s
        if slower == 1:
            assert where is None and judge.now == pytest.approx(plan.makespan_s)
        if slower == 10:
            assert run_late(plan, slower, rule=None)[0].now > 2 * plan.no_tier_s
            # Where it first waits, too little of the optimum without the tier would be held.
            assert isinstance(where, Put) or seed < 100


def test_an_executor_refuses_what_only_a_tape_holds():
    before = (Tape(0), Tape(1))
    loads = Detour((), (), (Tape(2), EndForward(), Reverse(2), Reverse(1), Load(1)), 1.0, 2.0)
    assert diverted(before, loads, 3, set(), live=2) is None
    held = diverted(before, loads, 3, {1, 2}, live=2)
    assert held == [Free(2), Tape(2), EndForward(), Reverse(2), Reverse(1), Load(1)]
    keeps = Detour((1, 2), (1,), (Free(1), Free(2)), 1.0, 2.0)
    assert diverted(before, keeps, 3, set(), live=2) is None
    assert diverted(before, keeps, 3, {1}, live=2) == [Save(2), Free(1), Free(2)]
