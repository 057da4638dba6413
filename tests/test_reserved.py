"""The limit that a user gives is what the planner was given and what was reserved beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from multistage import Costs, Plan, Reversal, Stage, StageCosts, Tier, native, open_store, plan
from multistage.errors import ArgumentError
from multistage.states.layout import Layout

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="no C core")
STEP = Costs(1.0, 2.0, tiers=(Tier("disk", 4.0, 3.0),))
DIFFER = StageCosts.uniform(20, Stage("a", 1.0, 2.0, 800, 800), 800)


def limit_of(made: Plan) -> int:
    assert made.memory_bytes is not None
    return made.memory_bytes + sum(made.reserved.values())


def reversal(folder: Path, costs: Costs | StageCosts, **options: Any) -> Reversal[Any, Any]:
    options = {"tiers": f"file://{folder}?buffers=1MiB", **options}
    return Reversal(lambda x, i: x + 1, lambda x, a, i: a, 20, costs=costs, **options)


@pytest.mark.parametrize("costs", [STEP, DIFFER], ids=["equal", "unequal"])
@pytest.mark.parametrize("more", [0, 799])
def test_of_steps(tmp_path: Path, costs: Costs | StageCosts, more: int) -> None:
    layout = Layout.of(np.zeros(100))
    buffers = open_store(f"file://{tmp_path}?buffers=1MiB").buffer_bytes(layout)
    limit = buffers + 7 * layout.nbytes + more
    with reversal(tmp_path, costs, memory=limit) as run:
        made = run.prepare(np.zeros(100))
    assert limit_of(made) == limit and made.reserved["buffers of the tiers"] > 0
    assert "of which buffers of the tiers" in str(made)
    made.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == made


def test_of_a_durable_run(tmp_path: Path) -> None:
    limit, costs = 64 << 20, STEP.without_tiers()
    with reversal(tmp_path, costs, memory=limit, tiers=None, durable=tmp_path / "run") as run:
        made = run.prepare(np.zeros(100))
    assert limit_of(made) == limit and made.reserved["buffers of the tiers"] > 0


def test_a_budget_in_slots_reserves_nothing(tmp_path: Path) -> None:
    with reversal(tmp_path, STEP, memory="7 slots") as run:
        assert run.prepare(np.zeros(100)).reserved == {}


@pytest.mark.parametrize("reserved", [["x"], {"x": 1.5}, {"x": "1"}])
def test_what_a_file_says_is_judged(reserved: object) -> None:
    data = plan(STEP, "7 slots", 20).to_dict() | {"reserved": reserved}
    with pytest.raises(ArgumentError, match="reserved"):
        Plan.from_dict(data)
