"""Costs, tiers and the costs file."""

from __future__ import annotations

import json

import pytest

from multistage.errors import ArgumentError
from multistage.model.costs import Costs
from multistage.model.tier import Tier


@pytest.mark.parametrize(
    "wrong",
    [
        {"forward_step_s": 0.0},
        {"forward_step_s": -1.0},
        {"forward_step_s": float("nan")},
        {"reverse_step_s": -1.0},
        {"tape_step_s": float("inf")},
        {"action_s": -1e-9},
        {"state_bytes": 0},
        {"tape_bytes": -1},
    ],
)
def test_bad_costs(wrong: dict[str, float]) -> None:
    values = {"forward_step_s": 1.0, "reverse_step_s": 2.0, **wrong}
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        Costs(**values)


@pytest.mark.parametrize(
    "wrong",
    [{"write_s": -1.0}, {"read_s": float("inf")}, {"queue_depth": 0}, {"capacity_states": -1}],
)
def test_bad_tiers(wrong: dict[str, float]) -> None:
    with pytest.raises(ArgumentError, match=next(iter(wrong))):
        Tier(**wrong)


def test_derived_costs() -> None:
    bare = Costs(1.0, 2.0)
    assert (bare.state_is_tape, bare.taping_s, bare.turn_s, bare.tape_slots) == (True, 1, 2, 1)
    assert bare.tier is None
    assert bare.rho == float("inf")
    taped = Costs(1.0, 2.0, tape_step_s=1.5, state_bytes=10, tape_bytes=25)
    assert (taped.state_is_tape, taped.taping_s, taped.turn_s) == (False, 1.5, 3.5)
    assert taped.tape_slots == 2.5


def test_costs_survive_their_file(tmp_path) -> None:
    costs = Costs(1.0, 2.0, 1.5, 10, 25, (Tier("a", 1, 2, 0.1, 0.2, 7, 3),), 1e-6)
    costs.save(tmp_path / "costs.json")
    assert Costs.load(tmp_path / "costs.json") == costs
    assert costs.without_tiers().tiers == ()


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        json.dumps({"format": "other"}),
        json.dumps({"format": "multistage-costs-1", "surprise": 1}),
        json.dumps({"format": "multistage-costs-1", "forward_step_s": 1}),
        json.dumps({"format": "multistage-costs-1", "forward_step_s": -1, "reverse_step_s": 1}),
    ],
)
def test_bad_costs_files(text: str) -> None:
    with pytest.raises(ArgumentError):
        Costs.from_json(text)
