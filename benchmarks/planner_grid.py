"""How far the planners are from the lower bound, over a grid of problems in virtual time.

Settings: n, s, T_W / T_A, T_R / T_W, T_B / T_A, with and without jitter.  The
bound is the larger of the closed form and the priced bound.  Regions: rho =
T_W / T_A at most s - 2 (write-bound, or read-bound where reading back keeps
the reversal waiting), up to 2 s, and beyond; `uniform_beyond_gap` is the mean
wherever rho > s.  Against an exact search for n = 8 to 12.

    python -m benchmarks.planner_grid [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import statistics
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks._common import finish, from_tests, options
from benchmarks._priced_bound import priced_bound
from benchmarks._published import PUBLISHED
from multistage import PLANNERS, Costs, Jitter, Tier, simulate
from multistage.errors import ArgumentError

SLOTS = (3, 5, 10, 20, 50)
WRITES = (1.01, 1.5, 2.5, 4.0, 8.0, 20.0, 50.0)
READS = (0.5, 1.0, 2.0)
TURNS = (1.0, 2.0, 3.0)
COMPARED = ("streaming", "interval", "revolve")
JITTERS = {
    "lognormal 0.3": Jitter(sigma=0.3),
    "spikes 5 % x 10": Jitter(spike_probability=0.05, spike_factor=10.0),
}
EXACT_STATES = 3_000_000  # the exact search gives up beyond
REGIONS = ("write_bound", "read_bound", "middle", "beyond")


def region(slots: int, write: float, read: float, turn: float) -> str:
    """Return the region a setting lies in; times in units of T_A."""
    if write > 2 * slots:
        return "beyond"
    if write > slots - 2:
        return "middle"
    return "read_bound" if read > write * (1 + turn) - 1 else "write_bound"


def grid(depths: tuple[int, ...], thin: int) -> list[dict[str, Any]]:
    """Return one row per setting: bound, makespans, makespans under jitter."""
    settings = [
        (n, s, turn, write, k)
        for n, s, turn, write, k in product(depths, SLOTS, TURNS, WRITES, READS)
        if s < n / 2
    ]
    rows = []
    for number, (n, s, turn, write, k) in enumerate(settings):
        if number % thin:
            continue
        read = k * write
        costs = Costs(1.0, turn, tiers=(Tier("slow", write, read),))
        plans = {name: PUBLISHED[name](costs, s, n) for name in COMPARED}
        row: dict[str, Any] = {
            "n": n,
            "s": s,
            "T_B": turn,
            "T_W": write,
            "T_R": read,
            "region": region(s, write, read, turn),
            "bound": priced_bound(costs, s, n),
            "makespan": {name: made.makespan_s for name, made in plans.items()},
            "jittered": {},
        }
        for name, jitter in JITTERS.items():
            row["jittered"][name] = {
                planner: simulate(
                    made.schedule(), n, costs, s, jitter=jitter, seed=number, checked=False
                ).makespan_s
                for planner, made in plans.items()
            }
        rows.append(row)
    return rows


def against_exact(thin: int) -> tuple[list[dict[str, float]], list[str]]:
    """Return streaming's and the optimal makespan of short problems with whole times.

    With it the problems whose search has too many states.
    """
    oracle = from_tests("oracles.steps_exact")
    rows, given_up = [], []
    settings = product(range(8, 13), (2, 3, 4), (1, 2, 3), (1, 2, 3, 5, 8), (0.5, 1, 2))
    for number, (n, s, turn, write, k) in enumerate(settings):
        read = int(k * write)
        if number % thin or read < 1:
            continue
        costs = Costs(1.0, float(turn), tiers=(Tier("slow", float(write), float(read)),))
        try:
            exact = oracle.exact_makespan(costs, s, n, limit=EXACT_STATES)
        except ArgumentError:
            given_up.append(f"exact: n={n}, s={s}, T_B={turn}, T_W={write}, T_R={read}")
            continue
        rows.append(
            {
                "n": n,
                "s": s,
                "T_B": turn,
                "T_W": write,
                "T_R": read,
                "exact": exact,
                "streaming": PLANNERS["streaming"](costs, s, n).makespan_s,
                "revolve": PLANNERS["revolve"](costs, s, n).makespan_s,
                "interval": PUBLISHED["interval"](costs, s, n).makespan_s,
            }
        )
    return rows, given_up


def main() -> None:
    """Run the benchmark."""
    args = options(__doc__).parse_args()
    rows = grid((100,) if args.quick else (100, 200, 500), 5 if args.quick else 1)
    short, given_up = against_exact(20 if args.quick else 1)
    gaps: dict[str, dict[str, list[float]]] = {name: {r: [] for r in REGIONS} for name in COMPARED}
    for row in rows:
        for name in COMPARED:
            gap = row["makespan"][name] / row["bound"] - 1
            assert gap > -1e-9, f"{name} is below the lower bound: {row}"
            gaps[name][row["region"]].append(gap)
    for name in COMPARED:
        for where in REGIONS:
            values = gaps[name][where]
            if values:
                print(
                    f"{name:<10}{where:<12}{len(values):>4} settings, gap mean "
                    f"{100 * statistics.mean(values):.2f} %, largest {100 * max(values):.2f} %"
                )

    def worst(other: str) -> float:
        return max(row["makespan"]["streaming"] / row["makespan"][other] for row in rows)

    def jittered(name: str, other: str) -> float:
        pairs = (row["jittered"][name] for row in rows)
        return statistics.mean(pair["streaming"] / pair[other] for pair in pairs)

    ratios = {f"gap_{r}": statistics.mean(gaps["streaming"][r]) for r in REGIONS}
    ratios["uniform_beyond_gap"] = statistics.mean(
        row["makespan"]["streaming"] / row["bound"] - 1 for row in rows if row["T_W"] > row["s"]
    )
    ratios |= {
        "worst_over_revolve": worst("revolve"),
        "worst_over_interval": worst("interval"),
        "exact_gap": statistics.mean(row["streaming"] / row["exact"] - 1 for row in short),
        "exact_gap_revolve": statistics.mean(row["revolve"] / row["exact"] - 1 for row in short),
        "exact_gap_interval": statistics.mean(row["interval"] / row["exact"] - 1 for row in short),
        "lognormal_over_interval": jittered("lognormal 0.3", "interval"),
        "spikes_over_interval": jittered("spikes 5 % x 10", "interval"),
        "settings": float(len(rows)),
        "exact_instances": float(len(short)),
        "exact_given_up": float(len(given_up)),
    }
    finish(args, "planner_grid", {"grid": rows, "exact": short}, ratios, given_up)
    if args.plot:
        _plot(gaps, args.plot)


def _plot(gaps: dict[str, dict[str, list[float]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    panels = figure.subplots(1, len(REGIONS))
    for axes, where in zip(panels, REGIONS, strict=True):
        values = [[100 * gap for gap in gaps[name][where]] for name in COMPARED]
        axes.boxplot(values, tick_labels=COMPARED, showmeans=True)
        axes.set_title(f"{where.replace('_', ' ')} ({len(values[0])})")
        axes.tick_params(axis="x", labelrotation=30)
        axes.set_yscale("symlog", linthresh=1)
        axes.grid(alpha=0.3, axis="y")
    panels[0].set_ylabel("above the lower bound (%)")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
