"""`to_chain`: where graphs are cut, and that the stages are the model."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multistage.torch as mst
from multistage.errors import ArgumentError, StateError


class Block(nn.Module):
    """A residual block with batch norm and in-place activations."""

    def __init__(self, channels: int, out: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out)
        self.down = nn.Conv2d(channels, out, 1, stride) if stride > 1 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += x if self.down is None else self.down(x)
        return self.relu(y)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.shift = nn.Parameter(torch.zeros(8, 1, 1))
        self.blocks = nn.ModuleList([Block(8, 8), Block(8, 16, 2), Block(16, 16), Block(16, 16)])
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        batch = x.size(0)
        x = self.stem(x) + self.shift
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)).view(batch, -1) + self.shift.mean())


class Dense(nn.Module):
    """Two dense blocks with transitions, as in DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv2d(4 + 4 * k, 4, 3, padding=1) for k in range(3)])
        self.transition = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            features = [x]
            for layer in self.layers:
                features.append(torch.relu(layer(torch.cat(features, 1))))
            x = self.transition(torch.cat(features, 1))
        return x


class Inception(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Conv2d(6, 2, k, padding=k // 2) for k in (1, 3, 5)])

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = torch.cat([branch(x) for branch in self.branches], 1).relu()
        return x


class Masked(nn.Module):
    """Transformer blocks; the mask is an input that all of them use."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True) for _ in range(4)]
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask)
        return x


MODELS: dict[str, tuple[type[nn.Module], Any, int]] = {
    "residual": (Residual, torch.randn(4, 3, 8, 8), 8),
    "dense": (Dense, torch.randn(2, 4, 8, 8), 2),
    "inception": (Inception, torch.randn(2, 6, 8, 8), 3),
    "transformer": (Masked, (torch.randn(2, 6, 16), torch.zeros(6, 6)), 4),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_stages_train_as_the_model(name: str) -> None:
    kind, x, least = MODELS[name]
    torch.manual_seed(0)
    plain = kind()
    model = copy.deepcopy(plain)
    stages = mst.to_chain(model, x)
    assert len(stages) >= least
    ours = mst.Sequential(stages, x, memory=0.8)
    assert list(ours.state_dict()) == list(plain.state_dict())
    for step in range(2):
        torch.manual_seed(step)
        known = plain(*x) if isinstance(x, tuple) else plain(x)
        known.square().sum().backward()
        torch.manual_seed(step)
        found = ours(x)
        found.square().sum().backward()
        assert torch.equal(found, known)
    for (key, a), (_, b) in zip(plain.named_parameters(), ours.named_parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), key  # type: ignore[arg-type]
    for a, b in zip(plain.buffers(), ours.buffers(), strict=True):
        assert torch.equal(a, b)


def test_copies_of_a_traced_chain() -> None:
    x = torch.randn(4, 3, 8, 8)
    ours = mst.Sequential(mst.to_chain(Residual(), x), x, memory=0.8)
    for again in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        again.double()
        y = again(x.double())
        y.sum().backward()
        assert all(p.grad is not None for p in again.parameters())
        assert all(p.grad is None for p in ours.parameters())


class Dropping(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(nn.functional.dropout(torch.cos(x), 0.5, self.training))


def test_code_that_depends_on_the_mode() -> None:
    x = torch.ones(4, requires_grad=True)
    stages = mst.to_chain(Dropping(), x)
    ours = mst.Sequential(stages, memory=1.0)
    ours(x)
    assert torch.equal(ours.eval()(x), torch.sin(torch.cos(x)))  # traced again
    with pytest.raises(ArgumentError, match="'training' is False and was True"):
        stages[0](x)
    ours.train()(x)


class Uncut(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a, b = x.sin(), x.cos()
        for _ in range(3):
            a, b = a * b, a + b
        return a - b


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.weight
        return x.sin() if x.sum() > 0 else x.cos()


def test_models_that_cannot_be_cut_are_refused_with_the_reason() -> None:
    with pytest.raises(ArgumentError, match="it has a single operation"):
        mst.to_chain(nn.Linear(3, 3), torch.ones(3))
    with pytest.raises(ArgumentError, match="nothing in it requires a gradient"):
        mst.to_chain(Uncut(), torch.ones(3))


def test_a_branch_that_depends_on_parameters() -> None:
    model = Branching()
    stages = mst.to_chain(model, torch.ones(3))
    assert torch.equal(nn.Sequential(*stages)(torch.ones(3)), model(torch.ones(3)))
    with pytest.raises(StateError, match="was True when to_chain recorded the model"):
        nn.Sequential(*stages)(-torch.ones(3))
