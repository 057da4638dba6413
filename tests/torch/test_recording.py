"""Recorded models compute what they compute in training, bit for bit."""

from __future__ import annotations

import copy
import os
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multistage.torch as mst
from multistage.errors import ArgumentError, StateError

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def _equal(plain: nn.Module, model: nn.Module) -> None:
    for (key, a), (_, b) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), key
        assert a.grad is None or torch.equal(a.grad, b.grad), key  # type: ignore[arg-type]


# Both run other code while they are exported: grouped key-value heads and their masks are
# built by hand, and a gradient of its own is lost.
@pytest.mark.parametrize("name", ["Qwen2", "Bloom"])
@pytest.mark.parametrize("memory", [None, 0.7])
def test_models_that_notice_tracing(name: str, memory: float | None) -> None:
    library = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {
        "Qwen2": {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
        | {"intermediate_size": 64},
        "Bloom": {"n_layer": 2, "n_head": 4},
    }[name]
    options = {"vocab_size": 64, "hidden_size": 32, "use_cache": False, **sizes}
    plain = getattr(library, f"{name}Model")(getattr(library, f"{name}Config")(**options)).train()
    x = {"input_ids": torch.randint(0, 64, (2, 16))}
    model = copy.deepcopy(plain)
    ours = mst.Sequential(mst.to_chain(model, x), x, memory=memory)
    a, b = plain(**x).last_hidden_state, ours(x).last_hidden_state
    assert torch.equal(a, b)
    a.square().sum().backward()
    b.square().sum().backward()
    _equal(plain, model)


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


class Peculiar(nn.Module):
    """Has what torch.fx cannot trace, a gradient of its own and other modes inside."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = self.norm(x)
        for layer in self.layers:
            with torch.no_grad():
                scale = layer.weight.norm()
            with torch.autocast("cpu", torch.bfloat16):
                y = layer(x) / scale
            x = x + StraightThrough.apply(2 * y.float())
            if x.isnan().any():
                x = x.nan_to_num()
        return x


@pytest.mark.parametrize("memory", [None, 0.8])
def test_functions_modes_and_buffers(memory: float | None) -> None:
    torch.manual_seed(0)
    plain, x = Peculiar(), torch.randn(4, 8)
    model = copy.deepcopy(plain)
    ours = mst.Sequential(mst.to_chain(model, {"x": x}), {"x": x}, memory=memory)
    assert model.norm.num_batches_tracked == 0 and len(ours) >= 3
    for _ in range(2):
        plain(x).square().sum().backward()
        ours({"x": x}).square().sum().backward()
    _equal(plain, model)
    for a, b in zip(plain.buffers(), model.buffers(), strict=True):
        assert torch.equal(a, b)


def test_a_value_that_was_read_is_compared() -> None:
    x = torch.randn(4, 8)
    ours = mst.Sequential(mst.to_chain(Peculiar(), {"x": x}), {"x": x}, memory=0.8)
    with pytest.raises(StateError, match=r"reads a value of a tensor .*False .* and is True now"):
        ours({"x": x * torch.nan})


class Coin(Peculiar):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        return super().forward(x * random.random())


class Hooked(Peculiar):
    def forward(self, x: Tensor, **options: Any) -> Tensor:
        y = super().forward(x)
        y.register_hook(lambda gradient: gradient * 2)
        return y


def test_models_that_cannot_be_recorded_are_refused() -> None:
    for model, reason in ((Coin(), "draws from Python"), (Hooked(), "register_hook")):
        with pytest.raises(ArgumentError, match=reason):
            mst.to_chain(model, {"x": torch.randn(4, 8)})


class Substituting(nn.Module):
    """Calls a module with other tensors than its own."""

    def __init__(self, buffers: bool) -> None:
        super().__init__()
        self.inner = nn.BatchNorm1d(8) if buffers else nn.Linear(8, 8)
        self.other = nn.Parameter(torch.ones(8))
        self.buffers_too = buffers

    def forward(self, x: Tensor) -> Tensor:
        if self.buffers_too:
            other = {"running_mean": self.inner.running_mean + 1}  # type: ignore[operator]
        else:
            other = {"bias": self.other}
        result: Tensor = torch.func.functional_call(self.inner, other, (x,))
        return result


@pytest.mark.parametrize("buffers", [False, True])
def test_modules_called_with_other_tensors_than_their_own(buffers: bool) -> None:
    """The graph would call them with their own, and the check may be off."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Substituting(buffers), nn.Linear(8, 8))
    plain = Around(plain).train(not buffers)
    model = copy.deepcopy(plain)
    x = torch.randn(4, 8)
    ours = mst.Sequential(mst.to_chain(model, x), x, memory=2000, check="off")
    a, b = plain(x), ours(x)
    assert torch.equal(a, b)
    a.square().sum().backward()
    b.square().sum().backward()
    _equal(plain, model)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y


def test_a_model_that_itself_calls_modules_with_other_tensors_is_refused() -> None:
    with pytest.raises(ArgumentError, match="calls inner with other parameters"):
        mst.to_chain(Substituting(False), torch.ones(4, 8))
