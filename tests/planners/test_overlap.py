"""Synchronous schedules whose transfers run beside the steps."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import actions_of, driven, logged

from multistage.actions import (
    Action,
    Advance,
    EndForward,
    Get,
    Load,
    Offer,
    Reverse,
    Schedule,
    Tape,
)
from multistage.errors import ScheduleError
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.planners.single.revolve import revolve_schedule
from multistage.planners.streaming.overlap import on_tier, overlap
from multistage.schedule.rules import check
from multistage.schedule.simulation import simulate


def steps_run(schedule: Schedule) -> list[Action]:
    """The actions that compute, in order."""
    kinds = (Advance, Tape, Reverse, EndForward, Load)
    return [action for action in driven(schedule) if isinstance(action, kinds)]


@pytest.mark.long
@given(
    n=st.integers(1, 150),
    stored=st.integers(1, 40),
    slots=st.integers(1, 9),
    write_s=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    read_s=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
)
@settings(deadline=None)
def test_legal_same_steps_and_never_slower(
    n: int, stored: int, slots: int, write_s: float, read_s: float
) -> None:
    def plain() -> Schedule:
        return on_tier(revolve_schedule(stored, n))

    used = check(overlap(plain(), slots), n, slots)
    assert used.peak_slots <= slots
    assert used.tier_peak.get(0, 0) <= stored
    assert steps_run(overlap(plain(), slots)) == steps_run(plain())
    costs = Costs(1.0, 2.0, tiers=(Tier("slow", write_s, read_s),))
    before = simulate(plain(), n, costs, slots)
    after = simulate(overlap(plain(), slots), n, costs, slots)
    assert after.makespan_s <= before.makespan_s + 1e-9
    assert after.reads <= before.reads


def test_no_read_takes_the_room_of_a_second_tape() -> None:
    n, slots = 4, 3
    actions = actions_of("P0 a0 0>2 T2 T3 | R3 R2 G0 a1 L0 0>1 R1 L0 R0 F0 D0")
    assert check(actions, n, slots, tape_slots=2.0).peak_slots == 2
    log: list[Any] = []
    check(logged(overlap(actions, slots - 1, tape_slots=2.0), log), n, slots - 1, tape_slots=2.0)
    seen = [action for action, _ in log]
    assert seen.index(Get(0)) > seen.index(Reverse(3))
    check(overlap(actions, slots, tape_slots=2.0), n, slots, tape_slots=2.0)


def test_an_offer_is_no_static_schedule() -> None:
    with pytest.raises(ScheduleError, match="static"):
        check(overlap([Offer(0), Tape(0), EndForward(), Reverse(0)], 2), 1, 2)
