"""The plan that the options ask for: from a file, of a chain of stages, or of equal steps."""

from __future__ import annotations

import argparse
from dataclasses import replace

from ..errors import ArgumentError
from ..model.budget import Budget
from ..model.costs import Costs
from ..model.stages import StageCosts
from ..model.tier import Tier
from ..planners import Plan, plan
from ..planners.chain.heterogeneous import ChainPlanner, plan_chain
from ..support.units import parse_bytes, parse_seconds
from .options import NUMBERS, TIER_NUMBERS, leave_out, shown


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
