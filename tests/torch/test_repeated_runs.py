"""Repeated runs of stages: exact, or refused, whatever was done between forward and backward."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multistage.torch as mst
from multistage.errors import StateError


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


# ------------------------------------------------- written to without a new version


def _with_numpy(tensor: Tensor) -> None:
    tensor.detach().numpy()[...] += 0.1


def _with_data(tensor: Tensor) -> None:
    tensor.data.add_(0.1)


def _rerunning() -> tuple[mst.Sequential, Tensor]:
    """Return a chain that runs its first stages again, and an input."""
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    model = mst.Sequential([Block() for _ in range(10)], memory=0.5, planner="periodic")
    model(x).sum().backward()
    assert model.plan is not None and not model.plan.keeps_all
    return model, x


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_a_fused_step_between_forward_and_backward_is_refused(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    model, x = _rerunning()
    y = model(x)
    optimizer(model.parameters(), lr=0.1, fused=True).step()
    with pytest.raises(StateError, match=r"parameter '.*' of stage .* fused optimizer's step"):
        y.sum().backward()
    model(x).sum().backward()  # with the new parameters


@pytest.mark.parametrize("write", [_with_numpy, _with_data])
def test_parameters_and_inputs_written_to_without_a_version_are_refused(
    write: Callable[[Tensor], None],
) -> None:
    model, x = _rerunning()
    y = model(x)
    for parameter in model.parameters():
        write(parameter)
    with pytest.raises(StateError, match="holds other numbers than in the forward pass"):
        y.sum().backward()
    y = model(x)
    write(x)
    with pytest.raises(StateError, match="a state that a stage is to be run again from"):
        y.sum().backward()


def test_the_same_numbers_written_anew_change_nothing() -> None:
    model, x = _rerunning()
    model.zero_grad()
    model(x).sum().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    y = model(x)
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.clone())
    y.sum().backward()
    ours = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_other_memory_under_torch_distributed_is_refused() -> None:
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, x = _rerunning()
        y = model(x)
        for parameter in model.parameters():
            parameter.data = parameter.data + 0.1
        with pytest.raises(StateError, match="holds other numbers than in the forward pass"):
            y.sum().backward()
    finally:
        dist.destroy_process_group()
