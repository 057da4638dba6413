"""The LSTM demo: right gradients, equal to the last bit under every planner, real text."""

from __future__ import annotations

import numpy as np
import pytest

from multistage.demos.lstm import LSTM, State, build, gradients_of, standard_library
from multistage.errors import ArgumentError
from multistage.states.layout import Array


def store_all(model: LSTM, steps: int) -> dict[str, Array]:
    """Run one sweep keeping every state; return the parameter gradients."""
    model.clear()
    states = [model.start()]
    for i in range(steps):
        states.append(model.step(states[-1], i))
    adjoint: State = model.start()
    for i in reversed(range(steps)):
        adjoint = model.adjoint_step(states[i], adjoint, i)
    return gradients_of(model)


def loss_of(model: LSTM, steps: int) -> float:
    """Return the loss by the definition, apart from the adjoint's code."""
    state, loss = model.start(), 0.0
    rows = np.arange(model.batch)
    for i in range(steps):
        state = model.step(state, i)
        logits = state[0] @ model.parameters["output"] + model.parameters["bias"]
        normal = np.log(np.exp(logits).sum(axis=1))
        loss += float((normal - logits[rows, model.streams[i + 1]]).sum())
    return loss


@pytest.mark.parametrize("batch", [1, 3])
def test_gradient_is_that_of_finite_differences(batch: int) -> None:
    model = build(12, 5, batch, np.float64)
    gradients = store_all(model, 12)
    assert model.loss == pytest.approx(loss_of(model, 12), rel=1e-12)
    rng = np.random.default_rng(0)
    for name, parameter in model.parameters.items():
        # Along a random direction every element of the gradient counts.
        direction = rng.standard_normal(parameter.shape)
        kept, small = parameter.copy(), 1e-5
        parameter[...] = kept + small * direction
        above = loss_of(model, 12)
        parameter[...] = kept - small * direction
        below = loss_of(model, 12)
        parameter[...] = kept
        slope = float((gradients[name] * direction).sum())
        assert slope == pytest.approx((above - below) / (2 * small), rel=1e-6), name


def test_more_text_than_there_is_is_refused() -> None:
    with pytest.raises(ArgumentError, match="use fewer steps or a smaller batch"):
        standard_library(10**12)
