"""Figures 1 and 2 of Kukreja et al. 2018, and their performance model, in virtual time.

Figures 1 and 2: one short run, conventional, by Revolve, by the paper's rule
and by our streaming, as lanes of compute and transfers and as memory over
time.  The model: makespans over a grid of lengths, slots and T_T / T_A,
predicted by the paper's formulas and run action by action in the simulator.

T_A = 1, T_B = 2, reads as fast as writes.  Nothing is measured in seconds.

    python -m benchmarks.async_model [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import statistics
from pathlib import Path

from benchmarks._common import finish, options
from benchmarks._published import PUBLISHED, corrected_factor, printed_factor
from multistage import Costs, Tier, simulate
from multistage.planners.single.binomial import nu
from multistage.schedule.simulation import Simulation
from multistage.view.chart import COLORS

FORWARD_S, TURN_S = 1.0, 2.0
# The short run: long enough for the paper's rule to pay, short enough to be seen.
STEPS, SLOTS, RHO = 100, 8, 4.0
RUNS = ("store-all", "revolve", "interval", "streaming")
LABELS = {"store-all": "conventional", "interval": "asynchronous (paper)"}
GRID_SLOTS = (10, 30, 100)
GRID_RHO = (2.0, 8.0, 64.0)


def costs_at(rho: float) -> Costs:
    """Return costs with T_T / T_A = `rho`."""
    write_s = rho * FORWARD_S
    return Costs(FORWARD_S, TURN_S, tiers=(Tier("slow", write_s, write_s),))


def short_runs() -> dict[str, Simulation]:
    """Return the runs of figures 1 and 2, simulated."""
    costs = costs_at(RHO)
    runs = {}
    for name in RUNS:
        slots = STEPS if name == "store-all" else SLOTS
        made = PUBLISHED[name](costs, slots, STEPS)
        runs[name] = simulate(made.schedule(), STEPS, costs, slots)
    return runs


def grid(depths: tuple[int, ...]) -> list[dict[str, float]]:
    """Return one row per setting: makespans by the paper's formulas, and simulated."""
    rows = []
    for slots in GRID_SLOTS:
        for rho in GRID_RHO:
            costs, interval = costs_at(rho), int(rho)
            for n in depths:
                if n <= slots or n <= 2 * interval:
                    continue  # kept whole, or the rule falls back to Revolve
                made = {name: PUBLISHED[name](costs, slots, n) for name in RUNS[1:]}
                if n <= 2_000:  # what longer ones take is known by their steady state
                    for name, plan in made.items():
                        run = simulate(plan.schedule(), n, costs, slots)
                        assert abs(run.makespan_s / plan.makespan_s - 1) < 1e-9, (name, n)
                rows.append(
                    {
                        "n": n,
                        "s": slots,
                        "rho": rho,
                        "t_revolve": (nu(n, slots) + n * TURN_S) * FORWARD_S,
                        "t_async": n * (printed_factor(interval, slots) * FORWARD_S + TURN_S),
                        "corrected": n * (corrected_factor(interval, slots) * FORWARD_S + TURN_S),
                        **{name: plan.makespan_s for name, plan in made.items()},
                    }
                )
    return rows


def streamed_whole() -> tuple[float, float]:
    """Return stall over makespan, and the recompute factor, where T_T <= T_A."""
    worst, factor = 0.0, 0.0
    for rho in (0.25, 0.5, 1.0):
        costs = costs_at(rho)
        made = PUBLISHED["interval"](costs, SLOTS, 1_000)
        run = simulate(made.schedule(), 1_000, costs, SLOTS)
        worst = max(worst, run.stall_s / run.makespan_s)
        factor = max(factor, run.forward_steps / 1_000)
    return worst, factor


def _ratios(runs: dict[str, Simulation], rows: list[dict[str, float]]) -> dict[str, float]:
    long = max(row["n"] for row in rows)
    short = min(row["n"] for row in rows)
    at = {(row["n"], row["s"], row["rho"]): row for row in rows}

    def growth(name: str) -> float:
        """Return the largest growth of the time per step over the last decade of lengths."""
        return max(
            (row[name] / n) / (at[n // 10, s, rho][name] / (n // 10))
            for (n, s, rho), row in at.items()
            if n == long and (n // 10, s, rho) in at
        )

    stall, factor = streamed_whole()
    conventional = runs["store-all"].makespan_s
    return {
        "peak_conventional": runs["store-all"].peak_slots,
        "peak_revolve": runs["revolve"].peak_slots,
        "peak_async": runs["interval"].peak_slots,
        "peak_streaming": runs["streaming"].peak_slots,
        "slots": float(SLOTS),
        "revolve_over_conventional": runs["revolve"].makespan_s / conventional,
        "async_over_conventional": runs["interval"].makespan_s / conventional,
        "streaming_over_conventional": runs["streaming"].makespan_s / conventional,
        "revolve_over_async": runs["revolve"].makespan_s / runs["interval"].makespan_s,
        "t_revolve_error": max(abs(row["t_revolve"] / row["revolve"] - 1) for row in rows),
        "t_async_error": statistics.mean(
            1 - row["t_async"] / row["interval"] for row in rows if row["n"] == long
        ),
        "corrected_error": max(
            abs(row["corrected"] / row["interval"] - 1) for row in rows if row["n"] == long
        ),
        "async_growth": growth("interval"),
        "streaming_growth": growth("streaming"),
        "revolve_growth": growth("revolve"),
        "async_slower_share": statistics.mean(row["interval"] > row["revolve"] for row in rows),
        "async_over_revolve_worst": max(row["interval"] / row["revolve"] for row in rows),
        "async_over_revolve_long": max(
            row["interval"] / row["revolve"] for row in rows if row["n"] == long
        ),
        "streaming_over_revolve_worst": max(row["streaming"] / row["revolve"] for row in rows),
        "streamed_whole_stall": stall,
        "streamed_whole_factor": factor,
        "settings": float(len(rows)),
        "shortest": short,
        "longest": long,
    }


def main() -> None:
    """Run the benchmark."""
    args = options(__doc__).parse_args()
    depths = (100, 1_000, 10_000, 100_000) if args.quick else _depths()
    runs, rows = short_runs(), grid(depths)
    for row in rows:
        assert row["streaming"] <= row["revolve"] * (1 + 1e-9), row
    short = {
        name: {"makespan_s": run.makespan_s, "forward_steps": run.forward_steps}
        for name, run in runs.items()
    }
    finish(args, "async_model", {"short": short, "grid": rows}, _ratios(runs, rows))
    if args.plot:
        _plot(runs, rows, args.plot)


def _depths() -> tuple[int, ...]:
    return tuple(round(10 ** (k / 2)) for k in range(4, 13))


def _plot(runs: dict[str, Simulation], rows: list[dict[str, float]], path: Path) -> None:
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    figure = Figure(figsize=(11, 9.5), layout="constrained")
    top, bottom = figure.subfigures(2, 1, height_ratios=(1.5, 1))
    panels = top.subplots(len(RUNS) + 1, 1, sharex=True, height_ratios=(*([1] * len(RUNS)), 1.5))
    end = max(run.makespan_s for run in runs.values())
    for axes, (name, run) in zip(panels, runs.items(), strict=False):
        for level, lane in enumerate(("read", "write", "compute")):
            for span in run.timeline.lanes[lane]:  # type: ignore[index]
                width = span.stop_s - span.start_s
                axes.broken_barh(
                    [(span.start_s, width)], (level - 0.4, 0.8), color=COLORS[span.kind]
                )
        axes.set_yticks(range(3), ["read", "write", "compute"], fontsize=7)
        axes.set_ylim(-0.6, 2.6)
        axes.set_title(f"{LABELS.get(name, name)}: {run.makespan_s:g} T_A", fontsize=9, loc="left")
    styles = {"store-all": "C7", "revolve": "k", "interval": "C1", "streaming": "C0"}
    for name, run in runs.items():
        samples = run.timeline.memory["fast"]
        times = [0.0, *(t for t, _ in samples), run.makespan_s]
        held = [0.0, *(m for _, m in samples), 0.0]
        panels[-1].step(
            times, held, where="post", color=styles[name], lw=1.2, label=LABELS.get(name, name)
        )
    panels[-1].axhline(SLOTS, color="C3", ls=":", lw=1)
    panels[-1].text(end, 1.15 * SLOTS, f"limit: {SLOTS} states", ha="right", fontsize=8, color="C3")
    panels[-1].set_yscale("log")
    panels[-1].set_ylabel("states in\nfast memory", fontsize=8)
    panels[-1].set_xlabel("virtual time (T_A)")
    panels[-1].legend(fontsize=8, loc="upper right", ncols=2)
    handles = [Patch(color=COLORS[k], label=k) for k in ("forward", "reverse", "stall")]
    panels[0].legend(handles=handles, fontsize=7, loc="center right")
    axes = bottom.subplots(1, len(GRID_RHO), sharey=True)
    for panel, rho in zip(axes, GRID_RHO, strict=True):
        chosen = [row for row in rows if row["rho"] == rho and row["s"] == 30]
        n = [row["n"] for row in chosen]
        for key, style, label in (
            ("revolve", "k-", "Revolve"),
            ("t_async", "C1:", "T_async as printed"),
            ("interval", "C1--", "the paper's rule, simulated"),
            ("streaming", "C0-", "streaming, simulated"),
        ):
            panel.plot(n, [row[key] / row["n"] for row in chosen], style, label=label)
        panel.set_xscale("log")
        panel.set_title(f"T_T = {rho:g} T_A, s = 30", fontsize=9)
        panel.set_xlabel("number of steps n")
        panel.grid(alpha=0.3)
    axes[0].set_ylabel("makespan per step (T_A)")
    axes[0].legend(fontsize=7)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
