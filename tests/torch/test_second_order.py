"""Hessian-vector products of a sequence: `torch.func.jvp` in the cell, `unroll` around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import multistage.torch as mst
from multistage import testing

# PyTorch's own, where it first differentiates forward.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
STEPS, BATCH, WIDTH = 30, 2, 5


class Cell(nn.Module):
    """An LSTM with a loss at every step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(3, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, state: Any, x: Any) -> Any:
        h, c = self.lstm(x, state)
        return (h, c), (self.head(h) - x.roll(1, -1)).square().mean()


class Tangent(nn.Module):
    """A cell beside its derivative in a direction of its parameters."""

    def __init__(self, cell: nn.Module, direction: dict[str, Any]) -> None:
        super().__init__()
        self.cell = cell
        self.direction = nn.ParameterDict({k.replace(".", "/"): v for k, v in direction.items()})

    def forward(self, pair: Any, x: Any) -> Any:
        state, tangent = pair
        weights = dict(self.cell.named_parameters())
        direction = {name: self.direction[name.replace(".", "/")] for name in weights}

        def step(weights: Any, state: Any) -> Any:
            return torch.func.functional_call(self.cell, weights, (state, x))

        (state, _), (tangent, slope) = torch.func.jvp(step, (weights, state), (direction, tangent))
        return (state, tangent), slope


@pytest.fixture
def cell() -> Cell:
    torch.manual_seed(0)
    return Cell().double()


def inputs() -> Any:
    return torch.randn(STEPS, BATCH, 3, generator=torch.Generator().manual_seed(1)).double()


def zeros() -> Any:
    return torch.zeros(BATCH, WIDTH).double(), torch.zeros(BATCH, WIDTH).double()


def products(made: Tangent, direction: dict[str, Any], total: Any) -> tuple[Any, Any]:
    """Return the gradient, and the Hessian's product with a direction, of what is summed."""
    with torch.no_grad():
        for name, value in direction.items():
            made.direction[name.replace(".", "/")].copy_(value)
    made.zero_grad()
    total().backward()
    gradient = {k: made.direction[k.replace(".", "/")].grad.clone() for k in direction}
    return gradient, {k: v.grad.clone() for k, v in made.cell.named_parameters()}


def summed(made: Any, state: Any) -> Any:
    """Return the sum over a plain loop."""
    total = torch.zeros(()).double()
    for x in inputs():
        state, one = made(state, x)
        total = total + one
    return total


def random_direction(cell: Cell, seed: int) -> dict[str, Any]:
    made = torch.Generator().manual_seed(seed)
    return {k: torch.randn(v.shape, generator=made).double() for k, v in cell.named_parameters()}


def dot(one: dict[str, Any], other: dict[str, Any]) -> float:
    return float(sum((one[k] * other[k]).sum() for k in one))


@pytest.mark.parametrize(
    "options",
    [
        {"memory": "1 GiB", "planner": "keep"},
        {"memory": "40 KiB", "planner": "recompute"},
        {"memory": "60 KiB", "planner": "stream", "tiers": "memory:?buffers=4KiB"},
    ],
    ids=["keep", "recompute", "stream"],
)
def test_jvp_in_the_cell(cell: Cell, options: dict[str, Any]) -> None:
    direction = random_direction(cell, 2)
    made, start = Tangent(cell, direction), (zeros(), zeros())

    def through_time() -> Any:
        out = mst.unroll(made, start, inputs(), **options)
        assert out.plan.planner == options["planner"]
        return out.loss

    gradient, product = products(made, direction, through_time)
    plain = products(made, direction, lambda: summed(made, start))
    for one, other in zip((gradient, product), plain, strict=True):
        assert all(torch.equal(one[k], other[k]) for k in direction)

    def functional(weights: Any) -> Any:
        return summed(lambda *given: torch.func.functional_call(cell, weights, given), zeros())

    weights = {k: v.detach() for k, v in cell.named_parameters()}
    test = testing.taylor(functional, weights, gradient, direction, hessian=product, size=0.02)
    assert test.order > 2.95, test
    u, v = random_direction(cell, 3), random_direction(cell, 4)
    left = dot(u, products(made, v, through_time)[1])
    right = dot(v, products(made, u, through_time)[1])
    assert abs(left - right) < 1e-10 * abs(left)


def test_double_backward_of_a_kept_sequence(cell: Cell) -> None:
    direction = random_direction(cell, 2)
    out = mst.unroll(cell, zeros(), inputs(), planner="keep")
    weights = list(cell.parameters())
    first = torch.autograd.grad(out.loss, weights, create_graph=True)
    slope = sum((g * d).sum() for g, d in zip(first, direction.values(), strict=True))
    second = torch.autograd.grad(slope, weights)
    made = Tangent(cell, direction)
    gradient, product = products(made, direction, lambda: summed(made, (zeros(), zeros())))
    for one, other, name in zip(first, second, direction, strict=True):
        torch.testing.assert_close(one, gradient[name], rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(other, product[name], rtol=1e-9, atol=1e-12)
