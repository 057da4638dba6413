"""Chains in ordinary training loops: what review by other eyes found, each compared with plain."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multistage.torch as mst
from multistage.torch.exploring import untouched
from multistage.torch.scope import Scope
from multistage.torch.snapshots import Snapshot


def convolutions() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(5)
    )
    return nn.Sequential(*blocks)


@pytest.mark.parametrize("memory", [0.6, None], ids=["recomputed", "kept"])
@pytest.mark.parametrize("traced", [False, True])
def test_forward_on_several_shapes_before_one_backward(traced: bool, memory: float | None) -> None:
    """Planning for the second shape leaves the graph of the first as it was."""
    crops = [torch.randn(4, 4, size, size) for size in (16, 12)]
    plain = convolutions()
    model = deepcopy(plain)
    chain = mst.Sequential(mst.to_chain(model, crops[0]) if traced else model, memory=memory)
    for call in (plain, chain):
        sum(call(x).square().mean() for x in crops).backward()  # type: ignore[union-attr]
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
    for a, b in zip(plain.buffers(), model.buffers(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_buffers_get_their_versions_back(with_snapshot: bool) -> None:
    norm = nn.BatchNorm1d(4)
    x = torch.randn(3, 4)
    versions = [b._version for b in norm.buffers()]
    if with_snapshot:
        snapshot = Snapshot.capture([norm], [], Scope.of(norm))
        norm(x)
        snapshot.restore()
    else:
        with untouched([norm], x):
            norm(x)
    assert [b._version for b in norm.buffers()] == versions
    assert torch.equal(norm.running_mean, torch.zeros(4))  # type: ignore[arg-type]


class Poisoned(nn.Module):
    """Writes NaN over a zero."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Any:
        self.count.fill_(float("nan"))  # type: ignore[operator, union-attr]
        return x


def test_nan_is_not_zero_when_buffers_are_put_back() -> None:
    stage = Poisoned()
    with untouched([stage], torch.ones(1)):
        stage(torch.ones(1))
    assert torch.equal(stage.count, torch.zeros(1))  # type: ignore[arg-type]
