"""Mistakes that a type checker finds: an ignored error that is none any more is an error."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from multistage import Costs, FunctionChain, Reversal
from multistage.execute.executor import Executor
from multistage.states.in_place import ArrayStates
from multistage.states.layout import Layout

Vector = npt.NDArray[np.float64]


def step(x: Vector, i: int) -> Vector:
    """Run step i."""
    return np.sin(x)


def adjoint_step(x: Vector, adjoint: Vector, i: int) -> Vector:
    """Return the adjoint before step i."""
    return np.cos(x) * adjoint


class StatesOfText:
    """States of another kind than those of the chain."""

    def layout(self, state: str) -> Layout:
        """Return a layout."""
        return Layout.of(np.zeros(len(state)))

    def slots(self, layout: Layout) -> ArrayStates:
        """Return no slots."""
        return ArrayStates(in_place=False)


def of_reversals(x: Vector, costs: Costs) -> None:
    """Take a state, an adjoint, or a value of plain data for what it is not."""
    with Reversal(step, adjoint_step, n_steps=3) as run:
        run.forward("state 0")  # type: ignore[arg-type]
        length: int = run.reverse(x)  # type: ignore[assignment]
    costs.to_dict()["tiers"][length]  # type: ignore[index]


def of_executors() -> None:
    """Keep states as those of another chain."""
    Executor(FunctionChain(step, adjoint_step), (), states=StatesOfText())  # type: ignore[arg-type]
