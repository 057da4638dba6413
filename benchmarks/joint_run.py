"""Chains with a slow tier, trained: measured steps beside plans without one, and beside torch.

A residual network, a transformer of 24 blocks and an MLP mixer, at 0.1, 0.2 and 0.4 of
the memory of plain training, with a file and with host memory as the tier.  Each point
is a fresh process, in which steps take turns: plain training, the best plan without a
tier, `Sequential(tiers=)`, the plan that sends every tape to the tier, torch's
`save_on_cpu`, and `checkpoint_sequential` with the number of segments whose peak is
lowest and with the fastest of those within the limit, if there is one.  Gradients are
asserted to be the plain ones, bit for bit, and peaks are counted storage by storage.

Ratios are of the medians of steps that took turns, so that a slow spell of the machine
falls on all alike; predictions are compared as multiples of plain training.  With a
memory tier on the CPU the tier and computing share one memory bus, and the
background threads need a core of their own: a figure here is one of this machine.
Where they have none, `thread_over_no_tier`, seconds of the computing thread alone,
says what a machine would gain whose transfers are free.  A tier whose transfers slow
computing down, as measured when the plan is made, may not be chosen at all.

    python -m benchmarks.joint_run [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import multistage.torch as mst
from benchmarks._common import child, finish, interleaved, options
from benchmarks.chain_throughput import KEEP, Mix, Pool, Residual
from multistage.actions import Put
from multistage.plan.chain_memory import use_of
from multistage.plan.chain_table import Sizes, Table
from multistage.plan.joint import extremes
from multistage.plan.joint_actions import actions_of_laid
from multistage.plan.joint_core import Core
from multistage.stages import StageCosts
from multistage.torch.meter import Meter

NETS = ("residual", "transformer", "mixer")
MEMORY = (0.1, 0.2, 0.4)
TIERS = ("file", "memory")
REPEATS = 5
Call = Callable[[Tensor], Tensor]


class Block(nn.Module):
    """A block of a transformer, normalised before attention and before its two layers."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.given, self.made = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.layers = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        given = self.given(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        query, key, value = given.permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.made(found.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.layers(self.norms[1](x))
        return result


def build(net: str, *, quick: bool) -> tuple[nn.Sequential, Tensor]:
    """Return a network and a batch."""
    batch = 2 if quick else 16
    if net == "residual":
        stages: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1)]
        for group, width in enumerate((16, 32, 64)):
            for k in range(6):
                given = width // 2 if group and not k else width
                stages.append(Residual(given, width, 2 if group and not k else 1))
        stages += [Pool((2, 3)), nn.Linear(64, 10)]
        return nn.Sequential(*stages), torch.randn(4 * batch, 3, 64, 64)
    if net == "mixer":
        mixers = [Mix(144, 192) for _ in range(16)]
        return nn.Sequential(*mixers, Pool((1,))), torch.randn(2 * batch, 144, 192)
    blocks = [Block(192, 4) for _ in range(24)]
    return nn.Sequential(*blocks, Pool((1,))), torch.randn(batch, 128, 192)


# ------------------------------------------------------------------- one point


def _costs(task: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(task["seed"])
    torch.set_num_threads(1)
    stages, x = build(task["net"], quick=task["quick"])
    mst.profile(stages, x, seconds=task["seconds"]).save(task["costs"])
    return {}


def _point(task: dict[str, Any]) -> dict[str, Any]:
    """Run one point; return seconds of all ways, bytes and what was predicted."""
    torch.manual_seed(task["seed"])
    torch.set_num_threads(1)
    plain, x = build(task["net"], quick=task["quick"])
    before = {name: buffer.clone() for name, buffer in plain.named_buffers()}
    ways: dict[str, Call] = {"plain": plain}
    given: dict[str, Any] = {"costs": StageCosts.load(task["costs"]), "check": "off"}
    without = mst.Sequential(plain, x, memory=task["memory"], **given)
    chain = mst.Sequential(plain, x, memory=task["memory"], tiers=task["tier"], **given)
    everything = mst.Sequential(plain, x, memory=task["memory"], tiers=task["tier"], **given)
    assert without.plan is not None
    assert chain.plan is not None
    ways["no tier"], ways["tier"] = without, chain
    if _sends_all(everything):
        ways["offload all"] = everything
    limit = without.plan.memory_bytes
    ways |= _torch(plain, x, limit)

    worked: list[float] = []

    def step(call: Call) -> float:
        for parameter in plain.parameters():
            parameter.grad = None
        began, begun = time.perf_counter(), time.thread_time()
        call(x).square().mean().backward()
        worked.append(time.thread_time() - begun)
        return time.perf_counter() - began

    def gradients(call: Call) -> list[Tensor]:
        for name, buffer in plain.named_buffers():
            buffer.copy_(before[name])
        step(call)
        return [p.grad for p in plain.parameters() if p.grad is not None]

    peaks = {}
    expected = gradients(plain)
    for name, call in ways.items():
        if not name.startswith("torch"):
            found = gradients(call)
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), name
            del found
        peaks[name] = _peak(plain, call, x)
    worked.clear()
    samples = interleaved({n: lambda c=c: step(c) for n, c in ways.items()}, task["repeats"])  # type: ignore[misc]
    result = {
        "limit": limit,
        "chose_tier": any(isinstance(action, Put) for action in chain.plan.actions),
        "peaks": peaks,
        "seconds": {name: statistics.median(each) for name, each in samples.items()},
        "samples": samples,
        "thread_s": {n: statistics.median(worked[k :: len(ways)]) for k, n in enumerate(ways)},
        "predicted": chain.plan.makespan_s / without.plan.plain_s,
        "predicted_without": without.plan.makespan_s / without.plan.plain_s,
        "rates": str(chain.plan.tier),
    }
    for each in (chain, everything):
        each.close()
    return result


def _peak(model: nn.Module, call: Call, x: Tensor) -> int:
    """Return the bytes of a step, as limits count them."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    with Meter(torch.device("cpu")) as meter:
        meter.ignore([x, *model.parameters(), *model.buffers()])
        meter.ignore(p.grad for p in model.parameters() if p.grad is not None)
        call(x).square().mean().backward()
    return meter.peak_bytes + x.nbytes


def _sends_all(chain: mst.Sequential) -> bool:
    """Give a chain the plan that sends every tape to its tier; return whether that fits."""
    state = chain._multistage
    plan = chain.plan
    assert plan is not None
    if plan.tier is None or plan.memory_bytes is None:
        return False
    true = Sizes.of(plan.costs)
    limit = plan.memory_bytes - plan.costs.input_bytes
    table = Table(true.in_slots(limit / 400, "nearest"), 400)
    core = Core(true, table, limit / 400, limit, plan.tier)
    fates = next(extremes(true))
    if math.isinf(core.judge(fates)):
        return False
    actions = tuple(actions_of_laid(core.lay_out(fates), table))
    use = use_of(actions, plan.costs, [plan.tier])
    anew = replace(plan, actions=actions, makespan_s=use.makespan_s, peak_bytes=use.peak_bytes)
    for variants in state.known.values():
        variants[:] = [replace(each, plan=anew) for each in variants]
    state.replan = False
    return True


def _torch(plain: nn.Sequential, x: Tensor, limit: int | None) -> dict[str, Call]:
    """Return torch's own ways to save memory."""

    def save_on_cpu(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            out: Tensor = plain(x)
            return out

    def sequential(segments: int) -> Call:
        return lambda x: checkpoint_sequential(plain, segments, x, use_reentrant=False)

    peaks = {k: _peak(plain, sequential(k), x) for k in (2, 4, 6, 8)}
    fitting = [k for k, peak in peaks.items() if limit is not None and peak <= limit]
    least = min(peaks, key=lambda k: peaks[k])
    # The fewest segments run the least again: the last one is not.
    best = {"torch sequential, fits": sequential(min(fitting))} if fitting else {}
    return {
        "torch save_on_cpu": save_on_cpu,
        "torch sequential, least memory": sequential(least),
        **best,
    }


# -------------------------------------------------------------------- all points


def _ratios(points: list[dict[str, Any]]) -> dict[str, float]:
    with_tier = [p for p in points if p["chose_tier"]]
    over = [p["seconds"]["no tier"] / p["seconds"]["tier"] for p in with_tier]
    over_all = [
        p["seconds"]["offload all"] / p["seconds"]["tier"]
        for p in with_tier
        if "offload all" in p["seconds"]
    ]
    errors = [
        abs(p["predicted"] * p["seconds"]["plain"] / p["seconds"]["tier"] - 1) for p in points
    ]
    ours = ("no tier", "tier", "offload all")
    exceeded = [
        p["peaks"][name] > p["limit"] for p in points for name in ours if name in p["peaks"]
    ]
    torch_best = [
        min(s for n, s in p["seconds"].items() if n == "torch sequential, fits")
        / p["seconds"]["tier"]
        for p in points
        if "torch sequential, fits" in p["seconds"]
    ]
    ratios = {
        "chose_tier": len(with_tier) / len(points),
        "limit_exceeded": float(sum(exceeded)),
        "prediction_error": statistics.mean(errors),
    }
    if over:
        worked = [p["thread_s"]["no tier"] / p["thread_s"]["tier"] for p in with_tier]
        ratios["thread_over_no_tier"] = statistics.mean(worked)
        ratios |= {"over_no_tier": statistics.mean(over), "worst_over_no_tier": min(over)}
    if over_all:
        ratios["over_offload_all"] = statistics.mean(over_all)
        ratios["worst_over_offload_all"] = min(over_all)
    if torch_best:
        ratios["over_checkpoint_sequential"] = statistics.mean(torch_best)
    ratios["over_save_on_cpu"] = statistics.mean(
        p["seconds"]["torch save_on_cpu"] / p["seconds"]["tier"] for p in points
    )
    return ratios


def main() -> None:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--folder", type=Path, help="of the file tier; a temporary one, if none")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        task = json.loads(args.child)
        print(json.dumps(_point(task) if "tier" in task else _costs(task)))
        return
    points = []
    nets, memory = (NETS[1:2], (0.4,)) if args.quick else (NETS, MEMORY)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        names = {"file": f"file://{folder}", "memory": "memory:"}
        for net, tier, share in itertools.product(nets, TIERS, memory):
            costs = Path(folder) / f"{net}.json"
            task: dict[str, Any] = {"net": net, "seed": args.seed, "quick": args.quick}
            task |= {"costs": str(costs), "seconds": 2.0 if args.quick else 10.0}
            if not costs.exists():
                child("benchmarks.joint_run", task, KEEP)
            task |= {"tier": names[tier], "memory": share}
            task["repeats"] = 3 if args.quick else REPEATS
            point = {"net": net, "tier": tier, "memory": share}
            point |= child("benchmarks.joint_run", task, KEEP)
            points.append(point)
            plain = point["seconds"]["plain"]
            shown = ", ".join(f"{n} {s / plain:.3f}" for n, s in point["seconds"].items())
            print(
                f"{net} {tier} {share}: {shown}; predicted {point['predicted']:.3f}, without "
                f"{point['predicted_without']:.3f}; {point['rates']}",
                flush=True,
            )
    finish(args, "joint_run", points, _ratios(points))


if __name__ == "__main__":
    main()
