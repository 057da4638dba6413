"""Schedules of resumed runs: legal whatever the disk holds, whatever is lost on the way."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from unequal_chains import Case

from multistage import native
from multistage.actions import (
    Action,
    Advance,
    Answer,
    Await,
    EndForward,
    Get,
    Load,
    Offer,
    Put,
    Reverse,
    Tape,
    drive,
)
from multistage.execute.executor import Resumed
from multistage.execute.metered import of_chain
from multistage.model.costs import Costs
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.planners.chain.pieces import least_beside
from multistage.planners.chain.resumed import resumed_actions
from multistage.planners.single.binomial import nu
from multistage.planners.streaming.online import durable_plan, resumed_schedule
from multistage.planners.streaming.streaming import streaming
from multistage.schedule.rules import Rules
from multistage.schedule.simulation import simulate

core = pytest.mark.skipif(native.LIBRARY is None, reason="no C core")


def costs(rho: float, read: float = 1.0, overhead: float = 0.0) -> Costs:
    return Costs(1.0, 2.0, tiers=(Tier("durable", rho, read, write_overhead_s=overhead),))


def run(
    stored: list[int],
    n: int,
    slots: int,
    end: int | None,
    rho: float = 4.0,
    accept: Callable[[], bool] = lambda: True,
    survive: Callable[[], bool] = lambda: True,
) -> tuple[Rules, list[Action]]:
    """Perform a schedule by the rules alone."""
    rules, actions = Rules(n, slots), []
    Resumed(tuple(stored), None, end).tell(rules)
    for action, send in drive(resumed_schedule(costs(rho), slots, n, stored, end)):
        answer: Answer = None
        match action:
            case Offer():
                answer = rules.next_token if accept() else None
            case Get() | Put():
                answer = rules.next_token
            case Await():
                answer = survive()
        rules.apply(action, answer)
        actions.append(action)
        send(answer)
    rules.finish()
    return rules, actions


@st.composite
def disks(draw: st.DrawFn) -> tuple[list[int], int, int, int | None]:
    n = draw(st.integers(1, 60))
    end = draw(st.none() | st.integers(0, n))
    below = n if end is None else end
    stored = draw(st.sets(st.integers(0, below - 1))) if below else set()
    return sorted(stored), n, draw(st.integers(1, 12)), end


@given(disks(), st.sampled_from([0.3, 1.0, 2.5, 7.0, 40.0]), st.randoms(use_true_random=False))
@settings(max_examples=400, deadline=None)
def test_schedules_are_legal_for_any_stored_and_lost_states(disk, rho, random) -> None:
    stored, n, slots, end = disk
    doubt = random.random()
    rules, _ = run(
        stored,
        n,
        slots,
        end,
        rho,
        accept=lambda: random.random() > doubt,
        survive=lambda: random.random() > doubt / 2,
    )
    assert rules.adjoint == 0
    assert rules.peak <= slots


def test_the_forward_sweep_continues_from_the_newest_state() -> None:
    _, actions = run([0, 10, 20], 30, 4, None)
    assert actions[:4] == [Get(20), Await(0), Load(20), *actions[3:4]]
    advanced = [a for a in actions[: actions.index(EndForward())] if isinstance(a, Advance)]
    assert min(a.start for a in advanced) == 20
    assert sum(a.stop - a.start for a in advanced) == 9
    assert Tape(29) in actions
    # States are offered at the spacing of the plan again, here 4.
    assert [a.step for a in actions if isinstance(a, Offer)][:2] == [24, 28]


def test_a_lost_newest_state_is_replaced_by_the_one_before() -> None:
    answers = iter([False, True])
    _, actions = run([0, 10, 20], 30, 4, None, survive=lambda: next(answers, True))
    assert next(a.step for a in actions if isinstance(a, Load)) == 10


def test_the_reverse_sweep_needs_no_step_where_every_state_is_there() -> None:
    rules, actions = run(list(range(25)), 60, 4, 25)
    assert actions[0] == EndForward()
    assert rules.forward_steps == 0
    assert [a.step for a in actions if isinstance(a, Reverse)] == list(range(24, -1, -1))


@pytest.mark.parametrize("slots", [2, 3, 10])
def test_between_two_states_it_is_revolve_or_reads_the_lower_one_again(slots: int) -> None:
    rules, actions = run([0], 100, slots, 40)
    if sum(isinstance(action, Get) for action in actions) == 1:
        assert rules.forward_steps == nu(40, slots)
    else:
        assert rules.forward_steps < nu(40, slots)


def test_a_state_lost_when_it_is_read_again_costs_steps_only() -> None:
    _, read_again = run([0, 40], 100, 3, 80)
    assert [a.step for a in read_again if isinstance(a, Get)][:2] == [40, 40]
    answers = iter([True, False])
    rules, actions = run([0, 40], 100, 3, 80, survive=lambda: next(answers, True))
    assert [a.step for a in actions if isinstance(a, Get)][:3] == [40, 40, 0]
    assert [a.step for a in actions if isinstance(a, Reverse)] == list(range(79, -1, -1))
    assert rules.peak <= 3


def test_nothing_stored_means_revolve_from_state_0() -> None:
    rules, actions = run([], 100, 5, 40)
    assert actions[1] == Load(0)
    assert rules.forward_steps <= nu(40, 5)


@pytest.mark.parametrize("rho", [0.5, 3.0, 50.0])
@pytest.mark.parametrize("slots", [1, 5, 1000])
def test_a_durable_plan_writes_states(rho: float, slots: int) -> None:
    plan = durable_plan(costs(rho), slots, 300)
    assert plan.writes > 0
    ran = simulate(plan.schedule(), 300, plan.costs, slots)
    assert ran.writes == plan.writes
    assert ran.peak_slots <= slots


def test_a_durable_plan_is_streaming_where_that_writes() -> None:
    assert streaming(costs(4.0), 10, 1000).writes
    assert durable_plan(costs(4.0), 10, 1000) == streaming(costs(4.0), 10, 1000)


def test_writes_that_serve_only_to_resume_are_cheap() -> None:
    plan = durable_plan(costs(0.5, overhead=1.0), 1000, 300)
    assert plan.writes == 15
    assert durable_plan(costs(0.5), 1000, 300).writes > 100


# ------------------------------------------------------------------- unequal steps


@core
@pytest.mark.parametrize("planner", ["optimal", "revolve"])
@given(disks(), st.integers(0, 9), st.booleans(), st.randoms(use_true_random=False))
@settings(max_examples=100, deadline=None)
def test_what_is_left_of_unequal_steps_is_legal_and_fits(
    planner, disk, seed, taped, random
) -> None:
    stored, n, slots, end = disk
    stored = [step for step in stored if step]
    case = Case(seed, "tape" if taped else "functional", n)
    costs, slots = of_chain(case.costs, case.chain()), min(slots, 4)
    rates = random.choice([None, Tier.of_rates(random.choice([50.0, 500.0]), 500.0, tapes=False)])
    room = slots * costs.largest_state_bytes
    most = least_beside(costs, planner) + room
    rules, doubt = Rules.in_bytes(costs, recovers=True), random.choice([0.0, 0.0, 0.3])
    Resumed(tuple(stored), None, end).tell(rules)
    for action in resumed_actions(costs, room, planner, rates, stored, end):
        answer = rules.usual_answer(action)
        if isinstance(action, Await):
            answer = random.random() >= doubt
        rules.apply(action, answer)
    rules.finish()
    assert rules.memory is not None
    if not doubt:
        assert rules.memory.peak_bytes <= most
        assert rules.forward_steps >= (n if end is None else 0) - max(stored, default=0) - 1


def test_the_rest_of_a_forward_sweep_has_tokens_of_its_own() -> None:
    stages = [Stage("", 1.0, 1.0, 100, 100, gradient_bytes=0) for _ in range(12)]
    costs, tier = StageCosts(tuple(stages), 100), Tier.of_rates(200.0, 200.0, tapes=False)
    actions = list(resumed_actions(costs, 100, "revolve", None, [3, 7], None))
    assert actions[:3] == [Get(7), Await(0), Load(7)]
    assert actions.index(EndForward()) < actions.index(Get(3))
    if native.LIBRARY is not None:
        actions = list(resumed_actions(costs, 100, "optimal", tier, [3], None))
        transfers = [action for action in actions if isinstance(action, Get | Put)]
        assert len(transfers) > 2
        tokens = [action.token for action in actions if isinstance(action, Await)]
        assert len(set(tokens)) == len(tokens) and max(tokens) < len(transfers)
