"""Stages that run again find the environment they first ran in, or an error names what changed."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import multistage.torch as mst
from multistage.errors import StateError
from multistage.model.stages import Stage, StageCosts

WIDTH = 8
Call = Callable[[Any], Any]


def recomputed(stages: Any, x: Any, check: Any = "error") -> mst.Sequential:
    """Return a chain in which nearly all stages run again: by costs that say tapes are large."""
    count = len(mst.profile(stages, x, seconds=0.0).stages)
    costs = StageCosts(tuple(Stage(str(i), 1.0, 1.0, 1, 100, 1) for i in range(count)), 1, 1)
    chain = mst.Sequential(stages, x, costs=costs, memory=130, check=check)
    assert not chain.plan.keeps_all
    return chain


def net(layers: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    pairs = ((nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(layers))
    return nn.Sequential(*(layer for pair in pairs for layer in pair))


def gradients(
    call: Call, x: Any, tensors: Sequence[Tensor], between: Callable[[], object] = lambda: None
) -> list[Tensor | None]:
    """Return the gradients of some tensors; `between` runs between forward and backward."""
    for tensor in tensors:
        tensor.grad = None
    y = call(x)
    loss = (y[0] if isinstance(y, tuple) else y).square().sum()
    between()
    loss.backward()
    return [t.grad for t in tensors]


def assert_equal(ones: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> None:
    for a, b in zip(ones, others, strict=True):
        assert (a is None) == (b is None)
        assert a is None or b is None or torch.equal(a, b)


def assert_alike(
    make: Callable[[], nn.Module], x: Any, between: Callable[[nn.Module], object] = lambda _: None
) -> mst.Sequential:
    """Train plainly and with stages that run again; gradients and buffers are equal."""
    plain, given = make(), make()
    chain = recomputed(given, x)
    for _ in range(2):
        found = []
        for model in (plain, chain):
            parameters = list(model.parameters())
            torch.manual_seed(5)
            random.seed(5)
            np.random.seed(5)
            grads = gradients(model, x, parameters, functools.partial(between, model))
            after = torch.tensor([torch.rand(()).item(), random.random(), np.random.randn()])
            found.append([*grads, *(b.clone() for b in model.buffers()), after])
        assert_equal(*found)
    return chain


@pytest.mark.parametrize("change", ["in place", "double", "data"])
def test_a_parameter_that_was_written_to_is_named(change: str) -> None:
    x = torch.randn(4, WIDTH)
    chain = recomputed(net(), x)
    loss = chain(x).square().sum()
    weight = chain[0].weight
    with torch.no_grad():
        if change == "in place":
            weight.add_(1)
        elif change == "double":
            chain.double()
        else:
            weight.data = weight.data + 1
    with pytest.raises(StateError, match=r"parameter '(weight|bias)' of stage .* Linear"):
        loss.backward()


# ------------------------------------------------------------------- aliases


class Averaging(nn.Module):
    """Scales by a buffer that it moves before, as other modules may do."""

    def __init__(self, buffer: Tensor) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("average", buffer)
        self.average: Tensor
        self.moving = True

    def forward(self, x: Tensor) -> Tensor:
        if self.moving:
            with torch.no_grad():
                self.average += 0.1
        return torch.tanh(self.linear(x) * self.average.clone())


def averaging(whole: Tensor, parts: bool) -> nn.Module:
    torch.manual_seed(0)
    ones = [Averaging(whole[0] if parts else whole) for _ in range(4)]
    return nn.Sequential(nn.Sequential(*ones[:2]), nn.Tanh(), nn.Sequential(*ones[2:]))


def averaging_last() -> nn.Module:
    torch.manual_seed(0)
    buffer = torch.ones(WIDTH)
    model = nn.Sequential(*(Averaging(buffer) for _ in range(4)))
    for module in list(model)[:3]:
        module.moving = False
    return model


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, 2)

    def forward(self, given: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        y = self.inner(*given, need_weights=False)[0]
        return y, y, y


def four(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for _ in range(4)))


@pytest.mark.parametrize(
    "make",
    [
        lambda: averaging(torch.ones(2, WIDTH), parts=False),
        lambda: averaging(torch.ones(2, WIDTH), parts=True),
        averaging_last,
    ],
    ids=["one buffer", "parts of one buffer", "a later stage"],
)
def test_stages_run_again_as_in_plain_training(make: Callable[[], nn.Module]) -> None:
    assert_alike(make, torch.randn(2, WIDTH))


def test_a_tensor_that_comes_twice_comes_twice_again() -> None:
    """Attention computes another way where query and key are one tensor."""
    x = torch.randn(3, 2, WIDTH)
    assert_alike(lambda: four(Attention), (x, x, x))


def _write(pair: tuple[Tensor, Tensor]) -> Tensor:
    pair[0].add_(1)
    return torch.tanh(pair[0]) * pair[1]


@pytest.mark.parametrize("view", [False, True])
def test_a_first_stage_that_writes_to_an_input_that_comes_twice(view: bool) -> None:
    start, tail = torch.randn(4, WIDTH), net()

    def pair() -> tuple[Tensor, Tensor]:
        x = start.clone()
        return (x, x[:]) if view else (x, x)

    chain = recomputed([_write, *tail], pair())
    found = [
        gradients(call, pair(), list(tail.parameters()))
        for call in (lambda both: tail(_write(both)), chain)
    ]
    assert_equal(*found)


def test_views_that_want_gradients_and_are_written_to_are_refused() -> None:
    def stage(pair: tuple[Tensor, Tensor]) -> Tensor:
        pair[0].mul_(2)
        return pair[0].sum(0) + pair[1]

    leaf = torch.randn(4, WIDTH, requires_grad=True)
    x = leaf * 1
    chain = recomputed([stage, *net()], (x.detach(), x.detach()[0]), "off")
    with pytest.raises(StateError, match="shares memory with another input"):
        chain((x, x[0]))


# ------------------------------------------------- functions that wrap modules


def test_functions_that_wrap_modules() -> None:
    """Batch norm counts once, its mode at forward holds, and its parameters are guarded."""

    def make() -> tuple[nn.ModuleList, list[Call]]:
        torch.manual_seed(0)
        blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
            for _ in range(4)
        )
        stages = [
            lambda x: blocks[0](x),
            functools.partial(_call, blocks[1]),
            blocks[2].forward,
            lambda x, block=blocks[3]: block(x),
        ]
        return blocks, stages

    x = torch.randn(16, WIDTH, requires_grad=True)
    (one, plain), (other, stages) = make(), make()
    chain = recomputed(stages, x)
    assert [int(b[1].num_batches_tracked) for b in other] == [0] * 4
    found = []
    for blocks, call in ((one, lambda x: functools.reduce(_apply, plain, x)), (other, chain)):
        parameters = [*blocks.parameters(), x]
        found.append([*gradients(call, x, parameters, blocks.eval), *blocks.buffers()])
        assert not blocks[0].training
        blocks.train()
    assert_equal(*found)
    loss = chain(x).square().sum()
    with torch.no_grad():
        other[1][0].weight.add_(1)
    with pytest.raises(StateError, match=r"parameter '.*weight' of stage"):
        loss.backward()


def _call(block: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = block(x)
    return result


def _apply(x: Any, stage: Call) -> Any:
    return stage(x)


def test_modes_of_wrapped_modules_are_part_of_the_kind() -> None:
    blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in "abc"
    )
    x = torch.randn(16, WIDTH)
    blocks.eval()
    chain = mst.Sequential([functools.partial(_call, block) for block in blocks], x, memory=1.0)
    blocks.train()
    chain(x).sum().backward()
    assert [int(block[1].num_batches_tracked) for block in blocks] == [1, 1, 1]
    assert blocks[0][0].weight.grad is not None


def test_a_replaced_stage_is_profiled_again() -> None:
    x = torch.randn(16, WIDTH)
    plain, chain = net(), recomputed(net(), x)
    for model in (plain, chain):
        torch.manual_seed(1)
        model.add_module("2", nn.BatchNorm1d(WIDTH))
    found = [[*gradients(m, x, list(m.parameters())), *m.buffers()] for m in (plain, chain)]
    assert_equal(*found)


# ------------------------------------------------------- attributes and globals


def test_dicts_of_closures_and_keywords_are_those_of_the_first_run() -> None:
    scales: dict[str, float] = {}

    def scaled(x: Tensor, shift: float) -> Tensor:
        return torch.tanh(x + shift) * scales.get("scale", 1.0)

    def change() -> None:
        scales.clear()
        part.keywords["shift"] = 3.0

    part = functools.partial(scaled, shift=0.5)
    stages, x = [*net(2), part, *net(2)], torch.randn(4, WIDTH, requires_grad=True)
    chain = recomputed(stages, x, check="off")
    found = []
    for call in (lambda x: functools.reduce(_apply, stages, x), chain):
        scales["scale"], part.keywords["shift"] = 2.0, 0.5
        found.append(gradients(call, x, [x], between=change))
        assert scales == {} and part.keywords == {"shift": 3.0}
    assert_equal(*found)


def test_the_first_attribute_that_a_function_gives_itself_is_put_back() -> None:
    """There was none when the chain was made: its profiling must leave no count behind."""

    def outputs(through: Callable[[nn.Module, Tensor], Call]) -> list[Tensor]:
        def counted(x: Tensor) -> Tensor:
            counted.calls = getattr(counted, "calls", 0) + 1  # type: ignore[attr-defined]
            return x * counted.calls  # type: ignore[attr-defined]

        x = torch.ones(4, WIDTH)
        call = through(Calling(counted), x)
        return [call(x) for _ in range(3)]

    assert_equal(
        outputs(lambda stage, x: nn.Sequential(*net(2), stage)),
        outputs(lambda stage, x: mst.Sequential([*net(2), stage], x, memory=1.0)),
    )


class Calling(nn.Module):
    def __init__(self, function: Call) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.function(x)
        return y


def test_forward_hooks_are_those_of_the_first_run_and_run_unnoticed() -> None:
    x, model = torch.randn(4, WIDTH), net()
    seen: list[Tensor] = []

    def hook(_module: nn.Module, _given: Any, y: Tensor) -> Tensor:
        seen.append(y.detach())
        return y * 2

    found = []
    for each in (model, recomputed(net(), x)):
        handles = [layer.register_forward_hook(hook) for layer in each.children()]
        seen.clear()
        found.append(
            gradients(each, x, list(each.parameters()), lambda: [h.remove() for h in handles])  # noqa: B023
        )
        assert len(seen) == 8
    assert_equal(*found)


def test_a_buffer_that_changes_only_later_is_named() -> None:
    layers = [Averaging(torch.ones(WIDTH)) for _ in range(4)]
    for layer in layers:
        layer.moving = False
    chain = recomputed(layers, torch.randn(4, WIDTH))
    layers[2].moving = True
    with pytest.raises(StateError, match=r"stage 2 Averaging changed buffer 'average'.*profiled"):
        chain(torch.randn(4, WIDTH))


def test_a_stage_that_writes_to_an_attribute_is_named() -> None:
    total = torch.zeros(())

    def count(x: Tensor) -> Tensor:
        total.add_(1)
        return x * total.clone()

    with pytest.raises(StateError, match="stage count writes to variable 'total' in place"):
        mst.Sequential([count, torch.tanh], torch.randn(4))


class Totalling(nn.Module):
    """Adds to a tensor in an attribute, through what no version shows if `hidden`."""

    def __init__(self, hidden: bool) -> None:
        super().__init__()
        self.total, self.hidden = torch.zeros(()), hidden

    def forward(self, x: Tensor) -> Tensor:
        (self.total.data if self.hidden else self.total).add_(1)
        return torch.tanh(x * self.total.clone())


@pytest.mark.parametrize("check", ["error", "off"])
@pytest.mark.parametrize("hidden", [False, True])
def test_profiling_leaves_tensors_in_attributes_as_they_were(hidden: bool, check: Any) -> None:
    stage = Totalling(hidden)
    with contextlib.nullcontext() if hidden else pytest.raises(StateError, match="'total' in pla"):
        mst.Sequential([stage, torch.tanh], torch.randn(4), check=check)
    assert (stage.total.item(), stage.total._version) == (0, 0)


class Box:
    def __init__(self) -> None:
        self.items: list[float] = []
        self.total = torch.zeros(())

    def push(self, value: float, inside: bool) -> float:
        if inside:
            self.total.add_(value)
            return self.total.item()
        self.items.append(value)
        return float(len(self.items))


@pytest.mark.parametrize("inside", [False, True])
def test_an_object_in_the_state_that_changes_is_refused(inside: bool) -> None:
    def push(state: tuple[Tensor, Box]) -> tuple[Tensor, Box]:
        x, box = state
        return torch.tanh(x * box.push(1.0, inside)), box

    x = torch.randn(4, requires_grad=True)
    chain = recomputed([push] * 4, (x, Box()), "off")
    loss = chain((x, Box()))[0].sum()
    with pytest.raises(StateError, match="an object in a state"):
        loss.backward()


def test_an_object_with_a_graph_in_the_state_is_refused() -> None:
    def stage(state: Any) -> Any:
        return SimpleNamespace(inner=torch.tanh(state.inner * 2))

    x = torch.randn(64, 64, requires_grad=True)
    stages = [lambda x: SimpleNamespace(inner=x), *[stage] * 6, lambda state: state.inner.sum()]
    chain = mst.Sequential(stages, memory=0.5, check="off")
    with pytest.raises(StateError, match=r"tensors inside of a SimpleNamespace.*register"):
        chain(x)


# ------------------------------------------------------------------- settings


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.linear(x).chunk(3, -1)
        return x + nn.functional.scaled_dot_product_attention(q, k, v)


def test_a_backend_chosen_around_forward_alone() -> None:
    x = torch.randn(1, 2, 16, WIDTH)
    torch.manual_seed(0)
    plain = nn.Sequential(*(Attending() for _ in range(4)))
    chain = recomputed(plain, x)

    def call(model: nn.Module, x: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            result: Tensor = model(x)
        return result

    found = []
    for model in (plain, chain):
        if model is chain:
            with sdpa_kernel(SDPBackend.MATH):
                chain = recomputed(plain, x)
                model = chain
        grads = gradients(functools.partial(call, model), x, list(plain.parameters()))
        found.append([g.clone() for g in grads if g is not None])
    assert_equal(*found)


class Contracts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(torch.einsum("ab,bc,cd->ad", x, self.a, self.b))


@pytest.mark.parametrize("assigned", [False, True])
def test_contractions_are_in_the_order_of_the_first_run(
    assigned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    einsum: Any = torch.backends.opt_einsum
    last_first = SimpleNamespace(contract_path=lambda *_, optimize: ([(1, 2), (0, 1)], ""))
    monkeypatch.setattr(einsum.m, "is_available", lambda: True)
    monkeypatch.setattr(einsum.m, "_opt_einsum", last_first)
    monkeypatch.setattr(einsum.m, "enabled", True)
    if assigned:
        monkeypatch.setattr(einsum, "enabled", True)
    model, x = nn.Sequential(*[Contracts() for _ in range(4)]), torch.randn(4, 8)
    chain = recomputed(model, x)
    found = []
    for call in (model, chain):
        with contextlib.ExitStack() as stack:

            def between() -> None:
                if assigned:
                    stack.callback(setattr, einsum, "enabled", True)
                    einsum.enabled = False
                else:
                    stack.enter_context(einsum.flags(enabled=False))

            found.append(gradients(call, x, list(model.parameters()), between))
            assert not einsum.enabled
    assert_equal(*found)


def test_a_default_dtype_and_device_around_forward_alone() -> None:
    def noise(x: Tensor) -> Tensor:
        return torch.tanh(x + torch.ones(WIDTH).to("cpu").double().sum() * 0.1)

    x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
    chain = recomputed([noise, torch.sin] * 3, x)
    torch.set_default_dtype(torch.float64)
    try:
        y = chain(x).sum()
    finally:
        torch.set_default_dtype(torch.float32)
    y.backward()
    assert torch.get_default_dtype() == torch.float32 and x.grad is not None


def test_a_setting_that_a_stage_leaves_changed_is_named() -> None:
    later = [False]

    def stage(x: Tensor) -> Tensor:
        if later[0]:
            torch.set_default_dtype(torch.float64)
        return torch.tanh(x)

    x = torch.randn(4, requires_grad=True)
    chain = recomputed([stage, torch.sin] * 2, x)
    later[0] = True
    try:
        with pytest.raises(StateError, match="default dtype"):
            chain(x)
    finally:
        torch.set_default_dtype(torch.float32)


# ------------------------------------------------------------ what is verified


class Turning(nn.Module):
    """Multiplies from the left or from the right, as an object says whose state is not seen."""

    def __init__(self, turned: ctypes.c_bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.turned = turned

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.weight @ x if self.turned.value else x @ self.weight)


def test_saved_tensors_of_equal_shapes_are_distinguished() -> None:
    turned = ctypes.c_bool(False)
    x = torch.randn(WIDTH, WIDTH, requires_grad=True)
    chain = recomputed([Turning(turned) for _ in range(4)], x)
    loss = chain(x).sum()
    turned.value = True
    with pytest.raises(StateError, match=r"other tensors .* a parameter or buffer in one run"):
        loss.backward()


def test_a_normal_number_that_is_set_back_is_seen_to_be_drawn() -> None:
    """Words that had been seen without the number were taken to come without it for good."""
    np.random.seed(3)
    np.random.randn()
    full = np.random.get_state()  # with the second of a pair
    np.random.randn()
    empty = np.random.get_state()  # the same words without it

    def noisy(x: Tensor) -> Tensor:
        return torch.tanh(x * np.random.randn())

    x = torch.randn(4, WIDTH, requires_grad=True)
    chain = recomputed([noisy, torch.sin] * 2, x)
    for state in (empty, full, empty, full):
        found = []
        for call in (lambda x: torch.sin(noisy(torch.sin(noisy(x)))), chain):
            np.random.set_state(state)
            found.append([*gradients(call, x, [x]), torch.tensor(np.random.randn())])
        assert_equal(*found)
