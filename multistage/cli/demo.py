"""`multistage demo`: measure, plan, train the LSTM of `multistage.demos`, report, compare."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tabulate import tabulate

from ..backends.urls import open_store
from ..demos.lstm import LSTM, State, build, gradients_of
from ..errors import ArgumentError
from ..measurement.chain import measure
from ..model.budget import Budget
from ..model.costs import Costs
from ..planners import PLANNERS
from ..report import Report
from ..reversal import Reversal
from ..states.layout import Layout
from ..support.units import format_bytes, format_seconds
from .options import Commands, add_progress, shown

Say = Callable[[str], None]


def add(commands: Commands) -> None:
    """Add the command to a parser."""
    demo = commands.add_parser("demo", help="run a demonstration on real data")
    parser = demo.add_subparsers(dest="demo", required=True, metavar="NAME").add_parser(
        "lstm",
        help="train a character LSTM by full backpropagation through time",
        description="Train a character LSTM (NumPy) on the Python standard library's source by "
        "full backpropagation through time, over a sequence whose states do not fit the memory.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  multistage demo lstm --n-steps 20000 --width 128 --batch 16 "
        "--memory '1 MiB' --tiers memory:",
    )
    parser.set_defaults(run=run)
    parser.add_argument("--n-steps", type=int, default=2_500, help="sequence length (2500)")
    parser.add_argument("--width", type=int, default=256, help="width of the layer (256)")
    parser.add_argument("--batch", type=int, default=32, help="parallel streams of text (32)")
    parser.add_argument(
        "--memory",
        default="32 slots",
        help="fast memory for checkpoints: bytes, '64 MiB' or '32 slots' (32 slots)",
    )
    parser.add_argument(
        "--tiers", help="slow tier: file:///scratch or memory: (a folder under --output)"
    )
    parser.add_argument(
        "--planner", default="auto", choices=["auto", *PLANNERS], help="planner (auto)"
    )
    parser.add_argument("--sweeps", type=int, default=4, help="training sweeps (4)")
    parser.add_argument("--rate", type=float, default=0.004, help="learning rate of Adam (0.004)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights (0)")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("demo-output"),
        help="folder for page, picture and trace",
    )
    parser.add_argument("--json", action="store_true", help="print only JSON")
    add_progress(parser)


def run(args: argparse.Namespace) -> int:
    """Run the demo: measure, plan, train, report, compare."""

    def say(text: str = "") -> None:
        if not args.json:
            print(text, flush=True)

    if args.sweeps < 1:
        raise ArgumentError(f"sweeps={args.sweeps} must be at least 1")
    if not 0 < args.rate < math.inf:
        raise ArgumentError(f"rate={args.rate} must be a finite number above 0")
    args.output.mkdir(parents=True, exist_ok=True)
    model = build(args.n_steps, args.width, args.batch, np.float32, args.seed)
    layout = Layout.of(model.start())
    every = format_bytes(args.n_steps * layout.nbytes)
    slots = Budget.parse(args.memory).slots_for(layout.nbytes)
    say(
        f"Text: {args.batch} streams of {args.n_steps} characters of the standard library's source."
        f"\nLSTM: width {args.width}; one state is {format_bytes(layout.nbytes)}, all of them "
        f"{every}; fast memory for checkpoints: {format_bytes(slots * layout.nbytes)}."
    )
    with tempfile.TemporaryDirectory(prefix="tier-", dir=args.output) as scratch:
        tier = args.tiers or f"file:{Path(scratch).resolve()}"
        results = _train(args, model, tier, say)
    if args.json:
        json.dump(results, sys.stdout, indent=2)
        print()
    return 0


def _measured(args: argparse.Namespace, model: LSTM, tier: str, say: Say) -> Costs:
    """Return the costs of steps and of the tier, and show them."""
    say("\n== Measure")
    costs = measure(
        model.chain(),
        model.start(),
        args.n_steps,
        open_store(tier),
        adjoint=model.start(),
        seconds=2.0,
        progress=shown(args),
    )
    assert costs.tier is not None
    for what, seconds in (
        ("forward step      T_A", costs.forward_step_s),
        ("adjoint step      T_B", costs.turn_s),
        ("write of a state  T_W", costs.tier.write_s),
        ("read of a state   T_R", costs.tier.read_s),
        ("a write's cost to the computing thread", costs.tier.write_overhead_s),
        ("a read's cost to the computing thread", costs.tier.read_overhead_s),
    ):
        say(f"{what:<40}{format_seconds(seconds):>10}")
    return costs


@contextlib.contextmanager
def _told_if_stopped(reversal: Reversal[State, Any]) -> Iterator[None]:
    """Report on standard error how far the sweeps came if Ctrl-C ends them."""
    try:
        yield
    except KeyboardInterrupt:
        with contextlib.suppress(ArgumentError):  # before the first step
            report = reversal.report()
            if not report.complete:
                print(f"\n{report}\n", file=sys.stderr)
        raise


def _train(args: argparse.Namespace, model: LSTM, tier: str, say: Say) -> dict[str, Any]:
    characters = args.n_steps * args.batch
    losses: list[float] = []
    costs = _measured(args, model, tier, say)
    reversal = Reversal(
        model.chain(),
        n_steps=args.n_steps,
        memory=args.memory,
        tiers=tier,
        planner=args.planner,
        costs=costs,
        progress=shown(args),
    )
    with reversal, _told_if_stopped(reversal):
        say("\n== Plan and train")
        for sweep in range(args.sweeps):
            if sweep:
                model.update(characters, args.rate)
            model.clear()
            reversal.forward(model.start())
            if not sweep:
                say(f"{reversal.plan}\n")
            reversal.reverse(model.start())
            losses.append(model.loss / characters)
            report = reversal.report()
            rate = characters / report.makespan_s
            say(
                f"sweep {sweep + 1}: loss {losses[-1]:.4f} per character, "
                f"{format_seconds(report.makespan_s)}, {rate:,.0f} characters/s"
            )

    say(f"\n== Predicted and measured (last sweep)\n{report}")
    page, trace, picture = (
        args.output / name for name in ("report.html", "trace.json", "timeline.svg")
    )
    report.trace(trace)
    report.save(page)
    report.picture(picture)
    say(f"\nWritten: {picture}, {page}, {trace} (open it at ui.perfetto.dev)")
    return {
        "losses": losses,
        "report": report.to_dict(),
        "others": _compare(args, model, costs, report, say),
        "gradients_equal": True,
    }


def _compare(
    args: argparse.Namespace, model: LSTM, costs: Costs, last: Report, say: Say
) -> dict[str, Any]:
    """Repeat the last sweep with other planners; return their reports if all gradients agree."""
    say("\n== The same sweep by other means")
    wanted = gradients_of(model)
    reports, rows = {}, [_row(last, last, True)]
    equal = True
    for planner, memory in (("store-all", f"{args.n_steps} slots"), ("revolve", args.memory)):
        model.clear()
        with Reversal(
            model.chain(), n_steps=args.n_steps, planner=planner, memory=memory, costs=costs
        ) as reversal:
            reversal.forward(model.start())
            reversal.reverse(model.start())
            report = reversal.report()
        same = all(np.array_equal(model.gradients[name], wanted[name]) for name in wanted)
        equal &= same
        reports[planner] = report.to_dict()
        rows.append(_row(report, last, same))
    say(
        tabulate(
            rows,
            headers=("planner", "seconds", "relative", "recompute", "fast memory", "gradient"),
            disable_numparse=True,
            stralign="right",
        )
    )
    say("\nThe gradients are equal to the last bit." if equal else "\nTHE GRADIENTS DIFFER.")
    if not equal:
        raise ArgumentError("gradients differ between planners: please report this")
    return reports


def _row(report: Report, last: Report, same: bool) -> tuple[str, ...]:
    return (
        report.plan.planner,
        f"{report.makespan_s:.2f}",
        f"{report.makespan_s / last.makespan_s:.2f}",
        f"{report.recompute_factor:.2f}",
        format_bytes(report.peak_fast_bytes),
        "equal" if same else "DIFFERS",
    )
