"""How a sequence is run: the plan of `unroll`, printed and saved."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tabulate import tabulate

from ...model.stages import Stage
from ...planners import Plan
from ...planners.pages import brief_parts, plan_parts
from ...support.units import format_bytes, format_seconds
from ...view import save_text
from ...view.page import Heading, Paragraph, Part, Table, document, fragment
from ..measurement.checking import Checked

UnrollPlanner = Literal["auto", "keep", "recompute", "stream", "offload"]
UNROLL_PLANNERS: tuple[UnrollPlanner, ...] = ("auto", "keep", "recompute", "stream", "offload")
_SHOWN = 64  # chunks whose fates are printed one by one


@dataclass(frozen=True, slots=True)
class UnrollPlan:
    """How a sequence is run, and why.

    Attributes
    ----------
    planner : {"keep", "recompute", "stream", "offload"}
        Keep every tape (plain autograd); keep some states, and graphs if there is room, and run
        again from them; stream states to a slow tier besides; or stream tapes there, and
        run nothing again.
    n_steps, chunk : int
        Time steps, and how many make one step of the schedule (at most, where steps
        differ).
    memory_bytes : int
        The limit.
    peak_bytes : int
        Predicted: states, graphs of chunks, buffers of the tier.
    makespan_s : float
        Predicted, forward and backward.
    keep_bytes : int
        What plain autograd is predicted to take.
    plan : Plan or None
        The schedule of chunks; where steps differ, its costs are those of each chunk.
    alternatives : tuple of (planner, chunk, makespan_s, peak_bytes)
        All that fit, the fastest first.
    checked : Checked or None
        What the check found; see `unroll`.
    cuts : tuple of int
        Where steps differ: the first time step of each chunk, and behind the last the
        number of all.
    kinds : tuple of (Stage, int)
        Where steps differ: what a step of each kind costs, and how many there are.
    by_values : bool
        Whether operators may take other bytes than were measured: by the values of tensors,
        such as a mask, or because costs were given.
    """

    planner: str
    n_steps: int
    chunk: int
    memory_bytes: int
    peak_bytes: int
    makespan_s: float
    keep_bytes: int
    plan: Plan | None
    alternatives: tuple[tuple[str, int, float, int], ...]
    checked: Checked | None = None
    cuts: tuple[int, ...] = ()
    kinds: tuple[tuple[Stage, int], ...] = ()
    by_values: bool = False

    def summary(self) -> str:
        """Return the plan in one line."""
        what = f"{self.planner}, chunks of {self.chunk}" if self.plan else self.planner
        if self.cuts:
            what = f"{self.planner}, {len(self.cuts) - 1} chunks of up to {self.chunk}"
        return (
            f"plan {what}: {self.n_steps} steps within {format_bytes(self.memory_bytes)}: "
            f"{format_seconds(self.makespan_s)}, peak {format_bytes(self.peak_bytes)} "
            f"(plain autograd: {format_bytes(self.keep_bytes)})"
        )

    def __str__(self) -> str:
        table = self._table()
        rows = [(">" if i == table.marked else "", *row) for i, row in enumerate(table.rows)]
        shown = tabulate(rows, headers=("", *table.headers), stralign="right")
        lines = [self.summary(), "", shown]
        if self.keep_bytes > self.memory_bytes:
            lines += ["", "Not kept: plain autograd does not fit the limit."]
        if self.kinds:
            lines += ["", "Kinds of steps:", "", tabulate(self._kinds(), headers="keys")]
        if self.checked is not None:
            lines += ["", f"Checked against plain autograd: {self.checked}."]
        if self.plan is not None:
            short = not self.plan.actions or self.plan.n_steps <= _SHOWN
            lines += ["", str(self.plan) if short else self.plan.summary()]
        return "\n".join(lines)

    def _kinds(self) -> list[dict[str, object]]:
        return [
            {
                "kind": stage.name,
                "steps": count,
                "forward": format_seconds(stage.forward_s),
                "backward": format_seconds(stage.backward_s),
                "state": format_bytes(stage.output_bytes),
                "graph": format_bytes(stage.tape_bytes),
            }
            for stage, count in self.kinds
        ]

    def _table(self) -> Table:
        rows = [
            (name, chunk, format_seconds(seconds), format_bytes(peak))
            for name, chunk, seconds, peak in self.alternatives
        ]
        chosen = [(name, chunk) for name, chunk, *_ in self.alternatives]
        marked = chosen.index((self.planner, self.chunk))
        return Table(("planner", "chunk", "predicted", "peak"), rows, marked=marked)

    def save(self, path: str | Path) -> None:
        """Write the plan to a file: `.html`, one page that needs no network.

        Raises
        ------
        ArgumentError
            For another suffix.
        """
        parts: list[Part] = [Paragraph(self.summary()), Heading("What fits"), self._table()]
        if self.plan is not None:
            parts += [Heading("The schedule of chunks"), *plan_parts(self.plan)]
        title = f"Plan: a sequence of {self.n_steps} steps, {self.planner}"
        save_text(path, html=document(title, parts))

    def _repr_html_(self) -> str:
        schedule = [] if self.plan is None else brief_parts(self.plan)
        return fragment([Paragraph(self.summary()), self._table(), *schedule])
