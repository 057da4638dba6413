"""Pages and pictures of plans.

A schedule is drawn as the checkpointing literature does, after Griewank & Walther 2000
(Algorithm 799, doi 10.1145/347837.347846), figures 1 and 2: time runs to the right, steps
upwards; a forward run climbs, an adjoint step descends, and a checkpoint is a horizontal
line at its step for as long as it is held.  Here the line's color says where.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from ..actions import (
    Action,
    Advance,
    Answer,
    Await,
    Drop,
    Evict,
    Free,
    Get,
    Offer,
    Put,
    Reverse,
    Save,
    Tape,
)
from ..errors import ArgumentError
from ..model.costs import Costs
from ..schedule.simulation import Simulation
from ..support.units import format_bytes, format_seconds
from ..view import save_chart, save_text
from ..view.chart import Chart, Line, Mark, Panel, Point, Segment, Strokes, byte_unit, time_unit
from ..view.page import Cards, Heading, Paragraph, Part, Picture, Table, document, fragment
from ..view.timeline import timeline_chart
from .base import Plan, Subject
from .chain.heterogeneous import memory_curve
from .ranking import PLANNERS, RANKED, trade_off
from .ranking import chain_bound_s as chain_bound_s
from .ranking import read_plan as read_plan

# Steps of a schedule that is drawn: some seconds of virtual time passing.
MOST_STEPS = 20_000


@dataclass(slots=True)
class Course:
    """What a schedule does, in seconds and steps: strokes, and checkpoints while held.

    Attributes
    ----------
    forward, reverse, stalls : list of (start_s, from, stop_s, to)
    fast, tapes : list of (start_s, step, stop_s, step)
    tiers : dict of tier to the same
    end_s : float
    """

    forward: list[Segment] = field(default_factory=list)
    reverse: list[Segment] = field(default_factory=list)
    stalls: list[Segment] = field(default_factory=list)
    fast: list[Segment] = field(default_factory=list)
    tapes: list[Segment] = field(default_factory=list)
    tiers: dict[int, list[Segment]] = field(default_factory=dict)
    end_s: float = 0.0
    _held: dict[tuple[str, int], float] = field(default_factory=dict)
    _at: float = 0.0

    def apply(self, action: Action, answer: Answer, start_s: float, stop_s: float) -> None:
        """Draw one action that took from `start_s` to `stop_s`."""
        match action:
            case Advance(start, stop):
                self.forward.append((start_s, start, stop_s, stop))
                self._at = stop
            case Tape(step):
                self.forward.append((start_s, step, stop_s, step + 1))
                self._held["tape", step] = stop_s
                self._at = step + 1
            case Reverse(step):
                self.reverse.append((start_s, step + 1, stop_s, step))
                self._let_go("tape", step, start_s, self.tapes)
                self._at = step
            case Save(step):
                self._held["fast", step] = stop_s
            case Get(step):
                self._held["tape" if action.tape else "fast", step] = start_s
            case Evict(step):
                held = ("tape", self.tapes) if action.tape else ("fast", self.fast)
                self._let_go(held[0], step, stop_s, held[1])
            case Free(step):
                self._let_go("fast", step, stop_s, self.fast)
            case Offer(step, tier) | Put(step, tier):
                if answer is not None:
                    self._held[_place(tier, action.tape), step] = stop_s
            case Drop(step, tier):
                lines = self.tiers.setdefault(tier, [])
                self._let_go(_place(tier, action.tape), step, stop_s, lines)
        self.end_s = max(self.end_s, stop_s)

    def wait(self, start_s: float, stop_s: float) -> None:
        """Draw that the computing thread waited for a transfer."""
        self.stalls.append((start_s, self._at, stop_s, self._at))

    def _let_go(self, where: str, step: int, stop_s: float, lines: list[Segment]) -> None:
        start_s = self._held.pop((where, step), None)
        if start_s is not None:
            lines.append((start_s, step, stop_s, step))


def _place(tier: int, tape: bool) -> str:
    return f"tapes in tier {tier}" if tape else f"tier {tier}"


def course_of(plan: Plan) -> tuple[Course, Simulation]:
    """Return what a plan's schedule does in virtual time, and its simulation.

    Raises
    ------
    ArgumentError
        For more than `MOST_STEPS` steps.
    """
    if plan.n_steps > MOST_STEPS:
        raise ArgumentError(
            f"a schedule of {plan.n_steps} steps is too long to draw; plan at most {MOST_STEPS} "
            "steps with the same costs and slots, whose picture is the same, only shorter"
        )
    course, before = Course(), 0.0
    action_s = plan.costs.action_s if isinstance(plan.costs, Costs) else 0.0
    overheads = [(tier.write_overhead_s, tier.read_overhead_s) for tier in plan.tiers]
    reads: dict[int, float] = {}  # token -> what the transfer costs the computing thread

    def timed(action: Action, answer: Answer, now: float) -> None:
        nonlocal before
        start_s, busy_s = before + action_s, 0.0
        match action:
            case Get(_, tier):
                assert answer is not None
                reads[answer] = overheads[tier][1]
            case Await(token):
                busy_s = reads.pop(token, 0.0)
            case Offer(_, tier) | Put(_, tier) if answer is not None:
                busy_s = overheads[tier][0]
        course.apply(action, answer, min(now, start_s), now)
        if isinstance(action, Await | Put | Evict) and now - busy_s > start_s + 1e-12 * now:
            course.wait(start_s, now - busy_s)
        before = now

    return course, plan.simulate(timed=timed)


def schedule_chart(plan: Plan, title: str = "") -> Chart:
    """Return what is kept where over both sweeps of a plan.

    Raises
    ------
    ArgumentError
        If it is too long to draw.
    """
    course, run = course_of(plan)
    end_s = course.end_s or 1.0
    unit_s, unit = time_unit(course.end_s)
    tiers = [tier.name for tier in plan.tiers]
    kinds: list[tuple[str, str, list[Segment], float]] = []
    for tier, lines in sorted(course.tiers.items()):
        name = tiers[tier] if tier < len(tiers) else f"tier {tier}"
        kinds.append(("tier" if tier == 0 else "tier 2", f"kept in {name}", lines, 1.4))
    tapes = [line for line in course.tapes if line[2] > line[0]]
    stalled_s = sum(stop_s - start_s for start_s, _, stop_s, _ in course.stalls)
    kinds += [
        ("tape", "tape held", tapes, 1.0),
        ("fast", "checkpoint", course.fast, 2.0),
        ("forward", "forward", course.forward, 1.4),
        ("reverse", "adjoint", course.reverse, 2.4),
        ("stall", f"stall {format_seconds(stalled_s)}", course.stalls, 3.5),
    ]
    marks = tuple(
        Strokes(label, color, tuple((a / unit_s, b, c / unit_s, d) for a, b, c, d in lines), width)
        for color, label, lines, width in kinds
        if lines
    )
    margin = 0.02 * plan.n_steps
    limit = "" if plan.memory_bytes is None else f" within {plan.room}"
    return Chart(
        title=title or f"{plan.title}{limit}",
        panels=(
            Panel(marks, plan.costs.UNIT[:-1], -margin, plan.n_steps + margin),
            _memory_panel(plan, run.timeline.memory["fast"], end_s, unit_s),
        ),
        label=f"time ({unit})",
        low=0.0,
        high=end_s / unit_s,
        legend=tuple((mark.color, mark.label) for mark in marks),
        height=520.0,
    )


def _memory_panel(
    plan: Plan, samples: Sequence[tuple[float, float]], end_s: float, unit_s: float
) -> Panel:
    """Return the memory that a chain takes over time."""
    limit, top = plan.memory_bytes, max(peak for _, peak in samples)
    # As in a timeline: a limit far above the peak is given as text.
    shown = limit if limit is not None and limit <= 3 * top else None
    most = top if shown is None else max(top, shown)
    size, unit = byte_unit(most)
    points = tuple((t / unit_s, value / size) for t, value in samples)
    marks = [Line("memory", "fast", points, step=True, fill=True)]
    if shown is not None:
        ends = ((0.0, shown / size), (end_s / unit_s, shown / size))
        marks.append(Line("limit", "limit", ends, dashed=True))
    note = f"peak {format_bytes(plan.peak_bytes)}"
    note += f" of {format_bytes(limit)}" if limit is not None else ""
    high = 1.3 * most / size or 1.0
    return Panel(tuple(marks), f"memory ({unit})", 0.0, high, share=0.5, note=note)


# Plans so many times slower than the fastest are left out: of two slots, say.
_SLOWEST = 4.0
_RIVALS = ("forward", "reverse", "write", "read", "tape", "tier", "rival", "rival 3")

Curve = Sequence[tuple[float, float]]


def trade_off_chart(
    chosen: Plan,
    curves: Mapping[str, Curve],
    reference: tuple[str, Curve],
    title: str = "",
) -> Chart:
    """Return makespan over memory, planner by planner.

    Parameters
    ----------
    chosen : Plan
        Marked.
    curves : dict of planner to (bytes, seconds)
        Memory ascending, time falling.
    reference : (str, sequence of (bytes, seconds))
        A name and a curve to compare with, drawn dashed.
    """
    points = [point for curve in curves.values() for point in curve]
    fastest_s = min([chosen.makespan_s, *(s for _, s in points)])
    most_s = max(_SLOWEST * fastest_s, chosen.makespan_s)
    shown = {name: [p for p in curve if p[1] <= most_s] for name, curve in curves.items()}
    drawn = [point for curve in shown.values() for point in curve]
    here = float(chosen.peak_bytes if chosen.actions else chosen.memory_bytes or 0)
    every = [*drawn, (here, chosen.makespan_s), *reference[1]]
    unit_s, unit = time_unit(max(s for _, s in every))
    low, high = min(nbytes for nbytes, _ in every), max(nbytes for nbytes, _ in every)
    size, bytes_unit = byte_unit(high)

    def line(name: str, color: str, curve: Curve, *, solid: bool) -> Line:
        scaled = tuple((nbytes / size, s / unit_s) for nbytes, s in curve)
        return Line(name, color, scaled, step=solid, dashed=not solid)

    named = zip(_RIVALS, ((name, curve) for name, curve in shown.items() if curve), strict=False)
    # Until the next point is paid for, the one before is the best there is.
    lines = [
        line(name, color, [*curve, (high, curve[-1][1])], solid=True)
        for color, (name, curve) in named
    ]
    note = f"plans over {_SLOWEST:g} times the fastest: left out"
    marks: list[Mark] = [line("reference", "rival", reference[1], solid=False)]
    marks += reversed(lines)  # the chosen planner above the others
    marks.append(Point("chosen", "chosen", here / size, chosen.makespan_s / unit_s))
    log = low > 0 and high > 2.5 * low
    margin = 0.0 if log else 0.03 * (high - low) or 0.1 * high
    return Chart(
        title=title or f"time and memory of {chosen.n_steps} {chosen.costs.UNIT}",
        panels=(_panel(marks, f"makespan ({unit})", note if len(drawn) < len(points) else ""),),
        label=f"fast memory ({bytes_unit})",
        low=(low - margin) / size,
        high=(high + margin) / size,
        log=log,
        legend=(
            *((each.color, each.label) for each in lines),
            ("rival", f"{reference[0]} (dashed)"),
            ("chosen", f"chosen: {chosen.planner}, {format_seconds(chosen.makespan_s)}"),
        ),
        height=420.0,
    )


def _panel(marks: Sequence[Mark], label: str, note: str = "") -> Panel:
    heights = [y for mark in marks if isinstance(mark, Line) for _, y in mark.points]
    low, high = min(heights), max(heights)
    low, high = (low, high) if high > low else (0.9 * low, 1.1 * high)
    if low > 0 and high > 2.5 * low:  # a few slots may cost many times as much
        return Panel(tuple(marks), label, low / 1.1, high * 1.1, log=True, note=note)
    margin = 0.06 * (high - low)
    return Panel(tuple(marks), label, low - margin, high + margin, note=note)


SUBJECTS: tuple[Subject, ...] = get_args(Subject)
# Longest problem whose trade-off is part of a page: some seconds of planning.
_CURVE_STEPS = 1_000
# Longest schedule that is drawn in a notebook unasked: some 30 ms and 30 kB.
_LIGHT_STEPS = 500
_LIGHT_STAGES = 60


def plan_chart(plan: Plan, subject: Subject) -> Chart:
    """Return the picture of a plan.

    Raises
    ------
    ArgumentError
        For another subject, or a schedule too long to draw.
    """
    match subject:
        case "schedule":
            return schedule_chart(plan)
        case "timeline":
            return run_chart(plan, course_of(plan)[1], plan.title)
        case "trade-off":
            return _trade_off(plan)
    raise ArgumentError(f"picture of {subject!r} is not known; choose one of {SUBJECTS}")


def run_chart(plan: Plan, run: Simulation, title: str = "") -> Chart:
    """Return what runs when in a simulated run of a plan, and what each place holds."""
    title = title and f"{title}, {format_seconds(run.makespan_s)}"
    return timeline_chart(run.timeline, title, plan.limits())


def _trade_off(plan: Plan) -> Chart:
    """Return time over memory, for a plan and its rivals."""
    costs, most = plan.costs, float(plan.peak_bytes)
    if isinstance(costs, Costs):
        # The planner and its rivals, those that PLANNERS knows; the planner is drawn first.
        names = [plan.planner, *(rival.planner for rival in plan.candidates), *RANKED]
        known = [name for name in dict.fromkeys(names) if name in PLANNERS]
        plans = trade_off(costs, plan.n_steps, known, also=plan.slots)
        bounds = {p.memory_bytes: p.lower_bound_s for each in plans.values() for p in each}
        curves = {
            name: [(float(p.memory_bytes or 0), p.makespan_s) for p in each]
            for name, each in plans.items()
        }
        lower = [(float(nbytes or 0), s) for nbytes, s in sorted(bounds.items()) if s is not None]
        return trade_off_chart(plan, curves, ("lower bound", lower))
    planners: tuple[Literal["optimal", "revolve"], ...] = ("optimal", "revolve")
    found: dict[str, Curve] = {planner: memory_curve(costs, planner) for planner in planners}
    ends = [nbytes for curve in found.values() for nbytes, _ in curve]
    plain = [(nbytes, plan.plain_s) for nbytes in (min(most, *ends), plan.plain_bytes)]
    name = f"nothing run twice: {format_seconds(plan.plain_s)}"
    return trade_off_chart(plan, found, (name, plain))


def draw_plan(plan: Plan, path: str | Path, subject: Subject) -> None:
    """Draw a picture of a plan to a file."""
    save_chart(plan_chart(plan, subject), path)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan as a page, or as JSON."""
    if Path(path).suffix.lower() == ".html":
        save_text(path, html=document(f"Plan: {plan.title}", plan_parts(plan)))
        return
    data, known = plan.to_dict(), plan.planner in PLANNERS and plan.sealed
    if not plan.actions and not (known and read_plan(data) == plan):
        raise ArgumentError(
            f"the schedule may not be what planner {plan.planner!r} makes of these costs, and of "
            "steps that are alike a file has none; save a plan as it was planned, or a page (.html)"
        )
    save_text(path, html="", json=json.dumps(data, indent=2) + "\n")


def save_run(plan: Plan, run: Simulation, path: str | Path) -> None:
    """Write the page of a plan and of a simulated run of it, with jitter or without."""
    save_text(path, html=document(f"Simulated: {plan.title}", plan_parts(plan, run)))


def plan_parts(plan: Plan, run: Simulation | None = None) -> list[Part]:
    """Return the page of a plan, or of a simulated run of it."""
    parts: list[Part] = [
        Paragraph(plan.summary(), "soft"),
        Cards(_cards(plan, run)),
        *_beside(plan),
    ]
    if plan.n_steps > MOST_STEPS:
        text = f"Schedules of more than {MOST_STEPS} {plan.costs.UNIT} are not drawn."
        return [*parts, Paragraph(text, "soft")]
    shown = run or course_of(plan)[1]
    parts += [
        Heading("What is kept where" + (", as planned" if run else "")),
        Paragraph(SCHEDULE_CAPTION, "soft"),
        Picture(schedule_chart(plan)),
        Heading("Timeline, predicted" if run is None else "Timeline, simulated"),
        Picture(run_chart(plan, shown)),
    ]
    if plan.n_steps <= _CURVE_STEPS:
        parts += [Heading("Time against memory"), Picture(_trade_off(plan))]
    return [*parts, *_stages(plan)]


SCHEDULE_CAPTION = (
    "Time runs to the right, steps upwards. A forward run climbs, an adjoint step descends; a "
    "horizontal line is a checkpoint for as long as it is held, its color says where."
)


def _cards(plan: Plan, run: Simulation | None) -> list[tuple[str, str, str]]:
    gap = "the lower bound is not known" if plan.gap is None else f"{100 * plan.gap:.2f} % above it"
    bound = "" if plan.lower_bound_s is None else f"bound {format_seconds(plan.lower_bound_s)}, "
    limit = "no limit" if plan.memory_bytes is None else format_bytes(plan.memory_bytes)
    entries = [
        ("makespan, predicted", format_seconds(plan.makespan_s), bound + gap),
        (
            "recompute factor",
            f"{plan.recompute_factor:.3f}",
            f"{plan.forward_steps} forward {plan.costs.UNIT}",
        ),
        ("peak fast memory", format_bytes(plan.peak_bytes), f"of {limit}"),
    ]
    if plan.actions:
        slower = plan.makespan_s / plan.plain_s - 1 if plan.plain_s else 0.0
        entries += [
            (
                "plain training",
                format_seconds(plan.plain_s),
                f"{100 * slower:.1f} % less; {format_bytes(plan.plain_bytes)}",
            ),
            ("tapes kept", f"{len(plan.kept)}", f"of {plan.n_steps}"),
        ]
    entries += [
        ("written, read", f"{plan.writes}, {plan.reads}", "to and from slow tiers"),
        ("stalls", format_seconds(plan.stall_s), "waiting for transfers"),
    ]
    if run is not None:
        more = f"{100 * (run.makespan_s / plan.makespan_s - 1):+.2f} % to the prediction"
        entries.insert(1, ("makespan, simulated", format_seconds(run.makespan_s), more))
        entries.append(("stalls, simulated", format_seconds(run.stall_s), "waiting for transfers"))
    return entries


def _beside(plan: Plan) -> list[Part]:
    """Return a plan's alternatives, and the costs that all of them are predicted by."""
    costs = [*plan.costs.facts(), *(f"tier {tier}" for tier in plan.tiers)]
    parts: list[Part] = [Paragraph("\n".join(text for text in (plan.note, plan.why) if text))]
    return [
        *parts,
        Heading("Planners compared"),
        _candidates(plan),
        Paragraph("\n".join(costs), "soft"),
    ]


def _candidates(plan: Plan) -> Table:
    plans = plan.ranked()
    rows = [each.row() for each in plans]
    marked = next((k for k, each in enumerate(plans) if each.planner == plan.planner), None)
    return Table(list(rows[0]), [list(row.values()) for row in rows], marked=marked)


def _stages(plan: Plan) -> list[Part]:
    """Return what becomes of each stage of a listed schedule."""
    return [Heading("Stages"), Table(*plan.stage_rows())] if plan.actions else []


def brief_parts(plan: Plan) -> list[Part]:
    """Return what a notebook's cell shows of a plan."""
    parts: list[Part] = [Paragraph(plan.summary()), _candidates(plan), Paragraph(plan.note)]
    if plan.n_steps <= (_LIGHT_STAGES if plan.actions else _LIGHT_STEPS):
        parts += [Picture(schedule_chart(plan, " ")), *_stages(plan)]
    return parts


def plan_html(plan: Plan) -> str:
    """Return a plan for a notebook's cell."""
    return fragment(brief_parts(plan))
