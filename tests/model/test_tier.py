"""Tiers: what a text says, what is refused, files, and states of one size."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multistage import Costs, Plan, Stage, StageCosts, Tier, plan, plan_chain, simulate
from multistage.actions import Advance, Await, Drop, EndForward, Free, Get, Load, Put, Reverse, Tape
from multistage.errors import ArgumentError, ScheduleError


def test_a_tier_is_parsed_from_text() -> None:
    rates = Tier.parse("write=2GB/s, read=500 MB/s, latency=1.5ms, capacity=1GiB, shared")
    assert rates == Tier.of_rates(2e9, 5e8, 1.5e-3, 1 << 30, shared=True)
    assert Tier.parse("write=1MiB/s") == Tier.of_rates(2.0**20, 2.0**20)
    assert not Tier.parse("write=1GB/s,states-only").tapes
    assert Tier.from_dict(rates.to_dict()) == rates


@pytest.mark.parametrize(
    "text",
    ["", "read=1GB/s", "write=0", "write=1GB/s,write=2GB/s", "write=-1", "speed=3", "write=x",
     "write=1GB/s,latency=3h", "write=1GB/s,shared=1", "write=1GB/s,capacity=-1",
     "write=1,name=", "write=1,name= "],
)  # fmt: skip
def test_invalid_texts_of_a_tier_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError):
        Tier.parse(text)


@pytest.mark.parametrize("wrong", [0, -1, float("nan"), "fast", None, True])
def test_rates_must_be_above_0(wrong: object) -> None:
    with pytest.raises(ArgumentError):
        Tier.of_rates(wrong, 1.0)


def tiers() -> st.SearchStrategy[Tier]:
    seconds, rates = st.floats(0.0, 1e9), st.floats(1e-3, allow_nan=False)
    room = st.none() | st.integers(0, 1 << 60)
    return st.builds(
        Tier,
        st.text(min_size=1, max_size=5).filter(str.strip),
        *(seconds,) * 4,
        room,
        st.integers(1, 99),
        rates,
        rates,
        room,
        st.booleans(),
        st.booleans(),
    )


@settings(deadline=None)
@given(tiers(), st.integers(1, 10**6))
def test_tiers_come_back_from_json(tier: Tier, state_bytes: int) -> None:
    text = json.dumps(tier.to_dict(), allow_nan=False)
    assert Tier.from_dict(json.loads(text)) == tier
    folded = tier.for_states(state_bytes)
    assert folded.for_states(state_bytes) == folded
    costs = Costs(1.0, 2.0, state_bytes=state_bytes, tiers=(tier,))
    assert costs.tiers == (folded,)
    assert Costs.from_json(costs.to_json()) == costs


def test_tiers_in_files_of_before_are_read() -> None:
    rates = {"write_bytes_per_s": 9.0, "read_bytes_per_s": 3.0, "latency_s": 0.5}
    rates |= {"capacity_bytes": 7, "shared": True, "tapes": False, "name": "old"}
    assert Tier.from_dict(rates) == Tier.of_rates(9.0, 3.0, 0.5, 7, True, False, "old")
    per_state = {"name": "a", "write_s": 1.0, "read_s": 2.0, "write_overhead_s": 0.1}
    assert Tier.from_dict(per_state | {"capacity_states": 3}) == Tier("a", 1.0, 2.0, 0.1, 0.0, 3)


@pytest.mark.parametrize("data", [None, 3, "write=1", {"speed": 3}, {"write_s": None}, [1]])
def test_invalid_data_of_a_tier_is_refused(data: object) -> None:
    with pytest.raises(ArgumentError):
        Tier.from_dict(data)


def test_states_of_one_size_take_seconds() -> None:
    """A tier by its rates and one by seconds per state are the same to steps that are alike."""
    rates = Tier.of_rates(100.0, 50.0, 0.5, capacity_bytes=950)
    seconds = Tier("slow", 1.5, 2.5, capacity_states=9)
    made = [
        plan(Costs(1.0, 2.0, state_bytes=100, tiers=(tier,)), "5 slots", 40)
        for tier in (rates, seconds)
    ]
    assert made[0] == made[1]
    assert made[0].simulate(tiers=rates.slower(2.0)).makespan_s > made[0].makespan_s


def test_a_shared_channel_is_not_planned_as_two() -> None:
    shared = Tier("disk", 1.0, 1.0, shared=True)
    with pytest.raises(ArgumentError, match="tier 'disk' is one channel for both"):
        plan(Costs(1.0, 2.0, tiers=(shared,)), "5 slots", 40)


def test_a_read_waits_for_a_write_on_a_shared_channel() -> None:
    there = [Put(0), Advance(0, 1), Await(0), Put(1), Get(0), Tape(1), EndForward(), Reverse(1)]
    back = [Await(1), Await(2), Load(0), Reverse(0), Free(0), Drop(0), Drop(1)]
    runs = [
        simulate([*there, *back], 2, Costs(1.0, 2.0, tiers=(Tier("disk", 9.0, 9.0, shared=both),)))
        for both in (False, True)
    ]
    assert [run.makespan_s for run in runs] == [20.0, 29.0]


def test_a_capacity_in_states_is_refused_where_sizes_differ() -> None:
    costs, few = StageCosts.uniform(3, Stage("a", 1.0, 2.0, 10, 30), 10), Tier(capacity_states=3)
    with pytest.raises(ArgumentError, match="give capacity_bytes"):
        plan_chain(costs, 0.7, tiers=few)
    schedule = [Tape(0), Tape(1), Tape(2), EndForward(), Reverse(2), Reverse(1), Reverse(0)]
    with pytest.raises(ArgumentError, match="give capacity_bytes"):
        simulate(schedule, 3, costs, tiers=[few])


def test_a_plan_of_several_tiers_or_none_has_not_one_to_replace() -> None:
    made = plan(Costs(1.0, 2.0), "5 slots", 20)
    with pytest.raises(ArgumentError, match="no tier to replace"):
        made.simulate(tiers="write=1GB/s")


@pytest.mark.parametrize("factor", [0, -1, float("nan"), float("inf"), "2", True])
def test_a_tier_is_slower_by_a_factor_above_0(factor: object) -> None:
    with pytest.raises(ArgumentError):
        Tier.of_rates(100.0, 50.0, latency_s=0.5).slower(factor)


def test_a_tier_of_states_alone_is_sent_no_tapes() -> None:
    costs = StageCosts.uniform(12, Stage("layer", 1.0, 2.0, 10, 30), 10)
    made = plan_chain(costs, 0.3, tiers="write=20B/s")
    first = next(k for k, a in enumerate(made.actions) if isinstance(a, Put) and a.tape)
    with pytest.raises(ScheduleError, match=f"action {first}: Put.* takes states alone"):
        made.simulate(tiers="write=20B/s,states-only")
    data = made.to_dict()
    data["tiers"][0]["tapes"] = False
    with pytest.raises(ScheduleError, match=f"action {first}: Put.* takes states alone"):
        Plan.from_dict(data)
    states = plan_chain(costs, 0.3, tiers="write=20B/s,states-only")
    assert states.writes and states.simulate().makespan_s == states.makespan_s
