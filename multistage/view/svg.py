"""Charts as SVG, by the standard library's XML alone.

Text has the color of its surroundings (`currentColor`), so that one picture serves light
pages and dark ones.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from typing import NamedTuple
from xml.etree.ElementTree import Element, SubElement, tostring

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

_RIGHT, _FONT = 14.0, 12.0
_GAP = 16.0  # between panels
_EDGE = 10.0  # of white around a picture in a file of its own

# What neither XML nor UTF-8 can hold.
_UNWRITABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")

Place = Callable[[float], float]


def writable(text: str) -> str:
    r"""Return text with a replacement character for each that markup cannot hold.

    Examples
    --------
    >>> writable("a\x1bb")
    'a\ufffdb'
    """
    return _UNWRITABLE.sub("\ufffd", text)


class _Frame(NamedTuple):
    """Where a panel lies, in pixels, and where its values lie in it."""

    left: float
    right: float
    top: float
    bottom: float
    across: Place
    up: Place


def to_svg(chart: Chart, *, alone: bool = False) -> str:
    """Return the chart as one `<svg>` element.

    Parameters
    ----------
    alone : bool
        For a file of its own: with its namespace, on white ground, with a margin.
    """
    name = chart.title or "chart"
    root = Element(
        "svg",
        {
            "viewBox": f"0 0 {WIDTH:g} {chart.height:g}",
            "role": "img",
            "aria-label": writable(name),
            "font-family": "system-ui, sans-serif",
            "font-size": f"{_FONT:g}",
            "fill": "currentColor",
        },
    )
    if alone:
        size = {"width": f"{WIDTH + 2 * _EDGE:g}", "height": f"{chart.height + 2 * _EDGE:g}"}
        box = f"{-_EDGE:g} {-_EDGE:g} {size['width']} {size['height']}"
        root.attrib |= {"xmlns": "http://www.w3.org/2000/svg", **size, "viewBox": box}
        corner = {"x": f"{-_EDGE:g}", "y": f"{-_EDGE:g}"}
        SubElement(root, "rect", {**corner, **size, "fill": "white"})
    _draw(root, chart)
    return tostring(root, encoding="unicode")


def _draw(root: Element, chart: Chart) -> None:
    lines = _legend_lines(chart)
    start = 24.0 if chart.title else 6.0
    top = start + 18.0 * len(lines) + (16.0 if chart.rules else 6.0)
    inner = chart.height - top - 40.0 - _GAP * (len(chart.panels) - 1)
    whole = sum(panel.share for panel in chart.panels)
    left, right = chart.margin, WIDTH - _RIGHT
    across = _scale(chart.low, chart.high, left, right, log=chart.log)
    if chart.title:
        _text(root, 0, 15, chart.title, size=14, weight=600)
    for row, line in enumerate(lines):
        _legend(root, line, start + 18.0 * row + 8)
    y = top
    for panel in chart.panels:
        bottom = y + inner * panel.share / whole
        up = _scale(panel.low, panel.high, bottom, y, log=panel.log)
        _panel(root, chart, panel, _Frame(left, right, y, bottom, across, up))
        y = bottom + _GAP
    bottom = y - _GAP
    for x, value in _along(chart, across):
        _text(root, x, bottom + 16, number(value), anchor="middle")
    _rules(root, chart, across, top, bottom)
    _text(root, (left + right) / 2, bottom + 34, chart.label, anchor="middle")


def _along(chart: Chart, across: Place) -> list[tuple[float, float]]:
    """Return the ticks of the horizontal axis: place and value."""
    return [(across(x), x) for x in ticks(chart.low, chart.high, 9, log=chart.log)]


def _rules(root: Element, chart: Chart, across: Place, top: float, bottom: float) -> None:
    for x, what in chart.rules:
        at = across(x)
        _path(
            root,
            f"M{at:.1f} {top - 4:.1f}V{bottom:.1f}",
            {"stroke": "currentColor", "stroke-dasharray": "4 3"},
        )
        end = at > 0.7 * WIDTH
        _text(root, at + (-4 if end else 4), top - 5, what, anchor="end" if end else "")


def _scale(low: float, high: float, start: float, stop: float, *, log: bool) -> Place:
    change: Place = math.log10 if log else float
    least, most = change(low), change(high)
    width = (most - least) or 1.0

    def place(value: float) -> float:
        value = max(value, low) if log else value
        return start + (change(value) - least) / width * (stop - start)

    return place


def _text(
    root: Element,
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "",
    size: float = _FONT,
    weight: int = 400,
    turned: bool = False,
) -> None:
    place = {"x": f"{x:.1f}", "y": f"{y:.1f}"}
    if turned:
        place = {"transform": f"translate({x:g} {y:.1f}) rotate(-90)"}
    element = SubElement(root, "text", place)
    if anchor:
        element.set("text-anchor", anchor)
    if size != _FONT:
        element.set("font-size", f"{size:g}")
    if weight != 400:
        element.set("font-weight", f"{weight}")
    element.text = writable(text)


def _path(root: Element, path: str, style: dict[str, str]) -> None:
    SubElement(root, "path", {"d": path, "fill": "none", **style})


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


def _legend(root: Element, entries: Iterable[tuple[float, str, str]], y: float) -> None:
    for x, color, text in entries:
        place = {"x": f"{x:.1f}", "y": f"{y - 6:.1f}", "width": "12", "height": "12", "rx": "2"}
        SubElement(root, "rect", {**place, "fill": COLORS[color]})
        _text(root, x + 17, y + 4, text)


def _panel(root: Element, chart: Chart, panel: Panel, frame: _Frame) -> None:
    left, right, top, bottom, across, up = frame
    rows = panel.rows or tuple(
        (value, number(value))
        for value in ticks(
            min(panel.low, panel.high),
            max(panel.low, panel.high),
            max(2, int((bottom - top) / 34)),
            log=panel.log,
        )
    )
    if not panel.rows:
        grid = "".join(f"M{left:g} {up(y):.1f}H{right:g}" for y, _ in rows)
        grid += "".join(f"M{x:.1f} {top:.1f}V{bottom:.1f}" for x, _ in _along(chart, across))
        _path(root, grid, {"stroke": "currentColor", "stroke-opacity": ".13"})
    for mark in panel.marks:
        _mark(root, mark, frame)
    _path(
        root,
        f"M{left:g} {top:.1f}V{bottom:.1f}H{right:g}",
        {"stroke": "currentColor", "stroke-opacity": ".6"},
    )
    for y, label in rows:
        for k, line in enumerate(lines := label.split("\n")):
            at = up(y) + 4 + 14 * (k - (len(lines) - 1) / 2)
            _text(root, left - 6, at, line, anchor="end")
    if panel.label:
        _text(root, 12, (top + bottom) / 2, panel.label, anchor="middle", turned=True)
    if panel.note:
        _text(root, right - 4, top + 13, panel.note, anchor="end")


def _mark(root: Element, mark: Mark, frame: _Frame) -> None:
    across, up = frame.across, frame.up
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
            if path:
                _path(root, "".join(path), {"fill": color})
        case Line():
            _line(root, mark, color, across, up)
        case Area():
            _area(root, mark, color, across, up)
        case Strokes():
            drawn = [(across(a), up(b), across(c), up(d)) for a, b, c, d in mark.segments]
            path = [f"M{a:.1f} {b:.1f}L{c:.1f} {d:.1f}" for a, b, c, d in apart(drawn, 0.8, 0.8)]
            if path:
                style = {"stroke": color, "stroke-width": f"{mark.width:g}"}
                _path(root, "".join(path), style)
        case Point():
            place = {"cx": f"{across(mark.x):.1f}", "cy": f"{up(mark.y):.1f}", "r": "6"}
            style = {"fill": "none", "stroke": color, "stroke-width": "2.5"}
            SubElement(root, "circle", {**place, **style})


def _area(root: Element, mark: Area, color: str, across: Place, up: Place) -> None:
    if all(high == low for _, low, high in mark.points):
        return
    there = _stepped([(across(x), up(high)) for x, _, high in mark.points])
    back = _stepped([(across(x), up(low)) for x, low, _ in mark.points])
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in [*there, *reversed(back)])
    _path(root, f"M{path}z", {"fill": color, "fill-opacity": ".8"})


def _stepped(places: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the corners of a line that keeps its height until the next place."""
    corners = places[:1]
    for x, y in places[1:]:
        if f"{y:.1f}" != f"{corners[-1][1]:.1f}" or (x, y) == places[-1]:
            corners += [(x, corners[-1][1]), (x, y)]
    return corners


def _line(root: Element, mark: Line, color: str, across: Place, up: Place) -> None:
    if not mark.points:
        return
    places = [(across(x), up(y)) for x, y in mark.points]
    x, y = places[0]
    path = [f"M{x:.1f} {y:.1f}"]
    for to_x, to_y in places[1:]:
        if mark.step:
            path.append(f"H{to_x:.1f}" + (f"V{to_y:.1f}" if f"{to_y:.1f}" != f"{y:.1f}" else ""))
        else:
            path.append(f"L{to_x:.1f} {to_y:.1f}")
        y = to_y
    line = "".join(path)
    if mark.fill:
        area = f"{line}V{up(0.0):.1f}H{x:.1f}z"
        _path(root, area, {"fill": color, "fill-opacity": ".22"})
    dash = {"stroke-dasharray": "6 4"} if mark.dashed else {}
    _path(root, line, {"stroke": color, "stroke-width": "1.6", **dash})
    if mark.dots:
        dots = "".join(f"M{a:.1f} {b:.1f}h.01" for a, b in places)
        _path(root, dots, {"stroke": color, "stroke-width": "6", "stroke-linecap": "round"})
