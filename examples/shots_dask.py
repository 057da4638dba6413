"""The gradient of several shots of a wave simulation, on a Dask cluster.

    python examples/shots_dask.py --quick
    python examples/shots_dask.py --scheduler tcp://head:8786 --scratch /scratch

Without --scheduler a cluster of two processes is started here.  Each shot runs on
a worker within --memory, its checkpoints streaming to that worker's scratch
folder; the first shot on a worker measures, the others find all as it is.  The sum
of the gradients is compared with that of a plain loop.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from multistage import InPlaceChain
from multistage.interop.dask import ShotWorker, map_shots
from multistage.support.units import format_bytes, format_seconds

Array = np.ndarray[Any, np.dtype[np.float64]]
Item = tuple[int, int, int, int]  # rows, columns, steps, column of the source
Result = tuple[float, Array, str]  # misfit, gradient, a line to print


def lap(u: Array) -> Array:
    """Return the five-point sum inside a ring of zeros; it is its own transpose."""
    out = np.zeros_like(u)
    out[1:-1, 1:-1] = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1]
    return out


class Wave:
    """u[i+1] = 2 u[i] - u[i-1] + m lap(u[i]) + source, as in `fwi_acoustic.py`.

    A state is two time levels, shape (2, rows, columns); level i lies at index i % 2.  The data
    are those of a lens, which is then removed.
    """

    def __init__(self, rows: int, columns: int, steps: int, source: int) -> None:
        y, x = np.meshgrid(np.linspace(0, 1, rows), np.linspace(0, 1, columns), indexing="ij")
        t = np.arange(steps) / 12 - 2.5
        self.wavelet, self.source = (1 - 2 * t**2) * np.exp(-(t**2)), source
        self.recorded, self.observed = np.zeros((2, steps, columns))
        self.m = 0.2 + 0.05 * np.exp(-60 * ((x - 0.5) ** 2 + (y - 0.5) ** 2))
        self.forward(self.start(), 0, steps)
        self.observed[...] = self.recorded
        self.m = np.full((rows, columns), 0.2)

    def start(self) -> Array:
        return np.zeros((2, *self.m.shape))

    def start_adjoint(self) -> tuple[Array, Array]:
        """Return the adjoint of the last state, zeros, and with it the gradient so far."""
        return self.start(), np.zeros_like(self.m)

    def forward(self, levels: Array, start: int, stop: int) -> None:
        for i in range(start, stop):
            now, new = levels[i % 2], levels[1 - i % 2]  # new holds level i - 1 still
            new *= -1
            new += 2 * now + self.m * lap(now)
            new[3, self.source] += self.wavelet[i]
            self.recorded[i] = new[-4]

    def reverse(self, levels: Array, adjoint: tuple[Array, Array], i: int) -> tuple[Array, Array]:
        (fields, gradient), now = adjoint, levels[i % 2]
        p, q = fields[1 - i % 2], fields[i % 2]  # adjoints of levels i + 1 and i
        p[-4] += self.recorded[i] - self.observed[i]
        gradient += p * lap(now)
        q += 2 * p + lap(self.m * p)
        p *= -1  # now that of level i - 1
        return adjoint

    def misfit(self) -> float:
        return 0.5 * float(((self.recorded - self.observed) ** 2).sum())


def shot(item: Item, worker: ShotWorker) -> Result:
    """Return misfit and gradient of one shot; runs on a worker, which keeps its `Reversal`."""
    wave = Wave(*item)
    chain = InPlaceChain(wave.forward, wave.reverse)
    with worker.reversal(chain, n_steps=item[2]) as run:
        run.forward(wave.start())
        misfit = wave.misfit()
        _, gradient = run.reverse(wave.start_adjoint())
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
    here = ShotWorker(args.memory, "memory:")
    serial = shot(items[0], here)
    for item in items[1:]:
        serial = add(serial, shot(item, here))
    here.close()
    print(f"one loop: misfit {serial[0]:.6g} in {format_seconds(time.perf_counter() - began)}")
    if misfit != serial[0] or not np.array_equal(gradient, serial[1]):
        raise SystemExit("the sums differ")
    print("The sums of the gradients are equal to the last bit.")


if __name__ == "__main__":
    main()
