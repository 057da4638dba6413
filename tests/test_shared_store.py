"""`benchmarks.shared_store`: one rank that stands for many, beside as many single ones."""

from __future__ import annotations

from dataclasses import replace

import pytest

from benchmarks.shared_store import KINDS, Group, Kind, compared, makespan_s
from multistage import Costs, plan
from multistage.actions import Await, Get, Put
from multistage.model.tier import Tier
from multistage.planners import Plan
from multistage.planners.base import played


def made(write_s: float, read_s: float, slots: int = 4, n: int = 60) -> Plan:
    tier = Tier("shared", write_s, read_s, capacity_states=15)
    return plan(Costs(1.0, 2.0, tape_step_s=1.5, tiers=(tier,)), f"{slots} slots", n, "streaming")


@pytest.mark.parametrize("slower", [1.0, 3.0, 40.0])
@pytest.mark.parametrize("ranks", [1, 10_000])
def test_ranks_in_step_are_one_with_a_slower_tier(slower: float, ranks: int) -> None:
    found = made(1.5, 2.5)
    alone: dict[Kind, float] = {"write": 1.5, "read": 2.5}
    together: dict[Kind, float] = {kind: alone[kind] * slower / ranks for kind in KINDS}
    simulated = found.simulate(tiers=found.tiers[0].slower(slower))
    group = Group(found, ranks, times=2)
    assert makespan_s([group], alone, together) == pytest.approx(2 * simulated.makespan_s)
    assert group.moves / 2 == simulated.writes + simulated.reads > 4


@pytest.mark.parametrize("crowding", [1.0, 2.5, 6.0, 30.0])
def test_groups_are_as_many_single_ranks(crowding: float) -> None:
    """Of three plans, at three times, with other rates each way."""
    plans = made(1.5, 2.5), made(6.0, 4.0, 3), made(0.5, 0.5, 6, 90)
    starts, counts = (0.0, 17.3, 40.1), (3, 1, 2)
    alone: dict[Kind, float] = {"write": 1.0, "read": 1.5}
    together: dict[Kind, float] = {kind: alone[kind] * crowding / 6 for kind in KINDS}
    grouped = [Group(*each) for each in zip(plans, counts, starts, strict=True)]
    makespan_s(grouped, alone, together)
    single = [
        [Group(each, 1, start) for _ in range(count)]
        for each, count, start in zip(plans, counts, starts, strict=True)
    ]
    makespan_s([one for ones in single for one in ones], alone, together)
    for group, ones in zip(grouped, single, strict=True):
        assert [one.now for one in ones] == pytest.approx([group.now] * len(ones))
        assert {one.moves for one in ones} == {group.moves}


def test_transfers_in_flight_share_the_bandwidth() -> None:
    """By hand: two ranks write a state, the second from a second later on.

    The first moves a quarter of its state alone, and the rest in six seconds beside the second,
    which moves three quarters then and the last one alone.  A read each does not disturb a write.
    """
    write = replace(made(4.0, 4.0), make=lambda: played([Put(0), Await(0)]))
    again = replace(write, make=lambda: played([Put(0), Await(0), Get(0), Await(1)]))
    alone: dict[Kind, float] = dict.fromkeys(KINDS, 1.0)
    store: dict[Kind, float] = dict.fromkeys(KINDS, 4.0)
    groups = [Group(write), Group(write, now=1.0)]
    assert makespan_s(groups, alone, store) == 8.0
    assert [group.now for group in groups] == [7.0, 8.0]
    groups = [Group(again), Group(write, now=1.0)]
    assert makespan_s(groups, alone, store) == 11.0
    assert [group.now for group in groups] == [11.0, 8.0]


def test_a_coordinated_plan_of_many_ranks_is_faster() -> None:
    row = compared(2000, 10, 1.0, 128.0)
    assert row["gain"] >= 1.3
    assert row["alone"] < row["coordinated"] < row["revolve"]
    assert row["staggered"] < 0.95 * row["coordinated"]
