"""The streaming schedule's own books; `test_timed` and `test_actions` judge its schedules."""

from __future__ import annotations

import pytest

from multistage.model.costs import Costs
from multistage.model.tier import Tier
from multistage.planners.streaming.form import Form, timed
from multistage.planners.streaming.reserve import Reservation
from multistage.planners.streaming.streaming import streaming
from multistage.schedule.simulation import simulate


def slow_tier(read_s: float, read_overhead_s: float = 0.0) -> Costs:
    tier = Tier(write_s=20.0, read_s=read_s, read_overhead_s=read_overhead_s)
    return Costs(1.0, 1.0, tiers=(tier,))


@pytest.mark.parametrize("read_s", [5.0, 10.0, 20.0])
@pytest.mark.parametrize("slots", [2, 3, 5])
def test_an_interval_reversed_in_parts_takes_what_was_planned(slots: int, read_s: float) -> None:
    costs, n = slow_tier(read_s), 161
    sweep = Form(40.0, 1).sweep(costs, slots, n, Reservation(costs))
    run = simulate(sweep.schedule(n), n, costs, slots)
    assert run.makespan_s == pytest.approx(timed(sweep, costs, n).makespan_s, rel=1e-12)
    assert run.peak_slots <= slots
    # Five states are stored; with quick reads and few slots some are read twice.
    assert run.reads >= (8 if slots < 5 and read_s < 20 else 5)


def test_reading_again_pays_where_slots_are_few_and_reads_quick(monkeypatch) -> None:
    def makespan_s(costs: Costs) -> float:
        sweep = Form(40.0, 1).sweep(costs, 3, 161, Reservation(costs))
        return simulate(sweep.schedule(161), 161, costs, 3).makespan_s

    in_parts = makespan_s(slow_tier(10.0))
    monkeypatch.setattr(Reservation, "again", lambda self, length, free: 0)
    assert in_parts < 0.95 * makespan_s(slow_tier(10.0))


def test_intervals_in_parts_are_planned() -> None:
    """401 s before states were read again; no interval of 20 steps wants fewer than 3 slots."""
    plan = streaming(slow_tier(10.0), 3, 100)
    assert plan.makespan_s < 385
    assert plan.reads > plan.writes
