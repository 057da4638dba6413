"""Timelines as pictures: what ran when, and the memory it took."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import ArgumentError
from .timeline import Lane, Span, Timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLORS = {
    "forward": "#4c72b0",
    "reverse": "#dd8452",
    "stall": "#c44e52",
    "write": "#55a868",
    "read": "#8172b3",
}
MEMORY_COLOR = "#64748b"
_LANES: tuple[Lane, ...] = ("compute", "write", "read")


def draw(timeline: Timeline, path: str | Path | None = None, title: str = "") -> Figure:
    """Draw lanes of compute, writes and reads above memory over time.

    Parameters
    ----------
    timeline : Timeline
        Of a run or of a simulation.
    path : str or Path, optional
        Where to save it; the suffix chooses the format.
    title : str

    Returns
    -------
    matplotlib Figure

    Raises
    ------
    ArgumentError
        If matplotlib is not installed or does not know the suffix.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError as error:
        raise ArgumentError(
            "pictures need matplotlib; pip install 'multistage-checkpointing[report]'"
        ) from error

    curves = [curve for curve in timeline.memory if timeline.peak(curve)] or ["fast"]
    figure = Figure(figsize=(11, 3.6 + 1.4 * len(curves)), layout="constrained")
    if path is not None:
        suffix, known = Path(path).suffix[1:].lower(), figure.canvas.get_supported_filetypes()
        if suffix and suffix not in known:
            raise ArgumentError(
                f"picture {str(path)!r} ends in .{suffix}; use one of {', '.join(sorted(known))}"
            )
    end_s = max(timeline.end_s, 1e-12)
    scale, unit = next(
        (s, u) for s, u in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"), (0.0, "")) if end_s >= s
    )
    scale, unit = (scale, unit) if scale else (1e-9, "ns")
    grid = figure.add_gridspec(1 + len(curves), 1, height_ratios=[3, *[1.4] * len(curves)])
    top = figure.add_subplot(grid[0])
    # A panel each: fast memory would not be seen beside a tier's.
    panels = [figure.add_subplot(grid[1 + k], sharex=top) for k in range(len(curves))]

    shown = []
    for row, lane in enumerate(_LANES):
        for kind, color in COLORS.items():
            spans = [span for span in timeline.lanes[lane] if span.kind == kind]
            if spans:
                shown.append((kind, color))
                bars = _bars(spans, end_s, scale)
                top.broken_barh(bars, (-row - 0.4, 0.8), facecolors=color, linewidth=0)
    top.set_yticks([-row for row in range(len(_LANES))], _LANES)
    top.set_ylim(-len(_LANES) + 0.4, 0.6)
    top.tick_params(axis="x", labelbottom=False)
    top.legend(
        handles=[Patch(color=color, label=kind) for kind, color in dict(shown).items()],
        loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
        frameon=False,
    )
    if title:
        top.set_title(title, loc="left")

    for axes, curve in zip(panels, curves, strict=True):
        _draw_memory(axes, timeline, curve, end_s, scale)
        axes.tick_params(axis="x", labelbottom=axes is panels[-1])
    panels[-1].set_xlabel(f"time ({unit})")
    for axes in (top, *panels):
        axes.set_xlim(0, end_s / scale)
        if 0 < timeline.end_forward_s < end_s:
            axes.axvline(timeline.end_forward_s / scale, color="black", linewidth=0.8, ls="--")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    if 0 < timeline.end_forward_s < end_s:
        top.annotate(
            "end of forward",
            (timeline.end_forward_s / scale, 0.58),
            xytext=(4, -2),
            textcoords="offset points",
            fontsize=8,
            va="top",
            color="black",
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1},
        )
    if path is not None:
        figure.savefig(path, dpi=130)
    return figure


def _draw_memory(axes: Any, timeline: Timeline, curve: str, end_s: float, scale: float) -> None:
    samples, most = timeline.memory.get(curve, []), timeline.peak(curve)
    size, unit = next(
        (s, u)
        for s, u in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "bytes"))
        if most >= s or s == 1
    )
    if samples:
        times = [t / scale for t, _ in samples] + [end_s / scale]
        values = [v / size for _, v in samples] + [samples[-1][1] / size]
        axes.fill_between(times, values, step="post", color=MEMORY_COLOR, alpha=0.25, linewidth=0)
        axes.plot(times, values, drawstyle="steps-post", label=curve, color=MEMORY_COLOR, lw=1.2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(f"{curve} ({unit})")
    axes.grid(alpha=0.25)


def _bars(spans: list[Span], end_s: float, scale: float) -> list[tuple[float, Any]]:
    """Return (start, width) of bars; those closer than a pixel become one.

    A merged span is as wide as the work in it, so that idle channels look idle.
    """
    pixel = end_s / 1100
    bars: list[list[float]] = []
    for span in spans:
        width = min(span.stop_s - span.start_s, span.busy_s)
        if bars and span.start_s - (bars[-1][0] + bars[-1][1]) < pixel / 4:
            bars[-1][1] = max(bars[-1][1], span.start_s + width - bars[-1][0])
        else:
            bars.append([span.start_s, width])
    return [(start / scale, max(width, pixel) / scale) for start, width in bars]
