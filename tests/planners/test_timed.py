"""Planning is fast and stays true: the kernel equals the simulation, long problems cost no more."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks._published import paper_interval
from multistage import native
from multistage.errors import ArgumentError, BudgetError
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.planners import PLANNERS, Plan, plan
from multistage.planners.streaming.interval import interval, shortest_interval
from multistage.planners.streaming.reserve import Reservation
from multistage.planners.streaming.streaming import Form, _forms, ring_prediction, timed
from multistage.planners.streaming.sweep import Sweep
from multistage.schedule.simulation import Simulation, simulate

needs_core = pytest.mark.skipif(native.LIBRARY is None, reason="the C core was not built")


def one_tier() -> st.SearchStrategy[Tier]:
    return st.builds(
        Tier,
        write_s=st.sampled_from([0.0, 0.3, 1.0, 1.5, 2.3, 4.0, 20.0]),
        read_s=st.sampled_from([0.0, 0.5, 1.0, 3.0, 9.0, 40.0]),
        write_overhead_s=st.sampled_from([0.0, 0.0, 0.1, 1.0]),
        read_overhead_s=st.sampled_from([0.0, 0.0, 0.3]),
        capacity_states=st.sampled_from([None, None, 0, 1, 3, 10]),
        queue_depth=st.sampled_from([1, 2, 4]),
    )


def costs() -> st.SearchStrategy[Costs]:
    return st.builds(
        Costs,
        st.just(1.0),
        st.sampled_from([0.0, 0.5, 1.0, 3.0]),
        tape_step_s=st.sampled_from([None, None, 1.0, 1.4]),
        tiers=st.tuples(one_tier()),
        action_s=st.sampled_from([0.0, 0.0, 0.01, 0.3]),
    )


def same(found: Simulation | Plan, run: Simulation) -> None:
    assert found.makespan_s == pytest.approx(run.makespan_s, rel=1e-9)
    assert found.stall_s == pytest.approx(run.stall_s, rel=1e-7, abs=1e-7 * run.makespan_s)
    counts = (found.forward_steps, found.writes, found.reads)
    assert counts == (run.forward_steps, run.writes, run.reads)


@needs_core
@settings(max_examples=150, deadline=None)
@given(costs=costs(), slots=st.integers(1, 40), n=st.integers(3, 120), data=st.data())
def test_the_kernel_equals_the_simulation(
    costs: Costs, slots: int, n: int, data: st.DataObject
) -> None:
    forms = list(_forms(costs, slots, n, 1.0))
    if forms:
        form = data.draw(st.sampled_from(forms))
        sweep = form.sweep(costs, slots, n, Reservation(costs))
        found = timed(sweep, costs, n)
        run = simulate(sweep.schedule(n), n, costs, slots)
        same(found, run)
        assert run.peak_slots <= found.peak_slots <= slots
    ring = Form(data.draw(st.sampled_from([1.0, 2.3, 7.0])), None, online=True)
    sweep = ring.sweep(costs, slots, n, Reservation(costs))
    found = timed(sweep, costs, n, online=True)
    same(found, simulate(sweep.schedule(None, lambda i: i == n), None, costs, slots))


@needs_core
@settings(max_examples=60, deadline=None)
@given(costs=costs(), slots=st.integers(1, 6), n=st.integers(5, 24), data=st.data())
def test_the_kernel_moves_single_positions(
    costs: Costs, slots: int, n: int, data: st.DataObject
) -> None:
    steps = st.frozensets(st.integers(1, n - 2), max_size=3)
    tail = data.draw(st.one_of(st.none(), st.integers(1, n - 1)))
    depth = costs.tiers[0].queue_depth
    sweep = Sweep(slots, 3.0, tail, depth, extra=data.draw(steps), skip=data.draw(steps))
    same(timed(sweep, costs, n), simulate(sweep.schedule(n), n, costs, slots))


# ------------------------------------------------------------- long problems

LONG = [
    (form, rho, slots)
    for form in (Form(1.0, None), Form(4.3, None), Form(2.0, None, end_spacing=3.0))
    for rho, slots in ((0.7, 3000), (1.0, 5000), (4.3, 4100))
] + [(Form(300.0, None), 300.0, 2500)]


@needs_core
@pytest.mark.parametrize(("form", "rho", "slots"), LONG)
def test_rings_of_many_slots_are_timed_by_shorter_ones(form: Form, rho: float, slots: int) -> None:
    """Within 1 % of the whole simulation, 0.3 % where states lie closer than 100 steps."""
    costs = Costs(1.0, 1.0, tiers=(Tier(write_s=rho, read_s=2 * rho),))
    for n in (8 * slots, 20 * slots):
        found = ring_prediction(form, costs, slots, n)
        whole = timed(form.sweep(costs, slots, n, Reservation(costs)), costs, n)
        error = 3e-3 if form.spacing < 100 else 1e-2
        assert found.makespan_s == pytest.approx(whole.makespan_s, rel=error)
        assert found.peak_slots <= slots


# Write and read seconds, states in the tier, slots, steps: each prediction lay below the bound.
BELOW = [
    (3.0, 3.0, None, 3_000, 16_384),
    (300.0, 5.0, None, 16_000, 10**6),
    (5000.0, 5000.0, None, 10**6, 10**9),
    (0.1, 7.0, None, 16_000, 10**9),
    (900.0, 20.0, None, 3_000, 4_096),
    (3.0, 3.0, 40, 1, 4_096),
    (0.1, 7.0, 40, 1, 4_096),
]


@needs_core
@pytest.mark.parametrize(("write_s", "read_s", "room", "slots", "n"), BELOW)
def test_no_extended_prediction_is_below_the_bound(
    write_s: float, read_s: float, room: int | None, slots: int, n: int
) -> None:
    tier = Tier("slow", write_s, read_s, 0.1, 0.1, capacity_states=room)
    for name in ("online", "streaming"):
        made = PLANNERS[name](Costs(1.0, 2.0, tiers=(tier,)), slots, n)
        assert made.makespan_s >= made.lower_bound_s
        assert made.forward_steps >= n
        assert made.peak_slots <= slots


@needs_core
@pytest.mark.parametrize(("spacing", "slots", "n"), [(300.0, 1469, 1354), (900.0, 1110, 3368)])
def test_short_rings_of_wide_spacing_are_timed_exactly(spacing: float, slots: int, n: int) -> None:
    tier = Tier("slow", spacing, 4.6, 4.6)
    costs = Costs(1.0, 60.0, tiers=(tier,))
    made = PLANNERS["online"](costs, slots, n)
    run = simulate(made.schedule(), n, costs, slots, checked=False)
    assert made.makespan_s == pytest.approx(run.makespan_s, rel=1e-9)


@needs_core
@pytest.mark.parametrize("capacity", [5, 100, 300])
@pytest.mark.parametrize("rho", [0.4, 9.3])
def test_online_predictions_of_a_tier_that_gets_full(capacity: int, rho: float) -> None:
    tier = Tier(write_s=rho, read_s=rho, capacity_states=capacity)
    costs, n = Costs(1.0, 2.0, tiers=(tier,)), 9_000
    made = PLANNERS["online"](costs, 6, n)
    run = simulate(made.schedule(), None, costs, 6, checked=False)
    assert made.makespan_s == pytest.approx(run.makespan_s, rel=2e-3)


@pytest.fixture
def work(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Count the steps and states that streaming schedules are timed on."""
    counted: list[float] = []
    original: Callable[..., Simulation] = timed

    def counting(sweep: Sweep, costs: Costs, n_steps: int, **options: Any) -> Simulation:
        kept = n_steps - sweep.keep_from if sweep.tail_start is None else 0
        room = costs.tiers[0].capacity_states
        if room is not None:  # once the tier is full the ring moves on at once
            kept = min(kept, int(room * sweep.spacing) + 4 * sweep.slots)
        counted.append(min(n_steps / sweep.spacing, 1e9 if room is None else room) + kept)
        return original(sweep, costs, n_steps, **options)

    for name in ("online", "streaming"):
        monkeypatch.setattr(sys.modules[f"multistage.planners.streaming.{name}"], "timed", counting)
    return counted


@pytest.mark.long(but="0.01-2")
@needs_core
@pytest.mark.parametrize("slots", [1, 2, 1000, 20_000, 10**6])
@pytest.mark.parametrize("rho", [0.01, 4.0, 1000.0])
def test_planning_does_not_grow_with_steps_or_slots(
    slots: int, rho: float, work: list[float]
) -> None:
    """A quarter of a second at ten nanoseconds a step; 16 s at 20 000 slots before."""
    for read, capacity in ((1.0, None), (8.0, None), (1.0, 1000)):
        tiers = (Tier("file", rho, read * rho, capacity_states=capacity),)
        for name in ("streaming", "online", "interval"):
            work.clear()
            PLANNERS[name](Costs(1.0, 2.0, tiers=tiers), slots, 10**9)
            assert sum(work) < 2.5e7, (name, read, capacity, sum(work), len(work))
            assert len(work) < 3500, (name, len(work))


@needs_core
def test_every_planner_plans_a_billion_steps_or_refuses() -> None:
    tiers = (Tier("host", 0.2, 0.2, capacity_states=50), Tier("file", 7.0, 7.0))
    for name in PLANNERS:
        if name == "pyrevolve":
            continue
        for slots in (1, 10, 10**5):
            try:
                assert PLANNERS[name](Costs(1.0, 2.0, 1.5, tiers=tiers), slots, 10**9).makespan_s
            except BudgetError:
                assert name in ("store-all", "periodic", "recursive")
            except ArgumentError as error:
                assert name in ("h-revolve", "disk-revolve", "stumm-walther", "mixed")
                assert "use" in str(error)
    assert plan(Costs(1.0, 2.0, tiers=tiers), "100000 slots", 10**9, progress=False).makespan_s


# ---------------------------------------------------------- a faster tier pays


def test_interval_is_the_papers_where_reads_keep_up() -> None:
    for rho in (2.0, 4.0, 8.0, 64.0):
        costs = Costs(1.0, 2.0, tiers=(Tier(write_s=rho, read_s=rho),))
        ours, papers = interval(costs, 100, 10**6), paper_interval(costs, 100, 10**6)
        assert ours.parameters == papers.parameters == {"interval": rho}
        assert ours.makespan_s == papers.makespan_s


@settings(max_examples=150, deadline=None)
@given(costs=costs(), slots=st.integers(1, 40), n=st.integers(1, 60))
def test_the_shortest_interval_writes_where_a_state_has_room(
    costs: Costs, slots: int, n: int
) -> None:
    made = shortest_interval(costs, slots, n)
    assert (made is None) == (n == 1 or costs.tiers[0].capacity_states == 0)
    if made is not None:
        assert made.writes >= 1
        run = simulate(made.make(), n, costs, slots)
        same(made, run)
        assert run.peak_slots <= made.peak_slots <= slots
