"""The check of a chain against its model: what it finds, what it leaves, what it takes."""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import multistage.torch as mst
from multistage.errors import ArgumentError, DifferenceWarning, StateError
from multistage.torch.measurement.checking import Both, Checked, check_chain, room_for_tapes
from multistage.torch.measurement.measure import measure_stages
from multistage.torch.measurement.plainly import TooDear, Windowed
from multistage.torch.tensors.checksums import same_bits
from multistage.torch.tensors.meter import Meter

WIDTH = 16
Call = Callable[[Any], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.norm(self.linear(x)))


def a_model(depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(depth)))


def checked(model: Call, chain: Call, x: Any, stages: Any = None, **more: Any) -> Checked:
    how: dict[str, Any] = {"name": "Model", "room_bytes": 1e9, "writes": False, "check": "error"}
    stages = [model] if stages is None else stages
    return check_chain(model, chain, x, stages=stages, **{**how, **more})


class Scaled(torch.autograd.Function):
    """The identity with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * (1 + 2**-20)


def _another_output(model: nn.Sequential, x: Tensor) -> Tensor:
    x = model[1](model[0](x)) * (1 + 2**-20)
    return model[3](model[2](x))


def _another_gradient(model: nn.Sequential, x: Tensor) -> Tensor:
    x = Scaled.apply(model[1](model[0](x)))
    return model[3](model[2](x))


def _a_count_less(model: nn.Sequential, x: Tensor) -> Tensor:
    x = model(x)
    model[2].norm.num_batches_tracked -= 1
    return x


def _an_attribute(model: nn.Sequential, x: Tensor) -> Tensor:
    model[3].calls += 1
    return model(x)


def _a_helper(model: nn.Sequential, x: Tensor) -> Tensor:
    model.helper["count"].append(1)
    return model(x)


def _a_draw(model: nn.Sequential, x: Tensor) -> Tensor:
    torch.rand(1)
    return model(x)


def _python_draws(model: nn.Sequential, x: Tensor) -> Tensor:
    random.random()
    return model(x)


def _a_detached_input(model: nn.Sequential, x: Tensor) -> Tensor:
    return model(x.detach())


@pytest.mark.parametrize(
    ("chain", "message"),
    [
        (
            _another_output,
            r"output 0.* first at the output of module '2\.linear', Linear \(the las",
        ),
        (_another_gradient, r"does: the gradient of .*2 more|the gradient of 1\..* and \d+ more"),
        (_a_count_less, r"does: buffer '2\.norm\.num_batches_tracked' differs"),
        (_an_attribute, r"does: attribute '3\.calls' differs"),
        (_a_helper, r"does: attribute 'helper'\['count'\], .*'helper'\['count'\]\[0\] differ"),
        (_a_draw, r"does: torch's generator of cpu differs"),
        (_python_draws, r"does: Python's generator \(random\) differs"),
        (_a_detached_input, r"does: the gradient of input 0 differs"),
    ],
)
def test_a_difference_is_named(chain: Call, message: str) -> None:
    model, x = a_model(), torch.randn(8, WIDTH, requires_grad=True)
    model.helper = {"count": []}
    with pytest.raises(StateError, match=message):
        checked(model, lambda given: chain(model, given), x)
    with pytest.warns(DifferenceWarning, match=message):
        found = checked(model, lambda given: chain(model, given), x, check="warn")
    assert found.outcome.startswith("differs: the chain does not do what Model does")


def test_a_chain_that_ran_with_the_same_results_is_not_run_again() -> None:
    model, x = a_model(), torch.randn(8, WIDTH, requires_grad=True)
    runs: list[Tensor] = []

    def chain(given: Tensor) -> Tensor:
        runs.append(given)
        return model(given)

    _, ran = Both([model], x, False, 0.0).metered(chain, Meter(torch.device("cpu")))
    assert {"output 0", "the gradient of input 0", "the gradient of 0.linear.weight"} < ran.keys()
    assert "buffer '0.norm.running_mean'" in ran
    runs.clear()
    assert checked(model, chain, x, ran=ran).outcome == "equal"
    assert not runs
    for key in ran:  # whatever was other may have been so for being metered
        assert checked(model, chain, x, ran={**ran, key: runs}).outcome == "equal"
    assert len(runs) == len(ran)
    with pytest.raises(StateError, match="the gradient of"):
        checked(model, lambda given: _another_gradient(model, given), x, ran={})


@pytest.mark.parametrize("room_bytes", [float("inf"), 3000])
def test_the_check_restores_everything(room_bytes: float) -> None:
    model = a_model()
    model.add_module("drop", nn.Dropout(0.5))
    model.helper = {"count": [], "of": {1}}
    model.own = torch.Generator().manual_seed(4)
    x = torch.randn(8, WIDTH, requires_grad=True)
    fired: list[str] = []
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.register_hook(lambda _g: fired.append("hook"))
        parameter.register_post_accumulate_grad_hook(lambda _p: fired.append("post"))
    model[1].register_full_backward_hook(lambda *_: fired.append("full"))
    x.register_hook(lambda _g: fired.append("input"))

    def run(given: Tensor) -> Tensor:
        model.helper["count"].append(random.random())
        model.helper["of"].add(2)
        model.cached = given
        model[0].calls += 1
        return model(given) + torch.rand(WIDTH, generator=model.own)

    state = {name: value.clone() for name, value in model.state_dict().items()}
    random.seed(1)
    torch.manual_seed(1)
    before = torch.get_rng_state(), random.getstate(), model.own.get_state()
    found = checked(run, run, x, [model], room_bytes=room_bytes)
    assert found.outcome == "equal"
    assert found.seconds > 0
    assert fired == []
    assert x.grad is None
    assert all(torch.equal(p.grad, torch.ones_like(p)) for p in model.parameters())
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert model.helper == {"count": [], "of": {1}}
    assert model[0].calls == 0
    assert not hasattr(model, "cached")
    after = torch.get_rng_state(), random.getstate(), model.own.get_state()
    assert torch.equal(before[0], after[0])
    assert before[1] == after[1]
    assert torch.equal(before[2], after[2])
    model(x).sum().backward()
    assert sorted(set(fired)) == ["full", "hook", "input", "post"]


def test_hidden_state_is_distinguished_from_rounding() -> None:
    model, x = a_model(), torch.randn(8, WIDTH)
    hidden = torch.Generator().manual_seed(0)

    def noisy(size: float, given: Tensor) -> Tensor:
        return model(given) + size * torch.randn(8, WIDTH, generator=hidden)

    def with_operator(size: float, given: Tensor) -> Tensor:
        twice = torch.tensor([1, 1])  # which of two writes is last is not said
        torch.zeros(5).put_(twice, torch.ones(2))
        return noisy(size, given)

    def check(call: Call) -> Checked:
        return checked(call, call, x, [model])

    for size in (0.1, 1e-3, 1e-7):  # behind a norm a counter is felt no more than that
        with pytest.raises(StateError, match="Model returns other numbers each time it is run"):
            check(functools.partial(noisy, size))
    with pytest.raises(StateError, match="Model returns other numbers each time it is run"):
        check(functools.partial(with_operator, 1e-3))
    found = check(functools.partial(with_operator, 1e-7))
    assert found.outcome.startswith("agrees to rounding")
    assert not torch.are_deterministic_algorithms_enabled()


def test_windows_are_deterministic_where_the_run_is() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), torch.randn(8, WIDTH)
    hidden = torch.Generator().manual_seed(0)

    def varying(given: Tensor) -> Tensor:  # as operators that add in any order, unless told not to
        size = 0.0 if torch.are_deterministic_algorithms_enabled() else 1e-7
        return model(given + size * torch.randn(8, WIDTH, generator=hidden))

    found = checked(varying, varying, x, [model], room_bytes=1)
    assert found.outcome.startswith("agrees to rounding")


def test_gradients_that_cannot_be_compared_alone_are_left_out() -> None:
    model, x = a_model(), torch.randn(8, WIDTH, requires_grad=True)

    def reentrant(given: Tensor) -> Tensor:
        return model[1:](checkpoint(model[0], given, use_reentrant=True))

    found = checked(reentrant, reentrant, x, [model])
    assert found.outcome.startswith("equal; gradients not compared, reentrant checkpoint")
    assert all(p.grad is None for p in model.parameters())


def test_a_model_that_plain_training_refuses_is_not_judged() -> None:
    model, x = a_model(), torch.randn(8, WIDTH, requires_grad=True)

    def overwritten(given: Tensor) -> Tensor:
        y = model(given).exp()
        y.add_(1)
        return y

    found = checked(overwritten, overwritten, x, [model])
    assert found.outcome.startswith("not checked; plain training of Model fails: a tensor saved")


# ------------------------------------------------------------------ the plain run in windows


@pytest.mark.parametrize("room_bytes", [1, 1000, 3000, 1e9])
def test_windows_give_plain_gradients(room_bytes: float) -> None:
    model, x = a_model(6), torch.randn(8, WIDTH, requires_grad=True)
    model.eval()

    def call() -> Tensor:  # its last kernel fills what is saved already
        torch.manual_seed(0)
        return nn.functional.rrelu(model(x), training=True)

    run = Windowed(call, nullcontext, room_bytes, model.parameters())
    wanted = [x, *model.parameters()]
    y = run.forward()
    found = torch.autograd.grad(y.square().sum(), wanted)
    for a, b in zip(found, torch.autograd.grad(call().square().sum(), wanted), strict=True):
        assert torch.equal(a, b)
    assert (run.runs == 1) == (room_bytes == 1e9)


def test_too_small_a_room_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multistage.torch.measurement.checking._SECONDS", 0)
    model, x = a_model(6), torch.randn(8, WIDTH, requires_grad=True)
    run = Windowed(lambda: model(x), nullcontext, 1)
    y = run.forward()
    run.most_runs = 3
    with pytest.raises(TooDear):
        y.sum().backward()
    found = checked(model, model, x, room_bytes=1)
    assert found.outcome.startswith("equal; gradients not compared, the limit")
    with pytest.raises(StateError, match="output 0"):
        checked(model, lambda given: _another_output(model, given), x, room_bytes=1)


@pytest.mark.parametrize("room_bytes", [1e9, 2000, 1])
def test_a_model_may_differentiate_in_its_forward(room_bytes: float) -> None:
    model, x = a_model(), torch.randn(8, WIDTH, requires_grad=True)

    def penalised(given: Tensor) -> Tensor:
        inner = given.detach().requires_grad_()
        (slope,) = torch.autograd.grad(model(inner).exp().sum(), inner)
        return model(given) + slope

    found = checked(penalised, penalised, x, [model], room_bytes=room_bytes)
    assert (found.outcome == "equal") == (room_bytes == 1e9)
    assert found.outcome == "equal" or found.outcome.startswith("not checked; forward diff")


@pytest.mark.parametrize("share", [1.0, 0.7, 0.5, 0.3])
def test_the_check_stays_within_the_limit(share: float) -> None:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(12)]
    model, x = nn.Sequential(*layers), torch.randn(256, 64, requires_grad=True)
    profile = measure_stages(list(model), [str(n) for n in range(12)], x, seconds=0)
    chain = mst.Sequential(model, memory=share, costs=profile.costs)
    plan = chain.prepare(x)
    with Meter(torch.device("cpu")) as meter:
        meter.ignore([x, *chain.parameters()])
        room_bytes = room_for_tapes(profile, list(model), plan.memory_bytes)
        found = checked(model, chain, x, room_bytes=room_bytes)
    assert found.outcome == "equal"
    assert plan.memory_bytes is not None
    assert meter.peak_bytes + x.nbytes <= plan.memory_bytes


# ------------------------------------------------------------------------ by Sequential


class Counting(nn.Module):
    """Does something else each time, by state in an object no one looks into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        counts = iter(range(1, 10**6))
        self.count = lambda: next(counts)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) * self.count())


def test_a_chain_is_checked_once_per_kind_of_input() -> None:
    model, x = a_model(8), torch.randn(8, WIDTH)
    chain = mst.Sequential(model, memory=0.6)
    assert chain.checked is None
    chain(x).sum().backward()
    first = chain.checked
    assert first.outcome == "equal" and first.seconds > 0
    chain(x).sum().backward()
    assert chain.checked is first
    chain(torch.randn(4, WIDTH)).sum().backward()
    assert chain.checked is not first
    chain(x)
    assert chain.checked is first


def test_a_stage_with_hidden_state_is_refused() -> None:
    model, x = nn.Sequential(*(Counting() for _ in range(12))), torch.randn(8, WIDTH)
    for memory in (0.6, None):  # and where every tape is kept: profiling has run the stages
        chain = mst.Sequential(model, memory=memory)
        for _ in range(2):  # nothing is remembered of the first
            with pytest.raises(StateError, match="returns other numbers each time it is run"):
                chain(x)
            assert chain.plan is None and chain.checked is None
    with pytest.warns(DifferenceWarning, match="returns other numbers each time it is run"):
        chain = mst.Sequential(model, x, memory=0.7, check="warn")
    assert str(chain.checked).startswith("differs: ")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert str(mst.Sequential(model, x, memory=0.7, check="off").checked) == "off"


def test_computed_parameters_keep_their_graph() -> None:
    model, x = a_model(8), torch.randn(8, WIDTH)
    chain = mst.Sequential(model, memory=0.7)
    scale = torch.ones((), requires_grad=True)
    computed = {name: p * scale.exp() for name, p in chain.named_parameters()}
    torch.func.functional_call(chain, computed, (x,)).sum().backward()
    assert chain.checked.outcome == "equal"
    assert scale.grad is not None


def test_a_check_that_fails_leaves_hooks() -> None:
    x, other = torch.randn(3, requires_grad=True), torch.randn(3)
    seen: list[Tensor] = []
    x.register_hook(seen.append)
    found = checked(torch.clone, torch.clone, x, [], targets=[x, other])
    assert found.outcome.startswith("not checked")
    x.sum().backward()
    assert len(seen) == 1


def test_another_value_of_check_is_refused() -> None:
    with pytest.raises(ArgumentError, match="check='maybe' is not known"):
        mst.Sequential(a_model(), check="maybe")


# ---------------------------------------------------------------------------- by unroll


class Cell(nn.Module):
    def __init__(self, count: Callable[[], float] = lambda: 1.0) -> None:
        super().__init__()
        self.into, self.count = nn.Linear(WIDTH, WIDTH), count

    def forward(self, state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(state + self.into(x)) * self.count()
        return state, state.square().mean()


def test_a_cell_is_checked_once_per_kind() -> None:
    calls: list[int] = []
    cell, x = Cell(), torch.randn(40, 8, WIDTH, requires_grad=True)
    x.register_hook(lambda _g: calls.append(1))
    cell.into.weight.register_hook(lambda _g: calls.append(1))

    def run(**more: Any) -> Any:
        return mst.unroll(
            cell, torch.zeros(8, WIDTH), x, memory=0.3, planner="recompute", chunk=4, **more
        )

    first = run().plan.checked
    assert first.outcome == "equal" and first.seconds > 0
    assert "Checked against plain autograd: equal" in str(run().plan)
    assert run().plan.checked is first
    assert run(check="off").plan.checked == Checked("off")
    assert calls == [] and cell.into.weight.grad is None
    with pytest.raises(ArgumentError, match="check='maybe'"):
        run(check="maybe")


def test_what_a_sequence_comes_from_is_left_alone() -> None:
    """Inputs and parameters may have graphs of their own, whose backward comes later."""
    cell, w = Cell(), torch.randn(WIDTH, requires_grad=True)
    x = (torch.randn(20, 8, WIDTH) * w).exp()
    out = mst.unroll(cell, torch.zeros(8, WIDTH), x, memory=0.3, planner="recompute", chunk=2)
    assert out.plan.checked.outcome == "equal"
    out.loss.backward()
    assert w.grad is not None


def test_a_cell_with_hidden_state_is_refused() -> None:
    counts = iter(range(1, 10**6))
    cell, x = Cell(lambda: 1 + 0.001 * next(counts)), torch.randn(44, 8, WIDTH)

    def run(**more: Any) -> Any:
        return mst.unroll(
            cell, torch.zeros(8, WIDTH), x, memory=0.3, planner="recompute", chunk=4, **more
        )

    with pytest.raises(StateError, match=r"cell Cell return.* other numbers"):
        run()


def test_bits_are_compared_not_values() -> None:
    x = torch.tensor([[1.0, -0.0], [float("nan"), 3.0]])
    others = [
        x.double(),
        x.reshape(-1),
        torch.tensor([[1.0, 0.0], [float("nan"), 3.0]]),
        x.to_sparse(),
    ]
    assert same_bits(x, x.clone()) and same_bits(x.t(), x.clone().t())
    assert same_bits(torch.ones(()), torch.ones(())) and same_bits(x.to_sparse(), x.to_sparse())
    assert not any(same_bits(x, other) for other in others)
    z = torch.tensor([1 + 2j])
    assert same_bits(z.conj(), z.conj()) and not same_bits(z, z.conj())
    zeros, ones = torch.zeros(()), torch.ones(())
    for size in (1, 4):
        assert same_bits(ones.expand(size), ones.expand(size))
        assert not same_bits(ones.expand(size), zeros.expand(size))
    assert not same_bits(torch.arange(6)[::2], torch.arange(6)[1::2])


class _Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.full((1,), 2.0).expand(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * self.scale


def test_models_with_expanded_buffers_are_checked() -> None:
    stages = nn.Sequential(*[_Expanded() for _ in range(4)])
    chain = mst.Sequential(stages, torch.ones(16, 8), memory=0.8)
    assert chain.checked.outcome == "equal"
