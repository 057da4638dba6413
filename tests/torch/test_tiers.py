"""Tapes and states of chains that travel to a slow tier: the bits of plain training, always."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import pickle
import random
import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from fuzz_tiers import CPU, INPLACE, PAGE, play, same  # noqa: E402
from leaving import on_time  # noqa: E402
from tierfuzz.chains import Residual, Spoils, chain  # noqa: E402
from tierfuzz.faults import Flaky, Interrupts, poisoned  # noqa: E402
from tierfuzz.plans import random_plan  # noqa: E402
from torch import Tensor, nn  # noqa: E402

import multistage.torch as mst  # noqa: E402
from multistage.actions import (  # noqa: E402
    Action,
    Advance,
    Await,
    Drop,
    EndForward,
    Evict,
    Free,
    Get,
    Load,
    Put,
    Reverse,
    Save,
    Tape,
)
from multistage.backends import FileStore, MemoryStore  # noqa: E402
from multistage.backends.base import CheckpointLost  # noqa: E402
from multistage.backends.streamed import StreamedStore  # noqa: E402
from multistage.errors import (  # noqa: E402
    ArgumentError,
    BudgetError,
    CheckpointWarning,
    StateError,
    StoreError,
)
from multistage.model.stages import StageCosts  # noqa: E402
from multistage.model.tier import Tier  # noqa: E402
from multistage.planners.base import store_all_schedule  # noqa: E402
from multistage.schedule.simulation import simulate  # noqa: E402
from multistage.states.layout import Layout  # noqa: E402
from multistage.torch.chains.runner import Run, Script  # noqa: E402
from multistage.torch.environment.captured import Snapshot  # noqa: E402
from multistage.torch.environment.scope import Scope  # noqa: E402
from multistage.torch.measurement.exploring import explore  # noqa: E402
from multistage.torch.measurement.measure import measure_stages  # noqa: E402
from multistage.torch.planning import choosing  # noqa: E402
from multistage.torch.planning.choosing import held_by_caller  # noqa: E402
from multistage.torch.tensors.meter import Meter  # noqa: E402
from multistage.torch.tiers import tiered  # noqa: E402
from multistage.torch.tiers.lane import Carried, ChainTier, TierLane  # noqa: E402


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    yield
    gc.collect()
    for thread in threading.enumerate():
        if thread.name.startswith("multistage"):
            thread.join(60)
            assert not thread.is_alive(), thread


def results(
    model: nn.Module, call: Callable[[Tensor], Tensor], times: int = 1, rows: int = 8
) -> list[Tensor]:
    """Return all that an iteration gives: output, gradients, buffers, random state."""
    torch.manual_seed(1)
    x = torch.randn(rows, 24, requires_grad=True)
    model.zero_grad()
    y = call(x)
    for _ in range(times):
        y.square().sum().backward(retain_graph=times > 1)
    found = [y, x.grad, *(p.grad for p in model.parameters()), *model.buffers()]
    return [t.detach().clone() for t in found if t is not None] + [torch.get_rng_state()]


def run_with(
    model: nn.Sequential, actions: list[Action], slow: ChainTier | None
) -> Callable[[Tensor], Tensor]:
    x = torch.randn(8, 24, requires_grad=True)
    names = [str(k) for k in range(len(model))]
    with Snapshot(Scope(list(model)), [x]):
        groups, traits = explore(list(model), names, x)
    assert all(len(group) == 1 for group in groups)
    return lambda x: Run(list(model), traits, actions, slow).forward(x)


def offload_all(n: int) -> list[Action]:
    actions: list[Action] = []
    for i in range(n):
        actions += [Tape(i), Put(i, tape=True)]
        if i:
            actions.append(Evict(i - 1, tape=True))
    actions += [Evict(n - 1, tape=True), EndForward()]
    actions += [Get(n - 1, tape=True)]
    for i in reversed(range(n)):
        if i:
            actions.append(Get(i - 1, tape=True))
        if i == n - 1:
            actions.append(Await(n))
        if i:
            actions.append(Await(n + n - i))
        actions += [Reverse(i), Drop(i, tape=True)]
    return actions


store = functools.partial(MemoryStore, buffer_bytes=0)


@pytest.mark.parametrize("seed", range(24))
def test_random_plans_give_the_bits_of_plain_training(seed: int) -> None:
    rng = random.Random(seed)
    expected = results(plain := chain(), plain)
    model = chain()
    slow = ChainTier(store(), CPU, PAGE)
    actions = random_plan(rng, len(model))
    assert same(results(model, run_with(model, actions, slow)), expected), actions
    opened = slow.opened
    if opened is not None:
        assert opened.written.transfers == sum(isinstance(a, Evict) for a in actions)
    slow.close()


def test_a_second_backward_that_was_interrupted_starts_over() -> None:
    expected = results(plain := chain(), plain)
    model = chain()
    slow = ChainTier(store(), CPU, PAGE)
    call = run_with(model, offload_all(len(model)), slow)
    interrupted: list[Action] = []
    play = Script.play

    def interrupting(script: Script) -> Iterator[Action]:
        for action in play(script):
            if script.next == 12 and not interrupted:
                interrupted.append(action)
                raise KeyboardInterrupt
            yield action

    def thrice(x: Tensor) -> Tensor:
        y = call(x)
        y.sum().backward(retain_graph=True)
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(Script, "play", interrupting)
            y.sum().backward(retain_graph=True)
        x.grad = None
        model.zero_grad()
        return y

    with pytest.warns(CheckpointWarning, match="closed"):
        assert same(results(model, thrice), expected)
    assert interrupted


@pytest.mark.parametrize("by", ["tapes", "a state in fast memory", "a state and a tape"])
def test_a_backward_that_writes_to_tensors_of_another_stage_is_found(by: str) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(24, 24), nn.Sigmoid()), Spoils())
    with pytest.raises(RuntimeError, match=INPLACE):
        results(model, model)
    actions = offload_all(2)
    if by == "a state in fast memory":
        actions = [Tape(0), Put(0, tape=True), Save(1), Tape(1), Evict(0, tape=True)]
        actions += [EndForward(), Get(0, tape=True), Reverse(1), Await(1), Reverse(0)]
    elif by == "a state and a tape":
        actions = [Tape(0), Put(0, tape=True), Save(1), Put(1), Evict(0, tape=True), Tape(1)]
        actions += [Evict(1), EndForward(), Get(1), Get(0, tape=True)]
        actions += [Await(2), Await(3), Reverse(1), Free(1), Reverse(0)]
    slow = ChainTier(store(), CPU, PAGE)
    with pytest.raises(RuntimeError, match=INPLACE):
        results(model, run_with(model, actions, slow))
    slow.close()


def test_evicted_data_takes_no_memory() -> None:
    width, rows = 64, 1024
    model = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(16)))
    x = torch.randn(rows, width, requires_grad=True)

    def peak(call: Callable[[Tensor], Tensor]) -> int:
        model.zero_grad()
        with Meter(CPU) as meter:
            meter.ignore([x, *model.parameters()])
            call(x).sum().backward()
        return meter.peak_bytes

    slow = ChainTier(store(), CPU, PAGE)
    names = [str(k) for k in range(len(model))]
    with Snapshot(Scope(list(model)), [x]):
        _, traits = explore(list(model), names, x)
    plain = peak(model)
    away = peak(lambda x: Run(list(model), traits, offload_all(16), slow).forward(x))
    state = x.nbytes
    assert plain > 16 * state
    assert away < 7 * state
    slow.close()


# -------------------------------------------------------------------------- faults


@pytest.mark.filterwarnings("ignore:tier")
@pytest.mark.parametrize("seed", range(18))  # with every way to train, and every fault
def test_random_chains_plans_and_faults(seed: int) -> None:
    name, right = play(seed)
    assert right, name


# In the backward pass states and tapes are read, computed again, saved, made and released.
EVERY_KIND: list[Action] = [Tape(0), Put(0, tape=True), Save(1), Put(1), Evict(0, tape=True)]
EVERY_KIND += [Tape(1), Evict(1), Advance(2, 5), EndForward()]
EVERY_KIND += [Get(1), Await(2), Load(1), Advance(1, 2), Save(2), Advance(2, 4), Tape(4)]
EVERY_KIND += [Reverse(4), Load(2), Advance(2, 3), Tape(3), Reverse(3), Load(2), Tape(2)]
EVERY_KIND += [Reverse(2), Free(2), Get(0, tape=True), Reverse(1), Free(1), Drop(1)]
EVERY_KIND += [Await(3), Reverse(0), Drop(0, tape=True)]


def interrupted_at(moment: int, model: nn.Sequential) -> tuple[list[Tensor], list[str]]:
    """Return what training gives whose first backward is interrupted, and where that was."""
    interrupts, slow = Interrupts([moment]), ChainTier(store(), CPU, PAGE)
    with interrupts.strike(), contextlib.closing(slow):
        forward = run_with(model, EVERY_KIND, slow)

        def call(x: Tensor) -> Tensor:
            y = forward(x)
            interrupts.on = True
            with contextlib.suppress(KeyboardInterrupt):
                y.square().sum().backward(retain_graph=True)
            interrupts.on, x.grad = False, None
            model.zero_grad()
            return y

        return results(model, call), interrupts.struck


@pytest.mark.filterwarnings("ignore:tier")
def test_an_interrupt_at_any_moment_of_a_backward_costs_time_only() -> None:
    torch.manual_seed(0)
    stages = (nn.Sequential(nn.Linear(24, 24), nn.Dropout(0.5), nn.Tanh()) for _ in range(5))
    model = nn.Sequential(*stages)
    expected, struck = results(model, model), set[str]()
    for moment in itertools.count(1):
        found, where = interrupted_at(moment, model)
        assert same(found, expected), where
        if not where:
            break
        struck |= {*where}
    kinds = {type(a).__name__ for a in EVERY_KIND[EVERY_KIND.index(EndForward()) + 1 :]}
    assert struck >= {f"before {kind}" for kind in kinds} | {f"after {kind}" for kind in kinds}
    assert struck >= {f"in {name}" for name in ("advance", "tape", "keep", "read", "wait", "drop")}


def test_an_aborted_record_leaves_nothing_in_the_tier() -> None:
    tier = Flaky("break", lambda key: key == 2)
    lane = TierLane(tier, CPU, PAGE)
    assert not lane.wait(lane.write([torch.zeros(4 * PAGE, dtype=torch.uint8)]))
    assert tier.stats.writes == 2
    assert tier.stats.stored_bytes == 0
    lane.close()


def test_memory_of_a_failed_read_is_not_reused_as_data() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(24, 24), nn.Sigmoid()), nn.Linear(24, 24))
    expected = results(model, model)
    slow = ChainTier(Flaky("read", lambda key: key == 1), CPU, PAGE)
    actions = [Tape(0), Put(0, tape=True), Save(1), Put(1), Evict(0, tape=True), Tape(1), Evict(1)]
    actions += [EndForward(), Get(1), Get(0, tape=True), Await(2), Await(3)]
    actions += [Reverse(1), Free(1), Drop(1), Reverse(0), Drop(0, tape=True)]
    call = run_with(model, actions, slow)
    fetch = TierLane.fetch

    def failing_first(self: TierLane, sent: Any, lines: Any) -> Any:
        found = fetch(self, sent, lines)
        found.done.wait(60)  # so that the next one finds it failed
        return found

    with pytest.MonkeyPatch.context() as patch, pytest.warns(CheckpointWarning, match="is lost"):
        patch.setattr(TierLane, "fetch", failing_first)
        assert same(results(model, call), expected)
    slow.close()


class Waits(Flaky):
    """Reads nothing before it is told to."""

    def __init__(self) -> None:
        super().__init__("write", lambda key: key == 1)
        self.go = threading.Event()

    def get(self, key: int) -> list[Any]:
        assert self.go.wait(60)
        return super().get(key)


def test_bytes_that_another_tape_is_bringing_are_not_used_before_they_came() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(24, 24), nn.Sigmoid()), nn.Linear(24, 24))
    expected = results(model, model)
    waits = Waits()
    slow = ChainTier(waits, CPU, PAGE)
    actions = [Tape(0), Put(0, tape=True), Save(1), Put(1), Evict(0, tape=True), Tape(1), Evict(1)]
    actions += [EndForward(), Get(0, tape=True), Get(1), Await(3)]
    actions += [Reverse(1), Free(1), Drop(1), Await(2), Reverse(0), Drop(0, tape=True)]
    call = run_with(model, actions, slow)
    handle = model[1].weight.register_hook(lambda _: waits.go.set())  # after its input was taken
    with poisoned(), pytest.warns(CheckpointWarning, match="the output of stage 0 is lost"):
        assert same(results(model, call), expected)
    handle.remove()
    slow.close()


def test_bytes_that_another_tape_is_bringing_are_waited_for() -> None:
    """The state's bytes come back with the tape below, which is awaited after it: none is lost."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(24, 24), nn.Sigmoid()), nn.Linear(24, 24))
    expected = results(model, model)
    actions = [Tape(0), Put(0, tape=True), Save(1), Put(1), Evict(0, tape=True), Tape(1), Evict(1)]
    actions += [EndForward(), Get(0, tape=True), Get(1), Await(3)]
    actions += [Reverse(1), Free(1), Drop(1), Await(2), Reverse(0), Drop(0, tape=True)]
    slow = ChainTier(store(), CPU, PAGE)
    assert same(results(model, run_with(model, actions, slow)), expected)
    slow.close()


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise KeyboardInterrupt
        return x * 2


@pytest.mark.parametrize("sweep", ["forward", "backward"])
def test_an_interrupt_leaves_no_thread_and_no_file(sweep: str, tmp_path: Any) -> None:
    model = chain()
    model.append(fails := Fails())
    slow = ChainTier(FileStore(tmp_path), CPU, PAGE)
    n = len(model)
    actions = offload_all(n)
    call = run_with(model, actions, slow)
    if sweep == "forward":
        fails.fails = True
        with pytest.raises(KeyboardInterrupt):
            call(torch.randn(8, 24))
    else:
        y = call(torch.randn(8, 24, requires_grad=True))
        assert slow.opened is not None
        y.register_hook(lambda g: (_ for _ in ()).throw(ValueError("user")))
        with pytest.raises(ValueError, match="user"):
            y.sum().backward()
        del y
        gc.collect()
    assert slow.opened is None
    assert not list(tmp_path.iterdir())
    assert not [t for t in threading.enumerate() if t.name.startswith("multistage")]


class Apply(nn.Module):
    """Applies a Function."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        return self._function.apply(x)


class Writes(nn.Module):
    """Writes to its input, though not when it is profiled."""

    def __init__(self) -> None:
        super().__init__()
        self.on = False

    def forward(self, x: Tensor) -> Tensor:
        if self.on:
            x.detach().add_(1)
        return x * 2


def test_a_write_to_saved_tensors_is_found() -> None:
    model = nn.Sequential(nn.Linear(24, 24), nn.Sigmoid(), Writes(), nn.Linear(24, 24))
    slow = ChainTier(store(), CPU, PAGE)
    actions = [Tape(0), Tape(1), Put(1, tape=True), Tape(2), Evict(1, tape=True), Tape(3)]
    actions += [EndForward(), Reverse(3), Get(1, tape=True), Await(1)]
    actions += [Reverse(2), Reverse(1), Drop(1, tape=True), Reverse(0)]
    call = run_with(model, actions, slow)
    model[2].on = True
    with pytest.raises(RuntimeError, match="stage 1 saved for its gradient has been modified"):
        call(torch.randn(8, 24)).sum().backward()
    slow.close()


def test_a_write_to_a_state_on_its_way_is_found() -> None:
    """Plain training needs the state no more, a stage that is run again from it does."""
    model = nn.Sequential(nn.Linear(24, 24), Writes(), nn.Linear(24, 24))
    actions = [Advance(0, 1), Save(1), Put(1), Advance(1, 2), Evict(1), Tape(2)]
    actions += [EndForward(), Reverse(2), Get(1), Await(1), Load(1), Tape(1), Free(1)]
    actions += [Reverse(1), Drop(1), Load(0), Tape(0), Reverse(0)]
    slow = ChainTier(store(), CPU, PAGE)
    call = run_with(model, actions, slow)
    model[1].on = True
    with pytest.raises(RuntimeError, match=r"in ?place"):
        call(torch.randn(8, 24)).sum().backward()
    slow.close()


class Saves(Writes):
    """Saves its input, which it may have written to: plain training allows that."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return torch.sin(x)


def test_a_write_of_a_stage_to_its_input_that_has_left_is_found() -> None:
    """The tier may have the bytes of before or after the write."""
    model = nn.Sequential(nn.Linear(24, 24), Saves())
    actions = [Tape(0), Put(0, tape=True), Tape(1), Evict(0, tape=True), EndForward()]
    actions += [Get(0, tape=True), Await(1), Reverse(1), Reverse(0)]
    slow = ChainTier(store(), CPU, PAGE)
    call = run_with(model, [*actions, Drop(0, tape=True)], slow)
    model[1].on = True
    with pytest.raises(RuntimeError, match=r"in ?place"):
        call(torch.randn(8, 24)).sum().backward()
    slow.close()


@pytest.mark.parametrize("what", ["output 0", "output 2", "weight"])
@pytest.mark.parametrize("by", ["tapes", "states", "states of tapes"])
def test_a_write_between_the_sweeps_is_found(what: str, by: str) -> None:
    layers = [nn.Linear(24, 24) if k % 2 else nn.Tanh() for k in range(4)]
    model = nn.Sequential(*layers)
    outputs: list[Tensor] = []
    for layer in layers:
        layer.register_forward_hook(lambda module, args, output: outputs.append(output.detach()))
    actions = offload_all(4)
    if by == "states of tapes":  # tapes stay, of which the states before are a part
        actions = [Advance(0, 1), Save(1), Put(1), Tape(1), Evict(1), Advance(2, 3), Save(3)]
        actions += [Put(3), Tape(3), Evict(3), EndForward(), Get(3), Await(2)]
        actions += [Reverse(3), Free(3), Drop(3), Get(1), Await(3), Load(1), Advance(1, 2), Tape(2)]
        actions += [Reverse(2), Reverse(1), Free(1), Drop(1), Load(0), Tape(0), Reverse(0)]
    elif by == "states":
        actions = [Advance(0, 1), Save(1), Put(1), Advance(1, 2), Evict(1), Save(2), Put(2)]
        actions += [Advance(2, 3), Evict(2), Tape(3), EndForward(), Reverse(3)]
        actions += [Get(2), Await(2), Load(2), Tape(2), Free(2), Get(1), Reverse(2)]
        actions += [Await(3), Load(1), Tape(1), Free(1), Reverse(1), Load(0), Tape(0), Reverse(0)]
    slow = ChainTier(store(), CPU, PAGE)
    call = run_with(model, actions, slow)
    outputs.clear()
    y = call(torch.randn(8, 24, requires_grad=True))
    with torch.no_grad():
        (layers[3].weight if what == "weight" else outputs[int(what[-1])]).mul_(2)
    with pytest.raises((RuntimeError, StateError), match=r"in ?place"):
        y.sum().backward()
    slow.close()


class Cosine(torch.autograd.Function):
    """Saves and returns arrays of NumPy's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(torch.from_numpy(-np.sin(x.detach().numpy())))
        return torch.from_numpy(np.cos(x.detach().numpy()))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * ctx.saved_tensors[0]


def test_arrays_of_numpy_leave_too() -> None:
    model = nn.Sequential(*[Apply(Cosine) for _ in range(4)])
    expected = results(model, model)
    slow = ChainTier(store(), CPU, PAGE)
    call = run_with(model, offload_all(4), slow)
    x = torch.randn(512, 24, requires_grad=True)
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        y = call(x)
        held = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    # Of three tapes in the tier, of which tracemalloc sees pages that are gathered.
    assert held < 4 * x.nbytes + 8 * PAGE, (held, x.nbytes)
    y.sum().backward()
    assert same(results(model, call), expected)
    slow.close()


# ---------------------------------------------------------------------- Sequential


ROWS = 1024


def deep(count: int = 12) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Residual(24) for _ in range(count)))


FAST = Tier.of_rates(1e12, 1e12, name="fast")


@pytest.fixture
def fast_tiers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every tier be measured as fast, so that plans use it."""
    monkeypatch.setattr(tiered, "_probed", lambda tier, most: (FAST, 0.0))
    monkeypatch.setattr(choosing, "hooks_s", lambda: 1e-4)


@functools.cache
def costs_of_deep() -> StageCosts:
    """Return the bytes of its stages as measured, and times by which plans do not vary."""
    model = deep()
    x = torch.randn(ROWS, 24, requires_grad=True)
    costs = measure_stages(list(model), [str(k) for k in range(len(model))], x).costs
    stages = [
        replace(s, forward_s=0.01, backward_s=0.02, spared_s=0.0, overhead_s=0.0)
        for s in costs.stages
    ]
    return replace(costs, stages=tuple(stages))


def sequential(tiers: Any, memory: float = 0.4) -> Any:
    x = torch.randn(ROWS, 24, requires_grad=True)
    return mst.Sequential(deep(), x, memory=memory, tiers=tiers, costs=costs_of_deep())


def test_random_plans_are_legal_and_take_no_more_than_simulated() -> None:
    model = deep()
    x = torch.randn(ROWS, 24, requires_grad=True)
    names = [str(k) for k in range(len(model))]
    traits = measure_stages(list(model), names, x, costs=costs_of_deep()).traits
    costs = held_by_caller(costs_of_deep())
    for seed in range(8):
        actions = random_plan(random.Random(seed), len(model))
        allowed = simulate(actions, None, costs, tiers=(FAST,)).peak_bytes
        slow = ChainTier(store(), CPU, PAGE)
        with Meter(CPU) as meter:
            meter.ignore([x, *model.parameters(), *model.buffers()])
            Run(list(model), traits, actions, slow).forward(x).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None
        x.grad = None
        assert x.nbytes + meter.peak_bytes <= allowed
        slow.close()


def test_a_limit_that_is_too_small_leaves_the_tier_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    def probed(slow: ChainTier, most: int) -> tuple[Tier, float]:
        slow.open()
        return FAST, 0.0

    monkeypatch.setattr(tiered, "_probed", probed)
    tier = store()
    for _ in range(2):
        with pytest.raises(BudgetError) as kept:
            sequential(tier, 0.15)
        assert kept.value is not None  # which refers to the chain
    # The message has the limit as it was given, and one that works.
    with pytest.raises(BudgetError, match="memory=5000 bytes < ") as kept:
        sequential(tier, 5000)
    assert kept.value.least_bytes is not None
    sequential(tier, kept.value.least_bytes).close()
    sequential(tier, 0.6).close()


@pytest.mark.usefixtures("fast_tiers")
def test_a_plan_with_a_tier_stays_within_its_limit() -> None:
    model = sequential(store(), 0.45)
    x = torch.randn(ROWS, 24, requires_grad=True)
    with Meter(CPU) as meter:
        meter.ignore([x, *model.parameters(), *model.buffers()])
        model(x).sum().backward()
    gradients = sum(p.nbytes for p in model.parameters())
    assert any(isinstance(a, Put) for a in model.plan.actions)
    assert x.nbytes + meter.peak_bytes - gradients <= model.plan.memory_bytes
    model.close()


@pytest.mark.usefixtures("fast_tiers")
@pytest.mark.parametrize("tier", ["memory", "file", "pinned", "cascade"])
def test_sequential_trains_as_plain_with_a_tier(tier: str, tmp_path: Any) -> None:
    tiers = {
        "memory": store(),
        "file": f"file://{tmp_path}?buffers=0MiB",
        "pinned": "pinned:64MiB",
        "cascade": f"memory:1MiB > file://{tmp_path}",
    }[tier]
    limit = 0.4
    expected = results(plain := deep(), plain, rows=ROWS)
    model = sequential(tiers, limit)
    if tier in ("memory", "pinned"):
        assert any(isinstance(a, Put) for a in model.plan.actions)
        assert model.plan.peak_bytes <= model.plan.memory_bytes
        assert model.plan.reserved["buffers of the tiers"] > 0
    for _ in range(2):
        fresh = deep()
        model.load_state_dict(fresh.state_dict())
        assert same(results(model, model, rows=ROWS), expected)
    model.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("fast_tiers")
@pytest.mark.parametrize("fault", ["full", "broken", "lost"])
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_transfers_that_fail_cost_time_and_no_bits(
    fault: str, kind: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    put, get, count = StreamedStore.put, StreamedStore.get, itertools.count()

    def failing_put(self: Any, key: int, arrays: Any, *, block: bool = False) -> bool:
        if fault != "lost" and next(count) % 3 == 0:
            if fault == "broken":
                raise OSError("the cable is out")
            return False
        return put(self, key, arrays, block=block)

    def failing_get(self: Any, key: int) -> list[Any]:
        if fault == "lost" and next(count) % 3 == 0:
            raise CheckpointLost("bad checksum")
        return get(self, key)

    expected = results(plain := deep(), plain, rows=ROWS)
    model = sequential(store() if kind == "memory" else f"file://{tmp_path}")
    assert any(isinstance(a, Put) for a in model.plan.actions)
    model.load_state_dict(deep().state_dict())
    monkeypatch.setattr(StreamedStore, "put", failing_put)
    monkeypatch.setattr(StreamedStore, "get", failing_get)
    waits = on_time()  # else what failed may be given up
    with waits, pytest.warns(CheckpointWarning, match="computed again"):
        assert same(results(model, model, rows=ROWS), expected)
    model.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("fast_tiers")
@pytest.mark.parametrize("what", ["overwritten", "truncated"])
def test_a_file_that_is_damaged_between_the_sweeps_costs_time_only(
    what: str, tmp_path: Any
) -> None:
    expected = results(plain := deep(), plain, rows=ROWS)
    model = sequential(f"file://{tmp_path}")
    model.load_state_dict(deep().state_dict())

    def call(x: Tensor) -> Tensor:
        with on_time():
            y: Tensor = model(x)
        for each in Path("/proc/self/fd").iterdir():  # it has no name
            if each.is_file() and str(each.readlink()).startswith(str(tmp_path)):
                size = each.stat().st_size if what == "overwritten" else 0
                with each.open("r+b") as file:
                    file.truncate(0)
                    file.write(bytes(size))
        return y

    with pytest.warns(CheckpointWarning, match="computed again"):
        assert same(results(model, call, rows=ROWS), expected)
    model.close()


@pytest.mark.usefixtures("fast_tiers")
def test_plans_without_gradients_leave_the_tier_alone() -> None:
    tier = store()
    model = sequential(tier)
    model.close()
    with torch.no_grad():
        model(torch.randn(ROWS, 24))
    assert model._multistage.tiered._tier.opened is None


@pytest.mark.usefixtures("fast_tiers")
def test_copies_open_the_tier_again_or_are_refused() -> None:
    model = sequential("memory:?buffers=0MiB")
    expected = results(plain := deep(), plain, rows=ROWS)
    copy = pickle.loads(pickle.dumps(model))
    assert copy._multistage.tiered is not model._multistage.tiered
    copy.load_state_dict(deep().state_dict())
    model.load_state_dict(deep().state_dict())
    assert same(results(copy, copy, rows=ROWS), expected)
    assert same(results(model, model, rows=ROWS), expected)
    model.close()
    copy.close()
    model = sequential(store())
    with pytest.raises(ArgumentError, match="cannot be copied or pickled"):
        deepcopy(model)
    model.close()


def test_a_chain_whose_tier_is_a_path_can_be_copied(tmp_path: Any) -> None:
    model = mst.Sequential(nn.Sequential(nn.Linear(4, 4)), tiers=tmp_path)
    assert deepcopy(model)._multistage.tiered.names == model._multistage.tiered.names


@pytest.mark.usefixtures("fast_tiers")
def test_a_store_of_another_run_is_refused() -> None:
    tier = store()
    model = sequential(tier)
    with pytest.raises(StoreError, match="another run"):
        other = sequential(tier)
        other(torch.randn(ROWS, 24, requires_grad=True))
    model.close()


@pytest.mark.usefixtures("fast_tiers")
def test_a_forked_child_is_refused() -> None:
    model = sequential(store())
    lane = model._multistage.tiered._tier.opened
    child = os.fork()
    if not child:
        try:
            model._multistage.tiered._tier.open()
        except StoreError:
            os._exit(7)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert model._multistage.tiered._tier.opened is lane
    model.close()


@pytest.mark.usefixtures("fast_tiers")
def test_a_chain_that_is_dropped_closes_its_tier() -> None:
    tier = store()
    model = sequential(tier)
    assert model._multistage.tiered._tier.opened is not None
    del model
    gc.collect()
    tier.open(Layout.up_to(64))
    tier.close()


def test_a_slower_tier_is_planned_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered, "_probed", lambda tier, most: (FAST, 0.0))
    model = sequential(store())
    before = model.plan
    for _ in range(3):
        results(model, model, rows=ROWS)
    assert model._multistage.tiered.rates != FAST
    assert model.plan is not before
    model.close()


def test_making_plans_again_takes_a_fiftieth_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    used, now, seconds = tiered.Tiered(["memory:"]), [0.0], itertools.count(1)
    used.rates, used.clock = FAST, lambda: now[0]

    def look(_: Any) -> tuple[Carried, Carried]:
        one = Carried(1 << 20, 1, 10.0 ** next(seconds))  # slower each time
        return one, one

    monkeypatch.setattr(tiered.Tiered, "_look", look)
    used._next_look = 2  # nothing was carried before
    assert [used.drifted() for _ in range(3)] == [False, False, True]  # the first is not counted
    used.planned(0.5)
    now[0] = 24.0
    assert not any(used.drifted() for _ in range(20))
    now[0] = 25.0
    assert used.drifted()


def test_rates_are_not_taken_for_those_of_a_busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    used = tiered.Tiered(["memory:"])
    used.rates = Tier.of_rates(100.0, 100.0)
    used.tier(CPU, None).busier = 4.0
    seen = Carried(100, 1, 4.0)
    monkeypatch.setattr(tiered.Tiered, "_look", lambda _: (seen, seen))
    assert not any(used.drifted() for _ in range(9))
    used.tier(CPU, None).busier = 1.0
    assert any(used.drifted() for _ in range(9))
    assert used.rates.write_bytes_per_s == 25.0


def test_a_share_of_a_bandwidth_is_measured_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    used, seen = tiered.Tiered(["memory:?share=8"]), Carried(800, 1, 1.0)
    monkeypatch.setattr(tiered, "_round", lambda *_: (seen, seen))
    assert used.measured(CPU, None).write_bytes_per_s == 100.0
    monkeypatch.setattr(tiered.Tiered, "_look", lambda _: (seen, seen))
    assert not any(used.drifted() for _ in range(9))  # the others do nothing now
    seen = Carried(100, 1, 4.0)
    assert any(used.drifted() for _ in range(20))
    assert used.rates is not None and used.rates.write_bytes_per_s < 26.0
    seen = Carried(800, 1, 1.0)
    assert any(used.drifted() for _ in range(200))
    assert used.rates.write_bytes_per_s == 100.0
    used.close()


@pytest.mark.parametrize("upper", ["1MiB", "3MiB"])
def test_a_cascade_is_measured_by_its_levels(upper: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a level by its share: the upper one took all that was sent, at its own rate."""
    used = tiered.Tiered([f"memory:{upper}?share=2 > memory:4MiB?share=8"])
    monkeypatch.setattr(tiered, "_PROBE_S", 0.01)
    opened: list[Any] = []
    one_round = tiered._round

    def carried(lane: Any, records: Any, load: Any) -> tuple[Carried, Carried]:
        opened.append(lane._store)
        written, read = one_round(lane, records, load)
        assert written.nbytes == read.nbytes == sum(len(record) for record in records) > 0
        return Carried(800, 1, 1.0), Carried(1600, 1, 1.0)

    monkeypatch.setattr(tiered, "_round", carried)
    rates = used.measured(CPU, None)
    assert (rates.write_bytes_per_s, rates.read_bytes_per_s) == (100.0, 200.0)
    whole = used.tier(CPU, None).store
    assert list(dict.fromkeys(opened)) == list(whole.levels)
    assert rates.capacity_bytes is not None and rates.capacity_bytes >= 4 << 20
    assert rates.name == whole.name
    used.close()


@pytest.mark.usefixtures("fast_tiers")
def test_a_plan_that_is_hardly_slower_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    model = sequential(store())
    before, seen = model.plan, Tier.of_rates(1e11, 1e11, name="seen")

    def drifted(used: tiered.Tiered) -> bool:
        used.rates = seen
        return True

    monkeypatch.setattr(tiered.Tiered, "drifted", drifted)
    results(model, model, rows=ROWS)
    assert model.plan.tier == seen
    assert model.plan.actions == before.actions
    model.close()


@pytest.mark.usefixtures("fast_tiers")
@pytest.mark.parametrize("pays", [0.0, 1.0])
def test_a_tier_is_used_where_it_saves_a_part_of_the_time(
    pays: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "PAYS", pays)
    model = sequential(store())
    assert any(isinstance(a, Put) for a in model.plan.actions) == bool(pays)
    model.close()


def test_a_tier_that_does_not_pay_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = Tier.of_rates(1e3, 1e3, name="slow")
    monkeypatch.setattr(tiered, "_probed", lambda tier, most: (slow, 0.0))
    model = sequential(store())
    assert not any(isinstance(a, Put) for a in model.plan.actions)
    assert model.plan.tier == slow
    assert model.plan.candidate("no tier").makespan_s == model.plan.makespan_s
    assert all(said in str(model.plan) for said in ("tier slow", "lower bound", "every tape to"))
    assert model._multistage.tiered._tier is None or not model._multistage.tiered._tier.opened


@pytest.mark.parametrize("tiers", ["memry:", 3, "memory:?capacty=1"])
def test_tiers_that_are_none_are_refused(tiers: Any) -> None:
    with pytest.raises(ArgumentError):
        mst.Sequential(deep(), tiers=tiers)


def test_tiers_go_with_the_optimal_planner() -> None:
    with pytest.raises(ArgumentError, match="optimal"):
        mst.Sequential(deep(), tiers="memory:", planner="revolve")


def test_the_cost_of_hooks_is_measured_with_plain_gradients() -> None:
    stages = [functools.partial(choosing._small, nn.Linear(4, 4)) for _ in range(choosing._STAGES)]
    x = torch.ones(2, 4, requires_grad=True)
    names = [str(k) for k in range(len(stages))]
    profile = measure_stages(stages, names, x, seconds=0.0)
    slow = ChainTier(store(), CPU, choosing._PAGE_BYTES)
    found = []
    for actions in (list(store_all_schedule(len(stages))), choosing._travelling()):
        simulate(actions, None, held_by_caller(profile.costs), tiers=(FAST,))  # it is legal
        run = Run(stages, profile.traits, actions, slow)
        found += torch.autograd.grad(run.forward(x).sum(), x)
    plain = x
    for stage in stages:
        plain = stage(plain)
    found += torch.autograd.grad(plain.sum(), x)
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[2])
    assert sum(isinstance(a, Put) for a in choosing._travelling()) == len(stages)
    slow.close()
    before = torch.get_rng_state()
    with torch.device("meta"), torch.no_grad():
        assert 0 < choosing.hooks_s.__wrapped__() < 1
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tier_is_measured() -> None:
    slow = ChainTier(store(), CPU, 1 << 16)
    drawn = torch.get_rng_state()
    rates, slowdown = tiered._probed(slow, 1 << 20)
    assert torch.equal(torch.get_rng_state(), drawn)  # training draws as it would have
    assert rates.write_bytes_per_s > 1e5
    assert rates.read_bytes_per_s > 1e5
    assert slowdown >= 0
    slow.close()


def test_a_busy_machine_makes_no_tier_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of all rounds was multiplied by the mean time that other work took."""
    monkeypatch.setattr(tiered, "_PROBE_S", 0.01)
    monkeypatch.setattr(time, "thread_time", lambda: 1e-9 * time.perf_counter())  # hardly at all
    carried: list[tuple[Carried, Carried]] = []
    one_round = tiered._round
    monkeypatch.setattr(
        tiered, "_round", lambda *given: carried.append(one_round(*given)) or carried[-1]
    )
    slow = ChainTier(store(), CPU, 1 << 16)
    rates, _ = tiered._probed(slow, 1 << 20)
    for way, rate in enumerate((rates.write_bytes_per_s, rates.read_bytes_per_s)):
        assert rate <= max(each[way].bytes_per_s(0.0) or 0.0 for each in carried)
    slow.close()
    seen = Carried(8000, 1, 2.0)  # 4 kB/s
    assert tiered._seen(seen, 0.0, 8.0, 5000.0) == 5000.0  # as planned, as far as can be told
    assert tiered._seen(seen, 0.0, 8.0, 1e6) == 32_000.0
    assert tiered._seen(seen, 0.0, 8.0, 100.0) == 4000.0
    assert tiered._seen(seen, 0.5, 8.0, 6000.0) == 6000.0  # all of it may be latency
    assert tiered._seen(Carried(), 0.0, 8.0, 6000.0) is None


def test_measuring_a_tier_takes_no_more_than_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiered, "_PROBE_S", 0.01)
    limit = 1 << 20
    used = tiered.Tiered([store()])
    with Meter(CPU) as meter:
        used.measured(CPU, limit)
    assert meter.peak_bytes <= limit
    used.close()


@pytest.mark.usefixtures("fast_tiers")
def test_a_compiled_model_trains_with_a_tier() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(24, 24) for _ in range(8)])

        def forward(self, x: Tensor, scale: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + torch.sin(layer(x)) * scale
            return x

    torch.manual_seed(0)
    plain = Model()
    scale = torch.rand(24)
    expected = results(plain, lambda x: plain(x, scale), rows=4 * ROWS)
    model = mst.compile(plain, memory=0.5, tiers=store())
    assert same(results(model, lambda x: model(x, scale), rows=4 * ROWS), expected)
    model.close()


class _Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, 256))

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x * self.scale)


def test_parameters_given_other_memory_are_seen_as_by_autograd() -> None:
    def gradients(call: Callable[[Tensor], Tensor], model: nn.Module) -> list[Tensor]:
        y = call(torch.linspace(0, 1, 256).repeat(16, 1))
        for parameter in model.parameters():
            parameter.data = parameter.data * 2
        return list(torch.autograd.grad(y.sum(), list(model.parameters())))

    plain, ours = (nn.Sequential(*[_Scale() for _ in range(choosing._STAGES)]) for _ in range(2))
    names = [str(k) for k in range(len(ours))]
    traits = measure_stages(list(ours), names, torch.ones(16, 256), seconds=0.0).traits
    slow = ChainTier(store(), CPU, PAGE)
    run = Run(list(ours), traits, choosing._travelling(), slow)
    assert same(gradients(plain, plain), gradients(run.forward, ours))
    slow.close()
