"""Stages of all kinds, and chains of them."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

WIDTH = 24


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.linear = nn.Linear(width, width)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.relu_(self.linear(self.norm(x))))


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(len(x), 4, -1).chunk(3, -1)
        return (torch.softmax(q @ k.transpose(1, 2), -1) @ v).reshape(x.shape).tanh()


class Apart(nn.Module):
    """Passes its input on beside what it makes of it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, torch.sigmoid(x)


class Together(nn.Module):
    def forward(self, pair: tuple[Tensor, Tensor]) -> Tensor:
        return pair[0] * pair[1]


class Wave(nn.Module):
    """Saves conjugate views and slices with gaps."""

    def forward(self, x: Tensor) -> Tensor:
        z = torch.fft.rfft(x)
        y = torch.fft.irfft(z * z.conj() / (1 + z.abs()), n=x.shape[-1])
        return y[:, ::2].repeat_interleave(2, 1) * x


class Flat(nn.Module):
    """Saves nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flip(0)


def chain(width: int = 24) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        Residual(width),
        Attention(width),
        nn.Linear(width, width),
        nn.Tanh(),
        Apart(),
        Together(),
        Flat(),
        Residual(width),
        Wave(),
        nn.Sequential(nn.Linear(width, width), nn.GELU()),
        Residual(width),
    )


class Pair(nn.Module):
    """Changes one of two states."""

    def forward(self, pair: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return pair[0], pair[1].tanh() + pair[0]


class Halves(nn.Module):
    """Returns views of one storage, with gaps."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = torch.sigmoid(torch.cat([x, x * x], -1)).chunk(2, -1)
        return a, b


class Turned(nn.Module):
    """Returns a view of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten().view(x.shape[::-1]).t()


class Same(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x


class Twice(torch.autograd.Function):
    """Looks at its saved tensors more than once."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp().reciprocal()
        ctx.save_for_backward(x, y, x)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        first, second = ctx.saved_tensors, ctx.saved_tensors
        return -gradients[0] * first[1] + 0 * second[0] * second[2]


class Spoil(torch.autograd.Function):
    """Writes to what it saved, if told to, which others may have saved too."""

    on = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        gradient = x.cos() * gradients[0]
        if Spoil.on:
            x.zero_()
        return gradient


class Spoils(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Spoil.apply(x)


class Own(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Twice.apply(x)


SINGLE: list[Callable[[], nn.Module]] = [
    lambda: Residual(WIDTH),
    lambda: Attention(WIDTH),
    lambda: nn.Linear(WIDTH, WIDTH),
    nn.Tanh,
    nn.Sigmoid,
    Flat,
    Wave,
    Turned,
    Same,
    Own,
    lambda: nn.Dropout(0.3),
    lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()),
]


def random_chain(seed: int) -> nn.Sequential:
    """Return a chain of random stages, the same for the same seed."""
    rng = random.Random(seed)
    torch.manual_seed(seed)
    stages: list[nn.Module] = [nn.Linear(WIDTH, WIDTH)]
    spoils = rng.random() < 0.2
    while len(stages) < 9:
        if rng.random() < 0.3:
            stages += [rng.choice([Apart, Halves])()]
            stages += [Pair() for _ in range(rng.randrange(3))]
            stages += [Together()]
        else:
            stages.append(Spoils() if spoils and rng.random() < 0.3 else rng.choice(SINGLE)())
    return nn.Sequential(*stages)
