"""`to_chain` and `Sequential` on models that do more than compute."""

from __future__ import annotations

import copy
import functools
import pickle
import random
from collections import UserDict
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import multistage.torch as mst
from multistage.errors import ArgumentError
from multistage.torch.tensors.meter import Meter

WIDTH = 16


class Block(nn.Module):
    """Residual, so that its end is a cut; `extra` is what a test is about."""

    def __init__(self, extra: Callable[[nn.Module, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.temperature = 1.0
        self.calls = 0
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(self.linear(x)) / self.temperature
        if self.extra is not None:
            y = self.extra(self, y)
        return x + y


class Net(nn.Module):
    """Blocks under a root that has a parameter and a buffer of its own."""

    def __init__(
        self, extra: Callable[[nn.Module, Tensor], Tensor] | None = None, blocks: int = 5
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(extra if k % 2 else None) for k in range(blocks)])
        self.shift = nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("steps", torch.zeros(()))
        self.scale = 1.0
        self.inner: Callable[[Net, Tensor], Tensor] = unchanged

    def forward(self, x: Tensor) -> Tensor:
        self.steps.add_(1)
        x = self.inner(self, x)
        for block in self.blocks:
            x = block(x) + self.shift * self.scale
        return x


def unchanged(model: Net, x: Tensor) -> Tensor:
    return x


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def the_input(rows: int = 64) -> Tensor:
    return torch.linspace(-1, 1, rows * WIDTH).reshape(rows, WIDTH)


def generators() -> tuple[object, ...]:
    keys, place = np.random.get_state()[1:3]
    return torch.get_rng_state().tolist(), random.getstate(), list(keys), place


def seed(number: int) -> None:
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def state_of(model: nn.Module) -> list[Any]:
    return [
        *(t.clone() for t in model.state_dict().values()),
        *(None if p.grad is None else p.grad.clone() for p in model.parameters()),
    ]


def same(a: list[Any], b: list[Any]) -> bool:
    return len(a) == len(b) and all(
        torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y
        for x, y in zip(a, b, strict=True)
    )


def chained(model: nn.Module, x: Any, memory: float = 0.7) -> tuple[nn.Module, mst.Sequential]:
    """Return a plain copy of a model, and its chain; tracing and planning leave no trace."""
    plain = copy.deepcopy(model)
    seed(9)
    before = state_of(model), generators()
    attributes = [
        {k: v for k, v in vars(m).items() if not k.startswith("_")} for m in model.modules()
    ]
    ours = mst.Sequential(mst.to_chain(model, x), x, memory=memory)
    assert same(state_of(model), before[0])
    assert generators() == before[1]
    assert attributes == [
        {k: v for k, v in vars(m).items() if not k.startswith("_")} for m in model.modules()
    ]
    return plain, ours


def step(model: nn.Module, call: Callable[[nn.Module], Tensor], number: int) -> list[Any]:
    seed(number)
    y = call(model)
    y.square().sum().backward()
    return [y, *state_of(model)]


def assert_alike(
    plain: nn.Module,
    ours: mst.Sequential,
    call: Callable[[nn.Module], Tensor],
    *,
    between: Callable[[nn.Module, int], None] = lambda model, number: None,
    steps: int = 3,
) -> None:
    """Outputs, gradients, buffers and generators of a few steps, bit for bit."""
    assert list(plain.state_dict()) == list(ours.state_dict())
    for number in range(steps):
        between(plain, number)
        known = step(plain, call, number)
        state = generators()
        between(ours, number)
        found = step(ours, call, number)
        assert same(known, found), number
        assert generators() == state


# ------------------------------------------------- what is not a call on inputs


def counts(block: Any, y: Tensor) -> Tensor:
    block.count.add_(1)
    return y


def averages(block: Any, y: Tensor) -> Tensor:
    with torch.no_grad():
        block.mean.mul_(0.9).add_(y.mean(0), alpha=0.1)
    return y - block.mean


def noise_of_constant_shape(block: Any, y: Tensor) -> Tensor:
    return y + torch.randn(WIDTH)


def torch_coin(block: Any, y: Tensor) -> Tensor:
    return y if torch.rand(1).item() < 0.5 else 2 * y


def python_coin(block: Any, y: Tensor) -> Tensor:
    return y if random.random() < 0.5 else 2 * y


def numpy_noise(block: Any, y: Tensor) -> Tensor:
    return y * float(np.random.uniform())


def rebinds_a_buffer(block: Any, y: Tensor) -> Tensor:
    block.mean = 0.9 * block.mean + 0.1 * y.detach().mean(0)
    return y - block.mean


def branches_on_data(block: Any, y: Tensor) -> Tensor:
    return y if y.sum() > 0 else y.sin()


def under_autocast(block: Any, y: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y = block.linear(y) + block.linear(y.sin())
    return y.float()


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return 3 * gradient


def applies_a_function(block: Any, y: Tensor) -> Tensor:
    return Twice.apply(y)  # type: ignore[no-any-return, no-untyped-call]


EXTRAS = (
    counts,
    averages,
    noise_of_constant_shape,
    torch_coin,
    rebinds_a_buffer,
    branches_on_data,
    under_autocast,
    applies_a_function,
)


@pytest.mark.parametrize("extra", EXTRAS, ids=lambda f: f.__name__)
def test_a_block_does_more_than_compute(extra: Any) -> None:
    plain, ours = chained(Net(extra), the_input())
    assert len(ours) >= 5 and not ours.plan.keeps_all  # type: ignore[union-attr]
    assert_alike(plain, ours, lambda model: model(the_input()))


@pytest.mark.parametrize("extra", [python_coin, numpy_noise], ids=lambda f: f.__name__)
def test_random_numbers_of_python_and_numpy(extra: Any) -> None:
    """Stages that draw them are modules called whole, and draw at every call."""
    model = Net(extra, blocks=3)
    stages = mst.to_chain(model, the_input())
    assert stages.called_whole.keys() == {"blocks.1"}
    plain = copy.deepcopy(model)
    for number in range(3):
        seed(number)
        known = plain(the_input())
        state = generators()
        seed(number)
        found = the_input()
        for stage in stages:
            found = stage(found)
        assert torch.equal(found, known) and generators() == state


@pytest.mark.parametrize("make", [torch_coin, python_coin, numpy_noise])
def test_a_model_whose_forward_no_graph_can_hold_is_refused(make: Any) -> None:
    model = Net()
    model.inner = make
    before = state_of(model), generators()
    with pytest.raises(ArgumentError, match=r"cannot be traced: its forward (decides|draws)"):
        mst.to_chain(model, the_input())
    assert same(state_of(model), before[0]) and generators() == before[1]


def test_the_root_sets_an_attribute() -> None:
    model = Net()

    def remember(root: Any, x: Tensor) -> Tensor:
        root.scale = root.scale + 1
        return x

    model.inner = remember
    with pytest.raises(ArgumentError, match="sets its attribute 'scale'"):
        mst.to_chain(model, the_input())
    assert model.scale == 1.0


def test_the_root_writes_to_a_parameter() -> None:
    model = Net()

    def shift(root: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            root.shift.add_(1)
        return x

    model.inner = shift
    with pytest.raises(ArgumentError, match="writes to parameter shift in place"):
        mst.to_chain(model, the_input())
    assert torch.equal(model.shift, torch.zeros(WIDTH))


def test_buffers_and_noise_of_the_root() -> None:
    model = Net()

    def noisy(root: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            root.steps.add_(torch.rand(()))
        return x + torch.rand(3)[0]

    model.inner = noisy
    plain, ours = chained(model, the_input())
    assert_alike(plain, ours, lambda model: model(the_input()))


def test_attributes_that_are_annealed() -> None:
    plain, ours = chained(Net(), the_input())

    def anneal(model: Any, number: int) -> None:
        model.scale = 1 / (number + 1)
        model.blocks[2].temperature = 1 + number // 2

    assert_alike(plain, ours, lambda model: model(the_input()), between=anneal, steps=4)


def test_attributes_of_helper_objects() -> None:
    model = Net(lambda block, y: y * block.options.factor + len(block.options.names))
    for block in model.blocks:
        block.options = SimpleNamespace(factor=2.0, names=["a"])
    plain, ours = chained(model, the_input())

    def change(model: Any, number: int) -> None:
        model.blocks[1].options.factor = 2.0 + number
        model.blocks[3].options.names.append("b")

    assert_alike(plain, ours, lambda model: model(the_input()), between=change)


def test_stages_refuse_conditions_they_were_not_traced_for() -> None:
    model = Net()
    stages = mst.to_chain(model, the_input())
    assert torch.equal(nn.Sequential(*stages)(the_input()), model(the_input()))
    model.scale = 0.5
    with pytest.raises(ArgumentError, match=r"'scale' is 0.5 and was 1.0"):
        stages[0](the_input())
    model.scale = 1.0
    model.blocks[1].register_forward_hook(lambda *given: None)
    with pytest.raises(ArgumentError, match=r"'blocks.1' has hooks"):
        stages[0](the_input())


def test_hooks_are_called() -> None:
    model = Net()
    seen: list[str] = []
    model.blocks[1].register_forward_hook(lambda *given: seen.append("block"))
    model.register_forward_hook(lambda *given: seen.append("root"))
    stages = mst.to_chain(model, the_input())
    ours = mst.Sequential(stages, memory=1.0)
    ours.prepare(the_input())
    seen.clear()
    ours(the_input())
    assert seen == ["block", "root"]


# -------------------------------------------------------- one source of truth


def test_copies_of_the_root_parameters() -> None:
    plain, ours = chained(Net(averages), the_input())
    plain.double()
    ours.double()
    assert_alike(plain, ours, lambda model: model(the_input().double()))


def test_load_state_dict_by_assignment() -> None:
    plain, ours = chained(Net(), the_input())
    other = {k: torch.full_like(v, 0.25) for k, v in plain.state_dict().items()}
    for model in (plain, ours):
        model.load_state_dict(copy.deepcopy(other), assign=True)
    assert_alike(plain, ours, lambda model: model(the_input()))


def test_functional_call() -> None:
    plain, ours = chained(Net(), the_input())
    given = {k: torch.full_like(v, 0.1) for k, v in plain.named_parameters()}
    results = []
    for model in (plain, ours):
        leaves = {k: v.clone().requires_grad_() for k, v in given.items()}
        y = torch.func.functional_call(model, leaves, (the_input(),))
        results.append([y, *torch.autograd.grad(y.square().sum(), list(leaves.values()))])
    assert same(*results)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copies_have_state_of_their_own(copied: Any) -> None:
    plain, ours = chained(Net(averages), the_input())
    again = copied(ours)
    assert_alike(copy.deepcopy(plain), again, lambda model: model(the_input()))
    assert_alike(plain, ours, lambda model: model(the_input()))


def test_modes() -> None:
    plain, ours = chained(
        Net(lambda block, y: functional.dropout(y, 0.5, block.training)), the_input()
    )
    assert_alike(plain, ours, lambda model: model(the_input()))
    plain.eval()
    ours.eval()
    assert not any(module.training for module in ours.modules())
    assert_alike(plain, ours, lambda model: model(the_input()))
    plain.blocks[1].train()
    ours.blocks[1].train()
    assert_alike(plain, ours, lambda model: model(the_input()))


# ------------------------------------------------------------------- arguments


class Optional_(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(4)])

    def forward(
        self,
        x: Tensor,
        mask: Tensor | None = None,
        flag: bool = False,
        scale: float = 1.0,
        mode: str = "a",
        opts: tuple[int, ...] = (),
        **more: Tensor,
    ) -> Tensor:
        for block in self.blocks:
            x = block(x) * scale
            if mask is not None:
                x = x * mask
            if flag or mode == "b" or opts:
                x = x.sin()
            for value in more.values():
                x = x + value
        return x


MASK = torch.arange(WIDTH) % 3


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((the_input(),), {}),
        ((the_input(), MASK), {}),
        ((the_input(), None, True, 0.5, "b", (1, 2)), {}),
        ((the_input(),), {"flag": True}),
        ((the_input(),), {"mask": MASK, "bias": torch.ones(1)}),
        ((), {"x": the_input(), "mode": "b", "scale": 2.0}),
    ],
    ids=["x", "mask", "all", "flag", "more", "named"],
)
def test_optional_arguments(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    model = Optional_()
    sample = {**dict(zip(["x"], args, strict=False)), **kwargs} if kwargs else args
    plain, ours = chained(model, sample)
    assert_alike(plain, ours, lambda model: model(*args, **kwargs))
    # Another kind of call is traced when it comes.
    assert_alike(plain, ours, lambda model: model(the_input(), scale=3.0), steps=1)


def test_aliased_arguments() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block() for _ in range(4)])

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            for block in self.blocks:
                a = block(a) + b
            return a if a is b else a * b

    x, other = the_input(), the_input() + 1
    plain, ours = chained(Pair(), (x, x))
    assert_alike(plain, ours, lambda model: model(x, x))
    assert_alike(plain, ours, lambda model: model(x, other))


def test_a_smaller_last_batch() -> None:
    plain, ours = chained(Net(averages), the_input())
    for rows in (64, 64, 17, 64, 5):
        assert_alike(plain, ours, lambda model: model(the_input(rows)), steps=1)  # noqa: B023


def test_values_of_the_input_that_forward_reads() -> None:
    model = Optional_()
    plain, ours = chained(model, the_input())

    class Reads(Optional_):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(x, None if bool((mask == 1).all()) else mask)

    plain, ours = chained(Reads(), (the_input(), torch.ones(WIDTH)))
    for mask in (torch.ones(WIDTH), MASK, torch.ones(WIDTH)):
        assert_alike(plain, ours, lambda model: model(the_input(), mask), steps=1)  # noqa: B023


class Output(dict[str, Any]):
    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


def _flatten(output: Output) -> tuple[list[Any], list[str]]:
    return list(output.values()), list(output)


torch.utils._pytree.register_pytree_node(
    Output, _flatten, lambda values, keys: Output(zip(keys, values, strict=True))
)


class Batch(UserDict[str, Any]):
    """As the BatchEncoding of transformers."""


class WithLoss(Optional_):
    def forward(self, x: Tensor, labels: Tensor | None = None, **more: Tensor) -> Output:  # type: ignore[override]
        y = super().forward(x, **more)
        loss = None if labels is None else functional.mse_loss(y, labels)
        return Output(loss=loss, logits=y, parts=(y.sum(), None))


def test_the_usual_call_of_a_trainer() -> None:
    batch = {"labels": the_input().cos(), "x": the_input()}
    plain, ours = chained(WithLoss(), batch)
    assert_alike(plain, ours, lambda model: model(**batch).loss)
    assert_alike(
        plain, ours, lambda model: model(**Batch(batch)).loss + model(**Batch(batch)).logits.sum()
    )
    seed(0)
    assert isinstance(ours(Batch(batch)), Output)


# ----------------------------------------------------------------------- names


NAMES = ("stages", "plan", "memory", "planner", "prepare", "stage_names", "replan", "segments")


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            setattr(self, name, Block())
        self.model = Block()
        self.name_ = "mine"
        self._calls = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for name in NAMES:
            x = getattr(self, name)(x)
        return self._calls(self.model(x))

    def helper(self) -> str:
        return f"{self.name_} {len(self.stages.state_dict())}"


def test_children_of_any_name() -> None:
    plain, ours = chained(Named(), the_input())
    assert_alike(plain, ours, lambda model: model(the_input()))
    for name in (*NAMES, "model", "_calls"):
        assert isinstance(getattr(ours, name), nn.Module)
        assert name in dict(ours.named_children())
    assert ours.helper() == plain.helper()  # type: ignore[operator]
    assert mst.Sequential.plan.fget(ours) is not None  # type: ignore[attr-defined]
    plain_chain = nn.Sequential()
    for name in NAMES:
        setattr(plain_chain, name, Block())
    chain = mst.Sequential(copy.deepcopy(plain_chain), the_input(), memory=0.8)
    assert_alike(plain_chain, chain, lambda model: model(the_input()))
    with pytest.raises(AttributeError, match="cannot be set"):
        mst.Sequential([Block()]).memory = 3


def test_an_nn_sequential_with_a_forward_of_its_own() -> None:
    class Mine(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + x

    model = Mine(Block(), Block(), Block())
    with pytest.raises(ArgumentError, match="has a forward of its own"):
        mst.Sequential(model)


def test_a_chain_of_stages_takes_one_state() -> None:
    with pytest.raises(ArgumentError, match="takes one state, not 2 arguments"):
        mst.Sequential([Block()])(the_input(), the_input())


# ------------------------------------------------------------------------ trees


class UNet(nn.Module):
    """Every level of the way down is used again on the way up."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        wide = [4 * (k + 1) for k in range(depth + 1)]
        self.first = nn.Conv2d(1, wide[0], 3, padding=1)
        self.down = nn.ModuleList([self._block(a, b) for a, b in pairwise(wide)])
        self.up = nn.ModuleList([self._block(a + b, a) for a, b in pairwise(wide)])

    def _block(self, a: int, b: int) -> nn.Module:
        return nn.Sequential(
            *(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.GELU()),
            *(nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.GELU()),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        skips = []
        for block in self.down:
            skips.append(x)
            x = block(functional.max_pool2d(x, 2))
        for block, skip in zip(reversed(self.up), reversed(skips), strict=True):
            x = block(torch.cat([functional.interpolate(x, scale_factor=2), skip], 1))
        return x


@pytest.mark.parametrize("memory", [0.8, 0.6])
def test_skip_connections_are_part_of_the_state(memory: float) -> None:
    x = torch.linspace(-1, 1, 4 * 32 * 32).reshape(4, 1, 32, 32)
    plain, ours = chained(UNet(), x, memory)
    assert len(ours) > 8 and not ours.plan.keeps_all  # type: ignore[union-attr]
    assert_alike(plain, ours, lambda model: model(x), steps=2)
    limit = ours.plan.memory_bytes  # type: ignore[union-attr]
    with Meter(torch.device("cpu")) as meter:
        meter.ignore([*ours.parameters(), *(p.grad for p in ours.parameters())])
        meter.ignore(ours.buffers())
        ours(x).sum().backward()
        peak = meter.peak_bytes + x.nbytes
    assert peak <= limit


def test_a_bias_that_all_layers_share() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bias = nn.Parameter(torch.ones(WIDTH))
            self.blocks = nn.ModuleList([Block() for _ in range(12)])

        def forward(self, x: Tensor) -> Tensor:
            bias = self.bias.sin()
            for block in self.blocks:
                x = block(x) * bias
            return x

    plain, ours = chained(Shared(), the_input())
    assert len(ours) > 8
    assert_alike(plain, ours, lambda model: model(the_input()))


class Inverts(nn.Module):
    """Turns modes on, and in them fails for some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            scale = torch.linalg.inv(x).sum()
        return x * scale


def test_modes_that_an_error_leaves_open_are_closed() -> None:
    stages = mst.to_chain(Inverts(), torch.randn(8, 8))
    with pytest.raises(torch.linalg.LinAlgError):
        functools.reduce(lambda state, stage: stage(state), stages, torch.zeros(8, 8))
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")
