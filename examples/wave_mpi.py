"""The gradient of an acoustic wave with respect to the speed of sound, on several ranks.

A square is cut into strips of rows, one per rank; a step exchanges one row
with each neighbour.  Every rank keeps a few states in memory and streams the
others to files of its own.  At the end rank 0 computes the same gradient
alone, and compares all bits.

    mpiexec -n 4 python examples/wave_mpi.py [--quick] [--scratch FOLDER]
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from typing import Any

import numpy as np

# MPICH waits by spinning; where ranks outnumber cores, let a wait yield.
os.environ.setdefault("MPIR_CVAR_CH4_PROGRESS_THROTTLE", "true")
os.environ.setdefault("MPIR_CVAR_CH4_PROGRESS_THROTTLE_NO_PROGRESS_COUNT", "20")

from mpi4py import MPI

from multistage.interop.mpi import MPIReversal
from multistage.support.units import format_bytes

Array = np.ndarray[Any, np.dtype[np.float64]]


class Wave:
    """u_tt = m lap(u) on the unit square, u = 0 at its edge, m the squared speed.

    A state is (u before, u now), both of shape (rows of this rank, columns).
    The adjoint carries, beside the adjoints of these two, the gradient with
    respect to m so far.
    """

    def __init__(self, comm: MPI.Comm, points: int) -> None:
        self.comm = comm
        rank, size = comm.Get_rank(), comm.Get_size()
        self.above = rank - 1 if rank else MPI.PROC_NULL
        self.below = rank + 1 if rank < size - 1 else MPI.PROC_NULL
        rows = np.array_split(np.arange(points), size)[rank]
        y, x = rows[:, None] / points, np.arange(points)[None, :] / points
        # dt^2 / dx^2 times the squared speed, below 1/2 for stability.
        self.m = 0.2 + 0.1 * np.exp(-80 * ((x - 0.6) ** 2 + (y - 0.5) ** 2))
        pulse = np.exp(-900 * ((x - 0.3) ** 2 + (y - 0.4) ** 2))
        self.start = (pulse, pulse.copy())
        self.padded = np.zeros((len(rows) + 2, points + 2))

    def lap(self, u: Array) -> Array:
        """Return the five-point sum at every point; its arithmetic knows nothing of ranks."""
        padded = self.padded
        padded[1:-1, 1:-1] = u
        self.comm.Sendrecv(u[-1], self.below, 0, padded[0, 1:-1], self.above, 0)
        self.comm.Sendrecv(u[0], self.above, 1, padded[-1, 1:-1], self.below, 1)
        sides = padded[1:-1, :-2] + padded[1:-1, 2:]
        return (padded[:-2, 1:-1] + padded[2:, 1:-1]) + sides - 4.0 * u

    def step(self, state: tuple[Array, Array], i: int) -> tuple[Array, Array]:
        before, now = state
        return now, 2.0 * now - before + self.m * self.lap(now)

    def adjoint_step(
        self, state: tuple[Array, Array], adjoint: tuple[Array, Array, Array], i: int
    ) -> tuple[Array, Array, Array]:
        now, (first, second, gradient) = state[1], adjoint
        back = first + 2.0 * second + self.lap(self.m * second)
        return -second, back, gradient + second * self.lap(now)


def gradient(
    comm: MPI.Comm, points: int, steps: int, scratch: str, memory: str
) -> tuple[Array, MPIReversal[Any, Any]]:
    """Return this rank's rows of the gradient of half the sum of squares of the last state."""
    wave = Wave(comm, points)
    with MPIReversal(
        wave.step, wave.adjoint_step, steps, comm=comm, memory=memory, tiers=f"file:{scratch}"
    ) as run:
        _, last = run.forward(wave.start)
        zero = np.zeros_like(last)
        return run.reverse((zero, last.copy(), zero))[2], run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a small square, few steps")
    parser.add_argument("--scratch", default=tempfile.gettempdir(), help="a disk of the node")
    options = parser.parse_args()
    points, steps = (96, 120) if options.quick else (400, 600)
    comm = MPI.COMM_WORLD
    began = time.perf_counter()
    mine, run = gradient(comm, points, steps, options.scratch, "12 slots")
    took = time.perf_counter() - began
    report = run.report()
    counts, plan = report.counts, report.plan
    line = (
        f"rank {comm.Get_rank()}: {len(mine)} rows, at the peak "
        f"{format_bytes(report.peak_fast_bytes)} of states in memory, "
        f"{format_bytes(report.timeline.peak('file'))} in files; {counts.writes} states written, "
        f"{counts.reads} read, {counts.forward_steps} forward steps, "
        f"waited {counts.stall_s:.3f} s"
    )
    lines, parts = comm.gather(line), comm.gather(mine)
    if comm.Get_rank() == 0:
        assert lines is not None and parts is not None
        print(plan)
        print()
        print("\n".join(lines))
        alone, _ = gradient(MPI.COMM_SELF, points, steps, options.scratch, "12 slots")
        whole = np.concatenate(parts)
        print(f"gradient of {points} x {points} points, {steps} steps, norm", end=" ")
        print(f"{np.linalg.norm(whole):.6e}, on {comm.Get_size()} ranks in {took:.1f} s")
        print(f"equals that of one rank: {bool((whole == alone).all())}")
    comm.Barrier()


if __name__ == "__main__":
    main()
