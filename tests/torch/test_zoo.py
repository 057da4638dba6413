"""Networks of public libraries, small and with random weights, train as they are."""

from __future__ import annotations

import copy
import os
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multistage.torch as mst

os.environ.setdefault("HF_HUB_OFFLINE", "1")

SMALL = {
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}


def _convolutional(name: str, size: int) -> tuple[nn.Module, Any]:
    provider = pytest.importorskip("pytorchcv.model_provider")
    return provider.get_model(name, pretrained=False), torch.randn(2, 3, size, size)


def _transformer(name: str, **options: Any) -> tuple[nn.Module, Any]:
    library = pytest.importorskip("transformers")
    config = getattr(library, f"{name}Config")(**{**SMALL, **options})
    model = getattr(library, f"{name}Model")(config)
    if name == "ViT":
        return model, {"pixel_values": torch.randn(2, 3, 32, 32)}
    return model, {"input_ids": torch.randint(0, 90, (2, 16))}


MODELS: dict[str, tuple[Callable[[], tuple[nn.Module, Any]], int]] = {
    "resnet": (lambda: _convolutional("resnet20_cifar10", 32), 12),
    "densenet": (lambda: _convolutional("densenet40_k12_cifar10", 32), 9),
    "bert": (lambda: _transformer("Bert"), 6),
    "gpt2": (
        lambda: _transformer(
            "GPT2", n_embd=32, n_layer=3, n_head=2, use_cache=False, bos_token_id=0, eos_token_id=1
        ),
        6,
    ),
    "llama": (lambda: _transformer("Llama", num_key_value_heads=2, use_cache=False), 6),
    "vit": (lambda: _transformer("ViT", image_size=32, patch_size=8), 6),
}


def _called(model: nn.Module, x: Any) -> Tensor:
    y = model(**x) if isinstance(x, dict) else model(x)
    return y if isinstance(y, Tensor) else y.last_hidden_state


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_public_models(name: str) -> None:
    make, least = MODELS[name]
    torch.manual_seed(0)
    plain, x = make()
    plain.train()
    model = copy.deepcopy(plain)
    ours = mst.compile(model, memory=0.8)
    for step in range(2):
        results = []
        for net in (plain, ours):
            torch.manual_seed(step)
            results.append(_called(net, x))
            results[-1].square().sum().backward()
        assert torch.equal(*results)
    assert not ours.plan.keeps_all
    assert len(ours.plan.costs.stages) >= least
    for (key, a), (_, b) in zip(plain.named_parameters(), model.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), key
        assert a.grad is None or torch.equal(a.grad, b.grad), key
    for a, b in zip(plain.buffers(), model.buffers(), strict=True):
        assert torch.equal(a, b)
    plain.eval()
    ours.eval()
    with torch.no_grad():
        assert torch.equal(_called(plain, x), _called(ours, x))


class Peculiar(nn.Module):
    """Keyword arguments, branches on shapes, grad modes, autocast, constants."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(8) for _ in range(3)])
        self.linears = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.scale = nn.Parameter(torch.ones(8))
        self.table = torch.linspace(0, 1, 8)  # neither parameter nor buffer

    def forward(self, x: Tensor, **options: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            table = torch.cos(self.table) + torch.tensor([0.5])
        if x.shape[0] > 2 and options:
            x = x * options["mask"]
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = torch.dropout(norm(x), 0.2, self.training).relu_()
            with torch.autocast("cpu", torch.bfloat16):
                y = linear(x)
            x = x + y.float() * table
        return {"y": x * self.scale, "pair": (x.sum(), 3)}


def _peculiar(*, training: bool = True) -> tuple[Peculiar, mst.Compiled, dict[str, Tensor]]:
    torch.manual_seed(0)
    plain = Peculiar().train(training)
    x = {"x": torch.randn(256, 8, requires_grad=True), "mask": torch.ones(8)}
    model = copy.deepcopy(plain)
    return plain, mst.compile(model, memory=0.8), x


def test_a_model_that_must_be_peculiar() -> None:
    plain, ours, x = _peculiar()
    copies = [ours, copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))]
    torch.manual_seed(1)
    known = plain(**x)
    (known["y"].sum() + known["pair"][0]).backward()
    wanted, x["x"].grad = x["x"].grad, None
    for model in copies:
        torch.manual_seed(1)
        found: Any = model(mask=x["mask"], x=x["x"])  # in whatever order
        assert not model.plan.keeps_all
        (found["y"].sum() + found["pair"][0]).backward()
        assert found["pair"][1] == 3 and torch.equal(found["y"], known["y"])
        assert torch.equal(x["x"].grad, wanted)
        x["x"].grad = None
        for (key, a), (_, b) in zip(
            plain.named_parameters(), model.named_parameters(), strict=True
        ):
            assert torch.equal(a.grad, b.grad), key
        for (key, a), (_, b) in zip(plain.named_buffers(), model.named_buffers(), strict=True):
            assert torch.equal(a, b), key


def test_other_shapes_are_captured_anew() -> None:
    plain, ours, x = _peculiar()
    for rows in (256, 100, 192):
        given = {"x": torch.randn(rows, 8), "mask": x["mask"]}
        torch.manual_seed(rows)
        known = plain(**given)["y"]
        torch.manual_seed(rows)
        assert torch.equal(ours(**given)["y"], known)
    # The check ends plain runs within a region of autocast, which must not stay open.
    assert torch.autocast_increment_nesting() == 1 and torch.autocast_decrement_nesting() == 0
