"""One point of `benchmarks.chain_throughput`, measured in a process of its own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint_sequential

import multistage.torch as mst
from benchmarks._chain_models import build
from benchmarks._common import interleaved
from benchmarks._zoo_run import CompiledMeter
from multistage.model.stages import StageCosts
from multistage.torch.environment.states import tensors_in


def _prepared(task: dict[str, Any]) -> tuple[Any, Tensor, torch.device]:
    torch.manual_seed(task["seed"])
    torch.use_deterministic_algorithms(True)
    device = torch.device(task["device"])
    stages, x = build(task["net"], task["batch"])
    stages.to(device)
    return stages, x.to(device), device


def costs(task: dict[str, Any]) -> dict[str, Any]:
    """Profile the network, and save what its stages cost."""
    stages, x, _ = _prepared(task)
    profiled = mst.profile(stages, x, seconds=task["seconds"])
    profiled.save(task["costs"])
    return {}


def point(task: dict[str, Any]) -> dict[str, Any]:
    """Run one point: check the gradient, count the peak, time it beside plain steps."""
    steps = _Steps(task)
    if task["how"] == "sequential":
        run = steps.sequential(task["segments"])
    elif task["how"] == "store-all":
        run = steps.plain
    else:
        run, predicted = steps.chain(task["how"], task["limit"])
    result = {"peak_bytes": steps.peak_bytes(run), "threads": torch.get_num_threads()}
    if "limit" in task:
        result |= predicted
    return result | steps.timed({"": run}, task["repeats"])


def pair(task: dict[str, Any]) -> dict[str, Any]:
    """Run `checkpoint_sequential` and, in turn with it, the optimal schedule at its peak."""
    steps = _Steps(task)
    theirs = steps.sequential(task["segments"])
    limit = steps.peak_bytes(theirs)
    ours, predicted = steps.chain("optimal", limit)
    result = {
        "limit": limit,
        "peak_bytes": steps.peak_bytes(ours),
        "threads": torch.get_num_threads(),
        "sequential_predicted": _sequential_over_plain(
            StageCosts.load(task["costs"]), task["segments"]
        ),
        **predicted,
    }
    return result | steps.timed({"sequential_": theirs, "": ours}, task["rounds"])


def _sequential_over_plain(costs: StageCosts, segments: int) -> float:
    """Return the seconds of `checkpoint_sequential` over plain training's, stages alone."""
    each = len(costs.stages) // segments
    plain_s = sum(stage.forward_s + stage.backward_s for stage in costs.stages)
    # The last segment, with what is left over, keeps its tapes; the others end early.
    again_s = sum(stage.forward_s for stage in costs.stages[: each * (segments - 1)])
    again_s -= sum(costs.stages[each * k - 1].spared_s for k in range(1, segments))
    return 1 + again_s / plain_s


class _Steps:
    """Steps of one network: forward, and backward of a loss."""

    def __init__(self, task: dict[str, Any]) -> None:
        self._task = task
        self._stages, self._x, self._device = _prepared(task)
        self.plain = self._stages
        self._parameters = list(self.plain.parameters())
        self._gradients = self._of(self.plain)

    def sequential(self, segments: int) -> Callable[[Tensor], Tensor]:
        """Return the network by torch's `checkpoint_sequential`."""
        calls = list(self._stages)

        def run(x: Tensor) -> Tensor:
            out: Tensor = checkpoint_sequential(calls, segments, x, use_reentrant=False)
            return out

        return run

    def chain(self, planner: Any, limit: int) -> tuple[Any, dict[str, Any]]:
        """Return the network by a plan, and what the plan predicts."""
        chain: mst.Compiled | mst.Sequential
        if planner == "optimal":
            chain = mst.compile(self._stages, memory=limit, check="off")
            chain(self._x)
        else:
            costs = StageCosts.load(self._task["costs"])
            chain = mst.Sequential(
                self._stages, self._x, memory=limit, planner=planner, costs=costs, check="off"
            )
        assert chain.plan is not None
        return chain, {
            "predicted_s": chain.plan.makespan_s,
            "predicted_over_plain": chain.plan.makespan_s / chain.plan.plain_s,
            "predicted_bytes": chain.plan.peak_bytes,
        }

    def peak_bytes(self, run: Callable[[Tensor], Tensor]) -> int:
        """Check the gradient, and return the peak of one more step."""
        for ours, theirs in zip(self._of(run), self._gradients, strict=True):
            assert torch.equal(ours, theirs), f"{self._task}: another gradient than plain training"
        with CompiledMeter(self._device) as meter:
            meter.ignore([self._x, *self._parameters])
            meter.ignore(p.grad for p in self._parameters if p.grad is not None)
            meter.ignore(self.plain.buffers())
            self._step(run)
            inputs = sum(t.untyped_storage().nbytes() for t in tensors_in(self._x))
            return meter.peak_bytes + inputs

    def timed(self, runs: dict[str, Callable[[Tensor], Tensor]], repeats: int) -> dict[str, Any]:
        """Return the seconds of some runs, in turn with plain steps; keys get their names."""
        every = {"plain_": self.plain, **runs}
        calls = {name: partial(self._step, run) for name, run in every.items()}
        seconds = interleaved(calls, repeats)
        plain = seconds["plain_"]
        result: dict[str, Any] = {"plain_s": statistics.median(plain)}
        for name in runs:
            result[f"{name}seconds"] = statistics.median(seconds[name])
            over = [b / a for a, b in zip(plain, seconds[name], strict=True)]
            result[f"{name}over_plain"] = statistics.median(over)
        if len(runs) == 2:
            theirs, ours = (seconds[name] for name in runs)
            result["gains"] = [a / b - 1 for a, b in zip(theirs, ours, strict=True)]
        return result

    def _step(self, forward: Callable[[Tensor], Tensor]) -> float:
        _synchronize(self._device)
        began = time.perf_counter()
        forward(self._x).square().mean().backward()
        _synchronize(self._device)
        return time.perf_counter() - began

    def _of(self, forward: Callable[[Tensor], Tensor]) -> list[Tensor]:
        for parameter in self._parameters:
            parameter.grad = None
        self._step(forward)
        return [p.grad.clone() for p in self._parameters if p.grad is not None]


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
