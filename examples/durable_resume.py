"""A gradient that survives kill -9, twice, and comes out the same.

    python examples/durable_resume.py --quick
    python examples/durable_resume.py --n-steps 20000 --folder /scratch/run42

A process computes a gradient with `durable=FOLDER` and is killed, by SIGKILL, once in
its forward sweep and once in its reverse sweep.  The same call in a new process goes
on where the one before was stopped.  The result is compared with that of a run that
nobody killed and kept every state in memory.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import multistage as ms
from multistage.durable.status import inspect

Array = np.ndarray[Any, np.dtype[np.float64]]
Adjoint = tuple[Array, Array]


class Heat:
    """Heat in a rod that loses some to its surroundings, by the temperature's third power."""

    def __init__(
        self, points: int, kill: tuple[str, int] | None = None, folder: Path | None = None
    ) -> None:
        self.conductivity = 0.2 + 0.1 * np.sin(np.linspace(0, 9, points - 1))
        self.kill = kill  # where to die: ("forward" or "reverse", step)
        self.folder = folder
        self.began: set[str] = set()

    def start(self) -> Array:
        return np.hanning(len(self.conductivity) + 1)

    def start_adjoint(self, last: Array) -> Adjoint:
        """Return the adjoint of |last|² / 2, and with it the gradient by the conductivity so far.

        What the adjoint steps add up travels in the adjoint, which is what a durable
        run keeps on the disk: a sum beside it would begin at zero after a kill.
        """
        return last.copy(), np.zeros_like(self.conductivity)

    def mark(self, sweep: str, i: int) -> None:
        if sweep not in self.began:
            self.began.add(sweep)
            print(f"  {sweep} sweep begins at step {i}", flush=True)
        if self.kill == (sweep, i):
            assert self.folder is not None
            # These steps are short: the disk, slower, is given time for its first state.
            for _ in range(6_000):
                if inspect(self.folder).forward_step > 0:
                    break
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)

    def step(self, u: Array, i: int) -> Array:
        self.mark("forward", i)
        push = np.diff(self.conductivity * np.diff(u), prepend=0, append=0)
        return u + push - 1e-4 * u**3

    def adjoint_step(self, u: Array, adjoint: Adjoint, i: int) -> Adjoint:
        self.mark("reverse", i)
        du, gradient = adjoint
        slope = np.diff(du)
        push = np.diff(self.conductivity * slope, prepend=0, append=0)
        return du + push - 3e-4 * u**2 * du, gradient - slope * np.diff(u)


def store_all(heat: Heat, steps: int) -> Array:
    """Return the gradient from every state, kept in memory."""
    states = [heat.start()]
    for i in range(steps):
        states.append(heat.step(states[-1], i))
    adjoint = heat.start_adjoint(states[-1])
    for i in reversed(range(steps)):
        adjoint = heat.adjoint_step(states[i], adjoint, i)
    return adjoint[1]


def durable(args: argparse.Namespace, folder: Path, kill: tuple[str, int] | None) -> None:
    """Compute the gradient in this process, which may die of it; write it to a file."""
    heat = Heat(args.points, kill, folder)
    costs = ms.Costs(2e-5, 4e-5, tiers=(ms.Tier(write_s=1e-4, read_s=1e-4),))  # steps unmeasured
    with ms.Reversal(
        heat.step,
        heat.adjoint_step,
        args.n_steps,
        memory=args.memory,
        costs=costs,
        durable=folder,
        durable_every_s=0.01,
    ) as run:
        last = run.forward(heat.start())
        gradient = run.reverse(heat.start_adjoint(last))[1]
        np.save(folder.parent / "gradient.npy", gradient)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n-steps", type=int, default=8_000, help="time steps (8000)")
    parser.add_argument("--points", type=int, default=2_000, help="points of the rod (2000)")
    parser.add_argument("--memory", default="20 slots", help="fast memory (20 slots)")
    parser.add_argument("--folder", type=Path, help="what to keep (a temporary folder)")
    parser.add_argument("--quick", action="store_true", help="fewer steps, some seconds")
    parser.add_argument("--child", nargs=3, metavar=("FOLDER", "SWEEP", "STEP"), help="internal")
    args = parser.parse_args()
    if args.quick:
        args.n_steps, args.points = 1_500, 500
    if args.child:
        folder, sweep, step = args.child
        durable(args, Path(folder), (sweep, int(step)) if sweep != "none" else None)
        return
    options = [
        "--n-steps",
        str(args.n_steps),
        "--points",
        str(args.points),
        "--memory",
        args.memory,
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.folder or Path(scratch) / "run"
        forward, reverse = args.n_steps * 3 // 4, args.n_steps // 3
        for sweep, step in (("forward", forward), ("reverse", reverse), ("none", 0)):
            killed = "" if sweep == "none" else f", to be killed at {sweep} step {step}"
            print(f"process{killed}", flush=True)
            began = time.perf_counter()
            child = subprocess.run(
                [sys.executable, __file__, *options, "--child", str(folder), sweep, str(step)]
            )
            print(f"  ended with {child.returncode} after {time.perf_counter() - began:.1f} s")
            if child.returncode != (-signal.SIGKILL if sweep != "none" else 0):
                raise SystemExit("the process did not end as it should")
        gradient = np.load(folder.parent / "gradient.npy")
        (folder.parent / "gradient.npy").unlink()
    print("all of it in one process")
    if not np.array_equal(gradient, store_all(Heat(args.points), args.n_steps)):
        raise SystemExit("the gradients differ")
    print("The gradient equals that of store-all, bit for bit.")


if __name__ == "__main__":
    main()
