"""`compile`: models captured by TorchDynamo, within a limit, beside plain training."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import inspect
import itertools
import logging
import pickle
import random
import weakref
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import fuzz_facts
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import multistage.torch as mst
from multistage.errors import (
    ArgumentError,
    BudgetError,
    CheckpointWarning,
    MultistageError,
    StateError,
)
from multistage.torch.chains.runner import Run
from multistage.torch.chains.stages import StageRunner
from multistage.torch.environment import captured as environment_captured
from multistage.torch.environment import randomness, states
from multistage.torch.measurement import measure
from multistage.torch.measurement.traits import Remade
from multistage.torch.tensors.checksums import Digests
from multistage.torch.tensors.meter import Meter
from multistage.torch.tracing import cutting
from multistage.torch.tracing import remaking as tracing_remaking

WIDTH = 16
LOG = logging.getLogger("model")
Extra = Callable[[Any, Tensor], Tensor]


@pytest.fixture(autouse=True)
def forgotten() -> Iterator[None]:
    yield
    torch.compiler.reset()


class Block(nn.Module):
    """Residual; `extra` is what a test is about."""

    def __init__(self, extra: Extra | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("count", torch.zeros(()))
        self.scale = 1.0
        self.extra = extra

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu_(self.norm(self.linear(x))) * self.scale
        return x + (y if self.extra is None else self.extra(self, y))


class Net(nn.Module):
    """Blocks, and a head that is tied to the first of them."""

    def __init__(self, extra: Extra | None = None, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(extra) for _ in range(blocks)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return functional.linear(x, self.blocks[0].linear.weight)


class InAutocast(Net):
    """Most of its forward is in a region of autocast, in which one weight is used twice."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for block in self.blocks:
                x = x + torch.tanh(block.linear(x))
            x = self.blocks[3].linear(x)
        with torch.no_grad():
            x = x + self.blocks[0].linear(x.float())
        return super().forward(x.float())


class OnlyAutocast(Net):
    """All of its forward is in one region, which stages that run again end early."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            for block in self.blocks:
                x = x + torch.tanh(block.linear(x))
        return x


class UNet(nn.Module):
    """What is made early is used late."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])
        self.up = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in range(5)])

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        for layer in self.down:
            x = torch.tanh(layer(x))
            kept.append(x)
        for layer in self.up:
            x = torch.tanh(layer(torch.cat([x, kept.pop()], 1)))
        return x


class Words(nn.Module):
    """An embedding, whose indices require no gradient, tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, WIDTH)
        layers = [nn.TransformerEncoderLayer(WIDTH, 2, 32, 0.1, batch_first=True) for _ in range(3)]
        self.layers = nn.ModuleList(layers)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words)
        for layer in self.layers:
            x = layer(x)
        return x @ self.embedding.weight.t()


class Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * gradient * x * x


class Odd(torch.autograd.Function):
    """Writes to an argument, saves what is neither argument nor result, and keeps a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor, Tensor]:
        inner = torch.tanh(y)
        x.add_(inner, alpha=factor)
        ctx.mark_dirty(x)
        where = inner > 0
        ctx.mark_non_differentiable(where)
        ctx.save_for_backward(inner, y)
        ctx.factor, ctx.where = factor, where
        return x, inner * y, where

    @staticmethod
    def backward(ctx: Any, of_x: Tensor, of_product: Tensor, _: Tensor) -> tuple[Any, ...]:
        inner, y = ctx.saved_tensors
        of_inner = ctx.factor * of_x + of_product * y * ctx.where
        return of_x, of_inner * (1 - inner * inner) + of_product * inner, None


def odd(block: Any, y: Tensor) -> Tensor:
    x, product, where = Odd.apply(torch.sin(y), y.cos(), block.scale)  # type: ignore[no-untyped-call]
    return torch.where(where, x, product)


def counting(block: Any, y: Tensor) -> Tensor:
    block.count += 1
    return y * (1 + 1 / block.count)


def dropping(block: Any, y: Tensor) -> Tensor:
    return functional.dropout(y, 0.3) + torch.rand_like(y)


def written(block: Any, y: Tensor) -> Tensor:
    y[:, 0] = 0
    half = y[:, : WIDTH // 2]
    half.mul_(2)
    first, inner = y.sin(), functional.gelu(block.linear(y))
    first.add_(inner.view(-1, WIDTH))  # a view of what is made later
    return first * functional.dropout(torch.tanh(inner * inner), 0.3)


def squared(block: Any, y: Tensor) -> Tensor:
    return y**2 - 0.1 * Cubed.apply(torch.tanh(y))  # type: ignore[no-any-return]


def transformed(block: Any, y: Tensor) -> Tensor:
    return (torch.fft.fft(torch.tanh(y)) * block.linear(y)).imag / WIDTH


def vectorised(block: Any, y: Tensor) -> Tensor:
    return y * torch.vmap(lambda row: row.softmax(0))(y)


def differentiated(block: Any, y: Tensor) -> Tensor:
    return y + torch.vmap(torch.func.grad(lambda row: torch.tanh(row).square().sum()))(y)


def branching(block: Any, y: Tensor) -> Tensor:
    found: Tensor = torch.cond(y.sum() > 0, torch.sin, torch.cos, (y,))
    return found


def remembered(block: Any, y: Tensor) -> Tensor:
    block.scale += 0.5
    block.last = y.detach()
    return y


def batch(*shape: int) -> Tensor:
    return torch.randn(*(shape or (32, WIDTH)), generator=torch.Generator().manual_seed(1))


def step(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    loss.backward()
    return loss.detach()


def trained(call: Any, model: nn.Module, x: Tensor, steps: int = 3) -> list[Any]:
    """Return all that some iterations leave behind."""
    torch.manual_seed(0)
    losses = []
    for _ in range(steps):
        losses.append(step(call, x))
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p.sub_(p.grad, alpha=0.05)
    gradients = [p.grad for p in model.parameters()]
    return [*losses, *gradients, *model.buffers(), torch.get_rng_state()]


def assert_equal(ones: list[Any], others: list[Any]) -> None:
    assert len(ones) == len(others)
    for one, other in zip(ones, others, strict=True):
        assert one is other is None or torch.equal(one, other)


MODELS: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    **{
        extra.__name__: lambda extra=extra: (Net(extra), batch())  # type: ignore[misc]
        for extra in (
            counting,
            dropping,
            written,
            squared,
            odd,
            transformed,
            vectorised,
            remembered,
        )
    },
    "autocast": lambda: (InAutocast(), batch()),
    "only autocast": lambda: (OnlyAutocast(blocks=6), batch()),
    "unet": lambda: (UNet(), batch()),
    "words": lambda: (Words(), torch.randint(40, (4, 12))),
}


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", MODELS)
def test_models_train_as_without_a_limit(name: str) -> None:
    model, x = MODELS[name]()
    plain, eager, ours = model, copy.deepcopy(model), copy.deepcopy(model)
    memory = {
        "vectorised": 0.9,
        "transformed": 0.95,
        "unet": 0.9,
        "autocast": 0.5,
        "only autocast": 0.5,
    }.get(name, 0.7)
    compiled = mst.compile(ours, memory=memory)
    found = trained(compiled, ours, x)
    assert compiled.plan is not None and not compiled.plan.keeps_all
    assert compiled.checked is not None and compiled.checked.outcome == "equal"
    assert_equal(found, trained(torch.compile(eager, backend="eager"), eager, x))
    assert_equal(found, trained(plain, plain, x))


class Biased(nn.Module):
    """Attention whose mask is learned, by a share that training raises from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.all, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.bias, self.share = nn.Parameter(torch.randn(32, 32)), nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.all(x).view(2, 32, 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=2 * self.bias)
        x = x + self.share * y.transpose(1, 2).reshape(x.shape)
        return x + torch.tanh(self.last(x))


def test_kernels_that_differ_by_gradients_are_seen_though_a_zero_hides_their_numbers() -> None:
    """Stages that run again on the way to others run without a graph, if none needs one."""
    plain, x = nn.Sequential(*[Biased() for _ in range(16)]), torch.randn(2, 32, WIDTH)
    ours = copy.deepcopy(plain)
    compiled = mst.compile(ours, memory=0.15)
    step(compiled, x)  # by which stages are known
    step(plain, x)
    for model in (plain, ours):
        model.zero_grad()
        for name, parameter in model.named_parameters():
            if name.endswith("share"):
                parameter.data.fill_(0.3)
    found = trained(compiled, ours, x)
    assert_equal(found, trained(plain, plain, x))


class Within(Meter):
    """A meter under which a captured graph runs, in place of the model itself."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_autograd_functions_hold_nothing_after_backward() -> None:
    model, x = Net(squared, 4), batch(256, WIDTH)
    compiled = mst.compile(model, memory=0.7)
    step(compiled, x)
    gc.collect()
    gc.disable()
    try:
        with Within(torch.device("cpu")) as meter:
            meter.ignore([x, *model.parameters(), *model.buffers()])
            meter.ignore([p.grad for p in model.parameters() if p.grad is not None])
            compiled(x).square().mean().backward()
            with torch.no_grad():
                compiled(x)
        assert meter.live_bytes() < x.nbytes
    finally:
        gc.enable()


def test_graphs_of_torch_alone_read_its_generators_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, x = MODELS["dropping"]()
    compiled, reads = mst.compile(plain, memory=0.8), list[str]()
    step(compiled, x)
    for source in (randomness._python, randomness._numpy):

        def get(source: randomness.Source = source) -> bytes:
            reads.append(source.name)
            return source.get()

        name = "_python" if source is randomness._python else "_numpy"
        monkeypatch.setattr(randomness, name, dataclasses.replace(source, get=get))
    step(compiled, x)
    assert not reads


class Rectified(nn.Module):
    """Blocks that end in a rectified sum, which nothing saves."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.relu(x + torch.tanh(block(x)))
        return x


def test_no_cut_keeps_a_sum_that_plain_training_does_not() -> None:
    plain, x = Rectified(), batch(256, WIDTH)
    compiled = mst.compile(copy.deepcopy(plain), memory=0.7)
    step(compiled, x)
    step(plain, x)
    with Meter(torch.device("cpu")) as meter:
        meter.ignore([x, *plain.parameters(), *[p.grad for p in plain.parameters()]])
        plain(x).backward(torch.ones(256, WIDTH))
    assert compiled.plan is not None
    assert compiled.plan.plain_bytes == pytest.approx(meter.peak_bytes + x.nbytes, rel=0.1)


class Wide(nn.Module):
    """Makes a large part of all tensors between two places where one passes."""

    def __init__(self, wide: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.sin(torch.sin(torch.sin(torch.sin(torch.sin(torch.sin(self.up(x)))))))
        return torch.sin(x + self.down(y))


def test_what_is_nearly_a_quarter_of_all_is_cut_inside() -> None:
    def least(*widths: int) -> int:
        model = nn.Sequential(*[Wide(wide) for wide in widths])
        with pytest.raises(BudgetError) as refused:
            mst.compile(model, memory=1)(batch(256, WIDTH))
        assert refused.value.least_bytes is not None
        return refused.value.least_bytes

    assert least(4 * WIDTH, *[WIDTH] * 9, WIDTH // 2) < 7 * batch(256, 4 * WIDTH).nbytes


def test_outputs_that_no_tape_saves_are_gone_while_their_stage_is_reversed() -> None:
    model, x = nn.Sequential(nn.Tanh(), Sine(), Sine(), Sine()), batch(256, WIDTH)
    compiled = mst.compile(model, memory=0.95)
    step(compiled, x.requires_grad_())
    assert compiled.plan is not None
    sizes = [stage.spared_bytes for stage in compiled.plan.stage_costs.stages]
    assert sizes == [
        0,
        x.nbytes,
        x.nbytes,
        0,
    ]  # a tangent saves its output; the caller has the last


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


@pytest.mark.parametrize("made", [nn.Hardswish, nn.SiLU, nn.Mish, nn.Hardsigmoid])
def test_activations_that_copy_what_they_write_to_do_not_write(made: type[nn.Module]) -> None:
    norms = [nn.Sequential(nn.BatchNorm1d(WIDTH), made(inplace=True)) for _ in range(4)]
    plain, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), *norms), batch(256, WIDTH)
    ours = copy.deepcopy(plain)
    with pytest.raises(BudgetError) as refused:
        mst.compile(copy.deepcopy(plain), memory=1)(x)
    least = refused.value.least_bytes
    assert least is not None and least < 5.5 * x.nbytes
    compiled = mst.compile(ours, memory=least)
    assert_equal(trained(compiled, ours, x), trained(plain, plain, x))
    with Within(torch.device("cpu")) as meter:
        meter.ignore([x, *ours.parameters(), *ours.buffers()])
        meter.ignore([p.grad for p in ours.parameters() if p.grad is not None])
        compiled(x).backward(torch.ones(256, WIDTH))
    assert meter.peak_bytes + x.nbytes <= least + x.nbytes  # of the adjoint, which the caller holds


def norms(count: int, norm: Callable[[int], nn.Module] = nn.BatchNorm1d) -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(norm(WIDTH), nn.ReLU(inplace=True)) for _ in range(count)])


def lets_go(compiled: Any, x: Tensor) -> bool:
    """Whether nothing, such as an error that was caught, holds the input of the first call."""
    given = x.clone()
    seen = weakref.ref(given)
    gc.collect()
    gc.disable()
    try:
        step(compiled, given)
        del given
        return seen() is None
    finally:
        gc.enable()


def test_a_norm_and_a_relu_in_place_are_parted_where_they_do_not_fit_together() -> None:
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), norms(4), nn.Linear(WIDTH, 1))
    x = batch(256, WIDTH)
    refused = []
    for memory in (1, 0.4):
        with pytest.raises(BudgetError) as error:
            mst.compile(copy.deepcopy(plain), memory=memory)(x)
        refused.append(error.value)
    least = refused[0].least_bytes
    assert least is not None and least < 4.5 * x.nbytes  # 5 with the norm's input
    whole = mst.compile(copy.deepcopy(plain), memory=1.0)
    step(whole, x)
    assert whole.plan is not None and len(whole.plan.stage_costs.stages) == 6
    # Outputs of norms, which nothing saves, are no part of what a fraction is of.
    limit = int(str(refused[1]).split()[0].removeprefix("memory="))
    assert limit <= 0.4 * whole.plan.plain_bytes
    assert lets_go(mst.compile(copy.deepcopy(plain), memory=least), x)
    ours = copy.deepcopy(plain)
    compiled = mst.compile(ours, memory=least)
    assert_equal(trained(compiled, ours, x), trained(plain, plain, x))
    assert len(compiled.plans) == 1
    with Within(torch.device("cpu")) as meter:
        meter.ignore([x, *ours.parameters(), *ours.buffers()])
        meter.ignore([p.grad for p in ours.parameters() if p.grad is not None])
        compiled(x).backward(adjoint := torch.ones(256, 1))
    assert meter.peak_bytes + x.nbytes <= least + adjoint.nbytes


class Beside(nn.Module):
    """What passes beside norms and ReLUs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norms, self.last = nn.Linear(WIDTH, WIDTH), norms(5), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        z: Tensor = self.last(y + self.norms(y))
        return z


def test_fractions_are_of_plain_training_where_norms_are_parted() -> None:
    x = batch(512, WIDTH)
    whole = mst.compile(Beside(), memory=1.0)
    step(whole, x)
    assert whole.plan is not None
    with pytest.raises(BudgetError) as error:
        mst.compile(Beside(), memory=0.6)(x)
    assert f"memory={int(0.6 * whole.plan.plain_bytes)} bytes" in str(error.value)


@pytest.mark.filterwarnings("ignore:.*:multistage.errors.CheckpointWarning")
def test_inputs_that_fit_stay_with_their_plan_where_others_need_parted_norms() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), norms(4, nn.LayerNorm), nn.Linear(WIDTH, 1))
    small, large = batch(256, WIDTH), batch(512, WIDTH)
    with pytest.raises(BudgetError) as error:
        mst.compile(copy.deepcopy(model), memory=1, dynamic=True)(large)
    compiled = mst.compile(model, memory=error.value.least_bytes, dynamic=True)
    counts = []
    for x in (small, large, small, large):
        step(compiled, x)
        assert compiled.plan is not None
        counts.append(len(compiled.plan.stage_costs.stages))
    assert counts == [6, 10, 6, 10]


def test_a_limit_that_is_named_beside_a_tier_is_enough(tmp_path: Path) -> None:
    tiers = f"file:{tmp_path}?buffers=64KiB"
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), norms(4)), batch(2048, WIDTH)
    with pytest.raises(BudgetError) as refused:
        mst.compile(copy.deepcopy(model), memory=1, tiers=tiers)(x)
    assert list(tmp_path.iterdir()) == []
    compiled = mst.compile(model, memory=refused.value.least_bytes, tiers=tiers)
    step(compiled, x)
    compiled.close()


def test_limits_that_one_way_to_count_refuses_hold_no_input() -> None:
    with pytest.raises(BudgetError) as refused:
        mst.compile(UNet(), memory=1)(batch(256, WIDTH))
    compiled = mst.compile(UNet(), memory=refused.value.least_bytes)
    assert lets_go(compiled, batch(256, WIDTH))


def test_the_least_limit_has_no_room_for_more_than_the_gradient_of_the_output() -> None:
    model, x = nn.Sequential(*[Sine() for _ in range(8)]), batch(4096, WIDTH).requires_grad_()
    step(model, x)
    assert x.grad is not None
    with pytest.raises(BudgetError) as refused:
        mst.compile(model, memory=1)(x)
    least = refused.value.least_bytes
    with pytest.raises(BudgetError):
        mst.compile(model, memory=least - 1)(x)
    compiled = mst.compile(model, memory=least)
    compiled(x)
    with Within(torch.device("cpu")) as meter:
        meter.ignore([x, x.grad])
        compiled(x).sum().backward()
    assert meter.peak_bytes + x.nbytes <= least + 4  # of the sum


def test_what_is_not_alone_in_being_written_to_is_written_to() -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = functional.layer_norm(x, (WIDTH,))
            return functional.silu(y, inplace=True) + y

    plain, x = nn.Sequential(*[Twice() for _ in range(6)]), batch(256, WIDTH).requires_grad_()
    compiled = mst.compile(copy.deepcopy(plain), memory=0.9)
    assert torch.equal(step(compiled, x), step(plain, x))


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever can be made again is said to cost nothing, and stages are large."""
    monkeypatch.setattr(cutting, "_LARGE", 1 / 4)
    monkeypatch.setattr(cutting, "_PART", 1 / 16)
    remaking = measure.StageRun._remaking
    monkeypatch.setattr(tracing_remaking, "_WORTH", (0.0,))
    monkeypatch.setattr(measure.StageRun, "_remaking", lambda *a: (remaking(*a)[0], 0.0))


def ways_of(compiled: mst.Compiled) -> int:
    assert compiled.plan is not None
    return sum(stage.way > 0 for stage in compiled.plan.stage_costs.stages)


@pytest.mark.usefixtures("cheap")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("name", ["dropping", "written", "squared", "counting", "unet", "words"])
def test_tapes_kept_in_part(name: str) -> None:
    plain, x = MODELS[name]()
    ours = copy.deepcopy(plain)
    compiled = mst.compile(ours, memory=0.9)
    found = trained(compiled, ours, x)
    assert ways_of(compiled)
    assert compiled.checked is not None and compiled.checked.outcome == "equal"
    assert_equal(found, trained(plain, plain, x))


@pytest.mark.usefixtures("cheap")
def test_a_second_backward_by_tapes_kept_in_part() -> None:
    plain, x = Words(), torch.randint(40, (4, 12))
    ours = copy.deepcopy(plain)
    compiled = mst.compile(ours, memory=0.9)
    for call in (plain, compiled):
        torch.manual_seed(0)
        loss = call(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward()
    assert ways_of(compiled)
    assert_equal([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])
    with pytest.raises(MultistageError, match="double backward"):
        compiled(x).square().mean().backward(create_graph=True)


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda p: p.detach().numpy().fill(2.0), "holds other numbers"),
        (lambda p: p.data.add_(0), None),  # the same numbers
        (lambda p: p.detach().add_(0), "in place"),
        (lambda p: setattr(p, "data", p.data.clone()), "was given other memory"),
    ],
)
def test_what_tapes_are_made_again_from_is_as_it_was(
    change: Callable[[Tensor], object], said: str | None
) -> None:
    model, x = Net(dropping), batch()
    compiled = mst.compile(model, memory=0.9)
    step(compiled, x)
    assert ways_of(compiled)
    y = compiled(x).square().mean()
    with torch.no_grad():
        change(model.blocks[1].norm.weight)  # type: ignore[arg-type, union-attr]
    with contextlib.nullcontext() if said is None else pytest.raises(StateError, match=said):
        y.backward()


def test_graphs_hold_parameters_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    tensor = Run._tensor

    def seen(*given: Any) -> Tensor:
        asked.append((found := tensor(*given)).data_ptr())
        return found

    monkeypatch.setattr(Run, "_tensor", seen)
    model, x = Net(dropping), batch()
    step(mst.compile(model, memory=0.7), x)
    assert asked
    assert not {p.data_ptr() for p in model.parameters()} & {*asked}


def test_statistics_that_decide_nothing_are_copied_for_runs_again_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, x = Net(dropping), batch()
    ours = copy.deepcopy(plain)
    compiled = mst.compile(ours, memory=0.7)
    for model, call in ((plain, plain), (ours, compiled)):
        torch.manual_seed(0)
        step(call, x)
        model.zero_grad()
    copied: list[int] = []
    cloned = environment_captured.cloned
    monkeypatch.setattr(
        environment_captured, "cloned", lambda given: copied.append(len(given)) or cloned(given)
    )
    torch.manual_seed(1)
    y = compiled(x).square().mean()
    assert not copied
    y.backward()
    assert copied
    torch.manual_seed(1)
    plain(x).square().mean().backward()
    assert_equal([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])
    assert_equal([*ours.buffers()], [*plain.buffers()])


def test_a_buffer_that_is_read_is_not_taken_for_one_that_decides_nothing() -> None:
    compiled = mst.compile(Net(counting), memory=0.7)
    step(compiled, batch())
    stages = vars(compiled)["_multistage_used"].chains[-1]._multistage.graph
    unread = {name for stage in stages for name in stage.unread}
    buffers = {name for stage in stages for name in stage._buffers}
    assert {name.rpartition("buffers_")[2] for name in buffers - unread} == {"count_"}
    assert {name.rpartition("buffers_")[2] for name in unread} == {
        "running_mean_",
        "running_var_",
        "num_batches_tracked_",
    }


FACTOR = {"value": 1.0}  # which TorchDynamo does not see the operator read


@torch.library.custom_op("multistage_tests::scaled", mutates_args=())
def scaled(x: Tensor) -> Tensor:
    return x * (FACTOR["value"] or torch.rand_like(x))


scaled.register_fake(torch.empty_like)
scaled.register_autograd(lambda ctx, gradient: gradient)


def own_operator(block: Any, y: Tensor) -> Tensor:
    return torch.tanh(scaled(torch.tanh(y)))


def unsteady(block: Any, y: Tensor) -> Tensor:
    at = torch.zeros(y.shape[0], dtype=torch.long)
    return torch.tanh(torch.zeros_like(y).index_put((at,), torch.tanh(y), accumulate=True))


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("memory", [0.9, 0.45])
@pytest.mark.parametrize("check", ["error", "off"])
def test_what_operators_of_ones_own_make_again_is_compared(
    check: Any, memory: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = mst.compile(Net(own_operator), memory=memory, check=check)
    step(compiled, batch())
    y = compiled(batch())
    monkeypatch.setitem(FACTOR, "value", 2.0)
    if check == "off":
        y.sum().backward()
        return
    with pytest.raises(StateError, match="saved other numbers"):
        y.sum().backward()


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("check", ["error", "off"])
def test_operators_of_ones_own_that_draw_now_and_then_are_made_again_alike(
    check: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, x = Net(own_operator), batch()
    ours = copy.deepcopy(plain)
    compiled = mst.compile(ours, memory=0.9, check=check)
    step(compiled, x)
    assert ways_of(compiled)
    ours.load_state_dict(plain.state_dict())
    ours.zero_grad()
    monkeypatch.setitem(FACTOR, "value", 0.0)  # it drew nothing when it was measured
    assert_equal(trained(compiled, ours, x), trained(plain, plain, x))


def test_what_adds_in_the_order_of_threads_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = mst.compile(Net(unsteady), memory=0.5)
    step(compiled, batch())
    numbers = itertools.count()
    monkeypatch.setattr(Digests, "of", lambda *_: next(numbers))
    with pytest.raises(StateError, match="saved other numbers"):
        step(compiled, batch())


@pytest.mark.usefixtures("cheap")
def test_what_operations_of_torch_make_again_is_compared_by_the_check_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled = mst.compile(Net(dropping), memory=0.7)
    monkeypatch.setattr(Digests, "of", None)
    step(compiled, batch())
    assert compiled.checked is not None and compiled.checked.outcome == "equal"
    torch.compiler.reset()
    remake = StageRunner.remake

    def wrong(*given: Any) -> dict[int, Tensor]:
        return {n: t + 1 for n, t in (remake(*given) or {}).items()}

    monkeypatch.setattr(StageRunner, "remake", wrong)
    with pytest.raises(StateError, match="does not do what the captured graph does"):
        mst.compile(Words(), memory=0.9)(torch.randint(40, (4, 12)))


class Window(nn.Module):
    """Takes a part of what it makes, by a number that comes with each call."""

    def __init__(self, part: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.part = part

    def forward(self, x: Tensor, start: int) -> Tensor:
        for layer in self.layers:
            x = x + self.part(layer(x), start).sum(0)
        return x


def saved_part(y: Tensor, start: int) -> Tensor:
    return torch.sin(torch.tanh(y)[start : start + 8])


def part_of_what_is_kept(y: Tensor, start: int) -> Tensor:
    y = functional.dropout(y, 0.3)
    return torch.sin(torch.tanh(y[start : start + 8])) + torch.sin(y).mean(0)


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("part", [saved_part, part_of_what_is_kept])
def test_what_is_made_again_lies_where_it_lay_in_this_call(
    part: Callable[[Tensor, int], Tensor],
) -> None:
    plain, x = Window(part), batch(32, WIDTH)
    ours = copy.deepcopy(plain)
    compiled = mst.compile(ours, memory=0.9, dynamic=True)
    for start in (3, 5, 9):
        for model, call in ((plain, plain), (ours, compiled)):
            model.zero_grad()
            torch.manual_seed(0)
            call(x, start).square().mean().backward()
        assert ways_of(compiled)
        assert_equal([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


class Telling(Net):
    """Returns a state between its blocks too."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        told = x
        for number, block in enumerate(self.blocks):
            x = block(x)
            told = x if number < 2 else told
        return x, told


@pytest.mark.parametrize("kept", ["whole", "in part"])
def test_a_write_to_an_output_that_leaves_no_version_is_noticed(
    kept: str, request: pytest.FixtureRequest
) -> None:
    extra = None
    if kept == "in part":
        request.getfixturevalue("cheap")
        extra = lambda block, y: torch.tanh(torch.sin(y))  # noqa: E731
    compiled = mst.compile(Telling(extra, blocks=6), memory=0.9 if extra else 0.6)
    for write in (False, True):
        x, told = compiled(batch())
        if write:
            told.detach().numpy()[:] *= 2
        loss = x.square().mean()
        if not write:
            loss.backward()
            continue
        with pytest.raises(StateError, match="holds other numbers"):
            loss.backward()


@pytest.mark.parametrize("memory", [0.4, 0.7])
def test_of_states_that_nothing_else_can_write_to_no_checksum_is_taken(
    memory: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled, x = mst.compile(Net(blocks=6), memory=memory), batch()
    step(compiled, x)
    seen: list[int] = []
    monkeypatch.setattr(states, "digest", lambda tensor: seen.append(tensor.data_ptr()))
    step(compiled, x)
    assert {*seen} == {x.data_ptr()}


def rarely(block: Any, y: Tensor) -> Tensor:
    """Draw numbers by how large a buffer is: at first none."""
    return torch.tanh(y + torch.poisson(block.count.expand(y.shape)) * torch.sigmoid(y))


@pytest.mark.parametrize("kept", ["whole", "in part"])
def test_operations_that_draw_nothing_at_first_are_watched(
    kept: str, request: pytest.FixtureRequest
) -> None:
    if kept == "in part":
        request.getfixturevalue("cheap")
    plain, x = Net(rarely), batch()
    ours = copy.deepcopy(plain)
    compiled = mst.compile(ours, memory=0.6 if kept == "whole" else 0.9)
    step(compiled, x)
    step(plain, x)
    for model in (plain, ours):
        model.zero_grad()
        for block in model.blocks:
            block.count.fill_(3)
    assert_equal(trained(compiled, ours, x), trained(plain, plain, x))


class Dropped(nn.Module):
    """Residual blocks, later ones left out more often."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(10)])

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            stays = 0.9 - 0.05 * number
            mask = x.new_empty(len(x), 1).bernoulli_(stays).div_(stays)
            x = x + torch.sigmoid(block.linear(x).tanh().sin()) * mask
        return x


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize(
    ("model", "x"), [(Words, torch.randint(40, (4, 12))), (Dropped, torch.randn(32, WIDTH))]
)
def test_stages_that_do_the_same_are_measured_once(
    monkeypatch: pytest.MonkeyPatch, model: type[nn.Module], x: Tensor
) -> None:
    counted: list[str] = []
    count = measure.StageRun.count

    def counting_run(run: measure.StageRun) -> Any:
        counted.append(run._trait.name)
        return count(run)

    monkeypatch.setattr(measure.StageRun, "count", counting_run)
    found = []
    for alike in (True, False):
        counted.clear()
        if not alike:
            monkeypatch.setattr(measure, "_kind_of", lambda *_: None)
        torch.manual_seed(0)
        compiled = mst.compile(model(), memory=0.6)
        step(compiled, x)
        assert compiled.plan is not None
        found.append((len(counted), compiled.plan.stage_costs))
    (few, costs), (all_of_them, each) = found
    assert few <= all_of_them // 2
    assert costs == each


def test_blocks_that_are_left_out_by_chance_are_kept_in_part(cheap: None) -> None:
    torch.manual_seed(0)
    plain = Dropped()
    ours = copy.deepcopy(plain)
    compiled = mst.compile(ours, memory=0.9)
    found = trained(compiled, ours, batch())
    assert ways_of(compiled)
    assert_equal(found, trained(plain, plain, batch()))


def test_calls_that_only_prepare_torch_do_not_keep_stages_together() -> None:
    compiled = mst.compile(Net(vectorised), memory=0.6)
    step(compiled, batch())
    assert compiled.plan is not None
    assert len(compiled.plan.stage_costs.stages) > len(compiled.blocks)


@pytest.mark.usefixtures("cheap")
def test_a_way_that_gives_other_bits_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Remade.make
    monkeypatch.setattr(Remade, "make", lambda *a: {n: t + 1 for n, t in make(*a).items()})
    compiled = mst.compile(Words(), memory=0.9)
    step(compiled, torch.randint(40, (4, 12)))
    assert not ways_of(compiled)


@pytest.mark.usefixtures("cheap")
def test_a_stage_that_saves_other_tensors_than_measured_runs_again_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain, x = Words(), torch.randint(40, (4, 12))
    ours = copy.deepcopy(plain)
    compiled = mst.compile(ours, memory=0.9)
    torch.manual_seed(0)
    losses = [step(compiled, x)]
    assert ways_of(compiled)
    monkeypatch.setattr(Remade, "make", None)
    monkeypatch.setattr(StageRunner, "remake", lambda *a: None)
    losses.append(step(compiled, x))
    torch.manual_seed(0)
    assert_equal(losses, [step(plain, x), step(plain, x)])
    assert_equal([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.parametrize("kept", ["whole", "in part"])
def test_iterations_stay_within_the_limit(kept: str, request: pytest.FixtureRequest) -> None:
    if kept == "in part":
        request.getfixturevalue("cheap")
    model, x = UNet(), batch(256, WIDTH).requires_grad_()
    compiled = mst.compile(model, memory=0.8)
    step(compiled, x)
    assert compiled.plan is not None and compiled.plan.memory_bytes is not None
    known = [x, *model.parameters()]
    with Within(torch.device("cpu")) as meter:
        meter.ignore([*known, *(t.grad for t in known if t.grad is not None)])
        compiled(x).backward(torch.ones_like(x))
    assert meter.peak_bytes + x.nbytes <= compiled.plan.memory_bytes + x.nbytes  # of the adjoint


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of TorchDynamo
def test_forwards_before_a_backward_and_accumulated_gradients() -> None:
    plain = nn.Sequential(nn.ReLU(inplace=True), Net(counting))
    ours = copy.deepcopy(plain)
    compiled = mst.compile(ours, memory=0.8)
    for call in (plain, compiled):
        torch.manual_seed(0)
        ones, others = call(batch()), call(-batch().requires_grad_())
        (ones * others).sum().backward()
        step(call, batch())
        with torch.no_grad():
            call(batch())
        call.eval()
        step(call, batch())
        call.train()
        step(call, batch(20, WIDTH))
    assert_equal([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])
    assert_equal([*ours.buffers()], [*plain.buffers()])
    # Of both inputs in training, in eval, of 20 rows; the one without a gradient has none.
    assert len(compiled.plans) == 4


def test_ambient_autocast() -> None:
    plain = Net()
    ours = copy.deepcopy(plain)
    compiled = mst.compile(ours, memory=0.6)
    for call in (plain, compiled):
        with torch.autocast("cpu", torch.bfloat16):
            out = call(batch())
        out.float().square().mean().backward()
    assert_equal([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


class Inverts(nn.Module):
    """Turns modes on, and in them fails for some inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(8)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            scale = torch.linalg.inv(x).sum()
        return x * scale


def tiny(block: Any, y: Tensor) -> Tensor:
    denormal = y.detach() * 1e-38 * 1e-3
    return torch.tanh(block.linear(denormal * 1e38 * 1e3))


def test_denormal_numbers_are_flushed_as_in_forward() -> None:
    plain, x = Net(tiny), batch()
    ours = copy.deepcopy(plain)
    compiled = mst.compile(ours, memory=0.5)
    compiled(x)
    plain(x)
    for call in (plain, compiled):
        loss = call(x).square().mean()
        torch.set_flush_denormal(True)
        try:
            loss.backward()
        finally:
            torch.set_flush_denormal(False)
    assert_equal([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


def test_modes_that_an_error_leaves_open_are_closed() -> None:
    compiled = mst.compile(Inverts(), memory=0.9)
    step(compiled, batch(8, 8))
    assert compiled.plan is not None and not compiled.plan.keeps_all
    with pytest.raises(torch.linalg.LinAlgError):
        compiled(torch.zeros(8, 8))
    assert torch.is_grad_enabled() and not torch.is_autocast_enabled("cpu")


# ------------------------------------------------------- what a graph depends on

APPENDED: list[Tensor] = []


def test_facts_that_change_between_iterations_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FUZZ_SCALE", "1")
    rng = random.Random(0)
    names = [name for name in fuzz_facts.NAMES if name != "default" or torch.__version__ >= "2.13"]
    rng.shuffle(names)
    assert fuzz_facts.changed(names, rng) == fuzz_facts.Found(compared=len(names))
    # Of a model that is captured once, each is another.
    monkeypatch.setattr(mst, "compile", lambda model, **_: copy.deepcopy(model))
    assert fuzz_facts.changed(["attribute", "weight", "mode"], rng).differing


def test_side_effects_happen_at_every_call() -> None:
    def appending(block: Any, y: Tensor) -> Tensor:
        APPENDED.append(y.sum().detach())
        return y

    APPENDED.clear()
    plain = Net(appending, blocks=4)
    ours = copy.deepcopy(plain)
    trained(plain, plain, batch())
    found = [*APPENDED]
    APPENDED.clear()
    trained(mst.compile(ours, memory=0.7), ours, batch())
    assert_equal(APPENDED, found)


# ------------------------------------------------------------------- refusals


def test_a_graph_break_is_refused_with_its_line() -> None:
    def breaking(block: Any, y: Tensor) -> Tensor:
        return y * float(y.sum().item() > 0) if len(str(y.tolist())) else y

    compiled = mst.compile(Net(breaking), memory=0.7)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"captured whole at .*test_compiling\.py:\d+ "):
            compiled(batch())


def test_a_call_that_only_logs_is_refused_with_the_setting_that_leaves_it_out() -> None:
    def logging_block(block: Any, y: Tensor) -> Tensor:
        LOG.warning("a block")
        return block(y)  # type: ignore[no-any-return]

    with pytest.raises(ArgumentError, match=r"hint: Add the .*torch\._dynamo\.config\.ignore_logg"):
        mst.compile(Net(logging_block), memory=0.7)(batch())


class Broken(nn.Module):
    """Asks for a number between blocks, and then computes what no graph holds."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Net(dropping), Net(counting)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if x.sum().item() > -1e9:
            x = outside(x)
        return self.second(x)  # type: ignore[no-any-return]


@torch.compiler.disable
def outside(x: Tensor) -> Tensor:
    return torch.tanh(x) * x.sigmoid()


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of TorchDynamo
@pytest.mark.filterwarnings("ignore:.*Broken ran in:multistage.errors.CheckpointWarning")
def test_breaks_are_allowed_and_what_they_hold_is_told() -> None:
    plain, x = Broken(), batch()
    with pytest.raises(ArgumentError, match="allow_breaks=True"):
        mst.compile(plain, memory=0.7)(x)
    ours = copy.deepcopy(plain)
    compiled = mst.compile(ours, memory=0.7, allow_breaks=True)
    assert_equal(trained(compiled, ours, x), trained(plain, plain, x))
    assert len(compiled.plans) == 2 and not any(plan.keeps_all for plan in compiled.plans)
    assert compiled.outside_bytes == 2 * x.nbytes  # tanh(x), sigmoid(x)
    other = mst.compile(Broken(), memory=0.7, allow_breaks=True)
    told = f"in 2 graphs; autograd holds {2 * x.nbytes} bytes .* beyond the memory limit"
    with pytest.warns(CheckpointWarning, match=told):
        other(x)
    with torch._dynamo.config.patch(recompile_limit=1), pytest.raises(ArgumentError, match="kinds"):
        other(batch(6, WIDTH))
    with pytest.raises(ArgumentError, match="fraction"):
        mst.compile(plain, memory="1 MiB", allow_breaks=True)


class TurnsGradientsOff(Broken):
    """A graph ends where gradients are off."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch.set_grad_enabled(False)
        y = self.second(x)
        torch._dynamo.graph_break()
        y = self.first(y)
        torch.set_grad_enabled(True)
        return self.second(x + torch.tanh(y))  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # of TorchDynamo
@pytest.mark.filterwarnings("ignore:.* ran in:multistage.errors.CheckpointWarning")
@pytest.mark.parametrize("memory", [0.7, 1.0])
def test_gradients_that_a_graph_turns_off_stay_off_after_it(memory: float) -> None:
    plain, x = TurnsGradientsOff(), batch()
    ours = copy.deepcopy(plain)
    compiled = mst.compile(ours, memory=memory, allow_breaks=True)
    assert_equal(trained(compiled, ours, x), trained(plain, plain, x))
    assert torch.is_grad_enabled()


def raising(block: Any, y: Tensor) -> Tensor:
    raise ValueError(f"{len(y)} rows")


ASSERTING: dict[str, Any] = {}  # not as pytest rewrites it
exec("def asserting(block, y):\n    assert len(y) < 32, 'too many'\n    return y", ASSERTING)


@pytest.mark.parametrize(
    ("model", "given", "kind", "match"),
    [
        (Net(raising), (batch(),), ValueError, "^32 rows$"),
        (Net(ASSERTING["asserting"]), (batch(),), AssertionError, "^too many$"),
        (Net(), (), TypeError, "required positional argument"),
        (Net(), (batch(2, 3),), RuntimeError, "^mat1 and mat2 shapes cannot be multiplied"),
        (nn.BatchNorm1d(WIDTH, momentum=None), (batch(),), ArgumentError, "whole at .*data-dep"),
        (Net(), (batch().to_sparse(),), ArgumentError, "whole at .*sparse Tensors"),
        (Net(lambda _, y: y.to_sparse()), (batch(),), ArgumentError, "whole at .*sparse Tensors"),
        (Net(branching), (batch(),), ArgumentError, "inside of torch's operator 'cond'"),
    ],
)
def test_a_failed_call_raises_what_the_model_raises_or_says_why(
    model: Any, given: tuple[Tensor, ...], kind: type[Exception], match: str
) -> None:
    with pytest.raises(kind, match=match) as caught:
        mst.compile(model, memory=0.7)(*given)
    assert type(caught.value) is kind


def test_more_kinds_of_calls_than_torch_compile_allows_are_refused() -> None:
    compiled = mst.compile(Net(blocks=2), memory=1.0, check="off")
    with torch._dynamo.config.patch(recompile_limit=2):
        step(compiled, batch(4, WIDTH))
        step(compiled, batch(5, WIDTH))
        with pytest.raises(ArgumentError, match="captured for 2 kinds of calls"):
            compiled(batch(6, WIDTH))


def test_a_dynamic_graph_serves_other_lengths() -> None:
    plain = Net(dropping, blocks=4)
    ours = copy.deepcopy(plain)
    compiled = mst.compile(ours, memory=0.7, dynamic=True)
    for call in (plain, compiled):
        torch.manual_seed(0)
        for rows in (20, 28, 24, 22):
            step(call, batch(rows, WIDTH))
    assert len(compiled.plans) == 1
    assert_equal([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


def test_a_run_without_a_graph_is_refused() -> None:
    compiled = mst.compile(Net(), memory=0.7)
    turned_off = torch._dynamo.config.patch(disable=True)
    with turned_off, pytest.raises(ArgumentError, match="ran without a graph"):
        compiled(batch())


def test_an_operator_mode_around_a_call_is_refused_and_leaves_the_graph() -> None:
    compiled = mst.compile(Net(), memory=0.7)
    step(compiled, batch())
    with FlopCounterMode(display=False), pytest.raises(ArgumentError, match="dispatch mode"):
        compiled(batch())
    step(compiled, batch())


def test_a_limit_that_is_too_small_names_the_smallest() -> None:
    compiled = mst.compile(Net(), memory=1000)
    with pytest.raises(BudgetError, match="smallest"):
        compiled(batch())


def test_a_parameter_that_changes_before_backward_is_refused() -> None:
    model = Net()
    loss = mst.compile(model, memory=0.6)(batch()).sum()
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    with pytest.raises((StateError, RuntimeError), match=r"in ?place"):
        loss.backward()


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (3, "no model"),
        (nn.DataParallel(nn.Linear(1, 1)), "DataParallel"),
        (nn.Sequential(nn.SyncBatchNorm(4)), "SyncBatchNorm"),
        (mst.Sequential([nn.Linear(1, 1)]), "limit already"),
        (nn.Sequential(mst.compile(nn.Linear(1, 1))), "compiled model inside"),
        (torch.compile(nn.Linear(1, 1), backend="eager"), "compiled already"),
    ],
)
def test_what_cannot_be_served(model: Any, match: str) -> None:
    with pytest.raises(ArgumentError, match=match):
        mst.compile(model, memory=0.7)


# ------------------------------------------------------------------- as a model


def test_it_stands_in_front_of_the_model() -> None:
    model = Net()
    compiled = mst.compile(model, memory=0.6)
    assert list(compiled.state_dict()) == list(model.state_dict())
    assert compiled.blocks is model.blocks
    calls: list[int] = []
    compiled.register_forward_hook(lambda *_: calls.append(1))
    compiled.eval()
    assert not model.training
    step(compiled, batch())
    assert calls == [1]
    assert "memory=0.6" in repr(compiled)


def test_trainers_see_the_arguments_of_the_model() -> None:
    def scaled(x: Tensor, *, factor: float = 2.0) -> Tensor:
        return torch.tanh(x) * factor

    model = Net()
    ours = mst.compile(model, memory=0.6)
    assert inspect.signature(ours.forward) == inspect.signature(model.forward)
    assert list(inspect.signature(type(ours).forward).parameters)[1:] == ["x"]
    assert isinstance(ours, mst.Compiled) and inspect.ismethod(ours.forward)
    assert inspect.signature(mst.compile(torch.tanh, memory="1 MiB").forward)  # it has none itself
    compiled = mst.compile(scaled, memory="1 MiB")
    assert list(inspect.signature(compiled.forward).parameters) == ["x", "factor"]
    assert torch.equal(compiled(torch.ones(3), factor=3.0), scaled(torch.ones(3), factor=3.0))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(copied: Callable[[Any], Any]) -> None:
    compiled = mst.compile(Net(), memory=0.6)
    step(compiled, batch())
    other = copied(compiled)
    assert other.plan is None
    other.zero_grad()
    compiled.zero_grad()
    assert torch.equal(step(other, batch()), step(compiled, batch()))
    assert_equal([p.grad for p in other.parameters()], [p.grad for p in compiled.parameters()])


def test_a_function() -> None:
    plain = UNet()
    ours = copy.deepcopy(plain)
    compiled = mst.compile(lambda x, *, power: {"loss": (ours(x) ** power).sum()}, memory=0.8)
    x = batch()
    compiled(x, power=2)["loss"].backward()  # type: ignore[index]
    (plain(x) ** 2).sum().backward()
    assert compiled.plan is not None and not compiled.plan.keeps_all
    assert_equal([p.grad for p in ours.parameters()], [p.grad for p in plain.parameters()])


def test_a_tier(tmp_path: Path) -> None:
    plain, x = UNet(), batch(512, WIDTH)
    ours = copy.deepcopy(plain)
    compiled = mst.compile(ours, memory=0.9, tiers=f"file://{tmp_path}?buffers=64KiB")
    assert_equal(trained(compiled, ours, x), trained(plain, plain, x))
    compiled.close()
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------ torch.compile's name


def test_the_backend_is_registered(tmp_path: Path) -> None:
    (point,) = [p for p in entry_points(group="torch_dynamo_backends") if p.name == "multistage"]
    assert callable(point.load())
    plain = Net(dropping, blocks=6)
    ours = copy.deepcopy(plain)
    options = {"memory": 0.6, "tiers": f"file://{tmp_path}?buffers=64KiB"}
    call = torch.compile(ours, backend="multistage", fullgraph=True, options=options)
    assert_equal(trained(call, ours, batch()), trained(plain, plain, batch()))


def test_a_module_compiled_in_place_keeps_its_class_and_runs_within_the_limit() -> None:
    plain = Net(dropping, blocks=6)
    ours = copy.deepcopy(plain)
    ours.compile(backend="multistage", fullgraph=True, options={"memory": 0.6})
    assert_equal(trained(ours, ours, batch()), trained(plain, plain, batch()))
    assert type(ours) is Net

    def held(model: Net) -> int:
        kept = dict[int, int]()  # by storage

        def note(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(batch())
        return sum(kept.values())

    assert held(ours) < 0.7 * held(plain)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({}, "needs .*fullgraph=True"),
        ({"fullgraph": True, "options": {"tier": "x"}}, "takes memory, tiers"),
        ({"fullgraph": True, "options": {"tiers": "x:"}}, "unknown|no tier|x:"),
    ],
)
def test_the_backend_refuses(given: dict[str, Any], match: str) -> None:
    call = torch.compile(Net(), backend="multistage", **given)
    with pytest.raises(Exception, match=match):
        call(batch())


@torch._dynamo.disable
def cubed(x: torch.Tensor) -> torch.Tensor:
    """Code between graphs that computes a gradient by torch.func."""
    return x + torch.func.grad(lambda z: (z * z * z).sum())(x)


@pytest.mark.parametrize("inside", [True, False])
def test_torch_func_beside_breaks_is_refused_and_leaves_hooks_on(inside: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stages = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh())] * 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stages(x)
            if inside:
                x = x + torch.func.grad(lambda z: (z * z * z).sum())(x)
                torch._dynamo.graph_break()
            else:
                x = cubed(x)
            return self.stages(x)

    model = mst.compile(Model(), memory=1.0, allow_breaks=True)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"by torch\.func, beside which"):
            model(torch.ones(4, 16))
        assert torch._C._autograd._saved_tensors_hooks_is_enabled()


def test_a_call_inside_of_torch_func_says_so() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    model = mst.compile(net, memory="1 MiB")
    with pytest.raises(ArgumentError, match=r"cannot be captured whole: .*torch\.func\.grad"):
        torch.func.grad(lambda x: model(x).sum())(torch.randn(3, 4))


def test_hooks_on_saved_tensors_around_a_first_call_see_what_they_see_later() -> None:
    ours, counts = mst.compile(Net(blocks=6), memory=0.6), []
    for _ in range(3):
        seen: list[Tensor] = []

        def see(tensor: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(see, lambda tensor: tensor):
            loss = ours(batch()).square().mean()
        loss.backward()
        counts.append(len(seen))
    assert counts[0] == counts[1] == counts[2] > 0


def test_a_first_call_inside_of_a_checkpoint() -> None:
    plain = Net(dropping, blocks=6)
    ours = copy.deepcopy(plain)

    def checkpointed(model: nn.Module) -> Callable[[Tensor], Tensor]:
        def call(x: Tensor) -> Tensor:
            found: Tensor = checkpoint(model, x.requires_grad_(), use_reentrant=False)
            return found

        return call

    found = trained(checkpointed(mst.compile(ours, memory=0.7)), ours, batch())
    assert_equal(found, trained(checkpointed(plain), plain, batch()))


def test_a_model_that_maps_gradients_of_torch_func() -> None:
    plain, x = Net(differentiated), batch()
    ours = copy.deepcopy(plain)
    compiled = mst.compile(ours, memory=0.95)
    assert_equal(trained(compiled, ours, x), trained(plain, plain, x))
    assert compiled.plan is not None and not compiled.plan.keeps_all
    assert torch._C._autograd._saved_tensors_hooks_is_enabled()
