"""Costs of a chain: checks, JSON, printing."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from multistage.errors import ArgumentError
from multistage.stages import Stage, StageCosts


def a_stage(**changes: object) -> Stage:
    options: dict[str, object] = {
        "name": "conv",
        "forward_s": 1e-3,
        "backward_s": 2e-3,
        "output_bytes": 100,
        "tape_bytes": 300,
    }
    return Stage(**{**options, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"forward_s": -1.0}, "forward_s=-1.0"),
        ({"name": ["conv"]}, "name=.* must be a string"),
        ({"backward_s": math.nan}, "backward_s=nan"),
        ({"forward_s": "fast"}, "forward_s='fast'"),
        ({"output_bytes": -2}, "output_bytes=-2"),
        ({"spared_s": 1.5}, "cannot be more"),
        ({"tape_bytes": (1 << 60) + 1}, "2\\^60"),
        ({"tape_bytes": 1.5}, "tape_bytes=1.5"),
        ({"tape_bytes": 99}, "the tape includes the output"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, object], message: str) -> None:
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
