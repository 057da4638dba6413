"""Virtual time of chains whose stages differ, worked out by hand, and their bytes over time."""

from __future__ import annotations

import pytest
from replays import actions_of

from multistage.actions import (
    Action,
    Advance,
    Await,
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
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.schedule.simulation import Jitter, simulate
from tests.chain_schedules import MIXED, offload_all, small_chain

# Three stages of one second; tapes of 40, 20 and 30 bytes.
COSTS = StageCosts(
    (
        Stage("a", 1.0, 1.0, output_bytes=10, tape_bytes=40, gradient_bytes=0),
        Stage("b", 1.0, 1.0, output_bytes=10, tape_bytes=20, gradient_bytes=0),
        Stage("c", 1.0, 1.0, output_bytes=10, tape_bytes=30, gradient_bytes=0),
    ),
    input_bytes=5,
)
TIER = Tier.of_rates(write_bytes_per_s=10.0, read_bytes_per_s=20.0)


def spans(run, lane: str) -> list[tuple[float, float, int, int]]:
    return [(s.start_s, s.stop_s, s.first, s.nbytes) for s in run.timeline.lanes[lane]]


def test_transfers_take_the_time_of_their_bytes_in_order() -> None:
    run = simulate(offload_all(3), None, COSTS, tiers=[TIER])
    # Tape 0 is written 1..5, tape 1 from 5 to 7; Evict(0) at 2 waits until 5, Evict(1) at 6
    # until 7.  The loss takes no time here; tape 1 is read 7..8 and awaited, tape 0 is issued
    # after Reverse(2), at 9, and read until 11.
    assert spans(run, "write") == [(1.0, 5.0, 0, 40), (5.0, 7.0, 1, 20)]
    assert spans(run, "read") == [(7.0, 8.0, 1, 20), (9.0, 11.0, 0, 40)]
    assert run.stall_s == 3.0 + 1.0 + 1.0 + 2.0
    assert run.makespan_s == 13.0
    assert (run.writes, run.reads, run.forward_steps) == (2, 2, 3)
    assert run.timeline.bytes["write"] == 60
    assert run.timeline.end_forward_s == 7.0
    assert run.timeline.counts["forward"] == 3


def test_latency_and_one_channel_for_both_directions() -> None:
    late = Tier.of_rates(10.0, 20.0, latency_s=0.5)
    run = simulate(offload_all(3), None, COSTS, tiers=[late])
    assert spans(run, "write") == [(1.0, 5.5, 0, 40), (5.5, 8.0, 1, 20)]


@pytest.mark.parametrize(("shared", "read"), [(False, 11.0), (True, 51.0)])
def test_reads_wait_for_writes_where_both_have_one_channel(shared: bool, read: float) -> None:
    seen: list[float] = []
    with pytest.raises(ScheduleError, match="ended"):
        simulate(
            [Put(0), Await(0), Tape(0), Put(0, tape=True), Get(0), Await(2)],
            None,
            COSTS,
            tiers=[Tier.of_rates(1.0, 1.0, shared=shared)],
            timed=lambda _action, _answer, now: seen.append(now),
        )
    # State 0 is written 0..5, stage 0 runs 5..6, its tape is written 6..46.
    assert seen[-1] == read


def test_a_read_waits_for_the_write_of_the_same_thing() -> None:
    now: list[float] = []
    with pytest.raises(ScheduleError, match="ended"):
        simulate(
            [Put(0), Get(0), Await(1)],
            None,
            COSTS,
            tiers=[Tier.of_rates(1.0, 5.0)],
            timed=lambda _action, _answer, at: now.append(at),
        )
    assert now == [0.0, 0.0, 6.0]


@pytest.mark.parametrize("slower", [1.0, 3.0, 50.0])
def test_a_slower_tier_takes_time_and_no_more_memory(slower: float) -> None:
    costs = small_chain(2, 5)
    usual = simulate(MIXED, None, costs, tiers=[Tier.of_rates(10.0, 10.0)])
    tier = Tier.of_rates(10.0 / slower, 10.0 / slower)
    run = simulate(MIXED, None, costs, tiers=[tier], memory_bytes=usual.peak_bytes)
    assert run.peak_bytes == usual.peak_bytes
    compute_s = run.timeline.totals_s["forward"] + run.timeline.totals_s["reverse"]
    assert run.makespan_s == pytest.approx(compute_s + run.stall_s)
    assert run.makespan_s >= usual.makespan_s
    jittered = simulate(MIXED, None, costs, tiers=[tier], jitter=Jitter(0.5), seed=3)
    assert jittered.peak_bytes == usual.peak_bytes
    assert jittered.makespan_s != run.makespan_s


def test_bytes_over_time() -> None:
    run = simulate(offload_all(3), None, COSTS, tiers=[TIER])
    held = run.timeline.memory["fast"]

    def at(time_s: float) -> float:
        return next(value for t, value in reversed(held) if t <= time_s)

    # Tape 0 leaves when its write is done and stage 1 has run.
    assert [at(t) for t in (0.5, 1.5, 4.9, 5.5, 6.5, 7.0)] == [45, 65, 65, 55, 55, 55]
    assert run.timeline.memory["slow"][-1] == (13.0, 0)
    assert run.timeline.peak("slow") == 60
    assert run.timeline.peak("fast") == run.peak_bytes


def test_the_last_forward_is_spared_what_only_its_output_needs() -> None:
    stage = Stage("a", 2.0, 1.0, 10, 30, spared_s=0.5)
    costs = StageCosts((stage, stage), 10)
    actions = [Tape(0), Save(1), Advance(1, 2), EndForward(), Load(1)]
    rest = [Free(1), Tape(1), Reverse(1), Reverse(0)]
    assert simulate([*actions, *rest], None, costs).makespan_s == 2 + 2 + 1.5 + 1 + 1
    turned = [Free(1), Reverse(1), Reverse(0)]
    assert simulate([*actions, *turned], None, costs).makespan_s == 2 + 2 + 1.5 + 1 + 1


def test_an_offer_is_refused_where_the_tier_is_full() -> None:
    answers: list[object] = []
    tier = Tier.of_rates(10.0, 10.0, capacity_bytes=44)
    with pytest.raises(ScheduleError, match="ended"):
        simulate(
            [Tape(0), Offer(0, tape=True), Load(0), Offer(0)],
            None,
            COSTS,
            tiers=[tier],
            timed=lambda _action, answer, _now: answers.append(answer),
        )
    assert answers == [None, 0, None, None]


def test_a_run_of_stages_is_one_action_and_one_message() -> None:
    with pytest.raises(ScheduleError, match=r"action 1: Advance\(1, 2\) needs 25 bytes"):
        simulate([Advance(0, 1), Advance(1, 3)], None, COSTS, memory_bytes=24)
    seen: list[Action] = []
    with pytest.raises(ScheduleError, match="action 1: the schedule ended"):
        simulate([Advance(0, 3)], None, COSTS, trace=seen.append)
    assert seen == [Advance(0, 1), Advance(1, 2), Advance(2, 3)]


def test_the_number_of_stages_is_that_of_the_costs() -> None:
    actions = [Tape(0), Tape(1), Tape(2), EndForward(), Reverse(2), Reverse(1), Reverse(0)]
    assert simulate(actions, 3, COSTS).makespan_s == 6.0
    with pytest.raises(ArgumentError, match="n_steps=4 but the costs have 3 stages"):
        simulate(actions, 4, COSTS)


def test_uniform_tapes_travel_in_the_time_of_their_slots() -> None:
    costs = Costs(1.0, 1.0, state_bytes=10, tape_bytes=20, tiers=(Tier("t", 2.0, 3.0),))
    actions = actions_of("T0 P0t T1 E0t | R1 G0t a1 R0 D0t")
    for checked in (True, False):
        run = simulate(actions, 2, costs, 2, checked=checked)
        # 0..2 forward, written 1..5, reversed until 6, read 6..12, reversed until 13.
        assert run.makespan_s == 13.0
        assert run.stall_s == 9.0


def test_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match="slots=3 go with uniform steps"):
        simulate([], None, COSTS, 3)
    with pytest.raises(ArgumentError, match="go with StageCosts"):
        simulate([], 3, Costs(1.0, 1.0), 3, tiers=[TIER])
    with pytest.raises(ArgumentError, match="is not understood"):
        simulate([], None, COSTS, tiers="fast")
    with pytest.raises(ArgumentError, match="names tier 1, but there are 1"):
        simulate([Put(0, 1)], None, COSTS, tiers=[TIER])
