"""Cells that do at some later step what they did not at the first: equal, or refused."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import multistage.torch as mst
from multistage.errors import (
    ArgumentError,
    BudgetError,
    DifferenceWarning,
    MultistageError,
    StateError,
)
from multistage.torch.tensors.meter import Meter

WIDTH, BATCH, STEPS = 8, 4, 20
Tensors: TypeAlias = Sequence[Tensor | None]


class Cell(nn.Module):
    """A step of an Elman network."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.linear(h) + x)
        return h, h * 2


def zeros() -> Tensor:
    return torch.zeros(BATCH, WIDTH)


def sequence(*, wants: bool = False) -> Tensor:
    return torch.randn(STEPS, BATCH, WIDTH, requires_grad=wants)


def unrolled(cell: Any, state: Any, inputs: Any, kept: bool, chunk: int = 3, **options: Any) -> Any:
    """Unroll by plain autograd, or running chunks again."""
    how: dict[str, Any] = {"planner": "keep"} if kept else {"planner": "recompute"}
    if not kept or options.get("fused"):
        how["chunk"] = chunk
    return mst.unroll(cell, state, inputs, **how, **options)


def assert_alike(run: Callable[[bool], Tensors]) -> None:
    """Compare what a run returns where everything is kept, and where chunks are run again."""
    found = []
    for kept in (True, False):
        torch.manual_seed(0)
        found.append(run(kept))
    for number, (a, b) in enumerate(zip(*found, strict=True)):
        assert (a is None) == (b is None), number
        assert a is None or torch.equal(a, b), number  # type: ignore[arg-type]


def alike(run: Callable[..., Tensors]) -> Callable[..., None]:
    """Return a test of what a run returns, by whether everything is kept."""

    def test(**given: Any) -> None:
        assert_alike(lambda kept: run(kept, **given))

    signature = inspect.signature(run)
    parameters = list(signature.parameters.values())[1:]
    test.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    test.__name__, test.__doc__ = run.__name__, run.__doc__
    return test


def gradients(*tensors: Any) -> list[Tensor | None]:
    every = [list(t.parameters()) if isinstance(t, nn.Module) else [t] for t in tensors]
    return [t.grad for of_one in every for t in of_one]


def refused(run: Callable[[bool], Any], message: str, kind: type[MultistageError]) -> None:
    """Check that nothing is returned where chunks are run again."""
    torch.manual_seed(0)
    with pytest.raises(kind, match=message):
        run(False)


# ------------------------------------------------------------- recurrent modules


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_two_directions_are_refused(kind: Any) -> None:
    cell = kind(WIDTH, WIDTH, bidirectional=True)
    state = torch.zeros(2, BATCH, WIDTH)
    with pytest.raises(ArgumentError, match=r"bidirectional=True.*inputs.flip\(0\)"):
        mst.unroll(cell, (state, state) if kind is nn.LSTM else state, sequence())


def test_two_directions_as_the_message_has_it() -> None:
    """One module for each: the same numbers as the bidirectional one."""
    torch.manual_seed(0)
    both = nn.GRU(WIDTH, WIDTH, bidirectional=True)
    one, other = nn.GRU(WIDTH, WIDTH), nn.GRU(WIDTH, WIDTH)
    weights = dict(both.named_parameters())
    one.load_state_dict({k: v for k, v in weights.items() if not k.endswith("_reverse")})
    other.load_state_dict(
        {k.removesuffix("_reverse"): v for k, v in weights.items() if k.endswith("_reverse")}
    )
    x, h = sequence(), torch.zeros(1, BATCH, WIDTH)
    forth = unrolled(one, h, x, False).outputs
    back = unrolled(other, h, x.flip(0), False).outputs
    torch.testing.assert_close(torch.cat([forth, back.flip(0)], -1), both(x)[0])


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@alike
def test_a_projection_is_part_of_the_state(kept: bool) -> Tensors:
    cell, x = nn.LSTM(WIDTH, WIDTH, 2, proj_size=3), sequence(wants=True)
    state = torch.zeros(2, BATCH, 3), torch.zeros(2, BATCH, WIDTH)
    out = unrolled(cell, state, x, kept, chunk=4, fused=True)
    out.outputs.square().sum().backward()
    return gradients(x, cell)


def test_packed_sequences_are_refused() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.randn(5, WIDTH), torch.randn(3, WIDTH)])
    state = torch.zeros(1, 2, WIDTH)
    with pytest.raises(ArgumentError, match=r"PackedSequence.*torch.where\(mask_t"):
        mst.unroll(nn.GRU(WIDTH, WIDTH), state, packed)


# ------------------------------------------------------------ gradients of inputs


@alike
def test_a_list_for_a_fused_cell(kept: bool) -> Tensors:
    """Only the first of each chunk had a gradient."""
    cell, xs = nn.GRU(WIDTH, WIDTH), list(sequence().unbind())
    for x in xs:
        x.requires_grad_()
    out = unrolled(cell, torch.zeros(1, BATCH, WIDTH), xs, kept, chunk=4, fused=True)
    out.outputs.square().sum().backward()
    return gradients(cell, *xs)


@alike
def test_an_encoder_called_by_a_function(kept: bool) -> Tensors:
    """Its parameters had no gradient."""
    cell, encoder, data = Cell(), nn.Linear(WIDTH, WIDTH), sequence()
    out = unrolled(cell, zeros(), lambda t: encoder(data[t]), kept, n_steps=STEPS)
    out.outputs.square().sum().backward()
    return gradients(cell, encoder)


@alike
def test_a_function_that_draws(kept: bool) -> Tensors:
    cell = Cell()
    torch.manual_seed(1)
    out = unrolled(cell, zeros(), lambda t: torch.randn(BATCH, WIDTH), kept, n_steps=STEPS)
    out.outputs.square().sum().backward()
    return [*gradients(cell), out.outputs, torch.rand(2)]


@alike
def test_trees_in_a_list(kept: bool) -> Tensors:
    cell = Cell()
    xs = [{"x": x.clone().requires_grad_(), "mask": torch.ones(BATCH, 1)} for x in sequence()]
    out = unrolled(lambda h, x: cell(h, x["x"] * x["mask"]), zeros(), xs, kept)
    out.outputs.square().sum().backward()
    return gradients(cell, *(x["x"] for x in xs))


@alike
def test_a_later_input_that_requires_a_gradient(kept: bool) -> Tensors:
    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h + x)
        return h, h * 2

    xs = list(sequence().unbind())
    for x in xs[5:]:
        x.requires_grad_()
    unrolled(cell, zeros(), xs, kept).outputs.square().sum().backward()
    return gradients(*xs)


@pytest.mark.parametrize("steps", [1, STEPS])
@pytest.mark.parametrize("mode", ["sum", "last"])
def test_zeros_in_gradients_of_inputs_have_the_signs_of_plain_autograd(
    mode: str, steps: int
) -> None:
    """Dropout leaves -0.0 in gradients; zeros of the other steps are added to it, if any."""

    def run(kept: bool) -> Tensors:
        net, x = Cell(), sequence()[:steps].requires_grad_()

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            dropped = nn.functional.dropout(x, 0.5)
            return net(h, dropped)[0], dropped.sum(1)

        out = unrolled(cell, zeros(), x, kept, outputs=mode)
        (out.outputs.sum() + out.state.sum()).backward()
        assert x.grad is not None
        return [x.grad, x.grad.signbit()]

    assert_alike(run)


@alike
def test_one_input_at_many_steps(kept: bool) -> Tensors:
    """Its gradients are added last step first."""
    cell, a, b = Cell(), zeros().normal_().requires_grad_(), zeros().normal_().requires_grad_()
    xs = [a if t % 3 else b for t in range(STEPS)]
    unrolled(cell, zeros(), xs, kept).outputs.square().sum().backward()
    return gradients(cell, a, b)


class Elements(Sequence[Tensor]):
    """A sequence of one's own."""

    def __init__(self, elements: Sequence[Tensor]) -> None:
        self.elements = elements

    def __len__(self) -> int:
        return len(self.elements)

    def __getitem__(self, t: Any) -> Any:
        return self.elements[t]


@pytest.mark.parametrize("kept", [True, False])
def test_leaves_in_a_sequence_of_ones_own_are_refused(kept: bool) -> None:
    """Whatever the planner: nothing tells beforehand which there are."""
    xs = [zeros().requires_grad_() for _ in range(STEPS)]
    with pytest.raises(ArgumentError, match=r"x_1 of inputs \(Elements\).*list\(inputs\)"):
        unrolled(Cell(), zeros(), Elements(xs), kept)
    out = unrolled(Cell(), zeros(), Elements(xs), kept, parameters=xs)
    out.outputs.sum().backward()
    assert all(x.grad is not None for x in xs)


@pytest.mark.parametrize("where", ["output", "state", "nowhere"])
@alike
def test_an_input_returned_as_it_came(kept: bool, where: str) -> Tensors:
    net, x = Cell(), sequence(wants=True)

    def cell(state: Any, x: Tensor) -> Any:
        h, before = state
        h = torch.tanh(net.linear(h) + (before if where == "state" else 1))
        return (h, x if where == "state" else before), x if where == "output" else h * 2

    out = unrolled(cell, (zeros(), zeros()), x, kept)
    (out.outputs.square().sum() + out.state[0].sum() + out.state[1].sum()).backward()
    return gradients(net, x)


# -------------------------------------------------- decided at the first step


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("mode", ["stack", "sum", "last"])
@alike
def test_an_output_that_is_the_state_at_some_steps_only(
    kept: bool, mode: str, chunk: int
) -> Tensors:
    net = Cell()

    def cell(state: Any, x: Tensor) -> Any:
        h = torch.tanh(net.linear(state[0]) + x)
        return (h, state[1] + 1), h if state[1] < 11 else torch.zeros_like(h)

    start = zeros(), torch.zeros(())
    out = unrolled(cell, start, sequence(), kept, chunk, outputs=mode)
    (out.outputs.square().sum() + out.state[0].sum()).backward()
    return gradients(net)


@alike
def test_outputs_in_another_order_of_keys(kept: bool) -> Tensors:
    net = Cell()

    def cell(state: Any, x: Tensor) -> Any:
        h = torch.tanh(net.linear(state["h"]) + x)
        y = {"loss": h.sum(), "much": 1000 + h.square().sum()}
        if state["t"] > 5:
            y = {key: y[key] for key in ("much", "loss")}
            return {"t": state["t"] + 1, "h": h}, y
        return {"h": h, "t": state["t"] + 1}, y

    out = unrolled(cell, {"h": zeros(), "t": torch.zeros(())}, sequence(), kept)
    by_hand = torch.zeros(())
    state: Any = {"h": zeros(), "t": torch.zeros(())}
    torch.manual_seed(0)
    Cell()
    for x in sequence():
        state, y = cell(state, x)
        by_hand = by_hand + y["loss"]
    assert torch.equal(out.loss, by_hand)
    out.loss.backward()
    return [out.loss, *gradients(net)]


@pytest.mark.parametrize("mode", ["stack", "sum", "last"])
@alike
def test_one_tensor_twice_in_state_and_output(kept: bool, mode: str) -> Tensors:
    """Gradients of both places were added in another order."""
    net, h0 = Cell(), zeros().normal_().requires_grad_()

    def cell(state: Any, x: Tensor) -> Any:
        a, b = state
        h = torch.tanh(net.linear(a) * b.sigmoid() + net.linear(b) * 0.3 + x * a)
        return (h, h), (h, h, h)

    out = unrolled(cell, (h0, h0), sequence(), kept, outputs=mode)
    one, two, three = out.outputs
    loss = one.square().sum() + (two * out.state[0].exp()).sum() + three.cos().sum()
    (loss + out.state[1].sin().sum()).backward()
    return gradients(net, h0)


def test_a_leaf_that_joins_the_gradient_later_is_refused() -> None:
    weight = torch.randn(WIDTH, requires_grad=True)

    def late_state(state: Any, x: Tensor) -> Any:
        h, m, t = state
        h = torch.tanh(h * weight + x + m)
        return (h, m + h if t > 10 else m, t + 1), h * 2

    def late_loss(state: Any, x: Tensor) -> Any:
        h, m, t = state
        h = torch.tanh(h * weight + x)
        return (h, m, t + 1), h.sum() if t > 10 else torch.zeros(())

    start = zeros(), zeros(), torch.zeros(())

    def run(cell: Any) -> None:
        out = unrolled(cell, start, sequence(), False)
        (out.state[0].sum() + (out.loss if out.outputs is None else out.outputs.sum())).backward()

    refused(lambda _: run(late_state), "leaf 1 of the state of cell late_state", StateError)
    refused(lambda _: run(late_loss), "leaf 0 of y of cell late_loss", StateError)
    assert weight.grad is None

    def mended(kept: bool) -> Tensors:
        weight.grad = None
        start = zeros(), zeros().requires_grad_(), torch.zeros(())
        unrolled(late_state, start, sequence(), kept).outputs.sum().backward()
        return gradients(weight, start[1])

    assert_alike(mended)


def test_one_of_several_views_given_as_a_parameter() -> None:
    """The graph was cut at the node that both come from."""
    both = (torch.randn(2, WIDTH, requires_grad=True) * 2).unbind()

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h * both[0] + x) * both[1]

    with pytest.raises(ArgumentError, match="computed outside"):
        unrolled(cell, zeros(), sequence(), False, parameters=[both[0]])


@pytest.mark.parametrize("unequal", [None, True])
def test_backward_hooks_of_modules_do_not_see_measurements(unequal: bool | None) -> None:
    net, x, seen = Cell(), sequence(wants=True), []
    net.register_full_backward_hook(lambda *_: seen.append(1))
    unrolled(net, zeros(), x, False, unequal=unequal).outputs.sum().backward()
    assert len(seen) == STEPS


@pytest.mark.parametrize("unequal", [None, True])
@alike
def test_parameters_given_twice_or_frozen(kept: bool, unequal: bool | None) -> Tensors:
    """Each sum was handed over twice, and grew with every chunk."""
    net, frozen = Cell(), torch.ones(WIDTH)
    x = sequence(wants=True)

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return net(h, x * frozen)[0]

    every = [*net.parameters(), *net.parameters(), frozen]
    out = unrolled(cell, zeros(), x, kept, parameters=every, unequal=unequal)
    out.state.sum().backward()
    return gradients(net, frozen, x)


@alike
def test_a_parameter_that_retains_its_gradient(kept: bool) -> Tensors:
    """It held the sum of all partial sums."""
    leaf = torch.randn(WIDTH, WIDTH, requires_grad=True)
    weight = leaf * 2
    weight.retain_grad()
    out = unrolled(
        lambda h, x: torch.tanh(h @ weight + x), zeros(), sequence(), kept, parameters=[weight]
    )
    out.state.sum().backward()
    return gradients(leaf, weight)


# --------------------------------------------------------------- kinds of cells


@alike
def test_torch_func_inside_a_cell(kept: bool) -> Tensors:
    """It allows no hooks on saved tensors, with which tapes are measured."""
    net = Cell()

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        slope = torch.func.grad(lambda h: (torch.tanh(net.linear(h)) * x).sum())(h)
        h = h - 0.1 * slope
        return h, h.sum()

    out = unrolled(cell, zeros(), sequence(), kept, memory="1 MiB", tiers="memory:")
    out.loss.backward()
    return gradients(net)


@alike
def test_leaves_that_a_cell_makes_itself(kept: bool) -> Tensors:
    """They were taken for parameters that nobody told of."""
    net = Cell()

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            at = h if h.requires_grad else h.detach().requires_grad_()
            inner = (torch.tanh(net.linear(at)) * x).sum()
            (slope,) = torch.autograd.grad(inner, at, create_graph=True)
        return h - 0.1 * slope, h.sum()

    out = unrolled(cell, zeros(), sequence(), kept)
    out.state.sum().backward()
    return gradients(net)


@alike
def test_a_cell_that_runs_only_with_a_graph(kept: bool) -> Tensors:
    """`register_hook` raises where nothing requires a gradient."""
    net, x = Cell(), sequence(wants=True)

    def cell(h: Tensor, x: Tensor) -> Tensor:
        h = torch.tanh(net.linear(h) + x)
        h.register_hook(lambda gradient: gradient * 0.9)
        return h

    unrolled(cell, zeros(), x, kept).state.sum().backward()
    return gradients(net, x)


@dataclass
class Dataclass:
    """A cell that cannot be hashed."""

    weight: Tensor

    def __call__(self, h: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(h @ self.weight + x)


@alike
def test_a_dataclass(kept: bool) -> Tensors:
    cell = Dataclass(torch.randn(WIDTH, WIDTH, requires_grad=True))
    unrolled(cell, zeros(), sequence(), kept).state.sum().backward()
    return gradients(cell.weight)


def test_no_cell_is_kept_alive() -> None:
    """The table of plans held those that had no code of their own."""
    gone = []
    for make in (lambda w: Dataclass(w), lambda w: functools.partial(Dataclass(w))):
        cell = make(torch.randn(WIDTH, WIDTH, requires_grad=True))
        unrolled(cell, zeros(), sequence(), False).state.sum().backward()
        gone.append(weakref.ref(cell))
        del cell
    gc.collect()
    assert [reference() for reference in gone] == [None, None]


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of the compiler
@pytest.mark.parametrize("is_module", [True, False])
@alike
def test_a_compiled_cell(kept: bool, is_module: bool) -> Tensors:
    """By a compiler that makes the kernels of plain PyTorch."""
    net = Cell()
    call: Any = net if is_module else lambda state, x: net(state, x)
    cell = torch.compile(call, backend="aot_eager")
    unrolled(cell, zeros(), sequence(), kept).outputs.square().sum().backward()
    return gradients(net)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_a_cell_of_a_compiled_step() -> None:
    """Runs, and runs again, as it is written and was measured, and within the limit."""
    cell, found = nn.LSTMCell(32, 32), []
    xs, h, c = torch.randn(100, 8, 32), torch.zeros(8, 32), torch.zeros(8, 32)

    def step() -> None:
        out: Any = mst.unroll(lambda state, x: cell(x, state), (h, c), xs, memory="200 KiB")
        out.state[0].backward(torch.ones(8, 32))

    for run in (step, torch.compile(step, backend="aot_eager")):
        cell.zero_grad()
        run()
        found.append(gradients(cell))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))  # type: ignore[arg-type]


# ----------------------------------------------------------------- hidden state


class Net(nn.Module):
    """A part of the cells below, whose state counts the steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("kept", torch.zeros(BATCH, WIDTH))
        self.register_buffer("count", torch.ones(()))
        self.generator = torch.Generator()
        self.helper = SimpleNamespace(calls=0)
        self._memories: dict[str, Any] = {"v": torch.zeros(BATCH, WIDTH)}

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> Any:
        h = torch.tanh(self.linear(state[0]) + x)
        h = self.change(h, int(state[1]))
        return (h, state[1] + 1), h.square().sum()

    def change(self, h: Tensor, t: int) -> Tensor:
        raise NotImplementedError


class Helper(Net):
    def change(self, h: Tensor, t: int) -> Tensor:
        self.helper.calls += 1
        return h * (1 + 0.01 * self.helper.calls)


class Truncated(Net):
    """The numbers are the same, the graph is not."""

    def change(self, h: Tensor, t: int) -> Tensor:
        self.helper.calls += 1
        return h.detach() if self.helper.calls % 5 == 0 else h


class OfClass(Net):
    calls = 0

    def change(self, h: Tensor, t: int) -> Tensor:
        if t > 6:
            OfClass.calls += 1
        return h * (1 + 0.01 * OfClass.calls)


class Spiking(Net):
    def change(self, h: Tensor, t: int) -> Tensor:
        self._memories["v"] = 0.9 * self._memories["v"] + h
        return torch.tanh(self._memories["v"])


class Membrane(Net):
    def change(self, h: Tensor, t: int) -> Tensor:
        self.kept = 0.9 * self.kept + h
        return torch.tanh(self.kept)


class LateMembrane(Net):
    def change(self, h: Tensor, t: int) -> Tensor:
        new = 0.9 * self.kept + h
        self.kept = new if t > 6 else new.detach()
        return torch.tanh(new)


class LateBuffer(Net):
    def change(self, h: Tensor, t: int) -> Tensor:
        h = h * self.count
        if t > 6:
            self.count += 0.1
        return h


class LateDraws(Net):
    def change(self, h: Tensor, t: int) -> Tensor:
        return h * torch.rand(WIDTH) if t > 6 else h


class LateNumPy(Net):
    def change(self, h: Tensor, t: int) -> Tensor:
        return h * float(np.random.rand()) if t > 6 else h


class AllGenerators(Net):
    def change(self, h: Tensor, t: int) -> Tensor:
        own = torch.rand(WIDTH, generator=self.generator)
        return h * own * (float(np.random.rand()) + random.random())


class TwoNorms(Net):
    """One buffer of two modules."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.register_buffer("count", self.count)

    def change(self, h: Tensor, t: int) -> Tensor:
        self.count.add_(1)
        inner: Tensor = self.inner.count  # type: ignore[assignment]
        return h * self.count.clone() / inner.add_(1).clone()


class Normed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def change(self, h: Tensor, t: int) -> Tensor:
        return self.norm(h)  # type: ignore[no-any-return]


def by_planner(make: Callable[[], Net], planner: str, wrapped: bool) -> list[Any]:
    """Return loss, gradients, buffers, and what the generators give next."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    net, xs = make(), sequence()
    net.generator.manual_seed(1)
    cell: Any = (lambda state, x: net(state, x)) if wrapped else net
    state: Any = zeros(), torch.zeros(())
    if planner == "plain":
        loss = torch.zeros(())
        for x in xs:
            state, step_loss = cell(state, x)
            loss = loss + step_loss
    else:
        chunk = None if planner == "keep" else 3
        out = mst.unroll(cell, state, xs, planner=planner, chunk=chunk)  # type: ignore[arg-type]
        assert out.loss is not None
        loss = out.loss
    loss.backward()
    drawn = [
        torch.rand(1),
        random.random(),
        np.random.rand(),
        torch.rand(1, generator=net.generator),
    ]
    return [loss, *gradients(net), *net.buffers(), *(torch.as_tensor(d) for d in drawn)]


@pytest.mark.parametrize("planner", ["keep", "recompute"])
@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("kind", [AllGenerators, TwoNorms, Normed])
def test_generators_and_buffers_are_as_in_plain_training(
    kind: type[Net], wrapped: bool, planner: str
) -> None:
    """Also of a module that a function refers to."""
    for a, b in zip(*(by_planner(kind, s, wrapped) for s in ("plain", planner)), strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Helper, r"changes .*helper.* \(in its first step\).*return it in the state"),
        (Truncated, r"changes .*helper"),
        (OfClass, r"changes class attribute 'OfClass.calls' when it runs \(at steps 6 to 8\)"),
        (Spiking, r"changes .*_memories'\['v'\].*return it in the state"),
        (Membrane, r"keeps a tensor with a graph in buffer 'kept' of Membrane"),
        (LateMembrane, r"keeps a tensor with a graph in buffer 'kept' of LateMembrane \(at steps"),
        (LateBuffer, r"results depend on buffer '.*count', which changes at later steps"),
        (LateDraws, r"draws from torch's generator of cpu at steps .*random=True"),
        (LateNumPy, r"draws from NumPy's generator.* at steps .*random=True"),
    ],
)
def test_hidden_state_is_refused(kind: type[Net], message: str, wrapped: bool) -> None:
    """Its gradient was 5 to 67 % off."""
    OfClass.calls = 0
    with pytest.raises(StateError, match=message):
        by_planner(kind, "recompute", wrapped)


def test_late_draws_are_exact_with_random_true() -> None:
    torch.manual_seed(0)
    net, xs = LateDraws(), sequence()
    losses = []
    for planner in ("keep", "recompute"):
        torch.manual_seed(1)
        out = mst.unroll(
            net,
            (zeros(), torch.zeros(())),
            xs,
            planner=planner,
            chunk=3,
            random=True,  # type: ignore[arg-type]
        )
        net.zero_grad()
        assert out.loss is not None
        out.loss.backward()
        losses.append([out.loss, *gradients(net), torch.rand(1)])
    for a, b in zip(*losses, strict=True):
        assert (a is None and b is None) or torch.equal(a, b)


class Unseen:
    """State in an object that nothing can look into."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def __call__(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h * 0.5 + x) * (1 + 0.01 * max(0, next(self._numbers) - 200))
        return h, h.sum()


def test_hidden_state_is_found_by_its_results() -> None:
    h = zeros().requires_grad_()
    x = torch.randn(200, BATCH, WIDTH)
    out = unrolled(Unseen(), h, x, False)
    with pytest.raises(StateError, match="returned other numbers at steps"):
        out.loss.backward()
    assert h.grad is None
    out = unrolled(Unseen(), h, x, False, check="warn")
    with pytest.warns(DifferenceWarning, match="returned other numbers at steps") as warned:
        out.loss.backward()
    assert len(warned) == 1
    unrolled(Unseen(), h, x, False, check="off").loss.backward()
    with pytest.raises(ArgumentError, match="check='no' is not known"):
        unrolled(Unseen(), h, sequence(), False, check="no")


@pytest.mark.parametrize("chunk", [1, 3])
@pytest.mark.parametrize("mode", ["stack", "sum", "last"])
@alike
def test_a_state_that_stays_where_a_sequence_has_ended(
    kept: bool, mode: str, chunk: int
) -> Tensors:
    """The very same tensor over many steps, an output at each: all those gradients come first."""
    net = Cell()

    def cell(state: Any, x: Tensor) -> Any:
        h, t = state
        if int(t) % 5 in (0, 1):
            h = torch.tanh(net.linear(h) + x)
        return (h, t + 1), (h, h * 2)

    start = zeros().normal_().requires_grad_(), torch.zeros(())
    out = unrolled(cell, start, sequence(), kept, chunk, outputs=mode)
    one, two = out.outputs
    loss = (one * torch.randn_like(one)).sum() + two.square().sum()
    (loss + out.state[0].sin().sum()).backward()
    return gradients(net, start[0])


def test_cells_that_write_to_their_outputs_are_refused() -> None:
    class Reused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("room", torch.zeros(BATCH, WIDTH))

        def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(h + x)
            with torch.no_grad():
                self.room.copy_(h)  # type: ignore[operator, union-attr]
            return h, self.room  # type: ignore[return-value]

    before: list[Tensor] = [zeros()]

    def later(state: Any, x: Tensor) -> Any:
        h = torch.tanh(state[0] + x)
        with torch.no_grad():
            if state[1] > 5:
                before[0].zero_()
        y = before[0] = torch.ones_like(h)
        return (h, state[1] + 1), y

    h = zeros().requires_grad_()
    with pytest.raises(StateError, match="returns a buffer that it changes in y"):
        unrolled(Reused(), h, sequence(), False)
    with pytest.raises(StateError, match=r"changes variable 'before'|writes to an output"):
        unrolled(later, (h, torch.zeros(())), sequence(), False)


def test_backward_inside_a_cell_is_refused() -> None:
    """It added to `.grad` once more in each run; nothing of it is left now."""
    net, other = Cell(), nn.Linear(WIDTH, WIDTH)

    def cell(h: Tensor, x: Tensor) -> Any:
        with torch.enable_grad():
            other(x).sum().backward()
        return net(h, x)

    other.weight.grad = torch.ones(WIDTH, WIDTH)
    with pytest.raises(StateError, match=r"calls backward.*torch.autograd.grad"):
        unrolled(cell, zeros(), sequence(), False)
    assert torch.equal(other.weight.grad, torch.ones(WIDTH, WIDTH))
    assert other.bias.grad is None


@pytest.mark.parametrize("steps", [1, 2, 9])
@pytest.mark.parametrize("mode", ["stack", "sum", "last"])
@alike
def test_parameters_and_inputs_as_outputs(kept: bool, mode: str, steps: int) -> Tensors:
    """Gradients of outputs come before those of uses; the sum of one is that one."""
    net, weight, x = Cell(), zeros().normal_().requires_grad_(), zeros().normal_()
    x.requires_grad_()

    def cell(h: Tensor, x: Tensor) -> Any:
        h = torch.tanh(net.linear(h) * weight) + x
        return h, (x, weight, h)

    out = unrolled(cell, zeros(), [x] * steps, kept, 4, outputs=mode)
    one, two, three = out.outputs
    loss = (one * torch.randn_like(one)).sum() + (two * torch.randn_like(two)).sum()
    (loss + 0.3 * three.square().sum() + out.state.square().sum()).backward()
    return gradients(net, weight, x)


class Deep(nn.Module):
    """Several layers a step, whose parameters are larger than its state."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64) for _ in range(6)])

    def forward(self, h: Tensor, x: None) -> Tensor:
        for layer in self.layers:
            h = torch.tanh(layer(h))
        return h


@pytest.mark.parametrize("unequal", [None, True])
def test_sums_of_gradients_are_held_once(unequal: bool | None) -> None:
    """A sum so far is freed, or added to in place, as soon as more is added to it."""
    cell, h = Deep(), torch.zeros(2, 64)
    layer = 4 * 64 * 65
    with Meter(torch.device("cpu")) as meter:
        meter.ignore([h, *cell.parameters()])
        out = mst.unroll(cell, h, None, n_steps=20, memory=4 * layer, chunk=1, unequal=unequal)
        out.state.sum().backward()
    assert out.plan is not None and out.plan.memory_bytes == 4 * layer
    assert meter.peak_bytes <= (4 + 6) * layer


def test_a_limit_holds_where_state_0_wants_no_gradient() -> None:
    """The steps after it save what the first one need not."""
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        gate = torch.sigmoid(x.repeat(1, 40))
        wide = (h.repeat(1, 40) * gate).view(BATCH, 40, WIDTH)
        h = torch.tanh(wide.mean(1) @ weight)
        return h, h.square().mean()

    x = torch.randn(60, BATCH, WIDTH)
    for chunk in (1, None):
        with pytest.raises(BudgetError) as refused:
            mst.unroll(cell, zeros(), x, memory=1, chunk=chunk)
        limit = refused.value.least_bytes
        assert limit is not None
        with Meter(torch.device("cpu")) as meter:
            meter.ignore([x, weight])
            mst.unroll(cell, zeros(), x, memory=2 * limit, chunk=chunk).loss.backward()
            assert meter.peak_bytes <= 2 * limit + weight.nbytes + 1024  # and losses


def test_autocast_inside_of_a_cell_keeps_its_cache() -> None:
    """A weight that is used twice is cast once, and its gradient added in the lower precision."""
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def cell(h: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = h @ weight + x @ weight
        return torch.tanh(y.float())

    x, found = torch.randn(12, BATCH, WIDTH), []
    for planner in ("keep", "recompute"):
        out = mst.unroll(cell, zeros(), x, planner=planner, memory="1 MiB", chunk=3)
        found += torch.autograd.grad(out.state.sum(), weight)
    h = zeros()
    for t in range(12):
        h = cell(h, x[t])
    found += torch.autograd.grad(h.sum(), weight)
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])


def test_equal_and_unequal_steps_have_rates_of_a_tier_of_their_own() -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ weight + x)
        return h, h.square().mean()

    x, tiers = torch.randn(60, BATCH, WIDTH), "memory:?buffers=1MiB"
    how: Any = {"memory": "2 MiB", "tiers": tiers, "planner": "stream", "chunk": 2}
    for unequal in (None, True, None):
        out = mst.unroll(cell, zeros(), x, unequal=unequal, **how)
        assert out.plan is not None and out.plan.planner == "stream"
        out.loss.backward()


def test_a_leaf_of_the_state_that_loses_its_gradient_moves_no_adjoint_of_the_check() -> None:
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def cell(state: Any, x: Tensor) -> Any:
        h, old = state
        new = torch.tanh(h @ weight + x + old)
        return (h.detach(), new), new.sum(1)

    start = zeros().requires_grad_(), zeros()
    out = mst.unroll(
        cell, start, torch.randn(20, BATCH, WIDTH), planner="recompute", memory="1 MiB"
    )
    assert out.plan is not None and out.plan.checked is not None
    assert out.plan.checked.outcome == "equal"


def test_chunks_that_are_run_with_a_graph_hold_that_of_one() -> None:
    weight, h = torch.randn(16, 16, requires_grad=True), torch.zeros(32, 16, requires_grad=True)

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(h @ weight)
        h = torch.sigmoid(h + x).repeat(3, 1)[:32] * h
        return h, h.square().mean()

    x, limit = torch.randn(200, 32, 16), 60_000
    mst.unroll(cell, h, x, memory=limit, chunk=3)  # planned
    for _ in range(3):
        with Meter(torch.device("cpu")) as meter:
            meter.ignore([x, weight, h])
            mst.unroll(cell, h, x, memory=limit, chunk=3).loss.backward()
        weight.grad = h.grad = None
        assert meter.peak_bytes <= limit + weight.nbytes + h.nbytes + 1024


def test_a_graph_that_the_first_step_lacks_is_not_estimated_without_bound() -> None:
    linear = nn.Linear(96, 96)

    def cell(h: Tensor, x: Tensor) -> Tensor:
        return h if float(x.sum()) == 0 else torch.tanh(linear(h) + x)

    x = torch.randn(17, 64, 96)
    x[:3] = 0  # padding
    start = torch.zeros(64, 96, requires_grad=True)
    how: Any = {"planner": "recompute", "chunk": 1, "outputs": None}
    mst.unroll(cell, start, x, memory="2 MiB", **how).state.sum().backward()
    with pytest.raises(BudgetError, match=r"about \d{6} bytes in all"):
        mst.unroll(cell, start, x, memory=300_000, **how).state.sum().backward()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of TorchDynamo
def test_operators_that_run_functions_are_refused_in_cells_and_stages() -> None:
    linear, x = nn.Linear(4, 4), torch.randn(6, 2, 4)

    def branch(h: Tensor, x_t: Tensor) -> Tensor:
        found: Tensor = torch.cond(h.sum() > 0, torch.sin, torch.cos, (linear(h) + x_t,))
        return found

    with pytest.raises(ArgumentError, match="inside of torch's operator 'cond'"):
        mst.unroll(branch, x[0], x, outputs=None, parameters=list(linear.parameters()))
    with pytest.raises(ArgumentError, match="inside of torch's operator 'cond'"):
        mst.Sequential([lambda h: branch(h, x[0])] * 4, x[0], memory=0.8)
