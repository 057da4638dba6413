"""Full-waveform inversion with operators of one's own: a velocity from its echoes.

    python examples/fwi_acoustic.py --quick
    python examples/fwi_acoustic.py --points 200 --n-steps 1500 --memory "64 MiB"

A 2-D acoustic wave, written in place over two time levels, and its adjoint, are given
to `Reversal`, which keeps what the budget holds of the wavefield and streams the rest
to a file.  Gradient descent with a line search then lowers the misfit of the data.  The
first gradient is compared with that of the whole wavefield in memory.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import numpy as np

import multistage as ms

Array = np.ndarray[Any, np.dtype[np.float64]]


def lap(u: Array) -> Array:
    """Return the five-point sum inside a ring of zeros; it is its own transpose."""
    out = np.zeros_like(u)
    out[1:-1, 1:-1] = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1]
    return out


class Shot:
    """u[i+1] = 2 u[i] - u[i-1] + m lap(u[i]) + source; m is (velocity dt / dx)², to be found.

    A state is two time levels, shape (2, n, n); level i lies at index i % 2.  Waves enter at
    the top and are recorded at the bottom.
    """

    def __init__(self, m: Array, steps: int, column: int) -> None:
        self.m, self.steps, self.column = m, steps, column
        t = np.arange(steps) / 12 - 2.5
        self.wavelet = (1 - 2 * t**2) * np.exp(-(t**2))
        self.recorded = np.zeros((steps, len(m)))
        self.observed = np.zeros((steps, len(m)))

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
            new[3, self.column] += self.wavelet[i]
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

    def run(self) -> float:
        """Return the misfit of a forward run alone."""
        self.forward(self.start(), 0, self.steps)
        return self.misfit()


def whole_wavefield(shot: Shot) -> Array:
    """Return the gradient from every state, kept in memory."""
    states, state = [], shot.start()
    for i in range(shot.steps):
        states.append(state.copy())
        shot.forward(state, i, i + 1)
    adjoint = shot.start_adjoint()
    for i in reversed(range(shot.steps)):
        adjoint = shot.reverse(states[i], adjoint, i)
    return adjoint[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=100, help="grid points each way (100)")
    parser.add_argument("--n-steps", type=int, default=400, help="time steps (400)")
    parser.add_argument("--shots", type=int, default=3, help="shots (3)")
    parser.add_argument("--iterations", type=int, default=6, help="of the descent (6)")
    parser.add_argument("--memory", default="16 MiB", help="fast memory (16 MiB)")
    parser.add_argument("--tiers", help="slow tier (a folder for temporary files)")
    parser.add_argument("--quick", action="store_true", help="a small grid, some seconds")
    args = parser.parse_args()
    if args.quick:
        args.points, args.n_steps, args.shots, args.iterations = 50, 200, 2, 3
        args.memory = "24 slots"

    n = args.points
    y, x = np.meshgrid(np.linspace(0, 1, n), np.linspace(0, 1, n), indexing="ij")
    true = 0.2 + 0.05 * np.exp(-60 * ((x - 0.5) ** 2 + (y - 0.5) ** 2))
    m = np.full((n, n), 0.2)  # what is known: no lens
    shots = []
    for column in np.linspace(n // 4, 3 * n // 4, args.shots).astype(int):
        shot = Shot(true, args.n_steps, int(column))
        shot.run()
        shot.observed[...] = shot.recorded
        shot.m = m
        shots.append(shot)
    inside = (y > 0.15) & (y < 0.85)  # where the model may change
    first = 0.0
    with tempfile.TemporaryDirectory() as scratch:
        for iteration in range(args.iterations):
            misfit, gradient = 0.0, np.zeros_like(m)
            for shot in shots:
                chain = ms.InPlaceChain(shot.forward, shot.reverse)
                tiers = args.tiers or f"file:{scratch}"
                with ms.Reversal(
                    chain, n_steps=args.n_steps, memory=args.memory, tiers=tiers
                ) as run:
                    run.forward(shot.start())
                    misfit += shot.misfit()
                    found = run.reverse(shot.start_adjoint())[1]
                    report = run.report()
                if not iteration and not np.array_equal(found, whole_wavefield(shot)):
                    raise SystemExit("the gradients differ")
                gradient += found
            if not iteration:
                print(report)
            first = first or misfit
            away = float(np.abs(m - true)[inside].mean())
            print(f"iteration {iteration}: misfit {misfit:.4f}, model {away:.5f} off", flush=True)
            # Halve the step until the misfit falls.
            step, lower = 0.02 / np.abs(gradient[inside]).max(), misfit
            while lower >= misfit and step > 0:
                for shot in shots:
                    shot.m = m - step * gradient * inside
                lower, step = sum(shot.run() for shot in shots), step / 2
            m = shots[0].m
    print(f"misfit {first:.4f} at first, {lower:.4f} at last, {lower / first:.1%} of it")
    if not lower < first:
        raise SystemExit("the misfit did not fall")
    print("The gradient equals that of the whole wavefield, bit for bit.")


if __name__ == "__main__":
    main()
