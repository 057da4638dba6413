"""Modules that TorchDynamo gives one graph, each in a thread of its own."""

from __future__ import annotations

import copy
import sys
import threading

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import multistage.torch as mst


@pytest.mark.parametrize("memory", [0.75, 1.0])
def test_threads_that_share_a_graph(memory: float) -> None:
    torch.manual_seed(0)
    blocks = (each for _ in range(6) for each in (nn.Linear(32, 32), nn.Tanh()))
    first = nn.Sequential(*blocks)
    models = [copy.deepcopy(first) for _ in range(3)]
    for model in models:
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
    plain = copy.deepcopy(models)
    run = mst.compile(lambda model, x: model(x), memory=memory)
    for model in models:  # captured, planned
        run(model, torch.ones(64, 32)).sum().backward()
        model.zero_grad()
    differ: list[str] = []

    def train(number: int) -> None:
        mine, other = models[number], plain[number]
        for k in range(20):
            x = torch.randn(64, 32, generator=torch.Generator().manual_seed(10 * k + number))
            mine.zero_grad()
            other.zero_grad()
            found, expected = run(mine, x), other(x)
            found.square().mean().backward()
            expected.square().mean().backward()
            pairs = zip(mine.parameters(), other.parameters(), strict=True)
            if not torch.equal(found, expected):
                differ.append("output")
            if any(p.grad is None or not torch.equal(p.grad, q.grad) for p, q in pairs):
                differ.append("gradient")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=train, args=(k,)) for k in range(len(models))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert differ == []


def test_a_mode_in_another_thread() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    compiled = mst.compile(model, memory=1.0)
    x = torch.ones(64, 32)
    compiled(x).sum().backward()
    entered, left = threading.Event(), threading.Event()

    def count() -> None:
        with FlopCounterMode(display=False):
            entered.set()
            left.wait()

    thread = threading.Thread(target=count)
    thread.start()
    entered.wait()
    try:
        assert torch.equal(compiled(x), model(x))
    finally:
        left.set()
        thread.join()
