"""Pages: well formed, self-contained, and safe whatever the labels say."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from markup import checked

from multistage import Costs, Reversal, Stage, StageCosts, Tier, plan, plan_chain, simulate
from multistage.cli import main
from multistage.errors import ArgumentError
from multistage.planners.pages import save_run
from multistage.report import Report
from multistage.schedule.timeline import Timeline
from multistage.view import page, svg

HOSTILE = "<script>alert(1)</script>\"'&<img src=x onerror=y>\x00\x1b\ud800 http://evil.example/"


def costs(name: str = "SSD") -> Costs:
    return Costs(1e-4, 2e-4, state_bytes=832, tiers=(Tier(name, 2e-5, 2e-5),))


def a_report(stop: int = -1) -> Report:
    def step(x: Any, i: int) -> Any:
        if i == stop:
            raise KeyboardInterrupt
        return np.sin(x)

    run: Reversal[Any, Any] = Reversal(
        step, lambda x, a, i: np.cos(x) * a, 60, memory="8 slots", tiers="memory:", costs=costs()
    )
    with run:
        try:
            run.forward(np.ones(100))
            run.reverse(np.ones(100))
        except KeyboardInterrupt:
            assert stop >= 0
        return run.report()


def test_a_report_as_a_page(tmp_path: Path) -> None:
    report = a_report()
    report.save(tmp_path / "r.html")
    text = (tmp_path / "r.html").read_text()
    found = checked(text)
    assert text.startswith("<!DOCTYPE html>")
    assert "default-src 'none'" in text and "prefers-color-scheme:dark" in text
    for rows in (report.rows(), report.cost_rows()):
        for what, predicted, measured in rows:
            assert {what, predicted, measured} - {""} <= set(found.words)
    for part in ("Timeline, measured", "Slow tiers", "What is kept where", "memory"):
        assert part in found.words
    assert text.count("<svg") == 4  # measured, schedule, predicted, trade-off
    report.save(tmp_path / "r.json")
    assert (tmp_path / "r.json").read_text() == report.to_json() + "\n"
    with pytest.raises(ArgumentError, match=r"ends in \.png; use \.html or \.json here"):
        report.save(tmp_path / "r.png")


def test_a_partial_report_begins_with_its_status(tmp_path: Path) -> None:
    report = a_report(stop=40)
    report.save(tmp_path / "r.html")
    words = "".join(checked((tmp_path / "r.html").read_text()).words)
    assert "Interrupted in the forward sweep: 40 of 60 steps run forward, 0 reversed." in words
    assert not report.complete and report.to_dict()["ended"] == report.ended


def test_a_plan_as_a_page(tmp_path: Path) -> None:
    made = plan(costs(), "8 slots", 90)
    made.save(tmp_path / "p.html")
    found = checked((tmp_path / "p.html").read_text())
    for candidate in made.candidates:
        assert candidate.planner in found.words
        assert str(candidate.row()["makespan"]) in found.words
    made.save(tmp_path / "p.json")
    assert json.loads((tmp_path / "p.json").read_text())["makespan_s"] == made.makespan_s
    run = simulate(made.schedule(), 90, made.costs, made.slots)
    save_run(made, run, tmp_path / "s.html")
    assert "Timeline, simulated" in checked((tmp_path / "s.html").read_text()).words


def test_a_chain_as_a_page(tmp_path: Path) -> None:
    made = plan_chain(StageCosts.uniform(12, Stage("layer", 1e-3, 2e-3, 10, 30), 10), 0.5)
    made.save(tmp_path / "c.html")
    text = (tmp_path / "c.html").read_text()
    words = checked(text).words
    assert [word for word in words if word in ("tape kept", "input kept", "recomputed")] == (
        made.fates()
    )
    assert text.count("<svg") == 3  # schedule, timeline, trade-off
    made.save(tmp_path / "c.json")
    assert json.loads((tmp_path / "c.json").read_text()) == made.to_dict()


def test_hostile_names_are_text() -> None:
    """Of tiers, stages, curves and notes: nothing they say is run or fetched."""
    made = plan(costs(HOSTILE), "8 slots", 40, "interval")
    chain = plan_chain(StageCosts((Stage(HOSTILE, 1.0, 2.0, 10, 30),) * 4, 10), 0.9)
    timeline = Timeline()
    timeline.add("compute", "forward", 0.0, 1.0)
    timeline.sample(HOSTILE, 0.0, 5.0)
    from multistage.planners.pages import plan_parts
    from multistage.view.timeline import timeline_chart

    for parts in (
        plan_parts(made),
        plan_parts(chain),
        [page.Picture(timeline_chart(timeline, HOSTILE)), page.Paragraph(HOSTILE, "soft")],
        [page.Cards([(HOSTILE,) * 3]), page.Table([HOSTILE], [[HOSTILE]]), page.Heading(HOSTILE)],
    ):
        text = page.document(HOSTILE, parts)
        found = checked(text)
        assert "<script" not in text and "<img" not in text
        assert any("<script>alert(1)</script>" in word for word in found.words)
    for html in (made._repr_html_(), chain._repr_html_()):
        checked(html)
        assert "<script" not in html
    from xml.etree import ElementTree

    ElementTree.fromstring(svg.to_svg(timeline_chart(timeline, HOSTILE), alone=True))


@pytest.mark.parametrize("steps", [10, 500, 501, 5_000])
def test_notebooks_get_something_light(steps: int) -> None:
    made = plan(costs(), "20 slots", steps)
    html = made._repr_html_()
    assert made.planner in checked(html).words
    assert len(html) < 100_000
    assert ("<svg" in html) == (steps <= 500)


def test_the_command_line_writes_pages(capsys: Any, tmp_path: Path) -> None:
    numbers = ["--forward-step=1ms", "--reverse-step=2ms", "--write=4ms", "--n-steps=60"]
    numbers.append("--memory=8 slots")
    page_, picture, curve = (tmp_path / name for name in ("p.html", "p.svg", "c.svg"))
    assert main(["plan", *numbers, f"--html={page_}", f"--picture={picture}"]) == 0
    out = capsys.readouterr().out
    assert f"written: {page_}" in out and "Chosen:" in out
    checked(page_.read_text())
    assert "kept in slow" in picture.read_text()
    assert main(["plan", *numbers, "--curve", f"--picture={curve}"]) == 0
    assert re.search("slots +planner", capsys.readouterr().out)
    assert "lower bound (dashed)" in curve.read_text()
    assert main(["plan", *numbers, "--curve", "--json", "--planner=revolve"]) == 0
    points = json.loads(capsys.readouterr().out)
    assert {point["planner"] for point in points} == {"revolve"}
    assert 8 in [point["slots"] for point in points]
    assert main(["simulate", *numbers, f"--html={page_}", "--jitter=lognormal:0.5"]) == 0
    assert "Timeline, simulated" in checked(page_.read_text()).words
    stages = tmp_path / "stages.json"
    StageCosts.uniform(12, Stage("layer", 1e-3, 2e-3, 10, 30), 10).save(stages)
    chain = ["plan", f"--chain={stages}", "--memory=0.5"]
    assert main([*chain, f"--html={page_}", f"--picture={picture}"]) == 0
    assert "Stages" in checked(page_.read_text()).words
    assert main([*chain, "--curve", f"--picture={curve}"]) == 0
    assert "nothing run twice" in curve.read_text()
