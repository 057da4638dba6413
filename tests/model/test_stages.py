"""Costs of a chain: checks, JSON, printing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multistage import PLANNERS, Costs, Tier, simulate
from multistage.actions import Action, Tape
from multistage.errors import ArgumentError
from multistage.model.stages import Stage, StageCosts, Way


def a_stage(**changes: object) -> Stage:
    options: dict[str, object] = {
        "name": "conv",
        "forward_s": 1e-3,
        "backward_s": 2e-3,
        "output_bytes": 100,
        "tape_bytes": 300,
    }
    return Stage(**{**options, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward_s": -1.0}, "forward_s=-1.0"),
        ({"name": ["conv"]}, "name=.* must be a string"),
        ({"backward_s": math.nan}, "backward_s=nan"),
        ({"forward_s": "fast"}, "forward_s='fast'"),
        ({"output_bytes": -2}, "output_bytes=-2"),
        ({"spared_s": 1.5}, "cannot be more"),
        ({"spared_bytes": 101}, "spared_bytes=101 is a part of output_bytes=100"),
        ({"overhead_s": 3.5}, "overhead_s=3.5 is a part of"),
        ({"tape_bytes": (1 << 60) + 1}, "2\\^60"),
        ({"tape_bytes": 1.5}, "tape_bytes=1.5"),
        ({"tape_bytes": 99}, "the tape includes the output"),
        ({"ways": (Way(99, 0, 0, 0.0),)}, "a way to keep its tape has tape_bytes=99"),
        ({"way": -1}, "way=-1"),
    ],
)
def test_invalid_stages_are_named_in_the_error(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        a_stage(**changes)


def test_defaults_and_printing() -> None:
    costs = StageCosts((a_stage(), a_stage(gradient_bytes=7)), 50)
    assert [stage.gradient_bytes for stage in costs.stages] == [100, 7]
    assert "conv" in str(costs) and "300 B" in str(costs)
    with pytest.raises(ArgumentError, match="at least one stage"):
        StageCosts(())
    with pytest.raises(ArgumentError, match="input_bytes"):
        StageCosts((a_stage(),), -1)


def test_files(tmp_path: Path) -> None:
    costs = StageCosts((a_stage(), a_stage(name="relu", backward_overhead_bytes=9)), 50, 50)
    costs.save(tmp_path / "costs.json")
    assert StageCosts.load(tmp_path / "costs.json") == costs
    for text, message in (
        ("{}", "'format'"),
        ("[", "not the costs"),
        ('{"format": "multistage-stages-1"}', "stages"),
        ('{"format": "multistage-stages-1", "stages": [{"x": 1}], "input_bytes": 1}', "x"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(ArgumentError, match=message):
            StageCosts.load(tmp_path / "bad.json")
    with pytest.raises(ArgumentError, match="cannot be read"):
        StageCosts.load(tmp_path / "none.json")


def in_stages(costs: Costs, n_steps: int) -> StageCosts:
    """Return the stages that take what equal steps do; a tape includes the state behind it."""
    tape_bytes = 0 if costs.state_is_tape else costs.tape_bytes or costs.state_bytes
    stage = Stage(
        "step",
        costs.forward_step_s,
        max(0.0, costs.reverse_step_s + costs.taping_s - costs.forward_step_s),
        costs.state_bytes,
        costs.state_bytes + tape_bytes,
        gradient_bytes=0,
        spared_s=costs.forward_step_s if costs.state_is_tape else 0.0,
    )
    return StageCosts.uniform(n_steps, stage, costs.state_bytes)


@settings(deadline=None)
@given(
    st.sampled_from(["store-all", "revolve", "periodic", "h-revolve", "disk-revolve"]),
    st.none() | st.floats(1.0, 3.0),
    st.floats(1.0, 5.0),
    st.integers(1, 40),
    st.integers(1, 14),
    st.booleans(),
)
def test_steps_that_are_alike_are_the_constant_case(
    planner: str, tape_step_s: float | None, reverse_step_s: float, size: int, n: int, tier: bool
) -> None:
    """A schedule takes as long whether steps or stages are counted."""
    tiers = (Tier("disk", 0.5, 0.7),) if tier else ()
    costs = Costs(1.0, reverse_step_s, tape_step_s, size, tiers=tiers)
    try:
        made = PLANNERS[planner](costs, 13, n)
    except ArgumentError:  # too little memory
        return
    actions: list[Action] = []
    alike = made.simulate(timed=lambda action, *_: actions.append(action))
    stages = in_stages(costs, n)
    each = simulate(made.schedule(), n, stages, tiers=tiers)
    assert each.makespan_s == pytest.approx(alike.makespan_s)
    # A step that its `Reverse` tapes is a run of a stage.
    turns = n - sum(isinstance(action, Tape) for action in actions)
    assert (each.forward_steps - turns, each.writes) == (alike.forward_steps, alike.writes)
    # Beside the slots: state 0, the live state, one working tape; and what a held tape includes.
    held = n if tape_step_s is not None and planner in ("store-all", "periodic") else 1
    assert each.peak_bytes <= alike.peak_bytes + (3 + held) * size


def test_the_mean_of_equal_stages_is_the_cost_of_a_step() -> None:
    costs = Costs(2.0, 3.0, state_bytes=10, tiers=(Tier("disk", 4.0, 4.0),))
    assert in_stages(costs, 5).mean(costs.tiers) == costs.mean() == costs


def test_files_of_costs_are_not_taken_for_one_another(tmp_path: Path) -> None:
    steps, stages = Costs(1.0, 2.0), in_stages(Costs(1.0, 2.0), 3)
    for costs, other in ((steps, StageCosts), (stages, Costs)):
        costs.save(tmp_path / "costs.json")
        assert type(costs).load(tmp_path / "costs.json") == costs
        with pytest.raises(ArgumentError, match=f"'format' must be '{other.FORMAT}'"):
            other.load(tmp_path / "costs.json")
