"""Options that several commands share, those without effect, and the plan they ask for."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeAlias

from ..errors import ArgumentError
from ..model.budget import Budget
from ..model.costs import Costs
from ..model.stages import StageCosts
from ..model.tier import Tier
from ..planners import PLANNERS, Plan, plan
from ..planners.chain.heterogeneous import CHAIN_PLANNERS, ChainPlanner, plan_chain
from ..support.units import parse_bytes, parse_seconds

# What `add_subparsers` returns.
Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"

# Options that describe uniform steps by numbers, those of their slow tier last.
TIER_NUMBERS = ("write", "read", "write_overhead", "read_overhead", "capacity")
NUMBERS = ("forward_step", "reverse_step", "tape_step", "state", "tape", *TIER_NUMBERS)

EPILOG = """\
times are seconds, or written with a unit: 250us, 1.5ms, 2s.

examples:
  # a step of 1 ms, its adjoint of 2 ms, states of 64 KiB, a disk that takes 4 ms a state
  multistage {command} --forward-step 1ms --reverse-step 2ms --state 64KiB \\
      --write 4ms --read 4ms --n-steps 10000 --memory "20 slots"
  # the same from a file written by --save-costs or by multistage.Costs.save
  multistage {command} --costs costs.json --n-steps 10000 --memory "512 MiB"
"""


def add_showing(parser: argparse.ArgumentParser, what: str) -> argparse._ArgumentGroup:
    """Add the options of pages and pictures."""
    showing = parser.add_argument_group("files to look at")
    showing.add_argument(
        "--html", type=Path, help="write a page with tables and pictures, in one file"
    )
    showing.add_argument("--picture", type=Path, help=f"draw {what} to this file: .svg, .png, .pdf")
    return showing


def add_problem(parser: argparse.ArgumentParser) -> None:
    """Add the options that describe costs and problem."""
    costs = parser.add_argument_group("costs: a file, or numbers")
    costs.add_argument("--costs", type=Path, help="a costs file")
    costs.add_argument("--forward-step", help="time of one forward step (T_A)")
    costs.add_argument("--reverse-step", help="time of one adjoint step")
    costs.add_argument("--tape-step", help="time of a forward step keeping its tape, if tapes are")
    costs.add_argument(
        "--state", help="size of one state, such as 64KiB; not needed where slots are counted"
    )
    costs.add_argument("--tape", help="size of one tape (that of a state)")
    costs.add_argument(
        "--rates",
        help="the slow tier by its rates: write=2GB/s,read=1GB/s, and optionally latency=1ms, "
        "capacity=10GiB, name=NAME; for stages also shared (one channel for both), states-only; "
        "with simulate --load: another than planned",
    )
    costs.add_argument("--write", help="time to write one state to the slow tier (T_W)")
    costs.add_argument("--read", help="time to read it back (that of --write)")
    costs.add_argument("--write-overhead", help="what a write costs the computation (0)")
    costs.add_argument("--read-overhead", help="what a read costs the computation (0)")
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
        choices=list(dict.fromkeys([*CHAIN_PLANNERS, *PLANNERS])),
        metavar="PLANNER",
        help=f"auto (default), or one of {', '.join(PLANNERS)}; of a chain auto, or one of "
        f"{', '.join(CHAIN_PLANNERS[1:])}",
    )
    parser.add_argument("--json", action="store_true", help="print only JSON")
    add_progress(parser)


def add_progress(parser: argparse.ArgumentParser) -> None:
    """Add `--progress` and `--no-progress`."""
    parser.add_argument(
        "--progress",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="show progress bars (on a terminal, unless with --json)",
    )


def shown(args: argparse.Namespace) -> bool | None:
    """Return what the options say of progress bars: None for the default.

    Examples
    --------
    >>> shown(argparse.Namespace(progress=None, json=True))
    False
    """
    given: bool | None = args.progress
    return False if given is None and args.json else given


def leave_out(args: argparse.Namespace, names: Sequence[str], why: str) -> None:
    """Raise ArgumentError for an option that would have no effect.

    No option has a default in the parser, so that what was given is known.
    """
    for name in names:
        if getattr(args, name, None) is not None:
            raise ArgumentError(f"{why}; leave --{name.replace('_', '-')} out")


def require_writable(*files: tuple[Path | None, Sequence[str]]) -> None:
    """Raise ArgumentError for a file to write whose suffix or folder is wrong.

    Before anything is written: a command writes all of its files or none.
    """
    for path, suffixes in files:
        if path is None:
            continue
        if suffixes and path.suffix.lower() not in suffixes:
            raise ArgumentError(f"{str(path)!r} must end in {' or '.join(suffixes)}")
        if not path.parent.is_dir():
            raise ArgumentError(f"{str(path)!r}: its folder does not exist; make it first")


def say_written(args: argparse.Namespace, *paths: Path | None) -> None:
    """Name the files that were written."""
    for path in paths:
        if path is not None and not args.json:
            print(f"written: {path}")


def made_by(args: argparse.Namespace) -> Plan:
    """Return the plan that was asked for: from a file, of a chain or of steps."""
    steps = ("n_steps", "costs", "save_costs", *NUMBERS)
    if args.load is not None:
        leave_out(args, ("chain", *steps, "memory", "planner"), "--load takes a plan as it is")
        return Plan.load(args.load)
    chain = getattr(args, "chain", None)
    if chain is not None:
        leave_out(args, steps, "--chain holds the costs of all stages")
        costs = StageCosts.load(chain)
        if args.curve and args.rates is not None:
            raise ArgumentError("--curve is of plans without a tier; leave --rates out")
        rates = None if args.rates is None else rates_for(costs, args.rates)
        chosen: ChainPlanner = args.planner or "auto"
        return plan_chain(costs, args.memory, chosen, tiers=rates, progress=shown(args))
    planner = args.planner or "auto"
    return plan(costs_of(args), args.memory, args.n_steps, planner, progress=shown(args))


def costs_of(args: argparse.Namespace) -> Costs:
    """Return the costs of equal steps, from a file or from numbers."""
    for name in ("n_steps", "memory"):
        if getattr(args, name) is None:
            raise ArgumentError(f"--{name.replace('_', '-')} is missing")
    if args.rates is not None:
        leave_out(args, TIER_NUMBERS, "--rates describes the slow tier")
    if args.costs is not None:
        leave_out(args, NUMBERS, "--costs FILE holds all costs")
        costs = Costs.load(args.costs)
    else:
        if args.forward_step is None or args.reverse_step is None:
            raise ArgumentError("give --costs FILE, or --forward-step and --reverse-step")
        tiers: tuple[Tier, ...] = ()
        if args.write is not None:
            tiers = (
                Tier(
                    name="slow",
                    write_s=parse_seconds(args.write, "--write"),
                    read_s=parse_seconds(args.read or args.write, "--read"),
                    write_overhead_s=parse_seconds(args.write_overhead or "0", "--write-overhead"),
                    read_overhead_s=parse_seconds(args.read_overhead or "0", "--read-overhead"),
                    capacity_states=args.capacity,
                ),
            )
        else:
            leave_out(args, TIER_NUMBERS, "without --write there is no slow tier")
        taping = args.tape_step
        taping_s = None if taping is None else parse_seconds(taping, "--tape-step")
        costs = Costs(
            forward_step_s=parse_seconds(args.forward_step, "--forward-step"),
            reverse_step_s=parse_seconds(args.reverse_step, "--reverse-step"),
            tape_step_s=taping_s,
            state_bytes=_state_bytes(args),
            tape_bytes=parse_bytes(args.tape or "0", "--tape"),
            tiers=tiers,
        )
    if args.rates is not None:
        costs = replace(costs, tiers=(Tier.parse(args.rates),))
    if args.save_costs is not None:
        costs.save(args.save_costs)
    return costs


def _state_bytes(args: argparse.Namespace) -> int:
    """Return the bytes of a state, 1 where nothing is counted in bytes."""
    if args.state is None:
        counted = {"--tape": args.tape, "--rates": args.rates}
        if Budget.parse(args.memory).slots is None:
            counted["--memory"] = args.memory
        for name, value in counted.items():
            if value is not None:
                raise ArgumentError(
                    f"--state is missing: {name} {value} counts bytes; give --state, such as 64KiB"
                    ", or --memory in slots and times per state"
                )
    return parse_bytes(args.state or "1", "--state")


def rates_for(costs: StageCosts, text: str) -> Tier:
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
