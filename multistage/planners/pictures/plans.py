"""Pages and pictures of plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from ...errors import ArgumentError
from ...support.units import format_bytes, format_seconds
from ...view import save_chart, save_text
from ...view.chart import Chart
from ...view.page import Cards, Heading, Paragraph, Part, Picture, Table, document, fragment
from ...view.timeline import timeline_chart
from ..base import Subject
from ..chain.heterogeneous import memory_curve
from ..chain.plan import ChainPlan
from ..ranking import PLANNERS, RANKED
from ..trade_off import trade_off
from ..uniform import UniformPlan
from .schedule import MOST_STEPS, course_of, schedule_chart
from .trade_off import chain_trade_off_chart, trade_off_chart

if TYPE_CHECKING:
    from ...schedule.simulation import Simulation
    from ..base import Plan

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
    if isinstance(plan, UniformPlan):
        names = _planners(plan)
        curves = trade_off(plan.costs, plan.n_steps, names, also=plan.slots)
        return trade_off_chart(plan, dict(curves))
    assert isinstance(plan, ChainPlan)
    planners: tuple[Literal["optimal", "revolve"], ...] = ("optimal", "revolve")
    return chain_trade_off_chart(
        plan, {planner: memory_curve(plan.costs, planner) for planner in planners}
    )


def _planners(plan: UniformPlan) -> list[str]:
    """Return the planner and its rivals, those that PLANNERS knows."""
    names = [plan.planner, *(rival.planner for rival in plan.candidates), *RANKED]
    return [name for name in dict.fromkeys(names) if name in PLANNERS]


def draw_plan(plan: Plan, path: str | Path, subject: Subject) -> None:
    """Draw a picture of a plan to a file."""
    save_chart(plan_chart(plan, subject), path)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan as a page, or as JSON."""
    if Path(path).suffix.lower() == ".html":
        save_text(path, html=document(f"Plan: {plan.title}", plan_parts(plan)))
        return
    save_text(path, html="", json=json.dumps(plan.to_dict(), indent=2) + "\n")


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
        text = f"Schedules of more than {MOST_STEPS} {plan.UNIT} are not drawn."
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
    return parts if isinstance(plan, UniformPlan) else [*parts, *_stages(plan)]


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
            f"{plan.forward_steps} forward {plan.UNIT}",
        ),
        ("peak fast memory", format_bytes(plan.peak_bytes), f"of {limit}"),
    ]
    if isinstance(plan, ChainPlan):
        slower = plan.makespan_s / plan.plain_s - 1 if plan.plain_s else 0.0
        entries += [
            (
                "plain training",
                format_seconds(plan.plain_s),
                f"{100 * slower:.1f} % less; {format_bytes(plan.plain_bytes)}",
            ),
            ("tapes kept", f"{len(plan.kept)}", f"of {plan.n_steps}"),
        ]
    if plan.tiers or isinstance(plan, UniformPlan):
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
    if isinstance(plan, UniformPlan):
        return [
            Paragraph("\n".join(text for text in (plan.note, plan.why) if text)),
            Heading("Planners compared"),
            _candidates(plan),
            Heading("Costs assumed"),
            _costs(plan),
        ]
    assert isinstance(plan, ChainPlan)
    if plan.tier is None:
        return []
    return [
        Heading("Beside its alternatives"),
        Paragraph(f"tier {plan.tier}", "soft"),
        Table(("", "time", "difference"), plan.comparison(), marked=0),
    ]


def _candidates(plan: UniformPlan) -> Table:
    plans = sorted(plan.candidates or (plan,), key=lambda each: each.makespan_s)
    rows = [each.row() for each in plans]
    marked = next((k for k, each in enumerate(plans) if each.planner == plan.planner), None)
    return Table(list(rows[0]), [list(row.values()) for row in rows], marked=marked)


def _costs(plan: UniformPlan) -> Table:
    costs = plan.costs
    rows = [
        ("forward step (T_A)", format_seconds(costs.forward_step_s)),
        ("adjoint step (T_B)", format_seconds(costs.turn_s)),
        ("state", format_bytes(costs.state_bytes)),
    ]
    for tier in costs.tiers:
        rows += [
            (f"{tier.name}: write (T_W)", format_seconds(tier.write_s)),
            (f"{tier.name}: read (T_R)", format_seconds(tier.read_s)),
        ]
    return Table(("cost", "assumed"), rows)


def _stages(plan: Plan) -> list[Part]:
    """Return what becomes of each stage of a chain."""
    assert isinstance(plan, ChainPlan)
    headers = ("stage", "forward sweep", "runs", "tape", "output", "forward", "backward")
    rows = [
        (
            f"{number}  {stage.name}",
            what,
            runs,
            format_bytes(stage.tape_bytes),
            format_bytes(stage.output_bytes),
            format_seconds(stage.forward_s),
            format_seconds(stage.backward_s),
        )
        for number, (stage, what, runs) in enumerate(
            zip(plan.costs.stages, plan.fates(), plan.runs(), strict=True)
        )
    ]
    return [Heading("Stages"), Table(headers, rows)]


def brief_parts(plan: Plan) -> list[Part]:
    """Return what a notebook's cell shows of a plan."""
    parts: list[Part] = [Paragraph(plan.summary())]
    light = _LIGHT_STAGES
    if isinstance(plan, UniformPlan):
        light = _LIGHT_STEPS
        bound = f"lower bound {format_seconds(plan.lower_bound_s)}\n{plan.note}"
        parts += [_candidates(plan), Paragraph(bound)]
    if plan.n_steps <= light:
        parts.append(Picture(schedule_chart(plan, " ")))
        parts += [] if isinstance(plan, UniformPlan) else _stages(plan)
    return parts


def plan_html(plan: Plan) -> str:
    """Return a plan for a notebook's cell."""
    return fragment(brief_parts(plan))
