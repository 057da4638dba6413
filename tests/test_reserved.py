"""The limit that a user gives is what the planner was given and what was reserved beside it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from multistage import Costs, Plan, Reversal, Stage, StageCosts, Tier, native, plan
from multistage.errors import ArgumentError

pytestmark = pytest.mark.skipif(native.LIBRARY is None, reason="no C core")
ALIKE = Costs(1.0, 2.0, tiers=(Tier("disk", 4.0, 3.0),))
DIFFER = StageCosts.uniform(20, Stage("a", 1.0, 2.0, 800, 800), 800)


@pytest.mark.parametrize("limit", [32 << 20, (32 << 20) + 799, "7 slots"])
@pytest.mark.parametrize(
    ("costs", "durable"), [(ALIKE, False), (DIFFER, False), (ALIKE, True)], ids=str
)
def test_of_steps(
    tmp_path: Path, costs: Costs | StageCosts, durable: bool, limit: int | str
) -> None:
    options = {"durable": tmp_path} if durable else {"tiers": f"file://{tmp_path}?buffers=1MiB"}
    with Reversal(
        lambda x, i: x + 1, lambda x, a, i: a, 20, memory=limit, costs=costs, **options
    ) as run:
        made = run.prepare(np.zeros(100))
    made.save(tmp_path / "plan.json") if not durable else None
    assert durable or Plan.load(tmp_path / "plan.json") == made
    if isinstance(limit, str):  # which leaves the buffers out
        assert made.reserved == {}
        return
    assert made.memory_bytes is not None
    assert made.memory_bytes + sum(made.reserved.values()) == limit
    assert made.reserved["buffers of the tiers"] > 0
    assert "of which buffers of the tiers" in str(made)


def test_of_an_unknown_length(tmp_path: Path) -> None:
    limit = (32 << 20) + 799
    with Reversal(
        lambda x, i: x + 1,
        lambda x, a, i: a,
        memory=limit,
        costs=ALIKE,
        tiers=f"file://{tmp_path}?buffers=1MiB",
    ) as run:
        run.reverse(run.forward(np.zeros(100), until=lambda x, i: i == 20))
        made = run.plan
    assert made is not None and made.memory_bytes is not None
    assert made.memory_bytes + sum(made.reserved.values()) == limit
    assert made.reserved["buffers of the tiers"] > 0


@pytest.mark.parametrize("reserved", [["x"], {"x": 1.5}, {"x": "1"}])
def test_what_a_file_says_is_judged(reserved: object) -> None:
    with pytest.raises(ArgumentError, match="reserved"):
        Plan.from_dict(plan(ALIKE, "7 slots", 20).to_dict() | {"reserved": reserved})
