"""Chains in ordinary training loops: what review by other eyes found, each compared with plain."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multistage.torch as mst
from multistage.model.stages import Stage, StageCosts
from multistage.torch.chains.runner import Run
from multistage.torch.tensors.meter import Meter


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(5)
    )
    return nn.Sequential(*blocks)


@pytest.mark.parametrize("memory", [0.6, None], ids=["recomputed", "kept"])
@pytest.mark.parametrize("compiled", [False, True])
def test_forward_on_several_shapes_before_one_backward(
    compiled: bool, memory: float | None
) -> None:
    """Planning for the second shape leaves the graph of the first as it was."""
    crops = [torch.randn(4, 4, size, size) for size in (16, 12)]
    plain = convolutions()
    model = deepcopy(plain)
    front: Any = mst.compile if compiled else mst.Sequential
    chain = front(model, memory=memory)
    for call in (plain, chain):
        sum(call(x).square().mean() for x in crops).backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)
    for a, b in zip(plain.buffers(), model.buffers(), strict=True):
        assert torch.equal(a, b)


class Poisoned(nn.Module):
    """Writes NaN over a zero, too."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x + self.mean.clone())
        self.mean.fill_(float("nan"))
        return y


def test_buffers_get_their_bits_and_versions_back() -> None:
    stage = Poisoned()
    version = stage.mean._version
    mst.profile([stage, nn.Tanh()], torch.randn(3, 4), seconds=0.0)
    assert stage.mean._version == version
    assert torch.equal(stage.mean, torch.zeros(4))


WIDTH = 64


class Auxiliary(nn.Module):
    """Leaves a loss of its own in an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.loss: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x))
        self.loss = y.square().mean()
        return y


def sequential(stages: list[nn.Module], count: int) -> tuple[mst.Sequential, Tensor]:
    """Return a chain some of whose stages run again, and an input."""
    x = torch.randn(8, WIDTH)
    costs = StageCosts(tuple(Stage(str(i), 1.0, 1.0, 40, 100, 40) for i in range(count)), 1, 1)
    chain = mst.Sequential(stages, x, costs=costs, memory=261)
    assert not chain.plan.keeps_all
    return chain, x


@pytest.mark.parametrize("with_backward", [True, False])
def test_losses_in_attributes_keep_no_earlier_run_alive(
    with_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[Run] = weakref.WeakSet()

    class Noted(Run):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            alive.add(self)

    stages = [Auxiliary() for _ in range(4)]
    chain, x = sequential([*stages], 4)
    monkeypatch.setattr("multistage.torch.planning.calls.Run", Noted)
    for _ in range(4):
        y = chain(x)
        if with_backward:
            y.sum().backward()
        del y
        assert len(alive) <= 1
    for stage in stages:
        stage.loss = None
    gc.collect()
    assert not alive


@pytest.mark.parametrize("calls", [1, 80])
def test_long_logs_of_hooks_grow_as_in_plain_training(calls: int) -> None:
    stages: list[nn.Module] = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)]
    log: list[int] = []
    for number, stage in enumerate(stages):
        stage.register_forward_hook(lambda *_, n=number: log.append(n))
    chain, x = sequential(stages, 4)
    log.clear()
    for _ in range(calls):
        chain(x).sum().backward()
    assert log == [0, 1, 2, 3] * calls
    log.clear()
    chain(x).sum().backward()
    assert log == [0, 1, 2, 3]


def test_long_deques_of_stages_move_as_in_plain_training() -> None:
    class Recent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.recent: deque[int] = deque(range(100), maxlen=100)

        def forward(self, x: Tensor) -> Tensor:
            self.recent.append(self.recent[-1] + 1)
            return torch.tanh(self.linear(x))

    stages = [Recent() for _ in range(4)]
    chain, x = sequential([*stages], 4)
    for _ in range(3):
        chain(x).sum().backward()
    assert [stage.recent[-1] for stage in stages] == [102] * 4


def test_another_plan_for_parameters_of_another_dtype() -> None:
    """Numbers of words have one dtype, whatever the model's."""
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6)]
    model = nn.Sequential(nn.Embedding(10, WIDTH), *blocks)
    words = torch.randint(0, 10, (16, 4))
    chain = mst.Sequential(model, words, memory=0.7)
    limit = chain.plan.memory_bytes
    model.double()
    chain(words).sum().backward()
    assert chain.plan.memory_bytes > 1.2 * limit


def test_profiling_holds_a_few_states_however_many_stages() -> None:
    """A pack hook that returned an output itself made a cycle that nothing collects."""
    x = torch.randn(8, WIDTH)
    peaks = []
    for count in (4, 12):
        stages = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(count)]
        with Meter(torch.device("cpu")) as meter:
            meter.ignore([x, *(p for stage in stages for p in stage.parameters())])
            mst.profile(stages, x, seconds=0.0)
        peaks.append(meter.peak_bytes)
        assert meter.live_bytes() == 0
    assert peaks[0] == peaks[1]
