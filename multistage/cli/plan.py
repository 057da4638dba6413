"""`multistage plan`: compare the planners and choose one."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Literal, TypeAlias

from tabulate import tabulate

from ..errors import ArgumentError
from ..planners import RANKED, Plan
from ..planners.chain.heterogeneous import memory_curve
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
    shown,
)

Rows: TypeAlias = "list[dict[str, object]]"


def add(commands: Commands) -> None:
    """Add the command to a parser."""
    planning = commands.add_parser(
        "plan",
        help="compare the planners and choose one",
        description="Predict every planner's makespan, recompute factor, transfers and peak.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG.format(command="plan")
        + "  # with a page to look at, and the time-memory trade-off as a picture\n"
        "  multistage plan --costs costs.json --n-steps 300 --memory '20 slots' \\\n"
        "      --html plan.html --curve --picture trade-off.svg\n"
        "  # a chain of unequal stages, profiled elsewhere\n"
        "  multistage plan --chain costs.json --memory 4GiB\n"
        "  # with a tier, to which tapes and states may go; drawn, and kept in a file\n"
        "  multistage plan --chain costs.json --memory 4GiB \\\n"
        "      --rates write=2GB/s,read=1GB/s --picture plan.svg --save plan.json",
    )
    add_problem(planning)
    chain = planning.add_argument_group("a chain of unequal stages, in place of steps")
    chain.add_argument("--chain", type=Path, help="costs of its stages, as saved by profile()")
    showing = add_showing(planning, "where checkpoints stand, or the trade-off with --curve,")
    showing.add_argument("--curve", action="store_true", help="show the time-memory trade-off")
    showing.add_argument("--save", type=Path, help="write the plan to this file: .json")
    showing.add_argument(
        "--load", type=Path, help="show a plan that --save wrote; its schedule is checked again"
    )
    planning.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Make the plan, print it and write the files that were asked for."""
    if args.curve:
        leave_out(args, ("save",), "--curve shows no single plan")
    files = (args.save, (".json",)), (args.html, (".html",)), (args.picture, SUFFIXES)
    require_writable(*files, (args.save_costs, ()))
    if args.load is not None:
        leave_out(args, ("rates", "save"), "--load shows a plan as it is")
    made = made_by(args)
    if args.curve:
        _print_curve(args, made)
    else:
        print(json.dumps(made.to_dict(), indent=2) if args.json else made)
    return _show(args, made)


def _show(args: argparse.Namespace, made: Plan) -> int:
    """Write the files that were asked for, and say so."""
    if args.picture is not None:
        travels = made.actions and made.tier is not None
        what: Literal["timeline", "schedule"] = "timeline" if travels else "schedule"
        made.picture(args.picture, "trade-off" if args.curve else what)
    for path in (args.html, args.save):
        if path is not None:
            made.save(path)
    say_written(args, args.picture, args.html, args.save)
    return 0


def _print_curve(args: argparse.Namespace, made: Plan) -> None:
    """Print the time-memory trade-off of a plan's problem."""
    points, rows = _curve_of_chain(made) if made.actions else _curve_of_steps(args, made)
    if args.json:
        print(json.dumps(points, indent=2))
    else:
        print(tabulate(rows, headers="keys", disable_numparse=True, stralign="right"))


def _curve_of_steps(args: argparse.Namespace, made: Plan) -> tuple[Rows, Rows]:
    """Return every plan of the trade-off, and the fastest of each number of slots."""
    from ..planners.ranking import trade_off

    names = RANKED if args.planner in (None, "auto") else (args.planner,)
    curves = trade_off(made.step_costs, made.n_steps, names, also=made.slots, progress=shown(args))
    plans = [each for curve in curves.values() for each in curve]
    columns = ("slots", "planner", "makespan_s", "lower_bound_s", "recompute_factor")
    points = [{name: getattr(p, name) for name in columns} for p in plans]
    best: dict[int, Plan] = {}
    for each in sorted(plans, key=lambda p: (p.slots, p.makespan_s)):
        best.setdefault(each.slots, each)
    return points, [{"slots": slots, **each.row()} for slots, each in best.items()]


def _curve_of_chain(made: Plan) -> tuple[Rows, Rows]:
    """Return every point of the trade-off, and as many as a table is read for."""
    if made.planner not in ("optimal", "revolve", "pieces"):
        raise ArgumentError(f"--curve goes with planner optimal or revolve, not {made.planner}")
    if made.tier is not None:
        raise ArgumentError("--curve shows plans without a tier, and this plan has one")
    curve = memory_curve(made.stage_costs, "revolve" if made.planner == "revolve" else "optimal")
    best = curve[-1][1]
    chosen = curve[:: max(1, len(curve) // 24)]
    chosen = chosen if chosen[-1] == curve[-1] else [*chosen, curve[-1]]
    rows: Rows = [
        {
            "peak": format_bytes(m),
            "makespan": format_seconds(s),
            "above the fastest": f"{100 * (s / best - 1):.1f} %",
        }
        for m, s in chosen
    ]
    return [{"peak_bytes": m, "makespan_s": s} for m, s in curve], rows
