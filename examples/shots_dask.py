"""The gradient of several shots of a wave simulation, on a Dask cluster.

    python examples/shots_dask.py --quick
    python examples/shots_dask.py --scheduler tcp://head:8786 --scratch /scratch

Without --scheduler a cluster of two processes is started here.  Each shot runs on
a worker within --memory, its checkpoints streaming to that worker's scratch
folder; the sum of the gradients is compared with that of a plain loop.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from multistage import Reversal
from multistage.demos.wave import build
from multistage.interop.dask import map_shots
from multistage.support.units import format_bytes, format_seconds

Item = tuple[int, int, int, int]  # rows, columns, steps, column of the source
Result = tuple[float, Any, str]  # misfit, gradient, a line to print


def shot(item: Item, memory: int | str, tiers: str) -> Result:
    """Return misfit and gradient of one shot; runs on a worker."""
    rows, columns, steps, source = item
    model = build(rows, columns, steps, source_column=source)
    with Reversal(model.chain(), n_steps=steps, memory=memory, tiers=tiers) as run:
        run.forward(model.start())
        misfit = model.misfit()
        gradient = model.gradient(run.reverse(model.start_adjoint()))
        report = run.report()
    line = (
        f"{report.plan.planner}, {report.plan.slots} slots, recompute "
        f"{report.recompute_factor:.2f}, {report.counts.writes} states to disk, "
        f"{format_seconds(report.makespan_s)}"
    )
    return misfit, gradient, line


def add(total: Result, result: Result) -> Result:
    """Return the sum so far with one more shot in it."""
    return total[0] + result[0], total[1] + result[1], ""


def main() -> None:
    parser = argparse.ArgumentParser(description="Sum the gradients of shots on a Dask cluster.")
    parser.add_argument("--shots", type=int, default=8, help="number of shots (8)")
    parser.add_argument("--rows", type=int, default=160, help="grid points in depth (160)")
    parser.add_argument("--columns", type=int, default=240, help="grid points across (240)")
    parser.add_argument("--n-steps", type=int, default=1_000, help="time steps (1000)")
    parser.add_argument("--memory", default="12 MiB", help="budget of one running shot (12 MiB)")
    parser.add_argument("--scratch", help="a folder on every worker (the worker's own)")
    parser.add_argument("--scheduler", help="address of a cluster (one is started here)")
    parser.add_argument("--quick", action="store_true", help="small shots, a few seconds")
    args = parser.parse_args()
    if args.quick:
        args.rows, args.columns, args.n_steps = 90, 120, 300

    from distributed import Client, LocalCluster

    edge = args.columns // 4
    sources = np.linspace(edge, args.columns - edge, args.shots).astype(int).tolist()
    items = [(args.rows, args.columns, args.n_steps, source) for source in sources]
    state_bytes = 2 * args.rows * args.columns * 8
    print(
        f"{args.shots} shots of {args.n_steps} steps; a state is {format_bytes(state_bytes)}, a "
        f"wavefield {format_bytes(args.n_steps * state_bytes)}; budget of a shot: {args.memory}"
    )

    def arrived(index: int, result: Result) -> None:
        print(f"shot {index} (source {sources[index]}): {result[2]}", flush=True)

    cluster = args.scheduler or LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=":0"
    )
    with Client(cluster) as client:
        began = time.perf_counter()
        misfit, gradient, _ = map_shots(
            client,
            shot,
            items,
            memory=args.memory,
            scratch=args.scratch,
            reduce=add,
            arrived=arrived,
        )
        print(f"cluster: misfit {misfit:.6g} in {format_seconds(time.perf_counter() - began)}")
    if args.scheduler is None:
        cluster.close()

    began = time.perf_counter()
    serial = shot(items[0], args.memory, "memory:")
    for item in items[1:]:
        serial = add(serial, shot(item, args.memory, "memory:"))
    print(f"one loop: misfit {serial[0]:.6g} in {format_seconds(time.perf_counter() - began)}")
    if misfit != serial[0] or not np.array_equal(gradient, serial[1]):
        raise SystemExit("the sums differ")
    print("The sums of the gradients are equal to the last bit.")


if __name__ == "__main__":
    main()
