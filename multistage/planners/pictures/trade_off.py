"""Time against memory: what more of it would gain."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...support.units import format_bytes, format_seconds
from ...view.chart import Chart, Line, Mark, Panel, Point, byte_unit, time_unit

if TYPE_CHECKING:
    from ..chain.plan import ChainPlan
    from ..uniform import UniformPlan

# Plans so many times slower than the fastest are left out: of two slots, say.
_SLOWEST = 4.0
_RIVALS = ("forward", "reverse", "write", "read", "tape", "tier", "rival", "rival 3")


def trade_off_chart(
    chosen: UniformPlan, curves: dict[str, Sequence[UniformPlan]], title: str = ""
) -> Chart:
    """Return makespan and recompute factor over the fast slots, planner by planner.

    Parameters
    ----------
    chosen : UniformPlan
        Marked.
    curves : dict of planner to plans
        As `multistage.planners.trade_off` makes them: slots ascending.
    """
    fastest_s = min(p.makespan_s for plans in (*curves.values(), (chosen,)) for p in plans)
    most_s = max(_SLOWEST * fastest_s, chosen.makespan_s)
    every = sum(map(len, curves.values()))
    curves = {name: [p for p in plans if p.makespan_s <= most_s] for name, plans in curves.items()}
    shown = [p for plans in curves.values() for p in plans] or [chosen]
    bounds = sorted({(p.slots, p.lower_bound_s) for p in shown})
    unit_s, unit = time_unit(max(p.makespan_s for p in shown))
    times: list[Mark] = []
    factors: list[Mark] = []
    legend = []
    names = [chosen.planner, *(name for name in curves if name != chosen.planner)]
    for k, name in enumerate(name for name in names if curves.get(name)):
        color, plans = _RIVALS[k % len(_RIVALS)], curves[name]
        made = tuple((float(p.slots), p.makespan_s / unit_s) for p in plans)
        times.append(Line(name, color, made, dots=True))
        run = tuple((float(p.slots), p.recompute_factor) for p in plans)
        factors.append(Line(name, color, run, dots=True))
        legend.append((color, name))
    lower = tuple((float(slots), bound / unit_s) for slots, bound in bounds)
    here = float(chosen.slots)
    times = [*reversed(times), Line("lower bound", "rival", lower, dashed=True)]
    factors.reverse()  # the chosen planner above the others
    times.append(Point("chosen", "chosen", here, chosen.makespan_s / unit_s))
    factors.append(Point("chosen", "chosen", here, chosen.recompute_factor))
    state, end = chosen.costs.state_bytes, bounds[-1][0]
    note = f"plans over {_SLOWEST:g} times the fastest: left out" if len(shown) < every else ""
    memory = f" of {format_bytes(state)}" if state > 1 else ""
    return Chart(
        title=title or f"time and memory of {chosen.n_steps} steps",
        panels=(
            _panel(times, f"makespan ({unit})", note),
            _panel(factors, "recompute factor"),
        ),
        label=f"fast slots{memory}",
        low=float(bounds[0][0]),
        high=float(max(end, bounds[0][0] + 1)),
        log=True,
        legend=(
            *legend,
            ("rival", "lower bound (dashed)"),
            (
                "chosen",
                f"chosen: {chosen.planner}, {chosen.slots} slots, "
                f"{format_seconds(chosen.makespan_s)}",
            ),
        ),
        height=520.0,
    )


def _panel(marks: Sequence[Mark], label: str, note: str = "") -> Panel:
    heights = [y for mark in marks if isinstance(mark, Line) for _, y in mark.points]
    low, high = min(heights), max(heights)
    low, high = (low, high) if high > low else (0.9 * low, 1.1 * high)
    if low > 0 and high > 2.5 * low:  # a few slots may cost many times as much
        return Panel(tuple(marks), label, low / 1.1, high * 1.1, log=True, note=note)
    margin = 0.06 * (high - low)
    return Panel(tuple(marks), label, low - margin, high + margin, note=note)


def chain_trade_off_chart(
    chosen: ChainPlan, curves: dict[str, Sequence[tuple[int, float]]], title: str = ""
) -> Chart:
    """Return makespan over peak memory for a chain's planners.

    Parameters
    ----------
    chosen : ChainPlan
        Marked.
    curves : dict of planner to (peak bytes, seconds)
        Memory ascending, time falling; as `multistage.memory_curve` returns.
    """
    points = [point for curve in curves.values() for point in curve]
    points.append((chosen.plain_bytes, chosen.plain_s))
    unit_s, unit = time_unit(max(s for _, s in points))
    size, bytes_unit = byte_unit(max(peak for peak, _ in points))
    low, high = min(peak for peak, _ in points) / size, max(peak for peak, _ in points) / size
    marks: list[Mark] = []
    legend = []
    for k, (name, curve) in enumerate(curves.items()):
        color = _RIVALS[k % len(_RIVALS)]
        # Until the next point is paid for, the one before is the best there is.
        steps = tuple((peak / size, s / unit_s) for peak, s in curve)
        marks.append(Line(name, color, (*steps, (high, steps[-1][1])), step=True))
        legend.append((color, name))
    margin = 0.03 * (high - low) or 0.1 * high
    plain = chosen.plain_s / unit_s
    marks.insert(
        0, Line("plain", "rival", ((low - margin, plain), (high + margin, plain)), dashed=True)
    )
    marks.append(Point("chosen", "chosen", chosen.peak_bytes / size, chosen.makespan_s / unit_s))
    panel = _panel(marks, f"makespan ({unit})")
    return Chart(
        title=title or f"time and memory of {len(chosen.costs.stages)} stages",
        panels=(panel,),
        label=f"peak memory ({bytes_unit})",
        low=low - margin,
        high=high + margin,
        legend=(
            *legend,
            ("rival", f"nothing run twice: {format_seconds(chosen.plain_s)} (dashed)"),
            (
                "chosen",
                f"chosen: {chosen.planner}, {format_bytes(chosen.peak_bytes)}, "
                f"{format_seconds(chosen.makespan_s)}",
            ),
        ),
        height=380.0,
    )
