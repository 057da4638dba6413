"""Threads that train chains at the same time do not disturb one another."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multistage.torch as mst
from multistage.errors import StateError
from multistage.torch.environment.turns import Turn
from multistage.torch.measurement.checking import _taker
from multistage.torch.measurement.exploring import without_hooks
from multistage.torch.sequences.hooks import hooks_on
from multistage.torch.tensors.meter import Meter


def _together(*works: Callable[[], None]) -> None:
    """Run some work in threads that begin together; raise what one of them raises."""
    barrier = threading.Barrier(len(works))
    errors: list[BaseException] = []

    def run(work: Callable[[], None]) -> None:
        barrier.wait()
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error


class Masked(nn.Module):
    """Keeps the mask it draws when it first runs: its gradient is known."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(x * self.scale, 0.5) * x


def test_two_models_with_dropout() -> None:
    x = torch.rand(16, 32) + 0.5
    models = [mst.Sequential([Masked() for _ in range(6)], x, memory=0.8) for _ in range(2)]
    assert all(m.plan is not None and not m.plan.keeps_all for m in models)

    def work(model: mst.Sequential) -> Callable[[], None]:
        def train() -> None:
            for _ in range(10):
                y = model(x)
                # The same graph, whose stages are run again each time, with the same masks.
                gradients = []
                for _ in range(2):
                    model.zero_grad()
                    y.sum().backward(retain_graph=True)
                    gradients.append([p.grad for p in model.parameters()])
                assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))
                last = list(model.parameters())[-1].grad
                assert torch.equal(last, y.detach().sum(0))

        return train

    def prepare() -> None:
        for _ in range(2):
            mst.Sequential([Masked() for _ in range(6)], x, memory=0.8)

    _together(*(work(model) for model in models), prepare)


def test_one_model_with_batch_norm() -> None:
    layers = [nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)) for _ in range(6)]
    x = torch.randn(16, 32)
    model = mst.Sequential(layers, x, memory=0.8)
    assert not model.plan.keeps_all

    def train() -> None:
        for _ in range(10):
            model(x).sum().backward()

    _together(train, train)
    assert [int(layer[1].num_batches_tracked) for layer in layers] == [20] * 6


class Cell(nn.Module):
    def __init__(self, drop: float) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(16, 16), drop

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = nn.functional.dropout(torch.tanh(self.linear(h) + x), self.drop)
        return h, h.square().sum()


UNROLLS: list[dict[str, Any]] = [
    {"planner": "recompute", "chunk": 4},
    {"planner": "recompute", "chunk": 4, "unequal": True},
]


@pytest.mark.parametrize("how", UNROLLS, ids=str)
def test_two_cells_with_dropout(how: dict[str, Any]) -> None:
    """Replays put back generators from which the other thread was drawing."""
    x = torch.randn(24, 4, 16)

    def work(cell: Cell) -> Callable[[], None]:
        def train() -> None:
            for _ in range(5):
                loss = mst.unroll(cell, torch.zeros(4, 16), x, **how).loss
                loss.backward()

        return train

    _together(*(work(Cell(0.3)) for _ in range(2)))


def test_one_cell_in_two_threads() -> None:
    cell, x = Cell(0.0), torch.randn(24, 4, 16)

    def train() -> None:
        loss = mst.unroll(cell, torch.zeros(4, 16), x, **UNROLLS[0]).loss
        loss.backward()

    train()
    once = [p.grad.clone() for p in cell.parameters() if p.grad is not None]
    cell.zero_grad()
    _together(train, train, train)
    for parameter, gradient in zip(cell.parameters(), once, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, 3 * gradient)


@pytest.mark.parametrize("unequal", [None, True])
def test_gradients_that_another_thread_adds_while_a_cell_is_looked_at(unequal: bool | None) -> None:
    """They went with the `.grad` that was put aside."""
    first = iter([True])
    net = nn.Module()
    net.weight = nn.Parameter(torch.ones(3))

    def add() -> None:
        (2 * net.weight).sum().backward()

    def cell(h: Tensor, x: Tensor | None) -> Tensor:
        if next(first, False):
            _together(add)
        return torch.tanh(h * net.weight)

    mst.unroll(cell, torch.ones(3), None, n_steps=6, planner="keep", unequal=unequal)
    assert isinstance(net.weight.grad, Tensor) and net.weight.grad.tolist() == [2, 2, 2]


def test_a_turn_that_is_never_free_raises_an_error() -> None:
    turn, held, done = Turn(patience_s=0.05), threading.Event(), threading.Event()

    def hold() -> None:
        with turn.taken(), turn.taken():
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        with pytest.raises(StateError, match="run the chain in one thread"), turn.taken():
            pass
    finally:
        done.set()
        thread.join()
    with turn.taken():
        pass


@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_compiler_is_at_work_after_threads_that_counted_at_a_time() -> None:
    torch.compile(torch.sin, backend="eager")(torch.ones(3))  # imports the compiler
    inside, go_on = threading.Event(), threading.Event()

    def count() -> None:
        with Meter(torch.device("cpu")):
            inside.set()
            go_on.wait(60)

    thread = threading.Thread(target=count)
    with Meter(torch.device("cpu")):
        thread.start()
        assert inside.wait(60)
    go_on.set()
    thread.join()
    runs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        runs.append(1)
        return graph.forward

    torch.compile(lambda x: x.sin(), backend=backend)(torch.ones(3))
    assert runs


def test_hooks_of_a_check_in_another_thread_are_neither_the_cells_nor_kept() -> None:
    parameter = nn.Parameter(torch.ones(3))
    parameter.register_hook(lambda _: None)
    handle = parameter.register_hook(_taker({}, "", id, set()))
    assert hooks_on([parameter]) == [1]
    with without_hooks([parameter], []):
        assert len(parameter._backward_hooks or ()) == 2
        assert hooks_on([parameter]) == [1]
        handle.remove()
    assert len(parameter._backward_hooks or ()) == 1
