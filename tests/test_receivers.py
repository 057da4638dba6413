"""Misfits along the way: recorded by the step's number and summed once, though steps run again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from multistage import InPlaceChain, Reversal
from multistage.interop import pyrevolve

N, POINTS, AT = 80, 40, [5, 20, 33]


class Wave:
    """A wave on a line, two levels in place, with receivers; and as pyrevolve's operators."""

    dtype, size, nbytes = np.dtype(float), 2 * POINTS, 16 * POINTS

    def __init__(self) -> None:
        rng = np.random.default_rng(3)
        self.speed = 0.1 + 0.1 * rng.random(POINTS - 2)
        self.observed = 0.1 * rng.standard_normal((N, len(AT)))
        self.recorded = np.full((N, len(AT)), np.nan)
        self.levels, self.adjoint = np.zeros((2, POINTS)), self.start_adjoint()
        self.ran = 0

    def start_adjoint(self) -> Any:
        return np.zeros((2, POINTS)), np.zeros(POINTS - 2)

    def forward(self, levels: Any, start: int, stop: int) -> None:
        for i in range(start, stop):
            now, new = levels[i % 2], levels[1 - i % 2]
            new[1:-1] *= -1
            new[1:-1] += 2 * now[1:-1] + self.speed * np.diff(now, 2)
            new[10] += np.exp(-(((i - 12) / 4) ** 2))
            self.recorded[i] = new[AT]
            self.ran += 1

    def reverse(self, levels: Any, adjoint: Any, i: int) -> Any:
        (fields, gradient), now = adjoint, levels[i % 2]
        p, q = fields[1 - i % 2], fields[i % 2]
        p[AT] += self.recorded[i] - self.observed[i]
        gradient += p[1:-1] * np.diff(now, 2)
        q[1:-1] += 2 * p[1:-1]
        q += np.diff(np.pad(self.speed * p[1:-1], 2), 2)
        p *= -1
        return adjoint

    def misfit(self) -> float:
        return 0.5 * float(((self.recorded - self.observed) ** 2).sum())

    # As pyrevolve has it.

    def get_data(self, timestep: int) -> list[Any]:
        return [self.levels]

    get_data_location = get_data

    def operators(self) -> tuple[Any, Any, Any]:
        class Forward(pyrevolve.Operator):
            def apply(inner, *, t_start: int, t_end: int) -> None:
                self.forward(self.levels, t_start, t_end)

        class Backward(pyrevolve.Operator):
            def apply(inner, *, t_start: int, t_end: int) -> None:
                self.reverse(self.levels, self.adjoint, t_start)

        return self, Forward(), Backward()


def expected() -> tuple[float, Any]:
    wave, states = Wave(), []
    for i in range(N):
        states.append(wave.levels.copy())
        wave.forward(wave.levels, i, i + 1)
    for i in reversed(range(N)):
        wave.reverse(states[i], wave.adjoint, i)
    return wave.misfit(), wave.adjoint[1]


MISFIT, GRADIENT = expected()


def test_the_gradient_is_that_of_the_summed_misfit() -> None:
    from multistage.testing import taylor

    def misfit(speed: Any) -> float:
        wave = Wave()
        wave.speed = speed
        wave.forward(wave.levels, 0, N)
        return wave.misfit()

    assert taylor(misfit, Wave().speed, GRADIENT).order > 1.95


@pytest.mark.parametrize(
    "options",
    [
        {"memory": "4 slots"},
        {"memory": "4 slots", "planner": "revolve", "checked": True},
        {"memory": "4 slots", "planner": "interval", "tiers": "memory:?buffers=0"},
    ],
)
def test_a_reversal_that_recomputes(options: dict[str, Any]) -> None:
    wave = Wave()
    with Reversal(InPlaceChain(wave.forward, wave.reverse), n_steps=N, **options) as run:
        for _ in range(2):
            wave.recorded[:] = np.nan
            wave.ran = 0
            run.forward(np.zeros((2, POINTS)))
            misfit = wave.misfit()
            _, gradient = run.reverse(wave.start_adjoint())
            assert (misfit, wave.misfit()) == (MISFIT, MISFIT)
            assert gradient.tobytes() == GRADIENT.tobytes()
            assert wave.ran > N


@pytest.mark.parametrize("options", [{}, {"planner": "interval", "tiers": "memory:?buffers=0"}])
def test_the_drop_in_that_recomputes(options: dict[str, Any]) -> None:
    wave = Wave()
    count = 4 if not options else None
    memory = {"memory": "4 slots"} if options else {}
    with pyrevolve.Revolver(*wave.operators(), count, N, **memory, **options) as revolver:
        for _ in range(2):
            wave.levels[:], wave.recorded[:], wave.ran = 0, np.nan, 0
            for array in wave.adjoint:
                array[:] = 0
            revolver.apply_forward()
            misfit = wave.misfit()
            revolver.apply_reverse()
            assert (misfit, wave.misfit()) == (MISFIT, MISFIT)
            assert wave.adjoint[1].tobytes() == GRADIENT.tobytes()
            assert wave.ran > 2 * N  # those of the adjoint operator, and more
