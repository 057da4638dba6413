"""Tensors that reach a cell in several roles, and what measuring a cell leaves behind."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multistage.torch as mst
from multistage.errors import StateError

WIDTH, STEPS = 8, 7
Unroll = Callable[..., mst.Unrolled]
PLANS: list[dict[str, Any]] = [
    {"planner": "recompute", "chunk": 1},
    {"planner": "recompute", "chunk": 3},
    {"planner": "recompute", "chunk": STEPS},
    {"planner": "stream", "chunk": 2, "tiers": "memory:"},
]


def leaf(*sizes: int) -> Tensor:
    return torch.randn(*sizes, WIDTH, requires_grad=True)


def used_inside(unroll: Unroll) -> list[Tensor]:
    linear, h0, xs = nn.Linear(WIDTH, WIDTH), leaf(3), leaf(STEPS, 3)

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(linear(h0) * 0.3 + h + x)
        return h, h

    unroll(cell, h0, xs).outputs.pow(2).sum().backward()
    return [h0, xs, *linear.parameters()]


def computed_before(unroll: Unroll) -> list[Tensor]:
    linear, root, xs = nn.Linear(WIDTH, WIDTH), leaf(3), leaf(STEPS, 3)
    h0 = torch.tanh(root)

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(linear(h0) * 0.3 + h + x)
        return h, h

    unroll(cell, h0, xs, parameters=[h0]).outputs.pow(2).sum().backward()
    return [root, xs, *linear.parameters()]


def weights(unroll: Unroll) -> list[Tensor]:
    w, xs = leaf(WIDTH), leaf(STEPS, WIDTH)
    unroll(lambda h, x: torch.tanh(h @ w + h + x), w, xs).state.pow(2).sum().backward()
    return [w, xs]


def passed_through(unroll: Unroll) -> list[Tensor]:
    """A state that stays a parameter for some steps, and comes back as one."""
    w, xs = leaf(WIDTH), leaf(STEPS, WIDTH)

    def cell(state: Any, step: Any) -> Any:
        h, memory = state
        x, again = step
        h = torch.tanh(h @ w * 0.3 + memory * x + memory)
        return (h, w if again else memory * 0.9), h

    steps = [(x, torch.tensor(t in (1, 2, 4))) for t, x in enumerate(xs.unbind())]
    out = unroll(cell, (torch.zeros(WIDTH, WIDTH), w), steps)
    (out.outputs.pow(2).sum() + out.state[1].sum()).backward()
    return [w, xs]


def first_input(unroll: Unroll) -> list[Tensor]:
    linear, h0 = nn.Linear(WIDTH, WIDTH), leaf(3)
    xs = [h0, *(leaf(3) for _ in range(STEPS - 1))]
    unroll(lambda h, x: torch.tanh(linear(x) * 0.3 + h * x + h), h0, xs).state.sum().backward()
    return [*xs, *linear.parameters()]


def every_input(unroll: Unroll) -> list[Tensor]:
    linear, h0 = nn.Linear(WIDTH, WIDTH), leaf(3)
    out = unroll(lambda h, x: torch.tanh(linear(x) * 0.3 + h * x + h), h0, [h0] * STEPS)
    out.state.sum().backward()
    return [h0, *linear.parameters()]


def attended_inputs(unroll: Unroll) -> list[Tensor]:
    """Attention over the sequence that also comes in step by step."""
    linear, query = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    xs, h0 = leaf(STEPS, 3), leaf(3)

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.softmax((xs * query(h)).sum(-1), 0)
        h = torch.tanh(linear((scores[..., None] * xs).sum(0) + x) + h)
        return h, h

    unroll(cell, h0, xs).outputs.pow(2).sum().backward()
    return [xs, h0, *linear.parameters(), *query.parameters()]


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: f"{plan['planner']}-{plan['chunk']}")
@pytest.mark.parametrize(
    "train",
    [
        used_inside,
        computed_before,
        weights,
        passed_through,
        first_input,
        every_input,
        attended_inputs,
    ],
)
def test_one_tensor_in_several_roles(
    train: Callable[[Unroll], list[Tensor]], plan: dict[str, Any]
) -> None:
    """State 0, inputs and parameters that are one tensor have one gradient, added in one order."""
    found = []
    for how in ({"planner": "keep"}, plan):
        torch.manual_seed(0)
        found.append(train(lambda *given, how=how, **named: mst.unroll(*given, **how, **named)))
    for number, (kept, again) in enumerate(zip(*found, strict=True)):
        assert kept.grad is not None and again.grad is not None
        assert torch.equal(kept.grad, again.grad), number


def test_measuring_tapes_leaves_no_graph_behind() -> None:
    """What a cell computes and leaves unused is freed, though no backward comes by it."""
    size = (3, 61)  # of no other tensor

    def cell(h: Tensor, x: Tensor) -> Tensor:
        torch.tanh(h * x)
        return torch.tanh(h + x)

    def run() -> None:
        h, xs = torch.randn(*size, requires_grad=True), torch.randn(STEPS, *size)
        mst.unroll(cell, h, xs, planner="offload", tiers="memory:", check="off")

    run()
    gc.collect()
    assert not [each for each in gc.get_objects() if type(each) is Tensor and each.shape == size]


@pytest.mark.parametrize("planner", ["keep", "recompute"])
def test_sparse_gradients_are_refused_with_a_remedy_that_helps(planner: Any) -> None:
    """Measuring refuses them whatever the planner, so that no planner is a remedy."""
    ids = torch.randint(0, 20, (STEPS, 3))

    def run(sparse: bool) -> None:
        table, linear = nn.Embedding(20, WIDTH, sparse=sparse), nn.Linear(WIDTH, WIDTH)
        cell = lambda h, i: torch.tanh(linear(h) + table(i))  # noqa: E731
        mst.unroll(cell, torch.zeros(3, WIDTH), ids, planner=planner).state.sum().backward()

    with pytest.raises(StateError, match=r"sparse gradient.*use nn\.Embedding\(sparse=False\)$"):
        run(True)
    run(False)


@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("kind", [nn.GRUCell, nn.LSTM])
def test_inference_mode(kind: Any, inside: bool) -> None:
    """Evaluation in inference mode, also of tensors made in it, is plain inference."""
    module = kind(WIDTH, WIDTH)
    with torch.inference_mode(inside):
        shape = (1, 3, WIDTH) if kind is nn.LSTM else (3, WIDTH)
        zeros, xs = torch.zeros(shape), torch.randn(STEPS, 3, WIDTH)
    state: Any = (zeros, zeros) if kind is nn.LSTM else zeros
    with torch.no_grad():
        known = mst.unroll(module, zeros_like(state), xs.clone()).outputs
    with torch.inference_mode():
        for inputs in (xs, list(xs)):
            assert torch.equal(mst.unroll(module, state, inputs).outputs, known)


def zeros_like(state: Any) -> Any:
    return torch.utils._pytree.tree_map(torch.zeros_like, state)
