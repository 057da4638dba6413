"""The legality rules: each rule has a schedule that breaks it, and nothing slips through."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replays import actions_of

from multistage.actions import (
    Action,
    Advance,
    Await,
    Drop,
    EndForward,
    Free,
    Get,
    Load,
    Offer,
    Put,
    Reverse,
    Save,
    Tape,
)
from multistage.errors import ArgumentError, ScheduleError
from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.planners.streaming.reserve import Reservation
from multistage.planners.streaming.sweep import Sweep
from multistage.schedule.rules import Rules, check

LEGAL = actions_of("P0 S0 0>2 a0 T2 | R2 L0 F0 0>1 R1 G0 a1 D0 L0 F0 R0")


def test_a_legal_schedule_is_measured() -> None:
    used = check(LEGAL, n_steps=3, slots=2)
    assert used.forward_steps == 4
    assert used.peak_slots == 2
    assert used.transfers == 2
    assert used.tier_peak == {0: 1}
    assert used.actions == len(LEGAL)


@pytest.mark.parametrize(
    ("schedule", "n", "slots", "rule"),
    [
        ([Advance(1, 2)], 3, 1, "live state is 0"),
        ([Advance(0, 0)], 3, 1, "runs no step"),
        ([Advance(0, 4)], 3, 1, "goes past state 3"),
        ([Tape(1)], 3, 1, "live state is 0"),
        ([Tape(0), Load(0), Tape(0)], 3, 1, "already held"),
        ([Reverse(0)], 1, 1, "before EndForward"),
        ([Tape(0), Tape(1), EndForward(), Reverse(0)], 2, 1, "next adjoint step is 1"),
        ([Advance(0, 1), EndForward(), Reverse(0)], 1, 1, "neither its tape nor its state"),
        ([Save(1)], 3, 1, "live state is 0"),
        ([Save(0), Save(0)], 3, 2, "already holds it"),
        ([Save(0), Advance(0, 1), Save(1)], 3, 1, "needs 1 fast slot"),
        ([Advance(0, 1), Load(1)], 3, 1, "no fast slot holds"),
        ([Free(0)], 3, 1, "no fast slot holds"),
        ([Save(0), Offer(0), Free(0)], 3, 1, "was not awaited"),
        ([Offer(1)], 3, 1, "neither live nor held"),
        ([Put(0), Put(0)], 3, 2, "already has that checkpoint"),
        ([Offer(0)], 3, 0, "needs 1 fast slot"),
        ([Get(0)], 3, 1, "has no checkpoint 0"),
        ([Save(0), Put(0), Get(0)], 3, 3, "already holds it"),
        ([Put(0), Await(0), Get(0), Get(0)], 3, 3, "already holds it"),
        ([Put(0), Advance(0, 1), Await(0), Get(0), Load(0)], 3, 1, "before Await(1)"),
        ([Put(0), Await(0), Get(0), Free(0)], 3, 1, "before Await(1)"),
        ([Await(0)], 3, 1, "no such transfer"),
        ([Put(0), Drop(0)], 3, 1, "before its transfer was awaited"),
        ([Drop(0)], 3, 1, "has no checkpoint 0"),
        ([EndForward()], 3, 1, "live state is 0, not 3"),
        ([Advance(0, 3), EndForward(), EndForward()], 3, 1, "second EndForward"),
        ([Tape(0), EndForward()], 1, 1, "adjoint at 1, not 0"),
        ([Save(0), Tape(0), EndForward(), Reverse(0)], 1, 1, "left fast slots: [0]"),
        ([Put(0), Tape(0), EndForward(), Reverse(0)], 1, 1, "left checkpoints in a tier"),
    ],
)
def test_each_rule(schedule: Iterable[Action], n: int, slots: int, rule: str) -> None:
    with pytest.raises(ScheduleError, match=r"^action") as raised:
        check(schedule, n, slots)
    assert rule in str(raised.value)


def test_tapes_beyond_the_first_take_slots() -> None:
    taped = [Tape(0), Tape(1), EndForward(), Reverse(1), Reverse(0)]
    assert check(taped, 2, 3, tape_slots=2.5).peak_slots == 2.5
    with pytest.raises(ScheduleError, match=r"needs 2\.5 fast slot"):
        check(taped, 2, 2, tape_slots=2.5)


def test_an_illegal_action_changes_nothing() -> None:
    rules = Rules(3, 1)
    rules.apply(Save(0), None)
    before = repr(rules)
    for action in (Save(0), Tape(1), Free(1), Get(5), Await(7), Drop(2), EndForward(), Reverse(2)):
        with pytest.raises(ScheduleError):
            rules.apply(action, None)
        assert repr(rules) == before


def test_a_full_tier_refuses() -> None:
    with pytest.raises(ScheduleError, match="is full: 1 of 1"):
        check([Put(0), Advance(0, 1), Put(1)], 3, 2, tier_slots={0: 1})


@pytest.mark.parametrize(("n", "slots"), [(0, 1), (-1, 1), (1, -1)])
def test_bad_arguments(n: int, slots: int) -> None:
    with pytest.raises(ArgumentError):
        check(LEGAL, n, slots)


@settings(max_examples=300, deadline=None)
@given(
    n=st.integers(1, 70),
    slots=st.integers(1, 12),
    spacing=st.sampled_from([1.0, 1.5, 2.3, 4.0, 8.0, 20.0]),
    where=st.none() | st.floats(0, 1),
    queue=st.integers(1, 4),
    drain=st.integers(0, 10),
    reserve=st.booleans(),
    backlog=st.integers(0, 6),
    accepted=st.sampled_from([1.0, 0.7, 0.3, 0.0]),
    surviving=st.sampled_from([1.0, 0.9, 0.3, 0.0]),
    rnd=st.randoms(use_true_random=False),
)
def test_streaming_is_legal_whatever_the_answers(
    n, slots, spacing, where, queue, drain, reserve, backlog, accepted, surviving, rnd
) -> None:
    costs = Costs(1.0, 2.0, tiers=(Tier(write_s=spacing, read_s=spacing),))
    tail = None if where is None else int(where * (n - 1))
    reservation = Reservation(costs) if reserve else None
    sweep = Sweep(slots, spacing, tail, queue, drain, reservation)
    if tail is not None and backlog:
        denser = max(1.0, spacing / 2)
        sweep = replace(sweep, end_start=tail // 2, end_spacing=denser, backlog=backlog)
    used = check(
        sweep.schedule(n),
        n,
        slots,
        accept=lambda _: rnd.random() < accepted,
        survive=lambda _: rnd.random() < surviving,
    )
    assert used.forward_steps >= n


def test_a_state_read_though_its_write_was_lost_is_not_read_again() -> None:
    """A store may read what it has not written yet, and then fail to write it."""
    costs = Costs(1.0, 2.0, tiers=(Tier(write_s=20.0, read_s=20.0),))
    sweep = Sweep(4, 20.0, 61, 3, 0, Reservation(costs))
    check(sweep.schedule(62), 62, 4, survive=lambda token: token not in (2, 4))
