"""Time per step and peak memory of a PyTorch LSTM over sequence length, beside torch's own ways.

A character model: embedding, `nn.LSTMCell`, softmax and loss at every step.
Inputs are made by a function, so that nothing of the sequence's length lies in
memory.  Every point is a fresh process; peak memory is the high-water mark of
one forward and backward beyond what the process held before.  `unroll` has a
limit of 8 MiB; its gradients are asserted to be those of plain autograd bit
for bit, the others' to be close.

    python -m benchmarks.torch_lstm [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import multistage.torch as mst
from benchmarks._common import child, finish, held_kib, options, reset_peak

WIDTH, BATCH, SYMBOLS = 128, 16, 96
MEMORY = "8 MiB"
LENGTHS = (2_000, 8_000, 32_000, 128_000)
QUICK_LENGTHS = (500, 2_000)
# Longest sequences that keep every tape: they take memory in proportion.
MOST = {"plain": 32_000, "save_on_cpu": 8_000, "checkpoint": 32_000, "nested": 32_000}
OURS = ("unroll memory", "unroll pinned", "unroll pinned, file", "unroll file")
# Without a device, states in unbounded pinned memory are in the process too.
FLAT = ("unroll memory", "unroll pinned, file", "unroll file")
METHODS = ("plain", "save_on_cpu", "checkpoint", "checkpoint reentrant", "nested", *OURS)
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}

State = tuple[Tensor, Tensor]


class Characters(nn.Module):
    """Predicts the next character; returns the state and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, state: State, x: Tensor) -> tuple[State, Tensor]:
        h, c = self.cell(self.embedding(x[0]), state)
        return (h, c), nn.functional.cross_entropy(self.head(h), x[1])


class Task:
    """A model, its inputs and a start."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Characters()
        self.state: State = (torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, WIDTH))
        self._text = torch.randint(0, SYMBOLS, (4096, BATCH))

    def x(self, t: int) -> Tensor:
        """Return the characters of step t and those after them."""
        return self._text[torch.tensor([t % 4095, t % 4095 + 1])]

    def steps(self, start: int, stop: int, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Run some steps as they are written; return the state and the loss."""
        total: Any = 0.0
        state = (h, c)
        for t in range(start, stop):
            state, loss = self.model(state, self.x(t))
            total = total + loss
        return *state, total


def _checkpointed(task: Task, steps: int, reentrant: bool) -> Tensor:
    size = math.ceil(math.sqrt(steps))
    h, c = task.state
    if reentrant:  # whose inputs must want gradients
        h, c = h.clone().requires_grad_(), c.clone().requires_grad_()
    total: Any = 0.0
    for start in range(0, steps, size):
        h, c, loss = checkpoint(
            task.steps, start, min(start + size, steps), h, c, use_reentrant=reentrant
        )
        total = total + loss
    return total  # type: ignore[no-any-return]


def _nested(task: Task, steps: int) -> Tensor:
    inner = math.ceil(steps ** (1 / 3))

    def outer(start: int, stop: int, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        total: Any = 0.0
        for at in range(start, stop, inner):
            h, c, loss = checkpoint(
                task.steps, at, min(at + inner, stop), h, c, use_reentrant=False
            )
            total = total + loss
        return h, c, total

    h, c = task.state
    total: Any = 0.0
    for start in range(0, steps, inner**2):
        h, c, loss = checkpoint(
            outer, start, min(start + inner**2, steps), h, c, use_reentrant=False
        )
        total = total + loss
    return total  # type: ignore[no-any-return]


def _unrolled(task: Task, steps: int, tiers: tuple[str, ...]) -> Tensor:
    out = mst.unroll(
        task.model,
        task.state,
        task.x,
        steps=steps,
        memory=MEMORY,
        tiers=tiers,
        strategy="stream" if tiers else "recompute",
    )
    assert out.loss is not None
    return out.loss


def _run_child(given: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    task, method = Task(given["seed"]), given["method"]
    tiers: dict[str, tuple[str, ...]] = {
        "unroll memory": (),
        "unroll pinned": ("pinned:",),
        "unroll pinned, file": ("pinned:2MiB", f"file:{given['scratch']}?buffers=1MiB"),
        "unroll file": (f"file:{given['scratch']}?buffers=1MiB",),
    }
    ways: dict[str, Callable[[int], Tensor]] = {
        "plain": lambda n: task.steps(0, n, *task.state)[2],
        "save_on_cpu": lambda n: task.steps(0, n, *task.state)[2],
        "checkpoint": lambda n: _checkpointed(task, n, reentrant=False),
        "checkpoint reentrant": lambda n: _checkpointed(task, n, reentrant=True),
        "nested": lambda n: _nested(task, n),
    }
    for name, where in tiers.items():
        ways[name] = lambda n, where=where: _unrolled(task, n, where)  # type: ignore[misc]
    run = ways[method]

    def once(steps: int) -> Tensor:
        task.model.zero_grad()
        if method == "save_on_cpu":
            with torch.autograd.graph.save_on_cpu():
                loss = run(steps)
        else:
            loss = run(steps)
        loss.backward()
        return loss.detach()

    for _ in range(2):
        once(200)
    if method in tiers:
        mst.unroll(  # measures and plans, as the first step of a training does
            task.model,
            task.state,
            task.x,
            steps=given["steps"],
            memory=MEMORY,
            tiers=tiers[method],
            strategy="stream" if tiers[method] else "recompute",
        )
    reset_peak()
    before = held_kib("VmRSS")
    began = time.perf_counter()
    loss = once(given["steps"])
    seconds = time.perf_counter() - began
    peak = held_kib("VmHWM") - before
    gradients = [p.grad for p in task.model.parameters() if p.grad is not None]
    return {
        "seconds": seconds,
        "peak_kib": peak,
        "loss": float(loss),
        "gradient": [float(g.double().norm()) for g in gradients],
        "bits": [int(g.view(torch.int32).long().sum()) for g in gradients],
    }


def _assert_answer(known: dict[str, Any], found: dict[str, Any], method: str) -> None:
    if method in OURS:
        exact = known["bits"] == found["bits"] and known["loss"] == found["loss"]
        assert exact, f"{method}: not the bits of {known['method']}"
    for a, b in zip(known["gradient"], found["gradient"], strict=True):
        assert math.isclose(a, b, rel_tol=1e-3), f"{method}: another gradient than plain autograd"


def main() -> None:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(_run_child(json.loads(args.child))))
        return
    lengths = QUICK_LENGTHS if args.quick else LENGTHS
    samples: dict[int, dict[str, list[dict[str, Any]]]] = {}
    left_out = []
    with tempfile.TemporaryDirectory(prefix="torch-lstm-", dir=".") as scratch:
        for turn in range(1 if args.quick else 2):
            for steps in lengths:
                there = samples.setdefault(steps, {})
                known: dict[str, Any] | None = None
                for method in METHODS:
                    if steps > MOST.get(method, steps):
                        if not turn:
                            left_out.append(f"{method} at {steps}: memory grows with the length")
                        continue
                    if turn and steps > 8_000:
                        continue
                    task = {
                        "method": method,
                        "steps": steps,
                        "seed": args.seed,
                        "scratch": str(Path(scratch).resolve()),
                    }
                    found = child("benchmarks.torch_lstm", task, ENVIRONMENT)
                    there.setdefault(method, []).append(found)
                    if known is None or (method == OURS[0] and known["method"] != "plain"):
                        known = {**found, "method": method}
                    _assert_answer(known, found, method)
                    print(
                        f"{steps:>7} {method:<22}{1e6 * found['seconds'] / steps:>8.0f} us/step"
                        f"{found['peak_kib'] / 1024:>9.1f} MiB",
                        flush=True,
                    )
    finish(args, "torch_lstm", samples, _ratios(samples), left_out)
    if args.plot:
        _plot(samples, args.plot)


def _seconds(results: list[dict[str, Any]]) -> float:
    return min(r["seconds"] for r in results)


def _peak(results: list[dict[str, Any]]) -> float:
    return statistics.median(r["peak_kib"] for r in results)


def _ratios(samples: dict[int, dict[str, list[dict[str, Any]]]]) -> dict[str, float]:
    longest, first = max(samples), min(n for n in samples if n >= min(8_000, max(samples)))
    growth = [_peak(samples[longest][m]) / _peak(samples[first][m]) for m in FLAT]
    fits = max(n for n in samples if n <= 8_000)
    plain = _seconds(samples[fits]["plain"])
    at = samples[longest]
    ours = min((_seconds(at[m]), _peak(at[m])) for m in FLAT)
    peers = [m for m in at if m not in OURS]
    fitting = [_seconds(at[m]) for m in peers if _peak(at[m]) <= 1.1 * ours[1]]
    ratios = {
        "peak_growth": max(growth),
        "time_over_plain": min(_seconds(samples[fits][m]) for m in OURS) / plain,
        "time_over_plain_worst": max(_seconds(samples[fits][m]) for m in OURS) / plain,
        "fastest_peer_of_any_size_over_ours": min(_seconds(at[m]) for m in peers) / ours[0],
    }
    # Infinite where no peer fits the memory at all.
    ratios["best_peer_over_ours"] = min(fitting, default=math.inf) / ours[0]
    return ratios


def _plot(samples: dict[int, dict[str, list[dict[str, Any]]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method in METHODS:
        lengths = [n for n in sorted(samples) if method in samples[n]]
        style = {"marker": "o", "ms": 4, "label": method, "lw": 2.5 if method in OURS else 1.2}
        left.plot(lengths, [max(0.1, _peak(samples[n][method]) / 1024) for n in lengths], **style)
        right.plot(lengths, [1e6 * _seconds(samples[n][method]) / n for n in lengths], **style)
    left.set_yscale("log")
    left.set_ylabel("peak memory (MiB)")
    right.set_ylim(bottom=0)
    right.set_ylabel("time per step (us)")
    for axes in (left, right):
        axes.set_xscale("log")
        axes.set_xlabel("steps")
        axes.grid(alpha=0.3)
    figure.legend(*left.get_legend_handles_labels(), loc="outside right", fontsize=8)
    figure.suptitle(f"LSTM of width {WIDTH}, batch {BATCH}; unroll within {MEMORY}")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
