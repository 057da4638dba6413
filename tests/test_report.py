"""Reports, pictures and traces of a real run and of a simulation."""

from __future__ import annotations

import json
import math
import re
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from multistage import Costs, Plan, Reversal, Tier, plan, simulate
from multistage.errors import CheckpointWarning
from multistage.measurement.seen import seen_costs
from multistage.report import Report
from multistage.schedule.timeline import Timeline
from multistage.view import save_chart
from multistage.view.chrome_trace import trace_events, write_trace
from multistage.view.timeline import timeline_chart

COSTS = Costs(1e-4, 2e-4, state_bytes=832, tiers=(Tier("memory", 1e-5, 1e-5),))


def a_run(tiers: str, planner: str | Plan) -> Reversal[Any, Any]:
    return Reversal(
        lambda x, i: np.sin(x),
        lambda x, a, i: np.cos(x) * a,
        n_steps=60,
        memory="8 slots",
        tiers=tiers,
        planner=planner,
        costs=COSTS if isinstance(planner, str) else None,
    )


def swept(run: Reversal[Any, Any]) -> Report:
    run.forward(np.ones(100))
    run.reverse(np.ones(100))
    return run.report()


def a_report(tiers: str = "memory:", planner: str = "streaming") -> Report:
    with a_run(tiers, planner) as run:
        return swept(run)


def test_a_report_sets_measured_beside_predicted() -> None:
    report = a_report()
    text = str(report)
    for part in ("predicted", "measured", "makespan", "recompute factor", "assumed", "seen"):
        assert part in text
    assert report.n_steps == 60
    assert report.counts.forward_steps >= 60
    assert report.makespan_s > 0
    assert report.recompute_factor == report.counts.forward_steps / 60
    assert report.peak_fast_bytes <= 8 * 832
    counts = replace(report.counts, peak_slots=math.nextafter(7.0, 8.0))
    assert replace(report, counts=counts).peak_fast_bytes == 7 * 832  # a whole number of bytes
    data = json.loads(report.to_json())
    assert data["measured"]["makespan_s"] == report.makespan_s
    assert data["predicted"]["makespan_s"] == report.plan.makespan_s
    assert math.isfinite(report.prediction_error)


def test_a_report_counts_refused_states() -> None:
    """Counts of each sweep, by reason, and no byte over the capacity."""
    made = plan(COSTS, "8 slots", 60, "streaming")  # which sweeps do not correct
    with a_run("memory:20kB?buffers=0&queue=100", made) as run:
        for sweep in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", CheckpointWarning)
                report = swept(run)
            (use,) = report.tiers
            assert (use.name, use.capacity_bytes) == ("memory", 20_000)
            assert use.peak_stored_bytes == 16_384  # four extents of a page
            assert use.refused_full == report.counts.refused > 0, sweep
            assert (use.refused_busy, use.lost) == (0, 0)
            assert "refused: full" in str(report)
            assert json.loads(report.to_json())["tiers"][0]["refused_full"] == use.refused_full


def test_a_report_counts_moves_of_a_cascade() -> None:
    report = a_report("memory:16KiB?buffers=0 > memory:?buffers=0", "interval")
    assert re.search(r"memory>memory: [1-9]\d* states moved down, \d+ brought up", str(report))


def test_seen_costs_are_means_of_what_happened() -> None:
    report = a_report()
    timeline, counts = report.timeline, report.counts
    counts.forward_s, counts.forward_steps = 6.0, 60
    counts.reverse_s, counts.reverse_steps = 3.0, 60
    timeline.totals_s["write"], timeline.bytes["write"] = 2.0, 832 * 4
    timeline.totals_s["read"], timeline.bytes["read"] = 0.0, 0
    seen = seen_costs(report.plan.costs, timeline, counts)
    assert seen.forward_step_s == pytest.approx(0.1)
    assert seen.reverse_step_s == pytest.approx(0.05)
    assert seen.tiers[0].write_s == pytest.approx(0.5)
    assert seen.tiers[0].read_s == 1e-5  # nothing was read: as assumed


def test_costs_that_were_not_observed_are_not_shown() -> None:
    report = a_report()
    report.timeline.bytes.update(write=832, read=0)
    rows = {what: (assumed, seen) for what, assumed, seen in report.cost_rows()}
    assert rows["read of a state (T_R)"][1] == "-"
    assert rows["write of a state (T_W)"][1] != "-"


def test_a_trace_is_what_perfetto_expects(tmp_path) -> None:
    costs = Costs(1e-3, 2e-3, tiers=(Tier("file", 4e-3, 4e-3),))
    made = plan(costs, "8 slots", 50, planner="streaming")
    timeline = simulate(made.schedule(), 50, costs, 8).timeline
    write_trace(timeline, tmp_path / "t.json")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    names = {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {"multistage", "compute", "write", "read"}
    timed = [e for e in events if e["ph"] != "M"]
    assert [e["ts"] for e in timed] == sorted(e["ts"] for e in timed)
    spans = [e for e in timed if e["ph"] == "X"]
    assert all(e["dur"] >= 0 for e in spans)
    writes = sum(e["args"]["count"] for e in spans if e["name"] == "write")
    assert writes == made.writes
    assert {e["name"] for e in timed if e["ph"] == "C"} == {"fast memory", "file memory"}


def test_an_empty_timeline_is_no_error(tmp_path) -> None:
    assert trace_events(Timeline())["traceEvents"]
    save_chart(timeline_chart(Timeline()), tmp_path / "empty.svg")


def test_pictures_are_drawn(tmp_path) -> None:
    report = a_report()
    report.picture(tmp_path / "run.svg")
    report.trace(tmp_path / "run.json")
    text = (tmp_path / "run.svg").read_text()
    places = [text.index(f">{lane}<") for lane in ("compute", "write", "read", "fast (KiB)")]
    assert places == sorted(places) and f"{report.n_steps} steps" in text
