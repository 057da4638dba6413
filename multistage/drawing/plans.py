"""Pages and pictures of plans."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ..errors import ArgumentError
from ..rates import TierRates
from ..units import format_bytes, format_seconds
from . import page, save_chart, save_text
from .chart import Chart
from .schedule import (
    MOST_STEPS,
    chain_chart,
    chain_course_of,
    course_chart,
    course_of,
    schedule_chart,
)
from .timeline import timeline_chart
from .tradeoff import chain_trade_off_chart, trade_off_chart

if TYPE_CHECKING:
    from ..plan.base import Plan
    from ..plan.heterogeneous import ChainPlan
    from ..simulate import Simulation

Subject = Literal["schedule", "timeline", "trade-off"]
SUBJECTS: tuple[Subject, ...] = ("schedule", "timeline", "trade-off")
# Longest problem whose trade-off is part of a page: some seconds of planning.
_CURVE_STEPS = 1_000
# Longest schedule that is drawn in a notebook unasked: some 30 ms and 30 kB.
_LIGHT_STEPS = 500
_LIGHT_STAGES = 60


def limits_of(plan: Plan) -> dict[str, float | None]:
    """Return what fast memory and each tier may hold, in bytes."""
    state = plan.costs.state_bytes
    limits: dict[str, float | None] = {"fast": plan.slots * state}
    for tier in plan.costs.tiers:
        room = tier.capacity_states
        limits[tier.name] = None if room is None else room * state
    return limits


def plan_chart(plan: Plan, subject: Subject) -> Chart:
    """Return the picture of a plan.

    Raises
    ------
    ArgumentError
        For another subject, or a schedule too long to draw.
    """
    from ..plan.trade_off import trade_off

    title = f"{plan.planner}: {plan.n_steps} steps, {format_seconds(plan.makespan_s)}"
    match subject:
        case "schedule":
            return schedule_chart(plan)
        case "timeline":
            return timeline_chart(course_of(plan)[1].timeline, title, limits_of(plan))
        case "trade-off":
            names = _planners(plan)
            curves = trade_off(plan.costs, plan.n_steps, names, also=plan.slots)
            return trade_off_chart(plan, dict(curves))
    raise ArgumentError(f"picture of {subject!r} is not known; choose one of {SUBJECTS}")


def _planners(plan: Plan) -> list[str]:
    """Return the planner and its rivals, those that PLANNERS knows."""
    from ..plan import PLANNERS, RANKED

    names = [plan.planner, *(rival.planner for rival in plan.candidates), *RANKED]
    return [name for name in dict.fromkeys(names) if name in PLANNERS]


def draw_plan(plan: Plan, path: str | Path, subject: Subject) -> None:
    """Draw a picture of a plan to a file."""
    save_chart(plan_chart(plan, subject), path)


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan as a page, or as JSON."""
    if Path(path).suffix.lower() == ".html":
        title = f"Plan: {plan.n_steps} steps by {plan.planner}"
        save_text(path, html=page.document(title, plan_parts(plan)))
        return
    save_text(path, html="", json=json.dumps(plan.to_dict(), indent=2) + "\n")


def save_run(plan: Plan, run: Simulation, path: str | Path) -> None:
    """Write the page of a plan and of a simulated run of it, with jitter or without."""
    title = f"Simulated: {plan.n_steps} steps by {plan.planner}"
    save_text(path, html=page.document(title, plan_parts(plan, run)))


def plan_parts(plan: Plan, run: Simulation | None = None) -> list[str]:
    """Return the page of a plan, or of a simulated run of it."""
    parts = [page.paragraph(_problem(plan), "soft"), _plan_cards(plan, run)]
    parts.append(page.paragraph("\n".join(text for text in (plan.note, plan.why) if text)))
    parts += [page.heading("Planners compared"), _candidates(plan)]
    parts += [page.heading("Costs assumed"), _costs(plan)]
    if plan.n_steps > MOST_STEPS:
        parts.append(
            page.paragraph(f"Schedules of more than {MOST_STEPS} steps are not drawn.", "soft")
        )
        return parts
    course, predicted = course_of(plan)
    timeline = (run or predicted).timeline
    parts += [
        page.heading("Where checkpoints stand" + (", as planned" if run else "")),
        page.paragraph(SCHEDULE_CAPTION, "soft"),
        page.picture(course_chart(plan, course)),
        page.heading("Timeline, predicted" if run is None else "Timeline, simulated"),
        page.picture(timeline_chart(timeline, limits=limits_of(plan))),
    ]
    if plan.n_steps <= _CURVE_STEPS:
        parts += [
            page.heading("Time against memory"),
            page.picture(plan_chart(plan, "trade-off")),
        ]
    return parts


SCHEDULE_CAPTION = (
    "Time runs to the right, steps upwards. A forward run climbs, an adjoint step descends; a "
    "horizontal line is a checkpoint for as long as it is held, its color says where."
)


def _problem(plan: Plan) -> str:
    state = format_bytes(plan.costs.state_bytes)
    text = f"{plan.n_steps} steps, {plan.slots} fast slots of {state}"
    return text + (f"; rho = {plan.costs.rho:.3g}" if plan.costs.tiers else "")


def _plan_cards(plan: Plan, run: Simulation | None) -> str:
    predicted = f"{100 * plan.gap:.2f} % above the lower bound"
    makespan = ("makespan, predicted", format_seconds(plan.makespan_s), predicted)
    entries = [
        makespan,
        (
            "recompute factor",
            f"{plan.recompute_factor:.3f}",
            f"{plan.forward_steps} forward steps",
        ),
        (
            "peak fast memory",
            format_bytes(plan.peak_fast_bytes),
            f"{plan.peak_slots:g} of {plan.slots} slots",
        ),
        ("states written, read", f"{plan.writes}, {plan.reads}", "to and from slow tiers"),
        ("stalls", format_seconds(plan.stall_s), "waiting for transfers"),
    ]
    if run is not None:
        more = f"{100 * (run.makespan_s / plan.makespan_s - 1):+.2f} % to the prediction"
        entries.insert(1, ("makespan, simulated", format_seconds(run.makespan_s), more))
        entries[-1] = ("stalls, simulated", format_seconds(run.stall_s), entries[-1][2])
    return page.cards(entries)


def _candidates(plan: Plan) -> str:
    plans = sorted(plan.candidates or (plan,), key=lambda each: each.makespan_s)
    rows = [each.row() for each in plans]
    marked = next((k for k, each in enumerate(plans) if each.planner == plan.planner), None)
    return page.table(list(rows[0]), [list(row.values()) for row in rows], marked=marked)


def _costs(plan: Plan) -> str:
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
    return page.table(("cost", "assumed"), rows)


def plan_html(plan: Plan) -> str:
    """Return a plan for a notebook's cell."""
    head = f"plan {plan.planner}: {_problem(plan)}"
    parts = [page.paragraph(head), _candidates(plan)]
    parts.append(page.paragraph(f"lower bound {format_seconds(plan.lower_bound_s)}\n{plan.note}"))
    if plan.n_steps <= _LIGHT_STEPS:
        parts.append(page.picture(schedule_chart(plan, " ")))
    return page.fragment(parts)


# ------------------------------------------------------------------- of chains


def chain_plan_chart(plan: ChainPlan, subject: Subject) -> Chart:
    """Return the picture of a chain's plan.

    Raises
    ------
    ArgumentError
        For another subject.
    """
    match subject:
        case "schedule":
            return chain_chart(plan)
        case "timeline":
            title = f"{plan.strategy}: {len(plan.costs.stages)} stages, "
            title += format_seconds(plan.makespan_s)
            return chain_timeline_chart(plan, title)
        case "trade-off":
            return chain_trade_off_chart(plan, _chain_curves(plan))
    raise ArgumentError(f"picture of {subject!r} is not known; choose one of {SUBJECTS}")


def chain_limits(memory_bytes: int | None, tier: TierRates | str | None) -> dict[str, float | None]:
    """Return what fast memory and the tier of a chain may hold, in bytes."""
    rates = None if tier is None else TierRates.parse(tier)
    limits: dict[str, float | None] = {"fast": memory_bytes}
    return limits if rates is None else {**limits, rates.name: rates.capacity_bytes}


def chain_timeline_chart(plan: ChainPlan, title: str = "") -> Chart:
    """Return what runs when in virtual time, and what fast memory and the tier hold."""
    limits = chain_limits(plan.memory_bytes, plan.tier)
    return timeline_chart(chain_course_of(plan)[1].timeline, title, limits)


def _chain_curves(plan: ChainPlan) -> dict[str, Sequence[tuple[int, float]]]:
    from ..plan.heterogeneous import memory_curve

    return {
        "optimal": memory_curve(plan.costs),
        "revolve": memory_curve(plan.costs, "revolve"),
    }


def draw_chain_plan(plan: ChainPlan, path: str | Path, subject: Subject) -> None:
    """Draw a picture of a chain's plan to a file."""
    save_chart(chain_plan_chart(plan, subject), path)


def save_chain_plan(plan: ChainPlan, path: str | Path) -> None:
    """Write a chain's plan as a page, or as JSON."""
    if Path(path).suffix.lower() == ".html":
        title = f"Plan: {len(plan.costs.stages)} stages, {plan.strategy}"
        save_text(path, html=page.document(title, chain_parts(plan)))
        return
    save_text(path, html="", json=json.dumps(plan.to_dict(), indent=2) + "\n")


def chain_parts(plan: ChainPlan) -> list[str]:
    """Return the page of a chain's plan."""
    slower = plan.makespan_s / plan.plain_s - 1 if plan.plain_s else 0.0
    limit = "no limit" if plan.memory_bytes is None else format_bytes(plan.memory_bytes)
    entries = [
        (
            "forward and backward, predicted",
            format_seconds(plan.makespan_s),
            f"{100 * slower:.1f} % over plain training",
        ),
        ("peak memory", format_bytes(plan.peak_bytes), f"of {limit}"),
        (
            "plain training",
            format_bytes(plan.plain_bytes),
            f"and {format_seconds(plan.plain_s)}",
        ),
        (
            "recompute factor",
            f"{plan.recompute_factor:.3f}",
            f"{len(plan.kept)} of {len(plan.costs.stages)} tapes kept",
        ),
        *_beside_tier(plan),
    ]
    parts = [page.cards(entries)]
    if plan.tier is not None:
        parts += [
            page.heading("Beside its alternatives"),
            page.paragraph(f"tier {plan.tier}", "soft"),
            page.table(("", "time", "difference"), plan.comparison(), marked=0),
            page.heading("What runs when"),
            page.picture(chain_timeline_chart(plan)),
        ]
    return [
        *parts,
        page.heading("What is kept, and the memory it takes"),
        page.paragraph(SCHEDULE_CAPTION, "soft"),
        page.picture(chain_chart(plan)),
        page.heading("Time against memory"),
        page.picture(chain_plan_chart(plan, "trade-off")),
        page.heading("Stages"),
        _stages(plan),
    ]


def _beside_tier(plan: ChainPlan) -> list[tuple[str, str, str]]:
    """Return the cards of a plan with a tier."""
    if plan.tier is None:
        return []
    gap = "not known" if plan.gap is None else f"{100 * plan.gap:.2f} %"
    fates = plan.fates()
    tapes, states = (sum(f"{what} to tier" in fate for fate in fates) for what in ("tape", "input"))
    return [
        ("above the lower bound", gap, "no schedule of this kind is faster"),
        ("stalls", format_seconds(plan.stall_s), "waiting for transfers"),
        ("to the tier", f"{tapes}, {states}", "tapes and states"),
    ]


def _stages(plan: ChainPlan) -> str:
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
    return page.table(headers, rows)


def chain_plan_html(plan: ChainPlan) -> str:
    """Return a chain's plan for a notebook's cell."""
    parts = [page.paragraph(plan.summary())]
    if len(plan.costs.stages) <= _LIGHT_STAGES:
        parts += [page.picture(chain_chart(plan, " ")), _stages(plan)]
    return page.fragment(parts)
