"""Plans of a chain with a slow tier: legal, within every limit, as fast as predicted."""

import random
from dataclasses import replace

import pytest
from chain_judge import Judge

from multistage import native
from multistage.actions import (
    Await,
    EndForward,
    Evict,
    Free,
    Get,
    Load,
    Offer,
    Put,
    Reverse,
    Save,
    Tape,
)
from multistage.errors import ArgumentError, BudgetError
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.planners.chain.heterogeneous import plan_chain, smallest_memory
from multistage.schedule.rules import check
from tests.chain_schedules import no_tier_s, offload_s

core = pytest.mark.skipif(native.LIBRARY is None, reason="no C core")


def random_chain(rng, stages, kind):
    """Return a chain of small whole numbers; kinds 0 equal stages, 1 unequal, 2 with overheads."""
    sizes = [1 if kind == 0 else rng.randint(1, 3) for _ in range(stages + 1)]
    made = []
    for i in range(1, stages + 1):
        tape = sizes[i] + (2 if kind == 0 else rng.randint(0, 4))
        run, back = (1.0, 2.0) if kind == 0 else (rng.randint(1, 3), rng.randint(1, 4))
        over = [rng.randint(0, 2) for _ in range(3)] if kind == 2 else [0, 0, 0]
        spared = 0.5 if kind == 2 else 0.0
        made.append(Stage(f"{i}", run, back, sizes[i], tape, sizes[i], *over, spared_s=spared))
    return StageCosts(tuple(made), sizes[0], sizes[0])


def random_tier(rng):
    return Tier.of_rates(
        rng.choice([0.5, 1.0, 2.0, float("inf")]),
        rng.choice([0.5, 1.0, 2.0]),
        rng.choice([0.0, 1.0]),
        capacity_bytes=rng.choice([None, None, 6, 12]),
        shared=rng.random() < 0.3,
        tapes=rng.random() < 0.8,
    )


def with_fixed_times(rng, rates):
    """Return the tier with other times of each transfer, whatever its size, for each direction."""
    names = ("write_s", "read_s", "write_overhead_s", "read_overhead_s")
    return replace(rates, **{name: rng.choice([0.0, 0.0, 0.25, 1.0]) for name in names})


def layers(count, tape=40):
    return StageCosts.uniform(count, Stage("layer", 1.0, 2.0, 10, tape), 10)


@pytest.mark.long
@core
def test_random_plans_hold_their_limits_and_their_makespans():
    rng = random.Random(16)
    with_tier = 0
    for k in range(150):
        costs, rates = random_chain(rng, rng.randint(2, 8), k % 3), random_tier(rng)
        least = smallest_memory(costs)
        without = plan_chain(costs, rng.randint(least, 2 * least))
        if k % 2:
            rates = with_fixed_times(random.Random(k), rates)
        plan = plan_chain(costs, without.memory_bytes, tiers=rates)
        assert no_tier_s(plan) == without.makespan_s
        assert offload_s(plan) is None or plan.makespan_s <= offload_s(plan)
        assert plan.lower_bound_s <= plan.makespan_s
        if plan.makespan_s == without.makespan_s:
            assert plan.actions == without.actions
            continue
        assert plan.makespan_s < without.makespan_s
        with_tier += 1
        judge = Judge(costs, rates).run(plan.actions)
        assert judge.now == pytest.approx(plan.makespan_s, rel=1e-12)
        assert judge.waited == pytest.approx(plan.stall_s, abs=1e-9)
        assert judge.peak <= plan.peak_bytes <= plan.memory_bytes
        assert judge.tier_peak <= (rates.capacity_bytes or judge.tier_peak)
        if not rates.tapes:  # nor is a state loaded from within a tape
            assert not any(isinstance(a, Put) and a.tape for a in plan.actions)
            check(plan.actions, plan.n_steps)
        for slower in ((3.0, 1.0), (1.0, 3.0), (0.5, 0.5)):
            assert Judge(costs, rates, slower).run(plan.actions).peak <= plan.memory_bytes
    assert with_tier > 40


@core
@pytest.mark.parametrize("seed", range(60))
def test_plans_are_such_as_autograd_can_perform(seed):
    """PyTorch's runner relies on it: what is written is held, and a forward sweep loads nothing."""
    rng = random.Random(seed)
    costs, rates = random_chain(rng, rng.randint(2, 12), seed % 3), random_tier(rng)
    memory = rng.randint(smallest_memory(costs), 2 * smallest_memory(costs))
    plans = [plan_chain(costs, memory, tiers=rates)]
    plans += [plan_chain(costs, 4 * memory, name) for name in ("optimal", "revolve", "periodic")]
    for plan in plans:
        evicted = {a.step + a.tape for a in plan.actions if isinstance(a, Evict)}
        held, tapes, is_write, forward = {0}, set[int](), list[bool](), True
        for action in plan.actions:
            match action:
                case Load():
                    assert not forward
                case Save(step):
                    held.add(step)
                case Tape(step):
                    tapes.add(step)
                case Free(step):  # else a tape without its input would be left
                    assert not (step in evicted and step in tapes and step - 1 not in tapes)
                    held.discard(step)
                case Offer(step, _, tape) | Put(step, _, tape):
                    assert step in tapes if tape else step in held or step - 1 in tapes
                    is_write.append(True)
                case Get():
                    is_write.append(False)
                case Await(token):
                    assert not is_write[token]
                case Evict(step, _, tape):
                    (tapes if tape else held).discard(step)
                case Reverse(step):
                    tapes.discard(step)
                case EndForward():
                    forward = False


@core
def test_outputs_that_go_before_their_reverse_are_there_while_a_transfer_begins():
    for seed in range(40):
        draw = random.Random(seed)
        sizes = [draw.randint(50, 300) for _ in range(draw.randint(4, 12))]
        stages = [
            Stage("", 0.5, draw.uniform(0.1, 2), n, n + draw.randint(0, 200), spared_bytes=n)
            for n in sizes
        ]
        costs = StageCosts(tuple(stages), 100)
        memory = smallest_memory(costs) + draw.randint(0, 400)
        rates = Tier.of_rates(draw.uniform(50, 400), 200.0, tapes=bool(seed % 2))
        assert plan_chain(costs, memory, tiers=rates).peak_bytes <= memory


@core
def test_a_fast_tier_hides_everything():
    plan = plan_chain(layers(20), 0.3, tiers="write=1GB/s")
    assert plan.makespan_s == pytest.approx(60.0)
    assert plan.makespan_s < no_tier_s(plan) and plan.stall_s < 1e-5
    puts = [a for a in plan.actions if isinstance(a, Put)]
    evicts = [a for a in plan.actions if isinstance(a, Evict)]
    gets = [a for a in plan.actions if isinstance(a, Get)]
    things = [(a.step, a.tape) for a in puts]
    assert things == [(a.step, a.tape) for a in evicts]
    assert things[::-1] == [(a.step, a.tape) for a in gets]


@core
@pytest.mark.parametrize(
    ("times", "makespan_s"),
    [
        ({"write_s": 0.5, "read_s": 2.0}, 60.0),  # as long as a stage's adjoint: hidden
        ({"write_s": 0.5, "read_s": 3.0}, 64.0),
        ({"write_overhead_s": 0.3, "read_overhead_s": 0.3}, 69.0),  # 15 of the 20 tapes
        ({"write_overhead_s": 0.5, "read_overhead_s": 1.0}, 76.0),  # running again is cheaper
    ],
)
def test_fixed_times_of_each_direction_and_of_the_computing_thread_count(times, makespan_s):
    rates = Tier(write_bytes_per_s=6000.0, read_bytes_per_s=6000.0, **times)
    plan = plan_chain(layers(20), 0.3, tiers=rates)
    assert plan.makespan_s <= makespan_s
    assert plan.makespan_s <= min(no_tier_s(plan), offload_s(plan))
    assert plan.lower_bound_s <= plan.makespan_s <= 1.09 * plan.lower_bound_s
    assert (plan.writes > 0) == (plan.makespan_s < no_tier_s(plan))


@core
def test_a_tier_of_times_alone_is_planned_for():
    plan = plan_chain(layers(20), 0.3, tiers=Tier(write_s=2.0, read_s=2.0))
    assert plan.makespan_s <= 67.0 < min(no_tier_s(plan), offload_s(plan))


@core
@pytest.mark.parametrize("tier", ["write=1B/s", "write=1GB/s,capacity=9B"])
def test_a_tier_too_slow_or_too_small_leaves_the_plan_without_it(tier):
    without = plan_chain(layers(12), 0.4)
    plan = plan_chain(layers(12), 0.4, tiers=tier)
    assert plan.actions == without.actions and plan.makespan_s == without.makespan_s


@core
def test_memory_too_small_without_the_tier_works_with_it():
    with pytest.raises(BudgetError) as without:
        plan_chain(layers(12), 60)
    with pytest.raises(BudgetError, match="the smallest limit") as with_tier:
        plan_chain(layers(12), 10, tiers="write=1B/s")
    assert "< 80 bytes" in str(without.value) and "< 80 bytes" in str(with_tier.value)
    # Recomputation runs stages beside a gradient; the first sweep, whose states travel, does not.
    costly = StageCosts.uniform(12, Stage("layer", 1.0, 2.0, 10, 20, 30, 100), 10)
    with pytest.raises(BudgetError) as refused:
        plan_chain(costly, 20, tiers="write=1B/s")
    least = int(str(refused.value).split("< ")[1].split(" bytes")[0])
    with pytest.raises(BudgetError):
        plan_chain(costly, least)
    with pytest.raises(BudgetError):
        plan_chain(costly, least - 1, tiers="write=1B/s")
    plan = plan_chain(costly, least, tiers="write=1B/s")
    assert no_tier_s(plan) is None
    judge = Judge(costly, plan.tier).run(plan.actions)
    assert judge.peak <= least


@core
def test_where_every_tape_fits_the_tier_is_not_used():
    plan = plan_chain(layers(4), tiers="write=1B/s")
    assert plan.keeps_all and plan.makespan_s == no_tier_s(plan)
    assert str(plan.tier).startswith("slow: writes 1 B/s")


@pytest.mark.parametrize("tiers", [(), 3, "fast", ["write=1GB/s", 3][1:]])
def test_invalid_tiers_are_refused(tiers):
    with pytest.raises(ArgumentError, match="write=2GB/s"):
        plan_chain(layers(4), 0.5, tiers=tiers)
