"""Plans of both kinds in JSON files: what `Plan.load` reads, and what it refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multistage import (
    PLANNERS,
    ChainPlan,
    Costs,
    Plan,
    Stage,
    StageCosts,
    Tier,
    UniformPlan,
    plan,
    plan_chain,
)
from multistage.errors import ArgumentError, BudgetError

COSTS = Costs(1.0, 2.0, state_bytes=64, tiers=(Tier("disk", 4.0, 3.0, capacity_states=40),))
STAGES = StageCosts.uniform(5, Stage("a", 1.0, 2.0, 10, 30), 10)


@pytest.mark.parametrize("planner", ["auto", *PLANNERS])
def test_a_plan_comes_back_from_json(tmp_path: Path, planner: str) -> None:
    made = plan(COSTS, "70 slots", 60, planner)
    made.save(tmp_path / "plan.json")
    found = Plan.load(tmp_path / "plan.json")
    assert found == made
    assert str(found) == str(made)
    assert found.sealed == made.sealed
    assert list(zip(found.schedule(), range(50), strict=False)) == list(
        zip(made.schedule(), range(50), strict=False)
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("format", "multistage-chain-plan-4", "no plan of stages: 'memory_bytes' is missing"),
        ("format", "multistage-plan-0", "'format' must be 'multistage-plan-1' or 'multi"),
        ("format", "multistage-chain-plan-3", "not 'multistage-chain-plan-3'"),
        ("planner", "mine", "planner 'mine' is none of store-all"),
        ("planner", ["revolve"], "is none of"),
        ("slots", -1, "slots=-1"),
        ("slots", 1.5, r"slots=1\.5"),
        ("n_steps", 0, "n_steps=0"),
        ("costs", [3], "not the costs of steps"),
        ("costs", {"forward_step_s": 1.0}, "reverse_step_s"),
        ("costs", {"forward_step_s": float("nan"), "reverse_step_s": 1.0}, "forward_step_s=nan"),
        ("costs", None, "not the costs of steps"),
    ],
)
def test_files_that_are_not_plans_are_refused(name: str, value: Any, message: str) -> None:
    data = json.loads(json.dumps(plan(COSTS, "5 slots", 30, "revolve").to_dict()))
    data[name] = value
    with pytest.raises(ArgumentError, match=message):
        Plan.from_dict(data)


def test_a_plan_edited_by_hand_is_planned_again() -> None:
    data = plan(COSTS, "5 slots", 30).to_dict()
    assert Plan.from_dict({**data, "makespan_s": 0.0, "slots": 4}) == plan(COSTS, "4 slots", 30)
    with pytest.raises(BudgetError):
        Plan.from_dict({**data, "planner": "store-all", "candidates": []})
    with pytest.raises(ArgumentError, match="'slots' is missing"):
        Plan.from_dict({k: v for k, v in data.items() if k != "slots"})


seconds = st.floats(0.0, 1e3, allow_subnormal=False)
positive = st.floats(1e-3, 1e3)
sizes = st.integers(1, 1000)


@st.composite
def uniform_plans(draw: st.DrawFn) -> UniformPlan:
    tiers = st.builds(Tier, st.just("disk"), seconds, seconds, seconds, queue_depth=st.just(2))
    costs = Costs(
        draw(positive),
        draw(seconds),
        draw(st.none() | seconds),
        draw(sizes),
        tiers=tuple(draw(st.lists(tiers, max_size=1))),
        action_s=0.0,  # predictions only estimate how many actions there are
    )
    planner = draw(st.sampled_from(["revolve", "streaming", "interval", "online", "auto"]))
    return plan(costs, f"{draw(st.integers(3, 9))} slots", draw(st.integers(1, 25)), planner)


@st.composite
def chain_plans(draw: st.DrawFn) -> ChainPlan:
    def stage(name: str) -> Stage:
        output = draw(sizes)
        return Stage(name, draw(seconds), draw(seconds), output, output + draw(sizes))

    costs = StageCosts(tuple(stage(f"s{i}") for i in range(draw(st.integers(1, 4)))), draw(sizes))
    rates = Tier.of_rates(draw(positive), draw(positive), draw(seconds), shared=draw(st.booleans()))
    tiers = draw(st.sampled_from([None, rates]))
    try:
        return plan_chain(costs, draw(st.floats(0.3, 1.0)), tiers=tiers, resolution=64)
    except BudgetError:
        return plan_chain(costs, None, tiers=tiers, resolution=64)


@settings(max_examples=60, deadline=None)
@given(st.one_of(uniform_plans(), chain_plans()))
def test_plans_of_both_kinds_come_back_and_are_as_they_were_predicted(made: Plan) -> None:
    data = json.loads(json.dumps(made.to_dict()))
    found = Plan.from_dict(data)
    assert found == made and type(found) is type(made)
    assert found.to_dict() == made.to_dict()
    assert type(made).from_dict(data) == made
    other = UniformPlan if isinstance(made, ChainPlan) else ChainPlan
    with pytest.raises(ArgumentError, match=f"'format' must be '{other.FORMAT}', not '"):
        other.from_dict(data)
    run = found.simulate()
    assert run.makespan_s == pytest.approx(made.makespan_s, rel=1e-9)
    assert (run.forward_steps, run.writes, run.reads, run.peak_bytes) == (
        made.forward_steps,
        made.writes,
        made.reads,
        made.peak_bytes,
    )
    assert made.memory_bytes is None or made.peak_bytes <= made.memory_bytes


@pytest.mark.parametrize(
    "make",
    [
        lambda: plan(COSTS, "5 slots", 20),
        lambda: plan_chain(
            StageCosts.uniform(5, Stage("a", 1.0, 2.0, 10, 30), 10), 0.7, tiers="write=9B/s"
        ),
    ],
    ids=["uniform", "chain"],
)
def test_both_kinds_of_plans_have_the_same_interface(
    make: Callable[[], Plan], tmp_path: Path
) -> None:
    made = make()
    assert str(made).startswith(made.summary())
    assert made.table() in str(made)
    assert made.title == f"{made.planner}: {made.n_steps} {made.UNIT}"
    assert made.gap is not None and made.lower_bound_s is not None
    assert made.gap == pytest.approx(made.makespan_s / made.lower_bound_s - 1)
    assert made.recompute_factor == made.forward_steps / made.n_steps
    assert list(made.limits()) == ["fast", *(tier.name for tier in made.tiers)]
    assert made.limits()["fast"] == made.memory_bytes
    assert "<svg" in made._repr_html_()
    for what in ("schedule", "timeline", "trade-off"):
        made.picture(tmp_path / f"{what}.svg", what)
        assert (tmp_path / f"{what}.svg").read_text().startswith("<svg")
    made.save(tmp_path / "plan.html")
    assert made.title in (tmp_path / "plan.html").read_text()
