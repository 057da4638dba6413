"""Facts that a captured model depends on, changed between iterations, beside plain training.

    python tests/torch/fuzz_facts.py --changes 200 --seed 0

One model reads all of them.  Each change is of one, to a random value; then both the captured
model and the plain one train an iteration, which must leave the same bits.  A limit that a
change makes too small is refused, and counted: of 200 changes next to none.
"""

from __future__ import annotations

import argparse
import functools
import os
import random
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import multistage.torch as mst
from multistage.errors import BudgetError

WIDTH, ROWS = 8, 1024  # so that weights, whose gradients pass through stages, are small
MEMORY = 0.87
GLOBAL, LISTED, NESTED = 1.0, [1.0] * 40, {"a": {"b": [1.0]}}
CONFIG = types.SimpleNamespace(inner=types.SimpleNamespace(scale=1.0))


@dataclass
class Options:
    scale: float = 1.0


class Holder:
    __slots__ = ("own",)
    shared = 1.0

    def __init__(self) -> None:
        self.own = 1.0

    @property
    def both(self) -> float:
        return self.own * self.shared


HOLDER, DEFAULTS = Holder(), [1.0]


def by_default(x: Tensor, scales: list[float] = DEFAULTS) -> Tensor:
    return x * scales[0]


def closed(scale: float) -> Callable[[Tensor], Tensor]:
    return lambda x: x * scale


class Block(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.register_buffer("buffer", torch.ones(1))
        self.listed, self.options = [nn.Linear(WIDTH, WIDTH)], Options()
        self.scale, self.power, self.tensor = 1.0, 2, torch.ones(1)
        self.nested: dict[str, Any] = {"a": ({"b": 1.0},)}
        self.partial, self.closed = functools.partial(torch.mul, other=1.0), closed(1.0)
        self.handles: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.linear(x)) * GLOBAL * LISTED[30] * NESTED["a"]["b"][0]
        y = by_default(y) * CONFIG.inner.scale * HOLDER.both * float(os.environ["FUZZ_SCALE"])
        y = self.closed(self.partial(y)) * self.scale * self.options.scale * self.factor
        y = y * self.nested["a"][0]["b"] * self.buffer * self.tensor + 0.1 * y**self.power
        y = y if self.linear.weight.is_contiguous() else 2 * y
        return x + torch.tanh(self.listed[0](y) * getattr(self.listed[0], "scale", 1.0))


Change = Callable[[float, Any], object]


def hooked(value: float, block: Any) -> None:
    while block.handles:
        block.handles.pop().remove()
    hook = block.linear.register_forward_hook(lambda module, given, out: out * value)
    block.handles.append(hook)


def weight(made: Callable[[Tensor, float], Tensor]) -> Change:
    def change(value: float, block: Any) -> None:
        block.linear.weight = nn.Parameter(made(block.linear.weight.detach().clone(), value))

    return change


def offset(data: Tensor, value: float) -> Tensor:
    return torch.cat([data.new_full((3,), value), data.flatten()])[3:].view(WIDTH, WIDTH)


EVERYWHERE: dict[str, Callable[[float], object]] = {
    "global": lambda v: globals().__setitem__("GLOBAL", v),
    "list": lambda v: LISTED.__setitem__(30, v),
    "dict": lambda v: NESTED["a"]["b"].__setitem__(0, v),
    "namespace": lambda v: setattr(CONFIG.inner, "scale", v),
    "slot": lambda v: setattr(HOLDER, "own", v),
    "class of an object": lambda v: setattr(Holder, "shared", v),
    "class of the model": lambda v: setattr(Block, "factor", v),
    "environment variable": lambda v: os.environ.__setitem__("FUZZ_SCALE", str(v)),
    "default": lambda v: DEFAULTS.__setitem__(0, v),
}
OF_A_BLOCK: dict[str, Change] = {
    "attribute": lambda v, b: setattr(b, "scale", v),
    "own factor": lambda v, b: setattr(b, "factor", v),
    "dataclass": lambda v, b: setattr(b.options, "scale", v),
    "nested attribute": lambda v, b: b.nested["a"][0].__setitem__("b", v),
    "exponent": lambda v, b: setattr(b, "power", 1 + int(4 * v)),
    "partial": lambda v, b: setattr(b, "partial", functools.partial(torch.mul, other=v)),
    "closure": lambda v, b: setattr(b, "closed", closed(v)),
    "tensor": lambda v, b: b.tensor.fill_(v),
    "other tensor": lambda v, b: setattr(b, "tensor", torch.full((1,), v)),
    "buffer": lambda v, b: b.buffer.fill_(v),
    "other buffer": lambda v, b: setattr(b, "buffer", torch.full((1,), v)),
    "module in a list": lambda v, b: setattr(b.listed[0], "scale", v),
    "weight in a list": lambda v, b: b.listed[0].weight.data.mul_(v),
    "forward": lambda v, b: setattr(b.norm, "forward", lambda x: x * v),
    "mode": lambda v, b: b.norm.train(v > 0.75),
    "momentum": lambda v, b: setattr(b.norm, "momentum", v / 2),
    "frozen": lambda v, b: b.linear.requires_grad_(v > 0.75),
    "hook": hooked,
    "weight": weight(lambda data, v: data * v),
    "strides": weight(lambda data, v: (data * v).t()),
    "offset": weight(offset),
}
NAMES = [*EVERYWHERE, *OF_A_BLOCK]


def trained(call: Any, model: nn.Module, x: Tensor) -> list[Tensor | None]:
    """Train an iteration; return what it leaves."""
    model.zero_grad()
    torch.manual_seed(0)
    loss = call(x).square().mean()
    loss.backward()
    kept = [*model.parameters(), *model.buffers()]
    return [loss.detach(), *(t.grad for t in kept if t.requires_grad), *model.buffers()]


@dataclass
class Found:
    """What became of changes: compared, refused as the limit is too small, not noticed."""

    compared: int = 0
    refused: int = 0
    differing: list[str] = field(default_factory=list)


def changed(names: list[str], rng: random.Random) -> Found:
    """Change facts one by one; compare an iteration after each with plain training."""
    for change in EVERYWHERE.values():
        change(1.0)
    models = []
    for _ in range(2):
        torch.manual_seed(1)
        models.append(nn.Sequential(*[Block() for _ in range(2)]))
    plain, ours = models
    x = torch.randn(ROWS, WIDTH)
    compiled, found, most = mst.compile(ours, memory=MEMORY, check="off"), Found(), len(names) + 1
    with torch._dynamo.config.patch(recompile_limit=most, accumulated_recompile_limit=most):
        for name in names:
            value, place = 0.5 + rng.random() / 2, rng.randrange(2)
            if name in EVERYWHERE:
                EVERYWHERE[name](value)
            else:
                for model in models:
                    OF_A_BLOCK[name](value, model[place])
            expected = trained(plain, plain, x)
            try:
                results = trained(compiled, ours, x)
            except BudgetError:
                found.refused += 1
                for own, buffer in zip(ours.buffers(), plain.buffers(), strict=True):
                    own.copy_(buffer)
                continue
            found.compared += 1
            pairs = zip(results, expected, strict=True)
            if not all(a is b or (None not in (a, b) and torch.equal(a, b)) for a, b in pairs):
                found.differing.append(name)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    found = changed([rng.choice(NAMES) for _ in range(given.changes)], rng)
    print(f"{found.compared} of {given.changes} changes compared, {found.refused} refused")
    raise SystemExit(f"not noticed: {found.differing}" if found.differing else 0)


if __name__ == "__main__":
    main()
