"""A plan's schedule as the checkpointing literature draws it.

After Griewank & Walther 2000 (Algorithm 799, doi 10.1145/347837.347846),
figures 1 and 2: time runs to the right, steps upwards; a forward run climbs, an
adjoint step descends, and a checkpoint is a horizontal line at its step for as
long as it is held.  Here the line's color says where.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...actions import (
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
from ...errors import ArgumentError
from ...model.costs import Costs
from ...schedule.simulation import Simulation
from ...support.units import format_bytes, format_seconds
from ...view.chart import Chart, Line, Panel, Segment, Strokes, byte_unit, time_unit
from ..chain.plan import ChainPlan

if TYPE_CHECKING:
    from ..base import Plan

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
        if not (isinstance(action, Tape | Reverse) and action.step == plan.n_steps):  # the loss
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
    if isinstance(plan, ChainPlan):
        return chain_chart(plan, title)
    return course_chart(plan, course_of(plan)[0], title)


def course_chart(plan: Plan, course: Course, title: str = "") -> Chart:
    """Return the chart of a course that is known."""
    names = [tier.name for tier in plan.tiers]
    panel, legend, unit = _course_panel(course, plan.n_steps, names, "step")
    return Chart(
        title=title or plan.summary(),
        panels=(panel,),
        label=f"time ({unit})",
        low=0.0,
        high=panel_end(course),
        legend=legend,
        height=420.0,
    )


def panel_end(course: Course) -> float:
    """Return the end of the horizontal axis, in its unit."""
    return (course.end_s or 1.0) / time_unit(course.end_s)[0]


def _course_panel(
    course: Course,
    n_steps: int,
    tiers: list[str],
    what: str,
    place: str = " in a fast slot",
    kept: str = "checkpoint",
) -> tuple[Panel, tuple[tuple[str, str], ...], str]:
    unit_s, unit = time_unit(course.end_s)
    kinds: list[tuple[str, str, list[Segment], float]] = []
    for tier, lines in sorted(course.tiers.items()):
        name = tiers[tier] if tier < len(tiers) else f"tier {tier}"
        kinds.append(("tier" if tier == 0 else "tier 2", f"{kept} in {name}", lines, 1.4))
    tapes = [line for line in course.tapes if line[2] > line[0]]
    kinds += [
        ("tape", "tape held", tapes, 1.0),
        ("fast", f"checkpoint{place}", course.fast, 2.0),
        ("forward", "forward", course.forward, 1.4),
        ("reverse", "adjoint", course.reverse, 2.4),
        ("stall", f"stall {format_seconds(_length_s(course.stalls))}", course.stalls, 3.5),
    ]
    marks = tuple(
        Strokes(label, color, tuple((a / unit_s, b, c / unit_s, d) for a, b, c, d in lines), width)
        for color, label, lines, width in kinds
        if lines
    )
    margin = 0.02 * n_steps
    panel = Panel(marks, what, -margin, n_steps + margin)
    return panel, tuple((mark.color, mark.label) for mark in marks), unit


def _length_s(segments: list[Segment]) -> float:
    return sum(stop_s - start_s for start_s, _, stop_s, _ in segments)


def _chain_title(plan: ChainPlan) -> str:
    limit = "" if plan.memory_bytes is None else f" within {format_bytes(plan.memory_bytes)}"
    return f"{plan.planner}: {len(plan.costs.stages)} stages{limit}"


def chain_chart(plan: ChainPlan, title: str = "") -> Chart:
    """Return what is kept of a chain over both sweeps, above the memory it takes."""
    course, run = course_of(plan)
    samples = run.timeline.memory["fast"]
    limit = plan.memory_bytes
    top = max(peak for _, peak in samples)
    # As in a timeline: a limit far above the peak is given as text.
    shown = limit is not None and limit <= 3 * top
    most = max(top, limit) if shown and limit is not None else top
    names = [tier.name for tier in plan.tiers]
    panel, legend, unit = _course_panel(
        course, len(plan.costs.stages), names, "stage", "", "tape or state"
    )
    unit_s, (size, bytes_unit) = time_unit(course.end_s)[0], byte_unit(most)
    points = tuple((t / unit_s, value / size) for t, value in samples)
    marks = [Line("memory", "fast", points, step=True, fill=True)]
    if shown and limit is not None:
        ends = ((0.0, limit / size), (panel_end(course), limit / size))
        marks.append(Line("limit", "limit", ends, dashed=True))
    note = f"peak {format_bytes(plan.peak_bytes)}"
    note += f" of {format_bytes(limit)}" if limit is not None else ""
    memory = Panel(
        tuple(marks), f"memory ({bytes_unit})", 0.0, 1.3 * most / size or 1.0, share=0.5, note=note
    )
    return Chart(
        title=title or _chain_title(plan),
        panels=(panel, memory),
        label=f"time ({unit})",
        low=0.0,
        high=panel_end(course),
        legend=legend,
        height=520.0,
    )
