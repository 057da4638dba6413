"""A plan serves sequences whose graphs are as heavy as those it was measured for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import multistage.torch as mst
from multistage.errors import StateError
from multistage.torch.tensors.meter import Meter

WIDTH, LIMIT = 16, 300_000


class Deep(nn.Module):
    """Twenty layers, inside a checkpoint or not: the same nodes, but other tensors are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.small = nn.Linear(WIDTH, WIDTH), True

    def layers(self, h: Tensor) -> Tensor:
        for _ in range(20):
            h = torch.tanh(self.linear(h))
        return h

    def forward(self, h: Tensor, x: Tensor) -> Any:
        if self.small:
            return checkpoint(self.layers, h + x, use_reentrant=False)
        return self.layers(h + x)


@pytest.mark.long
@pytest.mark.parametrize("unequal", [False, True])
def test_a_plan_measured_with_a_checkpoint_is_not_taken_without_it(unequal: bool) -> None:
    cell, x = Deep(), torch.randn(60, 64, WIDTH)
    planned = []
    for small in (True, False, False):
        cell.small = small
        with Meter(torch.device("cpu")) as meter:
            meter.ignore([x, *cell.parameters()])
            out = mst.unroll(cell, torch.zeros(64, WIDTH), x, memory=LIMIT, unequal=unequal)
            meter.reset_peak()  # of the run, without the measuring
            out.state.sum().backward()
        assert out.plan is not None
        planned.append(out.plan.chunk)
        assert meter.peak_bytes <= LIMIT + 10_000, small  # gradients, which are not counted
    assert planned[0] > planned[1] == planned[2]


def test_a_cell_that_allows_no_hooks_on_saved_tensors_is_weighed_without() -> None:
    def cell(h: Tensor, x: Tensor) -> Tensor:
        return h * 0.9 + torch.func.grad(lambda v: (v * v).sum())(x)

    h, x = torch.ones(3, requires_grad=True), torch.randn(20, 3)
    out = mst.unroll(cell, h, x, planner="recompute", chunk=3)
    plain = h
    for each in x:
        plain = cell(plain, each)
    assert torch.equal(out.state, plain)
    assert torch.equal(*[torch.autograd.grad(s.sum(), h)[0] for s in (out.state, plain)])


def test_a_state_that_grows_late_is_refused_at_that_step() -> None:
    weight = torch.ones(WIDTH, requires_grad=True)

    def cell(state: tuple[Tensor, Tensor, Tensor], x: Tensor) -> Any:
        h, memory, t = state
        if int(t) >= 20:
            memory = torch.cat([memory, h.expand(50, -1, -1)])
        return torch.tanh(h * weight + x), memory, t + 1

    x = torch.randn(60, 64, WIDTH)
    start = x[0], torch.zeros(0, 64, WIDTH), torch.zeros((), dtype=torch.int64)
    with Meter(torch.device("cpu")) as meter:
        meter.ignore([x])
        with pytest.raises(StateError, match=r"at step 20 whose leaf 1 is \(50, 64, 16\)"):
            mst.unroll(cell, start, x, memory="500 KiB")
    assert meter.peak_bytes < 600_000  # of 20 steps too many: 5 000 000


@pytest.mark.parametrize("unequal", [False, True])
def test_nodes_of_a_long_graph_count_in_the_limit(unequal: bool) -> None:
    """The graph of 10^6 steps of numbers was said to take 0.42 GiB, and took some 19."""
    weight, x = torch.full((1,), 0.9, requires_grad=True), torch.randn(3000, 1)

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h * weight + x)

    def planned(steps: int, memory: str) -> Any:
        out = mst.unroll(cell, x[0], x[:steps], memory=memory, unequal=unequal)
        out.state.sum().backward()
        return out.plan

    long, short = planned(3000, "3 MiB"), planned(1000, "3 MiB")
    assert long.planner == "recompute" and long.peak_bytes <= 3 << 20
    # Measured: 2600 bytes a step.
    assert 3000 * 2400 < long.keep_bytes + (4 << 20) < 3000 * 3400
    assert short.planner == "keep" and short.keep_bytes < 1000 * 100
    assert planned(3000, "8 MiB").planner == "keep"
