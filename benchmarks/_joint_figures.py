"""The figures that `benchmarks.joint_planner` judges the planner by, from its rows."""

from __future__ import annotations

import itertools
import math
import statistics
from typing import Any


def _worst_slower(rows: list[dict[str, Any]], along: str) -> float:
    """Return how much slower a plan is at most than one with less memory, or a slower tier."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    other = "rho" if along == "memory" else "memory"
    for row in rows:
        groups.setdefault((row["chain"], row["stages"], row[other]), []).append(row)
    worst = 0.0
    for group in groups.values():
        group.sort(key=lambda row: row[along], reverse=along == "rho")  # the better, the later
        for less, more in itertools.pairwise(group):
            if math.isfinite(less["makespan_s"]):
                worst = max(worst, more["makespan_s"] / less["makespan_s"] - 1)
    return worst


def _worst_nearby(near: list[dict[str, Any]], along: str) -> float:
    rows = [_slower(row) for row in near if row["along"] == along]
    return max((slower for row in rows for slower in row), default=0.0)


def _slower(row: dict[str, Any]) -> list[float]:
    """Return for each neighbour how much slower it is than the best with less."""
    found = row["makespans_s"]
    best = list(itertools.accumulate(found, min))
    return [b / a - 1 for a, b in zip(best, found[1:], strict=False) if math.isfinite(a)]


def ratios_of(
    rows: list[dict[str, Any]],
    near: list[dict[str, Any]],
    tiny: list[dict[str, float]],
    given_up: int,
) -> dict[str, float]:
    """Return the figures that the planner is judged by."""
    for row in rows:
        row["best_s"] = min(row["no_tier_s"], row["offload_s"], row["periodic_s"])
    fitting = [row for row in rows if math.isfinite(row["makespan_s"])]
    gaps = [row["makespan_s"] / row["bound_s"] - 1 for row in fitting]
    tight = [row for row in fitting if 0.5 <= row["rho"] <= 5 and row["memory"] <= 0.4]
    gains = [r["best_s"] / r["makespan_s"] - 1 for r in tight if math.isfinite(r["best_s"])]
    exact = [row["makespan_s"] / row["exact_s"] - 1 for row in tiny]
    below = [row for row in fitting if row["makespan_s"] < row["bound_s"]]
    below += [row for row in tiny if row["exact_s"] < row["bound_s"]]
    ratios = {
        "gap_mean": statistics.mean(gaps),
        "gap_worst": max(gaps),
    }
    for other in ("no_tier", "offload", "periodic"):
        name = {"offload": "offload_all"}.get(other, other)
        ratios[f"worst_over_{name}"] = max(r["makespan_s"] / r[f"{other}_s"] for r in fitting)
    over = [(run, row["no_tier_s"]) for row in rows for run in row.get("late", ())]
    if over:
        ratios |= {
            "late_over_no_tier_mean": statistics.mean(r["makespan_s"] / s for r, s in over),
            "late_over_no_tier_worst": max(r["makespan_s"] / s for r, s in over),
            "waiting_over_no_tier_mean": statistics.mean(r["waiting_s"] / s for r, s in over),
        }
    slower = [value for row in near for value in _slower(row)]
    ratios |= {
        "gain_over_best_mean": statistics.mean(gains) if gains else math.nan,
        "infeasible": float(
            sum(math.isinf(r["makespan_s"]) and math.isfinite(r["best_s"]) for r in rows)
        ),
        "nothing_fits": float(len(rows) - len(fitting)),
        "exact_gap_mean": statistics.mean(exact) if exact else math.nan,
        "exact_gap_worst": max(exact, default=math.nan),
        "exact_instances": float(len(tiny)),
        "exact_given_up": float(given_up),
        "bound_violations": float(len(below)),
        "worst_slower_with_more_memory": max(
            _worst_slower(rows, "memory"), _worst_nearby(near, "memory")
        ),
        "worst_slower_with_faster_tier": max(
            _worst_slower(rows, "rho"), _worst_nearby(near, "rho")
        ),
        "neighbours": float(len(slower)),
        "slower_neighbours": float(sum(value > 1e-12 for value in slower)),
        "replay_off": max(row["replay_off"] for row in rows),
        "replays_over_limit": float(sum(row["over_limit"] for row in rows)),
        "instances": float(len(rows)),
    }
    return ratios
