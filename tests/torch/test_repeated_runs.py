"""Repeated runs of stages: exact, or refused, whatever was done between forward and backward."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

import multistage.torch as mst
from multistage.errors import ArgumentError, DifferenceWarning, StateError
from multistage.torch.planning import calls


class Block(nn.Module):
    """A linear layer between two functions; `before` it may do something to its input."""

    def __init__(self, before: Callable[[Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.linear, self.before = nn.Linear(16, 16), before

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x if self.before is None else self.before(x))).sin()


# ------------------------------------------------- written to without a new version


def _with_numpy(tensor: Tensor) -> None:
    tensor.detach().numpy()[...] += 0.1


def _with_data(tensor: Tensor) -> None:
    tensor.data.add_(0.1)


def _rerunning() -> tuple[mst.Sequential, Tensor]:
    """Return a chain that runs its first stages again, and an input."""
    torch.manual_seed(0)
    x = torch.randn(64, 16)
    model = mst.Sequential([Block() for _ in range(10)], memory=0.5, planner="periodic")
    model(x).sum().backward()
    assert not model.plan.keeps_all
    return model, x


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad])
def test_a_fused_step_between_forward_and_backward_is_refused(
    optimizer: Callable[..., torch.optim.Optimizer],
) -> None:
    model, x = _rerunning()
    y = model(x)
    optimizer(model.parameters(), lr=0.1, fused=True).step()
    with pytest.raises(StateError, match=r"parameter '.*' of stage .* fused optimizer's step"):
        y.sum().backward()
    model(x).sum().backward()  # with the new parameters


@pytest.mark.parametrize("write", [_with_numpy, _with_data])
def test_parameters_and_inputs_written_to_without_a_version_are_refused(
    write: Callable[[Tensor], None],
) -> None:
    model, x = _rerunning()
    y = model(x)
    for parameter in model.parameters():
        write(parameter)
    with pytest.raises(StateError, match="holds other numbers than in the forward pass"):
        y.sum().backward()
    y = model(x)
    write(x)
    with pytest.raises(StateError, match="a state that a stage is to be run again from"):
        y.sum().backward()


def test_the_same_numbers_written_anew_change_nothing() -> None:
    model, x = _rerunning()
    model.zero_grad()
    model(x).sum().backward()
    plain = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    y = model(x)
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data.clone())
    y.sum().backward()
    ours = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))


def test_other_memory_under_torch_distributed_is_refused() -> None:
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model, x = _rerunning()
        y = model(x)
        for parameter in model.parameters():
            parameter.data = parameter.data + 0.1
        with pytest.raises(StateError, match="holds other numbers than in the forward pass"):
            y.sum().backward()
    finally:
        dist.destroy_process_group()


# ------------------------------------------------- what a stage depends on unseen


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0


TABLE = [1.0] * 100
LOOKED_UP = dict.fromkeys(range(100), 1.0)
SLOTTED = Slotted()
MEMORY = bytearray(b"\1" * 8)


def unseen(x: Tensor) -> Tensor:
    factor = TABLE[90] * LOOKED_UP[90] * SLOTTED.factor * MEMORY[3]
    return x * factor * float(os.environ.get("MULTISTAGE_TEST_FACTOR", "1"))


def _change_table() -> None:
    TABLE[90] = 1.5


def _change_dict() -> None:
    LOOKED_UP[90] = 1.5


def _change_slot() -> None:
    SLOTTED.factor = 1.5


def _change_memory() -> None:
    MEMORY[3] = 2


def _change_environment() -> None:
    os.environ["MULTISTAGE_TEST_FACTOR"] = "1.5"


UNSEEN = [_change_table, _change_dict, _change_slot, _change_memory, _change_environment]


@pytest.fixture
def unseen_put_back() -> Iterator[None]:
    yield
    TABLE[90] = LOOKED_UP[90] = SLOTTED.factor = 1.0
    MEMORY[3] = 1
    os.environ.pop("MULTISTAGE_TEST_FACTOR", None)


@pytest.mark.usefixtures("unseen_put_back")
@pytest.mark.parametrize("change", UNSEEN)
def test_other_numbers_in_what_a_stage_depends_on_unseen_are_refused(
    change: Callable[[], None],
) -> None:
    stages, x = [Block(unseen) for _ in range(10)], torch.randn(64, 16)
    for stage in stages:
        stage.is_pure = True  # type: ignore[assignment]  # a name of the user's own
    model = mst.Sequential(stages, memory=0.5, planner="periodic")
    model(x).sum().backward()
    y = model(x)
    change()
    with pytest.raises(StateError, match=r"stage .* saved other numbers for its gradient"):
        y.sum().backward()
    model(x).sum().backward()  # all of it with the new value


@pytest.mark.usefixtures("unseen_put_back")
def test_other_numbers_are_told_of_or_not_compared_where_the_user_says_so() -> None:
    stages, x = [Block(unseen) for _ in range(10)], torch.randn(64, 16)
    for check in ("warn", "off"):
        model = mst.Sequential(stages, memory=0.5, planner="periodic", check=check)
        model(x).sum().backward()
        y = model(x)
        _change_table()
        expected = pytest.warns(DifferenceWarning, match="saved other numbers")
        with expected if check == "warn" else contextlib.nullcontext():
            y.sum().backward()
        TABLE[90] = 1.0


def test_sparse_tensors_written_to_without_a_version_are_refused() -> None:
    for layout in (torch.sparse_coo, torch.sparse_csr):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # on the state of sparse layouts
            table = torch.eye(16).to_sparse(layout=layout)

        def through(x: Tensor, table: Tensor = table) -> Tensor:
            return (table @ x.T).T

        x = torch.randn(64, 16)
        model = mst.Sequential([Block(through) for _ in range(10)], x, memory=0.5)
        y = model(x)
        values = table._values() if layout is torch.sparse_coo else table.values()
        values.numpy()[...] *= 2
        with pytest.raises(StateError, match="other numbers"):
            y.sum().backward()


# ------------------------------------------------------------ what stages may contain


def nests(x: Tensor) -> Tensor:
    lengths = torch.tensor([0, 10, 30, 64])
    return torch.nested.nested_tensor_from_jagged(x, lengths).sin().values()


def differentiates_by_func(x: Tensor) -> Tensor:
    return x + torch.func.grad(lambda y: y.sin().sum())(x)


def test_nested_tensors_of_strided_layout_inside_a_stage_keep_its_tape() -> None:
    def pads(x: Tensor) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the prototype
            nested = torch.nested.nested_tensor([x[:10], x[10:]])
        return torch.nested.to_padded_tensor(nested, 0.0)[:, :32].reshape(64, 16)

    stages, x = [Block(pads if k == 3 else None) for k in range(8)], torch.randn(64, 16)
    model = mst.Sequential(stages, x, memory=1.0)
    model(x).sum().backward()


@pytest.mark.parametrize("special", [nests, differentiates_by_func])
def test_stages_that_only_torch_can_run_keep_their_tapes_or_are_refused(
    special: Callable[[Tensor], Tensor],
) -> None:
    stages, x = [Block(special) for _ in range(6)], torch.randn(64, 16)
    model = mst.Sequential(stages, x, memory=1.0)
    model(x).sum().backward()
    assert "not checked; torch.func and nested tensors" in str(model.checked)
    with pytest.raises(ArgumentError, match=r"cannot be run again within .* raise the limit"):
        mst.Sequential(stages, x, memory=0.6)


def test_nested_inputs_and_transforms_around_a_chain_are_refused() -> None:
    model, x = _rerunning()
    nested = torch.nested.nested_tensor([x[:3], x[:5]], layout=torch.jagged)
    with pytest.raises(ArgumentError, match="the input has nested tensors"):
        model(nested)
    for call in (
        lambda: torch.func.grad(lambda y: model(y).sum())(x),
        lambda: torch.func.vmap(model)(x[None]),
    ):
        with pytest.raises(ArgumentError, match=r"inside of torch\.func"):
            call()


def test_global_forward_hooks_count_as_under_plain_training() -> None:
    model, x = _rerunning()
    called: list[str] = []
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, given, output: called.append(type(module).__name__)
    )
    try:
        for _ in range(2):
            called.clear()
            model(x).sum().backward()
            # Ten blocks with a layer each, and the chain.
            assert sorted(called) == [*["Block"] * 10, *["Linear"] * 10, "Sequential"]
    finally:
        hook.remove()


def test_memory_that_glibc_keeps_is_told_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "confstr_names", {"CS_GNU_LIBC_VERSION": 2})
    monkeypatch.delenv("MALLOC_MMAP_THRESHOLD_", raising=False)
    calls._tell_of_resident_memory.cache_clear()
    with caplog.at_level("INFO", "multistage.torch.planning"):
        for rows in (32, 64):
            mst.Sequential([Block() for _ in range(8)], torch.randn(rows, 16), memory=0.7)
    assert sum("MALLOC_MMAP_THRESHOLD_=65536" in message for message in caplog.messages) == 1
