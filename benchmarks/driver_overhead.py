"""Seconds per step of the driver alone: operators that do nothing.

Ours with Revolve's schedule and with streaming to host memory; pyrevolve's
MemoryRevolver; checkpoint_schedules, whose schedule is merely iterated.  All
have the same slots.  Constructors are counted: a schedule that takes long to
make is paid for.

    python -m benchmarks.driver_overhead [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._common import finish, interleaved, options
from multistage import PLANNERS, Costs, FunctionChain, Tier
from multistage.backends import MemoryStore
from multistage.execute.executor import Executor
from multistage.planners.single.revolve import revolve_schedule
from multistage.states.layout import Layout

SLOTS = 100
PEER_STEPS = 10_000  # above this the peers take minutes
COSTS = Costs(1.0, 2.0, tiers=(Tier("memory", 4.0, 4.0),))


def ours(n: int) -> float:
    """Return seconds of a reversal by Revolve's schedule, made and run."""
    chain: FunctionChain[Any, Any] = FunctionChain(lambda x, i: x, lambda x, a, i: a)
    state = np.zeros(4)
    began = time.perf_counter()
    executor: Executor[Any, Any] = Executor(chain, ())
    executor.forward(revolve_schedule(SLOTS, n), state)
    executor.reverse(state)
    seconds = time.perf_counter() - began
    assert executor.counts.reverse_steps == n
    return seconds


def streaming(n: int) -> float:
    """Return seconds of a reversal that streams every fourth state to host memory."""
    chain: FunctionChain[Any, Any] = FunctionChain(lambda x, i: x, lambda x, a, i: a)
    state, store = np.zeros(4), MemoryStore()
    plan = PLANNERS["streaming"](COSTS, SLOTS, n)
    store.open(Layout.of(state))
    try:
        executor: Executor[Any, Any] = Executor(chain, (store,))
        began = time.perf_counter()
        executor.forward(plan.schedule(), state)
        executor.reverse(state)
        seconds = time.perf_counter() - began
        assert executor.counts.reverse_steps == n
        assert executor.counts.writes > 0
        return seconds
    finally:
        store.close()


def with_pyrevolve(n: int) -> float:
    """Return seconds of pyrevolve's reversal."""
    import pyrevolve

    data = np.zeros(4)

    class State(pyrevolve.Checkpoint):
        dtype = data.dtype
        size = data.size

        def get_data(self, timestep: int) -> list[Any]:
            return [data]

        def get_data_location(self, timestep: int) -> list[Any]:
            return [data]

    class Nothing(pyrevolve.Operator):
        def apply(self, **_: Any) -> None:
            pass

    began = time.perf_counter()
    revolver = pyrevolve.MemoryRevolver(State(), Nothing(), Nothing(), SLOTS, n)
    revolver.apply_forward()
    revolver.apply_reverse()
    return time.perf_counter() - began


def iterated(n: int) -> float:
    """Return seconds to make and iterate checkpoint_schedules' binomial schedule."""
    import checkpoint_schedules

    began = time.perf_counter()
    schedule = checkpoint_schedules.MultistageCheckpointSchedule(n, SLOTS, 0)
    for action in schedule:
        if isinstance(action, checkpoint_schedules.EndReverse):
            break
    return time.perf_counter() - began


def first_action() -> float:
    """Return seconds to make the first action of the default schedule for 10^9 steps."""
    costs = Costs(1e-3, 2e-3, tiers=(Tier("file", 8e-3, 8e-3),))
    plan = PLANNERS["streaming"](costs, SLOTS, 10**9)
    began = time.perf_counter()
    next(plan.schedule())
    return time.perf_counter() - began


def schedule_bytes(count: int) -> dict[str, int]:
    """Return the peak bytes that schedules for 10^9 steps hold over their first actions."""
    peaks = {}
    for name in ("revolve", "streaming"):
        plan = PLANNERS[name](COSTS.without_tiers() if name == "revolve" else COSTS, SLOTS, 10**9)
        schedule = plan.schedule()
        tracemalloc.start()
        tokens = 0
        action = next(schedule)
        for _ in range(count):
            kind = type(action).__name__
            answer: int | bool | None = None
            if kind in ("Offer", "Put", "Get"):
                # Refused: positions taken would be stored positions, which may grow.
                answer = None if kind == "Offer" and tokens else tokens
                tokens += answer is not None
            elif kind == "Await":
                answer = True
            action = schedule.send(answer)
        peaks[name] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        schedule.close()
    return peaks


def main() -> None:
    """Run the benchmark."""
    args = options(__doc__).parse_args()
    repeats = 3 if args.quick else 5
    depths = (1_000, 10_000) if args.quick else (1_000, 10_000, 100_000, 1_000_000)
    methods: dict[str, Callable[[int], float]] = {
        "ours": ours,
        "ours, streaming": streaming,
        "pyrevolve": with_pyrevolve,
        "checkpoint_schedules": iterated,
    }
    samples: dict[str, dict[int, list[float]]] = {name: {} for name in methods}
    left_out = []
    for n in depths:
        runs = {
            name: partial(method, n)
            for name, method in methods.items()
            if n <= PEER_STEPS or name.startswith("ours") or name == "checkpoint_schedules"
        }
        if n > PEER_STEPS:
            left_out.append(f"pyrevolve at n = {n} (minutes)")
        times = {1_000: 15, 1_000_000: 2}.get(n, repeats)  # short runs scatter most
        for name, seconds in interleaved(runs, times).items():
            samples[name][n] = seconds
            print(f"{n:>8} {name:<22}{1e6 * min(seconds) / n:>9.2f} us per step", flush=True)
    peaks = schedule_bytes(100_000 if args.quick else 1_000_000)
    for name, peak in peaks.items():
        assert peak < 2_000_000, f"{name}: a lazy schedule holds {peak} bytes"
    best = {name: {n: min(s) for n, s in by_n.items()} for name, by_n in samples.items()}
    ratios = {
        "pyrevolve_over_ours": best["pyrevolve"][10_000] / best["ours"][10_000],
        "checkpoint_schedules_over_ours": min(
            best["checkpoint_schedules"][n] / best["ours"][n] for n in depths
        ),
        "first_action_s": min(first_action() for _ in range(5)),
        "ours_us_per_step": 1e6 * best["ours"][depths[-1]] / depths[-1],
        "streaming_us_per_step": 1e6 * best["ours, streaming"][depths[-1]] / depths[-1],
        "schedule_peak_bytes": float(max(peaks.values())),
    }
    finish(args, "driver_overhead", samples, ratios, left_out)
    if args.plot:
        _plot(best, args.plot)


def _plot(best: dict[str, dict[int, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, by_n in best.items():
        axes.plot(list(by_n), [1e6 * s / n for n, s in by_n.items()], "o-", label=name)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("number of steps n")
    axes.set_ylabel("driver time per step (us)")
    axes.set_title(f"Operators that do nothing, {SLOTS} slots")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
