"""Full-waveform inversion with operators of one's own: a velocity from its echoes.

    python examples/fwi_acoustic.py --quick
    python examples/fwi_acoustic.py --points 200 --n-steps 1500 --memory "64 MiB"

A 2-D acoustic wave, written in place over two time levels, and its adjoint, are given to one
`Reversal`, which keeps what the budget holds of the wavefield and streams the rest to a file.
It serves shot after shot: the first measures steps and disk, the others find costs, plan,
buffers and file as they are.  The adjoint step is tested by a dot product, the gradient by a
Taylor expansion and against that of the whole wavefield in memory; L-BFGS (scipy) then lowers
the misfit of all shots.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import numpy as np
from scipy.optimize import minimize

import multistage as ms

Array = np.ndarray[Any, np.dtype[np.float64]]
KNOWN, LENS = 0.2, 0.05  # m outside the lens, and what the lens adds


def lap(u: Array) -> Array:
    """Return the five-point sum inside a ring of zeros; it is its own transpose."""
    out = np.zeros_like(u)
    out[1:-1, 1:-1] = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1]
    return out


class Shot:
    """u[i+1] = 2 u[i] - u[i-1] + m lap(u[i]) + source; m is (velocity dt / dx)², to be found.

    A state is two time levels, shape (2, n, n); level i lies at index i % 2.  Waves enter at
    the top and are recorded at the bottom.  Forward steps run more than once, so a record is
    written, never added to, and the misfit is summed once, when the forward sweep has ended.
    Each adjoint step runs once: there the residual of its own time enters as a source.
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

    def simulate(self, m: Array) -> float:
        """Return the misfit of a model, by a forward run alone."""
        self.m = m
        self.forward(self.start(), 0, self.steps)
        return self.misfit()


class Survey:
    """The misfit and the gradient of all shots, by one `Reversal`."""

    def __init__(self, shots: list[Shot], run: ms.Reversal[Array, tuple[Array, Array]]) -> None:
        self.shots, self.run = shots, run
        self.gradients = self.forward_steps = 0

    def gradient(self, shot: Shot, m: Array) -> tuple[float, Array]:
        """Return misfit and gradient of one shot."""
        shot.m = m
        self.run.use(ms.InPlaceChain(shot.forward, shot.reverse))  # all else is carried over
        self.run.forward(shot.start())
        misfit = shot.misfit()
        found = self.run.reverse(shot.start_adjoint())[1]
        self.gradients += 1
        self.forward_steps += self.run.report().counts.forward_steps
        return misfit, found

    def all_gradients(self, m: Array) -> tuple[float, Array]:
        """Return the sums of all shots, in their order."""
        parts = [self.gradient(shot, m) for shot in self.shots]
        return sum(misfit for misfit, _ in parts), np.sum([found for _, found in parts], axis=0)


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


def adjoint_of_a_step(m: Array) -> ms.testing.DotProduct:
    """Return whether `reverse` is the adjoint of `forward`, the receivers included."""
    one = Shot(m, 1, 0)
    one.wavelet[:] = 0  # what is left is linear

    ring = ((0, 0), (1, 1), (1, 1))  # of zeros, which the operators leave as it is

    def tangent(inside: Array) -> tuple[Array, Array]:
        levels = np.pad(inside, ring)
        one.forward(levels, 0, 1)
        return levels[:, 1:-1, 1:-1], one.recorded[0, 1:-1].copy()

    def adjoint(given: tuple[Array, Array]) -> Array:
        inside, one.recorded[0, 1:-1] = given
        fields, _ = one.reverse(one.start(), (np.pad(inside, ring), np.zeros_like(m)), 0)
        return fields[:, 1:-1, 1:-1]

    inside = one.start()[:, 1:-1, 1:-1]
    return ms.testing.dot_product(tangent, adjoint, inside, (inside, one.recorded[0, 1:-1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--points", type=int, default=100, help="grid points each way (100)")
    parser.add_argument("--n-steps", type=int, default=400, help="time steps (400)")
    parser.add_argument("--shots", type=int, default=3, help="shots (3)")
    parser.add_argument("--iterations", type=int, default=8, help="of L-BFGS (8)")
    parser.add_argument("--memory", default="16 MiB", help="fast memory (16 MiB)")
    parser.add_argument("--tiers", help="slow tier (a folder for temporary files)")
    parser.add_argument("--quick", action="store_true", help="a small grid, some seconds")
    args = parser.parse_args()
    if args.quick:
        args.points, args.n_steps, args.shots, args.iterations = 50, 200, 2, 3
        args.memory = "24 slots"

    n = args.points
    y, x = np.meshgrid(np.linspace(0, 1, n), np.linspace(0, 1, n), indexing="ij")
    true = KNOWN + LENS * np.exp(-60 * ((x - 0.5) ** 2 + (y - 0.5) ** 2))
    known = np.full((n, n), KNOWN)
    inside = (y > 0.15) & (y < 0.85)  # where the model may change
    shots = []
    for column in np.linspace(n // 4, 3 * n // 4, args.shots).astype(int):
        shot = Shot(true, args.n_steps, int(column))
        shot.simulate(true)
        shot.observed[...] = shot.recorded
        shots.append(shot)

    test = adjoint_of_a_step(true)
    print(f"adjoint step: {test}")
    if test.error > 1e-14:
        raise SystemExit("the adjoint step is wrong")

    def model(lens: Array) -> Array:
        """Return m for what L-BFGS is to find: numbers of about 1."""
        m = known.copy()
        m[inside] += LENS * lens
        return m

    with tempfile.TemporaryDirectory() as scratch:
        chain = ms.InPlaceChain(shots[0].forward, shots[0].reverse)
        tiers = args.tiers or f"file:{scratch}"
        with ms.Reversal(chain, n_steps=args.n_steps, memory=args.memory, tiers=tiers) as run:
            survey = Survey(shots, run)
            for shot in shots:
                if not np.array_equal(survey.gradient(shot, known)[1], whole_wavefield(shot)):
                    raise SystemExit("the gradients differ")
            print(run.report())
            first, gradient = survey.all_gradients(known)
            expansion = ms.testing.taylor(
                lambda m: sum(shot.simulate(m) for shot in shots), known, gradient
            )
            print(f"the gradient of the misfit of all shots:\n{expansion}")
            if expansion.order < 1.95:
                raise SystemExit("the gradient is wrong")

            def objective(lens: Array) -> tuple[float, Array]:
                misfit, found = survey.all_gradients(model(lens))
                return misfit / first, LENS * found[inside] / first

            def show(intermediate_result: Any) -> None:
                found = (model(intermediate_result.x)[n // 2, n // 2] - KNOWN) / LENS
                print(
                    f"misfit {intermediate_result.fun:7.2%}, the middle of the lens {found:.0%}",
                    flush=True,
                )

            result = minimize(
                objective,
                np.zeros(inside.sum()),
                jac=True,
                method="L-BFGS-B",
                callback=show,
                options={"maxiter": args.iterations},
            )
            print(
                f"{survey.gradients} gradients of a shot by one Reversal: recompute factor "
                f"{survey.forward_steps / (survey.gradients * args.n_steps):.2f}; the first shot "
                "measured steps and disk, the others nothing"
            )
    if not result.fun < 0.5:
        raise SystemExit("the misfit did not fall by half")
    print(f"The misfit fell to {result.fun:.1%}.")
    print("The gradient of each shot equals that of the whole wavefield, bit for bit.")


if __name__ == "__main__":
    main()
