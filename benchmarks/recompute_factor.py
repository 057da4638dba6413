"""Recompute factors over the number of steps: figure 3 of Kukreja et al. 2018, s = 100.

Revolve; the paper's interval rule for I = 8, 64, 1024, as printed (intervals
only) and corrected (forward sweep included); our streaming at T_W / T_A = I.
Everything is computed from the planners, nothing is measured in seconds.

    python -m benchmarks.recompute_factor [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

from pathlib import Path

from benchmarks._common import finish, options
from benchmarks._published import PUBLISHED, corrected_factor, printed_factor
from multistage import Costs, Tier

SLOTS = 100
INTERVALS = (8, 64, 1024)


def costs_at(interval: int) -> Costs:
    """Return costs with T_W / T_A = `interval`, reads as fast as writes, T_B = 2 T_A."""
    return Costs(1.0, 2.0, tiers=(Tier("slow", float(interval), float(interval)),))


def factor(planner: str, costs: Costs, n_steps: int) -> float:
    """Return the recompute factor a planner predicts."""
    return PUBLISHED[planner](costs, SLOTS, n_steps).recompute_factor


def crossing(interval: int) -> int:
    """Return the fewest steps from which the corrected rule needs no more than Revolve."""
    low, high = 1, 10**7
    bare = costs_at(interval)
    while low < high:
        middle = (low + high) // 2
        if factor("revolve", bare, middle) >= corrected_factor(interval, SLOTS):
            high = middle
        else:
            low = middle + 1
    return low


def main() -> None:
    """Run the benchmark."""
    args = options(__doc__).parse_args()
    exponents = (2, 3, 4, 6) if args.quick else [k / 4 for k in range(8, 25)]
    depths = sorted({round(10**k) for k in exponents})
    curves: dict[str, list[float]] = {
        "revolve": [factor("revolve", costs_at(8), n) for n in depths]
    }
    for interval in INTERVALS:
        costs = costs_at(interval)
        curves[f"printed {interval}"] = [printed_factor(interval, SLOTS)] * len(depths)
        curves[f"interval {interval}"] = [factor("interval", costs, n) for n in depths]
        curves[f"streaming {interval}"] = [factor("streaming", costs, n) for n in depths]
    million = len(depths) - 1
    assert depths[million] == 10**6
    ratios = {
        "revolve_1e4": factor("revolve", costs_at(8), 10**4),
        **{f"interval_{i}": curves[f"interval {i}"][million] for i in INTERVALS},
        **{f"streaming_{i}": curves[f"streaming {i}"][million] for i in INTERVALS},
        **{f"printed_{i}": curves[f"printed {i}"][million] for i in INTERVALS},
        **{f"pays_from_{i}": float(crossing(i)) for i in INTERVALS},
    }
    # Long runs tend to the closed form of the corrected model.
    for interval in INTERVALS:
        expected = corrected_factor(interval, SLOTS)
        assert abs(ratios[f"interval_{interval}"] / expected - 1) < 5e-3, interval
    finish(args, "recompute_factor", {"n_steps": depths, "factors": curves}, ratios)
    if args.plot:
        _plot(depths, curves, args.plot)


def _plot(depths: list[int], curves: dict[str, list[float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot(depths, curves["revolve"], color="black", lw=2, label="Revolve")
    for color, interval in zip(("C0", "C1", "C2"), INTERVALS, strict=True):
        for name, style in (("printed", ":"), ("interval", "--"), ("streaming", "-")):
            label = {
                "printed": f"I = {interval}, as printed (no forward sweep)",
                "interval": f"I = {interval}, corrected",
                "streaming": f"streaming, T_W/T_A = {interval}",
            }[name]
            axes.plot(depths, curves[f"{name} {interval}"], style, color=color, label=label)
    axes.set_xscale("log")
    axes.set_xlabel("number of steps n")
    axes.set_ylabel("recompute factor (forward steps / n)")
    axes.set_title(f"Recompute factors with s = {SLOTS} slots")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8, ncols=2, loc="upper left")
    axes.set_ylim(0.9, 5.2)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
