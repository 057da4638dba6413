"""Figures 3 to 13 of Beaumont et al. 2019 (RR-9302): their networks, planned.

ResNet, DenseNet and Inception v3 (pytorchcv's, random weights) are profiled
stage by stage on one image; what plain training, `checkpoint_sequential`,
Revolve and the optimal schedule then take is computed from the profile.  Bytes
are counted exactly, per image; times are this machine's, so throughput is given
over that of plain training.  Activations grow with the batch and, where an
image was profiled at another size, with its area; weights and their gradients
are added once, as the paper's peaks count them.

The paper's ResNet-1001 is not pytorchcv's: its 225 GiB fit one that is four
times as wide (64 channels first) at full resolution, which is what is built.

    python -m benchmarks.chain_networks [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks._common import child, finish, options
from multistage.errors import BudgetError
from multistage.model.stages import StageCosts
from multistage.planners.chain.heterogeneous import SLOTS, memory_curve, plan_chain, smallest_memory

GPU_BYTES = 15.75 * 2**30  # the paper's card
# Name -> (the image sizes of the paper, the size profiled with --quick, without).
Sizes = tuple[int, ...]
NETWORKS: dict[str, tuple[Sizes, Sizes]] = {
    "resnet18": ((), (224, 500, 1000)),
    "resnet34": ((), (224, 500, 1000)),
    "resnet50": ((224,), (224, 500, 1000)),
    "resnet101": ((224,), (224, 500, 1000)),
    "resnet152": ((), (224, 500, 1000)),
    "preresnet200b": ((), (224, 500)),
    "densenet121": ((224,), (224, 500, 1000)),
    "densenet161": ((), (224, 500)),
    "densenet169": ((), (224, 500)),
    "densenet201": ((), (224, 500)),
    "inceptionv3": ((224,), (224, 500, 1000)),
    "resnet1001": ((16,), (32,)),
}
LARGE, SMALL = 1000, 224
LIMITS = 10
LONG = 200  # stages from which a plan takes seconds
# One thread, and malloc keeps what is freed, as CUDA's allocator does.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": str(1 << 40),
}


def build(name: str, size: int) -> Any:
    """Return a network for images of `size`."""
    from pytorchcv.model_provider import get_model
    from pytorchcv.models.resnet_cifar import CIFARResNet
    from torch import nn

    if name != "resnet1001":
        model = get_model(name, pretrained=False, in_size=(size, size))
    else:
        model = CIFARResNet(
            channels=[[width] * 111 for width in (256, 512, 1024)],
            init_block_channels=64,
            bottleneck=True,
            in_size=(size, size),
        )
    model.features.final_pool = nn.AdaptiveAvgPool2d(1)  # made for one size of image
    return model


def _profiled(task: dict[str, Any]) -> dict[str, Any]:
    """Profile a network in this process; save its costs, return its weights' bytes."""
    import torch

    import multistage.torch as mst
    from benchmarks._chain_models import captured

    torch.manual_seed(task["seed"])
    torch.set_num_threads(1)
    model = build(task["name"], task["size"])
    x = torch.randn(1, 3, task["size"], task["size"])
    costs = mst.profile(captured(model, x), x, seconds=task["seconds"])
    costs.save(task["costs"])
    return {"weights": sum(p.numel() * p.element_size() for p in model.parameters())}


# ------------------------------------------------------------------------ plans


def as_in_the_paper(costs: StageCosts) -> StageCosts:
    """Return costs without `spared_s`, which the paper's model does not know.

    Where a stage is taped right before its adjoint, what it runs after the last
    tensor it saves can be spared; Revolve, which does so everywhere, gains most.
    """
    stages = tuple(replace(stage, spared_s=0.0) for stage in costs.stages)
    return replace(costs, stages=stages)


def planned(costs: StageCosts, few: bool) -> dict[str, Any]:
    """Return what every planner takes, per image: points of (bytes, seconds).

    `few` plans a long chain at fewer limits than the paper does.
    """
    plain = plan_chain(costs)
    stages = len(costs.stages)
    most = max(2, math.floor(2 * math.sqrt(stages)))
    # Ten numbers of segments from 2 to 2 sqrt(L), as the paper has them.
    counts = sorted({round(2 + (most - 2) * k / 9) for k in range(10)})
    sequential = []
    for count in counts:
        plan = plan_chain(costs, planner="periodic", segments=count)
        sequential.append((plan.peak_bytes, plan.makespan_s, count))
    # The memories of the sequential runs that no other beats; the fastest comes first.
    front = sorted(p for p in sequential if p[1] <= fastest(sequential, p[0]))[::-1]
    if few and stages > LONG:
        front = front[:1]
    least = smallest_memory(costs)
    limits = [plain.plain_bytes * k // LIMITS for k in range(1, LIMITS)]
    limits = [limit for limit in limits if limit >= least][:: 4 if few and stages > LONG else 1]
    seconds, optimal = [], []
    for limit in [*(p[0] for p in front), *limits]:
        began = time.perf_counter()
        optimal.append(plan_chain(costs, limit))
        seconds.append(time.perf_counter() - began)
    limited = [(plan.peak_bytes, plan.makespan_s) for plan in optimal]
    slots = 3 * SLOTS if stages > LONG else SLOTS  # a long chain's smallest memory is 3 % of plain
    over = [p[1] / plan.makespan_s - 1 for p, plan in zip(front, optimal, strict=False)]
    return {
        "stages": stages,
        "plain": (plain.plain_bytes, plain.plain_s),
        "sequential": sequential,
        "limited": limited,
        "optimal": _front([*memory_curve(costs, resolution=slots), *limited]),
        "revolve": memory_curve(costs, "revolve", resolution=slots),
        "plan_s": max(seconds),
        # How much faster than `checkpoint_sequential` within the same memory: within
        # that of its fastest run, as the paper sums up, and on average.
        "gain_at_best": over[0],
        "gain": statistics.mean(over),
    }


def _front(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the points that no other beats in both memory and time, memory ascending."""
    front: list[tuple[int, float]] = []
    for point in sorted(points):
        if not front or point[1] < front[-1][1]:
            front.append(point)
    return front


def fastest(points: list[Any], limit: float) -> float:
    """Return the least seconds of the points within a limit, infinite if there is none."""
    return min((point[1] for point in points if point[0] <= limit), default=math.inf)


def fewest_segments(costs: StageCosts, room: float) -> int:
    """Return the least number of segments whose peak is within `room` bytes; 0 if none is."""
    most = math.floor(2 * math.sqrt(len(costs.stages)))
    for count in range(1, most + 1):
        try:
            plan_chain(costs, int(room), "periodic", segments=count)
        except BudgetError:
            continue
        return count
    return 0


# ------------------------------------------------------------------------- all


def _of_resnet101(row: dict[str, Any], costs: StageCosts) -> dict[str, float]:
    """Return figure 3's numbers: peaks at 1000 x 1000, gains at batch 8."""
    plans, grow = row["plans"], (LARGE / row["size"]) ** 2
    fixed = 2 * row["weights"]
    sequential = plans["sequential"]
    two = sequential[0]
    assert two[2] == 2
    room = (GPU_BYTES - fixed) / (8 * grow)
    best = min((p for p in sequential if p[0] <= room), key=lambda p: p[1])
    return {
        "resnet101_plain_gib": (plans["plain"][0] * grow + fixed) / 2**30,
        "resnet101_two_segments_gib": (two[0] * grow * 8 + fixed) / 2**30,
        "resnet101_best_segments": float(best[2]),
        "resnet101_plain_fits_8": float(plans["plain"][0] <= room),
        "resnet101_fastest_gain": best[1] / plan_chain(costs, int(room)).makespan_s - 1,
        "resnet101_gain": row["plans"]["gain"],
    }


def _of_resnet1001(row: dict[str, Any], costs: StageCosts) -> dict[str, float]:
    """Return figure 4's numbers: memory of batch 8, and the segments that fit the card."""
    grow, fixed = (SMALL / row["size"]) ** 2, 2 * row["weights"]
    ratios = {
        "resnet1001_stages": float(row["plans"]["stages"]),
        "resnet1001_batch_8_gib": (row["plans"]["plain"][0] * grow * 8) / 2**30,
        "resnet1001_plain_fits_1": float(row["plans"]["plain"][0] * grow + fixed <= GPU_BYTES),
    }
    for batch in (1, 2, 4, 8):
        room = (GPU_BYTES - fixed) / (grow * batch)
        ratios[f"resnet1001_segments_{batch}"] = float(fewest_segments(costs, room))
    room = (GPU_BYTES - fixed) / (grow * 8)
    ratios["resnet1001_optimal_fits_8"] = float(smallest_memory(costs) <= room)
    return ratios


def _ratios(rows: list[dict[str, Any]], named: dict[str, float]) -> dict[str, float]:
    slower, best, useless = [], [], []
    for row in rows:
        plans = row["plans"]
        for peak, seconds, _ in plans["sequential"]:
            slower.append(fastest(plans["revolve"], peak) > seconds)
        fast = min(seconds for _, seconds, _ in plans["sequential"])
        best.append(fast / fastest(plans["revolve"], math.inf))
        # The largest memory Revolve has a use for, over that of plain training.
        useless.append(plans["revolve"][-1][0] / plans["plain"][0])
    usual = [row for row in rows if row["name"] != "resnet1001"]
    return {
        "networks": float(len(rows)),
        "gain_at_best": statistics.mean(row["plans"]["gain_at_best"] for row in rows),
        "gain": statistics.mean(row["plans"]["gain"] for row in rows),
        "least_gain_at_best": min(row["plans"]["gain_at_best"] for row in rows),
        **named,
        "revolve_slower_share": statistics.mean(slower),
        "revolve_best_throughput": max(best),  # over sequential's
        "revolve_most_memory": max(useless),
        "plan_s_resnet1001": max(r["plans"]["plan_s"] for r in rows if r["name"] == "resnet1001"),
        "plan_s_others": max(row["plans"]["plan_s"] for row in usual),
    }


def main() -> None:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(_profiled(json.loads(args.child))))
        return
    rows: list[dict[str, Any]] = []
    named: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = str(Path(folder, "costs.json"))
        for name, (quick, full) in NETWORKS.items():
            for size in quick if args.quick else full:
                task = {
                    "name": name,
                    "size": size,
                    "seed": args.seed,
                    "seconds": 3.0 if args.quick else 15.0,
                    "costs": file,
                }
                row = {"name": name, "size": size}
                row |= child("benchmarks.chain_networks", task, ENVIRONMENT)
                costs = as_in_the_paper(StageCosts.load(file))
                row["plans"] = planned(costs, few=args.quick)
                if name in ("resnet101", "resnet1001"):  # of several sizes the largest
                    named |= (_of_resnet101 if name == "resnet101" else _of_resnet1001)(row, costs)
                rows.append(row)
                print(
                    f"{name:<14}{size:>5}: {row['plans']['stages']:>4} stages, plain "
                    f"{row['plans']['plain'][0] / 2**20:8.1f} MiB an image, optimal over "
                    f"checkpoint_sequential +{100 * row['plans']['gain_at_best']:.1f} %, plan in "
                    f"{row['plans']['plan_s']:.2f} s",
                    flush=True,
                )
    left_out = ["networks and image sizes beyond those named"] if args.quick else []
    finish(args, "chain_networks", rows, _ratios(rows, named), left_out)
    if args.plot:
        _plot(rows, args.plot)


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    columns = min(4, len(rows))
    lines = -(-len(rows) // columns)
    figure = Figure(figsize=(3.4 * columns, 3.0 * lines + 0.4), layout="constrained")
    panels = list(figure.subplots(lines, columns, squeeze=False).flat)
    for axes, row in zip(panels, rows, strict=False):
        plans = row["plans"]
        plain_bytes, plain_s = plans["plain"]
        unit, name = (2**30, "GiB") if plain_bytes > 2**29 else (2**20, "MiB")
        for key, style, label in (
            ("sequential", "C4x", "checkpoint_sequential"),
            ("revolve", "C2-", "revolve"),
            ("optimal", "C0-", "optimal"),
            ("limited", "C0^", "optimal at the paper's limits"),
        ):
            memory = [point[0] / unit for point in plans[key]]
            axes.plot(
                memory, [plain_s / p[1] for p in plans[key]], style, ms=4, lw=1.2, label=label
            )
        axes.plot([plain_bytes / unit], [1.0], "rs", ms=5, label="plain")
        axes.set_title(f"{row['name']}, {row['size']} x {row['size']}", fontsize=9)
        axes.set_xlabel(f"peak activations of an image ({name})", fontsize=8)
        axes.set_xlim(left=0)
        axes.grid(alpha=0.3)
    for axes in panels[len(rows) :]:
        axes.set_visible(False)
    figure.axes[0].set_ylabel("throughput over plain")
    figure.axes[0].legend(fontsize=6)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
