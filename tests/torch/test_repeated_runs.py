"""Repeated runs of stages: exact, or refused, whatever was done between forward and backward."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multistage.torch as mst


class Block(nn.Module):
    """A linear layer between two functions; `before` it may do something to its input."""

    def __init__(self, before: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.linear, self.before = nn.Linear(16, 16), before

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x if self.before is None else self.before(x))).sin()


def seeds(x: Tensor) -> Tensor:
    torch.manual_seed(5)
    return x


def forks(x: Tensor) -> Tensor:
    with torch.random.fork_rng([]):
        return x + 0.1 * torch.randn_like(x)


def puts_back_torch(x: Tensor) -> Tensor:
    state = torch.get_rng_state()
    y = torch.sin(x + 0.1 * torch.randn_like(x))
    torch.set_rng_state(state)
    return y


def puts_back_python(x: Tensor) -> Tensor:
    state = random.getstate()
    y = x * (1 + random.random())
    random.setstate(state)
    return y


def puts_back_numpy(x: Tensor) -> Tensor:
    state = np.random.get_state()
    y = x * (1 + float(np.random.rand()))
    np.random.set_state(state)
    return y


def train_with_draws(
    before: Callable[[Tensor], Tensor], seed: int, wrap: Callable[[nn.Module], nn.Module]
) -> list[Tensor]:
    """Return gradients of some iterations, and numbers drawn after each."""
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(before if k in (1, 2) else None) for k in range(8)])
    wrapped, x = wrap(model), torch.randn(64, 16)
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    found: list[Tensor] = []
    for iteration in range(3):
        if iteration == 2:
            torch.manual_seed(5)
        y = wrapped(x)
        torch.rand(3), random.random(), np.random.rand()
        y.sum().backward()
        found += [torch.rand(2), torch.tensor([random.random(), np.random.rand()])]
        found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
    return found


def limited(model: nn.Module) -> nn.Module:
    assert isinstance(model, nn.Sequential)
    return mst.Sequential(model, memory=0.7)


@pytest.mark.parametrize("seed", [0, 5])
@pytest.mark.parametrize(
    "before", [seeds, forks, puts_back_torch, puts_back_python, puts_back_numpy]
)
def test_a_stage_may_seed_generators_and_put_their_states_back(
    before: Callable[[Tensor], Tensor], seed: int
) -> None:
    plain = train_with_draws(before, seed, lambda model: model)
    ours = train_with_draws(before, seed, limited)
    assert len(plain) == len(ours)
    for a, b in zip(plain, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
