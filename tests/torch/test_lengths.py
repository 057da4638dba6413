"""Inputs of many lengths are planned for without measuring each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import multistage.torch as mst
from multistage.model.stages import Stage
from multistage.torch.planning import calls, profiles
from multistage.torch.tensors.meter import Meter

WIDTH = 32


class Attends(nn.Module):
    """Saves what grows with the square of the length."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.a(x).chunk(3, -1)
        made: Tensor = x + self.b(torch.softmax(q @ k.transpose(-2, -1), -1) @ v)
        return made


class Dense(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x))


class Pads(Dense):
    """Works on blocks: what it saves grows in leaps that no line follows."""

    def forward(self, x: Tensor) -> Tensor:
        length = x.shape[1]
        block = 16 if length < 40 else 256
        padded = nn.functional.pad(x, (0, 0, 0, -length % block))
        return torch.tanh(torch.sigmoid(self.a(padded)))[:, :length]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the lengths that were measured so far, but for those that were estimated too low."""
    lengths: list[int] = []
    plain = calls.ChainCall._made

    def made(call: calls.ChainCall, together: bool) -> Any:
        lengths.append(cast(Tensor, call._state).shape[1])
        return plain(call, together)

    monkeypatch.setattr(calls.ChainCall, "_made", made)
    return lengths


def _train(kind: type[nn.Module], memory: Any, lengths: Sequence[int]) -> list[Tensor]:
    torch.manual_seed(0)
    stages = [kind() for _ in range(6)]
    model = nn.Sequential(*stages)
    if memory is not None:
        model = mst.Sequential(model, memory=memory)
    found = []
    for length in lengths:
        torch.manual_seed(length)
        model.zero_grad()
        y = model(torch.randn(4, length, WIDTH))
        y.square().sum().backward()
        found += [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    return found


@pytest.mark.long(but="random-Attends")
@pytest.mark.parametrize("kind", [Dense, Attends, Pads])
@pytest.mark.parametrize("order", ["random", "rising", "falling"])
def test_most_of_many_lengths_are_not_measured(
    kind: type[nn.Module], order: str, measured: list[int]
) -> None:
    lengths = list(range(20, 60))
    if order == "random":
        lengths = [lengths[k] for k in torch.randperm(40).tolist()]
    elif order == "falling":
        lengths.reverse()
    ours, plain = (_train(kind, memory, lengths) for memory in (0.8, None))
    assert all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))
    assert len(measured) <= 10


def test_lengths_between_stay_within_the_limit(measured: list[int]) -> None:
    torch.manual_seed(0)
    chain = mst.Sequential(nn.Sequential(*[Attends() for _ in range(8)]), memory=1_000_000)
    held = list(chain.parameters())
    for parameter in held:
        parameter.grad = torch.zeros_like(parameter)
    held += [p.grad for p in held if p.grad is not None]
    for length in (64, 96):
        chain(torch.randn(4, length, WIDTH)).sum().backward()
    for length in range(65, 96, 5):
        x = torch.randn(4, length, WIDTH)
        with Meter(torch.device("cpu")) as meter:
            meter.ignore([*held, x])
            chain(x).sum().backward()
        assert meter.peak_bytes + x.nbytes <= 1_000_000
        assert "between" in chain.checked.outcome
    assert measured == [64, 96]


def test_the_kinds_used_last_are_remembered(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls, "_KINDS", 8)
    lengths = list(range(20, 40))
    _train(Dense, 0.8, [*lengths, *lengths, *reversed(lengths)])
    assert len(measured) <= 10  # those that others are estimated from are in use


def test_lengths_beyond_those_measured_are_not_estimated_too_low(
    measured: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calls.ChainCall, "_for_larger", None)
    _train(Attends, 0.8, [40, 50, 51, 55, 58, 39, 35, 30])
    assert measured == [40, 50]


def test_an_estimate_of_a_stage_that_takes_no_time_has_no_overhead_either() -> None:
    one, other = (
        Stage("s", forward_s=s, backward_s=s, output_bytes=4, tape_bytes=4, overhead_s=2e-6)
        for s in (2e-6, 1e-6)
    )
    found = profiles._stage(one, other, profiles._At(2.0, 0.0))
    assert found.forward_s == found.overhead_s == 0.0
