"""A user's programs with types, one for each front door to PyTorch.

mypy reads them beside the package, and `tests/torch/test_typed.py` runs them.
"""

from __future__ import annotations

from typing import Any, assert_type

import torch
from torch import Tensor, nn

import multistage.torch as mst
from multistage.model.stages import StageCosts
from multistage.planners import Plan

Pair = tuple[Tensor, Tensor]


def speaking(h: Tensor, x: Tensor) -> Pair:
    """Return (state, y)."""
    h = torch.tanh(h + x)
    return h, h * 2


def silent(h: Tensor, x: Tensor) -> Tensor:
    """Return the state alone."""
    return torch.tanh(h + x)


def silent_pair(state: Pair, x: Tensor) -> Pair:
    """Return a state of two tensors, which is no (state, y)."""
    h, c = state
    return torch.tanh(h + x), c + h


def named(state: dict[str, Tensor], t: int) -> tuple[dict[str, Tensor], Pair]:
    """Return a state and a y that are trees; x_t is a number."""
    h = torch.tanh(state["h"] + t)
    return {"h": h}, (h, h * t)


class Layer(nn.Module):
    """A cell as a module, of whose result a type checker knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, h: Tensor, x: Tensor) -> Pair:
        h = torch.tanh(self.linear(h) + x)
        return h, h


def unroll_functions() -> None:
    """Sequences whose cells are functions with types."""
    h, x = torch.zeros(2, 3, requires_grad=True), torch.ones(5, 2, 3)
    out = mst.unroll(speaking, h, x, memory="64 KiB", tiers="memory:", check="off")
    assert_type(out, mst.Unrolled[Tensor, Tensor])
    out.outputs.sum().backward()
    assert_type(out.loss, Tensor | None)

    alone = mst.unroll(silent, h, x, outputs="last")
    assert_type(alone, mst.Unrolled[Tensor, object])
    alone.state.sum().backward()

    pair = mst.unroll(silent_pair, (h, h.clone()), list(x))
    assert_type(pair, mst.Unrolled[Pair, object])
    pair.state[1].sum().backward()

    tree = mst.unroll(named, {"h": h}, float, n_steps=4, outputs="sum")
    assert_type(tree, mst.Unrolled[dict[str, Tensor], Pair])
    tree.outputs[0].sum().backward()

    untyped = mst.unroll(lambda h, x: (h + x, h * x), h, x)
    untyped.outputs.sum().backward()


def unroll_without_outputs() -> None:
    """Outputs that are handed over, or dropped."""
    h, x = torch.zeros(2, 3, requires_grad=True), torch.ones(5, 2, 3)
    seen: list[tuple[int, Tensor]] = []

    def note(t: int, y: Tensor) -> None:
        seen.append((t, y))

    told = mst.unroll(speaking, h, x, outputs=note)
    assert_type(told, mst.Unrolled[Tensor, None])
    assert len(seen) == 5
    dropped = mst.unroll(speaking, h, x, outputs=None)
    assert_type(dropped, mst.Unrolled[Tensor, None])
    dropped.state.sum().backward()


def unroll_modules() -> None:
    """Modules: what they return is of any type, as where they are called."""
    h, x = torch.zeros(2, 3), torch.ones(5, 2, 3)
    out = mst.unroll(Layer(), h, x)
    assert_type(out, mst.Unrolled[Tensor, Any])
    out.outputs.sum().backward()

    whole = mst.unroll(nn.LSTM(3, 3), (h[None], h[None]), x)
    assert_type(whole, mst.Unrolled[Pair, Any])
    whole.outputs.sum().backward()

    layers = [Layer() for _ in range(5)]
    for cells in (layers, tuple(layers), nn.ModuleList(layers)):
        several = mst.unroll(cells, h, x, outputs="last")
        assert_type(several, mst.Unrolled[Tensor, Any])
        several.outputs.sum().backward()

    steps = mst.unroll([speaking, speaking], h.requires_grad_(), x[:2])
    assert_type(steps, mst.Unrolled[Tensor, Tensor])
    steps.outputs.sum().backward()


def double(x: Tensor) -> Tensor:
    """Return twice a tensor."""
    return x * 2


def sequential() -> None:
    """A chain of stages within a limit."""
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4)]
    x = torch.ones(4, 8)
    model = mst.Sequential([*layers, double], x, memory=0.9, check="off")
    model(x).sum().backward()
    plan = model.plan
    assert_type(plan, Plan | None)
    assert plan is not None
    assert_type(plan.peak_bytes, int)
    assert_type(model.prepare(x), Plan)
    model.train().close()
    assert callable(model[0])
    assert len(model.stages()) == 5
    assert isinstance(mst.Sequential(nn.Sequential(*layers)), nn.Module)


def compiled() -> None:
    """A model, and a function, captured by TorchDynamo."""
    model = mst.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)), memory="1 MiB")
    assert_type(model, mst.Compiled)
    model(torch.ones(3, 4)).sum().backward()
    assert_type(model.plan, Plan | None)
    assert_type(model.plans, list[Plan])
    model.train().close()


def profile() -> None:
    """Costs of stages."""
    costs = mst.profile([nn.Linear(8, 8), double], torch.ones(4, 8), seconds=0.01)
    assert_type(costs, StageCosts)
    assert_type(costs.stages[0].output_bytes, int)


def offload() -> None:
    """What autograd saves, in a tier."""
    x = torch.ones(512, 1024, requires_grad=True)
    with mst.offload("memory:", min_bytes="1 MiB") as stats:
        loss = torch.tanh(torch.tanh(x)).sum()
    loss.backward()
    assert_type(stats.moved, int)


PROGRAMS = (
    unroll_functions,
    unroll_without_outputs,
    unroll_modules,
    sequential,
    compiled,
    profile,
    offload,
)
