"""Chains with a slow tier, trained: measured steps beside plans without one, and beside torch.

A residual network of 54 blocks (the ResNet-110 of He et al. 2016), a transformer of 24
blocks and an MLP mixer, at 0.1, 0.2 and 0.4 of the memory of plain training, with a file
and with host memory as the tier.  Each network at each limit is a fresh process, in which
steps take turns: plain training, the best plan without a tier, `Sequential(tiers=)` with
either tier, and the plan that sends every tape to that tier.  Another process times
torch's `save_on_cpu` and `checkpoint_sequential` beside plain training: at a limit counts
the fastest number of segments whose peak is within it.  Gradients are asserted to be the
plain ones, bit for bit, and peaks are counted storage by storage.

Ratios are medians of the ratios within each turn, so that a slow spell of the machine
falls on all alike.  Predictions are compared as multiples of plain training: by the plan,
stage by stage, where each stage by itself takes the executor's hooks and finds caches
warm, and as measured beside.  The first steps of each way are not timed: in them plans are
made again for the rates seen.  A chain that has left its tier by then counts as one without.
`noise` is the mean standard error of the medians.  Where a
plan exists with a tier only, the point counts in `only_with_tier`; where none exists, in
`nothing_fits`.

With a memory tier on the CPU the tier and computing share one memory bus, and the
background threads need a core of their own: a figure here is one of this machine.
Where they have none, `thread_over_no_tier`, seconds of the computing thread alone,
says what a machine would gain whose transfers are free.  A tier whose transfers slow
computing down, as measured when the plan is made, may not be chosen at all.

    python -m benchmarks.joint_run [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint_sequential

import multistage.torch as mst
from benchmarks._chain_models import Mix, Pool, Residual
from benchmarks._common import child, finish, interleaved, options
from benchmarks.chain_throughput import KEEP
from multistage.actions import Put
from multistage.errors import BudgetError
from multistage.model.stages import StageCosts
from multistage.planners import Plan
from multistage.planners.chain.joint import extremes
from multistage.planners.chain.joint_core import Core, actions_of_laid
from multistage.planners.chain.memory import use_of
from multistage.planners.chain.sizes import Sizes
from multistage.planners.chain.table import Table
from multistage.torch.tensors.meter import Meter

NETS = ("residual", "transformer", "mixer")
MEMORY = (0.1, 0.2, 0.4)
TIERS = ("file", "memory")
SEGMENTS = (2, 4, 6, 8)
WARM_UP = 4  # steps of each way, in which its plan may change
REPEATS = 4  # turns, of which torch's ways take one less
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
        """Return the layer's output: attention, then the feed-forward part."""
        batch, length, width = x.shape
        given = self.given(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        query, key, value = given.permute(2, 0, 3, 1, 4)
        found = nn.functional.scaled_dot_product_attention(query, key, value)
        x = x + self.made(found.transpose(1, 2).reshape(batch, length, width))
        result: Tensor = x + self.layers(self.norms[1](x))
        return result


def build(net: str, *, quick: bool) -> tuple[nn.Sequential, Tensor]:
    """Return a network and a batch."""
    batch = 2 if quick else 12
    if net == "residual":
        stages: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1)]
        for group, width in enumerate((16, 32, 64)):
            for k in range(18):
                given = width // 2 if group and not k else width
                stages.append(Residual(given, width, 2 if group and not k else 1))
        stages += [Pool((2, 3)), nn.Linear(64, 10)]
        return nn.Sequential(*stages), torch.randn(batch, 3, 64, 64)
    if net == "mixer":
        mixers = [Mix(144, 192) for _ in range(16)]
        return nn.Sequential(*mixers, Pool((1,))), torch.randn(batch, 144, 192)
    blocks = [Block(192, 4) for _ in range(24)]
    return nn.Sequential(*blocks, Pool((1,))), torch.randn(batch, 128, 192)


# ------------------------------------------------------------- one process


class _Steps:
    """Steps of one network, of which plain training is the measure."""

    def __init__(self, task: dict[str, Any]) -> None:
        torch.manual_seed(task["seed"])
        torch.set_num_threads(1)
        self.plain, self.x = build(task["net"], quick=task["quick"])
        self._buffers = {name: buffer.clone() for name, buffer in self.plain.named_buffers()}
        self.step(self.plain)
        self._expected = self._found()

    def step(self, call: Call) -> tuple[float, float]:
        """Run a step; return its seconds, and those of this thread."""
        for parameter in self.plain.parameters():
            parameter.grad = None
        began, begun = time.perf_counter(), time.thread_time()
        call(self.x).square().mean().backward()
        return time.perf_counter() - began, time.thread_time() - begun

    def peak_bytes(self, call: Call) -> int:
        """Check the gradients of a step; return its peak, as limits count it."""
        self._put_back()
        parameters = list(self.plain.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        with Meter(torch.device("cpu")) as meter:
            meter.ignore([self.x, *parameters, *self.plain.buffers()])
            meter.ignore(p.grad for p in parameters if p.grad is not None)
            call(self.x).square().mean().backward()
        same = [torch.equal(a, b) for a, b in zip(self._found(), self._expected, strict=True)]
        assert all(same), "another gradient than plain training"
        return int(meter.peak_bytes) + self.x.nbytes

    def _found(self) -> list[Tensor]:
        return [p.grad for p in self.plain.parameters() if p.grad is not None]

    def _put_back(self) -> None:
        for name, buffer in self.plain.named_buffers():
            buffer.copy_(self._buffers[name])

    def timed(self, ways: dict[str, Call], repeats: int) -> dict[str, Any]:
        """Return the seconds of some ways, and of their threads, in turn with plain training."""
        every: dict[str, Call] = {"plain": self.plain, **ways}
        calls: dict[str, Any] = {n: partial(self.step, call) for n, call in every.items()}
        samples: dict[str, Any] = interleaved(calls, repeats)
        return {"samples": samples}


def _costs(task: dict[str, Any]) -> dict[str, Any]:
    """Profile a network, and time torch's own ways to save memory."""
    steps = _Steps(task)
    mst.profile(steps.plain, steps.x, seconds=task["seconds"]).save(task["costs"])

    def save_on_cpu(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            out: Tensor = steps.plain(x)
            return out

    def sequential(segments: int) -> Call:
        def run(x: Tensor) -> Tensor:
            out: Tensor = checkpoint_sequential(steps.plain, segments, x, use_reentrant=False)  # type: ignore[no-untyped-call]
            return out

        return run

    ways: dict[str, Call] = {f"sequential {k}": sequential(k) for k in task["segments"]}
    peaks = {name: steps.peak_bytes(call) for name, call in ways.items()}
    found = steps.timed({"save_on_cpu": save_on_cpu, **ways}, max(2, task["repeats"] - 1))
    return {"peaks": peaks, **found}


def _point(task: dict[str, Any]) -> dict[str, Any]:
    """Run a network at one limit; return seconds of all ways, bytes and what was predicted."""
    steps = _Steps(task)
    costs = StageCosts.load(task["costs"])
    given: dict[str, Any] = {"costs": costs, "check": "off"}
    plain = mst.Sequential(steps.plain, steps.x, planner="store-all", **given).plan
    assert plain is not None
    limit = int(task["memory"] * plain.plain_bytes)
    ways: dict[str, mst.Sequential] = {}
    least: dict[str, int | None] = {}
    rates: dict[str, str] = {}

    def made(name: str, tier: str | None) -> mst.Sequential | None:
        try:
            return mst.Sequential(steps.plain, steps.x, memory=limit, tiers=tier, **given)
        except BudgetError as error:
            least[name] = error.least_bytes
            return None

    for name, tier in {"no tier": None, **task["tiers"]}.items():
        chain = made(name, tier)
        if chain is None:
            continue
        assert chain.plan is not None
        sends = _sends(chain.plan)
        if sends or tier is None:
            ways[name] = chain
        if sends:
            rates[name] = str(chain.plan.tier)
            everything = made(name, tier)
            if everything is not None and _sends_all(everything):
                ways[f"all to {name}"] = everything
    peaks = {name: steps.peak_bytes(chain) for name, chain in ways.items()}
    for chain in ways.values():  # plans are made again, from what their transfers showed
        for _ in range(WARM_UP):
            steps.step(chain)
    result = {
        "limit": limit,
        "least": least,
        "rates": rates,
        "peaks": peaks,
        **steps.timed({**ways}, task["repeats"]),
    }
    # Plans may have changed since: bits and peaks are checked of the last ones too.
    for name, chain in ways.items():
        peaks[name] = max(peaks[name], steps.peak_bytes(chain))
    plans = {name: chain.plan for name, chain in ways.items() if chain.plan is not None}
    result["sends"] = {n: _sends(plan) for n, plan in plans.items()}
    result["predicted"] = {n: plan.makespan_s / plain.plain_s for n, plan in plans.items()}
    for chain in ways.values():
        chain.close()
    return result


def _sends(plan: Plan) -> bool:
    return any(isinstance(action, Put) for action in plan.actions)


def _sends_all(chain: mst.Sequential) -> bool:
    """Give a chain the plan that sends every tape to its tier; return whether that fits."""
    state = chain._multistage
    plan = chain.plan
    assert plan is not None
    if plan.tier is None or plan.memory_bytes is None:
        return False
    true = Sizes.of(plan.costs)
    limit = plan.memory_bytes - plan.costs.input_bytes
    table = Table(true.in_slots(limit / 400), 400)
    core = Core(true, table, limit / 400, limit, plan.tier)
    fates = next(extremes(true))
    if math.isinf(core.judge(fates)):
        return False
    actions = tuple(actions_of_laid(core.lay_out(fates), table, inside=plan.tier.tapes))
    use = use_of(actions, plan.costs, [plan.tier])
    anew = replace(plan, actions=actions, makespan_s=use.makespan_s, peak_bytes=use.peak_bytes)
    for variants in state.known.values():
        variants[:] = [replace(each, plan=anew) for each in variants]
    assert state.tiered is not None
    state.tiered.drifted = bool  # type: ignore[method-assign]  # no other plan takes its place
    return True


# -------------------------------------------------------------------- all points


def _over(point: dict[str, Any], name: str, other: str, which: int = 0) -> float:
    """Return how much longer than one way another takes, as the median over the turns."""
    pairs = zip(point["samples"][other], point["samples"][name], strict=True)
    return float(statistics.median(a[which] / b[which] for a, b in pairs))


def _ratios(points: list[dict[str, Any]], torchs: dict[str, dict[str, Any]]) -> dict[str, float]:
    ways = [(p, tier) for p in points for tier in TIERS]
    chosen = [(p, tier) for p, tier in ways if p["sends"].get(tier)]
    beside = [(p, tier) for p, tier in chosen if "no tier" in p["samples"]]
    # Where no tier is chosen, the plan is the one without.
    plans = [(p, t if t in p["samples"] else "no tier") for p, t in ways]
    plans = [(p, name) for p, name in plans if name in p["samples"]]
    ratios = {
        "chose_tier": len(chosen) / max(1, len(plans)),
        "only_with_tier": float(len(chosen) - len(beside)),
        "nothing_fits": float(len(ways) - len(plans)),
        "limit_exceeded": float(sum(b > p["limit"] for p in points for b in p["peaks"].values())),
        "noise": statistics.mean(_error(p, name) for p, name in plans),
    }
    errors = [abs(p["predicted"][name] / _over(p, "plain", name) - 1) for p, name in plans]
    ratios["prediction_error"] = statistics.mean(errors)
    found: dict[str, list[float]] = {
        "over_no_tier": [_over(p, tier, "no tier") for p, tier in beside],
        "thread_over_no_tier": [_over(p, tier, "no tier", 1) for p, tier in beside],
        "over_offload_all": [
            _over(p, tier, f"all to {tier}")
            for p, tier in chosen
            if f"all to {tier}" in p["samples"]
        ],
    }
    over_sequential, over_save = [], []
    for p, name in plans:
        ours, theirs = _over(p, "plain", name), torchs[p["net"]]
        over_save.append(_over(theirs, "plain", "save_on_cpu") / ours)
        fitting = [k for k, peak in theirs["peaks"].items() if peak <= p["limit"]]
        if fitting:
            over_sequential.append(min(_over(theirs, "plain", k) for k in fitting) / ours)
    found |= {"over_checkpoint_sequential": over_sequential, "over_save_on_cpu": over_save}
    for name, each in found.items():
        if each:
            ratios |= {name: statistics.mean(each), f"worst_{name}": min(each)}
    return ratios


def _error(point: dict[str, Any], name: str) -> float:
    """Return the relative standard error of a median over the turns."""
    pairs = zip(point["samples"][name], point["samples"]["plain"], strict=True)
    over = [ours[0] / plain[0] for ours, plain in pairs]
    low, middle, high = statistics.quantiles(over, n=4)
    return float(1.25 * (high - low) / 1.35 / math.sqrt(len(over)) / middle)


def _shown(point: dict[str, Any]) -> str:
    ways = [name for name in point["samples"] if name != "plain"]
    seconds = statistics.median(pair[0] for pair in point["samples"]["plain"])
    text = [f"plain {seconds:.2f} s"]
    for name in ways:
        said = f"{name} {_over(point, 'plain', name):.3f}"
        if name in point.get("predicted", {}):
            said += f" (predicted {point['predicted'][name]:.3f})"
        text.append(said)
    for name, nbytes in point.get("least", {}).items():
        needed = "" if nbytes is None else f", which needs {nbytes / 2**20:.0f} MiB"
        text.append(f"{name} does not fit{needed}")
    text += [f"{name}: {rates}" for name, rates in point.get("rates", {}).items()]
    return "; ".join(text)


def main() -> None:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--folder", type=Path, help="of the file tier; a temporary one, if none")
    parser.add_argument("--nets", nargs="+", choices=NETS, help="some of the networks")
    parser.add_argument("--memory", nargs="+", type=float, help="some limits, as parts of plain")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        task: dict[str, Any] = json.loads(args.child)
        print(json.dumps(_point(task) if "memory" in task else _costs(task)))
        return
    points, torchs = [], {}
    nets = args.nets or (NETS[1:2] if args.quick else NETS)
    memory = args.memory or ((0.4,) if args.quick else MEMORY)
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        tiers = {"file": f"file://{Path(folder).resolve()}", "memory": "memory:"}
        for net in nets:
            task = {"net": net, "seed": args.seed, "quick": args.quick}
            task |= {"costs": str(Path(folder) / f"{net}.json"), "segments": SEGMENTS}
            task |= {"seconds": 2.0 if args.quick else 8.0}
            task |= {"repeats": 3 if args.quick else REPEATS}
            torchs[net] = child("benchmarks.joint_run", task, KEEP)
            print(f"{net} by torch: {_shown(torchs[net])}", flush=True)
            for share in memory:
                point = {"net": net, "memory": share}
                more: dict[str, Any] = {"tiers": tiers, "memory": share}
                point |= child("benchmarks.joint_run", task | more, KEEP)
                points.append(point)
                print(f"{net} {share}: {_shown(point)}", flush=True)
    samples = {"points": points, "torch": torchs}
    finish(args, "joint_run", samples, _ratios(points, torchs))


if __name__ == "__main__":
    main()
