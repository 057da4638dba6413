"""One HTML page of a run: claims beside measurements, plots, failures; no network.

Everything is in the file: style, plots (as base64), a chart drawn as SVG.  The templates are
in `benchmarks/templates/` and extend those of `multistage.view`.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.catalog import CATALOG, Entry
from benchmarks.claims import Judged, load, number
from benchmarks.docs import judged_of
from multistage.view.chart import Bars, Chart, Mark, Panel, Point
from multistage.view.page import Picture, environment

TEMPLATES = Path(__file__).parent / "templates"


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell of a table: a verdict or status in color, a text, a note below it."""

    text: str = ""
    badge: str = ""
    note: str = ""


@dataclass(frozen=True, slots=True)
class Shown:
    """A benchmark as pages show it.

    Attributes
    ----------
    name, title, status : str
    more : str
        What stands beside the status.
    plot : str
        A PNG in base64, "" if there is none.
    ratios : list of (name, value)
    left_out : list of str
    output : str
        The end of what a benchmark that failed printed.
    """

    name: str
    title: str
    status: str
    more: str
    plot: str
    ratios: list[tuple[str, float]]
    left_out: list[str]
    output: str


def rendered(template: str, title: str, **values: object) -> str:
    """Return a page of one of the templates."""
    found = environment(TEMPLATES).get_template(template)
    return found.render(title=title, figure=number, **values)


def page(data: Mapping[str, Any], folder: Path) -> str:
    """Return the page of a run; plots are taken from `folder`."""
    claims, papers = judged_of(dict(data)), load()["papers"]
    verdicts = {
        "agrees": "claims agree",
        "differs": "differ, with the reason",
        "not run": "not run here",
        "no counterpart": "without a counterpart",
    }
    failed = {k: v for k, v in data["benchmarks"].items() if v["status"] == "failed"}
    return rendered(
        "run.html",
        "Two papers, reproduced",
        where=_where(data),
        counts=[
            (sum(claim.verdict == verdict for claim in claims), what)
            for verdict, what in verdicts.items()
        ],
        failures=[
            {"name": name, "reason": record.get("reason", ""), "output": record.get("output", "")}
            for name, record in failed.items()
        ],
        papers=[_paper(key, paper, claims, data, folder) for key, paper in papers.items()],
        benchmarks=[shown(entry, data, folder) for entry in CATALOG if not entry.items],
    )


def _paper(
    key: str,
    paper: Mapping[str, str],
    claims: Iterable[Judged],
    data: Mapping[str, Any],
    folder: Path,
) -> dict[str, object]:
    mine = [claim for claim in claims if claim.claim["paper"] == key]
    names = {claim.claim["benchmark"] for claim in mine}
    return {
        "key": key,
        "title": paper["title"],
        "where": paper["where"],
        "machine": paper["machine"],
        "chart": ratio_chart(mine),
        "claims": [_row(claim) for claim in mine],
        "benchmarks": [
            shown(entry, data, folder) for entry in CATALOG if entry.items and entry.name in names
        ],
    }


def plot_of(path: Path) -> str:
    """Return a PNG file in base64; "" if there is none."""
    return base64.b64encode(path.read_bytes()).decode("ascii") if path.exists() else ""


def _where(data: Mapping[str, Any]) -> str:
    machine = data["machine"]
    load_text = ", ".join(map(str, data["load"])) or "not known"
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    return (
        f"--{data['mode']} on {machine['processor']}, {machine['cores']} cores, "
        f"{machine['system']}; {versions}; load at the end {load_text}"
    )


def _row(judged: Judged) -> tuple[object, ...]:
    """Return the row of a claim."""
    claim = judged.claim
    published = judged.published_text
    if claim["source"] == "figure" and claim["published"] is not None:
        published += " (off the figure)"
    return (
        Cell(claim["item"], note=claim["place"]),
        claim["claim"],
        published,
        judged.measured_text,
        Cell(badge=judged.verdict),
        judged.note,
    )


def ratio_chart(claims: Iterable[Judged]) -> Picture | None:
    """Return measured over published, one row a number; None if there is none."""
    rows = [c for c in claims if c.measured and c.claim["published"]]
    if not rows:
        return None
    powers = [_power(judged) for judged in rows]
    # Powers of two; what lies beyond a factor of four stands at the edge.
    low = 2.0 ** max(-2.0, min(-1.0, min(powers) - 0.2))
    high = 2.0 ** min(2.0, max(1.0, max(powers) + 0.2))
    marks: list[Mark] = []
    names = []
    for row, (judged, power) in enumerate(zip(rows, powers, strict=True)):
        claim, y = judged.claim, -float(row)
        span = claim["test"].get("relative") or (
            claim["test"]["within"] / claim["published"] if "within" in claim["test"] else 0
        )
        if span:
            start, stop = max(1 - span, low), min(1 + span, high)
            marks.append(Bars("agreement", "band", ((start, stop - start),), y - 0.25, y + 0.25))
        color = "write" if judged.verdict == "agrees" else "stall"
        marks.append(Point(judged.verdict, color, min(high, max(low, 2.0**power)), y))
        figures = f"{judged.measured_text} / {judged.published_text}"
        what = _short(f"{claim['item']}: {claim['claim']}")
        names.append((y, f"{what}\n{figures}"))
    panel = Panel(tuple(marks), "", 0.5 - len(rows), 0.5, rows=tuple(names))
    return Picture(
        Chart(
            title="",
            panels=(panel,),
            label="measured over published",
            low=low,
            high=high,
            log=True,
            rules=((1.0, "as published"),),
            legend=(("write", "agrees"), ("stall", "differs"), ("band", "counts as agreement")),
            height=90.0 + 36.0 * len(rows),
            margin=360.0,
        )
    )


def _power(judged: Judged) -> float:
    """Return measured over published as a power of two; one of another sign lies far below."""
    ratio = (judged.measured or 0.0) / judged.claim["published"]
    return math.log2(ratio) if ratio > 2.0**-20 else -20.0


def _short(text: str, most: int = 50) -> str:
    return text if len(text) <= most else text[: most - 1].rsplit(" ", 1)[0] + " …"


def shown(entry: Entry, data: Mapping[str, Any], folder: Path) -> Shown:
    """Return what pages show of a benchmark."""
    record = data["benchmarks"].get(entry.name, {"status": "not run"})
    took = f" in {record['seconds']:.0f} s" if "seconds" in record else ""
    load_text = f", load {record['load_before'][0]:g}" if record.get("load_before") else ""
    reason = f": {record['reason']}" if "reason" in record else ""
    items = f"; {entry.items}" if entry.items else ""
    done = record["status"] == "done"
    return Shown(
        entry.name,
        entry.title,
        record["status"],
        took + load_text + reason + items,
        plot_of(folder / f"{entry.name}.png") if done else "",
        [*record["ratios"].items()] if done else [],
        [*record["left_out"]] if done else [],
        record.get("output", "") if record["status"] == "failed" else "",
    )
