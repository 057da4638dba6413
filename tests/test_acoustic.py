"""The wave equation: an exact transpose, a gradient of order two, equal bits whatever the means."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from benchmarks.acoustic import Acoustic2D, build, layered, taylor_test

STEPS = 70


def small(dtype: Any = np.float64, steps: int = STEPS) -> Acoustic2D:
    return build(45, 57, steps, dtype, sponge=16)


def store_all(model: Acoustic2D, start: Any = None) -> tuple[float, Any]:
    """Return misfit and adjoint of state 0, every state kept."""
    state = model.start() if start is None else start.copy()
    states = []
    for i in range(model.n_steps):
        states.append(state.copy())
        model.forward(state, i, i + 1)
    adjoint = model.start_adjoint()
    for i in reversed(range(model.n_steps)):
        adjoint = model.reverse(states[i], adjoint, i)
    return model.misfit(), adjoint


@pytest.mark.parametrize("steps", [1, 2, STEPS])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_adjoint_is_the_transpose(dtype: type[np.floating], steps: int) -> None:
    """<F x, y> = <x, F' y> to rounding, F the n steps from a random state."""
    model = small(dtype, steps)
    model.wavelet[:] = 0  # linear now
    rng = np.random.default_rng(0)

    def noise() -> Any:
        levels = model.start()
        levels[:, 2:-2, 2:-2] = rng.standard_normal((2, 41, 53))
        return levels

    x, y = noise(), noise()
    after = x.copy()
    states = []
    for i in range(steps):
        states.append(after.copy())
        model.forward(after, i, i + 1)
    model.observed[...] = model.recorded  # no residual
    adjoint = y.copy(), model.start_adjoint()[1]
    for i in reversed(range(steps)):
        adjoint = model.reverse(states[i], adjoint, i)
    left = float((after.astype(np.float64) * y).sum())
    right = float((x.astype(np.float64) * adjoint[0]).sum())
    scale = float(np.linalg.norm(after) * np.linalg.norm(y))
    assert abs(left - right) < 8 * np.finfo(dtype).eps * scale


def test_the_gradient_has_a_remainder_of_order_two() -> None:
    model = small()
    misfit, adjoint = store_all(model)
    gradient = model.gradient(adjoint)
    rng = np.random.default_rng(2)
    for direction in (
        layered(model.shape)[0] - model.velocity,
        20 * rng.standard_normal(model.shape),
    ):
        rows = taylor_test(model, gradient, direction, misfit, 6)
        first = [a[1] / b[1] for a, b in itertools.pairwise(rows)]
        second = [a[2] / b[2] for a, b in itertools.pairwise(rows)]
        assert first[-1] == pytest.approx(2, rel=0.05)
        assert second[-3:] == pytest.approx([4, 4, 4], rel=0.05)
        wrong = taylor_test(model, 1.01 * gradient, direction, misfit, 6)
        assert wrong[-2][2] / wrong[-1][2] < 3.5  # a gradient 1 % off is seen
