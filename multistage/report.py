"""What a run did, beside what was predicted."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from tabulate import tabulate

from .backends.base import Store, StoreStats
from .execute.ledger import Counts
from .measurement.seen import seen_costs
from .model.costs import Costs
from .planners import Plan
from .planners.pages import plan_parts
from .schedule.timeline import Timeline
from .support.units import format_bytes, format_seconds
from .view import save_chart, save_text
from .view.chart import Chart
from .view.chrome_trace import write_trace
from .view.page import Cards, Heading, Paragraph, Part, Picture, Table, document, fragment
from .view.timeline import timeline_chart


@dataclass(frozen=True, slots=True)
class TierUse:
    """What one slow tier took and refused in a sweep.

    Attributes
    ----------
    name : str
    capacity_bytes : int or None
        None if unbounded, or not told.
    peak_stored_bytes : int
        Most it held since it was opened, in whole extents.
    refused_full, refused_busy : int
        States it did not take because no room was left, and because as many
        as may were waiting to be written.
    lost : int
        States written or read in vain.
    notes : tuple of str
        What else it has to say.
    """

    name: str
    capacity_bytes: int | None
    peak_stored_bytes: int
    refused_full: int
    refused_busy: int
    lost: int
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, store: Store, before: StoreStats) -> TierUse:
        """Return what `store` has counted since its counts were `before`."""
        stats = store.stats
        full = stats.refused_full - before.refused_full
        return cls(
            store.name,
            store.capacity_bytes,
            stats.peak_stored_bytes,
            full,
            stats.refused - before.refused - full,
            stats.lost - before.lost,
            tuple(store.notes()),
        )

    def row(self) -> tuple[str, str, str, str, str, str]:
        """Return the line of a table: tier, capacity, peak, refused twice, lost."""
        return (
            self.name,
            "-" if self.capacity_bytes is None else format_bytes(self.capacity_bytes),
            format_bytes(self.peak_stored_bytes),
            f"{self.refused_full}",
            f"{self.refused_busy}",
            f"{self.lost}",
        )


Row: TypeAlias = tuple[str, str, str]
_USE = ("tier", "capacity", "peak", "refused: full", "refused: busy", "lost")


@dataclass(frozen=True, slots=True)
class Report:
    """Predicted beside measured, assumed beside seen.

    Attributes
    ----------
    plan : Plan
        What was predicted; its costs are what was assumed.
    timeline : Timeline
        What happened when, in seconds since the run began.
    counts : Counts
    makespan_s : float
        Seconds in both sweeps; what the caller did between them is left out.
    seen : Costs
        The costs as the run has shown them; of steps that differ the means over them.
    tiers : tuple of TierUse
        What each slow tier took and refused.
    ended : str
        What put an early end to the sweeps, and how far they came; empty if
        they are complete.

    Examples
    --------
    >>> import numpy as np
    >>> from multistage import Reversal
    >>> with Reversal(lambda x, i: x * x, lambda x, a, i: 2 * x * a, 3, memory="2 slots") as run:
    ...     last = run.forward(np.array(2.0))
    ...     gradient = run.reverse(np.array(1.0))
    ...     report = run.report()
    >>> report.n_steps, report.complete, report.counts.forward_steps >= 3
    (3, True, True)
    """

    plan: Plan
    timeline: Timeline = field(repr=False)
    counts: Counts
    makespan_s: float
    seen: Costs
    tiers: tuple[TierUse, ...] = ()
    ended: str = ""

    @classmethod
    def of(
        cls,
        plan: Plan,
        timeline: Timeline,
        counts: Counts,
        tiers: tuple[TierUse, ...] = (),
        ended: str = "",
    ) -> Report:
        """Return the report on sweeps that `plan` predicted."""
        seen = seen_costs(plan.costs.mean(plan.tiers), timeline, counts)
        return cls(plan, timeline, counts, counts.elapsed_s, seen, tiers, ended)

    @property
    def complete(self) -> bool:
        """Whether both sweeps came to their end."""
        return not self.ended

    @property
    def n_steps(self) -> int:
        """Steps reversed."""
        return self.counts.reverse_steps

    @property
    def assumed(self) -> Costs:
        """The costs that the plan rests on; of steps that differ the means over them."""
        return self.plan.costs.mean(self.plan.tiers)

    @property
    def recompute_factor(self) -> float:
        """Forward steps run / n_steps."""
        return self.counts.forward_steps / max(1, self.counts.reverse_steps)

    @property
    def peak_fast_bytes(self) -> int:
        """Bytes of fast memory taken by checkpoints at the peak."""
        return round(self.counts.peak_slots * self.assumed.state_bytes)

    @property
    def prediction_error(self) -> float:
        """Measured over predicted makespan, minus one."""
        return self.makespan_s / self.plan.makespan_s - 1

    def rows(self) -> list[Row]:
        """Return the table's rows: what, predicted, measured."""
        plan, counts, moved = self.plan, self.counts, self.timeline.bytes
        nbytes = self.assumed.state_bytes

        def row(what: str, form: Callable[[Any], str], *values: float | None) -> Row:
            predicted, measured = ("-" if value is None else form(value) for value in values)
            return what, predicted, measured

        factor = self.recompute_factor if self.complete else None
        rows = [
            row("makespan", format_seconds, plan.makespan_s, self.makespan_s),
            row("recompute factor", "{:.3f}".format, plan.recompute_factor, factor),
            row("peak fast memory", format_bytes, plan.peak_bytes, self.peak_fast_bytes),
            row("states written", str, plan.writes, counts.writes),
            row("states read", str, plan.reads, counts.reads),
            row("bytes written", format_bytes, plan.writes * nbytes, moved["write"]),
            row("bytes read", format_bytes, plan.reads * nbytes, moved["read"]),
            row("stalls", format_seconds, plan.stall_s, counts.stall_s),
        ]
        if not self.complete:
            rows[1:1] = [
                row("forward steps", str, plan.forward_steps, counts.forward_steps),
                row("adjoint steps", str, plan.n_steps, counts.reverse_steps),
            ]
        if counts.refused or counts.lost or counts.recovered_steps:
            rows += [
                ("offers refused", "", f"{counts.refused}"),
                row("checkpoints lost", str, 0, counts.lost),
                row("steps recovered", str, 0, counts.recovered_steps),
            ]
        return rows

    def cost_rows(self) -> list[Row]:
        """Return the rows on costs: what, assumed, seen."""
        one, other, moved = self.assumed, self.seen, self.timeline.bytes
        rows = [
            ("forward step (T_A)", one.forward_step_s, other.forward_step_s, True),
            ("adjoint step (T_B)", one.turn_s, other.turn_s, bool(self.counts.reverse_steps)),
        ]
        if one.tier is not None and other.tier is not None:
            rows += [
                (
                    "write of a state (T_W)",
                    one.tier.write_s,
                    other.tier.write_s,
                    moved["write"] > 0,
                ),
                ("read of a state (T_R)", one.tier.read_s, other.tier.read_s, moved["read"] > 0),
            ]
        return [
            (what, format_seconds(assumed_s), format_seconds(seen_s) if was else "-")
            for what, assumed_s, seen_s, was in rows
        ]

    def __str__(self) -> str:
        tables: list[tuple[Sequence[tuple[str, ...]], tuple[str, ...]]] = [
            (self.rows(), (self.plan.planner, "predicted", "measured")),
            (self.cost_rows(), ("costs", "assumed", "seen")),
        ]
        if self.tiers:
            tables.append(([use.row() for use in self.tiers], _USE))
        parts = [
            tabulate(rows, headers=headers, disable_numparse=True, stralign="right")
            for rows, headers in tables
        ]
        parts += self._notes()
        return "\n\n".join(parts)

    def _notes(self) -> list[str]:
        notes = [f"{use.name}: {note}" for use in self.tiers for note in use.notes]
        if self.counts.late:
            notes.append(f"{self.counts.late[:1].upper()}{self.counts.late[1:]}.")
        return [f"{self.ended[:1].upper()}{self.ended[1:]}.", *notes] if self.ended else notes

    def to_dict(self) -> dict[str, object]:
        """Return the report as plain data, for JSON."""
        plan = self.plan
        return {
            "format": "multistage-report-1",
            "planner": plan.planner,
            "n_steps": plan.n_steps,
            "memory_bytes": plan.memory_bytes,
            "slots": None if plan.memory_bytes is None else plan.slots,
            "predicted": {
                "makespan_s": plan.makespan_s,
                "lower_bound_s": plan.lower_bound_s,
                "recompute_factor": plan.recompute_factor,
                "peak_fast_bytes": plan.peak_bytes,
                "writes": plan.writes,
                "reads": plan.reads,
                "stall_s": plan.stall_s,
            },
            "measured": {
                "makespan_s": self.makespan_s,
                "recompute_factor": self.recompute_factor,
                "peak_fast_bytes": self.peak_fast_bytes,
                "bytes_written": self.timeline.bytes["write"],
                "bytes_read": self.timeline.bytes["read"],
                **asdict(self.counts),
            },
            "assumed": self.assumed.to_dict(),
            "seen": self.seen.to_dict(),
            "tiers": [asdict(use) for use in self.tiers],
            "ended": self.ended,
        }

    def to_json(self) -> str:
        """Return the report as JSON text."""
        return json.dumps(self.to_dict(), indent=2)

    def _chart(self, title: str = "") -> Chart:
        limits = self.plan.limits()
        limits |= {use.name: use.capacity_bytes for use in self.tiers}
        return timeline_chart(self.timeline, title, limits)

    def picture(self, path: str | Path) -> None:
        """Draw the run's timeline to a file; the suffix chooses the format.

        Raises
        ------
        ArgumentError
            For another suffix than `.svg`, `.png`, `.pdf`, `.ps` and `.eps`; if CairoSVG,
            which all but `.svg` need, is not installed.
        """
        title = f"{self.plan.planner}: {self.n_steps} steps, {format_seconds(self.makespan_s)}"
        save_chart(self._chart(title), path)

    def save(self, path: str | Path) -> None:
        """Write the report to a file: `.html`, one page that needs no network, or `.json`.

        Raises
        ------
        ArgumentError
            For another suffix.
        """
        if Path(path).suffix.lower() == ".html":
            title = f"Report: {self.plan.n_steps} steps by {self.plan.planner}"
            save_text(path, html=document(title, self._parts()))
            return
        save_text(path, html="", json=self.to_json() + "\n")

    def _tables(self) -> list[tuple[str, Table]]:
        found = [
            ("Predicted and measured", Table(("", "predicted", "measured"), self.rows())),
            ("Costs", Table(("", "assumed", "seen"), self.cost_rows())),
        ]
        if self.tiers:
            found.append(("Slow tiers", Table(_USE, [use.row() for use in self.tiers])))
        return found

    def _parts(self) -> list[Part]:
        counts, plan = self.counts, self.plan
        more = f"predicted {format_seconds(plan.makespan_s)}"
        if self.complete:
            more += f", {100 * self.prediction_error:+.1f} %"
        entries = [
            ("makespan", format_seconds(self.makespan_s), more),
            (
                "recompute factor",
                f"{self.recompute_factor:.3f}" if self.complete else "-",
                f"predicted {plan.recompute_factor:.3f}",
            ),
            ("peak fast memory", format_bytes(self.peak_fast_bytes), f"of {plan.room}"),
            ("states written, read", f"{counts.writes}, {counts.reads}", "to and from slow tiers"),
            (
                "stalls",
                format_seconds(counts.stall_s),
                f"{100 * counts.stall_s / max(self.makespan_s, 1e-12):.1f} % of the makespan",
            ),
        ]
        parts: list[Part] = [] if self.complete else [Paragraph(self._notes()[0], "alert")]
        parts.append(Cards(entries))
        parts += [Heading("Timeline, measured"), Picture(self._chart())]
        for name, table in self._tables():
            parts += [Heading(name), table]
        notes = self._notes()[0 if self.complete else 1 :]
        parts.append(Paragraph("\n".join(notes)))
        return [*parts, Heading("The plan"), *plan_parts(plan)]

    def _repr_html_(self) -> str:
        tables = [table for _, table in self._tables()]
        notes = Paragraph("\n".join(self._notes()))
        return fragment([notes, *tables, Picture(self._chart())])

    def trace(self, path: str | Path) -> None:
        """Write the run's timeline as a Chrome trace, for ui.perfetto.dev."""
        write_trace(self.timeline, path)
