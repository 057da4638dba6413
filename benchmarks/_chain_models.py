"""Networks that are chains of stages, for benchmarks of plans: residual, mixer, torchvision's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from multistage.torch.tracing.captured import GraphStages

TORCHVISION = ("resnet50", "resnet101", "densenet121", "inception_v3")


class Residual(nn.Module):
    """A basic residual block."""

    def __init__(self, given: int, made: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(given, made, 3, stride, 1, bias=False)
        self.first_norm = nn.BatchNorm2d(made)
        self.second = nn.Conv2d(made, made, 3, 1, 1, bias=False)
        self.second_norm = nn.BatchNorm2d(made)
        self.short = nn.Conv2d(given, made, 1, stride, bias=False) if given != made else None

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's or layer's output."""
        y = torch.relu(self.first_norm(self.first(x)))
        short = x if self.short is None else self.short(x)
        return torch.relu(self.second_norm(self.second(y)) + short)


class Mix(nn.Module):
    """One layer of an MLP mixer: over patches, then over channels."""

    def __init__(self, patches: int, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.patches = nn.Sequential(
            nn.Linear(patches, 2 * patches), nn.GELU(), nn.Linear(2 * patches, patches)
        )
        self.channels = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's or layer's output."""
        x = x + self.patches(self.norms[0](x).mT).mT
        mixed: Tensor = x + self.channels(self.norms[1](x))
        return mixed


class Pool(nn.Module):
    """Mean over all but the batch and the channels."""

    def __init__(self, dims: tuple[int, ...]) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's or layer's output."""
        return x.mean(self.dims)


def build(net: str, batch: int) -> tuple[Any, Tensor]:
    """Return the stages of a network and a batch."""
    if net == "residual":
        stages: list[nn.Module] = [nn.Conv2d(3, 16, 3, 1, 1)]
        for group, width in enumerate((16, 32, 64, 128)):
            for k in range(7):
                given = width // 2 if group and not k else width
                stages.append(Residual(given, width, 2 if group and not k else 1))
        stages += [Pool((2, 3)), nn.Linear(128, 10)]
        return nn.Sequential(*stages), torch.randn(batch, 3, 64, 64)
    if net == "mixer":
        stages = [nn.Sequential(nn.Conv2d(3, 192, 8, 8), nn.Flatten(2)), _Transpose()]
        stages += [Mix(144, 192) for _ in range(24)]
        stages += [Pool((1,)), nn.Linear(192, 10)]
        return nn.Sequential(*stages), torch.randn(batch, 3, 96, 96)
    import torchvision

    size = 299 if net.startswith("inception") else 224
    extra = {"aux_logits": False, "init_weights": True} if net.startswith("inception") else {}
    model = getattr(torchvision.models, net)(weights=None, **extra)
    x = torch.randn(batch, 3, size, size)
    return captured(model, x), x


def captured(model: nn.Module, x: Tensor) -> nn.Sequential:
    """Return the stages of what TorchDynamo captures of a model, as modules."""
    found: list[GraphStages] = []

    def backend(graph: fx.GraphModule, _: object) -> Callable[..., object]:
        def call(*arguments: object) -> object:
            own = tuple([a is not x for a in arguments])
            found.append(GraphStages(graph, arguments, own))
            found[-1].bind(arguments)
            return graph.forward(*arguments)

        return call

    torch.compile(model, backend=backend, fullgraph=True, dynamic=False)(x)
    return nn.Sequential(*found[0], First())


class First(nn.Module):
    """The only output of a graph, which returns a tuple."""

    def forward(self, state: tuple[Tensor]) -> Tensor:
        """Return the only entry."""
        return state[0]


class _Transpose(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mT.contiguous()
