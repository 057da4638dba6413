"""Plans of uniform steps, written as JSON and planned anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from multistage import PLANNERS, Costs, Plan, Tier, plan
from multistage.errors import ArgumentError, BudgetError

COSTS = Costs(1.0, 2.0, state_bytes=64, tiers=(Tier("disk", 4.0, 3.0, capacity_states=40),))


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
        ("format", "multistage-chain-plan-2", "plans of chains are read by ChainPlan"),
        ("planner", "mine", "planner 'mine' is none of store-all"),
        ("planner", ["revolve"], "is none of"),
        ("slots", -1, "slots=-1"),
        ("slots", 1.5, r"slots=1\.5"),
        ("n_steps", 0, "n_steps=0"),
        ("costs", [3], "no costs file"),
        ("costs", {"forward_step_s": 1.0}, "reverse_step_s"),
        ("costs", {"forward_step_s": float("nan"), "reverse_step_s": 1.0}, "forward_step_s=nan"),
        ("costs", None, "no costs file"),
    ],
)
def test_what_is_no_plan_is_refused(name: str, value: Any, message: str) -> None:
    data = json.loads(json.dumps(plan(COSTS, "5 slots", 30, "revolve").to_dict()))
    data[name] = value
    with pytest.raises(ArgumentError, match=message):
        Plan.from_dict(data)


def test_a_plan_edited_by_hand_is_planned_anew() -> None:
    data = plan(COSTS, "5 slots", 30).to_dict()
    assert Plan.from_dict({**data, "makespan_s": 0.0, "slots": 4}) == plan(COSTS, "4 slots", 30)
    with pytest.raises(BudgetError):
        Plan.from_dict({**data, "planner": "store-all", "candidates": []})
    with pytest.raises(ArgumentError, match="'slots' is missing"):
        Plan.from_dict({k: v for k, v in data.items() if k != "slots"})
