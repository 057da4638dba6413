"""One HTML page of a run: claims beside measurements, pictures, failures; no network.

Everything is in the file: style, pictures (as base64), a chart drawn as SVG.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Iterable, Mapping
from html import escape
from pathlib import Path
from typing import Any

from benchmarks.catalog import CATALOG, Entry
from benchmarks.claims import Judged, load, number
from benchmarks.docs import judged_of

STYLE = """
body{font:15px/1.5 system-ui,sans-serif;color:#1f2933;background:#fff;max-width:76rem;
margin:0 auto;padding:1.5rem}
h1{font-size:1.7rem;margin:0 0 .3rem}h2{font-size:1.25rem;margin:2.4rem 0 .4rem;
border-bottom:2px solid #dde3ea;padding-bottom:.2rem}h3{font-size:1.02rem;margin:1.6rem 0 .3rem}
p{margin:.3rem 0 .8rem}.quiet{color:#52606d;font-size:.9rem}
table{border-collapse:collapse;width:100%;font-size:.88rem;margin:.4rem 0 1rem}
th,td{text-align:left;vertical-align:top;padding:.32rem .6rem;border-bottom:1px solid #e4e9ef}
th{background:#f5f7fa;font-weight:600}td.n{text-align:right}
td.n,td.s{white-space:nowrap}table.narrow{width:auto}
.v{white-space:nowrap;font-weight:600;border-radius:.3rem;padding:.05rem .45rem}
.agrees,.done{background:#dff3e4;color:#14532d}.differs,.failed{background:#fde3e1;color:#8a1c13}
.none{background:#edf0f3;color:#52606d}
.tiles{display:flex;gap:1rem;flex-wrap:wrap;margin:1rem 0}
.tile{border:1px solid #dde3ea;border-radius:.5rem;padding:.5rem 1rem;min-width:8rem}
.tile b{display:block;font-size:1.5rem}
img,svg{max-width:100%;height:auto}pre{background:#f5f7fa;padding:.7rem;overflow:auto;
font-size:.78rem;max-height:22rem}
.wide{overflow-x:auto}.wide svg{min-width:46rem}
"""
SHORT = 16  # characters of a cell that are kept on one line


def page(data: Mapping[str, Any], folder: Path) -> str:
    """Return the page of a run; pictures are taken from `folder`."""
    claims, papers = judged_of(dict(data)), load()["papers"]
    parts = [
        "<h1>Two papers, reproduced</h1>",
        f"<p class='quiet'>{escape(_where(data))}</p>",
        tiles(
            [
                (sum(c.verdict == "agrees" for c in claims), "claims agree"),
                (sum(c.verdict == "differs" for c in claims), "differ, with the reason"),
                (sum(c.verdict == "not run" for c in claims), "not run here"),
                (sum(c.verdict == "no counterpart" for c in claims), "without a counterpart"),
            ]
        ),
        _failures(data),
    ]
    for key, paper in papers.items():
        mine = [claim for claim in claims if claim.claim["paper"] == key]
        names = {claim.claim["benchmark"] for claim in mine}
        parts += [
            f"<h2 id='{key}'>{escape(paper['title'])}</h2>",
            f"<p class='quiet'>{escape(paper['where'])}. Their machine: "
            f"{escape(paper['machine'])}.</p>",
            _chart(mine),
            _claims(mine),
        ]
        parts += [
            _benchmark(entry, data, folder)
            for entry in CATALOG
            if entry.items and entry.name in names
        ]
    parts.append("<h2>Benchmarks of ours</h2>")
    parts += [_benchmark(entry, data, folder) for entry in CATALOG if not entry.items]
    return document("Two papers, reproduced", "".join(parts))


def document(title: str, body: str) -> str:
    """Return a whole HTML page."""
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width,initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>{body}</body></html>\n"
    )


def tiles(values: Iterable[tuple[object, str]]) -> str:
    """Return numbers with what they count."""
    return "".join(
        [
            "<div class='tiles'>",
            *(f"<div class='tile'><b>{escape(str(v))}</b>{escape(t)}</div>" for v, t in values),
            "</div>",
        ]
    )


def table(head: Iterable[str], rows: Iterable[Iterable[object]], *, narrow: bool = False) -> str:
    """Return a table; cells are text, or `Raw`, and numbers stand to the right."""

    def cell(value: object) -> str:
        if isinstance(value, Raw):
            return f"<td>{value.html}</td>"
        if isinstance(value, int | float):
            return f"<td class='n'>{escape(number(value))}</td>"
        short = " class='s'" if len(str(value)) <= SHORT else ""
        return f"<td{short}>{escape(str(value))}</td>"

    lines = "".join(f"<tr>{''.join(map(cell, row))}</tr>" for row in rows)
    heads = "".join(f"<th>{escape(name)}</th>" for name in head)
    opened = "<table class='narrow'>" if narrow else "<table>"
    return (
        f"<div class='wide'>{opened}<thead><tr>{heads}</tr></thead><tbody>{lines}</tbody>"
        "</table></div>"
    )


class Raw:
    """A cell that is HTML already."""

    def __init__(self, html: str) -> None:
        self.html = html


def badge(verdict: str) -> Raw:
    """Return a verdict or status as a coloured word."""
    kind = verdict if verdict in ("agrees", "differs", "failed", "done") else "none"
    return Raw(f"<span class='v {kind}'>{escape(verdict)}</span>")


def picture(path: Path, what: str) -> str:
    """Return a PNG as part of the page; "" if there is none."""
    if not path.exists():
        return ""
    coded = base64.b64encode(path.read_bytes()).decode("ascii")
    return f"<img alt='{escape(what, quote=True)}' src='data:image/png;base64,{coded}'>"


def _where(data: Mapping[str, Any]) -> str:
    machine = data["machine"]
    load_text = ", ".join(map(str, data["load"])) or "not known"
    versions = ", ".join(f"{k} {v}" for k, v in machine["versions"].items())
    return (
        f"--{data['mode']} on {machine['processor']}, {machine['cores']} cores, "
        f"{machine['system']}; {versions}; load at the end {load_text}"
    )


def _failures(data: Mapping[str, Any]) -> str:
    failed = {k: v for k, v in data["benchmarks"].items() if v["status"] == "failed"}
    return "".join(
        f"<h3>{badge('failed').html} {escape(name)}: {escape(record.get('reason', ''))}</h3>"
        + (f"<pre>{escape(record['output'])}</pre>" if record.get("output") else "")
        for name, record in failed.items()
    )


def _claims(claims: list[Judged]) -> str:
    rows = []
    for judged in claims:
        claim = judged.claim
        published = judged.published_text
        if claim["source"] == "figure" and claim["published"] is not None:
            published += " (off the figure)"
        rows.append(
            (
                Raw(
                    f"{escape(claim['item'])}<br><span class='quiet'>{escape(claim['place'])}"
                    "</span>"
                ),
                claim["claim"],
                published,
                judged.measured_text,
                badge(judged.verdict),
                judged.note,
            )
        )
    head = ("where", "claim", "published", "measured here", "verdict", "how, and why it differs")
    return table(head, rows)


def _chart(claims: list[Judged]) -> str:
    """Return measured over published, one row a number, as SVG."""
    rows = [c for c in claims if c.measured and c.claim["published"]]
    if not rows:
        return ""
    low, high = -1.0, 1.0  # powers of two
    for judged in rows:
        at = _power(judged)
        low, high = max(-2.0, min(low, at - 0.2)), min(2.0, max(high, at + 0.2))
    left, width, line = 340, 520, 21

    def x(ratio: float) -> float:
        at = min(high, max(low, math.log2(ratio)))
        return left + width * (at - low) / (high - low)

    height = line * (len(rows) + 2)
    out = [
        f"<svg viewBox='0 0 {left + width + 190} {height}' role='img' "
        "aria-label='measured over published' font-family='system-ui,sans-serif' font-size='12'>"
    ]
    for power in range(math.ceil(low), math.floor(high) + 1):
        at = x(2.0**power)
        colour = "#1f2933" if power == 0 else "#dde3ea"
        out.append(
            f"<line x1='{at:.1f}' x2='{at:.1f}' y1='6' y2='{height - line}' stroke='{colour}'/>"
        )
        label = "as published" if power == 0 else f"{2.0**power:g} x"
        out.append(
            f"<text x='{at:.1f}' y='{height - 6}' text-anchor='middle' fill='#52606d'>{label}"
            "</text>"
        )
    for row, judged in enumerate(rows):
        y = line * (row + 0.75)
        claim = judged.claim
        colour = "#1b7f3b" if judged.verdict == "agrees" else "#c0281c"
        span = claim["test"].get("relative") or (
            claim["test"]["within"] / claim["published"] if "within" in claim["test"] else 0
        )
        if span:
            a, b = x(max(1 - span, 2.0**low)), x(1 + span)
            out.append(
                f"<rect x='{a:.1f}' y='{y - 6:.1f}' width='{b - a:.1f}' height='12' "
                "fill='#dff3e4'/>"
            )
        text = f"{claim['item']}: {_short(claim['claim'])}"
        out.append(f"<text x='0' y='{y + 4:.1f}' fill='#1f2933'>{escape(text)}</text>")
        mark = "circle" if judged.verdict == "agrees" else "cross"
        out.append(_mark(mark, x(2.0 ** _power(judged)), y, colour))
        shown = f"{judged.measured_text} / {judged.published_text}"
        out.append(
            f"<text x='{left + width + 8}' y='{y + 4:.1f}' fill='{colour}'>{escape(shown)}</text>"
        )
    out.append("</svg>")
    return (
        "<h3>Measured over published</h3><p class='quiet'>Every claim with a number; the band is "
        "what counts as agreement, a disc agrees, a cross differs; what lies beyond the edge "
        "stands at it.</p>" + "".join(out)
    )


def _power(judged: Judged) -> float:
    """Return measured over published as a power of two; one of another sign lies far below."""
    ratio = (judged.measured or 0.0) / judged.claim["published"]
    return math.log2(ratio) if ratio > 2.0**-20 else -20.0


def _mark(kind: str, x: float, y: float, colour: str) -> str:
    if kind == "circle":
        return f"<circle cx='{x:.1f}' cy='{y:.1f}' r='5' fill='{colour}'/>"
    return (
        f"<path d='M{x - 5:.1f} {y - 5:.1f}l10 10m0 -10l-10 10' stroke='{colour}' "
        "stroke-width='2.5'/>"
    )


def _short(text: str, most: int = 38) -> str:
    return text if len(text) <= most else text[: most - 1].rsplit(" ", 1)[0] + " …"


def _benchmark(entry: Entry, data: Mapping[str, Any], folder: Path) -> str:
    record = data["benchmarks"].get(entry.name, {"status": "not run"})
    took = f" in {record['seconds']:.0f} s" if "seconds" in record else ""
    load_text = f", load {record['load_before'][0]:g}" if record.get("load_before") else ""
    reason = f": {record['reason']}" if "reason" in record else ""
    items = f"; {entry.items}" if entry.items else ""
    parts = [
        f"<h3 id='{entry.name}'>{escape(entry.title)}</h3><p class='quiet'>"
        f"<code>python -m benchmarks.{entry.name}</code> {badge(record['status']).html}"
        f"{escape(took + load_text + reason + items)}</p>"
    ]
    if record["status"] == "done":
        parts.append(picture(folder / f"{entry.name}.png", entry.title))
        ratios = record["ratios"]
        parts.append("<details><summary>All ratios</summary>")
        parts.append(table(("ratio", "value"), ratios.items(), narrow=True))
        parts.append("</details>")
        parts += [f"<p class='quiet'>Left out: {escape(what)}.</p>" for what in record["left_out"]]
    return "".join(parts)
