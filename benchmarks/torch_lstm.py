"""Time per step and peak memory of a PyTorch LSTM over sequence length, beside torch's own ways.

A character model: embedding, `nn.LSTMCell`, softmax and loss at every step.
Inputs are made by a function, so that nothing of the sequence's length lies in
memory.  Every point is a fresh process; peak memory is the high-water mark of
one forward and backward beyond what was held before: of the process, or by the
allocator of a CUDA device, where the longest sequence has a million steps.
`unroll` has a limit of 8 MiB; its gradients are asserted to be those of plain
autograd bit for bit, the others' to be close.

    python -m benchmarks.torch_lstm [--quick] [--device cuda] [--steps N N]
                                    [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import multistage.torch as mst
from benchmarks._common import child, finish, held_kib, options, reset_peak

WIDTH, BATCH, SYMBOLS = 128, 16, 96
MEMORY = "8 MiB"
LENGTHS = {
    "cpu": (2_000, 8_000, 32_000, 128_000),
    "cuda": (2_000, 8_000, 32_000, 128_000, 1_000_000),
}
QUICK_LENGTHS = (500, 2_000)
# Longest sequences that keep every tape: they take memory in proportion.
MOST = {"plain": 32_000, "save_on_cpu": 8_000, "checkpoint": 32_000, "nested": 32_000}
OURS = ("unroll memory", "unroll pinned", "unroll pinned, file", "unroll file")
# Without a device, states in unbounded pinned memory are in the process too.
FLAT = {"cpu": ("unroll memory", "unroll pinned, file", "unroll file"), "cuda": OURS}
METHODS = ("plain", "save_on_cpu", "checkpoint", "checkpoint reentrant", "nested", *OURS)
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}

State = tuple[Tensor, Tensor]


class Characters(nn.Module):
    """Predicts the next character; returns the state and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, WIDTH)
        self.cell = nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, state: State, x: Tensor) -> tuple[State, Tensor]:
        """Return the state after one symbol, and its loss."""
        h, c = self.cell(self.embedding(x[0]), state)
        return (h, c), nn.functional.cross_entropy(self.head(h), x[1])


class Task:
    """A model, its inputs and a start."""

    def __init__(self, seed: int, device: str) -> None:
        torch.manual_seed(seed)
        self.model = Characters().to(device)
        h, c = torch.zeros(2, BATCH, WIDTH, device=device)
        self.state: State = (h, c)
        self._text = torch.randint(0, SYMBOLS, (4096, BATCH)).to(device)

    def x(self, t: int) -> Tensor:
        """Return the characters of step t and those after them."""
        return self._text[t % 4095 : t % 4095 + 2]

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
    if reentrant:  # whose inputs must require gradients
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
        n_steps=steps,
        memory=MEMORY,
        tiers=tiers,
        planner="stream" if tiers else "recompute",
    )
    assert out.loss is not None
    return out.loss


class Peak:
    """Bytes held beyond those at the start, at most."""

    def __init__(self, device: str) -> None:
        self._cuda = device == "cuda"
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            self._before = torch.cuda.memory_allocated()
        else:
            reset_peak()
            self._before = held_kib("VmRSS")

    def kib(self) -> float:
        """Return the peak since then; wait for the device."""
        if self._cuda:
            torch.cuda.synchronize()
            return (torch.cuda.max_memory_allocated() - self._before) / 1024
        return held_kib("VmHWM") - self._before


def _run_child(given: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    task, method = Task(given["seed"], given["device"]), given["method"]
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
            n_steps=given["steps"],
            memory=MEMORY,
            tiers=tiers[method],
            planner="stream" if tiers[method] else "recompute",
        )
    peak = Peak(given["device"])
    began = time.perf_counter()
    loss = once(given["steps"])
    peak_kib = peak.kib()
    seconds = time.perf_counter() - began
    gradients = [p.grad for p in task.model.parameters() if p.grad is not None]
    return {
        "seconds": seconds,
        "peak_kib": peak_kib,
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
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, nargs="+", metavar="N", help="other lengths")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(_run_child(json.loads(args.child))))
        return
    lengths = args.steps or (QUICK_LENGTHS if args.quick else LENGTHS[args.device])
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
                        "device": args.device,
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
    finish(args, "torch_lstm", samples, _ratios(samples, FLAT[args.device]), left_out)
    if args.plot:
        _plot(samples, args.plot)


def _seconds(results: list[dict[str, Any]]) -> float:
    return min(r["seconds"] for r in results)


def _peak(results: list[dict[str, Any]]) -> float:
    return statistics.median(r["peak_kib"] for r in results)


def _ratios(
    samples: dict[int, dict[str, list[dict[str, Any]]]], flat: Sequence[str]
) -> dict[str, float]:
    longest, first = max(samples), min(n for n in samples if n >= min(8_000, max(samples)))
    growth = [_peak(samples[longest][m]) / max(1, _peak(samples[first][m])) for m in flat]
    fits = max(n for n in samples if n <= 8_000)
    plain = _seconds(samples[fits]["plain"])
    at = samples[longest]
    ours = min((_seconds(at[m]), _peak(at[m])) for m in flat)
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
