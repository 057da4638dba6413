"""What cells may return, and be called within: served as plain autograd, or refused truly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

import multistage.torch as mst
from multistage.errors import ArgumentError, StateError

STEPS, BATCH, WIDTH = 12, 2, 4


class Pair(NamedTuple):
    h: Tensor
    c: Tensor


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.linear(h) + x)
        return h, h.square().sum()


def zeros() -> Tensor:
    return torch.zeros(BATCH, WIDTH)


def sequence() -> Tensor:
    return torch.randn(STEPS, BATCH, WIDTH, requires_grad=True)


@pytest.mark.parametrize("unequal", [None, True])
@pytest.mark.parametrize(
    ("state", "pair"),
    [
        ([zeros(), zeros()], tuple),
        ((zeros(), zeros()), lambda both: Pair(*both)),
        (Pair(zeros(), zeros()), tuple),
        ({"h": zeros(), "c": zeros()}, lambda both: both),
    ],
)
def test_a_pair_of_two_meanings_is_refused(state: Any, pair: Any, unequal: bool | None) -> None:
    def cell(state: Any, x: Tensor) -> Any:
        h, c = state.values() if isinstance(state, dict) else state
        return pair((torch.tanh(h + x), c + h))

    with pytest.raises(StateError, match=r"which may be the next state or \(state, y\): if it is"):
        mst.unroll(cell, state, sequence(), unequal=unequal)


class Result(NamedTuple):
    state: Tensor
    y: Tensor | None


@pytest.mark.parametrize("how", [{"unequal": True}, {"chunk": 3, "planner": "recompute"}])
@pytest.mark.parametrize("result", [tuple, lambda both: Result(*both)])
@pytest.mark.parametrize("speaks", [False, True])
def test_pairs_with_none_and_as_named_tuples(speaks: bool, result: Any, how: Any) -> None:
    net, x = Net(), sequence()

    def cell(h: Tensor, x: Tensor) -> Any:
        h, y = net(h, x)
        return result((h, y if speaks else None))

    out = mst.unroll(cell, zeros(), x, **how)
    assert isinstance(out.state, Tensor) and out.outputs is None
    assert (out.loss is None) is not speaks
    h: Any = zeros()
    for t in range(STEPS):
        h, _ = net(h, x[t])
    assert torch.equal(
        torch.autograd.grad(h.sum(), x)[0], torch.autograd.grad(out.state.sum(), x)[0]
    )


def test_none_at_some_steps_only_is_refused() -> None:
    net, x = Net(), sequence()
    x.data[5:] = 9.0

    def cell(h: Tensor, x: Tensor) -> Any:
        h, y = net(h, x)
        return h, y if float(x.detach().mean()) > 8 else None

    for unequal in (None, True):
        with pytest.raises(StateError, match="None for y at first, and a y at step 5"):
            mst.unroll(cell, zeros(), x, planner="keep", unequal=unequal)


class StateFirst(nn.LSTMCell):
    def forward(self, state: Any, x: Tensor) -> Any:
        return super().forward(x, state)


class InputFirst(nn.LSTMCell):
    def forward(self, input: Tensor, hx: Any = None) -> Any:
        return super().forward(input, hx)


def test_subclasses_of_recurrent_modules() -> None:
    x, state, cell = sequence(), (zeros(), zeros()), StateFirst(WIDTH, WIDTH)
    with pytest.raises(ArgumentError, match=r"takes \(state, x\), in an order that is not known"):
        mst.unroll(cell, state, x)
    out = mst.unroll(lambda state, x: cell(state, x), state, x)
    assert isinstance(out.state, tuple)
    other = InputFirst(WIDTH, WIDTH)
    other.load_state_dict(cell.state_dict())
    last: Any = mst.unroll(other, state, x).state
    assert all(torch.equal(a, b) for a, b in zip(out.state, last, strict=True))


@pytest.mark.parametrize("inputs", [sequence(), list(sequence())])
def test_fewer_steps_than_inputs_are_refused(inputs: Any) -> None:
    with pytest.raises(ArgumentError, match=r"n_steps=5, but inputs has 12, .* inputs\[:5\]"):
        mst.unroll(Net(), zeros(), inputs, n_steps=5)
    assert mst.unroll(Net(), zeros(), inputs, n_steps=STEPS).loss is not None


def test_one_call_of_a_fused_cell_is_compared() -> None:
    lstm, linear = nn.LSTM(8, 16), nn.Linear(8, 8)
    start = torch.zeros(1, 4, 16), torch.zeros(1, 4, 16)
    options: dict[str, Any] = {"planner": "recompute", "chunk": 3}
    out = mst.unroll(lstm, start, torch.randn(24, 4, 8), **options)
    assert out.plan is not None
    assert str(out.plan.checked).startswith("equal")

    def across(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.tanh(linear(x) - x.mean(0) + h)
        return y[-1], y

    with pytest.raises(StateError, match="what one call of cell across for all steps does"):
        mst.unroll(across, torch.zeros(4, 8), torch.randn(24, 4, 8), fused=True, **options)


@pytest.mark.parametrize("how", [{}, {"planner": "recompute", "chunk": 3}, {"unequal": True}])
def test_unroll_inside_a_checkpoint(how: dict[str, Any]) -> None:
    """Measuring saved other tensors in the first run than there were in the second.

    Which chunks are first run with a graph is another sample in each sequence, too.
    """
    net, found = Net(), []

    def run(x: Tensor) -> Tensor:
        out = mst.unroll(net, x[0].sin(), x, **how)
        assert out.loss is not None
        return out.loss.sin()

    calls: list[Callable[[Tensor], Any]] = [lambda x: checkpoint(run, x, use_reentrant=False)] * 3
    for call in [*calls, run]:
        torch.manual_seed(0)
        x = sequence()
        found.append(torch.autograd.grad(call(x), [x, *net.parameters()]))
    assert all(torch.equal(a, b) for each in found[1:] for a, b in zip(found[0], each, strict=True))


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).t()


def test_cached_parametrizations() -> None:
    net, x = Net(), sequence()
    parametrize.register_parametrization(net.linear, "weight", Symmetric())
    with parametrize.cached(), pytest.raises(ArgumentError, match="enter it within the cell"):
        mst.unroll(net, zeros(), x)

    def cell(h: Tensor, x: Tensor) -> Any:
        with parametrize.cached():
            return net(h, x)

    assert mst.unroll(cell, zeros(), x).loss is not None


@pytest.mark.parametrize("options", [{"memory": 1 << 20}, {"memory": 0.5}, {"check": "off"}])
def test_outputs_of_a_fused_cell_are_added_over_time(options: Any) -> None:
    """Chunks were added as they are: of a shorter last one that failed, or was broadcast.

    Steps are added one after the other, whatever the chunks and the plan.
    """
    cell, x = nn.GRU(3, 4), torch.randn(13, 2, 3)
    start = torch.zeros(1, 2, 4, requires_grad="check" not in options)
    out = mst.unroll(cell, start, x, chunk=4, outputs="sum", **options)
    state, ys = start, list[Tensor]()
    for chunk in x.split(4):
        y, state = cell(chunk, state)
        ys += y
    total = sum(ys[1:], ys[0])
    assert torch.equal(out.outputs, total)
    both = [torch.autograd.grad(t.square().sum(), cell.weight_hh_l0) for t in (out.outputs, total)]
    assert torch.equal(both[0][0], both[1][0])


def test_the_sum_of_one_output_is_a_copy() -> None:
    weight, x = torch.ones(4, requires_grad=True), torch.randn(1, 4)
    before = x.clone()

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(h * weight + x), x

    out = mst.unroll(cell, torch.zeros(4), x, outputs="sum", planner="recompute")
    with torch.no_grad():
        out.outputs.add_(1)
    assert torch.equal(x, before)


@pytest.mark.parametrize("chunk", [1, 3, STEPS])
@pytest.mark.parametrize(("fused", "check"), [(False, "error"), (False, "off"), (True, "off")])
def test_a_loss_that_is_in_the_state_too(fused: bool, check: Any, chunk: int) -> None:
    """A plain loop adds its gradient after those from the next step, a schedule before them."""
    x, weight = torch.randn(STEPS, 4, 8), torch.randn(8, 8, requires_grad=True)
    start = torch.randn(4, 8), torch.zeros(())

    def cell(state: Any, x: Tensor, *, same: bool = True) -> Any:
        h, s = state
        for x_t in x if fused else x[None]:
            h = torch.tanh(h @ weight + x_t) * torch.sigmoid(s * 1.3) + torch.cos(s) * 0.1
            s = h.square().mean() + 0.3 * torch.sin(s)
        return (h, s), s if same else s.clone()

    def copies(state: Any, x: Tensor) -> Any:
        return cell(state, x, same=False)

    def plain(cell: Any) -> Tensor:
        state, total, size = start, None, chunk if fused else 1
        for t in range(0, STEPS, size):
            state, loss = cell(state, x[t : t + size] if fused else x[t])
            total = loss if total is None else total + loss
        assert total is not None
        return torch.autograd.grad(total, weight)[0]

    options: dict[str, Any] = {"chunk": chunk, "fused": fused, "check": check}
    with pytest.raises(StateError, match=r"a loss, leaf 0 of y, at step .* return a copy"):
        mst.unroll(cell, start, x, planner="recompute", **options)
    for each, planner in ((cell, "keep"), (copies, "recompute")):
        out: Any = mst.unroll(each, start, x, planner=planner, **options)
        assert torch.equal(torch.autograd.grad(out.loss, weight)[0], plain(each))
