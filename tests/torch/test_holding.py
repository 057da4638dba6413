"""What iterations really hold stays within the limit, counted by means that the package lacks.

`Alive` keeps a weak pointer to each storage that an operation returns and asks after every
operation which are there still; the package's own meter is called back when one is freed.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

import multistage.torch as mst
from multistage.actions import Advance, EndForward, Free, Load, Reverse, Save, Tape
from multistage.errors import BudgetError, CheckpointWarning
from multistage.torch.chains.runner import Run, Traits
from multistage.torch.environment.scope import Scope
from multistage.torch.planning.calls import ChainCall

ROWS, WIDTH = 2000, 64
# Of a limit; states of generators and the loss are not counted.
MOST = 1.0 + 1e-4


class Alive(TorchDispatchMode):
    """Counts the bytes of storages that are alive, but for those of some tensors."""

    def __init__(self, known: list[Tensor]) -> None:
        super().__init__()
        self._known = {t.untyped_storage()._cdata for t in known}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            # Not the states of generators.
            if isinstance(leaf, Tensor) and leaf.dtype != torch.uint8:
                storage = leaf.untyped_storage()
                if storage._cdata not in self._known:
                    self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                del storage
        self._storages = {k: v for k, v in self._storages.items() if not v[0].expired()}
        self.peak_bytes = max(self.peak_bytes, sum(n for _, n in self._storages.values()))
        return result


class Block(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = x + self.b(torch.tanh(self.a(x)))
        return made


class HookOnOutput(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        gate = torch.sigmoid(y.detach())
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * gate)
        return y


class HookOnInput(Block):
    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(x.detach())
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient * gate)
        return super().forward(x)


class Leaves(Block):
    """Leaves a tensor in an attribute, until the next iteration."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.last = torch.sigmoid(y.detach())
        return y


class LeavesGraph(Block):
    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.last = torch.sigmoid(y)
        return y


class Skip(Block):
    """Keeps its output in a dict, or adds one that is kept there."""

    def __init__(self, kept: dict[int, Tensor], number: int, puts: bool) -> None:
        super().__init__()
        self.kept, self.number, self.puts = kept, number, puts

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if not self.puts:
            return y + self.kept[self.number]
        self.kept[self.number] = y
        return y


class Expands(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x.mean(0, keepdim=True))).expand(x.shape[0], -1)


class Views(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, state: Any) -> tuple[Tensor, Tensor, Tensor]:
        x = state if isinstance(state, Tensor) else state[0] + state[1] * state[2]
        y = torch.tanh(self.a(x))
        return y, y.view(-1).view(y.shape), y[:]


class Packs(nn.Module):
    """Copies its input if that has gaps."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.a(x.contiguous()))


def _skips() -> list[nn.Module]:
    kept: dict[int, Tensor] = {}
    return [Skip(kept, min(k, 7 - k), k < 4) for k in range(8)]


STAGES: dict[str, Callable[[], list[nn.Module]]] = {
    "plain": lambda: [Block() for _ in range(8)],
    "hooks on outputs": lambda: [HookOnOutput() for _ in range(8)],
    "hooks on inputs": lambda: [HookOnInput() for _ in range(8)],
    "attributes": lambda: [Leaves() for _ in range(8)],
    "attributes with graphs": lambda: [LeavesGraph() for _ in range(8)],
    "skips through a dict": _skips,
    "expanded outputs": lambda: [Expands() if k % 2 else Block() for k in range(8)],
    "several views": lambda: [Views() for _ in range(8)],
}


def _iterate(model: nn.Module, x: Tensor, inside: Callable[[], Any]) -> None:
    with inside():
        output = model(x)
        while isinstance(output, tuple):
            output = output[0]
        loss = output.float().square().sum()
    del output
    loss.backward()


def _peaks(
    chain: mst.Sequential,
    x: Tensor,
    inside: Callable[[], Any] = contextlib.nullcontext,
    iterations: int = 3,
) -> list[float]:
    """Return the peaks of iterations, one after the other, in parts of the limit."""
    for parameter in chain.parameters():
        parameter.grad = torch.zeros_like(parameter)
    gradients = [p.grad for p in chain.parameters() if p.grad is not None]
    alive = Alive([*chain.parameters(), *gradients, x])
    found = []
    for _ in range(iterations):
        alive.peak_bytes = 0
        with alive:
            _iterate(chain, x, inside)
        assert chain.plan.memory_bytes is not None
        held = alive.peak_bytes + x.untyped_storage().nbytes()
        found.append(held / chain.plan.memory_bytes)
    return found


def _least(stages: list[nn.Module], x: Tensor, inside: Callable[[], Any]) -> int:
    """Return the smallest limit that works, as the error of a smaller one tells it."""

    def prepared(limit: int) -> None:
        with inside():
            mst.Sequential(nn.Sequential(*stages), memory=limit).prepare(x)

    with pytest.raises(BudgetError) as refused:
        prepared(1)
    least = refused.value.least_bytes
    assert least is not None
    prepared(least)
    return least


def _bfloat16() -> torch.autocast:
    return torch.autocast("cpu", torch.bfloat16)


@pytest.mark.long(but=("plain", "several views"))
@pytest.mark.parametrize("name", STAGES)
def test_iterations_stay_within_the_limit_whatever_holds_memory(name: str) -> None:
    stages, x = STAGES[name](), torch.randn(ROWS, WIDTH)
    least = _least(stages, x, contextlib.nullcontext)
    for limit in (least, int(1.2 * least)):
        chain = mst.Sequential(nn.Sequential(*stages), x, memory=limit)
        assert max(_peaks(chain, x)) <= MOST


def test_weights_that_autocast_keeps_are_counted() -> None:
    stages, x = [Block(256) for _ in range(8)], torch.randn(64, 256)
    least = _least(stages, x, _bfloat16)
    chain = mst.Sequential(nn.Sequential(*stages), memory=least)
    with _bfloat16():
        chain.prepare(x)
    assert max(_peaks(chain, x, _bfloat16)) <= MOST + (1 << 16) / least


@pytest.mark.long(but="gaps")
@pytest.mark.parametrize("planned_for", ["dense", "gaps", "transposed", "repeated"])
def test_inputs_of_other_strides_are_planned_for_by_themselves(planned_for: str) -> None:
    inputs = {
        "dense": torch.randn(ROWS, WIDTH),
        "gaps": torch.randn(ROWS, 2 * WIDTH)[:, ::2],
        "transposed": torch.randn(WIDTH, ROWS).t(),
        "repeated": torch.randn(1, WIDTH).expand(ROWS, WIDTH),
    }
    chain = mst.Sequential(nn.Sequential(*[Packs() for _ in range(8)]), memory=0.6)
    chain.prepare(inputs[planned_for])
    for x in inputs.values():
        chain.prepare(x)  # copies the input, which is not counted here
        assert max(_peaks(chain, x, iterations=2)) <= MOST


class Grows(Block):
    """Leaves more in an attribute from some iteration on."""

    leaves = 0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        self.last = [torch.sigmoid(y.detach()) for _ in range(self.leaves)]
        return y


def test_a_limit_exceeded_while_running_is_corrected_and_told_once() -> None:
    x = torch.randn(ROWS, WIDTH)
    stages = [Grows() for _ in range(8)]
    chain = mst.Sequential(nn.Sequential(*stages), x, memory=19 * x.nbytes)
    assert chain.plan.keeps_all is False
    assert max(_peaks(chain, x, iterations=1)) <= MOST
    first = chain.plan
    stages[3].leaves = 3
    with pytest.warns(CheckpointWarning, match=r"iteration held \d+ bytes .* attributes") as told:
        found = _peaks(chain, x, iterations=5)
    assert len(told) == 1
    assert found[0] > MOST and chain.plan is not first
    assert max(found[-2:]) <= MOST
    stages[4].leaves = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _peaks(chain, x, iterations=2)


def test_a_second_backward_pass_that_exceeds_the_limit_is_named() -> None:
    x = torch.randn(ROWS, WIDTH)
    chain = mst.Sequential(nn.Sequential(*[Block() for _ in range(12)]), x, memory=0.5)
    with pytest.warns(CheckpointWarning, match=r"a second backward pass \(retain_graph=True\)"):
        for _ in range(4):
            loss = chain(x).sum()
            loss.backward(retain_graph=True)
            loss.backward()


class Wide(nn.Module):
    """A block that is wide inside."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, width), nn.Linear(width, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.outer(torch.nn.functional.gelu(self.inner(x)))
        return y


def test_a_second_backward_pass_does_not_end_training_within_the_smallest_limit() -> None:
    x = torch.randn(ROWS, WIDTH)
    model = nn.Sequential(*[Wide(k * WIDTH) for k in (1, 1, 1, 8, 1, 1, 1, 4, 1, 1)])
    with pytest.raises(BudgetError) as refused:
        mst.Sequential(model, x, memory=1)
    assert refused.value.least_bytes is not None
    chain = mst.Sequential(model, x, memory=refused.value.least_bytes)
    with pytest.warns(CheckpointWarning, match=r"a second backward pass \(retain_graph=True\)"):
        for number in range(6):
            loss = chain(x).sum()
            loss.backward(retain_graph=number == 1)
            if number == 1:
                loss.backward()


def test_a_fraction_is_one_however_it_is_written() -> None:
    """What is held beside the stages is a part of plain training, too: the limit grows with it."""
    x, model = torch.randn(ROWS, WIDTH), nn.Sequential(*[Grows() for _ in range(8)])
    for stage in model:
        stage.leaves = 1  # type: ignore[assignment]
    least: list[int | None] = []
    for memory in (0.6, "60 %", "0.6"):
        with pytest.raises(BudgetError) as refused:
            mst.Sequential(model, x, memory=memory)
        least.append(refused.value.least_bytes)
    assert least[0] is not None and least == [least[0]] * 3


def test_a_graph_that_waits_for_its_backward_is_not_counted_as_another_iteration() -> None:
    x = torch.randn(ROWS, WIDTH)
    chain = mst.Sequential(nn.Sequential(*[Block() for _ in range(8)]), x, memory=0.6)
    plan = chain.plan
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            losses = [chain(x).sum() for _ in range(3)]
            for loss in losses:
                loss.backward()
    assert chain.plan is plan


def test_a_state_is_let_go_with_the_last_tensor_of_the_stage_that_runs_again_from_it() -> None:
    made: list[StorageWeakRef] = []
    gone: list[bool] = []

    def below(x: Tensor) -> Tensor:
        x.register_hook(lambda _: gone.append(made[0].expired()))
        y = x + 1.0  # saves nothing, so asks for no tape
        made.append(StorageWeakRef(y.untyped_storage()))
        return y

    class Above(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8))  # saved too, and left to the graph

        def forward(self, y: Tensor) -> Tensor:
            return y * y * self.weight

    x, above = torch.randn(8, requires_grad=True), Above()
    stages = [below, above]
    traits = [Traits(str(k), is_pure=True, scope=Scope([each])) for k, each in enumerate(stages)]
    actions = [Tape(0), Save(1), Advance(1, 2), EndForward(), Load(1), Free(1)]
    run = Run(stages, traits, [*actions, Reverse(1), Reverse(0)])  # which nothing else may keep
    output = run.forward(x.clone())
    assert isinstance(output, Tensor)
    output.sum().backward()
    assert gone == [True]
    assert x.grad is not None and torch.equal(x.grad, above.weight * (x + 1.0) * 2)


class Residual(nn.Module):
    """x + W tanh(V x), whose gradient reaches x as it is."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + self.down(torch.tanh(self.up(x)))
        return y


def test_the_gradient_of_the_output_counts_until_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No room is kept for it as long as wide stages before the last ones are reversed."""
    reserved: list[object] = []
    monkeypatch.setattr(ChainCall, "_reserving", lambda *given: reserved.append(given) or given[1])
    wide, narrow = ([Residual(size) for _ in range(4)] for size in (4 * WIDTH, WIDTH))
    for share in (0.55, 0.6, 0.65, 0.7, 0.75, 0.8):
        chain = mst.Sequential([*wide, *narrow], memory=share)
        chain(torch.randn(ROWS, WIDTH)).sum().backward()
        assert chain.plan is not None
        assert not chain.plan.keeps_all
    assert reserved == []
