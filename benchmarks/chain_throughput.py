"""Throughput against peak memory of chains, as in figure 3 of Beaumont et al. 2019 (RR-9302).

A residual network and an MLP mixer (and torchvision's networks on a CUDA
device, where torchvision is installed): plain training, torch's
`checkpoint_sequential` with every number of segments from 2 to 2 sqrt(L), the
optimal schedule within the peak of each of these (`compile`, which also keeps tapes in part),
and the optimal schedule and Revolve (`Sequential`) at some limits between the least and plain
training's.  Each point is a
fresh process, in which its steps alternate with plain ones, and those of
`checkpoint_sequential` with those of the optimal schedule at its peak;
gradients are asserted to be the plain ones.

`gain_at_equal_memory` is the mean over all numbers of segments of the median
ratio of the two, less 1, on the residual network (`..._all`: on all), and
`gain_noise` its standard error, from the spread of the ratios within each pair.

Where the rest goes.  `gain_allowed` is the same mean by the profiled seconds of
the stages that either schedule runs: what the optimum over all schedules within
that memory gains where nothing but stages takes time.  `ours_over_predicted` and
`sequential_over_predicted` are how much longer than these seconds either takes, as
multiples of plain training: hooks, environments, allocation, random states, and
caches that a stage profiled by itself finds warm.

Peaks are those of one more step, counted storage by storage on the CPU, by the
allocator on CUDA: from the chain's input to its output, without parameters and
their gradients, as limits count them.  On the CPU malloc keeps what is freed,
as CUDA's allocator does, so that first touches of pages do not drown the rest.

    python -m benchmarks.chain_throughput [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks import _chain_points
from benchmarks._chain_models import TORCHVISION
from benchmarks._common import KEEP, child, finish, options
from multistage.model.stages import StageCosts
from multistage.planners.chain.heterogeneous import memory_curve, smallest_memory
from multistage.torch.planning.choosing import held_by_caller

BATCHES = {"cpu": {"residual": 12, "mixer": 6}, "cuda": {"residual": 1024, "mixer": 512}}
BATCH_OF_OTHERS = 64
LIMITS = 2  # beside the peaks of checkpoint_sequential
REPEATS = 3
ROUNDS = 5  # of checkpoint_sequential and the optimal schedule at its peak, in turn


def _net(net: str, args: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """Return the points of one network."""
    quick = args.quick
    batch = args.batch or BATCHES[args.device].get(net, BATCH_OF_OTHERS)
    costs_file = folder / f"{net}.json"
    task = {
        "net": net,
        "batch": batch,
        "device": args.device,
        "seed": args.seed,
        "costs": str(costs_file),
        "repeats": 1 if quick else REPEATS,
        "rounds": 4 if quick else ROUNDS,
        "seconds": 3.0 if quick else 10.0,
    }
    child("benchmarks.chain_throughput", {**task, "how": "costs"}, KEEP)
    costs = StageCosts.load(costs_file)
    held = held_by_caller(costs)
    points: list[dict[str, Any]] = []

    def run(how: str, **more: Any) -> dict[str, Any]:
        found = child("benchmarks.chain_throughput", {**task, "how": how, **more}, KEEP)
        point = {"net": net, "how": how, **more, **found}
        if how == "pair":
            point["how"] = "optimal"
            theirs = {"net": net, "how": "sequential", **more, "peak_bytes": point["limit"]}
            for key in ("seconds", "over_plain"):
                theirs[key] = point.pop(f"sequential_{key}")
            add(theirs)
        add(point)
        return point

    def add(point: dict[str, Any]) -> None:
        points.append(point)
        wanted = f"{point['limit'] / 2**20:8.0f}" if "limit" in point else " " * 8
        gain = ""
        if "gains" in point:
            allowed = point["sequential_predicted"] / point["predicted_over_plain"] - 1
            gain = f", gain {statistics.median(point['gains']):+.3f} of {allowed:+.3f}"
        print(
            f"{net:<12}{point['how']:<11}{point.get('segments', ''):>3} {wanted} MiB: peak "
            f"{point['peak_bytes'] / 2**20:7.0f} MiB, time over plain "
            f"{point['over_plain']:.3f}{gain}",
            flush=True,
        )

    plain = run("store-all")
    most = max(2, math.floor(2 * math.sqrt(len(costs.stages))))
    for segments in range(2, most + 1) if not quick else (2, 4, most):
        run("pair", segments=segments)
    least = smallest_memory(held, "revolve")
    low, count = int(1.02 * smallest_memory(held)), 2 if quick else LIMITS
    for number in range(count):
        limit = low + (plain["peak_bytes"] - low) * number // count
        run("optimal", limit=limit)
        if limit >= least:
            run("revolve", limit=limit)
    curve = memory_curve(held)
    for memory, seconds in curve:
        points.append({"net": net, "how": "predicted", "peak_bytes": memory, "seconds": seconds})
    return points


def _front(points: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the points that no other beats in both memory and time."""
    front: list[dict[str, Any]] = []
    for point in sorted(points, key=lambda p: (p["peak_bytes"], p["over_plain"])):
        if not front or point["over_plain"] < front[-1]["over_plain"]:
            front.append(point)
    return front


def _ratios(points: list[dict[str, Any]]) -> dict[str, float]:
    best_gains, times, bytes_, over = [], [], [], []
    for net in dict.fromkeys(p["net"] for p in points):
        of = [p for p in points if p["net"] == net]
        best = _front([p for p in of if p["how"] == "sequential"])[-1]
        beside = next(p for p in of if "gains" in p and p["segments"] == best["segments"])
        best_gains.append(statistics.median(beside["gains"]))
        for point in of:
            if "limit" in point and "predicted_s" in point:
                times.append(abs(point["predicted_s"] / point["seconds"] - 1))
                bytes_.append(abs(point["predicted_bytes"] / point["peak_bytes"] - 1))
                over.append(point["peak_bytes"] > point["limit"])
    pairs = [p for p in points if "gains" in p]
    residual = [p for p in pairs if p["net"] == "residual"] or pairs
    theirs = {
        (p["net"], p["segments"]): p["over_plain"] for p in points if p["how"] == "sequential"
    }
    allowed = [p["sequential_predicted"] / p["predicted_over_plain"] - 1 for p in residual]
    their_rest = [theirs[p["net"], p["segments"]] - p["sequential_predicted"] for p in residual]
    our_rest = [p["over_plain"] - p["predicted_over_plain"] for p in residual]
    return {
        "gain_at_equal_memory": statistics.mean(_gain(p) for p in residual),
        "gain_at_equal_memory_all": statistics.mean(_gain(p) for p in pairs),
        "gain_allowed": statistics.mean(allowed),
        "ours_over_predicted": statistics.mean(our_rest),
        "sequential_over_predicted": statistics.mean(their_rest),
        "gain_noise": math.sqrt(sum(_error(p) ** 2 for p in residual)) / len(residual),
        "gain_over_fastest_sequential": statistics.mean(best_gains),
        "time_error": statistics.mean(times),
        "memory_error": statistics.mean(bytes_),
        "limit_exceeded": float(sum(over)),
    }


def _gain(pair: dict[str, Any]) -> float:
    return statistics.median(pair["gains"])


def _error(pair: dict[str, Any]) -> float:
    """Return the standard error of the median gain, from the middle half of the samples."""
    low, _, high = statistics.quantiles(pair["gains"], n=4)
    return 1.25 * (high - low) / 1.35 / math.sqrt(len(pair["gains"]))


def main() -> None:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, help="of every network")
    parser.add_argument("--nets", nargs="+", help="residual, mixer, or names of torchvision")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        task = json.loads(args.child)
        children = {"costs": _chain_points.costs, "pair": _chain_points.pair}
        print(json.dumps(children.get(task["how"], _chain_points.point)(task)))
        return
    nets, left_out = ["residual", "mixer"], []
    if args.nets:
        nets = args.nets
    elif importlib.util.find_spec("torchvision") is None:
        left_out = ["torchvision's networks: torchvision is not installed"]
    elif args.device == "cpu":
        left_out = ["torchvision's networks: they take too long without a CUDA device"]
    else:
        nets += TORCHVISION
    points: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for net in nets:
            points += _net(net, args, Path(folder))
    finish(args, "chain_throughput", points, _ratios(points), left_out)
    if args.plot:
        _plot(points, args.plot)


def _plot(points: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    nets = list(dict.fromkeys(p["net"] for p in points))
    figure = Figure(figsize=(5 * len(nets), 4), layout="constrained")
    styles = {
        "store-all": ("plain", "k*"),
        "sequential": ("checkpoint_sequential", "C1s"),
        "revolve": ("revolve", "C2^-"),
        "optimal": ("optimal", "C0o-"),
    }
    for axes, net in zip(figure.subplots(1, len(nets), squeeze=False)[0], nets, strict=True):
        of = [p for p in points if p["net"] == net]
        plain = next(p for p in of if p["how"] == "store-all")
        for how, (label, style) in styles.items():
            mine = sorted((p for p in of if p["how"] == how), key=lambda p: p["peak_bytes"])
            memory = [p["peak_bytes"] / 2**30 for p in mine]
            axes.plot(memory, [1 / p["over_plain"] for p in mine], style, label=label, ms=5)
        # Beside the measured: predicted, over the prediction for plain training.
        curve = sorted(
            (p["peak_bytes"] / 2**30, p["seconds"]) for p in of if p["how"] == "predicted"
        )
        fastest = min(seconds for _, seconds in curve)
        axes.plot(
            [m for m, _ in curve],
            [fastest / s for _, s in curve],
            "C0:",
            lw=1,
            label="optimal, predicted",
        )
        axes.set_title(f"{net}, {plain['plain_s']:.2g} s plain")
        axes.set_xlabel("peak memory (GiB)")
        axes.set_xlim(left=0, right=1.05 * plain["peak_bytes"] / 2**30)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("throughput over plain")
    figure.axes[0].legend(fontsize=8)
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
