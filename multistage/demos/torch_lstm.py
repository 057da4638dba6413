"""A character-level LSTM in PyTorch, trained on long sequences within a memory limit."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..support.command_line import add_progress, shown
from ..support.units import format_bytes, format_seconds
from .text import encode, standard_library

_CHECKED = 300  # steps that plain autograd is asked for too


def add(demos: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the demo to a command-line parser."""
    parser = demos.add_parser(
        "torch-lstm",
        help="the same with PyTorch, larger, on a GPU where there is one",
        description="Train a character LSTM (PyTorch) on the Python standard library's source "
        "over sequences whose tapes do not fit the limit; needs torch.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  multistage demo torch-lstm --n-steps 8000 --memory 32MiB "
        "--tiers pinned:1GiB",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--n-steps", type=int, default=2000, help="characters per stream (2000)")
    parser.add_argument("--width", type=int, default=256, help="width of the LSTM (256)")
    parser.add_argument("--batch", type=int, default=32, help="streams (32)")
    parser.add_argument("--memory", default="64 MiB", help="limit for states and graphs (64 MiB)")
    parser.add_argument(
        "--tiers",
        action="append",
        default=[],
        help="slow tier, such as pinned:2GiB or file:///scratch; twice for one below the other",
    )
    parser.add_argument("--updates", type=int, default=5, help="training updates (5)")
    parser.add_argument("--rate", type=float, default=0.01, help="learning rate of Adam (0.01)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (0)")
    parser.add_argument("--html", type=Path, help="write the plan as a page, in one file")
    parser.add_argument("--json", action="store_true", help="print only JSON")
    add_progress(parser)


def run(args: argparse.Namespace) -> int:
    """Run the demo: train, compare with plain autograd, report."""
    try:
        import torch
    except ImportError as error:
        raise ArgumentError(
            "this demo needs PyTorch: pip install 'multistage-checkpointing[torch]'"
        ) from error
    for name in ("n_steps", "width", "batch", "updates"):
        if getattr(args, name) < 1:
            raise ArgumentError(f"{name}={getattr(args, name)} must be at least 1")
    if not 0 < args.rate < math.inf:
        raise ArgumentError(f"rate={args.rate} must be a finite number above 0")
    if not 0 <= args.seed < 1 << 64:
        raise ArgumentError(f"seed={args.seed} must be from 0 to 2^64 - 1")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    def say(text: str = "") -> None:
        if not args.json:
            print(text, flush=True)

    streams, symbols = encode(standard_library((args.n_steps + 1) * args.batch), args.batch)
    text = torch.from_numpy(streams.astype("int64")).to(device)
    torch.manual_seed(args.seed)
    model = _model(symbols, args.width).to(device)
    start = tuple(torch.zeros(args.batch, args.width, device=device) for _ in range(2))
    say(
        f"Text: {args.batch} streams of {args.n_steps} characters of the standard library's source."
        f"\nLSTM: width {args.width}, on {device}; limit for states and graphs {args.memory}."
    )
    results = _train(args, model, start, text, say)
    results["gradients_equal"] = _check(args, model, start, text, say)
    if args.json:
        json.dump(results, sys.stdout, indent=2)
        print()
    return 0


def _model(symbols: int, width: int) -> Any:
    from torch import Tensor, nn

    class Characters(nn.Module):
        """Reads characters; returns its state and the loss of predicting the next ones."""

        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(symbols, width)
            self.cell = nn.LSTMCell(width, width)
            self.head = nn.Linear(width, symbols)

        def forward(self, state: object, x: tuple[Tensor, Tensor]) -> tuple[object, Tensor]:
            h, c = self.cell(self.embedding(x[0]), state)
            loss = nn.functional.cross_entropy(self.head(h), x[1], reduction="sum")
            return (h, c), loss

    return Characters()


def _train(args: argparse.Namespace, model: Any, start: Any, text: Any, say: Any) -> dict[str, Any]:
    import torch

    from .. import torch as mst

    optimizer = torch.optim.Adam(model.parameters(), args.rate)
    characters = args.n_steps * args.batch
    losses, seconds = [], []
    plan = None
    for update in range(args.updates):
        began = time.perf_counter()
        out = mst.unroll(
            model,
            start,
            lambda t: (text[t], text[t + 1]),
            n_steps=args.n_steps,
            memory=args.memory,
            tiers=args.tiers,
            progress=shown(args),
        )
        assert out.loss is not None and out.plan is not None
        if plan is None:
            plan = out.plan
            say(f"\n{plan}\n")
            if args.html is not None:
                plan.save(args.html)
                say(f"Written: {args.html}\n")
        optimizer.zero_grad()
        (out.loss / characters).backward()
        optimizer.step()
        seconds.append(time.perf_counter() - began)
        rate = f"{characters / seconds[-1]:,.0f} characters/s" if update else "measuring included"
        losses.append(out.loss.item() / characters)
        say(
            f"update {update + 1}: loss {losses[-1]:.4f} per character, "
            f"{format_seconds(seconds[-1])}, {rate}"
        )
    assert plan is not None
    typical = sorted(seconds[1:] or seconds)[len(seconds[1:]) // 2]
    say(
        f"\nPredicted {format_seconds(plan.makespan_s)} an update, measured "
        f"{format_seconds(typical)}; plain autograd would take {format_bytes(plan.keep_bytes)}."
    )
    return {
        "losses": losses,
        "seconds": seconds,
        "predicted_s": plan.makespan_s,
        "planner": plan.planner,
        "chunk": plan.chunk,
        "peak_bytes": plan.peak_bytes,
        "keep_bytes": plan.keep_bytes,
    }


def _check(args: argparse.Namespace, model: Any, start: Any, text: Any, say: Any) -> bool:
    """Compare with plain autograd over the first steps, bit for bit."""
    import torch

    from .. import torch as mst

    steps = min(args.n_steps, _CHECKED)
    model.zero_grad()
    state, known = model(start, (text[0], text[1]))
    for t in range(1, steps):
        state, loss = model(state, (text[t], text[t + 1]))
        known = known + loss
    torch.autograd.backward([known])
    wanted = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    out = mst.unroll(
        model, start, lambda t: (text[t], text[t + 1]), n_steps=steps, memory=0.2, tiers=args.tiers
    )
    assert out.loss is not None
    out.loss.backward()  # type: ignore[no-untyped-call]
    equal = torch.equal(out.loss, known) and all(
        torch.equal(a, p.grad) for a, p in zip(wanted, model.parameters(), strict=True)
    )
    say(
        f"Over the first {steps} steps the gradient is that of plain autograd"
        + (" to the last bit." if equal else ", but NOT to the last bit.")
    )
    return equal
