"""Stages that a plan treats alike are run as one, and do the same."""

from __future__ import annotations

import itertools
import random
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import multistage as ms
import multistage.torch as mst
from multistage.actions import Action, Advance, EndForward, Free, Load, Reverse, Save, Tape
from multistage.errors import BudgetError
from multistage.model.stages import Stage, StageCosts
from multistage.torch.held import HeldTape
from multistage.torch.joining import ApartError, Joined, stretched
from multistage.torch.meter import Meter
from multistage.torch.saved import Caught
from multistage.torch.sizes import Sizes
from multistage.torch.traits import Traits


def _stages(n: int, **traits: Any) -> tuple[list[Callable[[Any], Any]], list[Traits]]:
    return [nn.Identity() for _ in range(n)], [Traits(f"stage {i}", **traits) for i in range(n)]


def _one_by_one(actions: Sequence[Action], starts: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield what happens to single stages, by actions of stretches that start there."""
    for action in actions:
        match action:
            case Advance(a, b):
                yield from (("Advance", i) for i in range(starts[a], starts[b]))
            case Tape(a) if a + 1 < len(starts):
                yield from (("Tape", i) for i in range(starts[a], starts[a + 1]))
            case Reverse(a) if a + 1 < len(starts):
                yield from (("Reverse", i) for i in reversed(range(starts[a], starts[a + 1])))
            case EndForward():
                yield "EndForward", 0
            case Tape(a) | Reverse(a) | Save(a) | Load(a) | Free(a):
                yield type(action).__name__, starts[a]


def test_stages_that_are_never_parted_run_as_one() -> None:
    actions: list[Action] = [Advance(0, 3), Tape(3), Tape(4), Tape(5), EndForward(), Reverse(5)]
    actions += [Reverse(4), Reverse(3), Load(0), Advance(0, 1), Tape(1), Tape(2)]
    actions += [Reverse(2), Reverse(1), Load(0), Tape(0), Reverse(0)]
    stages, traits = _stages(5)
    joined, described, new = stretched(stages, traits, actions)
    assert [t.name for t in described] == ["stage 0", "stage 1+stage 2", "stage 3+stage 4"]
    assert [type(stage) for stage in joined] == [nn.Identity, Joined, Joined]
    assert list(_one_by_one(new, [0, 1, 3, 5])) == list(_one_by_one(actions, range(6)))


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
    assert list(_one_by_one(new, starts)) == list(_one_by_one(plan.actions, range(n + 1)))


@pytest.mark.parametrize("trait", ["graded", "differentiates", "unhooked", "changes_input"])
def test_stages_whose_tapes_are_their_own_stay_alone(trait: str) -> None:
    actions = [*(Tape(i) for i in range(4)), EndForward(), *(Reverse(i) for i in range(3, -1, -1))]
    stages, traits = _stages(3)
    assert len(stretched(stages, traits, actions)[0]) == 1
    traits[0] = Traits("stage 0", **{trait: True})
    assert [type(x) for x in stretched(stages, traits, actions)[0]] == [nn.Identity, Joined]


def test_a_state_goes_once_the_next_is_made() -> None:
    gone = []

    def second(x: Tensor) -> Tensor:
        gone.append(reference() is None)
        return x * 2

    x = torch.ones(3)
    reference = weakref.ref(x)
    box = [x]
    del x
    joined = Joined([torch.exp, second], [None, None])
    assert torch.equal(joined(box), torch.ones(3).exp() * 2)
    assert gone == [True]


def test_values_and_sizes_inside_are_compared() -> None:
    joined = Joined([nn.Identity(), nn.Identity()], [Sizes(12), None])
    for state in [(torch.ones(3), 1), (torch.zeros(2), 1)]:
        joined([state], joined.look)
    for state in [(torch.ones(3), 2), (torch.ones(4), 1), (torch.ones(3), object())]:
        with pytest.raises(ApartError):
            joined([state], joined.look)
        joined([state])  # when it runs again


def test_what_no_gradient_asks_for_goes_with_its_stage() -> None:
    caught = Caught()
    for size in (1, 2, 3):
        caught.tape.append(torch.ones(size))
        caught.versions.append(0)
        caught.part(size, None)
    caught.parts.pop()
    never = weakref.ref(caught.tape[2])  # type: ignore[arg-type]
    tape = HeldTape(caught, None)
    assert tape.at_hand(1) is None  # it lies below
    assert tape.take(1) is not None
    assert never() is None
    assert tape.at_hand(0) is None
    assert tape.take(0) is not None


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


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("counts", [False, True])
@pytest.mark.parametrize("memory", [0.6, 0.8])
def test_training_is_the_same(memory: float, counts: bool, again: bool) -> None:
    def make() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(*[_Block(counts and i == 2) for i in range(10)])

    plain = _trained(make(), 3, again)
    sample = torch.randn(64, 16, requires_grad=True), 0
    chain = mst.Sequential(make(), sample, memory=memory)
    ours = _trained(chain, 3, again)
    assert all(torch.equal(a, b) for a, b in zip(plain, ours, strict=True))
    (known,) = next(iter(chain._multistage.known.values()))
    assert known.running.joins is not counts  # a counter in the state parts the stages for good
    assert (
        len(known.running.of(known.stages, known.profile, known.plan.actions, joins=True)[0]) < 10
    )


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
    assert chain.plan is not None and chain.plan.memory_bytes is not None
    assert meter.peak_bytes + x.nbytes <= chain.plan.memory_bytes
