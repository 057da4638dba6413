"""Peak memory and time over depth: figures 4 and 5 of Kukreja et al. 2018, with the NumPy LSTM.

Every point is a fresh process.  All methods have the same fast memory, 32
states, except store-all.  A child measures the costs, plans, then times one
forward and reverse sweep; peak memory is the high-water mark of that sweep
alone, beyond what the process held before it.

    python -m benchmarks.lstm_depth [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks._common import child, finish, held_kib, options, reset_peak

SLOTS = 32
METHODS = ("store-all", "revolve", "pyrevolve-memory", "pyrevolve-disk", "interval", "streaming")
SIZES = {"small": (100, 1), "large": (256, 32)}
DEPTHS = {"small": (1_000, 4_000, 16_000, 64_000), "large": (1_000, 4_000, 16_000)}
QUICK_DEPTHS = {"small": (1_000, 4_000, 16_000), "large": (250, 1_000)}
# One BLAS thread.  The allocator is left as it is: told to give every block back
# at once, steps would spend more time on page faults than on numbers, and peaks
# differ by 2 % at most.
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def _run_child(task: dict[str, Any]) -> dict[str, Any]:
    import numpy as np

    from multistage.demos.lstm import build

    steps = task["steps"]
    model = build(steps, task["width"], task["batch"], np.float64, task["seed"])
    _warm_up(model, min(steps, 300))
    runs = _pyrevolve if task["method"].startswith("pyrevolve") else _ours
    with tempfile.TemporaryDirectory(prefix="lstm-depth-", dir=task["scratch"]) as folder:
        result = runs(model, steps, task["method"], folder)
    digest = hashlib.sha256()
    for name in sorted(model.gradients):
        digest.update(model.gradients[name].tobytes())
    return {**result, "gradient": digest.hexdigest(), "loss": model.loss}


def _warm_up(model: Any, steps: int) -> None:
    """Run some steps and turns: memory that was never used is slow at first."""
    state, adjoint = model.start(), model.start()
    for i in range(steps):
        adjoint = model.adjoint_step(state, adjoint, i)
        state = model.step(state, i)
    model.clear()


def _ours(model: Any, steps: int, method: str, folder: str) -> dict[str, Any]:
    from multistage import Reversal, measure
    from multistage.backends import FileStore

    slow = method in ("interval", "streaming")
    store = FileStore(folder) if slow else None
    costs = measure(model.chain(), model.start(), steps, store, adjoint=model.start(), seconds=1.5)
    model.clear()
    slots = steps if method == "store-all" else SLOTS
    with Reversal(
        model.chain(),
        n_steps=steps,
        memory=f"{slots} slots",
        tiers=store,
        planner=method,
        costs=costs,
    ) as run:
        run.prepare(model.start())
        reset_peak()
        before = held_kib("VmRSS")
        began = time.perf_counter()
        run.forward(model.start())
        run.reverse(model.start())
        seconds = time.perf_counter() - began
        peak = held_kib("VmHWM")
        report = run.report()
    return {
        "seconds": seconds,
        "peak_kib": peak,
        "before_kib": before,
        "predicted_s": report.plan.makespan_s,
        "measured_s": report.makespan_s,
        "recompute_factor": report.recompute_factor,
        "stall_s": report.counts.stall_s,
    }


def _pyrevolve(model: Any, steps: int, method: str, folder: str) -> dict[str, Any]:
    import os

    import numpy as np
    import pyrevolve

    h, c = model.start()

    class State(pyrevolve.Checkpoint):
        dtype = h.dtype
        size = h.size + c.size

        def get_data(self, timestep: int) -> list[Any]:
            return [h, c]

        def get_data_location(self, timestep: int) -> list[Any]:
            return [h, c]

    class Forward(pyrevolve.Operator):
        tape: Any = None

        def apply(self, t_start: int, t_end: int, **_: Any) -> None:
            state = (h.copy(), c.copy())
            for i in range(t_start, t_end - 1):
                state = model.step(state, i)
            # pyrevolve runs the forward operator over a step before its adjoint.
            state, self.tape = model.tape_step(state, t_end - 1)
            h[...], c[...] = state

    forward = Forward()

    class Backward(pyrevolve.Operator):
        adjoint = model.start()

        def apply(self, t_start: int, t_end: int, **_: Any) -> None:
            self.adjoint = model.adjoint_of_tape(forward.tape, self.adjoint, t_start)

    kind = pyrevolve.MemoryRevolver if method == "pyrevolve-memory" else pyrevolve.DiskRevolver
    model.clear()
    os.chdir(folder)
    if kind is pyrevolve.DiskRevolver:
        revolver = kind(State(), forward, Backward(), SLOTS, steps, filedir=folder)
    else:
        revolver = kind(State(), forward, Backward(), SLOTS, steps)
    # Its constructor, which runs through the whole schedule once, is not timed,
    # as our planning is not.
    reset_peak()
    before = held_kib("VmRSS")
    began = time.perf_counter()
    revolver.apply_forward()
    revolver.apply_reverse()
    seconds = time.perf_counter() - began
    assert np.isfinite(model.loss)
    return {"seconds": seconds, "peak_kib": held_kib("VmHWM"), "before_kib": before}


def _methods() -> list[str]:
    """Return the methods that can be run here."""
    there = importlib.util.find_spec("pyrevolve") is not None
    return [method for method in METHODS if there or not method.startswith("pyrevolve")]


def _points(quick: bool) -> list[tuple[str, int, str]]:
    depths = QUICK_DEPTHS if quick else DEPTHS
    return [(size, n, method) for size in SIZES for n in depths[size] for method in _methods()]


def _repeats(size: str, steps: int, quick: bool) -> int:
    if quick:
        return 1
    return {"small": 3, "large": 2}[size] if steps < 16_000 else {"small": 2, "large": 1}[size]


def main() -> None:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--sizes", default="small,large", help="which LSTMs (small,large)")
    args = parser.parse_args()
    if args.child:
        print(json.dumps(_run_child(json.loads(args.child))))
        return
    samples: dict[str, dict[int, dict[str, list[dict[str, Any]]]]] = {}
    gradients: dict[tuple[str, int], str] = {}
    sizes = args.sizes.split(",")
    points = [point for point in _points(args.quick) if point[0] in sizes]
    with tempfile.TemporaryDirectory(prefix="lstm-depth-", dir=".") as scratch:
        for turn in range(3):
            for size, steps, method in points:
                if turn >= _repeats(size, steps, args.quick):
                    continue
                width, batch = SIZES[size]
                task = {
                    "steps": steps,
                    "width": width,
                    "batch": batch,
                    "method": method,
                    "seed": args.seed,
                    "scratch": str(Path(scratch).resolve()),
                }
                result = child("benchmarks.lstm_depth", task, ENVIRONMENT)
                there = samples.setdefault(size, {}).setdefault(steps, {})
                known = gradients.setdefault((size, steps), result["gradient"])
                assert result["gradient"] == known, f"{size} {steps}: gradients differ"
                there.setdefault(method, []).append(result)
                per_step = 1e6 * result["seconds"] / steps
                print(
                    f"{size:<6}{steps:>7} {method:<17}{per_step:>9.1f} us/step"
                    f"{result['peak_kib'] / 1024:>9.1f} MiB",
                    flush=True,
                )
    ratios = _ratios(samples, args.quick)
    left_out = [f"the {size} LSTM" for size in SIZES if size not in sizes]
    left_out += [] if len(_methods()) == len(METHODS) else ["pyrevolve: not installed"]
    left_out += [] if args.quick else ["depths between those named", "repeats of large at 16 000"]
    finish(args, "lstm_depth", samples, ratios, left_out)
    if args.plot:
        _plot(samples, args.plot)


def _seconds(results: list[dict[str, Any]]) -> float:
    return min(r["seconds"] for r in results)


def _peak(results: list[dict[str, Any]]) -> float:
    return statistics.median(r["peak_kib"] for r in results)


def _ratios(samples: Any, quick: bool) -> dict[str, float]:
    base = {"small": 1_000, "large": 250} if quick else {"small": 4_000, "large": 4_000}
    growth, slower, over_revolve, errors = [], [], [], []
    slopes, interval_slower, over_interval, runs_again, revolve_again = [], [], [], [], []
    best_peer = {}
    noise = 1.0
    for size, by_depth in samples.items():
        last = max(by_depth)
        ours, reference = by_depth[last]["streaming"], by_depth[base[size]]["streaming"]
        growth.append(_peak(ours) / _peak(reference))
        slower.append((_seconds(ours) / last) / (_seconds(reference) / base[size]))

        def more_mib(method: str) -> float:
            return _peak(by_depth[last][method]) - _peak(by_depth[base[size]][method])  # noqa: B023

        def more_runs(method: str) -> float:
            factors = (by_depth[d][method][0]["recompute_factor"] for d in (last, base[size]))  # noqa: B023
            return next(factors) / next(factors)

        slopes.append(more_mib("interval") / more_mib("store-all"))
        theirs, theirs_before = by_depth[last]["interval"], by_depth[base[size]]["interval"]
        interval_slower.append((_seconds(theirs) / last) / (_seconds(theirs_before) / base[size]))
        runs_again.append(more_runs("interval"))
        revolve_again.append(more_runs("revolve"))
        over_interval.append(_seconds(by_depth[last]["revolve"]) / _seconds(theirs))
        for by_method in by_depth.values():
            streaming = by_method["streaming"]
            over_revolve.append(_seconds(by_method["revolve"]) / _seconds(streaming))
            noise = max(noise, max(r["seconds"] for r in streaming) / _seconds(streaming))
        errors.append(statistics.median(abs(r["measured_s"] / r["predicted_s"] - 1) for r in ours))
        peers = [by_depth[last][m] for m in by_depth[last] if m.startswith("pyrevolve")]
        if peers:
            best_peer[size] = min(map(_seconds, peers)) / _seconds(ours)
    return {
        "peak_growth": max(growth),
        "time_growth": max(slower),
        "revolve_over_streaming": min(over_revolve),
        # The paper's rule: memory beside store-all's, time, steps run, time beside Revolve's.
        "interval_memory_slope": max(slopes),
        "interval_time_growth": max(interval_slower),
        "interval_recompute_growth": max(runs_again),
        "revolve_recompute_growth": min(revolve_again),
        "revolve_over_interval": min(over_interval),
        **{f"pyrevolve_over_streaming_{size}": ratio for size, ratio in best_peer.items()},
        "prediction_error": max(errors),
        "noise_of_repeats": noise,
    }


def _plot(samples: Any, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), layout="constrained")
    axes = figure.subplots(2, len(samples), sharex="col", squeeze=False)
    for column, (size, by_depth) in enumerate(samples.items()):
        width, batch = SIZES[size]
        depths = sorted(by_depth)
        for method in _methods():
            style = {"marker": "o", "lw": 2.5 if method == "streaming" else 1.2, "label": method}
            peak = [_peak(by_depth[d][method]) / 1024 for d in depths]
            per_step = [1e6 * _seconds(by_depth[d][method]) / d for d in depths]
            axes[0, column].plot(depths, peak, **style)
            axes[1, column].plot(depths, per_step, **style)
        axes[0, column].set_title(f"LSTM of width {width}, batch {batch}")
        axes[1, column].set_xlabel("depth (steps)")
        for row in (0, 1):
            axes[row, column].set_xscale("log")
            axes[row, column].set_xticks(depths, [str(depth) for depth in depths])
            axes[row, column].set_xticks([], minor=True)
            axes[row, column].grid(alpha=0.3)
        axes[1, column].set_ylim(bottom=0)
        peaks = [
            _peak(results) for by_method in by_depth.values() for results in by_method.values()
        ]
        if max(peaks) > 4 * min(peaks):
            axes[0, column].set_yscale("log")
        else:
            axes[0, column].set_ylim(bottom=0)
    axes[0, 0].set_ylabel("peak memory of the process (MiB)")
    axes[1, 0].set_ylabel("time per step (us)")
    axes[0, -1].legend(fontsize=8)
    figure.suptitle(f"Peak memory and time over depth, {SLOTS} states of fast memory")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
