"""Charts with matplotlib, for files of pixels and for print; the optional extra `report`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import ArgumentError
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

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DPI = 130  # of saved pictures
_POINTS = 72 / 90  # sizes are told in pixels of a page, 90 to the inch


def to_figure(chart: Chart) -> Figure:
    """Return the chart as a matplotlib Figure, known to no pyplot.

    Raises
    ------
    ArgumentError
        If matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ArgumentError(
            "pictures need matplotlib; pip install 'multistage-checkpointing[report]', "
            "or draw to .svg or .html, which need nothing"
        ) from error
    figure = Figure(figsize=(WIDTH / 90, chart.height / 90), layout="constrained")
    grid = figure.add_gridspec(
        len(chart.panels), 1, height_ratios=[panel.share for panel in chart.panels]
    )
    first: Any = None
    for k, panel in enumerate(chart.panels):
        axes = figure.add_subplot(grid[k], sharex=first)
        first = axes if first is None else first
        _draw(axes, chart, panel)
        axes.tick_params(axis="x", labelbottom=k == len(chart.panels) - 1)
    axes.set_xlabel(_plain(chart.label))
    for x, what in chart.rules:
        first.annotate(
            _plain(what), (x, 1.0), xycoords=("data", "axes fraction"), xytext=(4, 2),
            textcoords="offset points", fontsize=12 * _POINTS,
        )  # fmt: skip
    patches = [Patch(color=COLORS[color], label=_plain(text)) for color, text in chart.legend]
    if patches:
        # The title is the legend's: a layout that is constrained keeps them apart.
        figure.legend(
            handles=patches, loc="outside upper left", ncols=_columns(chart), frameon=False,
            fontsize=12 * _POINTS, handlelength=1, handleheight=1, columnspacing=1.2,
            title=_plain(chart.title), alignment="left",
            title_fontproperties={"size": 14 * _POINTS, "weight": "bold"},
        )  # fmt: skip
    elif chart.title:
        figure.suptitle(
            _plain(chart.title), x=0.01, ha="left", fontsize=14 * _POINTS, weight="bold"
        )
    return figure


def _plain(text: str) -> str:
    """Return text whose dollars are dollars, not mathematics, and that fonts can draw."""
    return "".join(c if c.isprintable() else " " for c in text).replace("$", r"\$")


def _columns(chart: Chart) -> int:
    """Return how many entries of the legend go into a line."""
    longest = max(len(text) for _, text in chart.legend)
    return max(1, min(len(chart.legend), int(WIDTH / (34 + 7 * longest))))


def _draw(axes: Any, chart: Chart, panel: Panel) -> None:
    if chart.log:
        axes.set_xscale("log")
    if panel.log:
        axes.set_yscale("log")
    axes.set_xlim(chart.low, chart.high)
    axes.set_ylim(panel.low, panel.high)
    for mark in panel.marks:
        _mark(axes, chart, panel, mark)
    if panel.rows:
        axes.set_yticks([y for y, _ in panel.rows], [text for _, text in panel.rows])
    else:
        heights = ticks(panel.low, panel.high, max(2, int(7 * panel.share)), log=panel.log)
        axes.set_yticks(heights, [number(value) for value in heights])
        axes.grid(alpha=0.25)
    along = ticks(chart.low, chart.high, 9, log=chart.log)
    axes.set_xticks(along, [number(value) for value in along])
    axes.minorticks_off()
    axes.tick_params(labelsize=12 * _POINTS)
    axes.set_ylabel(_plain(panel.label))
    if panel.note:
        axes.annotate(
            _plain(panel.note), (1, 1), xycoords="axes fraction", xytext=(-4, -4),
            ha="right", va="top", textcoords="offset points", fontsize=12 * _POINTS,
        )  # fmt: skip
    for x, _ in chart.rules:
        axes.axvline(x, color="black", linewidth=0.8, ls="--")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _mark(axes: Any, chart: Chart, panel: Panel, mark: Mark) -> None:
    from matplotlib.collections import LineCollection

    color = COLORS[mark.color]
    match mark:
        case Bars():
            pixel = (chart.high - chart.low) / WIDTH
            boxes = [(start, max(width, pixel)) for start, width in mark.boxes]
            where = (mark.low, mark.high - mark.low)
            axes.broken_barh(boxes, where, facecolors=color, linewidth=0, label=_plain(mark.label))
        case Line():
            x, y = [x for x, _ in mark.points], [y for _, y in mark.points]
            if mark.fill:
                step = "post" if mark.step else None
                axes.fill_between(x, y, step=step, color=color, alpha=0.22, linewidth=0)
            axes.plot(
                x, y, color=color, linewidth=1.3, label=_plain(mark.label),
                drawstyle="steps-post" if mark.step else "default",
                linestyle="--" if mark.dashed else "-",
                marker="o" if mark.dots else None, markersize=4,
            )  # fmt: skip
        case Area():
            x, low, high = (list(column) for column in zip(*mark.points, strict=True))
            axes.fill_between(
                x, low, high, step="post", color=color, alpha=0.8, linewidth=0,
                label=_plain(mark.label),
            )  # fmt: skip
        case Strokes():
            # Half pixels of the picture: what differs by less looks the same.
            cells = (chart.high - chart.low) / (2 * WIDTH), (panel.high - panel.low) / 1000
            lines = [((a, b), (c, d)) for a, b, c, d in apart(mark.segments, *cells)]
            axes.add_collection(
                LineCollection(lines, colors=color, linewidths=mark.width, label=_plain(mark.label))
            )
        case Point():
            axes.plot(
                [mark.x], [mark.y], "o", color=color, label=_plain(mark.label),
                markersize=10, markerfacecolor="none", markeredgewidth=2,
            )  # fmt: skip
