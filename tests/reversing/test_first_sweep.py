"""A sweep whose first steps are timed: legal, within the slots, no step more than planned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from multistage.actions import Schedule
from multistage.model.chain import FunctionChain
from multistage.model.costs import NOT_KEPT, Costs
from multistage.model.tier import Tier
from multistage.planners import PLANNERS, online_schedule
from multistage.reversing.first_sweep import FirstSteps, first_sweep
from multistage.schedule.rules import check

KIND: dict[str, Any] = {"tape_slots": 9.0, "in_place": True, "one_tape": True}


def costs(rho: float) -> Costs:
    tiers = (Tier("file", rho, rho),)
    return Costs(1.0, 2.0, tape_step_s=1.0, tape_bytes=NOT_KEPT, tiers=tiers)


def swept(make: Callable[..., Schedule], slots: int, n: int | None, is_last: Any = None) -> Any:
    first: FirstSteps[Any, Any] = FirstSteps(
        FunctionChain(lambda x, i: x, lambda t, a, i: a, lambda x, i: (x, x))
    )
    return first_sweep(first, slots, n, is_last, lambda step_s, is_last: make(is_last))


def partial_of(make: Callable[[], Schedule]) -> Callable[..., Schedule]:
    return lambda _: make()


@pytest.mark.parametrize("planner", ["revolve", "streaming", "interval", "h-revolve", "online"])
@pytest.mark.parametrize("rho", [0.2, 1.0, 3.0, 20.0])
def test_first_steps_are_those_of_the_plan(planner: str, rho: float) -> None:
    few = 0
    for n in (*range(1, 12), 33, 200):
        for slots in (1, 2, 3, 4, 6, 12, 40, 100):
            plan = PLANNERS[planner](costs(rho), slots, n)
            alone = check(plan.schedule(), n, slots, **KIND)
            found = check(swept(partial_of(plan.schedule), slots, n), n, slots, **KIND)
            more = found.forward_steps - alone.forward_steps
            assert found.transfers == alone.transfers
            assert 0 <= more <= 3, (n, slots)
            few += more > 0
            assert not more or slots <= 4 or planner == "online", (n, slots)
    assert few < 20


@pytest.mark.parametrize("n", [1, 2, 3, 5, 30, 100])
@pytest.mark.parametrize("slots", [1, 2, 3, 7, 40])
def test_unknown_length(slots: int, n: int) -> None:
    asked: list[int] = []

    def is_last(i: int) -> bool:
        asked.append(i)
        return i == n

    def make(is_last: Any) -> Schedule:
        return online_schedule(costs(1.0).without_tiers(), slots, is_last)

    alone = check(make(lambda i: i == n), None, slots, **KIND)
    found = check(swept(make, slots, None, is_last), None, slots, **KIND)
    assert asked == list(range(1, n + 1))
    assert found.forward_steps <= alone.forward_steps + (slots == 1)


def test_steps_are_timed_until_it_stops() -> None:
    chain: FunctionChain[Any, Any] = FunctionChain(lambda x, i: x + i, lambda x, a, i: a)
    first = FirstSteps(chain)
    assert first.advance(np.zeros(1), 2, 4) == 5
    assert len(first.samples) == 1
    assert first.stop() > 0
    assert first.advance(np.zeros(1), 2, 4) == 5
    assert len(first.samples) == 1
