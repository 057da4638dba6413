"""Stages of every kind that runs again: outputs, gradients and buffers of plain training."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import multistage.torch as mst


class Residual(nn.Module):
    """A linear layer between two functions; `before` may do something to its input."""

    def __init__(self, before: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.linear, self.before = nn.Linear(16, 16), before

    def forward(self, x: Tensor) -> Tensor:
        y = x if self.before is None else self.before(x)
        return x + torch.tanh(self.linear(y)).sin()


class Tree(nn.Linear):
    """Takes and returns a dict with a tensor, an integer tensor and a number."""

    def forward(self, state: Any) -> Any:
        x = torch.tanh(super().forward(state["x"])) * state["scale"]
        return {**state, "x": x + state["mask"]}


class Appending(nn.Linear):
    """Changes the list that it takes."""

    def forward(self, state: Any) -> Any:
        state.append(super().forward(state[-1]).tanh())
        return state


class OnGraph(nn.Linear):
    """Passes a sparse tensor on."""

    def forward(self, state: Any) -> Any:
        return super().forward(torch.sparse.mm(state[1], state[0])).tanh(), state[1]


class Force(nn.Module):
    """Uses the gradient of an energy, as interatomic potentials do."""

    def __init__(self, create_graph: bool) -> None:
        super().__init__()
        self.energy, self.mix = nn.Linear(16, 16), nn.Linear(16, 16)
        self.create_graph = create_graph

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = x if x.requires_grad and self.create_graph else x.detach().requires_grad_()
            energy = self.energy(z).tanh().square().sum()
            [force] = torch.autograd.grad(energy, z, create_graph=self.create_graph)
        return self.mix(x + force).tanh()  # type: ignore[no-any-return]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 64), nn.Dropout(0.1), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Any:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=True)


class Unrolls(nn.Module):
    """Runs a recurrence; other chunks of it are looked at each time."""

    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.cell, self.how = nn.GRUCell(16, 16), how

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = mst.unroll(self.cell, torch.zeros_like(x), [x] * 6, **self.how).state
        return made


class Forgiving(nn.Linear):
    """Catches what should end it early."""

    def forward(self, x: Tensor) -> Tensor:
        try:
            return super().forward(x).tanh()
        except Exception:
            return x * 0


class Recurrent(nn.Module):
    """An LSTM: another kernel where no gradient is required, with workspaces it does not fill."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        junk = [torch.full((size,), float(len(x))) for size in (1000, 5000, 20_000)]
        del junk
        return self.lstm(x.view(8, -1, 16))[0].view(-1, 16)


class Skips(nn.Linear):
    """Keeps its output for a later stage, which takes it."""

    def __init__(self, kept: dict[int, Tensor], number: int, puts: bool) -> None:
        super().__init__(16, 16)
        self.kept, self.number, self.puts = kept, number, puts

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(super().forward(x))
        if not self.puts:
            return y + self.kept.pop(self.number)
        self.kept[self.number] = y
        return y


class Twice(torch.autograd.Function):
    """Reads what it saved twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.exp())
        return x.exp()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        total = gradient * ctx.saved_tensors[0]
        gc.collect()
        return (total + gradient * ctx.saved_tensors[0]) / 2


class RunsAgain(torch.autograd.Function):
    """Enables gradients in its backward, and reads what it saved there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        with torch.enable_grad():
            (x,) = ctx.saved_tensors
            given = x.detach().requires_grad_()
            y = given * given
        return torch.autograd.grad(y, given, gradient)


def makes_a_leaf(x: Tensor) -> Tensor:
    y = x[:, None]
    y.requires_grad = True  # as HuBERT's and Wav2Vec2's feature encoders do
    return y[:, 0]


def random_leaky(x: Tensor) -> Tensor:
    return nn.functional.rrelu(x, training=True)  # its slopes are drawn after they are saved


def _frozen() -> list[Any]:
    stages = [Residual() for _ in range(8)]
    for k in (0, 1, 5):
        stages[k].requires_grad_(False)
    return [*stages]


def _coming_twice() -> list[Any]:
    shared = Residual()
    return [shared, torch.tanh, Residual(), shared, torch.sin, Residual(), shared]


def _normed(norm: Any) -> list[Any]:
    return [nn.Sequential(norm(nn.Linear(16, 16)), nn.Tanh()) for _ in range(6)]


def _skipping() -> list[Any]:
    kept: dict[int, Tensor] = {}
    return [Skips(kept, min(k, 7 - k), k < 4) for k in range(8)]


def _between(make: Callable[[], nn.Module]) -> list[Any]:
    return [f() for _ in range(5) for f in (make, lambda: nn.Linear(16, 16), nn.Tanh)]


def _rows() -> Tensor:
    return torch.randn(64, 16)


def _wanting() -> Tensor:
    return torch.randn(64, 16, requires_grad=True)


@dataclass(frozen=True)
class Case:
    """Stages, what they take, and the limit."""

    stages: Callable[[], list[Any]]
    x: Callable[[], Any] = _rows
    memory: float = 0.7
    around: Callable[[], contextlib.AbstractContextManager[object]] = contextlib.nullcontext


CASES = {
    "dict": Case(
        lambda: [Tree(16, 16) for _ in range(8)],
        lambda: {"x": _wanting(), "mask": torch.arange(16), "scale": 0.5},
    ),
    "list": Case(lambda: [Appending(16, 16) for _ in range(6)], lambda: [_rows()], 0.8),
    "sparse state": Case(
        lambda: [OnGraph(16, 16) for _ in range(6)],
        lambda: (torch.randn(16, 16), torch.eye(16).to_sparse_coo()),
        0.9,
    ),
    "stages twice": Case(_coming_twice),
    "frozen": Case(_frozen),
    "autocast": Case(
        lambda: [Residual() for _ in range(8)],
        around=lambda: torch.autocast("cpu", torch.bfloat16),
    ),
    "weight norm": Case(lambda: _normed(torch.nn.utils.parametrizations.weight_norm), memory=0.75),
    "old weight norm": Case(lambda: _normed(nn.utils.weight_norm), memory=0.75),
    "force": Case(lambda: _between(lambda: Force(True)), _wanting),
    "detached force": Case(lambda: _between(lambda: Force(False)), _wanting),
    "checkpoint": Case(lambda: _between(Checkpointed), _wanting),
    "except": Case(lambda: _between(lambda: Forgiving(16, 16)), _wanting),
    "unroll": Case(lambda: _between(Unrolls), _wanting),
    "unroll in chunks": Case(
        lambda: [Unrolls(memory="100 KiB", chunk=2), *[Residual() for _ in range(40)]], memory=0.6
    ),
    "LSTM": Case(lambda: [Recurrent() for _ in range(8)], memory=0.6),
    "random leaky ReLU": Case(lambda: [Residual(random_leaky) for _ in range(8)]),
    "saved read twice": Case(lambda: [Twice.apply, torch.sin] * 6, _wanting, 0.5),
    "gradients in backward": Case(lambda: [Residual(RunsAgain.apply) for _ in range(6)]),
    "a leaf inside": Case(
        lambda: [Residual(makes_a_leaf), *[Residual() for _ in range(7)]], memory=0.6
    ),
    "skips": Case(_skipping, memory=0.9),
    "sparse gradients": Case(
        lambda: [nn.Embedding(50, 16, sparse=True), *[Residual() for _ in range(8)]],
        lambda: torch.randint(0, 50, (64,)),
        0.6,
    ),
}


def _trained(case: Case, memory: float | None) -> list[Tensor | None]:
    """Return what some iterations leave, plain ones without a limit."""
    torch.manual_seed(0)
    stages, x = case.stages(), case.x()
    owned = nn.ModuleList([stage for stage in stages if isinstance(stage, nn.Module)])
    given = [t for t in pytree.tree_leaves(x) if isinstance(t, Tensor)]
    chain = None if memory is None else mst.Sequential(stages, memory=memory)
    found: list[Tensor | None] = []
    for step in range(4):
        torch.manual_seed(step)
        random.seed(step)
        state = pytree.tree_map(lambda leaf: leaf, x)  # whose lists stages may change
        with case.around():
            y = (
                functools.reduce(lambda y, f: f(y), stages, state)
                if chain is None
                else chain(state)
            )
        leaves = [t for t in pytree.tree_leaves(y) if isinstance(t, Tensor)]
        sum(t.float().square().sum() for t in leaves if t.requires_grad).backward()  # type: ignore[union-attr]
        found += [*leaves, torch.rand(2)]
        found += [t.grad for t in (*given, *owned.parameters())]
        for tensor in (*given, *owned.parameters()):
            tensor.grad = None
    if chain is not None:
        assert chain.plan is not None and not chain.plan.keeps_all
        assert str(chain.checked).startswith("equal")
    return [*found, *owned.buffers()]


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("name", CASES)
def test_training_is_plain_training(name: str) -> None:
    plain, ours = (_trained(CASES[name], memory) for memory in (None, CASES[name].memory))
    for a, b in zip(plain, ours, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.equal(a.to_dense(), b.to_dense())
