"""Profiling leaves no trace, costs little, and holds for what it was made with."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from modulefuzz.ingredients import D, Force
from torch import Tensor, nn

import multistage.torch as mst
from multistage.errors import ArgumentError
from multistage.torch.measurement import measure
from multistage.torch.measurement.clocks import seconds_between
from multistage.torch.tensors.meter import Meter

CPU = torch.device("cpu")
pytestmark = pytest.mark.real_clock


class Position(nn.Module):
    """A parameter of the root module, used by a part of a traced graph."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.ones(8))
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.position
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def test_gradients_are_left_as_they_were() -> None:
    x = torch.randn(4, 8)
    block, free = nn.Linear(8, 8), torch.randn(8, requires_grad=True)
    block.weight.grad = before = torch.ones(8, 8)
    mst.Sequential([lambda x: block(x), lambda x: x * free, nn.Tanh()], x)
    assert block.weight.grad is before and torch.equal(before, torch.ones(8, 8))
    assert block.bias.grad is None and free.grad is None
    model = Position()
    mst.compile(model, memory=1.0)(x)
    assert all(p.grad is None for p in model.parameters())


def test_closures_are_measured_with_their_parameters() -> None:
    x = torch.randn(64, 8)
    block = nn.Linear(8, 512)
    [as_module] = mst.profile([block], x, seconds=0.01).stages
    [as_closure] = mst.profile([lambda x: block(x)], x, seconds=0.01).stages
    assert as_closure.backward_overhead_bytes == as_module.backward_overhead_bytes > 0


def test_sparse_outputs_that_require_gradients_are_refused() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    with pytest.raises(ArgumentError, match=r"stage .* returns a tensor of layout torch.sparse_"):
        mst.profile([nn.Linear(8, 8), lambda y: y.relu().to_sparse()], x, seconds=0.01)


def test_backward_hooks_do_not_fire() -> None:
    fired: list[str] = []

    def note(*_: Any) -> None:
        fired.append("module")

    class Hooking(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            if y.requires_grad:
                y.register_hook(lambda gradient: fired.append("tensor"))
            return y.tanh()

    x = torch.randn(4, 8, requires_grad=True)
    layers = [nn.Linear(8, 8), Hooking(), nn.Linear(8, 8)]
    layers[0].register_full_backward_hook(note)
    layers[2].register_full_backward_pre_hook(note)
    layers[2].weight.register_hook(note)
    layers[2].weight.register_post_accumulate_grad_hook(note)
    everywhere = nn.modules.module.register_module_full_backward_hook(note)
    try:
        mst.Sequential(layers, x, check="off")
        assert not fired
        model = mst.Sequential(layers, x)
        # Those that forward sets may change what is compared.
        assert set(fired) == {"tensor"}
        fired.clear()
        model(x).sum().backward()
        assert fired.count("tensor") == 1 and fired.count("module") >= 4
    finally:
        everywhere.remove()


def test_stages_run_few_times() -> None:
    runs = [0]

    class Counted(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            runs.append(0)
            return super().forward(x)

    x = torch.randn(4, 8)
    mst.profile([Counted(8, 8) for _ in range(10)], x, seconds=0.0)
    # Twice to look, twice to count, twice to time; the first of the same operations twice more.
    assert len(runs) - 1 <= 10 * 6 + 2 * 2


def test_preparing_imports_no_compiler() -> None:
    code = """if True:
        import sys, torch, multistage.torch as mst
        x = torch.ones(2, 4)
        layers = [torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()) for _ in range(4)]
        mst.profile(layers, x, seconds=0.0)
        chain = mst.Sequential(layers, memory=0.95)
        chain(x).sum().backward()
        assert not chain.plan.keeps_all and chain.checked.outcome == "equal"
        cell = torch.nn.GRUCell(4, 4)
        out = mst.unroll(cell, x, torch.ones(40, 2, 4), memory=0.5, outputs="last")
        out.outputs.sum().backward()
        assert out.plan.planner == "recompute" and out.plan.checked.outcome == "equal"
        assert "torch._dynamo" not in sys.modules and "sympy" not in sys.modules
        """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_meter_forgets_what_was_freed() -> None:
    x = torch.ones(1000, requires_grad=True)
    with Meter(CPU) as meter:
        y = x.exp()  # saved by the graph, and alive with it alone
        z = y * 2
        del y
        assert meter.live_bytes() == 8000
        z.backward(torch.ones(1000))
        assert meter.live_bytes() == 8000  # z and the gradient
        views = [z[1:], z.view(10, 100)]
        del z
        assert meter.live_bytes() == 8000
        del views
        assert meter.live_bytes() == 4000
    assert meter.peak_bytes >= 12000


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize(("layout", "held"), [(torch.sparse_coo, 2000), (torch.sparse_csr, 2808)])
def test_the_meter_counts_parts_of_sparse_tensors(layout: torch.layout, held: int) -> None:
    dense = torch.eye(100)
    with Meter(CPU) as meter:
        sparse = dense.to_sparse(layout=layout)
        assert meter.live_bytes() == held  # indices of 8 bytes, of both axes at first, values of 4
        del sparse
        assert meter.live_bytes() == 0


def test_stages_that_differentiate_keep_to_the_limit() -> None:
    layers = [f() for _ in range(6) for f in (Force, nn.Tanh)]
    x = torch.randn(64, D)
    model = mst.Sequential(layers, x, memory=0.6)
    assert model.plan.memory_bytes is not None
    model(x).sum().backward()
    parameters = list(model.parameters())
    with Meter(CPU) as meter:
        meter.ignore([*parameters, *(p.grad for p in parameters if p.grad is not None)])
        model(x).sum().backward()
    assert meter.peak_bytes + x.nbytes <= model.plan.memory_bytes


def test_gradients_by_torch_func_need_their_tape() -> None:
    class ByFunc(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            energy = super().forward
            return x + torch.func.grad(lambda z: energy(z).tanh().sum())(x)

    layers = [ByFunc(32, 32) for _ in range(6)]
    x = torch.randn(64, 32)
    mst.Sequential(layers, x)(x).sum().backward()
    with pytest.raises(ArgumentError, match=r"stage \d ByFunc computes gradients by torch.func"):
        mst.Sequential(layers, x, memory=0.6)


def test_time_of_other_programs_is_not_counted() -> None:
    threads = torch.get_num_threads()
    began, ended = (10.0, 1.0, 7), (13.0, 1.5, 7)
    try:
        torch.set_num_threads(1)
        assert seconds_between(began, ended) == 3.0  # it waited of its own accord
        assert seconds_between(began, (13.0, 1.5, 8)) == 0.5
        torch.set_num_threads(2)
        assert seconds_between(began, (13.0, 1.5, 8)) == 3.0
    finally:
        torch.set_num_threads(threads)


def test_what_surrounds_a_run_again_is_timed_with_empty_caches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emptied: list[torch.device] = []
    monkeypatch.setattr(measure, "empty_caches", emptied.append)
    measure.measure_stages([nn.Linear(4, 4), nn.Tanh()], ["0", "1"], torch.randn(2, 4))
    assert set(emptied) == {torch.device("cpu")}
    assert len(emptied) % 4 == 0  # twice, as it first runs and as it runs again
