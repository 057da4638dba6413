"""Every planner: legal schedules, true predictions, golden replays."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from benchmarks._published import corrected_factor, printed_factor
from multistage.actions import Offer, Put, Save
from multistage.errors import ArgumentError, BudgetError
from multistage.model.costs import NOT_KEPT, Costs
from multistage.model.tier import Tier
from multistage.planners import PLANNERS, RANKED, plan
from multistage.planners.predict import SIMULATED_STEPS
from multistage.planners.streaming.online import dynamic_schedule, online_schedule
from multistage.planners.streaming.streaming import streaming
from multistage.schedule.rules import check
from multistage.schedule.simulation import simulate


def tiers() -> st.SearchStrategy[tuple[Tier, ...]]:
    some = st.builds(
        Tier,
        write_s=st.sampled_from([0.3, 1.0, 1.5, 2.3, 4.0, 8.0, 20.0]),
        read_s=st.sampled_from([0.5, 1.0, 3.0, 9.0]),
        write_overhead_s=st.sampled_from([0.0, 0.1, 1.0]),
        capacity_states=st.sampled_from([None, None, 1, 3, 10, 50]),
        queue_depth=st.sampled_from([1, 2, 4]),
    )
    return st.just(()) | st.tuples(some)


def costs() -> st.SearchStrategy[Costs]:
    return st.builds(
        Costs,
        st.just(1.0),
        st.sampled_from([1.0, 2.0, 3.0]),
        tape_step_s=st.sampled_from([None, None, 1.0, 1.4]),
        state_bytes=st.just(10),
        tape_bytes=st.sampled_from([0, 5, 10, 25, NOT_KEPT]),
        tiers=tiers(),
        action_s=st.sampled_from([0.0, 0.0, 0.25]),
    )


def steps(name: str, n: int) -> int | None:
    return None if name == "online" else n


# One slot more may make these slower, by such a share; `docs/explanation/planners.md` says why.
SLOWER_WITH_MORE = {"streaming": 0.05, "online": 0.2}
# These take no account of the driver's time per action.
STEPS_ALONE = ("streaming", "interval", "mixed")


@pytest.mark.parametrize("name", sorted(set(PLANNERS) - {"pyrevolve"}))
@settings(max_examples=12, deadline=None)
@given(costs=costs(), n=st.integers(1, 60), first=st.integers(1, 60))
def test_more_slots_never_make_a_plan_slower(name: str, costs: Costs, n: int, first: int) -> None:
    costs = replace(costs, action_s=0.0) if name in STEPS_ALONE else costs
    before = float("inf")
    for slots in range(first, first + 4):
        try:
            seconds = PLANNERS[name](costs, slots, n).makespan_s
        except BudgetError:
            assert before == float("inf")  # what fits fits with more
            continue
        assert seconds <= before * (1 + SLOWER_WITH_MORE.get(name, 1e-12))
        before = seconds


def test_periodic_takes_the_fastest_segments_that_fit() -> None:
    costs = Costs(1.0, 2.0, tape_step_s=1.0)
    for slots in (50, 98):  # segments of 51 and of 99 steps fit
        made = PLANNERS["periodic"](costs, slots, 100)
        assert (made.makespan_s, made.parameters["length"]) == (350.0, 50)
    assert PLANNERS["periodic"](costs, 99, 100).makespan_s == 300.0
    long = [PLANNERS["periodic"](costs, slots, 1 << 40) for slots in (1 << 22, 1 << 23)]
    assert long[1].makespan_s < long[0].makespan_s < 4398043105016.0  # of the longest that fit


@pytest.mark.parametrize("name", PLANNERS)
@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(costs=costs(), slots=st.integers(1, 12), n=st.integers(1, 90))
def test_plans_are_legal_and_true(name: str, costs: Costs, slots: int, n: int) -> None:
    try:
        made = PLANNERS[name](costs, slots, n)
    except BudgetError:
        assert name in ("store-all", "periodic", "recursive")
        return
    run = simulate(made.schedule(), steps(name, n), costs, slots)
    # Revolve takes about 4.5 actions a step; all else is counted to the last action.
    about = 0.0 if name in ("store-all", "periodic", "recursive", "online") else 1.5 * n
    assert run.makespan_s == pytest.approx(made.makespan_s, abs=1e-6 + about * costs.action_s)
    assert run.forward_steps == made.forward_steps
    assert (run.writes, run.reads) == (made.writes, made.reads)
    assert run.peak_slots <= made.peak_slots <= slots
    assert made.lower_bound_s <= made.makespan_s * (1 + 1e-9)
    limit = costs.tier.capacity_states if costs.tier else None
    check(
        made.schedule(),
        steps(name, n),
        slots,
        tape_slots=costs.tape_slots,
        state_is_tape=costs.state_is_tape,
        one_tape=costs.one_tape,
        tier_slots={} if limit is None else {0: limit},
    )


@settings(max_examples=60, deadline=None)
@given(costs=costs(), slots=st.integers(1, 12), n=st.integers(1, 90))
def test_streaming_is_never_slower_than_revolve(costs: Costs, slots: int, n: int) -> None:
    ours = streaming(costs, slots, n).makespan_s
    assert ours <= PLANNERS["revolve"](costs, slots, n).makespan_s * (1 + 1e-9)


@pytest.mark.parametrize(("slots", "n", "write_s", "read_s"), [(1, 5, 0.5, 10.0), (2, 20, 30, 3)])
def test_streaming_falls_back_to_revolve_where_it_saves_no_time(
    slots: int, n: int, write_s: float, read_s: float
) -> None:
    costs = Costs(1.0, 2.0, tiers=(Tier("slow", write_s, read_s),))
    made = PLANNERS["streaming"](costs, slots, n)
    assert made.note == "Streaming cannot pay here: plain Revolve from the fast slots."
    assert list(made.schedule()) == list(PLANNERS["revolve"](costs, slots, n).schedule())


@pytest.mark.parametrize("name", ["streaming", "interval"])
@pytest.mark.parametrize("rho", [0.4, 1.5, 4.0, 30.0])
def test_long_predictions_extend_short_simulations(name: str, rho: float) -> None:
    costs = Costs(1.0, 2.0, tiers=(Tier(write_s=rho, read_s=rho),))
    n = SIMULATED_STEPS + 3001
    made = PLANNERS[name](costs, 12, n)
    run = simulate(made.schedule(), n, costs, 12, checked=False)
    assert made.makespan_s == pytest.approx(run.makespan_s, rel=2e-3)
    assert made.forward_steps == pytest.approx(run.forward_steps, rel=2e-3)
    assert made.writes == pytest.approx(run.writes, rel=2e-3)


def test_a_schedule_of_a_billion_steps_is_lazy() -> None:
    costs = Costs(1.0, 2.0, tiers=(Tier(write_s=8.0, read_s=8.0),))
    firsts = {"revolve": Save(0), "streaming": Offer(0), "interval": Put(0), "online": Save(0)}
    for name, first in firsts.items():
        if name == "online":
            schedule = online_schedule(costs, 10, lambda i: i == 10**9)
        else:
            schedule = PLANNERS[name](costs, 10, 10**9).schedule()
        assert next(schedule) == first
        schedule.close()


def test_the_papers_figures() -> None:
    assert [round(printed_factor(i, 100), 3) for i in (8, 64, 1024)] == [1.0, 1.0, 1.901]
    assert [round(corrected_factor(i, 100), 3) for i in (8, 64, 1024)] == [1.875, 1.984, 2.9]


@pytest.mark.parametrize("slots", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("n", [1, 2, 3, 7, 20, 61])
def test_online_finds_the_end_by_itself(n: int, slots: int) -> None:
    asked: list[int] = []

    def is_last(i: int) -> bool:
        asked.append(i)
        return i == n

    used = check(dynamic_schedule(slots, is_last), None, slots)
    assert asked == list(range(1, n + 1))
    assert used.peak_slots <= slots


def test_plan_ranks_and_explains() -> None:
    costs = Costs(1e-3, 2e-3, state_bytes=1 << 20, tiers=(Tier("file", 4e-3, 4e-3),))
    chosen = plan(costs, "64 MiB", 10_000)
    assert chosen.planner == "streaming"
    assert chosen.slots == 64
    assert {p.planner for p in chosen.candidates} == set(RANKED) - {"store-all", "periodic"}
    assert chosen.makespan_s == min(p.makespan_s for p in chosen.candidates)
    text = str(chosen)
    for part in ("streaming", "revolve", "lower bound", "Chosen", "store-all needs 9999"):
        assert part in text
    assert plan(costs, "64 slots", 20).planner == "store-all"


@pytest.mark.parametrize("n", [0, -1, 1.5, True])
def test_bad_step_counts(n: object) -> None:
    with pytest.raises(ArgumentError, match=r"n_steps=.*at least 1"):
        plan(Costs(1.0, 2.0), "10 slots", n)


def test_bad_planner_names_the_others() -> None:
    with pytest.raises(ArgumentError, match=r"'magic' is not known.*'auto'.*revolve"):
        plan(Costs(1.0, 2.0), "10 slots", 10, planner="magic")
    with pytest.raises(ArgumentError, match="must know n_steps"):
        PLANNERS["revolve"](Costs(1.0, 2.0), 10, None)
