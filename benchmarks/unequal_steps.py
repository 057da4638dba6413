"""Steps of unequal cost and states of unequal size: a mesh that is refined and coarsened.

exact
    Random chains of 6 to 12 steps that cost 1 to 20 times the cheapest, with states
    that differ tenfold: the plan against the exact optimum, by theorem 1 of Beaumont
    et al. over bytes, not over slots, and for 6 steps by exhaustive search over all
    schedules.
run
    A nonlinear diffusion on a mesh of a tenth to the full number of points, with few or
    many inner steps: the gradient within a budget, planned from its costs and planned as
    if it were uniform, interleaved.  Uniform means that every state counts as the
    largest and every step as the mean, under the same planner and the same memory.

Each gradient is compared bit for bit with that of storing everything.

    python -m benchmarks.unequal_steps [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import finish, from_tests, interleaved, options
from multistage import FunctionChain, Reversal, Stage, StageCosts
from multistage.execute.metered import of_chain
from multistage.planners.chain.pieces import chain_plan
from multistage.planners.chain.sizes import Sizes, need_to_pass, need_to_tape
from multistage.states.layout import Array

SHARES = (0.15, 0.25, 0.4)  # of the bytes of all states, as budgets of the real run
CHEAPEST_POINTS, LARGEST_POINTS = 4_000, 40_000


# ------------------------------------------------------------------ exact optimum


def random_costs(seed: int, n: int) -> StageCosts:
    """Return costs of steps whose state is their tape."""
    draw = random.Random(seed)
    sizes = [8 * draw.randint(10, 100) for _ in range(n + 1)]
    stages = (
        Stage(f"step {i}", draw.uniform(1, 20), draw.uniform(2, 40), size, size, 0)
        for i, size in enumerate(sizes[1:])
    )
    chain: FunctionChain[Any, Any] = FunctionChain(lambda x, i: x, lambda x, a, i: a)
    return of_chain(StageCosts(tuple(stages), sizes[0]), chain)


def exact_makespan(costs: StageCosts, memory: int) -> float:
    """Return the least seconds of a persistent schedule, by theorem 1 over bytes."""
    sizes = Sizes.of(costs)
    ends = np.concatenate(([0.0], np.cumsum(sizes.forward_s)))
    tape_need = cache(partial(need_to_tape, sizes))
    pass_need = cache(partial(need_to_pass, sizes))

    @cache
    def least(s: int, t: int, room: int) -> float:
        if room < 0:
            return np.inf
        turn_s = float(sizes.forward_s[s] + sizes.reverse_s[s])
        if s == t:
            return turn_s - float(sizes.spared_s[s]) if room >= tape_need(s, s) else np.inf
        best = np.inf
        if room >= max(tape_need(s, t), int(sizes.tape[s])):
            best = turn_s + least(s + 1, t, room - int(sizes.tape[s]))
        if room >= pass_need(s, t):
            for k in range(s + 1, t + 1):
                right = least(k, t, room - int(sizes.state[k]))
                best = min(best, float(ends[k] - ends[s]) + right + least(s, k - 1, room))
        return best

    return least(0, len(sizes) - 1, memory - costs.input_bytes)


def exact_gaps(quick: bool, seed: int) -> list[dict[str, float]]:
    """Return how far plans of random chains lie above the exact optimum."""
    oracle = from_tests("oracles.chain_exact")
    found = []
    for n in (6, 9, 12):
        for k in range(4 if quick else 40):
            costs = random_costs(1000 * seed + 100 * n + k, n)
            largest = max(stage.output_bytes for stage in costs.stages)
            for slots in (1, 2, 3, 5):
                plan = chain_plan(costs, slots * largest, "optimal")
                assert plan.memory_bytes is not None and plan.peak_bytes <= plan.memory_bytes
                best = exact_makespan(costs, plan.memory_bytes)
                gap = plan.makespan_s / best - 1
                assert gap > -1e-9, "a plan faster than the optimum"
                row: dict[str, float] = {"n": n, "slots": slots, "gap": max(0.0, gap)}
                if n == 6 and k < (1 if quick else 4) and slots <= 2:
                    every = oracle.exact_chain_makespan(costs, plan.memory_bytes, persistent=False)
                    row["over_every_schedule"] = plan.makespan_s / every - 1
                found.append(row)
    return found


# ----------------------------------------------------------------- the real run


class Mesh:
    """A diffusion on a line, its mesh another in each step; `n` steps."""

    def __init__(self, n: int, seed: int, scale: int = 1) -> None:
        draw = random.Random(seed)
        self.n = n
        ratio = LARGEST_POINTS / CHEAPEST_POINTS
        # Refined towards two fronts and coarsened in between, a little at random.
        waves = [0.5 - 0.5 * np.cos(4 * np.pi * i / n) for i in range(n + 1)]
        self.points = [
            scale * int(CHEAPEST_POINTS * ratio ** min(1.0, max(0.0, w + draw.uniform(-0.1, 0.1))))
            for w in waves
        ]
        # Some steps are hard.
        self.inner = [draw.choice((4, 4, 4, 9)) for _ in waves]

    def start(self) -> Array:
        """Return state 0."""
        return np.sin(np.linspace(0, 9, self.points[0]))

    def _places(self, i: int) -> tuple[Array, Array]:
        at = np.linspace(0, self.points[i] - 1, self.points[i + 1])
        left = np.minimum(at.astype(np.int64), self.points[i] - 2)
        return left, at - left

    def step(self, u: Array, i: int) -> Array:
        """Return state i + 1."""
        v = np.sin(u)
        for _ in range(self.inner[i]):
            v = _diffused(v)
        left, share = self._places(i)
        return v[left] * (1 - share) + v[left + 1] * share

    def adjoint_step(self, u: Array, a: Array, i: int) -> Array:
        """Return the adjoint of state i."""
        left, share = self._places(i)
        back = np.bincount(left, a * (1 - share), self.points[i])
        back += np.bincount(left + 1, a * share, self.points[i])
        for _ in range(self.inner[i]):
            back = _diffused(back)
        return np.asarray(back * np.cos(u))

    def store_all(self) -> bytes:
        """Return the gradient with every state kept."""
        states = [self.start()]
        for i in range(self.n):
            states.append(self.step(states[-1], i))
        a = np.ones(self.points[-1])
        for i in reversed(range(self.n)):
            a = self.adjoint_step(states[i], a, i)
        return a.tobytes()


def _diffused(v: Array) -> Array:
    """Return one inner step, a symmetric one: its own adjoint."""
    return v + 0.2 * (np.roll(v, 1) - 2 * v + np.roll(v, -1))


def as_if_uniform(costs: StageCosts) -> StageCosts:
    """Return costs in which every state is the largest and every step the mean."""
    largest = max(costs.input_bytes, *(stage.output_bytes for stage in costs.stages))
    n = len(costs.stages)
    stage = replace(
        costs.stages[0],
        forward_s=sum(stage.forward_s for stage in costs.stages) / n,
        backward_s=sum(stage.backward_s for stage in costs.stages) / n,
        output_bytes=largest,
        tape_bytes=largest,
        spared_s=0.0,
    )
    return StageCosts.uniform(n, stage, largest)


def measured(mesh: Mesh, repeats: int = 7) -> StageCosts:
    """Return the costs of the steps, each the least of some runs."""
    states = [mesh.start()]
    stages = []
    for i in range(mesh.n):
        forward, back = [], []
        for _ in range(repeats):
            began = time.perf_counter()
            after = mesh.step(states[i], i)
            turned = time.perf_counter()
            mesh.adjoint_step(states[i], after, i)
            forward.append(turned - began)
            back.append(time.perf_counter() - turned)
        states.append(after)
        stages.append(Stage(f"step {i}", min(forward), min(back), after.nbytes, after.nbytes, 0))
    return StageCosts(tuple(stages), states[0].nbytes)


def timed(mesh: Mesh, run: Reversal[Any, Any], answer: bytes) -> float:
    """Return the processor seconds of one gradient, which must be the answer."""
    began = time.process_time()
    run.forward(mesh.start())
    gradient = run.reverse(np.ones(mesh.points[-1]))
    seconds = time.process_time() - began
    assert gradient.tobytes() == answer, "another gradient than with everything stored"
    return seconds


def main() -> None:
    """Run the benchmark."""
    args = options(__doc__).parse_args()
    gaps = exact_gaps(args.quick, args.seed)
    print(f"{len(gaps)} plans against the exact optimum", flush=True)
    mesh = Mesh(32 if args.quick else 96, args.seed)
    answer, costs = mesh.store_all(), measured(mesh)
    rows = []
    for share in SHARES:
        budget = int(share * sum(8 * count for count in mesh.points))
        runs: dict[str, Callable[[], float]] = {}
        predicted: dict[str, float] = {}
        reversals = []
        for name, assumed in (("unequal", costs), ("as uniform", as_if_uniform(costs))):
            run: Reversal[Any, Any] = Reversal(
                mesh.step, mesh.adjoint_step, costs=assumed, memory=budget, progress=False
            )
            run.prepare(mesh.start())
            assert run.plan is not None
            predicted[name] = sum(
                count * stage.forward_s
                for count, stage in zip(run.plan.runs(), costs.stages, strict=True)
            )
            runs[name] = partial(timed, mesh, run, answer)
            reversals.append(run)
        samples = interleaved(runs, 3 if args.quick else 9)
        for run in reversals:
            run.close()
        rows.append({"share": share, "seconds": samples, "forward_s": predicted})
        best = {name: min(seconds) for name, seconds in samples.items()}
        print(
            f"budget {share:.2f} of all states: unequal {best['unequal']:.3f} s, "
            f"as uniform {best['as uniform']:.3f} s",
            flush=True,
        )
    factors = [min(r["seconds"]["as uniform"]) / min(r["seconds"]["unequal"]) for r in rows]
    seconds = [stage.forward_s for stage in costs.stages]
    every = [row["over_every_schedule"] for row in gaps if "over_every_schedule" in row]
    ratios = {
        "exact_gap_mean": float(np.mean([row["gap"] for row in gaps])),
        "exact_gap_worst": max(row["gap"] for row in gaps),
        "every_schedule_gap_worst": max(every),
        "uniform_over_unequal_mean": float(np.exp(np.mean(np.log(factors)))),
        "uniform_over_unequal_least": min(factors),
        "step_cost_spread": max(seconds) / min(seconds),
        "state_size_spread": max(mesh.points) / min(mesh.points),
    }
    finish(args, "unequal_steps", {"exact": gaps, "run": rows}, ratios)
    if args.plot:
        _plot(mesh, rows, args.plot)


def _plot(mesh: Mesh, rows: list[Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(mesh.points)
    left.set_xlabel("state")
    left.set_ylabel("points of the mesh")
    for name in ("unequal", "as uniform"):
        shares = [row["share"] for row in rows]
        right.plot(shares, [min(row["seconds"][name]) for row in rows], "o-", label=name)
    right.set_xlabel("budget, of the bytes of all states")
    right.set_ylabel("seconds of a gradient")
    right.legend()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
