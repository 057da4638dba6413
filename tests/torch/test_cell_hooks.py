"""Hooks that a cell sets: called with the gradients of plain autograd, or refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multistage.torch as mst
from multistage.errors import StateError

STEPS = 12


def halved(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.05, 0.05) * 0.9


class Net(nn.Module):
    """A step whose outputs depend on the state that it returns."""

    def __init__(self, hook: Callable[[Net, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.head = nn.Linear(4, 4), nn.Linear(4, 2)
        self.hook = hook

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        h, kept = state
        self.hook(self, h, x)
        new = torch.tanh(self.linear(h) + x)
        return (new, kept), self.head(new).square() * kept.mean()


def left_by(hook: Callable[[Net, Tensor, Tensor], Any], how: dict[str, Any]) -> list[Any]:
    """Return results and gradients of a sequence by a plan; plainly if there is none."""
    torch.manual_seed(0)
    net, source = Net(hook), torch.randn(2, 4, requires_grad=True)
    steps = [torch.randn(2, 4, requires_grad=True) for _ in range(STEPS)]
    inputs: Any = steps if how.pop("as_list", False) else torch.stack(steps)
    cell: Any = [net] * STEPS if how.pop("several", False) else net
    state = source * 2, source + 1
    if how:
        out = mst.unroll(cell, state, inputs, **how)
        last, ys = out.state, out.outputs
        assert out.plan is not None and out.plan.planner == how["planner"]
    else:
        last, outputs = state, []
        for x in inputs:
            last, y = net(last, x)
            outputs.append(y)
        ys = torch.stack(outputs)
    # State 0 and an input have other uses, whose gradients a hook on them sees too.
    loss = ys.sum() + last[0].sum() + state[0].square().sum() + steps[4].square().sum()
    found = [loss]
    for again in (True, False):
        loss.backward(retain_graph=again)
        found += [t.grad.clone() for t in [source, *steps, *net.parameters()] if t.grad is not None]
    return found


PLANS: list[dict[str, Any]] = [
    {"planner": "recompute", "chunk": 3},
    {"planner": "recompute", "chunk": 1},
    {"planner": "recompute", "chunk": 3, "several": True, "unequal": True},
    {"planner": "keep"},
]


def on_both(net: Net, h: Tensor, x: Tensor) -> None:
    h.register_hook(halved)
    h.register_hook(lambda gradient: gradient + 0.01)
    if x.requires_grad:
        x.register_hook(halved)


def where_it_may(net: Net, h: Tensor, x: Tensor) -> None:
    """Does nothing where a chunk runs without a graph."""
    if h.requires_grad:
        h.register_hook(halved)


@pytest.mark.parametrize("how", PLANS, ids=str)
@pytest.mark.parametrize("hook", [on_both, where_it_may])
def test_hooks_on_the_given_state_see_its_whole_gradient(hook: Any, how: dict[str, Any]) -> None:
    plain, mine = left_by(hook, {}), left_by(hook, dict(how))
    assert len(plain) == len(mine)
    assert all(torch.equal(a, b) for a, b in zip(plain, mine, strict=True))


@pytest.mark.parametrize("how", PLANS, ids=str)
@pytest.mark.parametrize("hook", [on_both, where_it_may])
def test_hooks_on_state_0_are_there_from_the_forward_sweep_on(
    hook: Any, how: dict[str, Any]
) -> None:
    """The backward of one sequence meets the hooks of another that began where it did."""

    def gradients(run: Callable[[Any, Tensor, Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(0)
        net, h = Net(hook), torch.randn(2, 4, requires_grad=True)
        x = torch.randn(STEPS, 2, 4)
        losses, found = [run(net, h, x), run(net, h, 2 * x)], []
        h.register_hook(lambda gradient: gradient + 1)
        for loss in losses:
            loss.backward()
            assert h.grad is not None
            found.append(h.grad.clone())
        return found

    def plainly(net: Any, h: Tensor, x: Tensor) -> Tensor:
        state, losses = (h, torch.ones(2, 4)), []
        for x_t in x:
            state, y = net(state, x_t)
            losses.append(y)
        return torch.stack(losses).sum()

    def by_plan(net: Any, h: Tensor, x: Tensor) -> Tensor:
        options = {name: value for name, value in how.items() if name != "several"}
        cell = [net] * STEPS if "several" in how else net
        return mst.unroll(cell, (h, torch.ones(2, 4)), x, **options).outputs.sum()

    plain, mine = gradients(plainly), gradients(by_plan)
    assert all(torch.equal(a, b) for a, b in zip(plain, mine, strict=True))


def on_nodes(net: Net, h: Tensor, x: Tensor) -> None:
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda gradients: gradients)


def on_several(net: Net, h: Tensor, x: Tensor) -> None:
    torch.autograd.graph.register_multi_grad_hook([h], lambda gradients: None)


def on_leaves(net: Net, h: Tensor, x: Tensor) -> None:
    if h.is_leaf and h.requires_grad:
        h.register_post_accumulate_grad_hook(lambda t: None)


def on_inputs(net: Net, h: Tensor, x: Tensor) -> None:
    x.register_hook(halved)


def on_parameters(net: Net, h: Tensor, x: Tensor) -> None:
    net.linear.weight.register_hook(halved)


def on_parameters_later(net: Net, h: Tensor, x: Tensor) -> None:
    if float(x.detach().mean()) > 0.3:
        on_parameters(net, h, x)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        (on_nodes, "on the grad_fn of the state"),
        (on_several, "register_multi_grad_hook"),
        (on_leaves, "register_post_accumulate_grad_hook"),
        (on_inputs, "on x_t, a tensor of the list"),
        (on_parameters, "on one of its parameters when it runs .in its first step"),
        (on_parameters_later, "on one of its parameters when it runs .at steps"),
    ],
)
def test_other_hooks_are_refused(hook: Any, message: str) -> None:
    with pytest.raises(StateError, match=message):
        left_by(hook, {"planner": "recompute", "chunk": 3, "check": "off", "as_list": True})
