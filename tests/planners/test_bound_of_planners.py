"""No planner's schedule is faster than the lower bound, whatever the tiers, tapes and overheads."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from multistage.errors import BudgetError
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.planners import PLANNERS, plan
from multistage.planners.bound import lower_bound
from multistage.schedule.simulation import simulate

SECONDS = st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.7, 3.0, 4.0, 9.0, 30.0])


def several_tiers() -> st.SearchStrategy[tuple[Tier, ...]]:
    one = st.builds(
        Tier,
        write_s=SECONDS,
        read_s=SECONDS,
        write_overhead_s=st.sampled_from([0.0, 0.0, 0.2, 2.0]),
        read_overhead_s=st.sampled_from([0.0, 0.0, 0.2, 2.0]),
        capacity_states=st.sampled_from([None, None, 0, 1, 3, 10]),
        queue_depth=st.sampled_from([1, 2, 5]),
    )
    return st.lists(one, max_size=3).map(tuple)


def any_costs() -> st.SearchStrategy[Costs]:
    return st.builds(
        Costs,
        st.just(1.0),
        st.sampled_from([0.0, 0.3, 1.0, 3.0]),
        tape_step_s=st.sampled_from([None, None, 0.4, 1.0, 1.4]),
        state_bytes=st.just(10),
        tape_bytes=st.sampled_from([0, 3, 10, 25]),
        tiers=several_tiers(),
        action_s=st.sampled_from([0.0, 0.0, 0.05]),
    )


def makespans(costs: Costs, slots: int, n: int) -> dict[str, float]:
    """Return what each planner's schedule takes in virtual time."""
    found = {}
    for name, planner in PLANNERS.items():
        if name == "pyrevolve":  # Revolve again, and not installed everywhere
            continue
        try:
            made = planner(costs, slots, n)
        except BudgetError:
            continue
        steps = None if name == "online" else n
        found[name] = simulate(made.schedule(), steps, costs, slots, checked=False).makespan_s
    return found


@settings(max_examples=60, deadline=None)
@given(costs=any_costs(), slots=st.integers(1, 12), n=st.integers(1, 40))
def test_no_planner_is_faster_than_the_bound(costs: Costs, slots: int, n: int) -> None:
    bound_s = lower_bound(costs, slots, n)
    for name, makespan_s in makespans(costs, slots, n).items():
        assert makespan_s >= bound_s * (1 - 1e-9), name


def test_a_second_tier_lowers_the_bound() -> None:
    """One tier only was counted, and h-revolve, which writes to both, came out below."""
    tiers = (Tier("a", 30.0, 30.0), Tier("b", 0.1, 0.1))
    both, first = Costs(1.0, 2.0, tiers=tiers), Costs(1.0, 2.0, tiers=tiers[:1])
    made = PLANNERS["h-revolve"](both, 3, 60)
    assert made.lower_bound_s <= made.makespan_s < lower_bound(first, 3, 60)


@settings(max_examples=150, deadline=None)
@given(costs=any_costs(), slots=st.integers(1, 12), n=st.integers(1, 200))
def test_the_bound_falls_with_every_resource(costs: Costs, slots: int, n: int) -> None:
    bound_s = lower_bound(costs, slots, n) * (1 + 1e-12)
    assert lower_bound(costs, slots + 1, n) <= bound_s
    more = Costs(
        1.0,
        costs.reverse_step_s,
        costs.tape_step_s,
        10,
        costs.tape_bytes,
        (*costs.tiers, Tier("more", 2.0, 2.0)),
        costs.action_s,
    )
    assert lower_bound(more, slots, n) <= bound_s


def test_auto_ranks_the_hierarchical_planners_over_several_tiers() -> None:
    tiers = (Tier("host", 0.1, 0.1, capacity_states=8), Tier("file", 40.0, 40.0))
    chosen = plan(Costs(1.0, 2.0, tiers=tiers), "3 slots", 400)
    assert chosen.planner == "h-revolve"
    assert {"stumm-walther", "periodic-disk"} <= {made.planner for made in chosen.candidates}
    assert all(made.lower_bound_s <= chosen.makespan_s for made in chosen.candidates)


def test_auto_solves_no_long_hierarchies() -> None:
    tiers = (Tier("host", 0.1, 0.1, capacity_states=8), Tier("file", 40.0, 40.0))
    chosen = plan(Costs(1.0, 2.0, tiers=tiers), "3 slots", 10**6, progress=False)
    names = {made.planner for made in chosen.candidates}
    assert "periodic-disk" in names and not {"h-revolve", "stumm-walther"} & names
