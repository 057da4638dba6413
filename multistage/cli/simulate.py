"""`multistage simulate`: run a plan in virtual time and draw it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tabulate import tabulate

from ..planners import Plan
from ..schedule.simulation import Jitter, Simulation
from ..support.units import format_bytes, format_seconds
from ..view import SUFFIXES
from .options import (
    EPILOG,
    Commands,
    add_problem,
    add_showing,
    leave_out,
    made_by,
    require_writable,
    say_written,
)


def add(commands: Commands) -> None:
    """Add the command to a parser."""
    simulating = commands.add_parser(
        "simulate",
        help="run a plan in virtual time and draw it",
        description="Run a plan in virtual time: its figures, a picture, a trace.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG.format(command="simulate")
        + "  # with transfers of which one in twenty takes ten times as long\n"
        "  multistage simulate --costs costs.json --n-steps 300 --memory '20 slots' \\\n"
        "      --jitter spikes:0.05,10 --picture timeline.svg",
    )
    add_problem(simulating)
    showing = add_showing(simulating, "the timeline")
    showing.add_argument("--trace", type=Path, help="write a trace for ui.perfetto.dev")
    simulating.add_argument("--load", type=Path, help="simulate a plan that plan --save wrote")
    simulating.add_argument("--jitter", help="lognormal:SIGMA or spikes:PROBABILITY,FACTOR")
    simulating.add_argument("--seed", type=int, help="seed of the jitter (0)")
    simulating.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Run a plan, read from a file or newly made, in virtual time; a chain's at other rates too."""
    if args.load is not None:
        leave_out(args, ("n_steps", "memory", "costs"), "--load simulates a plan as it is")
    if args.jitter is None:
        leave_out(args, ("seed",), "without --jitter nothing is drawn")
    files = (args.html, (".html",)), (args.picture, SUFFIXES), (args.trace, ())
    require_writable(*files, (args.save_costs, ()))
    jitter = None if args.jitter is None else Jitter.parse(args.jitter)
    made = made_by(args)
    if args.rates is not None and args.load is not None:
        made = made.with_tier(args.rates)
    run = made.simulate(jitter=jitter, seed=args.seed or 0)
    if args.picture is not None:
        from ..planners.pages import run_chart
        from ..view import save_chart

        save_chart(run_chart(made, run, made.title), args.picture)
    if args.html is not None:
        from ..planners.pages import save_run

        save_run(made, run, args.html)
    if args.trace is not None:
        from ..view.chrome_trace import write_trace

        write_trace(run.timeline, args.trace)
    _print_run(args, made, run)
    say_written(args, args.picture, args.html, args.trace)
    return 0


def _print_run(args: argparse.Namespace, made: Plan, run: Simulation) -> None:
    bound_s = made.lower_bound_s
    if args.json:
        facts = {
            "planner": made.planner,
            "makespan_s": run.makespan_s,
            "predicted_s": made.makespan_s,
            "lower_bound_s": bound_s,
            "recompute_factor": run.forward_steps / made.n_steps,
            "stall_s": run.stall_s,
            "writes": run.writes,
            "reads": run.reads,
            "peak_bytes": run.peak_bytes,
            **({"peak_slots": run.peak_slots} if not made.actions else {}),
            "memory_bytes": made.memory_bytes,
            "jitter": args.jitter,
            "seed": args.seed or 0,
        }
        print(json.dumps(facts, indent=2))
        return
    bound = "lower bound" if args.jitter is None else "lower bound without jitter"
    rows = [
        ("makespan", format_seconds(run.makespan_s)),
        ("predicted, as planned", format_seconds(made.makespan_s)),
        (bound, "not known" if bound_s is None else format_seconds(bound_s)),
        ("recompute factor", f"{run.forward_steps / made.n_steps:.3f}"),
        ("stalls", format_seconds(run.stall_s)),
        ("written", f"{run.writes}"),
        ("read", f"{run.reads}"),
        ("peak fast memory", format_bytes(run.peak_bytes)),
    ]
    print(made.summary())
    print(tabulate(rows, tablefmt="plain", disable_numparse=True, colalign=("left", "right")))
