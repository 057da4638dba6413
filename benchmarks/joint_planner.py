"""How far plans of chains with a slow tier are from the lower bound, in virtual time.

Profiles as of residual, dense and inception networks, transformers, and random ones;
24 to 339 stages; memory as a share of what plain training takes; rho: seconds in which
every tape is written, over those of plain training.  Beside each plan: the optimum
without the tier, sending every tape away, and equal segments whose inputs are sent
away.  Every plan is replayed by a judge of its own (`tests/chain_judge.py`), with
transfers as planned and twice as slow.  Against an exact search for 3 to 6 stages
(`tests/oracles/joint_exact.c`).

`gap_mean` weighs every setting that ran equally; `--quick` takes every tenth of the grid.
Whether more memory or a faster tier makes a plan slower is asked of neighbours on the
grid, and, as those are far apart, of settings drawn at random with 2, 4 and 8 % more of
either: `neighbours` comparisons, `slower_neighbours` of them slower.

    python -m benchmarks.joint_planner [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import finish, from_tests, options
from benchmarks._joint_figures import ratios_of
from multistage import native
from multistage.errors import BudgetError
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.planners import Plan
from multistage.planners.chain.at_once import OFFLOADING
from multistage.planners.chain.heterogeneous import plan_chain, smallest_memory
from multistage.planners.chain.joint import Pool
from multistage.planners.chain.joint_bound import joint_lower_bound
from multistage.planners.chain.joint_core import STARTS, STATE_AWAY, Core
from multistage.planners.chain.sizes import Sizes
from multistage.planners.chain.table import Table

CHAINS = (
    *(("residual", length) for length in (50, 100)),
    ("dense", 60),
    ("inception", 60),
    *(("transformer", length) for length in (24, 48, 96)),
    *(("random", length) for length in (50, 100, 200, 339)),
)
MEMORIES = (0.1, 0.2, 0.4, 0.6, 0.8)
RHOS = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0)
LATENCY_S = 2e-5
EXACT_CHAINS = 500
EXACT_STATES = 2_000_000  # the exact search gives up beyond
MIB = 2.0**20
NEARBY = (1.0, 1.02, 1.04, 1.08)  # of memory, or of the tier's rates
NEARBY_SETTINGS, NEARBY_STAGES = 40, 60
SLOTS = 250  # of the table that equal segments are reversed by


def a_chain(kind: str, length: int, seed: int) -> StageCosts:
    """Return a chain of one of the profiles; the last state is the loss's."""
    draw = random.Random(f"{kind} {length} {seed}")
    rows = [_profile(kind, i, i / length, i == length, draw) for i in range(length + 1)]
    stages = []
    for i, (state, tape, forward_s, backward_s) in enumerate(rows):
        output = 4 if i == length else int(state)
        overhead = int(0.15 * output)
        stages.append(
            Stage(
                f"{kind} {i}",
                1e-3 * forward_s,
                1e-3 * backward_s,
                output,
                max(int(tape), output),
                -1,
                overhead,
                overhead,
                2 * overhead,
            )
        )
    first = stages.pop(0).output_bytes
    return StageCosts(tuple(stages), first, first)


def _profile(
    kind: str, i: int, at: float, last: bool, draw: random.Random
) -> tuple[float, float, float, float]:
    """Return bytes of state i and of its tape, and milliseconds forward and backward."""

    def spread(middle: float, sigma: float) -> float:
        return middle * math.exp(sigma * draw.gauss(0, 1))

    block = min(3, int(4 * at))
    if kind == "residual":
        state = 96 * MIB / 2**block * (0.2 if i == 0 else 1)
        forward = spread(3, 0.25) * (1.5 if i == 1 else 1)
        tape = state * (5.5 if i % 3 == 0 else 4) * spread(1, 0.1)
        return state, tape, forward, spread(2 * forward, 0.08)
    if kind == "dense":
        within = 4 * at - block
        state = (20 + 60 * within) * MIB / 2**block
        forward = spread(1 + 2 * within, 0.15)
        tape = (1.6 * state + 25 * MIB / 2**block) * spread(1, 0.1)
        return state, tape, forward, spread(1.9 * forward, 0.08)
    if kind == "inception":
        state = spread(60 * MIB * 0.35 ** (3 * at), 0.5)
        forward = spread(2.5, 0.6)
        return state, state * draw.uniform(1.5, 5.5), forward, spread(2 * forward, 0.15)
    if kind == "transformer":
        tapes, forward = (1, 0.3) if i == 1 else (24, 6.0) if last else (13, 4.0)
        return 16 * MIB, 16 * MIB * tapes, forward, 2 * forward
    state = spread(30 * MIB, 0.6)
    forward = spread(2, 0.7)
    return state, state + spread(90 * MIB, 0.8), forward, spread(forward, 0.3)


def _seconds(plan: Plan | None) -> float:
    return math.inf if plan is None else plan.makespan_s


def planned(costs: StageCosts, memory: int, rates: Tier | None) -> Plan | None:
    """Return the plan, None where none fits."""
    try:
        return plan_chain(costs, memory, tiers=rates, threads=1)
    except BudgetError:
        return None


class Segments:
    """Equal segments whose inputs go to the tier, of every length: periodic, offloaded."""

    def __init__(self, costs: StageCosts, memory: int) -> None:
        self.true, self.limit = Sizes.of(costs), memory - costs.input_bytes
        self.unit = max(1, self.limit) / SLOTS
        self.table = Table(self.true.in_slots(self.unit), int(1.13 * SLOTS))

    def best_s(self, rates: Tier) -> float:
        """Return the seconds of the best length, infinite if none fits."""
        core = Core(self.true, self.table, self.unit, self.limit, rates)
        pool, n = Pool(core.judge), len(self.true)
        for length in range(1, n):
            fates = np.zeros(n, np.uint8)
            fates[::length] = STARTS | STATE_AWAY
            pool.offer(fates)
        return pool.found[0][0] if pool.found else math.inf


def replayed(plan: Plan, rates: Tier) -> tuple[float, int]:
    """Return how far the judge's makespan is from the plan's, and replays over the limit."""
    judge = from_tests("chain_judge").Judge
    as_planned = judge(plan.costs, rates).run(plan.actions)
    over = 0
    for slower in ((1.0, 1.0), (2.0, 1.0), (1.0, 2.0), (2.0, 2.0)):
        replay = as_planned if slower == (1.0, 1.0) else judge(plan.costs, rates, slower)
        if replay is not as_planned:
            replay.run(plan.actions)
        over += plan.memory_bytes is not None and replay.peak > plan.memory_bytes
    return abs(as_planned.now / plan.makespan_s - 1), over


def grid(thin: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield one row per chain, memory and rho; of `thin` settings one."""
    number = 0
    for kind, length in CHAINS:
        costs = a_chain(kind, length, seed)
        plain = plan_chain(costs)
        tapes = sum(stage.tape_bytes for stage in costs.stages)
        for share in MEMORIES:
            memory = int(share * plain.plain_bytes)
            segments, alone = None, None
            for rho in RHOS:
                number += 1
                if number % thin:
                    continue
                segments = segments or Segments(costs, memory)
                alone = alone or planned(costs, memory, None)
                rate = tapes / (rho * plain.plain_s)
                rates = Tier.of_rates(rate, rate, LATENCY_S)
                began = time.process_time()
                plan = planned(costs, memory, rates)
                took_s = time.process_time() - began
                row = {
                    "chain": kind,
                    "stages": length,
                    "memory": share,
                    "rho": rho,
                    "plain_s": plain.plain_s,
                    "makespan_s": _seconds(plan),
                    "bound_s": joint_lower_bound(costs, memory, rates),
                    "no_tier_s": _seconds(alone),
                    "offload_s": math.inf,
                    "periodic_s": segments.best_s(rates),
                    "plan_s": took_s,
                    "replay_off": 0.0,
                    "over_limit": 0,
                }
                if plan is not None:
                    row["offload_s"] = _seconds(plan.candidate(OFFLOADING))
                    row["replay_off"], row["over_limit"] = replayed(plan, rates)
                yield row


def against_exact(thin: int) -> tuple[list[dict[str, float]], int]:
    """Return plans, bounds and optima of tiny chains, and how many searches were given up."""
    oracle, tiny = from_tests("oracles.joint_exact"), from_tests("oracles.tiny")
    rows, given_up, seed = [], 0, 0
    while len(rows) + given_up < EXACT_CHAINS // thin:
        costs, rates = tiny.tiny_chain(seed)
        draw, seed = random.Random(seed), seed + 1
        least, plain = smallest_memory(costs), plan_chain(costs).plain_bytes
        if least == plain:
            continue
        memory = draw.randint(least, plain - 1)
        plan = plan_chain(costs, memory, tiers=rates)
        # What is not faster by a second is not faster: all times are whole.
        exact = oracle.exact_joint_makespan(
            costs, memory, rates, round(plan.makespan_s), limit=EXACT_STATES
        )
        if exact is None:
            given_up += 1
            continue
        rows.append(
            {
                "seed": seed - 1,
                "memory_bytes": memory,
                "exact_s": exact,
                "makespan_s": plan.makespan_s,
                "bound_s": joint_lower_bound(costs, memory, rates),
            }
        )
    return rows, given_up


def nearby(thin: int, seed: int) -> list[dict[str, Any]]:
    """Return makespans of settings with a little more memory, or a little faster tier."""
    draw, rows = random.Random(seed), []
    kinds = [chain for chain in CHAINS if chain[1] <= NEARBY_STAGES]
    while len(rows) < NEARBY_SETTINGS // thin * 2:
        kind, length = draw.choice(kinds)
        share = draw.uniform(MEMORIES[0], MEMORIES[-1])
        rho = RHOS[0] * (RHOS[-1] / RHOS[0]) ** draw.random()
        costs = a_chain(kind, length, seed)
        plain = plan_chain(costs)
        rate = sum(stage.tape_bytes for stage in costs.stages) / (rho * plain.plain_s)
        for along in ("memory", "rho"):
            found = []
            for more in NEARBY:
                memory = int(share * plain.plain_bytes * (more if along == "memory" else 1))
                faster = rate * (more if along == "rho" else 1)
                rates = Tier.of_rates(faster, faster, LATENCY_S)
                found.append(_seconds(planned(costs, memory, rates)))
            where = {"chain": kind, "stages": length, "memory": share, "rho": rho}
            rows.append(where | {"along": along, "makespans_s": found})
    return rows


def plan_seconds() -> float:
    """Return the processor's seconds for a plan of 339 stages."""
    costs = a_chain("random", 339, 0)
    rate = sum(s.tape_bytes for s in costs.stages) / plan_chain(costs).plain_s
    began = time.process_time()
    plan_chain(costs, 0.2, tiers=Tier.of_rates(rate, rate, LATENCY_S), threads=1)
    return time.process_time() - began


def _line(row: dict[str, Any]) -> str:
    where = (
        f"{row['chain']:<12}{row['stages']:>4} memory {row['memory']:.1f} rho {row['rho']:>4} plan "
    )
    if math.isinf(row["makespan_s"]):
        return f"{where}none: nothing fits"
    plain = row["plain_s"]
    return (
        f"{where}{row['makespan_s'] / plain:.4f} of plain, "
        f"{100 * (row['makespan_s'] / row['bound_s'] - 1):5.2f} % over the bound; "
        f"no tier {row['no_tier_s'] / plain:.4f}, offload all {row['offload_s'] / plain:.4f}, "
        f"periodic {row['periodic_s'] / plain:.4f}; {row['plan_s']:.2f} s"
    )


def main() -> None:
    """Run the benchmark."""
    args = options(__doc__).parse_args()
    if not native.available():
        raise SystemExit("the joint planner needs the C core")
    thin = 10 if args.quick else 1
    rows = []
    for row in grid(thin, args.seed):
        rows.append(row)
        print(_line(row), flush=True)
    near = nearby(thin, args.seed)
    left_out = []
    tiny: list[dict[str, float]] = []
    given_up = 0
    if from_tests("oracles.compiled").compiler() is None:
        left_out.append("exact optimum: no C compiler")
    else:
        tiny, given_up = against_exact(thin)
    ratios = ratios_of(rows, near, tiny, given_up) | {"plan_s_339": plan_seconds()}
    told = [{k: None if v == math.inf else v for k, v in row.items()} for row in rows]
    for row in near:
        row["makespans_s"] = [None if s == math.inf else s for s in row["makespans_s"]]
    samples = {"grid": told, "nearby": near, "exact": tiny}
    finish(args, "joint_planner", samples, ratios, left_out)
    if args.plot:
        _plot(rows, args.plot)


def _plot(rows: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    panels = figure.subplots(1, len(MEMORIES), sharey=True)
    for axes, share in zip(panels, MEMORIES, strict=True):
        here = [row for row in rows if row["memory"] == share]
        for name, label in (
            ("no_tier_s", "no tier"),
            ("periodic_s", "periodic, offloaded"),
            ("makespan_s", "joint"),
            ("bound_s", "lower bound"),
        ):
            points = []
            for rho in RHOS:
                at = [r[name] / r["plain_s"] for r in here if r["rho"] == rho]
                at = [value for value in at if math.isfinite(value)]
                if at:
                    points.append((rho, statistics.mean(at)))
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", label=label)
        axes.set_xscale("log")
        axes.set_title(f"{share:.0%} of plain memory")
        axes.set_xlabel("transfer of all tapes / plain")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("seconds / plain training")
    panels[-1].legend()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
