"""A chart as data: panels of marks above one horizontal axis.

What a picture shows is decided here; `svg` only draws it.  Values are in the units of the
axes' labels.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

# Middle tones, told apart without red against green (after Okabe & Ito 2008,
# jfly.uni-koeln.de/color) and 3:1 or more against white and against black, so
# that one picture serves light pages and dark ones.
COLORS = {
    "forward": "#3f7fc1",
    "reverse": "#d07a22",
    "stall": "#d23b68",
    "write": "#1f9468",
    "read": "#8a6fd1",
    "tape": "#b8862b",
    "fast": "#6b7d99",
    "tier": "#1592a6",
    "tier 2": "#a8664a",
    "rival": "#8d8d8d",
    "rival 2": "#4f9d9d",
    "rival 3": "#b0708f",
    "rival 4": "#7f9640",
    "rival 5": "#9a7b5f",
    "chosen": "#d23b68",
    "limit": "#d23b68",
    "band": "#b9c7d6",
}


@dataclass(frozen=True, slots=True)
class Bars:
    """Boxes (start, width) between two heights."""

    label: str
    color: str
    boxes: tuple[tuple[float, float], ...]
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Line:
    """A polyline through (x, y): stepped or straight, filled below, dashed, with dots."""

    label: str
    color: str
    points: tuple[tuple[float, float], ...]
    step: bool = False
    fill: bool = False
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Area:
    """The room between two stepped lines through (x, low) and (x, high)."""

    label: str
    color: str
    points: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, slots=True)
class Strokes:
    """Separate segments (x0, y0, x1, y1)."""

    label: str
    color: str
    segments: tuple[tuple[float, float, float, float], ...]
    width: float = 1.2


@dataclass(frozen=True, slots=True)
class Point:
    """One point that stands out."""

    label: str
    color: str
    x: float
    y: float


Mark = Bars | Line | Area | Strokes | Point


@dataclass(frozen=True, slots=True)
class Panel:
    """Marks above a part of the horizontal axis.

    Attributes
    ----------
    marks : tuple of Mark
        The first is drawn first.
    label : str
        Of the vertical axis.
    low, high : float
        Ends of the vertical axis, `low` at the bottom.
    rows : tuple of (height, text)
        Named heights in place of numbers.
    share : float
        Of the chart's height.
    log : bool
        Whether the vertical axis is logarithmic.
    note : str
        A few words in the upper right corner.
    """

    marks: tuple[Mark, ...]
    label: str
    low: float
    high: float
    rows: tuple[tuple[float, str], ...] = ()
    share: float = 1.0
    log: bool = False
    note: str = ""


@dataclass(frozen=True, slots=True)
class Chart:
    """Panels above one horizontal axis.

    Attributes
    ----------
    title : str
    panels : tuple of Panel
        From top to bottom.
    label : str
        Of the horizontal axis.
    low, high : float
        Its ends.
    log : bool
        Whether it is logarithmic.
    rules : tuple of (x, text)
        Dashed lines through all panels.
    legend : tuple of (color, text)
    height : float
        In pixels of a page, at a width of `WIDTH`.
    margin : float
        Pixels to the left of the panels, for the names of their rows.
    """

    title: str
    panels: tuple[Panel, ...]
    label: str
    low: float
    high: float
    log: bool = False
    rules: tuple[tuple[float, str], ...] = ()
    legend: tuple[tuple[str, str], ...] = ()
    height: float = 380.0
    margin: float = 84.0


WIDTH = 860.0


def time_unit(most_s: float) -> tuple[float, str]:
    """Return the seconds of a unit for times up to `most_s`, and its name.

    Examples
    --------
    >>> time_unit(0.25)
    (0.001, 'ms')
    """
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
    return next((unit for unit in units if most_s >= unit[0]), (1e-9, "ns"))


def byte_unit(most: float) -> tuple[float, str]:
    """Return the bytes of a unit for sizes up to `most`, and its name.

    Examples
    --------
    >>> byte_unit(5000)
    (1024, 'KiB')
    """
    units = ((2.0**40, "TiB"), (2.0**30, "GiB"), (2.0**20, "MiB"), (1024, "KiB"))
    return next((unit for unit in units if most >= unit[0]), (1, "bytes"))


def ticks(low: float, high: float, most: int, *, log: bool = False) -> list[float]:
    """Return at most about `most` round numbers from `low` to `high`.

    Examples
    --------
    >>> ticks(0, 1.1, 6)
    [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    >>> ticks(1, 200, 6, log=True)
    [1.0, 3.0, 10.0, 30.0, 100.0]
    """
    if log:
        return _log_ticks(low, high, most)
    if not high > low:
        return [low]
    rough = (high - low) / max(1, most)
    power = 10.0 ** math.floor(math.log10(rough))
    stride = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * (1 - 1e-9))
    first = math.ceil(low / stride - 1e-9)
    last = math.floor(high / stride + 1e-9)
    return [float(f"{k * stride:.12g}") for k in range(first, last + 1)]


def _log_ticks(low: float, high: float, most: int) -> list[float]:
    for leads in ((1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8), (1, 2, 3, 5, 7), (1, 2, 5), (1, 3), (1,)):
        found = [
            lead * 10.0**k
            for k in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            for lead in leads
            if low * (1 - 1e-9) <= lead * 10.0**k <= high * (1 + 1e-9)
        ]
        if len(found) <= most:
            break
    # Less than a decade may hold none of them.
    return found if len(found) > 1 else ticks(low, high, most)


def number(value: float) -> str:
    """Return a tick's number.

    Examples
    --------
    >>> number(0.25), number(20.0), number(10_000), number(2_000_000)
    ('0.25', '20', '10 000', '2e6')
    """
    if abs(value) >= 1e6:
        mantissa, power = f"{value:.3e}".split("e")
        return f"{float(mantissa):g}e{int(power)}"
    return f"{value:,.6g}".replace(",", " ")


def boxes_of(spans: Iterable[tuple[float, float]], pixel: float) -> tuple[tuple[float, float], ...]:
    """Return (start, width) of spans in order, those closer than a quarter of a pixel as one."""
    boxes: list[list[float]] = []
    for start, width in spans:
        if boxes and start - (boxes[-1][0] + boxes[-1][1]) < pixel / 4:
            boxes[-1][1] = max(boxes[-1][1], start + width - boxes[-1][0])
        else:
            boxes.append([start, width])
    return tuple((start, width) for start, width in boxes)


Segment = tuple[float, float, float, float]


def apart(segments: Sequence[Segment], x_cell: float, y_cell: float) -> list[Segment]:
    """Return the segments without those that look like another: same cells at both ends.

    A long schedule has more strokes than a picture has pixels.
    """
    seen: dict[tuple[int, int, int, int], Segment] = {}
    for segment in segments:
        x0, y0, x1, y1 = segment
        cells = (int(x0 / x_cell), int(y0 / y_cell), int(x1 / x_cell), int(y1 / y_cell))
        seen.setdefault(cells, segment)
    return list(seen.values())
