"""Hooks that a cell sets: called with the gradients of plain autograd, or refused."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multistage.torch as mst
from multistage.errors import StateError
from multistage.torch.measurement.exploring import let_see_wholes

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


class Partial(nn.Module):
    """A step that returns a parameter in its state, and does not use all that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.spare = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept = nn.Parameter(torch.rand(4))

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(self.linear(state[0]) * state[1] + x), self.kept


def backward_of(net: Partial, x: Tensor, how: dict[str, Any]) -> list[Tensor | None]:
    """Return gradients by a plan; plainly if there is none."""
    for p in net.parameters():
        p.grad = None
    state: Any = (torch.zeros(2, 4), net.kept)
    if how:
        state = mst.unroll(net, state, x, outputs=None, **how).state
    else:
        for x_t in x:
            state = net(state, x_t)
    (state[0].sum() + (state[1] * torch.arange(4.0)).sum()).backward()
    return [p.grad for p in net.parameters()]


def same(ones: list[Tensor | None], others: list[Tensor | None]) -> bool:
    pairs = zip(ones, others, strict=True)
    return all(a is b if a is None or b is None else torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("how", [p for p in PLANS if "several" not in p], ids=str)
def test_hooks_on_parameters_see_the_whole_gradient_or_are_not_called(how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net, x = Partial(), torch.randn(STEPS, 2, 4)
    seen: list[Tensor] = []
    together: list[list[bool]] = []

    def see(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return gradient * 3

    handles = [p.register_hook(see) for p in net.parameters()]
    torch.autograd.graph.register_multi_grad_hook(
        [net.linear.weight, net.spare.weight],
        lambda gradients: together.append([g is not None for g in gradients]),
    )
    found = []
    for each in ({}, how, how, {}):
        seen.clear()
        found.append((backward_of(net, x, each), sorted(g.norm().item() for g in seen)))
    assert together == [[True, False]] * 4
    for gradients, norms in found[1:]:
        assert same(gradients, found[0][0])
        assert norms == found[0][1] and len(norms) == 3
    for handle in handles:  # which are of the hooks, whatever stands in their place
        handle.remove()
    seen.clear()
    assert same(backward_of(net, x, how), backward_of(net, x, {})) and not seen


@pytest.mark.parametrize("how", [p for p in PLANS if "several" not in p], ids=str)
@pytest.mark.parametrize("used", [True, False])
def test_hooks_on_parameters_that_are_outputs_see_the_whole_gradient(
    used: bool, how: dict[str, Any]
) -> None:
    net, weight = nn.Linear(4, 4), nn.Parameter(torch.rand(2, 4))
    seen: list[Tensor] = []

    def see(gradient: Tensor) -> Tensor:
        seen.append(gradient.clone())
        return gradient.clamp(-2, 2) * 3

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        h = torch.tanh(net(h) * weight if used else net(h)) + x
        return h, (weight, h)

    torch.manual_seed(0)
    weight.register_hook(see)
    h, x, scale = torch.zeros(2, 4), torch.randn(STEPS, 2, 4), torch.randn(STEPS, 2, 4)
    state, weights, hs = h, [], []
    for x_t in x:
        state, (y, h_t) = cell(state, x_t)
        weights.append(y)
        hs.append(h_t)
    plain = (torch.stack(weights) * scale).sum() + torch.stack(hs).square().sum()
    given: dict[str, Any] = {"parameters": [weight, *net.parameters()], **how}
    out = mst.unroll(cell, h, x, **given)
    ours = (out.outputs[0] * scale).sum() + out.outputs[1].square().sum()
    wanted = [weight, *net.parameters()]
    found = [torch.autograd.grad(loss, wanted) for loss in (plain, ours)]
    assert all(map(torch.equal, *found))
    assert len(seen) == 2 and torch.equal(*seen)


@pytest.mark.parametrize("beside", ["unroll", "plain"])
def test_hooks_on_parameters_are_called_in_other_threads(beside: str) -> None:
    torch.manual_seed(0)
    cell, h = nn.GRUCell(4, 8), torch.zeros(2, 8)
    parameters = list(cell.parameters())
    for p in parameters:
        p.register_hook(lambda gradient: gradient * 3)
    xs = [torch.randn(60, 2, 4) for _ in range(2)]

    def plain(x: Tensor) -> list[Tensor | None]:
        state = h
        for x_t in x:
            state = cell(x_t, state)
        return list(torch.autograd.grad(state.sum(), parameters))

    def unrolled(x: Tensor) -> list[Tensor | None]:
        out = mst.unroll(cell, h, x, planner="recompute", chunk=3, outputs=None)
        return list(torch.autograd.grad(out.state.sum(), parameters))

    expected, results = [plain(x) for x in xs], list[object]()

    def rounds(run: Callable[[Tensor], list[Tensor | None]], number: int) -> None:
        for _ in range(12):
            try:
                results.append(same(run(xs[number]), expected[number]))
            except Exception as error:  # as of hooks that were counted while others were aside
                results.append(error)

    runs = (unrolled, unrolled if beside == "unroll" else plain)
    threads = [threading.Thread(target=rounds, args=(run, i)) for i, run in enumerate(runs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 24


@pytest.mark.parametrize("how", [{}, *(p for p in PLANS if "several" not in p)], ids=str)
def test_a_pass_by_a_node_that_a_part_begins_at_calls_hooks(how: dict[str, Any]) -> None:
    """A computed parameter is returned, and a hook in the cell differentiates by it."""
    torch.manual_seed(0)
    weight, bias = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4))
    seen: list[Tensor] = []
    weight.register_hook(seen.append)  # returns None
    bias.register_hook(lambda g: g * 2)
    let_see_wholes([weight])  # as an earlier sequence does
    computed = weight * 2

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h * computed + x + bias)

        def inner(_: Tensor) -> None:
            with torch.enable_grad():
                torch.autograd.grad(computed.sum(), weight, retain_graph=True)

        if h.requires_grad:
            h.register_hook(inner)
        return h, computed

    h, xs = torch.zeros(4), torch.randn(STEPS, 4)
    if how:
        out = mst.unroll(cell, h, xs, parameters=[computed, bias], **{**how, "check": "off"})
        loss = out.state.sum() + out.outputs.sum()
    else:
        loss = torch.zeros(())
        for x in xs:
            h, y = cell(h, x)
            loss = loss + y.sum()
        loss = loss + h.sum()
    seen.clear()
    loss.backward()
    assert len(seen) == STEPS + 1


class Solved(torch.autograd.Function):
    """Its backward differentiates by the weight that it saved."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(h, weight)
        return torch.tanh(h @ weight)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        h, weight = ctx.saved_tensors
        with torch.enable_grad():
            h = h.detach().requires_grad_()
            y = torch.tanh(h @ weight)
        return torch.autograd.grad(y, [h, weight], gradient)


@pytest.mark.parametrize("how", [p for p in PLANS if "several" not in p], ids=str)
def test_hooks_on_parameters_are_not_called_while_steps_are_looked_at(how: dict[str, Any]) -> None:
    torch.manual_seed(0)
    weight, xs = nn.Parameter(torch.rand(4, 4)), torch.randn(STEPS, 2, 4)
    calls: list[Tensor] = []
    weight.register_hook(calls.append)
    h = torch.zeros(2, 4, requires_grad=True)
    counts = []
    for each in (how, {}):
        state: Any = h
        if each:
            out = mst.unroll(
                lambda h, x: Solved.apply(h, weight) + x,
                h,
                xs,
                parameters=[weight],
                outputs=None,
                **each,
            )
            state = out.state
        else:
            for x in xs:
                state = Solved.apply(state, weight) + x
        assert not calls
        state.sum().backward()
        counts.append(len(calls))
        calls.clear()
    assert counts[0] == counts[1] == STEPS + 1
