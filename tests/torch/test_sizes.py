"""Limits hold where more than shapes decides what a chain saves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multistage.torch as mst
from multistage.errors import BudgetError
from multistage.torch.tensors.meter import Meter


def _peak(model: Callable[[Any], Any], given: Any, held: list[Tensor]) -> int:
    """Return the peak of a step, from the chain's input to its output, as limits count it."""
    with Meter(torch.device("cpu")) as meter:
        meter.ignore(held)
        meter.ignore(p.grad for p in held if p.grad is not None)
        output = model(given)
        while isinstance(output, tuple):
            output = output[0]
        output.sum().backward()
    x: Tensor = given[0] if isinstance(given, tuple) else given
    return meter.peak_bytes + x.nbytes


class Widening(nn.Module):
    """A stage whose size a number in the state decides."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, state: tuple[Tensor, int]) -> tuple[Tensor, int]:
        x, k = state
        wide = torch.tanh(torch.sigmoid(x.repeat(k, 1)))
        return self.linear(wide.view(k, *x.shape).mean(0)), k


def _prepared(model: nn.Sequential, given: Any, memory: Any) -> mst.Sequential:
    chain = mst.Sequential(model, given, memory=memory)
    for parameter in chain.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return chain


@pytest.mark.parametrize("memory", [0.7, 1.0])
def test_a_number_in_the_state_that_decides_sizes_is_planned_for(memory: float) -> None:
    x = torch.randn(16, 32)
    chain = _prepared(nn.Sequential(*[Widening() for _ in range(6)]), (x, 1), memory)
    small = chain.plan.memory_bytes
    held = [*chain.parameters(), x]
    _peak(chain, (x, 50), held)  # plans again, which is not counted
    peak = _peak(chain, (x, 50), held)
    assert small is not None and chain.plan.memory_bytes is not None
    assert small < peak <= chain.plan.memory_bytes
    plan = chain.plan  # which serves smaller numbers too
    assert plan.memory_bytes is not None
    assert _peak(chain, (x, 3), held) <= plan.memory_bytes
    assert chain.plan is plan


def test_larger_sizes_that_no_plan_holds_are_refused() -> None:
    x = torch.randn(16, 32)
    chain = _prepared(nn.Sequential(*[Widening() for _ in range(3)]), (x, 1), 100_000)
    with pytest.raises(BudgetError, match=r"stage \d Widening (saves|returns) .* and the plan"):
        chain((x, 50))
    output, _ = chain((x, 1))  # a failed call changes nothing
    output.sum().backward()


class Counted(nn.Module):
    """A stage that counts its calls, and draws; larger from the third call on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.calls = nn.Buffer(torch.zeros(()))
        self.times = 1

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        wide = torch.tanh(torch.sigmoid(x.repeat(self.times, 1)))
        wide = nn.functional.dropout(wide, 0.5)
        made: Tensor = self.linear(wide.view(self.times, *x.shape).mean(0))
        return made


@pytest.mark.parametrize("memory", [0.7, 1.0])
def test_an_attribute_that_decides_sizes_is_planned_for_and_nothing_is_counted_twice(
    memory: float,
) -> None:
    x = torch.randn(16, 32)
    plain = nn.Sequential(*[Counted() for _ in range(5)])
    model = nn.Sequential(*[Counted() for _ in range(5)])
    model.load_state_dict(plain.state_dict())
    chain = _prepared(model, x, memory)
    for times in (1, 20):
        outputs: list[Tensor] = []
        for stage in (*plain, *model):
            assert isinstance(stage, Counted)
            stage.times = times
        for each in (plain, chain):
            torch.manual_seed(0)
            outputs.append(each(x))
            outputs.append(torch.rand(1))
        assert torch.equal(outputs[0], outputs[2]) and torch.equal(outputs[1], outputs[3])
    held = [*chain.parameters(), *chain.buffers(), x]
    assert chain.plan.memory_bytes is not None
    assert _peak(chain, x, held) <= chain.plan.memory_bytes
    plain(x)
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), chain.buffers(), strict=True))


class Chosen(nn.Module):
    """A stage that saves as much as the values of its input decide."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        chosen = x[x[:, 0] > 0]
        made: Tensor = self.linear(x) + torch.tanh(torch.sigmoid(torch.exp(chosen))).sum()
        return made

    def give(self, bias: float) -> None:
        with torch.no_grad():
            self.linear.weight.zero_()
            self.linear.bias.fill_(bias)


@pytest.mark.parametrize("memory", [0.8, 1.0])
def test_values_of_tensors_that_decide_sizes_are_planned_for(memory: float) -> None:
    few = -torch.rand(64, 32)
    stages = [Chosen() for _ in range(4)]
    chain = _prepared(nn.Sequential(*stages), few, memory)
    for stage in stages:
        stage.give(-1.0)
    chain(few).sum().backward()
    small = chain.plan.memory_bytes
    many = torch.rand(64, 32)
    for stage in stages:
        stage.give(1.0)
    held = [*chain.parameters(), many]
    _peak(chain, many, held)  # plans again, which is not counted
    peak = _peak(chain, many, held)
    assert small is not None and chain.plan.memory_bytes is not None
    assert small < chain.plan.memory_bytes
    assert peak <= chain.plan.memory_bytes


class Skipped(nn.Module):
    """A block that a coin skips, as in layer drop."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Sigmoid())

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x if random.random() < 0.5 else self.inner(x)
        return torch.tanh(y)


def test_sizes_that_a_coin_decides_are_planned_for_as_they_come() -> None:
    random.seed(2)
    x = torch.randn(64, 32)
    model = nn.Sequential(*[Skipped() for _ in range(4)])
    chain = _prepared(model, x, 150_000)
    first = chain.plan
    held = [*chain.parameters(), x]
    for step in range(4):
        for _ in range(2):  # the first may plan again, which is not counted
            random.seed(step)
            peak = _peak(chain, x, held)
        assert chain.plan.memory_bytes is not None
        assert peak <= chain.plan.memory_bytes
        gradients = [p.grad for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for _ in range(2):
            random.seed(step)
            model(x).sum().backward()
        for parameter, ours in zip(model.parameters(), gradients, strict=True):
            assert parameter.grad is not None and ours is not None
            if step == 0:
                assert torch.equal(parameter.grad, ours)
            parameter.grad = ours
    assert chain.plan is not first


class _Hiding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.y = torch.exp(x)
        return ctx.y + 1

    @staticmethod
    def backward(ctx: Any, *adjoints: Tensor) -> Tensor:
        return adjoints[0] * ctx.y


class Hiding(nn.Module):
    """A stage that keeps a tensor where no hook sees it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _Hiding.apply(x.tanh().sigmoid().tanh())
        return self.linear(y).tanh()


class Unrolled(nn.Module):
    """A stage that runs a recurrence within memory of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        result = mst.unroll(self.cell, torch.zeros_like(x), [x] * 6, memory="200 KiB")
        return torch.tanh(result.state)


@pytest.mark.parametrize(("kind", "memory"), [(Hiding, 0.8), (Unrolled, 1.0)])
def test_tensors_no_hook_sees_are_planned_for(kind: type[nn.Module], memory: float) -> None:
    x = torch.randn(64, 32)
    chain = _prepared(nn.Sequential(*[kind() for _ in range(4)]), x, memory)
    assert chain.plan.memory_bytes is not None
    # What a sequence holds until its backward stays, however often the stage runs.
    assert chain.plan.keeps_all == (memory == 1.0)
    held = [*chain.parameters(), x]
    _peak(chain, x, held)
    assert _peak(chain, x, held) <= chain.plan.memory_bytes


def test_preparing_stays_within_the_limit() -> None:
    x = torch.randn(512, 32)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(12)])
    with Meter(torch.device("cpu")) as meter:
        meter.ignore([x, *model.parameters()])
        chain = mst.Sequential(model, x, memory=0.6)
    assert chain.plan.memory_bytes is not None
    assert meter.peak_bytes + x.nbytes <= chain.plan.memory_bytes
