"""A corpus of 600 planning problems, and the makespans once predicted for them.

`python tests/planners/corpus.py` plans all of them and writes `corpus.json`: of each problem
the predicted makespan in seconds, None where no plan fits.  Record it from the code before a
change, never from the code that the change made.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

from multistage import PLANNERS, plan
from multistage.errors import BudgetError
from multistage.model.costs import NOT_KEPT, Costs
from multistage.model.stages import Stage, StageCosts
from multistage.model.tier import Tier
from multistage.planners.chain.heterogeneous import plan_chain, smallest_memory

RECORDED = Path(__file__).with_suffix(".json")
STEPS, CHAINS = 400, 200
# Solved by dynamic programs, for so many steps as they can take.
SOLVED = ("mixed", "h-revolve", "disk-revolve", "stumm-walther")


class Draw:
    """Numbers of one problem; only `random.random`, which no version of Python changes."""

    def __init__(self, what: str, number: int) -> None:
        self.random = random.Random(f"{what} {number}").random

    def whole(self, low: int, high: int) -> int:
        """Return a whole number, both ends included."""
        return low + int(self.random() * (high - low + 1))

    def one(self, *options):
        """Return one of the options."""
        return options[self.whole(0, len(options) - 1)]

    def scale(self, low: float, high: float) -> float:
        """Return a number whose logarithm is uniform."""
        return low * (high / low) ** self.random()


def problem_of_steps(number: int) -> tuple[Costs, str | int, int, str, int]:
    """Return what `plan` takes: costs, memory, steps, planner, bytes of buffers."""
    draw = Draw("steps", number)
    step_s, state = draw.scale(1e-6, 10.0), draw.one(1, 8, 4096, 10**6, draw.whole(1, 10**9))
    tiers = tuple(
        Tier(
            name=f"tier {k}",
            write_s=step_s * draw.scale(0.05, 60.0),
            read_s=step_s * draw.scale(0.05, 60.0),
            write_overhead_s=step_s * draw.one(0.0, 0.0, draw.random()),
            read_overhead_s=step_s * draw.one(0.0, 0.0, draw.random()),
            capacity_states=draw.one(None, None, draw.whole(0, 12), draw.whole(10, 2000)),
            queue_depth=draw.one(1, 2, 2, 4),
            write_bytes_per_s=draw.one(float("inf"), max(1e-3, state / step_s / draw.whole(1, 9))),
        )
        for k in range(draw.one(0, 1, 1, 1, 1, 2, 3))
    )
    costs = Costs(
        step_s,
        step_s * draw.scale(0.3, 6.0),
        tape_step_s=draw.one(None, None, step_s, step_s * draw.scale(1.0, 2.0)),
        state_bytes=state,
        tape_bytes=draw.one(0, 0, state // 2, state, 5 * state // 2, 12 * state, NOT_KEPT),
        tiers=tiers,
        action_s=draw.one(0.0, 0.0, 0.0, step_s * draw.scale(0.001, 0.3)),
    )
    planner = "auto" if draw.random() < 0.4 else draw.one(*PLANNERS)
    most = draw.one(60, 1000, 30_000, 10**6)
    n = int(draw.scale(1, min(most, 300) if planner in SOLVED else most))
    slots = int(draw.scale(1, max(2, min(1000, 1.2 * n))))
    if draw.random() < 0.3:
        return costs, slots * state + draw.whole(0, state), n, planner, draw.one(0, state)
    return costs, f"{slots} slots", n, planner, 0


def problem_of_chain(number: int) -> tuple[StageCosts, int, str, Tier | None]:
    """Return what `plan_chain` takes: costs, memory, planner, tier."""
    draw = Draw("chain", number)
    count = draw.one(*(draw.whole(1, most) for most in (4, 12, 12, 25, 25, 40, 40, 160)))
    count = 1200 if number == 199 else count  # planned in pieces
    equal, over = draw.random() < 0.25, draw.random() < 0.4
    unit, stages = draw.one(1, 10, 10**6), list[Stage]()
    for i in range(count):
        output, run_s = unit * draw.whole(1, 8), 1e-3 * draw.scale(0.3, 5.0)
        more = [unit * draw.whole(0, 4) if over else 0 for _ in range(3)]
        stage = Stage(
            f"{i}",
            run_s,
            run_s * draw.scale(1.0, 3.0),
            output,
            output + unit * draw.whole(0, 12),
            draw.one(-1, -1, 0) if over else -1,
            *more,
            spared_s=run_s * draw.random() if over else 0.0,
        )
        stages.append(stages[0] if equal and stages else stage)
    costs = StageCosts(tuple(stages), draw.one(0, unit, 5 * unit), draw.one(0, unit))
    tier, planner = None, draw.one("auto", "optimal", "revolve", "periodic")
    if draw.random() < 0.75:
        planner = draw.one("auto", "optimal")
        rate = sum(stage.tape_bytes for stage in stages) / sum(stage.forward_s for stage in stages)
        tier = Tier(
            write_s=draw.one(0.0, 0.0, 1e-4, 1e-3),
            read_s=draw.one(0.0, 0.0, 1e-4, 1e-3),
            write_overhead_s=draw.one(0.0, 0.0, 0.0, 1e-4),
            read_overhead_s=draw.one(0.0, 0.0, 0.0, 1e-4),
            write_bytes_per_s=draw.one(float("inf"), *(rate * draw.scale(0.05, 5.0),) * 4),
            read_bytes_per_s=rate * draw.scale(0.05, 5.0),
            capacity_bytes=draw.one(None, None, None, unit * draw.whole(1, 60)),
            shared=draw.random() < 0.25,
            tapes=draw.random() < 0.85,
        )
    least = smallest_memory(costs)
    most = max(least, costs.input_bytes + sum(stage.tape_bytes for stage in stages))
    memory = least + int(draw.random() ** 2 * (most - least))
    # Sometimes less than the least: a tier may do with it.
    return costs, int(least * draw.random()) if draw.random() < 0.1 else memory, planner, tier


def makespan_of_steps(number: int) -> float | None:
    """Return the predicted makespan of a problem of steps, None where none fits."""
    costs, memory, n, planner, buffers = problem_of_steps(number)
    try:
        return plan(costs, memory, n, planner, buffer_bytes=buffers, progress=False).makespan_s
    except BudgetError:
        return None


def makespan_of_chain(number: int) -> float | None:
    """Return the predicted makespan of a problem of a chain, None where none fits."""
    costs, memory, planner, tier = problem_of_chain(number)
    try:
        return plan_chain(costs, memory, planner, tiers=tier, progress=False).makespan_s
    except BudgetError:
        return None


if __name__ == "__main__":
    steps = [makespan_of_steps(number) for number in range(STEPS)]
    chains = [makespan_of_chain(number) for number in range(CHAINS)]
    recorded = {"steps": steps, "chains": chains}
    RECORDED.write_text(json.dumps(recorded, indent=0).replace("\n\n", "\n") + "\n")
    sys.stdout.write(f"{len(steps)} problems of steps, {len(chains)} of chains\n")
