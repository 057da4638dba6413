"""Stages that a plan treats alike are run as one, and do the same."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multistage as ms
import multistage.torch as mst
from multistage.actions import Action, Advance, EndForward, Free, Load, Reverse, Save, Tape
from multistage.errors import BudgetError
from multistage.model.stages import Stage, StageCosts
from multistage.torch.measurement.joining import ApartError, Joined, stretched
from multistage.torch.measurement.measure import measure_stages
from multistage.torch.measurement.traits import LargerError, Sizes, Traits
from multistage.torch.tensors.meter import Meter

_CPU = [torch.device("cpu")]


def _stages(n: int, **traits: Any) -> tuple[list[Callable[[Any], Any]], list[Traits]]:
    return [nn.Identity() for _ in range(n)], [Traits(f"stage {i}", **traits) for i in range(n)]


def _one_by_one(actions: Sequence[Action], starts: Sequence[int]) -> list[tuple[str, int]]:
    """Return what happens to single stages, by actions of stretches that start there."""
    found: list[tuple[str, int]] = []
    held: set[int] = set()
    for action in actions:
        match action:
            case Advance(a, b):
                found += (("Advance", i) for i in range(starts[a], starts[b]))
            case Tape(a) | Reverse(a):
                stages = range(starts[a], starts[a + 1])
                if a not in held:
                    found += (("Tape", i) for i in stages)
                if isinstance(action, Reverse):
                    found += (("Reverse", i) for i in reversed(stages))
                held.add(a) if isinstance(action, Tape) else held.discard(a)
            case EndForward():
                found.append(("EndForward", 0))
            case Save(a) | Load(a) | Free(a):
                found.append((type(action).__name__, starts[a]))
    return found


@pytest.mark.parametrize("seed", range(40))
def test_actions_of_stretches_are_those_of_the_plan(seed: int) -> None:
    draw = random.Random(seed)
    n = draw.randrange(2, 24)
    costs = StageCosts(
        tuple(
            Stage(
                name=str(i),
                forward_s=draw.random(),
                backward_s=draw.random(),
                output_bytes=(size := draw.randrange(1, 9) * 1000),
                tape_bytes=size + draw.randrange(9) * 1000,
                gradient_bytes=size,
            )
            for i in range(n)
        ),
        3000,
        3000,
    )
    try:
        plan = ms.plan_chain(costs, draw.choice([0.3, 0.5, 0.7, 0.9, None]))
    except BudgetError:
        plan = ms.plan_chain(costs, None)
    stages, traits = _stages(n)
    joined, _, new = stretched(stages, traits, plan.actions)
    sizes = [len(stage._stages) if isinstance(stage, Joined) else 1 for stage in joined]
    starts = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    assert _one_by_one(new, starts) == _one_by_one(plan.actions, range(n + 1))


@pytest.mark.parametrize("trait", ["graded", "differentiates", "unhooked", "changes_input"])
def test_stages_whose_tapes_are_their_own_stay_alone(trait: str) -> None:
    actions = [*map(Tape, range(3)), EndForward(), *map(Reverse, (2, 1, 0))]
    stages, traits = _stages(3)
    assert len(stretched(stages, traits, actions)[0]) == 1
    traits[0] = Traits("stage 0", **{trait: True})
    assert [type(x) for x in stretched(stages, traits, actions)[0]] == [nn.Identity, Joined]


@pytest.mark.parametrize("planned", [12, None])
def test_values_sizes_and_devices_inside_are_compared(planned: int | None) -> None:
    joined = Joined([nn.Identity(), nn.Identity()], [Sizes(planned), None])
    look = partial(joined.look, _CPU, None)
    for state in [(torch.ones(3), 1), (torch.zeros(2), 1)]:  # the first tells, if none is planned
        joined.run([state], look)
    elsewhere = torch.ones(3, device="meta")  # whose generator is not watched
    for state in [(torch.ones(3), 2), (torch.ones(3), object()), (elsewhere, 1)]:
        with pytest.raises(ApartError):
            joined.run([state], look)
        joined.run([state])  # when it runs again
    with pytest.raises(LargerError):
        joined.run([(torch.ones(4), 1)], look)


class _Block(nn.Module):
    """Batch norm, dropout, and a value beside the tensor."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.drop, self.counts, self.count = nn.Dropout(0.2), counts, 0

    def forward(self, state: tuple[Tensor, int]) -> tuple[Tensor, int]:
        x, number = state
        self.count += self.counts
        return x + self.drop(torch.tanh(self.norm(self.linear(x)))), number + self.count


def _trained(model: nn.Module, times: int, again: bool) -> list[Tensor]:
    torch.manual_seed(1)
    found: list[Tensor] = []
    for _ in range(times):
        x = torch.randn(64, 16, requires_grad=True)
        out, number = model((x, 0))
        loss = (out.square() * (1 + number % 3)).sum()
        loss.backward(retain_graph=again)
        if again:
            loss.backward()
        assert x.grad is not None
        found += [out.detach(), x.grad]
    found += [p.grad for p in model.parameters() if p.grad is not None]
    return [*found, *model.buffers(), torch.get_rng_state()]


def _costs(model: nn.Sequential, sample: Any) -> StageCosts:
    """Return bytes as measured, and times by which plans do not vary."""
    costs = measure_stages(list(model), [str(k) for k in range(len(model))], sample).costs
    stages = [replace(s, forward_s=0.01, backward_s=0.02, spared_s=0.0) for s in costs.stages]
    return replace(costs, stages=tuple(stages))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("memory", [0.6, 0.8])
def test_training_is_the_same(memory: float, counts: bool, again: bool) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[_Block(counts) for _ in range(10)])

    plain = _trained(make(), 3, again)
    sample = torch.randn(64, 16, requires_grad=True), 0
    chain = mst.Sequential(make(), sample, memory=memory, costs=_costs(make(), sample))
    ours = _trained(chain, 3, again)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    known = next(iter(chain._multistage.known.values()))
    assert known.running.joins is not counts  # a counter in the state parts the stages for good
    assert len(stretched(known.stages, known.profile.traits, known.plan.actions)[0]) < 10


@pytest.mark.parametrize("memory", [0.7, 0.85])
def test_the_peak_stays_within_the_limit(memory: float) -> None:
    torch.manual_seed(0)
    widths = [64, 512, 64, 256, 64, 512, 128, 64, 256, 64, 64]
    stages = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(widths)]
    x = torch.randn(2048, 64, requires_grad=True)
    chain = mst.Sequential(nn.Sequential(*stages), x, memory=memory)
    chain(x).sum().backward()
    with Meter(torch.device("cpu")) as meter:
        meter.ignore([x, *chain.parameters()])
        meter.ignore(t.grad for t in [x, *chain.parameters()] if t.grad is not None)
        chain(x).sum().backward()
    assert chain.plan.memory_bytes is not None
    assert meter.peak_bytes + x.nbytes <= chain.plan.memory_bytes


def test_helpers_of_many_stages_are_all_watched() -> None:
    """A search for what one callable refers to ends after 256 helpers."""

    def make() -> tuple[list[SimpleNamespace], list[Callable[[Tensor], Tensor]]]:
        helpers = [SimpleNamespace(scale=1.0 + k / 64) for k in range(40)]

        def stage(own: SimpleNamespace) -> Callable[[Tensor], Tensor]:
            others = [SimpleNamespace(scale=1.0) for _ in range(40)]
            return lambda x: torch.sin(x * others[0].scale * own.scale)

        return helpers, [stage(helper) for helper in helpers]

    def gradient(run: Callable[[Tensor], Tensor], helpers: list[SimpleNamespace]) -> Tensor:
        x = torch.linspace(0, 1, 64).requires_grad_()
        y = run(x)
        for helper in helpers:
            helper.scale += 1
        (found,) = torch.autograd.grad(y.sum(), x)
        return found

    helpers, stages = make()
    plain = gradient(lambda x: functools.reduce(lambda y, stage: stage(y), stages, x), helpers)
    helpers, stages = make()
    chain = mst.Sequential(stages, torch.ones(64, requires_grad=True), memory=0.5)
    assert torch.equal(gradient(chain, helpers), plain)


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


@pytest.mark.parametrize("times", [1, 2])
def test_parameters_given_other_memory_are_seen_as_by_autograd(times: int) -> None:
    """In a run that is counted, as the first is, and in one that is not."""

    def gradients(model: Callable[[Tensor], Tensor], parameters: list[Tensor]) -> list[Tensor]:
        for _ in range(times):
            y = model(torch.ones(3, 8))
            for parameter in parameters:
                parameter.data = parameter.data * 2
        return list(torch.autograd.grad(y.sum(), parameters))

    def make() -> nn.Sequential:
        return nn.Sequential(*[_Scale() for _ in range(4)])

    model = make()
    plain = gradients(model, list(model.parameters()))
    chain = mst.Sequential(make(), torch.ones(3, 8), memory=1 << 30, check="off")
    ours = gradients(chain, list(chain.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
