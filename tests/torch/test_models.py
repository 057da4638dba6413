"""What models do that is unlike a plain stage or cell: equal to plain training, or refused."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import multistage.torch as mst
from multistage.errors import StateError


class GroupedAttention(nn.Module):
    """Four heads that share one head of keys and values, as those of Llama and Qwen do."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(16, n) for n in (16, 4, 4))

    def forward(self, x: Tensor) -> Tensor:
        batch, count, _ = x.shape
        query = self.query(x).view(batch, count, 4, 4).transpose(1, 2)
        key, value = (
            layer(x)
            .view(batch, count, 1, 4)
            .transpose(1, 2)[:, :, None]
            .expand(batch, 1, 4, count, 4)
            .reshape(batch, 4, count, 4)
            for layer in (self.key, self.value)
        )
        found = F.scaled_dot_product_attention(query, key, value)
        return x + found.transpose(1, 2).reshape(batch, count, 16)


class Positions(nn.Module):
    """Attention with a bias for distances that all heads share, as Bloom has it."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.mixed(x).chunk(3, -1)
        places = torch.arange(x.shape[1], dtype=x.dtype)
        bias = places[None, None].expand(x.shape[0], x.shape[1], -1)
        scores = torch.baddbmm(bias, query, key.transpose(1, 2), beta=1.0, alpha=0.25)
        return x + self.out(scores.softmax(-1) @ value)


class OldSpectral(nn.Module):
    """Hooks that write weights and buffers, of torch.nn.utils.spectral_norm."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.utils.spectral_norm(nn.Linear(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def gradients(module: nn.Module, x: Tensor, call: Any) -> list[Tensor | None]:
    x.grad = None
    call(x).square().sum().backward()
    return [x.grad, *(p.grad for p in module.parameters()), *module.buffers()]


@pytest.mark.parametrize("kind", [GroupedAttention, Positions, OldSpectral])
@pytest.mark.parametrize("compiled", [False, True])
def test_gradients_are_those_of_plain_training(kind: type[nn.Module], compiled: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[kind() for _ in range(4)])
    x = torch.randn(8, 12, 16, requires_grad=True)
    other = copy.deepcopy(model)
    expected = gradients(model, x, model)
    chain: Any = (
        mst.compile(other, memory=0.9) if compiled else mst.Sequential(list(other), x, memory=0.9)
    )
    found = gradients(other, x, chain)
    assert chain.plan is not None and not chain.plan.keeps_all
    for a, b in zip(expected, found, strict=True):
        assert a is not None and b is not None and torch.equal(a, b)


def test_compiled_stages_train_within_a_limit() -> None:
    """The compiler leaves the hooks alone that are called while a compiled stage runs."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *[nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16)) for _ in range(3)]
    )
    x = torch.randn(32, 16, requires_grad=True)
    other = copy.deepcopy(model)
    expected = gradients(model, x, model)
    stages: Any = [torch.compile(block, backend="aot_eager") for block in other]
    chain = mst.Sequential(stages, x, memory=0.7)
    found = gradients(other, x, chain)
    assert chain.plan is not None and not chain.plan.keeps_all
    for a, b in zip(expected, found, strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(a, b)


class Spiking(nn.Module):
    """A membrane potential that the cell keeps itself."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.linear, self.where = nn.Linear(8, 8), where
        self.memories: Any = {"list": [torch.zeros(4, 8)], "dict": {"v": torch.zeros(4, 8)}}
        self.memories = self.memories.get(where, torch.zeros(4, 8))

    def forward(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = self.memories
        key: Any = {"list": 0, "dict": "v"}.get(self.where)
        v = 0.9 * (kept if key is None else kept[key]) + self.linear(x)
        if key is None:
            self.memories = v
        else:
            kept[key] = v
        return h + torch.sigmoid(v), v.sum()


@pytest.mark.parametrize("where", ["attribute", "list", "dict"])
def test_memories_that_a_cell_keeps_itself_are_refused(where: str) -> None:
    with pytest.raises(StateError, match=r"memories.* when it runs .*return it in the state"):
        mst.unroll(Spiking(where), torch.zeros(4, 8), torch.randn(9, 4, 8))


def test_weights_that_hooks_of_a_cell_make_are_refused() -> None:
    cell = OldSpectral()
    with pytest.raises(StateError, match=r"changes attribute .*linear.weight.* when it runs"):
        mst.unroll(lambda h, x: cell(h), torch.zeros(4, 16, requires_grad=True), None, n_steps=9)
