"""Charts as SVG, written by hand: no dependency, sharp at every size, some 10 to 50 kB.

Text and axes take the color of the page around them (`currentColor`), so that
the same picture is read on light and on dark ground.  All text is escaped.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable

from .chart import (
    COLORS,
    WIDTH,
    Area,
    Bars,
    Chart,
    Line,
    Mark,
    Panel,
    Point,
    Strokes,
    apart,
    number,
    ticks,
)

_LEFT, _RIGHT, _FONT = 84.0, 14.0, 12.0
_GAP = 16.0
# What neither XML nor UTF-8 can hold.
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

Place = Callable[[float], float]


def escaped(text: object) -> str:
    """Return text that stands for itself in HTML, SVG and their attributes.

    Examples
    --------
    >>> escaped("<b> & 'q'")
    '&lt;b&gt; &amp; &#x27;q&#x27;'
    """
    return html.escape(_UNWRITABLE.sub("\ufffd", str(text)), quote=True)


def to_svg(chart: Chart, *, alone: bool = False) -> str:
    """Return the chart as one `<svg>` element.

    Parameters
    ----------
    alone : bool
        For a file of its own: with its namespace, on white ground.
    """
    lines = _legend_lines(chart)
    top = (24.0 if chart.title else 6.0) + 18.0 * len(lines) + (16.0 if chart.rules else 6.0)
    inner = chart.height - top - 40.0 - _GAP * (len(chart.panels) - 1)
    whole = sum(panel.share for panel in chart.panels)
    across = _scale(chart.low, chart.high, _LEFT, WIDTH - _RIGHT, log=chart.log)
    parts: list[str] = []
    if chart.title:
        parts.append(_text(0, 15, chart.title, size=14, weight=600))
    for row, line in enumerate(lines):
        parts += _legend(line, (24.0 if chart.title else 6.0) + 18.0 * row + 8)
    y = top
    for panel in chart.panels:
        height = inner * panel.share / whole
        parts += _panel(chart, panel, across, y, y + height, panel is chart.panels[-1])
        y += height + _GAP
    bottom = y - _GAP
    for x, what in chart.rules:
        at = across(x)
        parts.append(
            f'<path d="M{at:.1f} {top - 4:.1f}V{bottom:.1f}" stroke="currentColor" '
            'stroke-dasharray="4 3" fill="none"/>'
        )
        end = at > 0.7 * WIDTH
        parts.append(_text(at + (-4 if end else 4), top - 5, what, anchor="end" if end else ""))
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    parts.append(_text(middle, bottom + 34, chart.label, anchor="middle"))
    name = escaped(chart.title or "chart")
    head = f'<svg viewBox="0 0 {WIDTH:g} {chart.height:g}" role="img" aria-label="{name}"'
    head += f' font-family="system-ui, sans-serif" font-size="{_FONT:g}" fill="currentColor"'
    if alone:
        head += f' xmlns="http://www.w3.org/2000/svg" width="{WIDTH:g}" height="{chart.height:g}"'
        parts.insert(0, f'<rect width="{WIDTH:g}" height="{chart.height:g}" fill="white"/>')
    return "".join((head, ">", *parts, "</svg>"))


def _scale(low: float, high: float, start: float, stop: float, *, log: bool) -> Place:
    change: Place = math.log10 if log else float
    least, most = change(low), change(high)
    width = (most - least) or 1.0

    def place(value: float) -> float:
        value = max(value, low) if log else value
        return start + (change(value) - least) / width * (stop - start)

    return place


def _text(
    x: float, y: float, text: str, *, anchor: str = "", size: float = _FONT, weight: int = 400
) -> str:
    extra = f' text-anchor="{anchor}"' if anchor else ""
    extra += f' font-size="{size:g}"' if size != _FONT else ""
    extra += f' font-weight="{weight}"' if weight != 400 else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{extra}>{escaped(text)}</text>'


def _width(text: str) -> float:
    return 0.58 * _FONT * len(text)  # of the mean letter; exact only to a browser


def _legend_lines(chart: Chart) -> list[list[tuple[float, str, str]]]:
    """Return the legend's entries (x, color, text), line by line."""
    lines: list[list[tuple[float, str, str]]] = []
    x = math.inf
    for color, text in chart.legend:
        width = 18 + _width(text) + 16
        if x + width > WIDTH:
            lines.append([])
            x = 0.0
        lines[-1].append((x, color, text))
        x += width
    return lines


def _legend(entries: Iterable[tuple[float, str, str]], y: float) -> list[str]:
    return [
        f'<rect x="{x:.1f}" y="{y - 6:.1f}" width="12" height="12" rx="2" fill="{COLORS[color]}"/>'
        + _text(x + 17, y + 4, text)
        for x, color, text in entries
    ]


def _panel(
    chart: Chart, panel: Panel, across: Place, top: float, bottom: float, is_last: bool
) -> list[str]:
    up = _scale(panel.low, panel.high, bottom, top, log=panel.log)
    rows = panel.rows or tuple(
        (value, number(value))
        for value in ticks(panel.low, panel.high, max(2, int((bottom - top) / 34)), log=panel.log)
    )
    grid = "".join(f"M{_LEFT:g} {up(y):.1f}H{WIDTH - _RIGHT:g}" for y, _ in rows)
    along = [(across(x), x) for x in ticks(chart.low, chart.high, 9, log=chart.log)]
    grid += "".join(f"M{x:.1f} {top:.1f}V{bottom:.1f}" for x, _ in along)
    parts = []
    if not panel.rows:
        parts.append(f'<path d="{grid}" stroke="currentColor" stroke-opacity=".13" fill="none"/>')
    for mark in panel.marks:
        parts += _mark(mark, across, up)
    parts.append(
        f'<path d="M{_LEFT:g} {top:.1f}V{bottom:.1f}H{WIDTH - _RIGHT:g}" '
        'stroke="currentColor" stroke-opacity=".6" fill="none"/>'
    )
    for y, label in rows:
        for k, line in enumerate(lines := label.split("\n")):
            at = up(y) + 4 + 14 * (k - (len(lines) - 1) / 2)
            parts.append(_text(_LEFT - 6, at, line, anchor="end"))
    if panel.label:
        x, y = 12, (top + bottom) / 2
        parts.append(
            f'<text transform="translate({x} {y:.1f}) rotate(-90)" text-anchor="middle">'
            f"{escaped(panel.label)}</text>"
        )
    if panel.note:
        parts.append(_text(WIDTH - _RIGHT - 4, top + 13, panel.note, anchor="end"))
    if is_last:
        parts += [_text(x, bottom + 16, number(value), anchor="middle") for x, value in along]
    return parts


def _mark(mark: Mark, across: Place, up: Place) -> list[str]:
    color = COLORS[mark.color]
    match mark:
        case Bars():
            y, height = up(mark.high), up(mark.low) - up(mark.high)
            path = []
            for start, width in mark.boxes:
                x = across(start)
                # What is shorter than a pixel is seen all the same.
                wide = max(across(start + width) - x, 0.7)
                path.append(f"M{x:.1f} {y:.1f}h{wide:.1f}v{height:.1f}h{-wide:.1f}z")
            return [f'<path d="{"".join(path)}" fill="{color}"/>'] if path else []
        case Line():
            return _line(mark, color, across, up)
        case Area():
            return _area(mark, color, across, up)
        case Strokes():
            drawn = [(across(a), up(b), across(c), up(d)) for a, b, c, d in mark.segments]
            drawn = apart(drawn, 0.8, 0.8)
            path = [f"M{a:.1f} {b:.1f}L{c:.1f} {d:.1f}" for a, b, c, d in drawn]
            style = f'stroke="{color}" stroke-width="{mark.width:g}" fill="none"'
            return [f'<path d="{"".join(path)}" {style}/>'] if path else []
        case Point():
            x, y = across(mark.x), up(mark.y)
            ring = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="none" '
            return [ring + f'stroke="{color}" stroke-width="2.5"/>']


def _area(mark: Area, color: str, across: Place, up: Place) -> list[str]:
    if all(high == low for _, low, high in mark.points):
        return []
    there = _stepped([(across(x), up(high)) for x, _, high in mark.points])
    back = _stepped([(across(x), up(low)) for x, low, _ in mark.points])
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in [*there, *reversed(back)])
    return [f'<path d="M{path}z" fill="{color}" fill-opacity=".8"/>']


def _stepped(places: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners of a line that keeps its height until the next place."""
    corners = places[:1]
    for x, y in places[1:]:
        if f"{y:.1f}" != f"{corners[-1][1]:.1f}" or (x, y) == places[-1]:
            corners += [(x, corners[-1][1]), (x, y)]
    return corners


def _line(mark: Line, color: str, across: Place, up: Place) -> list[str]:
    if not mark.points:
        return []
    places = [(across(x), up(y)) for x, y in mark.points]
    x, y = places[0]
    path = [f"M{x:.1f} {y:.1f}"]
    for to_x, to_y in places[1:]:
        if mark.step:
            path.append(f"H{to_x:.1f}" + (f"V{to_y:.1f}" if f"{to_y:.1f}" != f"{y:.1f}" else ""))
        else:
            path.append(f"L{to_x:.1f} {to_y:.1f}")
        y = to_y
    line, parts = "".join(path), []
    if mark.fill:
        floor = up(0.0)
        area = f"{line}V{floor:.1f}H{x:.1f}z"
        parts.append(f'<path d="{area}" fill="{color}" fill-opacity=".22"/>')
    dash = ' stroke-dasharray="6 4"' if mark.dashed else ""
    parts.append(f'<path d="{line}" stroke="{color}" stroke-width="1.6"{dash} fill="none"/>')
    if mark.dots:
        dots = "".join(f"M{a:.1f} {b:.1f}h.01" for a, b in places)
        round_ = 'stroke-width="6" stroke-linecap="round"'
        parts.append(f'<path d="{dots}" stroke="{color}" {round_} fill="none"/>')
    return parts
