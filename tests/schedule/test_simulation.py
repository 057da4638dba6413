"""The simulator's clock, worked out by hand on small schedules."""

from __future__ import annotations

from typing import Any

import pytest
from replays import actions_of

from multistage.actions import (
    Action,
    Advance,
    Await,
    Drop,
    EndForward,
    Evict,
    Get,
    Offer,
    Put,
    Reverse,
    Schedule,
    Tape,
)
from multistage.errors import ArgumentError, ScheduleError
from multistage.model.costs import Costs
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.schedule.rules import check
from multistage.schedule.simulation import Jitter, simulate

COSTS = Costs(1.0, 2.0, tiers=(Tier("t", write_s=4.0, read_s=3.0),))
STREAMED = actions_of("P0 0>2 T2 | R2 a0 G0 a1 L0 0>1 R1 L0 F0 D0 R0")


def test_transfers_overlap_and_stalls_are_counted() -> None:
    run = simulate(STREAMED, 3, COSTS, slots=1)
    # 0..3 forward, 3..5 reverse 2 (write done at 4), read 5..8, then 1 + 2 + 2.
    assert run.makespan_s == 13.0
    assert run.stall_s == 3.0
    assert run.forward_steps == 4
    assert (run.writes, run.reads, run.peak_slots) == (1, 1, 1)
    spans = run.timeline.lanes
    assert [(s.start_s, s.stop_s) for s in spans["write"]] == [(0.0, 4.0)]
    assert [(s.start_s, s.stop_s) for s in spans["read"]] == [(5.0, 8.0)]
    assert run.timeline.end_forward_s == 3.0
    assert run.timeline.peak("fast") == 1.0


def test_a_read_waits_for_its_write() -> None:
    slow = Costs(1.0, 2.0, tiers=(Tier("t", write_s=40.0, read_s=3.0),))
    early = [a for a in STREAMED if a != Await(0)]
    early.insert(early.index(Await(1)) + 1, Await(0))
    run = simulate(early, 3, slow, slots=2)
    assert [(s.start_s, s.stop_s) for s in run.timeline.lanes["read"]] == [(40.0, 43.0)]


def test_overheads_burden_the_computing_thread() -> None:
    tier = Tier("t", write_s=4.0, read_s=3.0, write_overhead_s=0.5, read_overhead_s=0.25)
    run = simulate(STREAMED, 3, Costs(1.0, 2.0, tiers=(tier,)), slots=1)
    assert run.makespan_s == pytest.approx(13.75)


def test_real_tapes_cost_their_own_time() -> None:
    costs = Costs(1.0, 2.0, tape_step_s=1.5)
    taped = [Tape(0), Tape(1), EndForward(), Reverse(1), Reverse(0)]
    assert simulate(taped, 2, costs, slots=1).makespan_s == 7.0


def test_offers_are_refused_while_the_queue_is_full() -> None:
    answers: list[object] = []

    def schedule() -> Schedule:
        for i in range(6):
            token = yield Offer(i)
            answers.append(token)
            if i < 5:
                yield Advance(i, i + 1)

    with pytest.raises(ScheduleError, match="adjoint at None"):
        simulate(schedule(), 6, COSTS, slots=6)
    # Queue depth 2, writes of 4 steps: taken at 0 and 1, then when 0 is done, at 4.
    assert answers == [0, 1, None, None, 2, None]


def test_put_waits_for_room_and_a_full_tier_is_an_error() -> None:
    tier = Tier("t", write_s=4.0, read_s=3.0, queue_depth=1)
    costs = Costs(1.0, 2.0, tiers=(tier,))
    puts = [Put(0), Advance(0, 1), Put(1), Await(0), Await(1)]
    with pytest.raises(ScheduleError):
        simulate(puts, 2, costs, slots=2)
    full = Costs(1.0, 2.0, tiers=(Tier("t", 4.0, 3.0, capacity_states=1),))
    with pytest.raises(ArgumentError, match="is full"):
        simulate(puts, 2, full, slots=2)
    with pytest.raises(ArgumentError, match="names tier 0"):
        simulate(puts, 2, Costs(1.0, 2.0), slots=2)
    with pytest.raises(ArgumentError, match="names tier -1, but there are 1"):
        simulate([Put(0, -1)], 1, COSTS)


@pytest.mark.parametrize("action", [Drop(0), Get(0), Get(0, 3), Evict(0), Await(0)], ids=str)
def test_an_illegal_action_is_judged_before_it_is_timed(action: Action) -> None:
    with pytest.raises(ScheduleError, match=r"action 1: .* (no|has no) "):
        simulate([Advance(0, 1), action], 1, COSTS)


@pytest.mark.parametrize("action", [Drop(0), Get(0), Evict(0), Await(0)], ids=str)
def test_an_unchecked_run_refuses_what_it_cannot_time(action: Action) -> None:
    with pytest.raises(ScheduleError, match="is not there; simulate it with checked=True"):
        simulate([Advance(0, 1), action], 1, COSTS, checked=False)


STAGES = StageCosts.uniform(3, Stage("a", 1.0, 2.0, 10, 30), 5)
NO_INTS: list[tuple[Any, str]] = [
    (Advance(0, 0.5), "stop=0.5"),
    (Advance(0, "1"), "stop='1'"),
    (Drop([]), "step="),
    (Await([]), "token="),
]


@pytest.mark.parametrize(("action", "what"), NO_INTS, ids=str)
def test_an_action_with_other_than_ints_is_named(action: Any, what: str) -> None:
    rates = [Tier.of_rates(1.0, 1.0)]
    with pytest.raises(ScheduleError, match=rf"^action 0: {type(action).__name__}.* but {what}"):
        check([action], costs=STAGES)
    with pytest.raises(ScheduleError, match=rf"^action 0: .* but {what}"):
        simulate([action], None, STAGES, tiers=rates)


def test_an_action_with_other_than_ints_is_named_where_steps_are_alike() -> None:
    with pytest.raises(ScheduleError, match=r"^action 0: Advance\(0, 1\) but stop='1' is no int"):
        check([Advance(0, "1")], 3)
    with pytest.raises(ScheduleError, match=r"^action 0: Put\(0, 0.5\) but tier=0.5 is no int"):
        simulate([Put(0, 0.5)], 1, COSTS)


def test_jitter_is_seeded_and_has_mean_one() -> None:
    jitter = Jitter(sigma=0.3)
    draw, again = jitter.sampler(7), jitter.sampler(7)
    sample = [draw() for _ in range(20_000)]
    assert sample[:50] == [again() for _ in range(50)]
    assert sum(sample) / len(sample) == pytest.approx(1.0, abs=0.02)
    spikes = Jitter.parse("spikes:0.05,10").sampler(1)
    factors = {spikes() for _ in range(1000)}
    assert factors == {1.0, 10.0}
    first = simulate(STREAMED, 3, COSTS, 1, jitter=jitter, seed=3)
    assert first == simulate(STREAMED, 3, COSTS, 1, jitter=jitter, seed=3)
    assert first != simulate(STREAMED, 3, COSTS, 1, jitter=jitter, seed=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("spikes:2,10", r"spike_probability=2.0 in \[0, 1\]"),
        ("spikes:0.1,0", "spike_factor=0.0 above 0"),
        ("lognormal:-1", "sigma=-1.0 must lie in"),
        ("lognormal:nan", "sigma=nan must lie in"),
    ],
)
def test_jitter_out_of_range_is_named(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Jitter.parse(text)


@pytest.mark.parametrize("text", ["", "lognormal", "spikes:1", "gauss:1", "lognormal:x"])
def test_bad_jitter(text: str) -> None:
    with pytest.raises(ArgumentError, match="lognormal:SIGMA"):
        Jitter.parse(text)
