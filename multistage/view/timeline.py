"""The timeline of a run: what ran when, and the memory it took."""

from __future__ import annotations

from collections.abc import Mapping

from ..schedule.timeline import Kind, Lane, Timeline
from ..support.units import format_bytes, format_seconds
from .chart import WIDTH, Area, Bars, Chart, Line, Mark, Panel, boxes_of, byte_unit, time_unit

_LANES: tuple[Lane, ...] = ("compute", "write", "read")
# What fills fast memory, from below, if it was recorded: curve, name, color.
PARTS = {
    "fast/tapes": ("tapes", "tape"),
    "fast/states": ("states", "fast"),
    "fast/in flight": ("going to or coming from a tier", "tier"),
}
_KINDS: tuple[Kind, ...] = ("forward", "reverse", "stall", "write", "read")


def timeline_chart(
    timeline: Timeline, title: str = "", limits: Mapping[str, float | None] | None = None
) -> Chart:
    """Return lanes of compute, writes and reads above the memory of each tier.

    Stalls stand in the compute lane, and again as marks above it: there the
    shortest is seen.

    Parameters
    ----------
    timeline : Timeline
        Of a run or of a simulation.
    limits : mapping of curve to bytes, optional
        What the tiers may hold.
    """
    end_s = max(timeline.end_s, 1e-12)
    unit_s, unit = time_unit(end_s)
    curves = [c for c in timeline.memory if timeline.peak(c) and c not in PARTS] or ["fast"]
    parts = [(color, what) for curve, (what, color) in PARTS.items() if timeline.peak(curve)]
    if parts:
        parts.append(("rival", "gradients and work"))
    rules: tuple[tuple[float, str], ...] = ()
    if 0 < timeline.end_forward_s < end_s:
        rules = ((timeline.end_forward_s / unit_s, "end of the forward sweep"),)
    return Chart(
        title=title,
        panels=(
            _lanes(timeline, end_s, unit_s),
            *(
                _memory(timeline, curve, end_s, unit_s, (limits or {}).get(curve))
                for curve in curves
            ),
        ),
        label=f"time ({unit})",
        low=0.0,
        high=end_s / unit_s,
        rules=rules,
        legend=tuple(
            (kind, f"{kind} {format_seconds(timeline.totals_s[kind])}")
            for kind in _KINDS
            if timeline.totals_s[kind] or timeline.counts[kind]
        )
        + tuple(parts),
        height=250.0 + 120.0 * len(curves),
    )


def _lanes(timeline: Timeline, end_s: float, unit_s: float) -> Panel:
    marks: list[Mark] = []
    rows = []
    pixel = end_s / WIDTH
    for row, lane in enumerate(_LANES):
        spans, y = timeline.lanes[lane], float(-row)
        for kind in _KINDS:
            # A merged span is as wide as the work in it: idle channels look idle.
            boxes = boxes_of(
                (
                    (span.start_s, min(span.stop_s - span.start_s, span.busy_s))
                    for span in spans
                    if span.kind == kind
                ),
                pixel,
            )
            if boxes:
                scaled = tuple((start / unit_s, width / unit_s) for start, width in boxes)
                marks.append(Bars(f"{lane}: {kind}", kind, scaled, y - 0.36, y + 0.36))
                if kind == "stall":
                    marks.append(Bars("stalls", kind, scaled, y + 0.4, y + 0.56))
        busy_s = sum(span.busy_s for span in spans if span.kind != "stall")
        rows.append((y, f"{lane}\n{100 * busy_s / end_s:.0f} % busy"))
    return Panel(tuple(marks), "", 0.55 - len(_LANES), 0.6, rows=tuple(rows), share=1.5)


def _memory(
    timeline: Timeline, curve: str, end_s: float, unit_s: float, limit: float | None
) -> Panel:
    samples, most = timeline.memory.get(curve, []), timeline.peak(curve)
    # A limit far above what is used would flatten the curve: it is given as text.
    shown = limit is not None and limit <= 3 * most
    top = max(most, limit) if shown and limit is not None else most
    size, unit = byte_unit(top)
    marks: list[Mark] = []
    layers = _layers(timeline, unit_s, size) if curve == "fast" else []
    marks += layers
    if samples:
        points = [(t / unit_s, value / size) for t, value in samples]
        points.append((end_s / unit_s, points[-1][1]))
        marks.append(
            Line(
                curve,
                "rival" if layers else "fast" if curve == "fast" else "tier",
                tuple(points),
                step=True,
                fill=True,
            )
        )
    if shown and limit is not None:
        ends = ((0.0, limit / size), (end_s / unit_s, limit / size))
        marks.append(Line("limit", "limit", ends, dashed=True))
    note = f"peak {format_bytes(most)}"
    if limit is not None:
        note += f" of {format_bytes(limit)}"
    # The note has the room above the curve to itself.
    return Panel(tuple(marks), f"{curve} ({unit})", 0.0, 1.3 * top / size or 1.0, note=note)


def _layers(timeline: Timeline, unit_s: float, size: float) -> list[Mark]:
    """Return what fast memory holds by kind, one above the other."""
    curves = {curve: timeline.memory[curve] for curve in PARTS if curve in timeline.memory}
    times = sorted({t for samples in curves.values() for t, _ in samples})
    below = [0.0] * len(times)
    layers: list[Mark] = []
    for curve, samples in curves.items():
        what, color = PARTS[curve]
        above = [low + value for low, value in zip(below, _along(samples, times), strict=True)]
        points = zip(times, below, above, strict=True)
        layers.append(
            Area(what, color, tuple((t / unit_s, a / size, b / size) for t, a, b in points))
        )
        below = above
    return layers


def _along(samples: list[tuple[float, float]], times: list[float]) -> list[float]:
    """Return the height of a stepped curve at these times, which rise."""
    heights, k, height = [], 0, 0.0
    for time_s in times:
        while k < len(samples) and samples[k][0] <= time_s:
            height = samples[k][1]
            k += 1
        heights.append(height)
    return heights
