"""Seconds and memory of the chain solver, beside rockmate's C solver.

Random chains with sizes and times spread as in residual networks; both solve
the same problem in the same number of memory slots, interleaved.  Schedules of
both are judged byte by byte.  Each point is a fresh process, so that peaks are
its own.  rockmate is installed without its dependencies
(`pip install --no-deps rockmate`); where it is not, its part is left out.

    python -m benchmarks.chain_solver [--quick] [--json FILE] [--plot FILE]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import random
import statistics
import sys
import time
import types
from pathlib import Path
from typing import Any

from benchmarks._common import child, finish, held_kib, options
from multistage.actions import Action, Advance, EndForward, Free, Load, Reverse, Save, Tape
from multistage.model.stages import Stage, StageCosts
from multistage.planners.chain.heterogeneous import plan_chain, smallest_memory
from multistage.planners.chain.memory import use_of
from multistage.planners.chain.sizes import Sizes
from multistage.planners.chain.table import Table, default_threads

SLOTS = 500
SHARES = (0.15, 0.3, 0.6)


def a_chain(length: int, seed: int) -> StageCosts:
    """Return a random chain; states lognormal, tapes 1 to 4 times their size."""
    draw = random.Random(seed)
    stages = []
    for k in range(length):
        output = int(draw.lognormvariate(16, 0.7))
        stages.append(
            Stage(
                f"s{k}",
                forward_s=draw.lognormvariate(-6, 0.7),
                backward_s=draw.lognormvariate(-5.3, 0.7),
                output_bytes=output,
                tape_bytes=int(output * draw.uniform(1, 4)),
            )
        )
    return StageCosts(tuple(stages), 1 << 16)


def ours(costs: StageCosts, limit: int, instructions: Any, threads: int) -> dict[str, Any]:
    """Solve one table for a limit; return seconds."""
    true = Sizes.of(costs)
    began = time.perf_counter()
    table = Table(true.in_slots(limit / SLOTS), SLOTS, threads=threads, instructions=instructions)
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "table_bytes": table.nbytes}


def planned(costs: StageCosts, limit: int) -> dict[str, Any]:
    """Return seconds of a whole plan, all rungs of the ladder, and its makespan."""
    began = time.perf_counter()
    plan = plan_chain(costs, limit)
    return {"seconds": time.perf_counter() - began, "makespan_s": plan.makespan_s}


def rockmate_found() -> bool:
    """Whether rockmate is installed, dependencies or not."""
    return importlib.util.find_spec("rockmate") is not None


def with_rockmate(costs: StageCosts, limit: int) -> dict[str, Any]:
    """Solve with rockmate's C solver; return seconds, and the makespan of its schedule."""
    solver = _rockmate()
    stages, loss = costs.stages, len(costs.stages)
    unit = limit / SLOTS

    def slots(nbytes: int) -> int:
        return -int(-nbytes // unit)  # rounded up, as it does

    states = [costs.input_bytes, *(s.output_bytes for s in stages)]
    chain = types.SimpleNamespace(
        ln=loss,
        nb_sol=[1] * (loss + 1),
        fw=[[s.forward_s] for s in stages] + [[0.0]],
        bw=[[s.backward_s] for s in stages] + [[0.0]],
        cw=[slots(n) for n in states] + [0],
        cbw=[[0]] + [[slots(s.tape_bytes)] for s in stages] + [[0]],
        fwd_tmp=[[0]] * (loss + 1),
        bwd_tmp=[[0]] * (loss + 1),
        ff_fwd_tmp=[0] * (loss + 1),
        ff_fw=[s.forward_s for s in stages] + [0.0],
    )
    began = time.perf_counter()
    table = solver.RkTable(chain, SLOTS)
    table.get_opt(SLOTS - chain.cw[0])
    seconds = time.perf_counter() - began
    try:
        sequence = list(table.build_sequence(SLOTS - chain.cw[0]))
    except ValueError:
        return {"seconds": seconds, "makespan_s": None}
    use = use_of(_actions(sequence), costs)
    return {"seconds": seconds, "makespan_s": use.makespan_s, "peak_bytes": use.peak_bytes}


def _rockmate() -> Any:
    """Load the compiled solver alone: its package asks for more than it needs."""
    found = importlib.util.find_spec("rockmate")
    assert found is not None and found.submodule_search_locations
    folder = Path(next(iter(found.submodule_search_locations)))
    for name in ("rockmate", "rockmate.solvers", "rockmate.solvers.rk_rotor"):
        package = types.ModuleType(name)
        package.__path__ = [str(folder.joinpath(*name.split(".")[1:]))]
        sys.modules[name] = package
    return importlib.import_module("rockmate.solvers.rk_rotor.csolver")


def _actions(sequence: list[Any]) -> list[Action]:
    actions: list[Action] = []
    live: int | None = 0
    saved: set[int] = set()
    for operation in sequence:
        kind = type(operation).__name__
        if kind == "SeqLoss":
            actions.append(EndForward())
            live = None
            continue
        i = operation.index
        if kind == "SeqBlockBwd":
            actions.append(Reverse(i))
            live = None
            continue
        if live != i:
            actions.append(Load(i))
        if kind == "SeqBlockFc" and i and i not in saved:
            saved.add(i)
            actions.append(Save(i))
        if kind == "SeqBlockFe":
            if i in saved:
                saved.remove(i)
                actions.append(Free(i))
            actions.append(Tape(i))
        else:
            actions.append(Advance(i, i + 1))
        live = i + 1
    return actions


def _run_child(task: dict[str, Any]) -> dict[str, Any]:
    costs = a_chain(task["length"], task["seed"])
    before = held_kib("VmHWM")
    if task["what"] == "rockmate":
        result = with_rockmate(costs, task["limit"])
    elif task["what"] == "plan":
        result = planned(costs, task["limit"])
    else:
        result = ours(costs, task["limit"], task["what"], task["threads"])
    return {**result, "peak_gb": (held_kib("VmHWM") - before) * 1024 / 1e9}


def main() -> None:
    """Run the benchmark."""
    parser = options(__doc__)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(_run_child(json.loads(args.child))))
        return
    length = 120 if args.quick else 339
    repeats = 1 if args.quick else 3
    rockmate = rockmate_found()
    left_out = [] if rockmate else ["rockmate: not installed (pip install --no-deps rockmate)"]
    samples: dict[str, list[dict[str, Any]]] = {}

    def run(name: str, what: str, limit: int, n: int, threads: int = 1) -> dict[str, Any]:
        task = {"what": what, "limit": limit, "length": n, "seed": args.seed, "threads": threads}
        result = child("benchmarks.chain_solver", task, {})
        samples.setdefault(name, []).append({"limit": limit, **result})
        return result

    costs = a_chain(length, args.seed)
    plain = plan_chain(costs).plain_bytes
    over: list[float] = []
    for share in SHARES:
        limit = max(smallest_memory(costs), int(share * plain))
        for _ in range(repeats if share == SHARES[0] else 1):
            for instructions in ("baseline", "avx2", "avx512"):
                run(f"{instructions}, 1 thread", instructions, limit, length)
            run("avx2, 2 threads", "avx2", limit, length, 2)
            run("as planned", "auto", limit, length, default_threads())
            whole = run("plan", "plan", limit, length)
            if rockmate:
                theirs = run("rockmate", "rockmate", limit, length)
                if theirs["makespan_s"] is not None and theirs["peak_bytes"] <= limit:
                    over.append(whole["makespan_s"] / theirs["makespan_s"])
                    assert over[-1] <= 1 + 1e-9, f"slower than rockmate's schedule at {share}"
    if not args.quick:
        long = a_chain(1000, args.seed)
        limit = int(0.15 * plan_chain(long).plain_bytes)
        run("1000 stages", "auto", limit, 1000)

    for name, results in samples.items():
        seconds = statistics.median(r["seconds"] for r in results)
        peak = max(r["peak_gb"] for r in results)
        print(f"{name:<20}{seconds:>9.3f} s{peak:>8.3f} GB")
    finish(args, "chain_solver", samples, _ratios_of(samples, over), left_out)
    if args.plot:
        _plot(samples, args.plot)


def _ratios_of(samples: dict[str, list[dict[str, Any]]], over: list[float]) -> dict[str, float]:
    def least(name: str) -> float:
        return min(result["seconds"] for result in samples[name])

    ratios = {
        "peak_gb_339": max(r["peak_gb"] for r in samples["avx2, 1 thread"]),
        "plan_seconds": least("plan"),
        "plan_peak_gb": max(r["peak_gb"] for r in samples["plan"]),
        "avx2_seconds": least("avx2, 1 thread"),
    }
    if "rockmate" in samples:
        ratios["rockmate_over_ours"] = least("rockmate") / least("as planned")
        ratios["rockmate_over_avx2_1_thread"] = least("rockmate") / least("avx2, 1 thread")
        ratios["makespan_over_rockmate"] = max(over, default=1.0)
    if "1000 stages" in samples:
        ratios["seconds_1000"] = least("1000 stages")
    return ratios


def _plot(samples: dict[str, list[dict[str, Any]]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    names = [name for name in samples if name != "1000 stages"]
    axes.barh(names, [min(r["seconds"] for r in samples[name]) for name in names])
    axes.set_xscale("log")
    axes.set_xlabel("seconds")
    axes.grid(alpha=0.3, axis="x")
    figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main()
