"""Pictures: what they show is what was simulated or run, to the last number."""

from __future__ import annotations

import builtins
import itertools
import math
import re
import struct
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from benchmarks._published import paper_interval
from multistage import Costs, Stage, StageCosts, Tier, memory_curve, plan, plan_chain, simulate
from multistage.actions import Advance, Await, Drop, EndForward, Free, Get, Load, Put, Reverse, Tape
from multistage.errors import ArgumentError, BudgetError
from multistage.planners import PLANNERS
from multistage.planners.pages import MOST_STEPS, course_of, plan_chart, schedule_chart
from multistage.planners.ranking import trade_off
from multistage.view import save_chart
from multistage.view.chart import (
    COLORS,
    Area,
    Bars,
    Chart,
    Line,
    Panel,
    Point,
    Strokes,
    apart,
    ticks,
)
from multistage.view.svg import to_svg
from multistage.view.timeline import timeline_chart

SSD = Tier("SSD", 4e-3, 4e-3, write_overhead_s=1e-4, read_overhead_s=3e-4)
SLOW = Tier("SSD", 12e-3, 30e-3)
COSTS = Costs(1e-3, 2e-3, state_bytes=1 << 20, tiers=(SSD,), action_s=1e-6)
CHAIN = StageCosts(
    tuple(
        Stage(f"layer {i}", 1e-3 * (1 + i % 3), 2e-3, (10 + i % 4) << 20, (30 + 9 * (i % 5)) << 20)
        for i in range(16)
    ),
    10 << 20,
)


def close(found: Any, expected: Any) -> bool:
    """Whether two lists of points or segments are the same but for rounding."""
    return len(found) == len(expected) and np.allclose(found, expected, rtol=1e-12)


def stalling() -> tuple[Any, Any]:
    made = paper_interval(Costs(1e-3, 2e-3, state_bytes=1 << 20, tiers=(SLOW,)), 6, 60)
    return made, simulate(made.schedule(), 60, made.costs, 6)


# ------------------------------------------------------------------- timelines


def test_lanes_are_the_timelines() -> None:
    """Every span is there, in its place, with the time of its kind."""
    made, run = stalling()
    chart = timeline_chart(run.timeline, "title", {"fast": 6 << 20})
    lanes, fast, ssd = chart.panels
    assert (chart.label, chart.high) == ("time (ms)", 1e3 * run.makespan_s)
    for lane, kind in (("compute", "forward"), ("compute", "reverse"), ("compute", "stall"),
                       ("write", "write"), ("read", "read")):  # fmt: skip
        (bars,) = (m for m in lanes.marks if isinstance(m, Bars) and m.label == f"{lane}: {kind}")
        assert bars.color == kind
        spans = [s for s in run.timeline.lanes[lane] if s.kind == kind]
        assert sum(width for _, width in bars.boxes) == pytest.approx(
            1e3 * run.timeline.totals_s[kind]
        )
        assert bars.boxes[0][0] == pytest.approx(1e3 * spans[0].start_s)
        assert sum(bars.boxes[-1]) == pytest.approx(1e3 * spans[-1].stop_s)
    (marks,) = (m for m in lanes.marks if isinstance(m, Bars) and m.label == "stalls")
    assert sum(width for _, width in marks.boxes) == pytest.approx(1e3 * run.stall_s)
    assert run.stall_s > 0
    for panel, curve in ((fast, "fast"), (ssd, "SSD")):
        line = panel.marks[0]
        assert isinstance(line, Line) and line.step
        expected = [(1e3 * t, v / 2**20) for t, v in run.timeline.memory[curve]]
        assert close(line.points[:-1], expected)
    assert fast.marks[1].points[0][1] == 6.0  # the limit
    assert fast.note == "peak 6.00 MiB of 6.00 MiB"
    assert made.peak_slots == 6


def test_a_stall_in_a_put_is_seen_too() -> None:
    """The second Put waits from 1 to 9 for the first one's write; the Await from 9 to 18."""
    costs = Costs(1.0, 2.0, tiers=(Tier("disk", 9.0, 0.5, queue_depth=1),))
    actions = [Put(0), Advance(0, 1), Put(1), Advance(1, 2), EndForward(), Await(0), Await(1)]
    for i in (1, 0):
        actions += [Get(i), Await(3 - i), Load(i), Reverse(i), Free(i), Drop(i)]
    run = simulate(actions, 2, costs, 3)
    spans = [(s.start_s, s.stop_s) for s in run.timeline.lanes["compute"] if s.kind == "stall"]
    assert spans[:2] == [(1.0, 9.0), (10.0, 18.0)]
    assert run.stall_s == run.timeline.totals_s["stall"] == 17.0
    made = replace(plan(costs, "3 slots", 2), make=lambda: (action for action in actions))
    course, _ = course_of(made)
    assert [(line[0], line[2]) for line in course.stalls[:2]] == [(1.0, 9.0), (10.0, 18.0)]


# ------------------------------------------------------------------- schedules


@pytest.mark.parametrize("taped", [False, True])
@pytest.mark.parametrize("tier", [None, SSD, SLOW], ids=["none", "ssd", "slow"])
@pytest.mark.parametrize("planner", PLANNERS)
def test_strokes_are_the_simulations(planner: str, tier: Tier | None, taped: bool) -> None:
    """Steps, seconds and stalls of the strokes are those of the simulation; nothing stays held."""
    tiers = () if tier is None else (tier,)
    costs = Costs(1e-3, 2e-3, 1.2e-3 if taped else None, 10, 20, tiers, action_s=1e-6)
    try:
        made = PLANNERS[planner](costs, 60, 120)
    except BudgetError:
        made = PLANNERS[planner](costs, 300, 120)
    course, run = course_of(made)
    assert sum(b - a for _, a, _, b in course.forward) == run.forward_steps
    assert [(a, b) for _, a, _, b in course.reverse] == [(i + 1, i) for i in range(119, -1, -1)]
    stalls_s = sum(stop - start for start, _, stop, _ in course.stalls)
    assert math.isclose(stalls_s, run.stall_s, abs_tol=1e-9)
    assert all(stop > start for start, _, stop, _ in course.stalls)
    assert course.end_s == run.makespan_s
    assert not course._held
    # At no time more lines than slots.
    edges = sorted((t, k) for line in course.fast for t, k in ((line[0], 1), (line[2], -1)))
    held = itertools.accumulate(k for _, k in edges)
    assert max(held, default=0) <= made.slots
    assert len([line for lines in course.tiers.values() for line in lines]) == run.writes


def test_a_schedule_too_long_is_an_error(tmp_path: Path) -> None:
    made = plan(Costs(1.0, 2.0), "50 slots", MOST_STEPS + 1, "revolve")
    with pytest.raises(ArgumentError, match=f"{MOST_STEPS + 1} steps is too long to draw"):
        made.picture(tmp_path / "long.svg")
    with pytest.raises(ArgumentError, match="picture of 'speed' is not known"):
        made.picture(tmp_path / "x.svg", "speed")
    made.save(tmp_path / "long.html")  # its tables alone
    assert "are not drawn" in (tmp_path / "long.html").read_text()


def test_a_chain_and_its_memory() -> None:
    made = plan_chain(CHAIN, 0.4)
    chart = schedule_chart(made)
    stages, memory = chart.panels
    assert chart.high == pytest.approx(1e3 * made.makespan_s)
    line = memory.marks[0]
    assert isinstance(line, Line)
    assert max(y for _, y in line.points) * 2**20 == pytest.approx(made.peak_bytes)
    found = {mark.label: mark for mark in stages.marks if isinstance(mark, Strokes)}
    turned = 16 - sum(isinstance(action, Tape) for action in made.actions)  # in one stroke
    assert sum(b - a for _, a, _, b in found["forward"].segments) == made.forward_steps - turned
    assert len(found["adjoint"].segments) == 16


# ------------------------------------------------------------------- trade-offs


def test_fast_memory_is_drawn_by_its_contents() -> None:
    """Tapes, states and what travels, one above the other, within the whole and its limit."""
    made = plan_chain(CHAIN, 0.4, tiers="write=4GB/s,read=4GB/s,name=disk")
    assert any("to tier" in fate for fate in made.fates())
    run = made.simulate()
    chart = plan_chart(made, "timeline")
    lanes, fast, disk = chart.panels
    layers = [mark for mark in fast.marks if isinstance(mark, Area)]
    assert [layer.label for layer in layers] == [
        "tapes",
        "states",
        "going to or coming from a tier",
    ]
    whole, limit = (mark for mark in fast.marks if isinstance(mark, Line))
    size = 2**20
    assert max(y for _, y in whole.points) * size == pytest.approx(made.peak_bytes)
    assert limit.points[0][1] * size == pytest.approx(made.memory_bytes)
    for below, above in itertools.pairwise(layers):
        assert [(x, high) for x, _, high in below.points] == [
            (x, low) for x, low, _ in above.points
        ]
    ends = dict(whole.points)
    for x, _, high in layers[-1].points:
        assert high <= ends[x] + 1e-9
    moved = [high - low for _, low, high in layers[-1].points]
    assert max(moved) > 0 and moved[-1] == 0
    boxes = [mark for mark in lanes.marks if isinstance(mark, Bars) and mark.color == "write"]
    assert sum(width for box in boxes for _, width in box.boxes) == pytest.approx(
        1e3 * run.timeline.totals_s["write"]
    )
    assert disk.label.startswith("disk")
    assert ("tier", "going to or coming from a tier") in chart.legend
    course = schedule_chart(made)
    (strokes,) = (m for m in course.panels[0].marks if m.label == "kept in disk")
    assert len(strokes.segments) == run.writes
    text = to_svg(chart, alone=True)
    ElementTree.fromstring(text)
    assert text.count('fill-opacity=".8"') == 3


def test_the_trade_off_is_the_planners() -> None:
    made = plan(COSTS, "20 slots", 120)
    chart = plan_chart(made, "trade-off")
    (times,) = chart.panels
    lines = {mark.label: mark for mark in times.marks if isinstance(mark, Line)}
    plans = trade_off(COSTS, 120, ["streaming"], also=20)["streaming"]
    assert set(lines) > {"streaming", "revolve", "reference"}
    drawn = dict(lines["streaming"].points)
    for each in plans:
        if each.makespan_s <= 4 * min(p.makespan_s for p in plans):
            assert drawn[each.slots] == pytest.approx(each.makespan_s)  # of a MiB each
    assert dict(lines["reference"].points)[20] == pytest.approx(made.lower_bound_s)
    (point,) = (mark for mark in times.marks if isinstance(mark, Point))
    assert (point.x, point.y) == (20, pytest.approx(made.makespan_s))


def test_the_trade_off_of_a_chain_is_its_curve() -> None:
    made = plan_chain(CHAIN, 0.4)
    (times,) = plan_chart(made, "trade-off").panels
    lines = {mark.label: mark for mark in times.marks if isinstance(mark, Line)}
    expected = [(nbytes / 2**20, 1e3 * seconds) for nbytes, seconds in memory_curve(CHAIN)]
    assert close(lines["optimal"].points[:-1], expected)
    plain = [y for _, y in lines["reference"].points]
    assert plain == pytest.approx([1e3 * made.plain_s] * 2)


# ------------------------------------------------------------------- the drawing


def every_chart() -> dict[str, Chart]:
    made, run = stalling()
    chained = plan_chain(CHAIN, 0.4)
    return {
        "timeline": timeline_chart(run.timeline, "t", {"fast": 6 << 20}),
        "schedule": plan_chart(made, "schedule"),
        "trade-off": plan_chart(made, "trade-off"),
        "chain": schedule_chart(chained),
        "chain trade-off": plan_chart(chained, "trade-off"),
    }


def test_every_mark_is_drawn_within_the_picture() -> None:
    """As many shapes of each color as the marks have, all words, and no place outside."""
    for name, chart in every_chart().items():
        root = ElementTree.fromstring(to_svg(chart, alone=True))
        shapes = [
            element for element in root.iter() if "d" in element.attrib or "r" in element.attrib
        ]
        drawn = Counter(shape.get("stroke") or shape.get("fill") for shape in shapes)
        drawn += Counter(shape.get("fill") for shape in shapes if shape.get("stroke"))
        expected: Counter[str] = Counter()
        for mark in (mark for panel in chart.panels for mark in panel.marks):
            expected[COLORS[mark.color]] += 1
            if isinstance(mark, Line):
                expected[COLORS[mark.color]] += mark.fill + mark.dots
        assert {color: drawn[color] for color in expected} == expected, name
        words = {element.text for element in root.iter() if element.tag.endswith("text")}
        assert {text for _, text in (*chart.legend, *chart.rules)} <= words, name
        assert {chart.title, chart.label, *(panel.note for panel in chart.panels)} - {""} <= words
        for x in re.findall(r"[ML](-?[\d.]+) -?[\d.]+", to_svg(chart)):
            assert -1 <= float(x) <= 861, name


def test_long_schedules_stay_small() -> None:
    made = plan(COSTS, "20 slots", 4_000, "streaming")
    assert len(to_svg(plan_chart(made, "schedule"))) < 250_000
    assert apart([(0.1, 0.1, 1, 1), (0.2, 0.3, 1, 1), (3, 0, 4, 0)], 1, 1) == [
        (0.1, 0.1, 1, 1),
        (3, 0, 4, 0),
    ]


@pytest.mark.parametrize(("low", "high"), [(0, 0), (5, 5), (0, 1e-9), (0.3, 0.4), (1, 1e12)])
@pytest.mark.parametrize("log", [False, True])
def test_ticks_lie_within(low: float, high: float, log: bool) -> None:
    low = low or 1e-3 * log
    found = ticks(low, max(low, high), 6, log=log)
    slack = 1e-6 * max(low, high)
    assert found and all(low - slack <= x <= max(low, high) + slack for x in found)
    assert found == sorted(set(found))
    assert len(found) <= 15


def test_formats(tmp_path: Path) -> None:
    try:
        import cairosvg  # noqa: F401
    except (ImportError, OSError) as error:  # OSError: without the cairo library
        pytest.skip(f"needs CairoSVG: {error}")
    chart = Chart("$x_1$ <b>", (Panel((), "y", 0, 1),), "x", 0, 1)
    begins = {"svg": b"<svg", "png": b"\x89PNG", "PDF": b"%PDF", "ps": b"%!PS", "eps": b"%!PS"}
    for suffix, begin in begins.items():
        save_chart(chart, tmp_path / f"a.{suffix}")
        assert (tmp_path / f"a.{suffix}").read_bytes().startswith(begin)
    width, height = struct.unpack(">II", (tmp_path / "a.png").read_bytes()[16:24])
    assert (width, height) == (1320, 600)


@pytest.mark.parametrize("error", [ImportError("none"), OSError("no library called cairo")])
def test_without_cairo_there_is_svg(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    chart = Chart("", (Panel((), "y", 0, 1),), "x", 0, 1)
    real = builtins.__import__

    def missing(name: str, *rest: Any) -> Any:
        if name == "cairosvg":
            raise error
        assert not name.startswith(("matplotlib", "jinja2"))
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    save_chart(chart, tmp_path / "b.svg")
    with pytest.raises(ArgumentError, match=rf"{error}.*multistage-checkpointing\[report\]"):
        save_chart(chart, tmp_path / "b.png")
    for name in ("a.xyz", "a"):
        with pytest.raises(ArgumentError, match=r"use \.svg, or one of \.png, \.pdf"):
            save_chart(chart, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["b.svg"]
