"""The command line: probe | plan | simulate | demo | status | clean."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from tabulate import tabulate

from .demos.watching import add_progress, shown
from .errors import ArgumentError, MultistageError, redacted
from .model.costs import Costs
from .model.stages import StageCosts
from .model.tier import Tier
from .planners import PLANNERS, RANKED, Plan, UniformPlan, plan
from .planners.chain.heterogeneous import (
    CHAIN_PLANNERS,
    ChainPlan,
    ChainPlanner,
    memory_curve,
    plan_chain,
)
from .support.units import format_bytes, format_seconds, parse_bytes, parse_seconds
from .version import __version__

if TYPE_CHECKING:
    from .schedule.simulation import Simulation

Rows: TypeAlias = "list[dict[str, Any]]"

# Options that describe uniform steps by numbers, those of their slow tier last.
_TIER_NUMBERS = ("write", "read", "write_overhead", "read_overhead", "capacity")
_NUMBERS = ("forward_step", "reverse_step", "tape_step", "state", "tape", *_TIER_NUMBERS)
# Of those with a default, as the parser has it; all others are None unless given.
_DEFAULTS = {
    "state": "1",
    "tape": "0",
    "write_overhead": "0",
    "read_overhead": "0",
    "planner": "auto",
}

_PLAN_EPILOG = """\
times are seconds, or written with a unit: 250us, 1.5ms, 2s.

examples:
  # a step of 1 ms, its adjoint of 2 ms, states of 64 KiB, a disk that takes 4 ms a state
  multistage {command} --forward-step 1ms --reverse-step 2ms --state 64KiB \\
      --write 4ms --read 4ms --n-steps 10000 --memory "20 slots"
  # the same from a file written by --save-costs or by multistage.Costs.save
  multistage {command} --costs costs.json --n-steps 10000 --memory "512 MiB"
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="multistage",
        description="Reverse long computations beyond memory: measure tiers, plan, simulate, see.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Start with `multistage demo lstm`, or `multistage plan --help`.",
    )
    parser.add_argument("--version", action="version", version=f"multistage {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    probe = commands.add_parser(
        "probe",
        help="measure what a folder or another tier can do; list memory nodes",
        description="Write and read states in a tier, a folder with every engine, and show what "
        "it costs. Without a tier: list the memory nodes (MCDRAM, HBM, CXL, sockets), and "
        "propose where to compute and which tier to use.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  multistage probe\n"
        "  multistage probe /scratch --sizes 64KiB,1MiB,16MiB\n"
        "  multistage probe 'file:///scratch?engine=direct'\n"
        "  multistage probe numa:1",
    )
    probe.add_argument(
        "tier", nargs="?", help="a folder, or a tier as programs name it: file:///scratch, numa:1"
    )
    probe.add_argument("--sizes", default="64KiB,1MiB,16MiB", help="state sizes (64KiB,1MiB,16MiB)")
    probe.add_argument("--json", action="store_true", help="print only JSON")
    add_progress(probe)
    probe.set_defaults(run=_probe)

    planning = commands.add_parser(
        "plan",
        help="compare the planners and choose one",
        description="Predict every planner's makespan, recompute factor, transfers and peak.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_PLAN_EPILOG.format(command="plan")
        + "  # with a page to look at, and the time-memory trade-off as a picture\n"
        "  multistage plan --costs costs.json --n-steps 300 --memory '20 slots' \\\n"
        "      --html plan.html --curve --picture trade-off.svg\n"
        "  # a chain of unequal stages, profiled elsewhere\n"
        "  multistage plan --chain costs.json --memory 4GiB\n"
        "  # with a tier, to which tapes and states may go; drawn, and kept in a file\n"
        "  multistage plan --chain costs.json --memory 4GiB \\\n"
        "      --tiers write=2GB/s,read=1GB/s --picture plan.svg --save plan.json",
    )
    _add_problem(planning)
    chain = planning.add_argument_group("a chain of unequal stages, in place of steps")
    chain.add_argument("--chain", type=Path, help="costs of its stages, as saved by profile()")
    showing = _add_showing(planning, "where checkpoints stand, or the trade-off with --curve,")
    showing.add_argument("--curve", action="store_true", help="show the time-memory trade-off")
    showing.add_argument("--save", type=Path, help="write the plan to this file: .json")
    showing.add_argument("--load", type=Path, help="show a plan that --save wrote, judged anew")
    planning.set_defaults(run=_plan)

    simulating = commands.add_parser(
        "simulate",
        help="run a plan in virtual time and draw it",
        description="Run a plan in virtual time: its figures, a picture, a trace.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_PLAN_EPILOG.format(command="simulate")
        + "  # with transfers of which one in twenty takes ten times as long\n"
        "  multistage simulate --costs costs.json --n-steps 300 --memory '20 slots' \\\n"
        "      --jitter spikes:0.05,10 --picture timeline.png",
    )
    _add_problem(simulating)
    showing = _add_showing(simulating, "the timeline")
    showing.add_argument("--trace", type=Path, help="write a trace for ui.perfetto.dev")
    simulating.add_argument("--load", type=Path, help="simulate a plan that plan --save wrote")
    simulating.add_argument("--jitter", help="lognormal:SIGMA or spikes:PROBABILITY,FACTOR")
    simulating.add_argument("--seed", type=int, default=0, help="seed of the jitter (0)")
    simulating.set_defaults(run=_simulate)

    status = commands.add_parser(
        "status",
        help="show what the folder of a durable run holds",
        description="Show what the folder of a durable run holds, how far the run is and whether "
        "it can be resumed. Nothing is changed.",
        epilog="example:\n  multistage status /scratch/run42",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    status.add_argument("folder", type=Path, help="what was given as durable=")
    status.add_argument("--json", action="store_true", help="print only JSON")
    status.set_defaults(run=_status)
    cleaning = commands.add_parser(
        "clean",
        help="remove what a durable run left in its folder",
        description="Remove the files that a durable run wrote in its folder, and the folder if "
        "it is empty then. All other files stay, whatever their names.",
        epilog="example:\n  multistage clean --dry-run /scratch/run42\n"
        "  multistage clean --force /scratch/run42",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cleaning.add_argument("folder", type=Path, help="what was given as durable=")
    cleaning.add_argument("--force", action="store_true", help="even a run that can be resumed")
    cleaning.add_argument(
        "--dry-run", action="store_true", help="list what would be removed, and remove nothing"
    )
    cleaning.set_defaults(run=_clean)

    demo = commands.add_parser("demo", help="run a demonstration on real data")
    demos = demo.add_subparsers(dest="demo", required=True, metavar="NAME")
    lstm = demos.add_parser(
        "lstm",
        help="train a character LSTM by full backpropagation through time",
        description="Train a character LSTM (NumPy) on the Python standard library's source by "
        "full backpropagation through time, over a sequence whose states do not fit the budget.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  multistage demo lstm --n-steps 20000 --width 128 --batch 16 "
        "--memory '1 MiB' --tiers memory:",
    )
    from .demos import lstm as numpy_demo
    from .demos import torch_lstm as torch_demo
    from .demos import wave_demo

    numpy_demo.add_arguments(lstm)
    lstm.set_defaults(run=numpy_demo.run)
    wave = demos.add_parser(
        "wave",
        help="differentiate a 2-D acoustic wave simulation, as seismic inversion does",
        description="Compute the gradient of a shot's misfit by the velocity at every point of a "
        "2-D acoustic model (NumPy), within a budget that its wavefield exceeds; test it, "
        "draw it.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  multistage demo wave --rows 300 --columns 500 --n-steps 3000 "
        "--memory '64 MiB' \\\n      --tiers file:///scratch",
    )
    wave_demo.add_arguments(wave)
    wave.set_defaults(run=wave_demo.run)
    torch_lstm = demos.add_parser(
        "torch-lstm",
        help="the same with PyTorch, larger, on a GPU where there is one",
        description="Train a character LSTM (PyTorch) on the Python standard library's source "
        "over sequences whose tapes do not fit the limit; needs torch.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  multistage demo torch-lstm --n-steps 8000 --memory 32MiB "
        "--tiers pinned:1GiB",
    )
    torch_demo.add_arguments(torch_lstm)
    torch_lstm.set_defaults(run=torch_demo.run)
    return parser


def _add_showing(parser: argparse.ArgumentParser, what: str) -> argparse._ArgumentGroup:
    showing = parser.add_argument_group("files to look at")
    showing.add_argument(
        "--html", type=Path, help="write a page with tables and pictures, in one file"
    )
    showing.add_argument("--picture", type=Path, help=f"draw {what} to this file: .svg, .png, .pdf")
    return showing


def _add_problem(parser: argparse.ArgumentParser) -> None:
    costs = parser.add_argument_group("costs: a file, or numbers")
    costs.add_argument("--costs", type=Path, help="a costs file")
    costs.add_argument("--forward-step", help="time of one forward step (T_A)")
    costs.add_argument("--reverse-step", help="time of one adjoint step")
    costs.add_argument("--tape-step", help="time of a forward step keeping its tape, if tapes are")
    costs.add_argument("--state", default="1", help="size of one state, such as 64KiB")
    costs.add_argument("--tape", default="0", help="size of one tape (that of a state)")
    costs.add_argument(
        "--tiers",
        help="the slow tier by its rates: write=2GB/s,read=1GB/s, and if wanted latency=1ms, "
        "capacity=10GiB, name=NAME; for stages also shared (one channel for both), states-only; "
        "with simulate --load: another than planned",
    )
    costs.add_argument("--write", help="time to write one state to the slow tier (T_W)")
    costs.add_argument("--read", help="time to read it back (that of --write)")
    costs.add_argument("--write-overhead", default="0", help="what a write costs the computation")
    costs.add_argument("--read-overhead", default="0", help="what a read costs the computation")
    costs.add_argument("--capacity", type=int, help="states the slow tier can hold")
    costs.add_argument("--save-costs", type=Path, help="write these costs to a file")
    problem = parser.add_argument_group("problem")
    problem.add_argument("--n-steps", type=int, help="number of steps")
    problem.add_argument(
        "--memory",
        help="fast memory: bytes, '512 MiB' or '32 slots'; of a chain bytes, '4GiB', or a "
        "fraction of plain training such as 0.5",
    )
    problem.add_argument(
        "--planner",
        default="auto",
        choices=list(dict.fromkeys(["auto", *PLANNERS, *CHAIN_PLANNERS])),
        metavar="PLANNER",
        help=f"auto, one of {', '.join(PLANNERS)}; of a chain {', '.join(CHAIN_PLANNERS)} (auto)",
    )
    parser.add_argument("--json", action="store_true", help="print only JSON")
    add_progress(parser)


def _leave_out(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise ArgumentError for an option that would have no effect."""
    for name in names:
        if getattr(args, name, None) not in (None, _DEFAULTS.get(name)):
            raise ArgumentError(f"{why}; leave --{name.replace('_', '-')} out")


def _costs(args: argparse.Namespace) -> Costs:
    for name in ("n_steps", "memory"):
        if getattr(args, name) is None:
            raise ArgumentError(f"--{name.replace('_', '-')} is missing")
    if args.tiers is not None:
        _leave_out(args, _TIER_NUMBERS, "--tiers describes the slow tier")
    if args.costs is not None:
        _leave_out(args, _NUMBERS, "--costs FILE holds all costs")
        costs = Costs.load(args.costs)
    else:
        if args.forward_step is None or args.reverse_step is None:
            raise ArgumentError("give --costs FILE, or --forward-step and --reverse-step")
        tiers: tuple[Tier, ...] = ()
        if args.write is not None:
            tiers = (
                Tier(
                    name="slow",
                    write_s=parse_seconds(args.write),
                    read_s=parse_seconds(args.read or args.write),
                    write_overhead_s=parse_seconds(args.write_overhead),
                    read_overhead_s=parse_seconds(args.read_overhead),
                    capacity_states=args.capacity,
                ),
            )
        else:
            _leave_out(args, _TIER_NUMBERS, "without --write there is no slow tier")
        costs = Costs(
            forward_step_s=parse_seconds(args.forward_step),
            reverse_step_s=parse_seconds(args.reverse_step),
            tape_step_s=None if args.tape_step is None else parse_seconds(args.tape_step),
            state_bytes=parse_bytes(args.state),
            tape_bytes=parse_bytes(args.tape),
            tiers=tiers,
        )
    if args.tiers is not None:
        costs = replace(costs, tiers=(Tier.parse(args.tiers),))
    if args.save_costs is not None:
        costs.save(args.save_costs)
    return costs


def _rates_for(costs: StageCosts, text: str) -> Tier:
    """Return the rates of a tier that holds at least one thing that may travel there."""
    rates = Tier.parse(text)
    sizes = (s.tape_bytes if rates.tapes else s.output_bytes for s in costs.stages)
    least = min((nbytes for nbytes in sizes if nbytes), default=0)
    if rates.capacity_bytes is not None and rates.capacity_bytes < least:
        what, instead = ("tape", ", mark it states-only") if rates.tapes else ("state", "")
        raise ArgumentError(
            f"tier {rates.name} holds capacity={rates.capacity_bytes} bytes < {least} bytes of the "
            f"smallest {what}; give it more room{instead} or leave it out"
        )
    return rates


def _show(args: argparse.Namespace, made: Plan) -> int:
    """Write the files that were asked for, and say so."""
    if args.picture is not None:
        travels = isinstance(made, ChainPlan) and made.tier is not None
        what: Literal["timeline", "schedule"] = "timeline" if travels else "schedule"
        made.picture(args.picture, "trade-off" if args.curve else what)
    for path in (args.html, args.save):
        if path is not None:
            made.save(path)
    _say_written(args, args.picture, args.html, args.save)
    return 0


def _say_written(args: argparse.Namespace, *paths: Path | None) -> None:
    for path in paths:
        if path is not None and not args.json:
            print(f"written: {path}")


def _plan(args: argparse.Namespace) -> int:
    if args.save is not None and (args.curve or args.save.suffix.lower() != ".json"):
        raise ArgumentError(
            f"--save {str(args.save)!r} must end in .json, and goes without --curve"
        )
    if args.load is not None:
        _leave_out(args, ("tiers", "save"), "--load shows a plan as it is")
    made = _made(args)
    if args.curve:
        _print_curve(args, made)
    else:
        print(json.dumps(made.to_dict(), indent=2) if args.json else made)
    return _show(args, made)


def _made(args: argparse.Namespace) -> Plan:
    """Return the plan that was asked for: from a file, of a chain or of steps."""
    steps = ("n_steps", "costs", "save_costs", *_NUMBERS)
    if args.load is not None:
        _leave_out(args, ("chain", *steps, "memory", "planner"), "--load takes a plan as it is")
        return Plan.load(args.load)
    chain = getattr(args, "chain", None)
    if chain is not None:
        _leave_out(args, steps, "--chain holds the costs of all stages")
        costs = StageCosts.load(chain)
        if args.curve and args.tiers is not None:
            raise ArgumentError("--curve is of plans without a tier; leave --tiers out")
        rates = None if args.tiers is None else _rates_for(costs, args.tiers)
        planner: ChainPlanner = "optimal" if args.planner == "auto" else args.planner
        return plan_chain(costs, args.memory, planner, tiers=rates, progress=shown(args))
    return plan(_costs(args), args.memory, args.n_steps, args.planner, progress=shown(args))


def _print_curve(args: argparse.Namespace, made: Plan) -> None:
    """Print the time-memory trade-off of a plan's problem."""
    if isinstance(made, UniformPlan):
        points, rows = _curve_of_steps(args, made)
    else:
        assert isinstance(made, ChainPlan)
        points, rows = _curve_of_chain(args, made)
    if args.json:
        print(json.dumps(points, indent=2))
    else:
        print(tabulate(rows, headers="keys", disable_numparse=True, stralign="right"))


def _curve_of_steps(args: argparse.Namespace, made: UniformPlan) -> tuple[Rows, Rows]:
    """Return every plan of the trade-off, and the fastest of each number of slots."""
    from .planners.trade_off import trade_off

    names = RANKED if args.planner == "auto" else (args.planner,)
    curves = trade_off(made.costs, made.n_steps, names, also=made.slots, progress=shown(args))
    plans = [each for curve in curves.values() for each in curve]
    columns = ("slots", "planner", "makespan_s", "lower_bound_s", "recompute_factor")
    points = [{name: getattr(p, name) for name in columns} for p in plans]
    best: dict[int, UniformPlan] = {}
    for each in sorted(plans, key=lambda p: (p.slots, p.makespan_s)):
        best.setdefault(each.slots, each)
    return points, [{"slots": slots, **each.row()} for slots, each in best.items()]


def _curve_of_chain(args: argparse.Namespace, made: ChainPlan) -> tuple[Rows, Rows]:
    """Return every point of the trade-off, and as many as a table is read for."""
    if made.planner not in ("optimal", "revolve"):
        raise ArgumentError(f"--curve goes with planner optimal or revolve, not {made.planner}")
    curve = memory_curve(made.costs, made.planner)
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


def _simulate(args: argparse.Namespace) -> int:
    """Run a plan in virtual time, from a file or made anew; a chain's with another tier, too."""
    from .schedule.simulation import Jitter

    if args.load is not None:
        _leave_out(args, ("n_steps", "memory", "costs"), "--load simulates a plan as it is")
    made = _made(args)
    if args.tiers is not None and args.load is not None:
        made = made.with_tier(args.tiers)
    jitter = None if args.jitter is None else Jitter.parse(args.jitter)
    run = made.simulate(jitter=jitter, seed=args.seed)
    if args.picture is not None:
        from .planners.pictures.plans import run_chart
        from .view import save_chart

        save_chart(run_chart(made, run, made.title), args.picture)
    if args.html is not None:
        from .planners.pictures.plans import save_run

        save_run(made, run, args.html)
    if args.trace is not None:
        from .view.chrome_trace import write_trace

        write_trace(run.timeline, args.trace)
    _print_run(args, made, run)
    _say_written(args, args.picture, args.html, args.trace)
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
            **({"peak_slots": run.peak_slots} if isinstance(made, UniformPlan) else {}),
            "memory_bytes": made.memory_bytes,
            "jitter": args.jitter,
            "seed": args.seed,
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


def _probe(args: argparse.Namespace) -> int:
    from .measurement.probe import probe_tier

    if args.tier is None:
        return _probe_nodes(args)
    is_tier = re.match(r"[a-z][a-z0-9+.-]*:", args.tier) and not Path(args.tier).exists()
    tier = args.tier if is_tier else Path(args.tier)
    sizes = [parse_bytes(size) for size in args.sizes.split(",")]
    for size in sizes:
        if size < 1:
            raise ArgumentError(f"state size {size} must be at least one byte")
    rows = probe_tier(tier, sizes, progress=shown(args))
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
        return 0
    table = [
        {
            "engine": row.engine,
            "state": format_bytes(row.state_bytes),
            "write": f"{format_bytes(row.write_bytes_per_s)}/s",
            "read": f"{format_bytes(row.read_bytes_per_s)}/s",
            "round trip": format_seconds(row.latency_s),
            "put costs": format_seconds(row.put_s),
            "get costs": format_seconds(row.get_s),
        }
        for row in rows
    ]
    print(tabulate(table, headers="keys", disable_numparse=True, stralign="right"))
    print(
        "\nround trip: one state put and read back, small ones from the buffer they wait in.\n"
        "put and get costs: what the computing thread spends per state."
    )
    if any(row.engine == "aiofiles" for row in rows):
        print(
            "aiofiles reads may come from the page cache; reads of the other engines come from\n"
            "the disk where the filesystem takes O_DIRECT."
        )
    return 0


def _probe_nodes(args: argparse.Namespace) -> int:
    from .backends.nodes import advice, fast_node, memory_nodes

    nodes = memory_nodes(measure=True)
    fast = fast_node(nodes)
    if args.json:
        rows = [{**asdict(node), "fast": node is fast} for node in nodes]
        print(json.dumps({"nodes": rows, "advice": advice(nodes)}, indent=2))
        return 0
    table = [
        {
            "node": f"{node.node}{' (fast)' if node is fast else ''}",
            "processors": node.cpus or "none: memory alone",
            "memory": format_bytes(node.total_bytes),
            "free": format_bytes(node.free_bytes),
            "bandwidth": "not known"
            if node.bandwidth_bytes_per_s is None
            else f"{format_bytes(node.bandwidth_bytes_per_s)}/s",
            "known from": "copying"
            if node.measured
            else "firmware"
            if node.bandwidth_bytes_per_s
            else "",
            "distances": " ".join(map(str, node.distances)),
        }
        for node in nodes
    ]
    if table:
        print(tabulate(table, headers="keys", disable_numparse=True, stralign="right"), end="\n\n")
    print("\n".join(advice(nodes)))
    return 0


def _status(args: argparse.Namespace) -> int:
    from .durable.status import inspect, rank_folders

    ranks = rank_folders(args.folder)
    found = [inspect(folder) for folder in ranks or [args.folder]]
    if args.json:
        shown = [asdict(each) for each in found]
        print(json.dumps(shown if ranks else shown[0], indent=2))
    else:
        print("\n\n".join(map(str, found)))
    return 0


def _clean(args: argparse.Namespace) -> int:
    from .durable.status import clean, clean_ranks, rank_folders

    if rank_folders(args.folder):
        for each in clean_ranks(args.folder, force=args.force, dry_run=args.dry_run):
            print(each)
    else:
        print(clean(args.folder, force=args.force, dry_run=args.dry_run))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status.

    0 on success, 2 for bad input, 130 after Ctrl-C, 141 where the reader of a pipe has gone.
    """
    try:
        args = _parser().parse_args(argv)
        status = int(args.run(args))
        sys.stdout.flush()  # or a broken pipe would show at exit only
        return status
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough.  What is still buffered goes nowhere,
        # or the interpreter would complain when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE if hasattr(signal, "SIGPIPE") else 1
    except (MultistageError, OSError) as error:
        print(f"multistage: error: {redacted(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("multistage: interrupted", file=sys.stderr)
        return 130
